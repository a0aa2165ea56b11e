"""Attention held at a point: its outputs and its weights kept, its derivatives in both directions.

A spectral norm takes a dozen products with the derivative at one place. Between them q, k and v
stay as they are, so the weights are computed once and kept, a strip of rows at a time: under a
causal prior a strip ends where its last query stands, and what no query may see costs nothing.

``Held`` is a function of (q, k, v) for autodiff (``fenchel.inspection.graph``) to meet inside a
module: its value is the output
that was kept, whatever it is given, and its derivatives are those of attention at the place it was
made. It is right wherever derivatives at that place are asked for, and nowhere else.

Weights are kept up to ``ROOM`` numbers and computed again at every pass beyond, so memory stays
O(n d) for long texts.

How it gets inside: ``hold`` makes the parts of a passage that are there for derivatives name what
is held while they run, and whoever calls attention in them asks ``answer`` first.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fenchel.attention import attend
from fenchel.inspection.subject import Attention, Branch, Map, Passage
from fenchel.sensitivity.attention import AttentionJacobian, attention_jacobian
from fenchel.sensitivity.rows import Block, Rows

ROOM = 1 << 28
"""Weights kept at the most, over all layers of a model."""
# Queries at a time: fewer and products are small, more and the future is computed too.
_STRIP, _GPU_STRIP = 128, 1024
_SETTLED = 1e-4  # a row whose lighter keys weigh more than this needs no shift to stay exact


class Kept(Rows):
    """Rows whose blocks are computed once."""

    _strips: list[Block] | None = None

    def __iter__(self) -> Iterator[Block]:
        if self._strips is None:
            self._strips = [_eased(block) for block in super().__iter__()]
        return iter(self._strips)

    def ready(self) -> Sequence[Block]:
        """All of them."""
        return tuple(self)

    def single(self) -> Rows:
        """In float32, with nothing kept yet."""
        other = super().single()
        other._strips = None  # type: ignore[attr-defined]
        return other


class Held:
    """One call of attention at the place where it was made."""

    def __init__(self, call: Attention, *, keep: bool) -> None:
        self.call, self.keep = call, keep

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output that was kept, (1, H, T, E), for autodiff to take the derivative of."""
        out: Tensor = _Held.apply(self.derivative, self.output, q, k, v)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def output(self) -> Tensor:
        """attend at the place."""
        with torch.no_grad():
            output: Tensor = attend(**self.call._asdict(), backend="blocked")
        return output

    @cached_property
    def derivative(self) -> AttentionJacobian:
        """All heads together, in (q, k, v)."""
        return derivative(self.call, keep=self.keep)


_answering: ContextVar[Held | None] = ContextVar("answering", default=None)


def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """What is held for the call of attention under way, (1, H, T, E); None where nothing is."""
    held = _answering.get()
    return None if held is None else held(q, k, v)


def hold(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """The passages, with the attention of each held for its derivatives."""
    calls = [passage.attention for passage in passages]
    keep = sum(c.q.shape[1] * c.q.shape[2] * c.k.shape[2] for c in calls) <= ROOM
    return tuple(_with(passage, Held(passage.attention, keep=keep)) for passage in passages)


def _with(passage: Passage, held: Held) -> Passage:
    near, branch = _answered(passage.near, held), passage.attending
    attending = None if branch is None else Branch(_answered(branch.f, held), branch.x)
    return passage._replace(near=near, attending=attending)


def _answered(f: Map, held: Held) -> Map:
    """``f`` with its call of attention answered by what is held."""

    def near(x: Tensor) -> Tensor:
        token = _answering.set(held)
        try:
            return f(x)
        finally:
            _answering.reset(token)

    return near


def derivative(call: Attention, *, keep: bool = True, each: bool = False) -> AttentionJacobian:
    """The derivative of a call in (q, k, v), one operator, or one a head with ``each``."""
    strip = _STRIP if call.q.device.type == "cpu" else _GPU_STRIP
    budget = strip * call.q.shape[1] * call.k.shape[2]
    J = attention_jacobian(**call._asdict(), each=each, budget=budget)
    if keep:
        r = J.rows
        q, k = (x.view(*r.lead, *x.shape[1:]) for x in (r.q, r.k))
        J.rows = Kept(q, k, r.choice, r.prior, r.scale, strip * r.H * r.S, r.softcap)
    return J


def _eased(block: Block) -> Block:
    """A block that will be used often, without the shift that only saturated rows need."""
    s = block.s
    sure = (s > 0).sum(-1, keepdim=True) <= 1  # one key to choose: nothing can move
    s = s.masked_fill(sure, 0.0) if bool(sure.any()) else s
    rest = (s.sum(-1, keepdim=True) - s.amax(-1, keepdim=True)) * block.inverse
    settled = bool((sure | (rest > _SETTLED)).all())
    return block._replace(s=s, heaviest=None if settled else block.heaviest)


class _Held(torch.autograd.Function):
    """The value that is kept, with the derivative that is kept."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, output: Tensor, *_: Tensor) -> Tensor:
        ctx.J = J
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *_Pulled.apply(ctx.J, g)  # type: ignore[no-untyped-call]


class _Pulled(torch.autograd.Function):
    """J^T g, which is linear in g: its own reverse is J."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, g: Tensor) -> Any:
        ctx.J = J
        return J.T @ g

    @staticmethod
    def backward(ctx: Any, *moves: Tensor) -> Any:
        return None, ctx.J @ moves
