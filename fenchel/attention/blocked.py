"""Rows of scores chosen once, and chosen again from one saved number a row.

For a map whose Omega is a sum of equal terms, the weights follow from one number nu a row. With
y = (alpha - 1) x for a Tsallis map and y = x for softmax (alpha = 1),

    Softmax      p = exp(y - nu)                                s = p
    Tsallis      u = (y - nu)_+ ,   p = u^(1 / (alpha - 1))     s = p^(2 - alpha) on the support

with s as in fenchel/choice/base.py: J = beta (diag(s) - s s^T / sum(s)). The largest score shows
nu: p_max = exp(y_max - nu), or (y_max - nu)^(1 / (alpha - 1)). So a backward pass that kept nu and
not p rebuilds p and s in two or three passes over a block of scores, without solving again.

A row with no open key gets p = 0 and nu = inf, from which p = s = 0 again. What ends in _ writes
into what it is given and must not be seen by autograd.

Attention block by block, in O(n) memory, for every map and in plain PyTorch.

The square of scores is cut into tiles of whole rows (tiles.py); no tile outlives its turn, and keys
that the prior forbids to all rows of a tile are never looked at.

    forward    p_t = choice.weights(x_t),  o_t = p_t v           keeps one number nu a row (rows.py)
    reverse    p_t, s_t from x_t and nu, then as in derivative.py, summed over tiles
    forward-mode as in derivative.py; second derivatives: each tile by torch.func on its definition

so every derivative up to the second needs O(n) memory. The temperature joins the queries before
anything is cut (beta scale q) k^T, and learns there. Dropout draws one seed from torch's default
generator, from which every tile draws its own mask, the same in both directions.

``_Attend`` is attention, ``_Reverse`` its reverse product: a function of its own, so that it has
derivatives too. Under vmap both go element by element, which is how they work anyway. Under
torch.compile the tiles are traced as plain operations and the compiler differentiates them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import dropout as drop
from torch.utils._pytree import tree_map

from fenchel.attention.prior import Block, Prior
from fenchel.attention.reference import cap, cap_slope, mix, score
from fenchel.attention.tiles import Tile, join_gradients, join_rows, tiles
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax


def exponent(choice: Choice) -> float | None:
    """alpha, with 1 for softmax; None for a map whose rows do not follow from one number.

    Close to softmax a Tsallis row does not either: u^(1 / (alpha - 1)) loses too many digits.
    """
    if isinstance(choice, Softmax):
        return 1.0
    if isinstance(choice, Sparsemax):
        return 2.0
    if isinstance(choice, Entmax) and not isinstance(choice.alpha, Tensor):
        return float(choice.alpha) if choice.alpha >= 1.05 else None
    return None


def solve_rows_(x: Tensor, choice: Choice, alpha: float) -> tuple[Tensor, Tensor]:
    """(p, nu) for the scores x = beta z + log u, which may be overwritten: (..., K), (..., 1)."""
    if x.shape[-1] == 0:
        return x, x.new_full((*x.shape[:-1], 1), torch.inf)
    top = x.amax(-1, keepdim=True)
    empty = top == -torch.inf
    if alpha == 1.0:
        top = top.masked_fill(empty, 0.0)
        p = x.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        nu = top + total.log()
        p.div_(total.masked_fill_(empty, 1.0))
    else:
        p = choice.choose(x)
        nu = (alpha - 1.0) * top - p.amax(-1, keepdim=True).pow(alpha - 1.0)
    return p, nu.masked_fill(empty, torch.inf)


def recompute_rows_(y: Tensor, nu: Tensor, alpha: float, work: Tensor) -> tuple[Tensor, Tensor]:
    """(p, s) from y and the saved nu, in the memory of y and ``work``."""
    y.sub_(nu)
    if alpha == 1.0:
        p = y.exp_()
        return p, p
    u = y.clamp_(min=0.0)
    if alpha == 1.5:
        return torch.mul(u, u, out=work), u
    if alpha == 2.0:
        return u, torch.sign(u, out=work)
    r = 1.0 / (alpha - 1.0)
    p = torch.pow(u, r, out=work)
    if alpha > 2.0:  # a negative power: 0 must stay 0
        u.masked_fill_(u == 0.0, torch.inf)
    return p, u.pow_((2.0 - alpha) * r)


Function = Callable[..., Any]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    dropout: float,
    softcap: float | None = None,
) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
    if any(field.name == "beta" for field in fields(choice)):  # type: ignore[arg-type]
        if softcap is not None:  # beta c tanh(s / c) = (beta c) tanh(beta s / (beta c))
            softcap = softcap * float(choice.beta)
        q, choice = q * choice.beta, replace(choice, beta=1.0)  # type: ignore[type-var]
    if torch.compiler.is_compiling():
        call = Call(choice, prior, dropout, None, softcap)
        cut = tiles(q, k, prior)
        out = join_rows(cut, (call.one(t, q, k)(t.queries(q), t.items(k), t.items(v)) for t in cut))
        return out.to(dtype)
    seed = int(torch.randint(2**62, ())) if dropout else None
    call = Call(choice, prior, dropout, seed, softcap)
    out = _Attend.apply(call, q, k, v, *call.tensors())[0]  # type: ignore[no-untyped-call]
    narrowed: Tensor = out.to(dtype)
    return narrowed


@dataclass(frozen=True, eq=False)
class Call:
    """What stays fixed in a call: map and prior, whose tensors come apart, dropout, cap."""

    choice: Choice
    prior: Prior | None
    dropout: float
    seed: int | None
    softcap: float | None

    def tensors(self) -> tuple[Tensor, ...]:
        """What may learn besides q, k and v."""
        alpha = getattr(self.choice, "alpha", None)
        own = (alpha,) if isinstance(alpha, Tensor) else ()
        return (*own, *(self.prior.tensors() if self.prior is not None else ()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Call":
        """The same call with other numbers in place of ``tensors()``."""
        if not tensors:
            return self
        left, choice, prior = list(tensors), self.choice, self.prior
        if isinstance(choice, Entmax) and isinstance(choice.alpha, Tensor):
            choice = replace(choice, alpha=left.pop(0))
        if prior is not None:
            prior = prior.with_tensors(left)
        return replace(self, choice=choice, prior=prior)

    def one(self, tile: Tile, q: Tensor, k: Tensor) -> Function:
        """One tile as a differentiable function of its q, k, v and the tensors of the call."""
        block = tile.block(q, k)

        def piece(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            call = self.with_tensors(tensors)
            log_prior = None if call.prior is None else call.prior.dense(block, q.dtype)
            p = _part(call.choice, block).weights(cap(score(q, k, 1.0), self.softcap), log_prior)
            return mix(call._dropped(p, block), v)

        return piece

    def moved(
        self, tile: Tile, q: Tensor, k: Tensor, at: Sequence[Tensor], moves: Sequence[Tensor | None]
    ) -> Tensor:
        """The derivative of one tile along moves of its q, k, v alone, as in derivative.py."""
        block = tile.block(q, k)
        (q_t, k_t, v_t, *tensors), (dq, dk, dv, *_) = at, moves
        call = self.with_tensors(tensors)
        choice = _part(call.choice, block)
        log_prior = None if call.prior is None else call.prior.dense(block, q_t.dtype)
        z = cap(score(q_t, k_t, 1.0), self.softcap)
        p = choice.weights(z, log_prior)
        terms = [] if dv is None else [mix(p, dv)]
        dz = [] if dq is None else [score(dq, k_t, 1.0)]
        dz += [] if dk is None else [score(q_t, dk, 1.0)]
        if dz:
            move, slope = sum(dz[1:], dz[0]), cap_slope(z, self.softcap)
            move = move if slope is None else move * slope
            terms.append(mix(choice.jacobian_product(p, move), v_t))
        return sum(terms[1:], terms[0])

    def pulled(self, tile: Tile, q: Tensor, k: Tensor, count: int) -> Function:
        """The first ``count`` gradients of one tile, as a differentiable function of g as well."""
        piece = self.one(tile, q, k)

        def back(g: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = vjp(piece, *at)[1](g)
            return found[:count]

        return back

    def _dropped(self, p: Tensor, block: Block) -> Tensor:
        if not self.dropout:
            return p
        if self.seed is None:  # traced: nothing is computed twice, so nothing has to agree
            return drop(p, self.dropout)
        place = hash((block.batch.start, block.heads.start, block.rows.start)) % 2**62
        generator = torch.Generator(p.device).manual_seed(self.seed ^ place)
        kept = torch.rand(p.shape, generator=generator, device=p.device) >= self.dropout
        return torch.where(kept, p / (1.0 - self.dropout), 0.0)


class _Attend(torch.autograd.Function):
    """(o, nu) from q, k, v and the tensors of the call."""

    @staticmethod
    def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        call = call.with_tensors(tensors)
        alpha = None if call.dropout else exponent(call.choice)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        nu = q.new_empty((0,) if alpha is None else (*q.shape[:3], 1))
        cut = tiles(q, k, call.prior)
        log_prior = _LogPrior(call.prior, q, k)
        for tile in cut:
            q_t, k_t, v_t = tile.queries(q), tile.items(k), tile.items(v)
            if alpha is None:
                tile.queries(out).copy_(call.one(tile, q, k)(q_t, k_t, v_t, *tensors))
                continue
            x = log_prior.add_(cap(score(q_t, k_t, 1.0), call.softcap), tile)
            p, found = solve_rows_(x, call.choice, alpha)
            tile.queries(out).copy_(mix(p, v_t))
            tile.queries(nu).copy_(found)
        return out, nu

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)
        ctx.save_for_forward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor | None) -> Any:
        learns = any(ctx.needs_input_grad[4:])
        found = _Reverse.apply(ctx.call, learns, g, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *found, *((None,) * (len(ctx.needs_input_grad) - 1 - len(found)))

    @staticmethod
    def jvp(ctx: Any, _: None, *moves: Tensor | None) -> tuple[Tensor, None]:
        _, _, q, k, v, *tensors = ctx.saved_tensors
        cut = tiles(q, k, ctx.call.prior)

        def pieces() -> Iterator[Tensor]:
            for tile in cut:
                at, move = ((*_apart(tile, xs[:3]), *xs[3:]) for xs in ((q, k, v, *tensors), moves))
                if ctx.call.dropout or any(x is not None for x in moves[3:]):
                    yield _tangent(ctx.call.one(tile, q, k), at, move)
                else:
                    yield ctx.call.moved(tile, q, k, at, move)

        return join_rows(cut, pieces()), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return _each(_Attend, info.batch_size, in_dims, args)


class _Reverse(torch.autograd.Function):
    """The gradients of <g, o> in q, k, v and, if they learn, in the tensors of the call."""

    @staticmethod
    def forward(call: Call, learns: bool, g: Tensor, out: Tensor, nu: Tensor, *at: Tensor) -> Any:
        q, k, v, *tensors = at
        if nu.numel() and not learns:
            return _quick_reverse(call.with_tensors(tensors), g, out, nu, q, k, v)
        cut = tiles(q, k, call.prior)
        count = len(at) if learns else 3
        found = (
            call.pulled(tile, q, k, count)(tile.queries(g), *_apart(tile, at[:3]), *tensors)
            for tile in cut
        )
        return join_gradients(cut, found, k.shape[2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, _, *tensors = inputs
        ctx.count = len(output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        g, _, _, q, k, v, *tensors = ctx.saved_tensors
        cut = tiles(q, k, ctx.call.prior)
        of_g: list[Tensor] = []

        def found() -> Iterator[Sequence[Tensor]]:
            for tile in cut:
                at = (tile.queries(g), *_apart(tile, (q, k, v)), *tensors)
                seed = (*_apart(tile, seeds[:3]), *seeds[3:])
                one, *rest = vjp(ctx.call.pulled(tile, q, k, ctx.count), *at)[1](seed)
                of_g.append(one)
                yield rest

        second = join_gradients(cut, found(), k.shape[2])
        return None, None, join_rows(cut, of_g), None, None, *second

    @staticmethod
    def jvp(ctx: Any, _call: None, _learns: None, *moves: Tensor | None) -> Any:
        g, _, _, q, k, v, *tensors = ctx.saved_tensors
        dg, _, _, dq, dk, dv, *rest = moves
        cut = tiles(q, k, ctx.call.prior)

        def found() -> Iterator[Sequence[Tensor]]:
            for tile in cut:
                at = (tile.queries(g), *_apart(tile, (q, k, v)), *tensors)
                first = None if dg is None else tile.queries(dg)
                move = (first, *_apart(tile, (dq, dk, dv)), *rest)
                yield _tangent(ctx.call.pulled(tile, q, k, ctx.count), at, move)

        return join_gradients(cut, found(), k.shape[2])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return _each(_Reverse, info.batch_size, in_dims, args)


def _quick_reverse(
    call: Call, g: Tensor, out: Tensor, nu: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in q, k, v with every large tensor written in place."""
    alpha = exponent(call.choice)
    assert alpha is not None
    rise = 1.0 if alpha == 1.0 else alpha - 1.0
    gq, gk, gv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    log_prior = _LogPrior(call.prior, q, k)
    for tile in tiles(q, k, call.prior):
        q_t, k_t, v_t, g_t = tile.queries(q), tile.items(k), tile.items(v), tile.queries(g)
        z, slope = score(q_t, k_t, rise), None
        if call.softcap is not None:
            z = cap(z, rise * call.softcap)
            slope = cap_slope(z, rise * call.softcap)
        y = log_prior.add_(z, tile, rise)
        p, s = recompute_rows_(y, tile.queries(nu), alpha, torch.empty_like(y))
        _add_pulled_(tile.items(gv), p, g_t)
        gx = mix(g_t, v_t.mT)  # the gradient of the weights, about to become that of the scores
        if alpha == 1.0:  # sum_j p_j <g, v_j> = <g, o>
            mean = torch.linalg.vecdot(g_t, tile.queries(out)).unsqueeze(-1)
        else:
            total = s.sum(-1, keepdim=True)
            mean = torch.linalg.vecdot(s, gx).unsqueeze(-1) / total.masked_fill_(total == 0.0, 1.0)
        gx.sub_(mean).mul_(s)
        if slope is not None:
            gx.mul_(slope)
        tile.queries(gq).copy_(mix(gx, k_t))
        _add_pulled_(tile.items(gk), gx, q_t)
    return gq, gk, gv


class _LogPrior:
    """Adds log u to tiles of scores in place, only where it is not 0; remembers the last one."""

    def __init__(self, prior: Prior | None, q: Tensor, k: Tensor) -> None:
        self.prior, self.q, self.k = prior, q, k
        self.last: tuple[object, Tensor] | None = None

    def add_(self, x: Tensor, tile: Tile, factor: float = 1.0) -> Tensor:
        """x (b, h, t, s) with factor * log u added."""
        if self.prior is None:
            return x
        T, S = self.q.shape[2], self.k.shape[2]
        rows, keys = tile.rows, tile.keys
        low, high = self.prior.zero_range(rows.start + S - T, rows.stop - 1 + S - T, S)
        low, high = max(low, keys.start), min(high, keys.stop)
        sides = [keys] if low >= high else [slice(keys.start, low), slice(high, keys.stop)]
        for side in sides:
            if side.start < side.stop:
                log_u = self._dense(tile._replace(keys=side))
                there = x[..., side.start - keys.start : side.stop - keys.start]
                there.add_(log_u, alpha=factor)
        return x

    def _dense(self, tile: Tile) -> Tensor:
        assert self.prior is not None
        where = (tile.rows.start, tile.rows.stop, tile.keys.start, tile.keys.stop)
        if self.last is not None and self.last[0] == where:
            return self.last[1]
        log_u = self.prior.dense(tile.block(self.q, self.k), self.q.dtype)
        if not self.prior.varies():
            self.last = where, log_u  # every head of every sequence has the same
        return log_u


def _part(choice: Choice, block: Block) -> Choice:
    """The map for a tile: an alpha that differs between rows is cut with them."""
    if isinstance(choice, Entmax) and isinstance(choice.alpha, Tensor) and choice.alpha.dim():
        alpha = choice.alpha[(None,) * (4 - choice.alpha.dim())]
        return replace(choice, alpha=block.cut(alpha))
    return choice


def _apart(tile: Tile, qkv: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
    q, k, v = qkv
    return (
        None if q is None else tile.queries(q),
        None if k is None else tile.items(k),
        None if v is None else tile.items(v),
    )


def _tangent(f: Function, at: Sequence[Tensor], moves: Sequence[Tensor | None]) -> Any:
    """The derivative of f at ``at`` along the moves that are not None.

    J dx is the gradient of <J^T u, dx> in u: two reverse products, since torch cannot begin a
    forward derivative inside another one.
    """
    moving = [i for i, move in enumerate(moves) if move is not None]

    def of_moving(*moved: Tensor) -> Any:
        args = list(at)
        for i, x in zip(moving, moved, strict=True):
            args[i] = x
        return f(*args)

    out, pull = vjp(of_moving, *(at[i] for i in moving))[:2]
    push = vjp(pull, tree_map(torch.zeros_like, out))[1]
    return push(tuple(moves[i] for i in moving))[0]


def _each(function: Any, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
    """A vmap rule: one element after another, then stacked."""
    outs = [
        function.apply(
            *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
        )
        for i in range(size)
    ]
    stacked = tuple(torch.stack(x) for x in zip(*outs, strict=True))
    return stacked, (0,) * len(stacked)


def _add_pulled_(into: Tensor, p: Tensor, g: Tensor) -> None:
    """into += p^T g over the heads of each group: (b, g, s, E), (b, h, t, s), (b, h, t, E)."""
    b, G, S, E = into.shape
    left = p.reshape(b * G, -1, S).mT
    right = g.reshape(b * G, -1, E)
    if b == 1:
        into[0].baddbmm_(left, right)
    else:
        into.add_(torch.bmm(left, right).view_as(into))
