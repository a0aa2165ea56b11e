"""Directions in the residual stream: made from texts or words, stored, added to a model.

    x_l <- x_l + s v                 after block l, at every position; s is the strength

While decoding every sequence has a direction of its own (generation/steering.py). The last map of
a block adds its bias to the stream, so a constant direction is also a bias: ``Transformer.steered``
returns a model that shares every parameter but that one, and can be evaluated and saved.

**Difference of means.** v = mean of x_l over the tokens of some texts - mean over those of others.
The first token of a text is left out: its stream is often a hundred times as long as the others.

**Words pulled back.** v = the gradient, with respect to a constant added after block l, of

    mean over the positions of a text of   (mean logit of some words - mean logit of others)

one reverse pass, without texts that show what is meant. It has the length of the mean stream.

**Singular directions.** The right singular vectors of

    J = d (stream after block m at the positions of a text) / d (constant added after block l)

are what the text is most sensitive to per unit length. They have no meaning that could be named: at
equal KL they move a text no more towards anything than random directions do (docs/steer.md).

**Files.** safetensors with a tensor ``direction.L`` (M,) per layer in float32, layers from 1, and
in the metadata what it was made for: operation, site, width and a fingerprint of the weights in
bfloat16, which is the same in whatever dtype the model is loaded.

T tokens, M width of the stream.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.checkpoints.safetensors_header import read_header
from fenchel.checkpoints.weights import (
    read_model_tensors,
    weights_fingerprint,
    write_model_tensors,
)
from fenchel.files import open_regular
from fenchel.model import Transformer, evaluating
from fenchel.sensitivity import jacobian, singular_values

KIND = "steering direction"
_FIXED = {"kind": KIND, "operation": "add", "site": "after block", "count_from": "1"}
_SINGULAR = 1e-4  # error of a singular value, of the largest
_NAME = re.compile(r"direction\.([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Vectors (M,) to be added after blocks, numbered from 1, ``strength`` times."""

    vectors: Mapping[int, Tensor]
    strength: float = 1.0
    about: str = ""
    """How it was made."""
    weights: str = ""
    """The fingerprint of the model that it was made with."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise ValueError(f"a strength of {self.strength:g} is not finite.")

    def at(self, strength: float) -> "Direction":
        """The same direction at another strength."""
        return replace(self, strength=strength)

    @property
    def scaled(self) -> dict[int, Tensor]:
        """The vectors times the strength, for ``fenchel.generation.Steering``."""
        return {layer: self.strength * v for layer, v in self.vectors.items()}

    def added_to(self, model: Transformer) -> Transformer:
        """The steered model, which shares the parameters of this one."""
        return model.steered(self.scaled)

    def hook_into(self, model: Transformer) -> None:
        """Add it to the stream of this model from now on, whatever its blocks are."""
        for layer, v_M in self.scaled.items():
            require_layer(model, layer)
            add_M = v_M.to(model.lm_head_weight)

            def hook(
                _block: object, _inputs: object, x_BTM: Tensor, add_M: Tensor = add_M
            ) -> Tensor:
                return x_BTM + add_M

            model.blocks[layer - 1].register_forward_hook(hook)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file where nothing is yet."""
        width = len(next(iter(self.vectors.values())))
        tensors = {f"direction.{layer}": v for layer, v in self.vectors.items()}
        about = {"width": str(width), "strength": repr(self.strength), "about": self.about}
        write_model_tensors(Path(path), tensors, {**_FIXED, **about, "weights": self.weights})

    @classmethod
    def load(cls, path: str | Path, model: Transformer) -> "Direction":
        """The direction of a file that was made with this model."""
        path = Path(path)
        open_regular(path).close()
        entries, M, layers = read_header(path), model.config.width, model.config.layers
        numbers = {name: _NAME.fullmatch(name) for name in entries}
        if not entries or None in numbers.values():
            raise ValueError(f"{path} holds no steering direction: its tensors have other names.")
        for name, entry in entries.items():
            if entry.dtype != "F32" or len(entry.shape) != 1:
                raise ValueError(f"{path}: {name} should be a vector in float32.")
            if entry.shape != (M,):
                raise ValueError(
                    f"{path} was made for a model of width {entry.shape[0]} and this one has {M}; "
                    "directions do not carry over between models."
                )
        last = max(int(match[1]) for match in numbers.values() if match is not None)
        if last > layers:
            raise ValueError(f"{path} steers layer {last} and the model has {layers}.")
        claim = "that its vectors are to be added after blocks"
        tensors, about = read_model_tensors(path, model, _FIXED, "a direction", claim)
        try:
            strength = float(about.get("strength", ""))
        except ValueError:
            raise ValueError(f"{path} names no strength.") from None
        return cls(
            vectors={int(name.rpartition(".")[2]): v for name, v in tensors.items()},
            strength=strength,
            about=about.get("about", ""),
            weights=about["weights"],
        )


def difference_of_means(
    model: Transformer,
    toward: Sequence[Sequence[int]],
    away: Sequence[Sequence[int]],
    *,
    layer: int,
) -> Direction:
    """From the streams of token sequences that show what is wanted and what is not.

    Sequences have at least two tokens: the first of each is left out.
    """
    require_layer(model, layer)
    means = [_mean_stream(model, texts, layer) for texts in (toward, away)]
    counts = f"{len(toward)} text{'s' * (len(toward) > 1)} against {len(away)}"
    return Direction(
        vectors={layer: means[0] - means[1]},
        about=f"difference of means over the tokens of {counts}, after layer {layer}",
        weights=weights_fingerprint(model),
    )


def word_direction(
    model: Transformer,
    ids: Sequence[int],
    words: Sequence[int],
    against: Sequence[int],
    *,
    layer: int,
) -> Direction:
    """Towards the logits of some tokens, away from those of others, on the positions of a text."""
    require_layer(model, layer)
    ids_1T = torch.tensor([list(ids)], device=model.lm_head_weight.device)
    v_M = torch.zeros(model.config.width, device=ids_1T.device, dtype=model.lm_head_weight.dtype)
    v_M.requires_grad_()
    with torch.enable_grad(), evaluating(model), after_block(model, layer) as streams:
        streams.add = v_M
        z_TV = model(ids_1T)[0, 1:].float()
        wanted = z_TV[:, list(words)].mean()
        unwanted = z_TV[:, list(against)].mean() if against else z_TV.mean()
        (gradient_M,) = torch.autograd.grad(wanted - unwanted, v_M)
    length = float(streams.x[0, 1:].detach().float().norm(dim=-1).mean())
    gradient_M = gradient_M.float()
    if not float(gradient_M.norm()) > 0.0:
        raise ValueError(f"the stream after layer {layer} does not move the logits of these words.")
    return Direction(
        vectors={layer: gradient_M * (length / gradient_M.norm())},
        about=f"logits of {len(words)} word{'s' * (len(words) > 1)} pulled back to layer {layer}",
        weights=weights_fingerprint(model),
    )


class SingularDirections(NamedTuple):
    """Directions in the order of their singular values."""

    directions: list[Direction]
    values: list[float]
    """|J v| of each per unit length, over all positions together."""


def singular_directions(
    model: Transformer,
    ids: Sequence[int],
    layers: tuple[int, int],
    count: int = 1,
    *,
    generator: torch.Generator | None = None,
) -> SingularDirections:
    """What a text is most sensitive to between two layers; each has the length of the mean stream.

    Signs are such that the largest number of a vector is positive.
    """
    first, last = layers
    for layer in layers:
        require_layer(model, layer)
    if not first < last:
        raise ValueError(f"layer {first} should come before layer {last}.")
    ids_1T = torch.tensor([list(ids)], device=model.lm_head_weight.device)
    like = model.lm_head_weight

    def stream_after(v_M: Tensor) -> Tensor:
        with after_block(model, first) as start, after_block(model, last) as end:
            start.add = v_M
            model(ids_1T, return_hidden=True)
            return end.x[0, 1:]

    with evaluating(model), torch.no_grad(), after_block(model, first) as stream:
        model(ids_1T, return_hidden=True)
        length = float(stream.x[0, 1:].float().norm(dim=-1).mean())
    with evaluating(model):
        J = jacobian(stream_after, torch.zeros(model.config.width).to(like))
        found = singular_values(J, count, tol=_SINGULAR, generator=generator)
    directions = []
    assert isinstance(found.right, Tensor)
    for number, v_M in enumerate(found.right.detach().float(), 1):
        sign = v_M[v_M.abs().argmax()].sign()
        directions.append(
            Direction(
                vectors={first: v_M * (sign * length)},
                about=f"singular direction {number} of layers {first} to {last} on {len(ids)} "
                f"tokens, after layer {first}",
                weights=weights_fingerprint(model),
            )
        )
    return SingularDirections(directions, found.values.tolist())


def require_layer(model: Transformer, layer: int) -> None:
    """Refuse a layer that the model does not have, or whose block serves others too."""
    if not 1 <= layer <= model.config.layers:
        raise ValueError(f"there is no layer {layer}; the model has 1 to {model.config.layers}.")
    if model.config.block_count < model.config.layers:
        raise ValueError("layers of this model share a block, so none has a stream of its own.")


class _Stream:
    """The stream after a block in the latest pass, and what is added to it."""

    x: Tensor
    add: Tensor | None = None


@contextmanager
def after_block(model: Transformer, layer: int) -> Iterator[_Stream]:
    """Context manager: records the stream after a block."""
    stream = _Stream()

    def hook(_block: object, _inputs: object, x_BTM: Tensor) -> Tensor:
        stream.x = x_BTM if stream.add is None else x_BTM + stream.add
        return stream.x

    handle = model.blocks[layer - 1].register_forward_hook(hook)
    try:
        yield stream
    finally:
        handle.remove()


@torch.no_grad()
def _mean_stream(model: Transformer, texts: Sequence[Sequence[int]], layer: int) -> Tensor:
    """The mean over texts of the mean over their tokens but the first: (M,), in float32."""
    if not texts or min(map(len, texts)) < 2:
        raise ValueError("every text of a direction needs two tokens, of which the second counts.")
    total = torch.zeros(model.config.width, device=model.lm_head_weight.device)
    with evaluating(model), after_block(model, layer) as stream:
        for ids in texts:
            most = list(ids[: model.config.context])
            model(torch.tensor([most], device=total.device), return_hidden=True)
            total += stream.x[0, 1:].float().mean(0)
    return total / len(texts)
