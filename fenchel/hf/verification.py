"""A proof that a model's attention was replaced, and that nothing else changed.

A model runs three times on the same inputs: with its own eager attention, with fenchel's attention
and softmax, with fenchel's attention and the new map. The proof holds when

    every attention layer called fenchel's attention       no layer computes attention by itself
    every causal layer passed a mask                       the function itself refuses otherwise
    |our softmax - eager|  <=  tolerance * max(1, |eager|)         nothing was left out
    |new map - eager|  >  0                                the replacement had an effect
    another last token moves no earlier output             the new map respects a causal mask

A window that the inputs do not exceed would hide a lost window, so windows of more tokens than the
inputs have are a quarter of these during the proof (``narrow_windows``).

Each failure is a ValueError in one sentence. An attention layer is a module with "Attention" in
the name of its class and no such module inside it; it counts as called if it, a module around it
or a module inside it made the call. Positions that the inputs' attention mask pads are left out:
their outputs are not used, and eager attention computes other values there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention.spec import SOFTMAX
from fenchel.choice import Choice
from fenchel.hf.multihead import attach
from fenchel.model import evaluating


class ProvedLayer(NamedTuple):
    """One layer that called fenchel's attention."""

    name: str
    kind: str
    calls: int
    masks: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """The measurements of a proof that holds; ``prove`` raises otherwise."""

    choice: Choice
    layers: tuple[ProvedLayer, ...]
    softmax_difference: float
    """Largest change of an output when our softmax replaces eager attention."""
    tolerance: float
    """The largest ``softmax_difference`` allowed."""
    change: float
    """Largest change of an output under the new map."""
    leak: float | None
    """Largest change of an earlier output under another last token; None if not all is causal."""
    narrowed: int | None = None
    """The model's window, where it was narrowed for the proof; None where it was not."""

    @property
    def calls(self) -> int:
        """The calls of all layers together."""
        return sum(layer.calls for layer in self.layers)

    @property
    def masks(self) -> tuple[str, ...]:
        """The kinds of mask that the layers passed."""
        return tuple(sorted({mask for layer in self.layers for mask in layer.masks}))


@torch.no_grad()
def prove(
    model: Any, choice: Choice, inputs: Mapping[str, Tensor], *, tolerance: float | None = None
) -> Proof:
    """Run the model on ``inputs``, its keyword arguments, three times, and restore it.

    ``tolerance`` is 1e-5 unless given, and 2e-2 for a model in half precision.
    """
    ids = inputs.get("input_ids")
    length = 0 if ids is None else ids.shape[1]
    with evaluating(model), narrow_windows(model, length) as narrowed:
        with attach(model, SOFTMAX) as attachment:
            ours = _output(model, inputs)
            layers = _layers(model, attachment.calls, attachment.masks)
            with attachment.eager():
                eager = _output(model, inputs)
        if not bool(eager.isfinite().all()):
            raise ValueError("the model's own output on these inputs is not finite.")
        if tolerance is None:
            tolerance = 2e-2 if next(model.parameters()).dtype.itemsize < 4 else 1e-5
        allowed = tolerance * max(1.0, _largest(eager))
        difference = _largest(ours - eager)
        if not difference <= allowed:
            raise ValueError(
                f"with our softmax in place of its own, the output of {type(model).__name__} moves "
                f"by {difference:.2g} where {allowed:.2g} is allowed: it does something in its "
                "attention that is not done here, so the swap is refused."
            )
        with attach(model, choice):
            change = _largest(_output(model, inputs) - eager)
            masks = [mask for layer in layers for mask in layer.masks]
            causal = all(mask.startswith(("causal", "window")) for mask in masks)
            leak = _leak(model, inputs) if causal else None
    if choice != SOFTMAX and not change > 0.0:
        raise ValueError(f"{choice} changed nothing in {type(model).__name__} on these inputs.")
    if leak is not None and not leak <= allowed:
        raise ValueError(
            f"under {choice} an earlier output of {type(model).__name__} moves by {leak:.2g} when "
            "the last token changes: the mask is not kept, so the swap is refused."
        )
    return Proof(choice, layers, difference, allowed, change, leak, narrowed)


def attention_layers(model: nn.Module) -> dict[str, str]:
    """Innermost modules that are attention by the name of their class: name -> class."""
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    kinds = {name: kind for name, kind in modules.items() if "Attention" in kind}
    return {n: kind for n, kind in kinds.items() if not any(m.startswith(f"{n}.") for m in kinds)}


def _layers(
    model: nn.Module, calls: Mapping[str, int], masks: Mapping[str, set[str]]
) -> tuple[ProvedLayer, ...]:
    """The layers that called fenchel's attention; raises if one did not."""
    layers = attention_layers(model)
    if not layers and not calls:
        raise ValueError(f"{type(model).__name__} has no attention layer to swap.")
    missed = [name for name in layers if not any(_same(name, caller) for caller in calls)]
    if missed:
        raise ValueError(
            f"{len(missed)} of the {len(layers)} attention layers of {type(model).__name__} never "
            f"called the attention they were given ({missed[0]}, {layers[missed[0]]}, is the "
            "first), so the swap did not happen."
        )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return tuple(
        ProvedLayer(name, kinds.get(name, name), calls[name], tuple(sorted(masks[name])))
        for name in calls
    )


def _output(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits, or else the last hidden states, of the positions that are not padding: (N, V)."""
    out = _rows(model(**inputs)).double()
    keep = inputs.get("attention_mask")
    if keep is not None and keep.dim() == 2 and keep.shape == out.shape[:2]:
        return out[keep.bool()]
    return out.flatten(0, -2)


def _rows(output: Any) -> Tensor:
    """Logits, or else the last hidden states: (B, T, V)."""
    rows: Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    return rows


def _leak(model: Any, inputs: Mapping[str, Tensor]) -> float | None:
    """How far the outputs before the last move when the last id is replaced."""
    ids = inputs.get("input_ids")
    if ids is None or ids.shape[1] < 2:
        return None
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, 1)
    outs = [_rows(model(**{**inputs, "input_ids": x}))[:, :-1].double() for x in (ids, changed)]
    return _largest(outs[0] - outs[1])


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _same(name: str, caller: str) -> bool:
    return name == caller or name.startswith(f"{caller}.") or caller.startswith(f"{name}.")


_WINDOWS = ("sliding_window", "attention_chunk_size")


@contextmanager
def narrow_windows(model: nn.Module, length: int) -> Iterator[int | None]:
    """Context manager: windows that ``length`` tokens do not exceed become a quarter of ``length``.

    transformers makes the mask of every call from the window in the config. Yields the largest
    window that was narrowed, or None.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    found = [
        (config, name, window)
        for config in configs.values()
        for name in _WINDOWS
        if type(window := getattr(config, name, None)) is int and window >= length > 3
    ]
    try:
        for config, name, _ in found:
            setattr(config, name, length // 4)
        yield max((window for *_, window in found), default=None)
    finally:
        for config, name, window in found:
            setattr(config, name, window)
