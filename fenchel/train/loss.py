"""The loss of the next token: cross-entropy, or the Fenchel-Young loss of another choice map.

With logits z, the target distribution y under label smoothing a, and the regulariser Omega of a
choice map (fenchel/choice/base.py),

    y    = (1 - a) onehot(target) + a / V
    loss = sum over targets of  value(z) + Omega(y) - <y, z>,    value(z) = max_p <p, z> - Omega(p)
    e    = dloss/dz = weights(z) - y

Softmax gives value(z) = logsumexp(z) and the cross-entropy, of which -Omega(y), the entropy of y,
is not subtracted, as in torch. Entmax (alpha > 1, Sparsemax is alpha = 2) gives a margin: the loss
is 0 once the target's logit is 1 / (alpha - 1) above all others, and e is 0 at every token that is
far enough below. Hard, with Omega = 0, gives the perceptron loss max(z) - <y, z>.

The sum and not the mean is returned: a step adds the sums of its parts and divides once by the
number of targets (``count_targets``), so that parts of unequal size weigh by their tokens. A target
of -100 (padding) is left out of sums and counts. ``target_losses`` gives the loss of each target,
and ``per_sequence`` the mean over the targets of each sequence, so that short sequences weigh as
much as long ones. Class weights w multiply the loss of a target t by w_t, whichever the map.

``total_loss`` is the definition, for logits that exist already. ``lm_head_loss`` computes the same
from the hidden states h and the matrix W of the LM head:

    z  = W h
    gh = W^T e                                gW = sum over positions of  e h^T

The logits of a batch are its largest tensor by far, V / M times the hidden states, and the
softmax, its derivative and the memory for both come on top. But e follows from z at once: so the
logits of R rows are computed at a time, turned into e, multiplied into both gradients, and
discarded. The memory is that of R rows, and forward and backward take 165 ms instead of 340 ms
(4096 positions, M = 128, V = 4096) or 345 ms instead of 500 ms (2048, 384, 8192), one thread; the
the three products take 150 ms of the first. On a GPU kernels/cross_entropy.py computes e for the
cross-entropy. The gradient is computed with the loss, returned once, and cannot be differentiated
again.

A matrix W that also embeds the tokens (tied) has a second gradient, which is zero but for the rows
of the batch's tokens. ``sparse_embedding_gradient`` adds those rows to the first gradient, where
otherwise a dense table is made for them and two tables are added: a twelfth of the gradient's time
of a Llama of 30M on a CPU.

Blondel, Martins and Niculae (2020), Learning with Fenchel-Young losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fenchel.choice import Choice, by_name

ROWS = 256
"""The fewest rows at a time: every part passes over all of gW, which few rows would not repay."""
LOGITS = {"cpu": 2**20, "cuda": 2**28}
"""Logits at a time, if that is more rows: near a core's cache, or enough to keep a GPU busy."""
SMALLEST = 1e-30
"""Probabilities above it are normal numbers of float32."""
IGNORED = -100
"""A target that is left out of the sum, as in torch."""


def named_loss(name: str, *, alpha: float = 1.5) -> Choice | None:
    """The choice map whose Fenchel-Young loss is called ``name``; None for "cross_entropy".

    >>> named_loss("entmax", alpha=1.25)
    Entmax(alpha=1.25, beta=1.0)
    """
    return None if name == "cross_entropy" else by_name(name, alpha=alpha)


def total_loss(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    *,
    smoothing: float = 0.0,
    choice: Choice | None = None,
    class_weights_V: Tensor | None = None,
) -> Tensor:
    """Sum over all targets: (B, T, V), (B, T) -> (). Targets of -100 are left out.

    In nats for the cross-entropy, which is the loss where ``choice`` is None.

    >>> logits, target = torch.tensor([[[0.0, 3.0, -1.0]]]), torch.tensor([[1]])
    >>> from fenchel.choice import Sparsemax
    >>> total_loss(logits, target), total_loss(logits, target, choice=Sparsemax())
    (tensor(0.0659), tensor(0.))
    """
    if choice is None and class_weights_V is None:
        return cross_entropy(
            _wide(logits_BTV.flatten(0, -2)),
            targets_BT.flatten(),
            reduction="sum",
            label_smoothing=smoothing,
        )
    return target_losses(
        logits_BTV, targets_BT, smoothing=smoothing, choice=choice, class_weights_V=class_weights_V
    ).sum()


def lower_targets(logits_BTV: Tensor, targets_BT: Tensor, margin: float) -> Tensor:
    """The logits with that of every target lower by ``margin``: (B, T, V), (B, T) -> (B, T, V).

    Where no logit moves by more than margin / 2, the loss of these bounds the loss: the
    cross-entropy log(1 + sum_j exp(z_j - z_t)) grows with every z_j - z_t.

    >>> lower_targets(torch.tensor([[[0.0, 3.0]]]), torch.tensor([[1]]), 1.0)
    tensor([[[0., 2.]]])
    """
    at_BT1 = targets_BT.clamp(min=0).unsqueeze(-1)
    return logits_BTV.scatter_add(-1, at_BT1, logits_BTV.new_full(at_BT1.shape, -margin))


def target_losses(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    *,
    smoothing: float = 0.0,
    choice: Choice | None = None,
    class_weights_V: Tensor | None = None,
) -> Tensor:
    """The loss of every target, 0 where it is -100: (B, T, V), (B, T) -> (B, T).

    >>> target_losses(torch.zeros(1, 2, 8), torch.tensor([[3, -100]]))
    tensor([[2.0794, 0.0000]])
    """
    z_NV, targets_N = _wide(logits_BTV.flatten(0, -2)), targets_BT.flatten()
    if choice is None:
        losses_N = cross_entropy(z_NV, targets_N, reduction="none", label_smoothing=smoothing)
    else:
        counts = targets_N != IGNORED
        losses_N = z_NV.new_zeros(len(z_NV))
        losses_N[counts] = _choice_losses(choice, z_NV[counts], targets_N[counts], smoothing)
    if class_weights_V is not None:
        losses_N = losses_N * class_weights_V.to(losses_N)[targets_N.clamp(min=0)]
    return losses_N.view_as(targets_BT)


def per_sequence(losses_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean over the targets of each sequence, 0 for one without any: (B, T) -> (B,).

    >>> targets = torch.tensor([[3, 1], [3, -100]])
    >>> per_sequence(target_losses(torch.zeros(2, 2, 8), targets), targets)
    tensor([2.0794, 2.0794])
    """
    return losses_BT.sum(-1) / (targets_BT != IGNORED).sum(-1).clamp(min=1)


def count_targets(targets: Tensor) -> int:
    """The number of targets that are not -100: what a sum of losses is divided by.

    >>> count_targets(torch.tensor([[3, 1], [3, -100]]))
    3
    """
    if targets.is_cpu:  # numpy counts with one thread; starting those of torch takes longer
        return int(np.count_nonzero(targets.numpy() != IGNORED))
    return int((targets != IGNORED).sum())


def _choice_losses(choice: Choice, z_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    if not smoothing:
        return choice.loss(z_NV, targets_N)
    V = z_NV.shape[-1]
    y_NV = torch.full_like(z_NV, smoothing / V)
    y_NV.scatter_add_(-1, targets_N.unsqueeze(-1), torch.full_like(y_NV[:, :1], 1.0 - smoothing))
    return choice.loss(z_NV, y_NV)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def lm_head_loss(
    hidden_BTM: Tensor,
    weight_VM: Tensor,
    targets_BT: Tensor,
    *,
    smoothing: float = 0.0,
    choice: Choice | None = None,
    class_weights_V: Tensor | None = None,
) -> Tensor:
    """``total_loss`` of the logits hidden @ weight.T: (B, T, M), (V, M), (B, T) -> ().

    Targets of -100 are left out. The logits never exist all at once.

    >>> hidden, weight, targets = torch.randn(2, 3, 4), torch.randn(9, 4), torch.zeros(2, 3).long()
    >>> loss = lm_head_loss(hidden, weight, targets)
    >>> torch.testing.assert_close(loss, total_loss(hidden @ weight.T, targets))
    """
    learns = torch.is_grad_enabled() and (hidden_BTM.requires_grad or weight_VM.requires_grad)
    device, dtype = hidden_BTM.device.type, hidden_BTM.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    targets_N, V = targets_BT.flatten(), len(weight_VM)
    count_N = _row_counts(targets_N, V, class_weights_V)
    if count_N is not None:
        targets_N = targets_N.clamp(0, V - 1)
    loss: Tensor = _LMHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BTM.flatten(0, -2), weight_VM, targets_N, count_N, smoothing, choice, dtype, learns
    )
    return loss


def _row_counts(targets_N: Tensor, V: int, class_weights_V: Tensor | None) -> Tensor | None:
    """The factor of each row's loss, 0 for a target of -100; None where every factor is 1.

    A target outside the vocabulary raises on a CPU. On a GPU the answer would have to be waited
    for: there its row counts nan times, and the loss is nan.
    """
    inside_N = (targets_N >= 0) & (targets_N < V)
    if targets_N.is_cpu:
        if class_weights_V is None and bool(inside_N.all()):
            return None
        outside_N = ~inside_N & (targets_N != IGNORED)
        if bool(outside_N.any()):
            raise ValueError(
                f"a target is an index below {V}, or {IGNORED} to be left out; got "
                f"{int(targets_N[outside_N][0])}."
            )
    count_N = inside_N.new_ones(len(targets_N), dtype=torch.float32)
    if class_weights_V is not None:
        count_N = class_weights_V.to(targets_N.device)[targets_N.clamp(0, V - 1)]
    return torch.where(inside_N, count_N, torch.where(targets_N == IGNORED, 0.0, torch.nan))


@contextmanager
def sparse_embedding_gradient(embedding: nn.Embedding | None) -> Iterator[None]:
    """Context manager: ``embedding`` has a sparse gradient, on a CPU in float32 or float64.

    For an embedding that is tied to the LM head: the loss must follow, whose gradient is dense, or
    the gradient stays sparse. None changes nothing. In half precision every token would round.
    """
    exact = (torch.float32, torch.float64)
    if embedding is None or not (embedding.weight.is_cpu and embedding.weight.dtype in exact):
        yield
        return
    embedding.sparse = True
    try:
        yield
    finally:
        embedding.sparse = False


class _LMHeadLoss(torch.autograd.Function):
    """The sum of the losses, with both gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NM: Tensor,
        W_VM: Tensor,
        targets_N: Tensor,
        count_N: Tensor | None,
        smoothing: float,
        choice: Choice | None,
        dtype: torch.dtype,
        learns: bool,
    ) -> Tensor:
        N, V = len(h_NM), len(W_VM)
        R = min(N, max(ROWS, LOGITS.get(h_NM.device.type, 0) // V))
        wide = torch.promote_types(dtype, torch.float32)
        fused = choice is None and _fused(h_NM)
        # GPU products of odd widths are slow: C >= V columns, those beyond V all zero.
        C = -(-V // 64) * 64 if fused else V
        table_CM = pad(W_VM.to(dtype), (0, 0, 0, C - V)) if C > V else W_VM.to(dtype)
        # One buffer for all parts: fresh memory is slow.
        room_RC = h_NM.new_empty(R, C, dtype=dtype if fused else wide)
        loss = h_NM.new_zeros((), dtype=wide)
        if learns:
            gh_NM, gW_CM = torch.empty_like(h_NM), torch.empty_like(table_CM, dtype=wide)
        with torch.autocast(h_NM.device.type, enabled=False):
            for n in range(0, N, R):
                h_RM, targets_R = h_NM[n : n + R].to(dtype), targets_N[n : n + R]
                z_RC = _read(h_RM, table_CM, room_RC[: len(h_RM)])
                if fused:
                    from fenchel.kernels.cross_entropy import softmax_errors

                    loss_R = softmax_errors(z_RC[:, :V], targets_R, smoothing)
                elif choice is None:
                    loss_R, z_RC = _to_errors(z_RC, targets_R.unsqueeze(-1), smoothing)
                else:
                    loss_R = _to_choice_errors(choice, z_RC, targets_R, smoothing)
                if count_N is not None:  # scales the narrow factors of both products, not e
                    count_R1 = count_N[n : n + R].unsqueeze(-1)
                    loss_R = loss_R.view(-1, 1) * count_R1
                loss += loss_R.sum()
                if learns:
                    e_RC = z_RC.to(dtype)
                    gh_RM = e_RC @ table_CM
                    if count_N is not None:
                        gh_RM, h_RM = (x * count_R1.to(x.dtype) for x in (gh_RM, h_RM))
                    gh_NM[n : n + R] = gh_RM
                    _add_product(gW_CM, e_RC.T, h_RM, first=n == 0)
        if learns:
            ctx.gradients = gh_NM, gW_CM[:V].to(W_VM.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients are constants here: a derivative would be lost
            raise RuntimeError(
                "lm_head_loss has no second derivative; take total_loss of the logits instead."
            )
        if ctx.gradients is None:
            raise RuntimeError("lm_head_loss was differentiated already; compute it again.")
        gh_NM, gW_VM = ctx.gradients
        ctx.gradients = None  # no other reference is left, so autograd need not copy them
        gh_NM.mul_(g.to(gh_NM.dtype))
        gW_VM.mul_(g.to(gW_VM.dtype))
        return gh_NM, gW_VM, None, None, None, None, None, None


def _fused(h_NM: Tensor) -> bool:
    """Whether kernels/cross_entropy.py computes e: on a GPU, up to float32, with Triton."""
    return h_NM.is_cuda and h_NM.dtype != torch.float64 and find_spec("triton") is not None


def _read(h_RM: Tensor, table_VM: Tensor, room_RV: Tensor) -> Tensor:
    """z, written into ``room``."""
    if h_RM.dtype == room_RV.dtype:
        return torch.mm(h_RM, table_VM.T, out=room_RV)
    return room_RV.copy_(h_RM @ table_VM.T)


def _to_errors(z_RV: Tensor, targets_R1: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of every row, (R, 1), and e = softmax(z) - y, (R, V).

    lse - z_t is -log p_t, of which p_t has all digits unless it is so small that it underflows;
    such rows, of tokens that the model all but excludes, are computed by logsumexp.
    """
    e_RV = torch.softmax(z_RV, -1)  # one pass of torch, where exp and its neighbours take five
    reached_R1 = z_RV.gather(-1, targets_R1)
    p_R1 = e_RV.gather(-1, targets_R1)
    loss_R1 = p_R1.log().neg_()
    # "not above": a nan in z stays one
    if not bool((p_R1 > SMALLEST).all()):
        loss_R1 = torch.logsumexp(z_RV, -1, keepdim=True) - reached_R1
    if smoothing:
        loss_R1 += smoothing * (reached_R1 - z_RV.mean(-1, keepdim=True))
        e_RV.sub_(smoothing / z_RV.shape[-1])
    e_RV.scatter_add_(-1, targets_R1, torch.full_like(reached_R1, smoothing - 1.0))
    return loss_R1, e_RV


def _to_choice_errors(choice: Choice, z_RV: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
    """The loss of every row, (R,); z becomes e = weights(z) - y in place."""
    V, targets_R1 = z_RV.shape[-1], targets_R.unsqueeze(-1)
    z_RV.sub_(z_RV.amax(-1, keepdim=True))  # the loss is the same for z + c; large c costs digits
    p_RV = choice.weights(z_RV)
    loss_R = (p_RV * z_RV).sum(-1) - choice.regulariser(p_RV)
    loss_R -= (1.0 - smoothing) * z_RV.gather(-1, targets_R1).squeeze(-1)
    y_V = z_RV.new_full((V,), smoothing / V)
    y_V[0] += 1.0 - smoothing  # Omega is the same whichever token is the target
    loss_R += choice.regulariser(y_V)
    if smoothing:
        loss_R -= smoothing * z_RV.mean(-1)
    z_RV.copy_(p_RV)
    if smoothing:
        z_RV.sub_(smoothing / V)
    z_RV.scatter_add_(-1, targets_R1, z_RV.new_full(targets_R1.shape, smoothing - 1.0))
    return loss_R


def _add_product(sum_VM: Tensor, a_VR: Tensor, b_RM: Tensor, *, first: bool) -> None:
    """sum += a b, in the precision of the sum; the first product overwrites it."""
    beta = 0.0 if first else 1.0
    if a_VR.dtype == sum_VM.dtype:
        sum_VM.addmm_(a_VR, b_RM, beta=beta)
    elif sum_VM.is_cuda:  # cuBLAS can add half-precision products to a float32 sum
        torch.addmm(sum_VM, a_VR, b_RM, out_dtype=sum_VM.dtype, beta=beta, out=sum_VM)
    elif first:
        sum_VM.copy_(a_VR @ b_RM)
    else:
        sum_VM += a_VR @ b_RM
