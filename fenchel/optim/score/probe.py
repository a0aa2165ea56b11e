"""Samples of the inputs of attention layers, taken from the training pass itself.

A ``Probe`` is a forward-pre-hook on one layer. Of every forward pass that builds a gradient it
copies the first few sequences of the layer's input into a buffer that is allocated once, and keeps
a reference to the rotary angles and the mask that came with them. A pass counts when its backward
pass reaches the weights: a hook on the gradient of one of them marks it. The sample of a step has
an equal share of every pass that counts since gradients were last None, ``tokens`` tokens in all,
so that with gradient accumulation every micro-batch is measured; where one sequence of each would
be too many, of every second, every fourth, ... micro-batch, and the last. With a single pass its
buffer is the sample. Passes without a backward pass (evaluation, generation) are ignored, and a
sample is discarded after its step, so a resumed run measures the same numbers as an uninterrupted
one. Where gradients were set by hand, the last pass is the sample. A layer that is called several
times in one pass, such as one that layers share, is measured at its last call. A pass that is run
again inside the backward pass (activation checkpointing) has been sampled, and is ignored; when
compiled, where it is the same graph, it copies the same input again, and of a layer that is called
several times the first one.

Under torch.compile the hook is part of the one graph. A fresh copy would be one more output of that
graph, which the compiler may turn into a view of the whole input, so that the input of every layer
would stay in memory until the step; a copy into a preallocated buffer cannot become one. Whatever
is not needed for the copy is computed outside of the graph: what an earlier pass left in the buffer
is copied out before the next pass overwrites it, by the next call of the hook or, when compiled, by
the hook on the gradient.

``stack_inputs`` puts the samples of equal layers side by side and decides which pairs of positions
count. Queries are sampled evenly over the positions, and all keys are used. A pair (i, j) counts
when query i may attend to key j: causal, within the window, not masked. Where only the rules of the
layer itself apply, these pairs are the same in every step and are cached. Without any sample the
inputs are taken as white: the rows of the identity.

Shapes: L layers, n sequences, T positions, m sampled queries, M inputs (one more with a bias).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fenchel.attention import Angles
from fenchel.optim.score.pairs import LayerArguments, QueryKeyLayer, QueryKeyPair
from fenchel.torch_internals import in_backward_pass

QUERIES = 64
"""Sampled queries per sequence."""


class LayerInput(NamedTuple):
    """The sampled input of one layer: n sequences, T positions."""

    x: Tensor
    """(n, T, M)."""
    angles: Angles | None
    """cos and sin, (T, W) or (1 or n, 1, T, W) each; None without rotary positions."""
    mask: Tensor | None
    """(n, T, T), True where a query may attend to a key; None where only its rule applies."""


class HookRecord(NamedTuple):
    """What the hook keeps with the copy; it is cropped when the sample is taken."""

    n: int
    T: int
    angles: Any
    """Angles, or (cos, sin) of (B, T, W) as in transformers."""
    mask: Tensor | None
    compiled: bool


class FirstPass:
    """Tells a forward pass from its repetition inside the backward pass."""

    sampled = False
    """Whether the last pass was sampled."""

    def counts(self) -> bool:
        """Whether to sample the pass under way: it builds a gradient and repeats no sampled one.

        Reentrant checkpointing runs the first pass without a gradient: there the second one counts.
        While compiling every pass does: a graph without the copy would be another one than that of
        the first pass.
        """
        if torch.compiler.is_compiling():
            return torch.is_grad_enabled()
        repeated = self.sampled and in_backward_pass()
        self.sampled = torch.is_grad_enabled()
        return self.sampled and not repeated


class LayerReader:
    """A forward-pre-hook that finds the input of one layer among its arguments."""

    handles: list[Any]

    def __init__(self, pair: QueryKeyPair, tokens: int) -> None:
        self.tokens, self.passes_seen = tokens, FirstPass()
        self.name, self.read = pair.name, pair.read or self._read
        self.width = pair.query.weight.shape[0 if pair.query.columns else 1]
        layer = pair.module
        self.rotary_index = int(isinstance(layer, QueryKeyLayer) and layer.local)
        self.rotates = getattr(layer, "rotates", True)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Store a sample of the arguments of a forward pass."""
        del module
        if not self.passes_seen.counts():
            return
        given = self.read(args, kwargs)
        if given is not None:
            self._store(*given)

    def _store(self, x: Tensor, angles: Any, mask: Any) -> None:
        raise NotImplementedError

    def take(self) -> LayerInput | None:
        """The sample of the step, once."""
        raise NotImplementedError

    def replayed(self) -> Callable[[], None]:
        """A function that restores the record of a captured pass after a replay of its graph."""
        raise NotImplementedError

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerArguments | None:
        """The first stream (B, T, M) among the arguments, with its angles and mask."""
        if kwargs.get("key_value_states") is not None:
            raise ValueError(
                f"{self.name} receives keys of another stream (cross-attention), which has no "
                "pair; leave it out of the pairs."
            )
        values = [*args, *kwargs.values()]
        for value in values:
            if _is_stream(value, self.width):
                mask = kwargs.get("attention_mask", _mask_among(values))
                return LayerArguments(value, self._angles_among(values), mask)
        return None

    def _angles_among(self, values: list[Any]) -> Any:
        """The rotary angles among the arguments: ours, or (cos, sin) as in transformers."""
        for value in values:
            if isinstance(value, Angles) or _is_cos_and_sin(value):
                return value
            if hasattr(value, "rotary"):  # the ForwardContext of fenchel.model
                return value.rotary[self.rotary_index] if self.rotates else None
        return None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def _mask_among(values: list[Any]) -> Tensor | None:
    """The pairs of one document, (B, 1, T, T), where a ForwardContext numbers several of a row."""
    for value in values:
        if hasattr(value, "segments"):  # no value after it: torch.compile may have numbers there
            if (segments := value.segments) is None:
                return None
            same: Tensor = segments[:, None, :, None] == segments[:, None, None, :]
            return same
    return None


class Probe(LayerReader):
    """The hooks of one layer; ``take`` returns its sample once."""

    def __init__(self, pair: QueryKeyPair, tokens: int) -> None:
        super().__init__(pair, tokens)
        weight, layer = pair.query.weight, pair.module
        dtype = probe_dtype(weight)
        self.buffer = torch.empty(tokens, self.width, dtype=dtype, device=weight.device)
        self.view: Tensor | None = None
        self.record: HookRecord | None = None
        self._forget()
        self.handles = [layer.register_forward_pre_hook(self, with_kwargs=True)]
        trained = [p for p in (*pair.parameters, *pair.gains.values()) if p.requires_grad]
        if trained:
            handle = trained[0].register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
            self.handles.append(handle)

    def _forget(self) -> None:
        """Drop the samples of all passes that count."""
        self.gradient: weakref.ref[Tensor] | None = None
        self.counted: HookRecord | None = None
        self.copy: LayerInput | None = None
        self.earlier: list[LayerInput] = []
        self.passes, self.stride = 0, 1

    def _store(self, x: Tensor, angles: Any, mask: Any) -> None:
        B, T, M = x.shape
        if B * T == 0:
            return
        compiled = torch.compiler.is_compiling()
        if not compiled and self.record is not None and self.counted is self.record:
            self._add(self.copy or _copied(self._buffered(self.record)))
            self.copy = None
        T = min(T, self.tokens)
        n = min(B, max(1, self.tokens // T))
        if self.buffer.device != x.device:
            self.buffer, self.view = self.buffer.to(x.device), None
        self.buffer[: n * T].view(n, T, M).copy_(x[:n, :T].detach())
        self.record = HookRecord(n, T, angles, _crop_mask(mask, n, T), compiled)

    def _count(self, weight: Tensor) -> None:
        """After a backward pass has reached ``weight``: the last forward pass counts."""
        if self.gradient is None or self.gradient() is not weight.grad:
            self._forget()  # the gradients were None before this pass
            self.gradient = None if weight.grad is None else weakref.ref(weight.grad)
        if self.record is None or self.counted is self.record:
            return
        if self.copy is not None:
            self._add(self.copy)
        self.counted = self.record
        self.copy = _copied(self._buffered(self.record)) if self.record.compiled else None

    def _add(self, sample: LayerInput) -> None:
        """Add the sample of a pass to ``earlier``, which holds ``tokens`` tokens at most."""
        if self.passes % self.stride == 0:
            self.earlier.append(sample)
        self.passes += 1
        while len(self.earlier) > 1 and sum(s.x.shape[1] for s in self.earlier) > self.tokens:
            self.earlier, self.stride = self.earlier[::2], 2 * self.stride
        shares = zip(_equal_shares(self.earlier, self.tokens), self.earlier, strict=True)
        self.earlier = [s if s is whole else _copied(s) for s, whole in shares]

    def _buffered(self, record: HookRecord) -> LayerInput:
        n, T, angles, mask, _ = record
        if self.view is None or self.view.shape[:2] != (n, T):
            self.view = self.buffer[: n * T].view(n, T, self.width)
        return LayerInput(self.view, crop_angles(angles, n, T), _pair_mask(mask, n, T))

    def replayed(self) -> Callable[[], None]:
        """A function that restores the record of a captured pass; replays write where it wrote."""
        record, counted, copy = self.record, self.counted, self.copy

        def leave() -> None:
            self._forget()
            self.record, self.counted, self.copy = record, counted, copy

        return leave

    def take(self) -> LayerInput | None:
        """The sample of the step, once; the next pass overwrites its memory."""
        record, samples, last = self.record, self.earlier, self.copy
        if record is not None and (self.counted is record or not (samples or last)):
            last = self._buffered(record)
        self.record = None
        self._forget()
        samples = samples if last is None else [*samples, last]
        return _join(_equal_shares(samples, self.tokens)) if samples else None


def _copied(sample: LayerInput) -> LayerInput:
    """A copy of the sample; rotary angles are computed anew in every pass."""
    return sample._replace(x=sample.x.clone())


def _equal_shares(samples: list[LayerInput], tokens: int) -> list[LayerInput]:
    """The first sequences of each sample, ``tokens`` tokens in all, but at least one of each."""
    shares = []
    for sample in samples:
        n = max(1, tokens // (len(samples) * sample.x.shape[1]))
        if n < len(sample.x):
            x, angles, mask = sample
            if angles is not None and angles.cos.ndim == 4:
                angles = Angles(*(part[:n] for part in angles))
            sample = LayerInput(x[:n], angles, None if mask is None else mask[:n])
        shares.append(sample)
    return shares


def _join(samples: list[LayerInput]) -> LayerInput:
    """The sequences of all samples as one; shorter ones are padded, and the padding is masked."""
    if len(samples) == 1:
        return samples[0]
    T = max(sample.x.shape[1] for sample in samples)
    x = torch.cat([pad(s.x, (0, 0, 0, T - s.x.shape[1])) for s in samples])
    mask = None
    if any(s.mask is not None or s.x.shape[1] < T for s in samples):
        mask = torch.cat([_padded_mask(s, T) for s in samples])
    return LayerInput(x, _joined_angles(samples, T), mask)


def _padded_mask(sample: LayerInput, T: int) -> Tensor:
    n, t = sample.x.shape[:2]
    mask = sample.mask
    if mask is None:
        mask = torch.ones(n, t, t, dtype=torch.bool, device=sample.x.device)
    return pad(mask, (0, T - t, 0, T - t))


def _joined_angles(samples: list[LayerInput], T: int) -> Angles | None:
    tables = [s.angles for s in samples if s.angles is not None]
    if len(tables) < len(samples):
        return None
    longest = max(tables, key=lambda table: table.cos.shape[-2])
    where = {(table.cos.data_ptr(), table.cos.stride(), table.cos.ndim) for table in tables}
    if len(where) == 1 and longest.cos.ndim == 2:
        return longest  # one table, of which every pass read the beginning
    rows = []
    for s, table in zip(samples, tables, strict=True):
        n, t = s.x.shape[:2]
        parts = (part if part.ndim == 4 else part[None, None] for part in table)
        rows.append([pad(part.expand(n, -1, -1, -1), (0, 0, 0, T - t)) for part in parts])
    return Angles(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def probe_dtype(weight: Tensor) -> torch.dtype:
    """bfloat16 on a GPU, where float32 products are many times slower; else exact."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(weight.dtype, torch.float32)


def _is_stream(value: object, width: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[-1] == width


def _is_cos_and_sin(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(v, Tensor) and v.ndim == 3 for v in value)
    )


def crop_angles(angles: Any, n: int, T: int) -> Angles | None:
    """The angles of n sequences and T positions, in the convention of fenchel."""
    if angles is None:
        return None
    cos, sin = angles
    if not isinstance(angles, Angles):
        cos, sin = (part[:n, :T].unsqueeze(1) for part in (cos, sin))
        half = sin.shape[-1] // 2  # fenchel's sine carries the sign of the first half
        return Angles(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))
    if cos.ndim == 4:
        cos, sin = (part[:n] for part in (cos, sin))
    if cos.shape[-2] > T:
        cos, sin = (part[..., :T, :] for part in (cos, sin))
    return Angles(cos, sin)


def _crop_mask(mask: object, n: int, T: int) -> Tensor | None:
    """A copy of the part that is needed of a mask of keys (B, T) or of pairs (B, 1, T, T)."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        return mask[:n, ..., :T].detach().clone()
    pairs = mask[:n, 0, :T, :T].detach()
    if pairs.dtype == torch.bool:
        return pairs.clone()
    return pairs > -1e4  # an additive mask: 0, or a large negative number


def _pair_mask(mask: Tensor | None, n: int, T: int) -> Tensor | None:
    """(n, T, T), True where a query may attend to a key."""
    if mask is None or mask.ndim == 3:
        return None if mask is None else mask.expand(n, T, T)
    token = mask.to(torch.bool)
    return (token.unsqueeze(1) & token.unsqueeze(2)).expand(n, T, T)


class PositionGrid(NamedTuple):
    """The pairs of positions that are measured."""

    queries: Tensor
    """Positions of the sampled queries, (m,)."""
    mask: Tensor
    """(L or 1, n or 1, 1, m, T), True where a sampled query may attend to a key."""
    pair_weight: Tensor
    """One over the number of pairs that count, over all sequences: (L or 1, 1)."""


class StackInput(NamedTuple):
    """The inputs of the layers of a stack."""

    x: Tensor
    """(L, n, T, M)."""
    angles: Angles | None
    """(L or 1, 1 or n, 1, T, W) each."""
    grid: PositionGrid
    from_batch: bool = True
    """False for the identity that replaces a missing sample."""


def stack_inputs(
    pairs: Sequence[QueryKeyPair],
    inputs: Sequence[LayerInput | None],
    grids: dict[Any, PositionGrid] | None = None,
) -> StackInput:
    """The samples of equal layers side by side; ``grids`` caches the pairs of positions."""
    grids = {} if grids is None else grids
    present = [sample for sample in inputs if sample is not None]
    if len(present) < len(pairs):
        return _white_input(pairs, grids)
    x = torch.stack([sample.x for sample in present])
    if pairs[0].query.bias is not None:
        x = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
    rules = [(pair.causal, pair.window) for pair in pairs]
    rules = rules[:1] if len(set(rules)) == 1 else rules
    n, T = x.shape[1:3]
    key = (*rules, n, T, x.device, x.dtype)
    if key not in grids:
        grids[key] = _position_grid(rules, x)
    grid = grids[key]
    masks = [sample.mask[:, grid.queries] for sample in present if sample.mask is not None]
    if masks:
        mask = grid.mask & torch.stack(masks).unsqueeze(2)
        grid = PositionGrid(grid.queries, mask, _pair_weight(mask, 1, x.dtype))
    return StackInput(x, _stack_angles(present), grid)


def _position_grid(rules: list[tuple[bool, int | None]], x: Tensor) -> PositionGrid:
    n, T, device = *x.shape[1:3], x.device
    m = min(T, QUERIES)
    queries = ((torch.arange(m, device=device) + 0.5) * (T / m)).long()
    distance = queries.unsqueeze(1) - torch.arange(T, device=device)
    masks = []
    for causal, window in rules:
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        masks.append(mask if window is None else mask & (distance.abs() < window))
    stacked = torch.stack(masks)[:, None, None]
    return PositionGrid(queries, stacked, _pair_weight(stacked, n, x.dtype))


def _pair_weight(mask: Tensor, sequences: int, dtype: torch.dtype) -> Tensor:
    pairs = sequences * mask.sum(dim=(1, 3, 4)).clamp(min=1)
    return pairs.to(torch.promote_types(dtype, torch.float32)).reciprocal()


def _white_input(pairs: Sequence[QueryKeyPair], grids: dict[Any, PositionGrid]) -> StackInput:
    first = pairs[0].query
    M = first.weight.shape[0 if first.columns else 1] + (first.bias is not None)
    exact = torch.promote_types(first.weight.dtype, torch.float32)
    x = torch.eye(M, dtype=exact, device=first.weight.device).expand(len(pairs), 1, M, M)
    key = ("white", M, x.device, exact)
    if key not in grids:
        every_pair = torch.ones(1, 1, 1, M, M, dtype=torch.bool, device=x.device)
        weight = _pair_weight(every_pair, 1, exact)
        grids[key] = PositionGrid(torch.arange(M, device=x.device), every_pair, weight)
    return StackInput(x, None, grids[key], from_batch=False)


def _stack_angles(inputs: Sequence[LayerInput]) -> Angles | None:
    tables = [sample.angles for sample in inputs if sample.angles is not None]
    if not tables:
        return None
    if all(_is_same_memory(tables[0].cos, table.cos) for table in tables):
        tables = tables[:1]  # one table for all layers
    cos, sin = (
        torch.stack([part if part.ndim == 4 else part[None, None] for part in parts])
        for parts in zip(*tables, strict=True)
    )
    return Angles(cos, sin)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    where = [(t.data_ptr(), t.shape, t.stride()) for t in (x, y)]
    return x is y or (where[0] == where[1] and not x.is_meta)


_of_all = ContextVar("samples_of_all", default=False)


@contextmanager
def samples_of_all() -> Iterator[None]:
    """Context manager: samples are of the whole batch, and nothing is averaged over processes.

    For the only process that moves a layer, which has the samples of all processes
    (fenchel/distributed/owners.py).
    """
    token = _of_all.set(True)
    try:
        yield
    finally:
        _of_all.reset(token)


def mean_over_processes(x: Tensor) -> Tensor:
    """``x`` itself in a run of one process, else its mean over all of them.

    Every process probes its own part of a batch. Measurements are averaged before any decision is
    based on them, so processes with equal weights and equal gradients take equal steps.
    """
    if (
        _of_all.get()
        or not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
    ):
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
