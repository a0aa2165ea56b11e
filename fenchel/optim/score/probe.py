"""A sample of what an attention layer reads, taken from the training pass itself.

A forward-pre-hook copies, of every forward pass that builds a gradient, the first few sequences of
the layer's input into room that was taken once, and remembers the rotation and mask that came with
them. Nothing of it outlives a step: each step's probe is that of its own last forward pass, so a
resumed run sees what an uninterrupted one saw. With activation checkpointing the hook runs twice on
the same input, with gradient accumulation the last part stays, and passes without gradients
(evaluation, generation) are not looked at.

Under torch.compile the hook is a part of the one graph. A fresh copy would be one more output of
it, which a compiler may make a view of the whole input, so that the input of every layer stayed in
memory until the step; a copy into room of our own cannot be one. All that is not needed to make
the copy waits until the sample is taken, outside of the graph.

What the layers of a stack read, side by side, and which pairs of positions are looked at.

Queries are sampled evenly over the positions, keys are all there. A sampled pair counts when it is
open: causal, within the window, and not masked. Where only the layers' own rules hold, the open
pairs are the same at every step and are kept; without any sample the inputs are taken as white:
the rows of the identity.

Shapes: L layers, n sequences, T positions, m sampled queries, M inputs (one more with a bias).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fenchel.attention import Angles
from fenchel.optim.score.pairs import QueryKeyPair


class LayerInput(NamedTuple):
    """What a layer read: n sequences, T positions."""

    x: Tensor
    """(n, T, M)."""
    angles: Angles | None
    """cos and sin, (T, W) or (1 or n, 1, T, W) each; None without rotary positions."""
    mask: Tensor | None
    """(n, T, T), True where a query may see a key; None where only the layer's own rule holds."""


class HookRecord(NamedTuple):
    """What the hook keeps beside the copy; cut to size when the sample is taken."""

    n: int
    T: int
    angles: Any
    """Angles, or (cos, sin) of (B, T, W) as in transformers."""
    mask: Tensor | None


class Probe:
    """The hook of one layer; ``take`` hands its sample over and forgets it."""

    def __init__(self, pair: QueryKeyPair, tokens: int) -> None:
        weight = pair.query.weight
        self.tokens, self.width = tokens, weight.shape[0 if pair.query.columns else 1]
        dtype = _probe_dtype(weight)
        self.room = torch.empty(tokens, self.width, dtype=dtype, device=weight.device)
        self.sample: Tensor | None = None
        self.seen: HookRecord | None = None
        self.handle = pair.module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Keep a sample of the arguments of a forward pass."""
        if not torch.is_grad_enabled():
            return
        values = [*args, *kwargs.values()]
        for value in values:
            if _is_stream(value, self.width):
                self._store(value, _rotation_argument(module, values), kwargs.get("attention_mask"))
                return

    def _store(self, x: Tensor, turn: Any, mask: Any) -> None:
        B, T, M = x.shape
        if B * T == 0:
            return
        T = min(T, self.tokens)
        n = min(B, max(1, self.tokens // T))
        if self.room.device != x.device:
            self.room, self.sample = self.room.to(x.device), None
        self.room[: n * T].view(n, T, M).copy_(x[:n, :T].detach())
        self.seen = HookRecord(n, T, turn, _crop_mask(mask, n, T))

    def take(self) -> LayerInput | None:
        """The sample of the last pass, once; it lies in the room that the next pass writes to."""
        if self.seen is None:
            return None
        n, T, turn, mask = self.seen
        self.seen = None
        if self.sample is None or self.sample.shape[:2] != (n, T):
            self.sample = self.room[: n * T].view(n, T, self.width)
        return LayerInput(self.sample, _angles(turn, n, T), _pairs_allowed(mask, n, T))

    def remove(self) -> None:
        """Watch no longer."""
        self.handle.remove()


def _probe_dtype(weight: Tensor) -> torch.dtype:
    """bfloat16 on a GPU, whose products of float32 are many times slower; else exact."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(weight.dtype, torch.float32)


def _is_stream(value: object, width: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[-1] == width


def _rotation_argument(module: torch.nn.Module, values: list[Any]) -> Any:
    """The rotation among the arguments: ours, or (cos, sin) as in transformers."""
    for value in values:
        if isinstance(value, Angles) or _cos_and_sin(value):
            return value
        if hasattr(value, "rotary"):  # our layers get all they share in one
            return value.rotary[1 if getattr(module, "local", False) else 0]
    return None


def _cos_and_sin(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(v, Tensor) and v.ndim == 3 for v in value)
    )


def _angles(turn: Any, n: int, T: int) -> Angles | None:
    """Of n sequences and T positions, as ours."""
    if turn is None:
        return None
    cos, sin = turn
    if not isinstance(turn, Angles):
        cos, sin = (part[:n, :T].unsqueeze(1) for part in (cos, sin))
        half = sin.shape[-1] // 2  # ours carry the sign of the first half in the sine
        return Angles(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))
    if cos.ndim == 4:
        cos, sin = (part[:n] for part in (cos, sin))
    if cos.shape[-2] > T:
        cos, sin = (part[..., :T, :] for part in (cos, sin))
    return Angles(cos, sin)


def _crop_mask(mask: object, n: int, T: int) -> Tensor | None:
    """Of a mask of keys (B, T) or of pairs (B, 1, T, T) the part that is needed, as a copy."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    return mask[:n, ..., :T].detach().clone() if mask.ndim == 2 else _pair_mask(mask, n, T)


def _pair_mask(mask: Tensor, n: int, T: int) -> Tensor:
    cut = mask[:n, 0, :T, :T].detach()
    return cut.clone() if cut.dtype == torch.bool else cut > -1e4  # added to scores: 0 or very low


def _pairs_allowed(mask: Tensor | None, n: int, T: int) -> Tensor | None:
    """True where open, (n, T, T)."""
    if mask is None or mask.ndim == 3:
        return None if mask is None else mask.expand(n, T, T)
    real = mask.to(torch.bool)
    return (real.unsqueeze(1) & real.unsqueeze(2)).expand(n, T, T)


QUERIES = 64
"""Sampled queries of a sequence."""


class PositionGrid(NamedTuple):
    """The pairs of positions that are looked at."""

    queries: Tensor
    """Positions of the sampled queries, (m,)."""
    open: Tensor
    """(L or 1, n or 1, 1, m, T), True where a sampled query may see a key."""
    pair_weight: Tensor
    """One over the number of open pairs of all sequences: (L or 1, 1)."""


class StackInput(NamedTuple):
    """The inputs of the layers of a stack."""

    x: Tensor
    """(L, n, T, M)."""
    angles: Angles | None
    """(L or 1, 1 or n, 1, T, W) each."""
    grid: PositionGrid
    real: bool = True
    """False for the identity that stands in for a sample."""


def sample(
    pairs: Sequence[QueryKeyPair],
    seen: Sequence[LayerInput | None],
    grids: dict[Any, PositionGrid] | None = None,
) -> StackInput:
    """The probes of equal layers side by side; what needs no new look is kept in ``grids``."""
    grids = {} if grids is None else grids
    present = [s for s in seen if s is not None]
    if len(present) < len(pairs):
        return _white_input(pairs, grids)
    x = torch.stack([s.x for s in present])
    if pairs[0].query.bias is not None:
        x = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
    rules = [(pair.causal, pair.window) for pair in pairs]
    rules = rules[:1] if len(set(rules)) == 1 else rules
    n, T = x.shape[1:3]
    key = (*rules, n, T, x.device, x.dtype)
    if key not in grids:
        grids[key] = _position_grid(rules, x)
    grid = grids[key]
    masks = [s.mask[:, grid.queries] for s in present if s.mask is not None]
    if masks:
        open_ = grid.open & torch.stack(masks).unsqueeze(2)
        grid = PositionGrid(grid.queries, open_, _pair_weight(open_, 1, x.dtype))
    return StackInput(x, _stack_angles(present), grid)


def _position_grid(rules: list[tuple[bool, int | None]], x: Tensor) -> PositionGrid:
    n, T, device = *x.shape[1:3], x.device
    m = min(T, QUERIES)
    queries = ((torch.arange(m, device=device) + 0.5) * (T / m)).long()
    distance = queries.unsqueeze(1) - torch.arange(T, device=device)
    opened = []
    for causal, window in rules:
        open_ = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        opened.append(open_ if window is None else open_ & (distance.abs() < window))
    all_open = torch.stack(opened)[:, None, None]
    return PositionGrid(queries, all_open, _pair_weight(all_open, n, x.dtype))


def _pair_weight(open_: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    pairs = times * open_.sum(dim=(1, 3, 4)).clamp(min=1)
    return pairs.to(torch.promote_types(dtype, torch.float32)).reciprocal()


def _white_input(pairs: Sequence[QueryKeyPair], grids: dict[Any, PositionGrid]) -> StackInput:
    first = pairs[0].query
    M = first.weight.shape[0 if first.columns else 1] + (first.bias is not None)
    exact = torch.promote_types(first.weight.dtype, torch.float32)
    x = torch.eye(M, dtype=exact, device=first.weight.device).expand(len(pairs), 1, M, M)
    key = ("white", M, x.device, exact)
    if key not in grids:
        everything = torch.ones(1, 1, 1, M, M, dtype=torch.bool, device=x.device)
        share = _pair_weight(everything, 1, exact)
        grids[key] = PositionGrid(torch.arange(M, device=x.device), everything, share)
    return StackInput(x, None, grids[key], real=False)


def _stack_angles(seen: Sequence[LayerInput]) -> Angles | None:
    turns = [s.angles for s in seen if s.angles is not None]
    if not turns:
        return None
    if all(_same_memory(turns[0].cos, turn.cos) for turn in turns):
        turns = turns[:1]  # one table for all layers
    cos, sin = (
        torch.stack([part if part.ndim == 4 else part[None, None] for part in parts])
        for parts in zip(*turns, strict=True)
    )
    return Angles(cos, sin)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are one piece of memory, seen alike."""
    where = [(t.data_ptr(), t.shape, t.stride()) for t in (one, other)]
    return one is other or (where[0] == where[1] and not one.is_meta)


def mean_over_processes(x: Tensor) -> Tensor:
    """``x`` itself in a run of one process, else its mean over all of them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
