"""A sample of what an attention layer reads, taken from the training pass itself.

A forward-pre-hook keeps, of every forward pass that builds a gradient, the first few sequences of
the layer's input and the rotation and mask that came with them. Nothing of it outlives a step:
each step's probe is that of its own last forward pass, so a resumed run sees what an
uninterrupted one saw. With activation checkpointing the hook runs twice on the same input, with
gradient accumulation the last part stays, and passes without gradients (evaluation, generation)
are not looked at. Under torch.compile the copy is one more output of the graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Angles
from fenchel.optim.score.pairs import Pair


class Seen(NamedTuple):
    """What a layer read: n sequences, T positions."""

    x: Tensor
    """(n, T, M)."""
    turn: Angles | None
    """cos and sin, (T, W) or (1 or n, 1, T, W) each; None without rotary positions."""
    mask: Tensor | None
    """(n, T, T), True where a query may see a key; None where only the layer's own rule holds."""


class Probe:
    """The hook of one layer; ``take`` hands its sample over and forgets it."""

    def __init__(self, pair: Pair, tokens: int) -> None:
        self.tokens, self.width = tokens, pair.query.weight.shape[0 if pair.query.columns else 1]
        self.seen: Seen | None = None
        self.handle = pair.module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Keep a sample of the arguments of a forward pass."""
        if not torch.is_grad_enabled():
            return
        values = (*args, *kwargs.values())
        shared = [v for v in values if hasattr(v, "turns")]  # our layers get all they share in one
        values += tuple(v.turns[getattr(module, "local", False)] for v in shared)
        x = next((v for v in values if _stream(v, self.width)), None)
        if x is None or x.numel() == 0:
            return
        B, T, _M = x.shape
        T = min(T, self.tokens)
        n = min(B, max(1, self.tokens // T))
        self.seen = Seen(
            x[:n, :T].detach().clone(),
            _turn(values, n, T),
            _mask(kwargs.get("attention_mask"), n, T),
        )

    def take(self) -> Seen | None:
        """The sample of the last pass, once."""
        seen, self.seen = self.seen, None
        return seen

    def remove(self) -> None:
        """Watch no longer."""
        self.handle.remove()


def _stream(value: object, width: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[-1] == width


def _turn(values: tuple[Any, ...], n: int, T: int) -> Angles | None:
    """The rotation among the arguments: ours, or (cos, sin) of (B, T, W) as in transformers."""
    for value in values:
        if isinstance(value, Angles):
            cos, sin = value
        elif _cos_and_sin(value):
            cos, sin = (part.unsqueeze(1) for part in value)
            half = sin.shape[-1] // 2  # ours carry the sign of the first half in the sine
            sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        else:
            continue
        cos, sin = (part[..., :T, :].detach() for part in (cos, sin))
        if cos.ndim == 4:
            cos, sin = (part[:n] for part in (cos, sin))
        return Angles(cos.clone(), sin.clone())
    return None


def _cos_and_sin(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(v, Tensor) and v.ndim == 3 for v in value)
    )


def _mask(mask: object, n: int, T: int) -> Tensor | None:
    """True where open: from a mask of keys (B, T), or one of pairs (B, 1, T, T)."""
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        real = mask[:n, :T].to(torch.bool)
        return (real.unsqueeze(1) & real.unsqueeze(2)).expand(n, T, T)
    if mask.ndim != 4:
        return None
    cut = mask[:n, 0, :T, :T].detach()
    open_ = cut if cut.dtype == torch.bool else cut > -1e4  # added to the scores: 0 or very low
    return open_.expand(n, T, T).clone()
