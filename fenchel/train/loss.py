"""Cross-entropy of the next token.

    loss = - sum over targets of  sum_v y_v log softmax(z)_v
    y    = (1 - a) onehot(target) + a / V           label smoothing a

It is the Fenchel-Young loss of the Softmax choice. This is the definition, for logits that are at
hand; a step of training computes the same from the stream in parts (readout.py). The sum and
not the mean is returned: a step adds the sums of its parts and divides once by the number of
targets, so that parts of unequal size weigh by their tokens.

The loss of fenchel/train/loss.py, read out of the stream in parts.

With h the normalised stream at a position, W the read-out table and y the smoothed target,

    z    = W h
    loss = sum over positions of  logsumexp(z) - <y, z>,     y = (1 - a) onehot(target) + a / V
    e    = dloss/dz = softmax(z) - y
    gh   = W^T e                                gW = sum over positions of  e h^T

The logits of a batch are its largest tensor by far, V / M times the stream, and the softmax,
its derivative and the memory for both come on top. But e follows from z at once: so R rows are
read at a time, turned in place into their part of both gradients, and forgotten. The memory is
that of R rows, and forward and backward take 165 ms instead of 340 ms (4096 positions, M = 128,
V = 4096) or 345 ms instead of 500 ms (2048, 384, 8192), one thread; the three products alone
take 150 ms of the first. On a GPU kernels/cross_entropy.py does the part between the products.

The gradient is computed with the loss, handed over once, and cannot be differentiated again.

A table that is read out and also embeds the tokens has a second gradient, which is zero but for
the rows of the batch's tokens. ``sparse_embedding_gradient`` has those rows added to the first,
where otherwise a table of zeros is made for them and two whole tables are added up: a twelfth of
the gradient of a Llama of 30M on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad


def total_loss(logits_BTV: Tensor, targets_BT: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Sum over all targets, in nats: (B, T, V), (B, T) -> ()."""
    return cross_entropy(
        logits_BTV.flatten(0, -2).float(),
        targets_BT.flatten(),
        reduction="sum",
        label_smoothing=smoothing,
    )


ROWS = 256
"""The fewest rows at a time: every part passes over all of gW, which few rows would not repay."""
LOGITS = {"cpu": 2**20, "cuda": 2**28}
"""Logits at a time, if that is more rows: near a core's cache, or enough to keep a GPU busy."""


def lm_head_loss(
    stream_BTM: Tensor, table_VM: Tensor, targets_BT: Tensor, *, smoothing: float = 0.0
) -> Tensor:
    """Sum over all targets, in nats: (B, T, M), (V, M), (B, T) -> ()."""
    learns = torch.is_grad_enabled() and (stream_BTM.requires_grad or table_VM.requires_grad)
    device, dtype = stream_BTM.device.type, stream_BTM.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    loss: Tensor = _ReadoutLoss.apply(  # type: ignore[no-untyped-call]
        stream_BTM.flatten(0, -2), table_VM, targets_BT.flatten(), smoothing, dtype, learns
    )
    return loss


@contextmanager
def sparse_embedding_gradient(model: nn.Module) -> Iterator[None]:
    """A pass inside gives a tied embedding's gradient as rows, on a CPU, where that is quicker.

    The table must then be read out, or its whole gradient stays a matter of rows.
    """
    embed = getattr(model, "embed", None)
    if not isinstance(embed, nn.Embedding) or not _by_rows(embed.weight, model):
        yield
        return
    embed.sparse = True
    try:
        yield
    finally:
        embed.sparse = False


def _by_rows(table: Tensor, model: nn.Module) -> bool:
    """Whether the table is read out too, on a CPU; half a number would round at every token."""
    tied = table is getattr(model, "lm_head_weight", None)
    return tied and table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64)


class _ReadoutLoss(torch.autograd.Function):
    """The sum of the losses; its gradients are at hand when it is."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NM: Tensor,
        W_VM: Tensor,
        targets_N: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        learns: bool,
    ) -> Tensor:
        N, V = len(h_NM), len(W_VM)
        R = min(N, max(ROWS, LOGITS.get(h_NM.device.type, 0) // V))
        wide = torch.promote_types(dtype, torch.float32)
        fused = _fused(h_NM)
        # A GPU's products of odd widths are slow: C >= V columns, those beyond V all zero.
        C = -(-V // 64) * 64 if fused else V
        table_CM = pad(W_VM.to(dtype), (0, 0, 0, C - V)) if C > V else W_VM.to(dtype)
        room_RC = h_NM.new_empty(R, C, dtype=dtype if fused else wide)  # fresh memory is slow
        loss = h_NM.new_zeros((), dtype=wide)
        if learns:
            gh_NM, gW_CM = torch.empty_like(h_NM), torch.empty_like(table_CM, dtype=wide)
        with torch.autocast(h_NM.device.type, enabled=False):
            for n in range(0, N, R):
                h_RM, targets_R = h_NM[n : n + R].to(dtype), targets_N[n : n + R]
                z_RC = _read(h_RM, table_CM, room_RC[: len(h_RM)])
                if fused:
                    from fenchel.kernels.cross_entropy import softmax_errors

                    loss += softmax_errors(z_RC[:, :V], targets_R, smoothing).sum()
                else:
                    loss += _to_errors(z_RC, targets_R.unsqueeze(-1), smoothing).sum()
                if learns:
                    e_RC = z_RC.to(dtype)
                    gh_NM[n : n + R] = e_RC @ table_CM
                    _add_product(gW_CM, e_RC.T, h_RM, first=n == 0)
        if learns:
            ctx.gradients = gh_NM, gW_CM[:V].to(W_VM.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients are numbers here: a derivative would be lost
            raise RuntimeError(
                "lm_head_loss has no second derivative; take total_loss of the logits instead."
            )
        if ctx.gradients is None:
            raise RuntimeError("lm_head_loss was differentiated already; compute it again.")
        gh_NM, gW_VM = ctx.gradients
        ctx.gradients = None  # handed over, so that nobody has to copy them
        return gh_NM.mul_(g.to(gh_NM.dtype)), gW_VM.mul_(g.to(gW_VM.dtype)), None, None, None, None


def _fused(h_NM: Tensor) -> bool:
    """Whether the kernel takes the middle part: on a GPU, up to float32, where Triton is."""
    return h_NM.is_cuda and h_NM.dtype != torch.float64 and find_spec("triton") is not None


def _read(h_RM: Tensor, table_VM: Tensor, room_RV: Tensor) -> Tensor:
    """z, written into the room for it."""
    if h_RM.dtype == room_RV.dtype:
        return torch.mm(h_RM, table_VM.T, out=room_RV)
    return room_RV.copy_(h_RM @ table_VM.T)


def _to_errors(z_RV: Tensor, targets_R1: Tensor, smoothing: float) -> Tensor:
    """The loss of every row, (R, 1); z becomes e = softmax(z) - y in place."""
    reached_R1 = (1.0 - smoothing) * z_RV.gather(-1, targets_R1)
    if smoothing:
        reached_R1 += smoothing * z_RV.mean(-1, keepdim=True)
    top_R1 = z_RV.amax(-1, keepdim=True)
    total_R1 = z_RV.sub_(top_R1).exp_().sum(-1, keepdim=True)
    z_RV.div_(total_R1)
    if smoothing:
        z_RV.sub_(smoothing / z_RV.shape[-1])
    z_RV.scatter_add_(-1, targets_R1, torch.full_like(reached_R1, smoothing - 1.0))
    return top_R1 + total_R1.log() - reached_R1


def _add_product(sum_VM: Tensor, a_VR: Tensor, b_RM: Tensor, *, first: bool) -> None:
    """sum += a b, in the precision of the sum; the first is put into what was empty."""
    beta = 0.0 if first else 1.0
    if a_VR.dtype == sum_VM.dtype:
        sum_VM.addmm_(a_VR, b_RM, beta=beta)
    elif sum_VM.is_cuda:  # its products of narrow numbers can add to a wide sum
        torch.addmm(sum_VM, a_VR, b_RM, out_dtype=sum_VM.dtype, beta=beta, out=sum_VM)
    elif first:
        sum_VM.copy_(a_VR @ b_RM)
    else:
        sum_VM += a_VR @ b_RM
