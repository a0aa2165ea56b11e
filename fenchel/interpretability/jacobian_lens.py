"""The Jacobian lens: what a stream after layer l becomes after the last layer, on average.

    J_l = mean over texts of  1/|P| sum_{t in P}  sum_{t' in P, t' >= t}  d x_L,t' / d x_l,t

is a matrix (M, M) per layer, with P the positions of a text but the first ``skip`` and the last:
effects on later positions are summed, sources are averaged. Two read-outs use it,

    jacobian             mean_L + J_l (x - mean_l)           means of the streams over the same P
    without its offset   J_l x                               the lens as it is published

and the law of the next token is softmax(unembed(.)) of either. The first is the average tangent
through the mean stream; the second is its linear part alone, which misses by the constant
mean_L - J_l mean_l.

``targets="same"`` keeps the term t' = t alone: what a position becomes by itself, which is closer
to the law of its own next token. A reverse product with the cotangent s_t e_i at every target, and
its result times s_t at every source, has that term as its mean over random signs s, at the same
cost.

**Fit.** A cotangent e_i at every target position at once gives row i of J for every source position
and every layer in one reverse pass, so a text costs one forward pass and M reverse products, in
batches of copies of the text. Whole texts and exact rows: random probes have a larger error at the
same cost (with k of M rows per text it grows by the M - k rows that were not computed).

**Spread.** With |.| the Frobenius norm, s_l = sqrt(variance over texts of J_l) / |J_l| and the
error bar of a layer is s_l / sqrt(n) for n texts. The spread over positions is that of the matrices
of single source positions.

**Files.** safetensors: ``jacobian.L`` (M, M) and ``mean_in.L`` (M,) per layer from 1, ``mean_out``
(M,), ``spread_texts`` and ``spread_positions`` in the order of the layers, and in the metadata how
it was made and the fingerprint of the weights. The means and spreads may be missing, as in lenses
that were published elsewhere; such a lens has no offset. The last layer has no matrix: it is I.

**Error.** A lens reads the stream X after layer l, (T, M), as if the blocks above it were affine:

    read(X) = mean_L + (X - mean_l) J^T,      F(X) = blocks l + 1 to L, what the model computes

On a text the error |F(X) - read(X)| is measured. With K a Lipschitz constant of F over the ball of
radius r about X (fenchel/sensitivity), every stream X' of the ball has

    |F(X') - read(X')|  <=  |F(X) - read(X)| + (K + |J|_2) r.

The norm is over the positions but the first, as in all means of a lens; K holds for all of them.
The certificate is vacuous where it is not below |F(X) - mean_L|: the mean stream alone, whatever X
is, is then as good. K grows fast with the radius and with the number of blocks, so that it says
something for small radii and the last layers.

M width of the stream, L layers, T tokens, n texts.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fenchel.checkpoints.safetensors_header import TensorEntry, read_header
from fenchel.checkpoints.weights import (
    read_model_tensors,
    weights_fingerprint,
    write_model_tensors,
)
from fenchel.files import open_regular, printable
from fenchel.inspection.certificates import block_layer, why_no_block
from fenchel.inspection.our_model import record_pass
from fenchel.interpretability.hooked_model import HookedModel, Model, RecordedPass, hooked
from fenchel.interpretability.intervention import Progress
from fenchel.model import Transformer
from fenchel.sensitivity import Ball
from fenchel.sensitivity.layers import Chain
from fenchel.sensitivity.perturbation import NormEstimator

SKIP = 16
"""Positions at the beginning of a text that are left out: the first is often a hundred times as
long as others."""
_FIXED = {
    "kind": "jacobian lens",
    "site": "after block",
    "count_from": "1",
    "sources": "mean over positions",
}
Targets = Literal["later", "same"]
_TARGETS: dict[Targets, str] = {
    "later": "sum over the source position and all later ones",
    "same": "the source position alone, by random signs",
}
_NAME = re.compile(r"(jacobian|mean_in)\.([1-9]\d{0,3})")
_OTHERS = ("mean_out", "spread_texts", "spread_positions")
_GRAPH = 1 << 22  # numbers in the streams of a batch of copies
_FAILURE = 1e-9  # probability that a norm at the centre of a ball is too small


@dataclass(frozen=True, kw_only=True, eq=False)
class JacobianLens:
    """Matrices by layer, from 1 to the last but one, and what their read-out needs."""

    jacobians: Mapping[int, Tensor]
    """(M, M) each."""
    mean_in: Mapping[int, Tensor] = field(default_factory=dict)
    """The mean stream after each of these layers, (M,)."""
    mean_out: Tensor | None = None
    """The mean stream after the last layer; None in a lens without an offset."""
    spread_texts: Mapping[int, float] = field(default_factory=dict)
    """s of each layer; empty after one text."""
    spread_positions: Mapping[int, float] = field(default_factory=dict)
    texts: int = 1
    positions: int = 0
    """Source positions in all texts together."""
    skip: int = SKIP
    targets: Targets = "later"
    """Positions whose effects are summed: the source and all later ones, or the source alone."""
    about: str = ""
    weights: str = ""
    """The fingerprint of the model."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a matrix."""
        return tuple(sorted(self.jacobians))

    @property
    def has_offset(self) -> bool:
        """Whether it has the means that an offset is made of."""
        return self.mean_out is not None

    def error(self, layer: int) -> float:
        """The relative standard error of a matrix, s / sqrt(n); nan where it is not known."""
        return self.spread_texts.get(layer, math.nan) / math.sqrt(self.texts)

    def read(self, layer: int, x_NM: Tensor, *, offset: bool = True) -> Tensor:
        """The stream after the last layer that it makes of streams after ``layer``."""
        if layer not in self.jacobians:
            raise ValueError(f"the lens has no layer {layer}; it has {_ranges(self.layers)}.")
        J_MM = self.jacobians[layer].to(x_NM)
        if not offset:
            return x_NM @ J_MM.T
        if self.mean_out is None:
            raise ValueError("this lens has no means, so that only its read-out without an offset.")
        return self.mean_out.to(x_NM) + (x_NM - self.mean_in[layer].to(x_NM)) @ J_MM.T

    def save(self, path: str | Path) -> None:
        """Write a safetensors file where nothing is yet."""
        tensors = {f"jacobian.{n}": J for n, J in self.jacobians.items()}
        tensors |= {f"mean_in.{n}": x for n, x in self.mean_in.items()}
        tensors |= {} if self.mean_out is None else {"mean_out": self.mean_out}
        for name in ("spread_texts", "spread_positions"):
            if spread := getattr(self, name):
                tensors[name] = torch.tensor([spread[n] for n in self.layers])
        numbers = {name: str(getattr(self, name)) for name in ("texts", "positions", "skip")}
        left_out = f"the first {self.skip} positions and the last"
        about = {"left_out": left_out, "about": self.about, "weights": self.weights}
        about["targets"] = _TARGETS[self.targets]
        write_model_tensors(Path(path), tensors, {**_FIXED, **numbers, **about})

    @classmethod
    def load(cls, path: str | Path, model: Model) -> "JacobianLens":
        """The lens of a file that was made with this model."""
        path, subject = Path(path), hooked(model)
        with open_regular(path) as file:
            if file.read(2) == b"PK" or path.suffix in (".pt", ".pth", ".pkl", ".bin"):
                raise ValueError(
                    f"{path} is a pickle, which can run code when it is read; convert it once, "
                    "where you trust its source: torch.load, JacobianLens.from_matrices, save."
                )
        layers = _require_entries(path, read_header(path), subject)
        claim = "how its matrices were made, as fenchel does"
        tensors, about = read_model_tensors(path, subject.model, _FIXED, "a lens", claim)
        targets = [name for name, words in _TARGETS.items() if about.get("targets") == words]
        if not targets:
            raise ValueError(f"{path} does not say {claim}.")
        try:
            texts, positions, skip = (int(about[k]) for k in ("texts", "positions", "skip"))
        except (KeyError, ValueError):
            raise ValueError(f"{path} does not say from how many texts it was made.") from None
        spreads = {
            name: dict(zip(layers, tensors[name].tolist(), strict=True)) if name in tensors else {}
            for name in ("spread_texts", "spread_positions")
        }
        return cls(
            jacobians={n: tensors[f"jacobian.{n}"] for n in layers},
            mean_in={n: tensors[f"mean_in.{n}"] for n in layers if f"mean_in.{n}" in tensors},
            mean_out=tensors.get("mean_out"),
            texts=max(texts, 1),
            positions=positions,
            skip=skip,
            targets=targets[0],
            about=about.get("about", ""),
            weights=about["weights"],
            **spreads,
        )

    @classmethod
    def from_matrices(
        cls,
        model: Model,
        jacobians: Mapping[int, Tensor],
        *,
        texts: int = 1,
        skip: int = SKIP,
        about: str = "",
    ) -> "JacobianLens":
        """A lens that was fitted elsewhere for this model, by layer from 1; it has no offset."""
        subject = hooked(model)
        M, last = subject.width, subject.layers - 1
        for layer, J_MM in jacobians.items():
            if J_MM.shape != (M, M) or not 1 <= layer <= last:
                raise ValueError(
                    f"a matrix of {tuple(J_MM.shape)} for layer {layer} should be of ({M}, {M}) "
                    f"for a layer from 1 to {last}; the last layer has none."
                )
        weights = weights_fingerprint(subject.model)
        return cls(jacobians=dict(jacobians), texts=texts, skip=skip, about=about, weights=weights)


def _require_entries(
    path: Path, entries: Mapping[str, TensorEntry], model: HookedModel
) -> tuple[int, ...]:
    """The layers of a file whose tensors are those of a lens for this model."""
    M, matches = model.width, {name: _NAME.fullmatch(name) for name in entries}
    numbers = {kind: set[int]() for kind in ("jacobian", "mean_in")}
    for name, match in matches.items():
        if match is not None:
            numbers[match[1]].add(int(match[2]))
        elif name not in _OTHERS:
            raise ValueError(f"{path} is no lens: it holds a tensor {printable(name)}.")
    layers = tuple(sorted(numbers["jacobian"]))
    if not layers:
        raise ValueError(f"{path} is no lens: it has no matrix.")
    if layers[-1] >= model.layers:
        raise ValueError(
            f"{path} has a matrix for layer {layers[-1]} and the model has {model.layers} layers, "
            "of which the last needs none."
        )
    whole = numbers["mean_in"] == numbers["jacobian"]
    if ("mean_out" in entries) != bool(numbers["mean_in"]) or (numbers["mean_in"] and not whole):
        raise ValueError(f"{path} has only some of the means of its layers.")
    for name, entry in entries.items():
        match = matches[name]
        shape = (M, M) if match is not None and match[1] == "jacobian" else (M,)
        shape = (len(layers),) if name.startswith("spread") else shape
        if entry.shape != shape:
            wide = entry.shape[0] if len(entry.shape) == len(shape) and entry.shape else "another"
            raise ValueError(
                f"{path}: {name} was made for a model of width {wide} and this one has {M}; a lens "
                "does not carry over between models."
            )
        if entry.dtype not in ("F32", "F16"):
            raise ValueError(f"{path}: {name} should be in float32 or float16.")
    return layers


class TextJacobians:
    """The matrices of one text and the means of its streams.

    ``jacobians`` (L - 1, M, M); ``squares`` (L - 1,): mean over source positions of |J_t|^2;
    ``means`` (L, M) of the streams after every layer; all in the dtype of the model.
    """

    def __init__(
        self,
        model: HookedModel,
        ids: Sequence[int],
        *,
        skip: int,
        rows: int,
        signs_T: Tensor | None = None,
    ) -> None:
        """``signs_T`` where only effects of a position on itself are kept."""
        T, M, L = len(ids), model.width, model.layers
        if skip + 2 > T:
            raise ValueError(
                f"a text of {T} tokens has no position between the first {skip} and the last; give "
                f"at least {skip + 2}."
            )
        inside, recorded = slice(skip, T - 1), RecordedPass(grad=True)
        with torch.enable_grad():
            model.logits(model.batch(ids, rows), recorded)
        target, sources = recorded.streams[L], [recorded.streams[n] for n in range(1, L)]
        signs_T = torch.ones(T) if signs_T is None else signs_T
        sign_T1 = signs_T[inside].to(target)[:, None]
        self.positions = T - 1 - skip
        self.means = torch.stack([x[0, inside].detach().mean(0) for x in (*sources, target)])
        self.jacobians = target.new_zeros(L - 1, M, M)
        self.squares = target.new_zeros(L - 1, dtype=torch.float64)
        for first in range(0, M, rows) if sources else ():
            count = min(rows, M - first)
            at = torch.arange(count, device=target.device)
            u = torch.zeros_like(target)
            u[at, inside, first + at] = sign_T1[:, 0]
            gradients = torch.autograd.grad(target, sources, u, retain_graph=first + rows < M)
            for n, g in enumerate(gradients):
                g = g[:count, inside] * sign_T1
                self.jacobians[n, first : first + count] = g.mean(1)
                self.squares[n] += g.double().square().sum() / self.positions


def fit_lens(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    skip: int = SKIP,
    targets: Targets = "later",
    error: float | None = None,
    rows: int | None = None,
    about: str = "",
    progress: Progress | None = None,
) -> JacobianLens:
    """The lens of a model, from the ids of texts; each needs ``skip + 2`` tokens at least.

    ``targets`` are the positions whose effects are summed: "later" with the source itself, or
    "same" for the source alone, estimated by random signs (of a fixed seed). With ``error`` it
    stops as soon as the error bar of every layer is below that, after four texts at least.
    ``rows`` is the number of reverse products at once.

    >>> from fenchel.model import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocabulary=16, layers=3, width=32))
    >>> fit_lens(model, [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], skip=1).layers
    (1, 2)
    """
    subject = hooked(model)
    if not texts:
        raise ValueError("a lens is fitted to texts; none was given.")
    if skip < 0:
        raise ValueError(f"skip={skip} should not be negative.")
    if targets not in _TARGETS:
        raise ValueError(f"targets={targets!r} should be 'later' or 'same'.")
    generator = torch.Generator().manual_seed(0)
    M, L, device = subject.width, subject.layers, subject.device
    wide = torch.promote_types(subject.dtype, torch.float32)
    sums = [torch.zeros(*s, device=device, dtype=wide) for s in ((L - 1, M, M), (L, M))]
    total = torch.zeros(L - 1, dtype=torch.float64, device=device)  # of |J|^2 over texts
    squares, n, positions = total.clone(), 0, 0
    for ids in texts:
        if progress is not None:
            progress("fitting the lens", n, len(texts))
        room = max(8, min(64, _GRAPH // (len(ids) * M * L)))
        signs_T = None
        if targets == "same":
            signs_T = 2.0 * torch.randint(2, (len(ids),), generator=generator) - 1.0
        found = TextJacobians(subject, ids, skip=skip, rows=min(M, rows or room), signs_T=signs_T)
        n, positions = n + 1, positions + found.positions
        sums[0] += found.jacobians
        sums[1] += found.means
        total += found.jacobians.double().square().sum((1, 2))
        squares += found.squares
        spread = _spread(total / n, (sums[0] / n), n / max(n - 1, 1))
        if error is not None and n >= 4 and bool((spread / n**0.5 < error).all()):
            break
    J, means = sums[0] / n, sums[1] / n
    if not bool(J.isfinite().all() and means.isfinite().all()):
        raise ValueError("the streams of this model are not finite on these texts.")
    over_positions = _spread(squares / n, J, 1.0)
    return JacobianLens(
        jacobians={layer: J[layer - 1] for layer in range(1, L)},
        mean_in={layer: means[layer - 1] for layer in range(1, L)},
        mean_out=means[-1],
        spread_texts=dict(enumerate(spread.tolist(), 1)) if n > 1 else {},
        spread_positions=dict(enumerate(over_positions.tolist(), 1)),
        texts=n,
        positions=positions,
        skip=skip,
        targets=targets,
        about=about,
        weights=weights_fingerprint(subject.model),
    )


def fit_flops(model: HookedModel, tokens: int) -> float:
    """About how many operations the lens of a text of so many tokens takes."""
    return 4.0 * model.parameters * tokens * model.width


def _spread(square: Tensor, J: Tensor, correction: float) -> Tensor:
    """sqrt(correction (square - |J|^2)) / |J| per layer."""
    norm = J.double().square().sum((1, 2))
    return (correction * (square - norm).clamp(min=0.0) / norm.clamp(min=1e-300)).sqrt()


def _ranges(layers: Sequence[int]) -> str:
    """
    >>> _ranges((1, 2, 3, 7))
    '1-3, 7'
    """
    parts: list[list[int]] = []
    for n in layers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


class LensError(NamedTuple):
    """The error of the lens of one layer, over the positions of a text but the first."""

    layer: int
    radius: float
    """Of the ball: the share given, times the root mean square length of a token's stream."""
    measured: float
    """|F(X) - read(X)| on the text."""
    certified: float
    """Exceeded by no stream of the ball."""
    mean: float
    """|F(X) - mean_L|: what the mean stream alone leaves."""

    @property
    def vacuous(self) -> bool:
        """Whether the mean stream alone is certified as well."""
        return not self.certified < self.mean


@torch.no_grad()
def lens_errors(
    model: Model,
    fit: JacobianLens,
    ids: Sequence[int],
    share: float = 1e-3,
    *,
    generator: torch.Generator | None = None,
) -> list[LensError]:
    """The errors of the layers of a lens with its offset, over balls of a ``share`` of the stream.

    >>> from fenchel.model import ModelConfig
    >>> config = ModelConfig(vocabulary=16, layers=2, heads=2, width=32)
    >>> model, ids = Transformer(config), list(range(16)) * 2
    >>> (row,) = lens_errors(model, fit_lens(model, [ids]), ids[:8], 1e-4)
    >>> row.measured < row.certified
    True
    """
    transformer = hooked(model).model
    if not isinstance(transformer, Transformer):
        raise ValueError("errors are certified for models that fenchel reads itself.")
    if not 0.0 < share < 1.0:
        raise ValueError(f"a ball of {share:g} of the stream should be above 0 and below 1.")
    if fit.mean_out is None:
        raise ValueError("this lens has no means, and its error is that of the offset.")
    device = transformer.lm_head_weight.device
    records = record_pass(transformer, torch.tensor([list(ids)], device=device)).records
    count, first = len(records), min(fit.layers)
    for n in range(first, count):
        if (reason := why_no_block(records[n])) is not None:
            raise ValueError(f"no error is certified: layer {n + 1} {reason}.")
    blocks = {n: block_layer(records[n], torch.float64) for n in range(first, count)}
    final_TM = blocks[count - 1](records[-1].block.x[0].double())
    mean = float((final_TM - fit.mean_out.to(final_TM))[1:].norm())
    rows = []
    for layer in fit.layers:
        x_TM = records[layer].block.x[0].double()
        radius = share * float(x_TM[1:].square().sum(-1).mean().sqrt())
        above = Chain(tuple(blocks[n] for n in range(layer, count)))
        ball, estimator = Ball.of(radius, "fro", len(x_TM)), NormEstimator(_FAILURE, generator)
        K = float(above.ball_bound(x_TM, ball, estimator).upper)
        slope = float(torch.linalg.matrix_norm(fit.jacobians[layer].double(), 2))
        measured = float((final_TM - fit.read(layer, x_TM))[1:].norm())
        rows.append(LensError(layer, radius, measured, measured + (K + slope) * radius, mean))
    return rows
