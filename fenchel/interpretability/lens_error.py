"""How far a lens can be from the last stream, certified over a ball.

A lens reads the stream X after layer l, (T, M), as if the blocks above it were affine:

    read(X) = mean_L + (X - mean_l) J^T,      F(X) = blocks l + 1 to L, what the model computes

On a text the error |F(X) - read(X)| is measured. With K a Lipschitz constant of F over the ball of
radius r about X (fenchel/sensitivity), every stream X' of the ball has

    |F(X') - read(X')|  <=  |F(X) - read(X)| + (K + |J|_2) r.

The norm is over the positions but the first, as in all means of a lens; K holds for all of them.
The certificate is vacuous where it is not below |F(X) - mean_L|: the mean stream alone, whatever X
is, is then as good. K grows fast with the radius and with the number of blocks, so that it says
something for small radii and the last layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fenchel.inspection.certificates import block_layer, why_no_block
from fenchel.inspection.our_model import record_pass
from fenchel.interpretability.hooked_model import Model, hooked
from fenchel.interpretability.jacobian_lens import JacobianLens
from fenchel.model import Transformer
from fenchel.sensitivity import Ball
from fenchel.sensitivity.layers import Chain
from fenchel.sensitivity.perturbation import NormEstimator

_FAILURE = 1e-9  # probability that a norm at the centre is too small


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

    >>> from fenchel.interpretability import fit_lens
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
