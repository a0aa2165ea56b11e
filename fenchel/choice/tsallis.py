"""The Tsallis choice as a differentiable function: the derivatives of entmax and sparsemax.

    dp = J (dx - m dalpha),    J = diag(s) - s s^T / sum(s),    s = p^(2 - alpha) on the support.

alpha may be a tensor and learn: omega'(p_i) = x_i - nu on the support holds while alpha moves, so
dalpha acts like the move of scores -m dalpha, where m is omega' differentiated by alpha,

    m_i = p_i^(alpha - 1) (log p_i - 1 / (alpha - 1)) / (alpha - 1)        up to a constant.

Two forms of one function. For plain tensors it is an ``autograd.Function`` that saves the weights
alone and is differentiable again and again, in reverse and with dual numbers. A compiler drops the
jvp of such a function, and torch.func.jvp of torch.func.jvp takes it for 0, both without a word; so
they get plain operations instead, with the derivative put back by Newton steps.

Correia, Niculae and Martins (2019), Adaptively sparse transformers.
"""

from typing import Any

import torch
from torch import Tensor

from fenchel.choice import rows
from fenchel.choice.base import FORBIDDEN, centred, plain
from fenchel.choice.threshold import origin


def tsallis(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The Tsallis choice for the scores x, differentiable: (..., K) -> (..., K)."""
    if x.shape[-1] == 0:
        return x
    if isinstance(alpha, Tensor):
        if alpha.ndim > 0 and alpha.shape[-1] != 1:
            raise ValueError(
                "alpha needs one entry along the axis of the choice, got shape "
                f"{tuple(alpha.shape)} for scores of shape {tuple(x.shape)}."
            )
        alpha = alpha.to(x.dtype)
        x = x.expand(torch.broadcast_shapes(x.shape, alpha.shape))  # type: ignore[no-untyped-call]
    if not plain(x) or (isinstance(alpha, Tensor) and not plain(alpha)):
        return _traced(x, alpha)
    p: Tensor = _Tsallis.apply(x, alpha)  # type: ignore[no-untyped-call]
    return p


def spread(p: Tensor, alpha: float | Tensor) -> Tensor:
    """p^(2 - alpha) on the support, 0 off it."""
    # The inner where keeps 0 ** (2 - alpha) out of the graph: its derivative is infinite, and
    # an infinity masked afterwards still returns nan.
    on = p > 0
    return torch.where(on, torch.where(on, p, 1.0).pow(2.0 - alpha), 0.0)


class _Tsallis(torch.autograd.Function):
    """``rows.solve`` with J for its derivative."""

    @staticmethod
    def forward(x: Tensor, alpha: float | Tensor) -> Tensor:
        return rows.solve(x, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        _, alpha = inputs
        ctx.alpha = None if isinstance(alpha, Tensor) else alpha
        saved = (output, alpha) if isinstance(alpha, Tensor) else (output,)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        p, alpha = _saved(ctx)
        if not torch.is_grad_enabled():
            move = rows.pull(p, grad, alpha)
        else:
            move = centred(spread(p, alpha), grad)
        if ctx.alpha is not None:
            return move, None
        return move, -(move * _slope_by_alpha(p, alpha)).sum_to_size(alpha.shape)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dalpha: Tensor | None) -> Tensor:
        p, alpha = _saved(ctx)
        move = torch.zeros_like(p) if dx is None else dx
        if dalpha is not None:
            move = move - _slope_by_alpha(p, alpha) * dalpha
        return centred(spread(p, alpha), move)


def _saved(ctx: Any) -> tuple[Tensor, Any]:
    return ctx.saved_tensors if ctx.alpha is None else (*ctx.saved_tensors, ctx.alpha)


def _slope_by_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """m on the support, 0 off it."""
    on = p > 0
    q = torch.where(on, p, 1.0)
    m = q.pow(alpha - 1.0) * (q.log() - 1.0 / (alpha - 1.0)) / (alpha - 1.0)
    return torch.where(on, m, 0.0)


def _traced(x: Tensor, alpha: float | Tensor) -> Tensor:
    """``tsallis`` in operations whose derivatives everybody knows.

    The threshold comes from one opaque operation, as a constant. Two Newton steps from there
    change nothing in value and put back how it depends on x and alpha: each step squares what
    is missing, so the first three derivatives are exact.
    """
    top = x.detach().amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    y = (alpha - 1.0) * (x.masked_fill(empty, 0.0) - top.masked_fill(empty, 0.0))
    still = torch.as_tensor(alpha, dtype=x.dtype, device=x.device).detach()
    d = _threshold(y.detach(), still)
    r = 1.0 / (alpha - 1.0)
    for _ in range(2):
        on, log_u = _log_u(y, d, alpha)
        f = torch.where(on, (r * log_u).exp(), 0.0).sum(-1, keepdim=True)
        g = torch.where(on, ((r - 1.0) * log_u).exp(), 0.0).sum(-1, keepdim=True)
        d = d - (f - f.pow(2.0 - alpha)) / g
    on, log_u = _log_u(y, d, alpha)
    p = torch.where(on, (r * log_u).exp(), 0.0)
    return (p / p.sum(-1, keepdim=True)).masked_fill(empty, 0.0)


def _log_u(y: Tensor, d: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """The support, and log u on it; off it 0, with no derivative."""
    w = y + d
    on = w > -origin(alpha)
    w = torch.where(on, w, 1.0 - origin(alpha))
    if not isinstance(alpha, Tensor):
        return on, (w.log1p() if alpha < 1.5 else w.log())
    near_one = alpha < 1.5
    log1p, log = torch.where(near_one, w, 0.0).log1p(), torch.where(near_one, 1.0, w).log()
    return on, torch.where(near_one, log1p, log)


@torch.library.custom_op("fenchel::tsallis_threshold", mutates_args=())
def _threshold(y: Tensor, alpha: Tensor) -> Tensor:
    return rows.thresholds(y, alpha if alpha.numel() > 1 else alpha.item())


@_threshold.register_fake
def _(y: Tensor, alpha: Tensor) -> Tensor:
    del alpha
    return y.new_empty((*y.shape[:-1], 1))


@_threshold.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, int | None], y: Tensor, alpha: Tensor
) -> tuple[Tensor, int]:
    y_dim, alpha_dim = in_dims
    ndim, size = y.ndim - (y_dim is not None), info.batch_size
    y = y.expand(size, *y.shape) if y_dim is None else y.movedim(y_dim, 0)
    if alpha_dim is not None:  # its own axes stay aligned with the last ones of y
        alpha = alpha.movedim(alpha_dim, 0)
        alpha = alpha.reshape(size, *(1,) * (ndim + 1 - alpha.ndim), *alpha.shape[1:])
    return _threshold(y, alpha), 0
