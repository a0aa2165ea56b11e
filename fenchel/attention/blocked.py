"""Attention tile by tile, in O(T + S) memory, for every map and in plain PyTorch.

The square of scores is cut into tiles of whole rows (tiles.py). One tile is in memory at a time,
and keys that the prior forbids to all rows of a tile are never scored.

    forward         p_t = choice.weights(x_t),  o_t = p_t v, and one number nu per row is saved
    reverse         p_t, s_t from x_t and nu, then as in derivative.py, summed over tiles
    forward-mode    as in derivative.py; second derivatives: each tile by torch.func

so every derivative up to the second needs O(T + S) memory. The temperature is folded into the
queries before anything is cut, (beta scale q) k^T, and learns there. Dropout draws one seed from
torch's default generator, from which every tile draws its own mask, the same in both directions.

**One number per row.** For a map whose Omega is a sum of equal terms, the weights follow from one
number nu per row. With y = (alpha - 1) x for a Tsallis map and y = x for softmax (alpha = 1),

    Softmax      p = exp(y - nu)                                s = p
    Tsallis      u = (y - nu)_+ ,   p = u^(1 / (alpha - 1))     s = p^(2 - alpha) on the support

with s as in fenchel/choice/base.py: J = beta (diag(s) - s s^T / sum(s)). The largest score gives
nu: p_max = exp(y_max - nu), or (y_max - nu)^(1 / (alpha - 1)). So the backward pass rebuilds p and
s in two or three passes over a tile of scores, without solving again. A row with no open key has
p = 0 and nu = inf, from which p = s = 0 again. Functions that end in _ write into their arguments
and are not for tensors that autograd follows.

``_Attend`` is attention, ``_Reverse`` its reverse product: a function of its own, so that it has
derivatives too. Under vmap both run element by element. Under torch.compile the tiles are traced as
plain operations and the compiler differentiates them. torch.autocast is off in all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.functional import dropout as drop

from fenchel.attention.prior import ScoreBlock
from fenchel.attention.reference import cap, cap_slope, mix, score, without_autocast
from fenchel.attention.shapes import VmapByElement
from fenchel.attention.spec import AttentionSpec, exponent, select
from fenchel.attention.tiles import Tile, join_gradients, join_rows, score_tiles, tiles
from fenchel.choice import Choice

Function = Callable[..., Any]


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide) * spec.scale_for(q.shape[-1]), k.to(wide), v.to(wide)
    spec = replace(spec, scale=1.0)
    choice, softcap = spec.choice, spec.softcap
    if any(field.name == "beta" for field in fields(choice)):  # type: ignore[arg-type]
        if softcap is not None:  # beta c tanh(s / c) = (beta c) tanh(beta s / (beta c))
            softcap = softcap * float(choice.beta)
        q, choice = q * choice.beta, replace(choice, beta=1.0)  # type: ignore[type-var]
        spec = replace(spec, choice=choice, softcap=softcap)
    with without_autocast(q):
        if torch.compiler.is_compiling():
            call = _Call(spec, dropout, None)
            cut = tiles(q, k, spec.prior)
            pieces = (call.tile(t, q, k)(t.queries(q), t.items(k), t.items(v)) for t in cut)
            return join_rows(cut, pieces).to(dtype)
        seed = int(torch.randint(2**62, ())) if dropout else None
        call = _Call(spec, dropout, seed)
        out: Tensor = _Attend.apply(call, q, k, v, *spec.tensors())[0]  # type: ignore[no-untyped-call]
    return out.to(dtype)


def solve_rows_(x: Tensor, choice: Choice, alpha: float) -> tuple[Tensor, Tensor]:
    """(p, nu) for the scores x = beta z + log u, which it may overwrite: (..., K), (..., 1)."""
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
    return p, u.pow_((2.0 - alpha) * r)


@dataclass(frozen=True, eq=False)
class _Call:
    """What is fixed in a call; the tensors of ``spec`` are passed apart from it, to be followed."""

    spec: AttentionSpec
    """With scale 1 and beta 1: both are in the queries."""
    dropout: float
    seed: int | None

    def tile(self, tile: Tile, q: Tensor, k: Tensor) -> Function:
        """One tile as a differentiable function of its q, k, v and the tensors of the spec."""
        block = tile.block(q, k)

        def outputs(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            spec = self.spec.with_tensors(tensors)
            log_prior = None if spec.prior is None else spec.prior.dense(block, q.dtype)
            choice = select(spec.choice, tile.batch, tile.heads, tile.rows)
            p = choice.weights(cap(score(q, k, 1.0), spec.softcap), log_prior)
            return mix(self._with_dropout(p, block), v)

        return outputs

    def tile_jvp(
        self,
        tile: Tile,
        q: Tensor,
        k: Tensor,
        at: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
    ) -> Tensor:
        """The derivative of one tile along tangents of its q, k, v alone, as in derivative.py."""
        block = tile.block(q, k)
        (q_t, k_t, v_t, *tensors), (dq, dk, dv, *_) = at, tangents
        spec = self.spec.with_tensors(tensors)
        choice = select(spec.choice, tile.batch, tile.heads, tile.rows)
        log_prior = None if spec.prior is None else spec.prior.dense(block, q_t.dtype)
        z = cap(score(q_t, k_t, 1.0), spec.softcap)
        p = choice.weights(z, log_prior)
        terms = [] if dv is None else [mix(p, dv)]
        dz = [] if dq is None else [score(dq, k_t, 1.0)]
        dz += [] if dk is None else [score(q_t, dk, 1.0)]
        if dz:
            dz_sum, slope = sum(dz[1:], dz[0]), cap_slope(z, spec.softcap)
            dz_sum = dz_sum if slope is None else dz_sum * slope
            terms.append(mix(choice.jacobian_product(p, dz_sum), v_t))
        return sum(terms[1:], terms[0])

    def tile_vjp(self, tile: Tile, q: Tensor, k: Tensor, count: int) -> Function:
        """The first ``count`` gradients of one tile, as a differentiable function of g as well."""
        outputs = self.tile(tile, q, k)

        def gradients(g: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
            everything: tuple[Tensor, ...] = vjp(outputs, *at)[1](g)
            return everything[:count]

        return gradients

    def _with_dropout(self, p: Tensor, block: ScoreBlock) -> Tensor:
        if not self.dropout:
            return p
        if self.seed is None:  # traced: nothing is computed twice, so nothing has to agree
            return drop(p, self.dropout)
        place = hash((block.batch.start, block.heads.start, block.rows.start)) % 2**62
        generator = torch.Generator(p.device).manual_seed(self.seed ^ place)
        mask = torch.rand(p.shape, generator=generator, device=p.device) >= self.dropout
        return torch.where(mask, p / (1.0 - self.dropout), 0.0)


class _Attend(VmapByElement):
    """(o, nu) from q, k, v and the tensors of the spec."""

    @staticmethod
    def forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        spec = call.spec.with_tensors(tensors)
        alpha = None if call.dropout else exponent(spec.choice)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        nu = q.new_empty((0,) if alpha is None else (*q.shape[:3], 1))
        if alpha is None:
            for tile in tiles(q, k, spec.prior):
                at = _parts(tile, (q, k, v))
                tile.queries(out).copy_(call.tile(tile, q, k)(*at, *tensors))
            return out, nu
        for scored in score_tiles(q, k, spec):
            tile = scored.tile
            p, nu_t = solve_rows_(scored.add_log_prior_(), spec.choice, alpha)
            tile.queries(out).copy_(mix(p, tile.items(v)))
            tile.queries(nu).copy_(nu_t)
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
        with without_autocast(g):
            grads = _Reverse.apply(ctx.call, learns, g, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *grads, *((None,) * (len(ctx.needs_input_grad) - 1 - len(grads)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, None]:
        _, _, q, k, v, *tensors = ctx.saved_tensors
        cut = tiles(q, k, ctx.call.spec.prior)

        def pieces() -> Iterator[Tensor]:
            for tile in cut:
                at, tangent = (
                    (*_parts(tile, xs[:3]), *xs[3:]) for xs in ((q, k, v, *tensors), tangents)
                )
                if ctx.call.dropout or any(x is not None for x in tangents[3:]):
                    yield _jvp(ctx.call.tile(tile, q, k), at, tangent)
                else:
                    yield ctx.call.tile_jvp(tile, q, k, at, tangent)

        with without_autocast(q):
            return join_rows(cut, pieces()), None


class _Reverse(VmapByElement):
    """The gradients of <g, o> in q, k, v and, if they learn, in the tensors of the spec."""

    @staticmethod
    def forward(call: _Call, learns: bool, g: Tensor, out: Tensor, nu: Tensor, *at: Tensor) -> Any:
        q, k, v, *tensors = at
        if nu.numel() and not learns:
            return _reverse_from_nu(call.spec.with_tensors(tensors), g, out, nu, q, k, v)
        cut = tiles(q, k, call.spec.prior)
        count = len(at) if learns else 3
        grads = (
            call.tile_vjp(tile, q, k, count)(tile.queries(g), *_parts(tile, at[:3]), *tensors)
            for tile in cut
        )
        return join_gradients(cut, grads, k.shape[2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, _, *tensors = inputs
        ctx.count = len(output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        g, _, _, q, k, v, *tensors = ctx.saved_tensors
        cut = tiles(q, k, ctx.call.spec.prior)
        of_g: list[Tensor] = []

        def pieces() -> Iterator[Sequence[Tensor]]:
            for tile in cut:
                at = (tile.queries(g), *_parts(tile, (q, k, v)), *tensors)
                seed = (*_parts(tile, seeds[:3]), *seeds[3:])
                first, *rest = vjp(ctx.call.tile_vjp(tile, q, k, ctx.count), *at)[1](seed)
                of_g.append(first)
                yield rest

        with without_autocast(g):
            second = join_gradients(cut, pieces(), k.shape[2])
            return None, None, join_rows(cut, of_g), None, None, *second

    @staticmethod
    def jvp(ctx: Any, _call: None, _learns: None, *tangents: Tensor | None) -> Any:
        g, _, _, q, k, v, *tensors = ctx.saved_tensors
        dg, _, _, dq, dk, dv, *rest = tangents
        cut = tiles(q, k, ctx.call.spec.prior)

        def pieces() -> Iterator[Sequence[Tensor]]:
            for tile in cut:
                at = (tile.queries(g), *_parts(tile, (q, k, v)), *tensors)
                first = None if dg is None else tile.queries(dg)
                tangent = (first, *_parts(tile, (dq, dk, dv)), *rest)
                yield _jvp(ctx.call.tile_vjp(tile, q, k, ctx.count), at, tangent)

        with without_autocast(g):
            return join_gradients(cut, pieces(), k.shape[2])


def _reverse_from_nu(
    spec: AttentionSpec, g: Tensor, out: Tensor, nu: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in q, k, v with every large tensor written in place."""
    alpha = exponent(spec.choice)
    assert alpha is not None
    rise = 1.0 if alpha == 1.0 else alpha - 1.0
    softcap = None if spec.softcap is None else rise * spec.softcap
    gq, gk, gv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for scored in score_tiles(q, k, replace(spec, scale=rise, softcap=softcap)):
        tile = scored.tile
        q_t, k_t, v_t, g_t = tile.queries(q), tile.items(k), tile.items(v), tile.queries(g)
        slope = cap_slope(scored.z, softcap)
        y = scored.add_log_prior_(rise)
        p, s = recompute_rows_(y, tile.queries(nu), alpha, torch.empty_like(y))
        _add_mixed_(tile.items(gv), p, g_t)
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
        _add_mixed_(tile.items(gk), gx, q_t)
    return gq, gk, gv


def _parts(tile: Tile, qkv: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
    """The parts of q, k, v in a tile; None stays None."""
    q, k, v = qkv
    return (
        None if q is None else tile.queries(q),
        None if k is None else tile.items(k),
        None if v is None else tile.items(v),
    )


def _jvp(f: Function, at: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Any:
    """The derivative of f at ``at`` along the tangents that are not None.

    J dx is the gradient of <J^T u, dx> in u: two reverse products, since torch cannot begin a
    forward derivative inside another one.
    """
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def of_moving(*moved: Tensor) -> Any:
        args = list(at)
        for i, x in zip(moving, moved, strict=True):
            args[i] = x
        return f(*args)

    out, pull = vjp(of_moving, *(at[i] for i in moving))[:2]
    zero = tuple(map(torch.zeros_like, out)) if isinstance(out, tuple) else torch.zeros_like(out)
    push = vjp(pull, zero)[1]
    return push(tuple(tangents[i] for i in moving))[0]


def _add_mixed_(into: Tensor, p: Tensor, g: Tensor) -> None:
    """into += p^T g over the heads of each group: (b, g, s, E), (b, h, t, s), (b, h, t, E)."""
    b, G, S, E = into.shape
    left = p.reshape(b * G, -1, S).mT
    right = g.reshape(b * G, -1, E)
    if b == 1:
        into[0].baddbmm_(left, right)
    else:
        into.add_(torch.bmm(left, right).view_as(into))
