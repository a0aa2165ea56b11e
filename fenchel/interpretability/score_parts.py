"""Why a head attends there: one score as a sum over pairs of what wrote the two streams.

The stream before a layer is a sum of parts, x = sum_c x^c: the embedding and what the attention and
the MLP of every earlier layer added. A score is bilinear in the streams of its query and its key,

    z_ij = scale q_i . k_j,     q_i = R_i N_q(W_q N(x_i) + b_q),     k_j likewise,

once the norms N (of the stream) and N_q (of queries, where there is one) keep the scale 1/s that
they have at this x: N(x) = g (x / s) + b is then affine in x, rotations R are linear, and

    z_ij = sum over parts c, e of  scale q_i^c . k_j^e        exactly,

with one more part on each side, "bias", for what does not depend on the stream. Where a norm
follows every branch (norm_place="post"), the parts of the stream pass through it in the same way.

Scores by distance are z_ij = scale (2 q_i . k_j - |k_j|^2), less what is the same for all keys.
|k_j|^2 = sum_e k_j^e . k_j, so they have one more part of the query, "length of the key". Keys that
are constants, as a sink is, have no stream: the mean is that of the other keys.

A model of transformers is asked for its own q and k: its block reads a batch of the whole stream,
of every part and of zeros, while its norms keep the scale that they have for the first of them. An
affine map gives q^c = q(x^c) - q(0) and the bias q(0); whether the streams and the queries are the
sums of their parts is checked.

No choice depends on a shift of all scores of a query, so what a key stands out by is z_ij less the
mean sum_j p_j z_ij under the weights of that query. It has the same form with k_j less the mean key
sum_j p_j k_j. Without that, heads that attend to a sink have large scores that explain nothing.

Pairs cancel: the sum of their absolute values is often several times their sum, and single heads of
deep models are worse. So parts are whole branches, in the order of the layers; the sums over one
side (``by_query``, ``by_key``) are what a person reads first.

C parts, T tokens, M width of the stream, H heads, G heads of keys, D width per head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall, attention_weights, rotate
from fenchel.attention.rotary import Angles
from fenchel.inspection_result import ScoreParts
from fenchel.interpretability.hooked_model import (
    HookedModel,
    Model,
    RecordedPass,
    Taps,
    can_be_hooked,
    hooked,
)
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.forward_context import ForwardContext
from fenchel.model.norm import RMSNorm
from fenchel.model.sigma_linear import matrix_of

_ROUNDING = 1e-2  # relative; bfloat16 sums parts to this


@torch.no_grad()
def score_parts(
    model: Model,
    ids: Sequence[int],
    layer: int,
    head: int,
    query: int = -1,
    key: int | None = None,
) -> ScoreParts:
    """Why a head of a layer, both from 1, gives a key its score for a query.

    Positions count from 0, negative ones from the end. Without ``key`` it is the one with the
    largest weight.

    >>> from fenchel.model import ModelConfig
    >>> config = ModelConfig(vocabulary=16, layers=2, heads=2, width=32, initial="xavier")
    >>> found = score_parts(Transformer(config), [3, 1, 4, 1, 5], layer=2, head=1)
    >>> found.parts
    ['embedding', 'attention 1', 'mlp 1', 'bias']
    """
    subject, T = hooked(model), len(ids)
    if not 1 <= layer <= subject.layers:
        raise ValueError(f"there is no layer {layer}; the model has 1 to {subject.layers}.")
    for name, at in (("query", query), ("key", key)):
        if at is not None and not -T <= at < T:
            raise ValueError(f"there is no {name} {at} in a text of {T} tokens.")
    if isinstance(subject.model, Transformer):
        _require_sums(subject.model, layer)
    recorded = RecordedPass()
    subject.logits(subject.batch(ids), recorded)
    call, i = recorded.calls[layer], query % T
    H, G = call.q.shape[1], call.k.shape[1]
    if not 1 <= head <= H:
        raise ValueError(f"there is no head {head}; a layer has 1 to {H}.")
    fixed, group = call.spec.fixed_keys, (head - 1) * G // H
    p_S = attention_weights(call.q, call.k, rows=[i], heads=[head - 1], **call.spec)[0, 0, 0]
    p_S, log_S = p_S[fixed:].double(), _log_prior(call, head, i)
    log_S = None if log_S is None else log_S[fixed:]
    j = int(p_S.argmax()) if key is None else key % T
    if log_S is not None and not bool(log_S[j].isfinite()):
        seen = log_S.isfinite().nonzero().flatten().tolist()
        raise ValueError(f"query {i} sees the keys {seen[0]} to {seen[-1]} only, and not {j}.")
    weight, seen_weight = float(p_S[j]), float(p_S.sum())
    if not seen_weight > 0.0:
        raise ValueError(f"query {i} gives all its weight to the sink and none to a key.")
    p_S = p_S / seen_weight
    if isinstance(subject.model, Transformer):
        names, q_CTD, k_CTD = _own_parts(subject, recorded, layer, head - 1, group)
    else:
        names, q_CTD, k_CTD = _parts_by_rows(subject, ids, recorded, layer, head - 1, group)
    scale = call.spec.scale_for(call.q.shape[-1])
    above_CD = k_CTD[:, j] - torch.einsum("s,csd->cd", p_S, k_CTD)
    pairs_CC = scale * q_CTD[:, i] @ above_CD.T
    if call.q.shape[-1] > k_CTD.shape[-1]:  # scores by distance: a constant of q, -|k|^2 / 2 of k
        square_CT = torch.einsum("ctd,td->ct", k_CTD, k_CTD.sum(0))
        row_C = -0.5 * scale * (square_CT[:, j] - square_CT @ p_S)
        pairs_CC = nn.functional.pad(torch.cat((pairs_CC, row_C[None])), (0, 1))
        names = [*names, "length of the key"]
    z_S = scale * (call.k[0, group, fixed:].double() @ call.q[0, head - 1, i].double())
    score, mean = float(z_S[j]), float(p_S @ z_S)
    return ScoreParts(
        layer=layer,
        head=head,
        query=i,
        key=j,
        weight=weight,
        score=score,
        mean=mean,
        parts=names,
        pairs=pairs_CC.tolist(),
        remainder=score - mean - float(pairs_CC.sum()),
        prior=None if log_S is None else _above_mean(log_S, j, p_S),
        softcap=call.spec.softcap,
        sink=1.0 - seen_weight if fixed else None,
    )


def _require_sums(model: Transformer, layer: int) -> None:
    """Refuse a layer whose scores are not sums over pairs of parts of two streams."""
    if model.config.is_delta(layer - 1):
        raise ValueError(f"layer {layer} is a gated DeltaNet and gives no weights to keys.")
    if reason := _why_no_sums(model.config):
        raise ValueError(f"scores of this model have no parts: {reason}.")


def _why_no_sums(config: ModelConfig) -> str | None:
    """Why scores are not sums over pairs of parts in a model with these settings."""
    if config.shared_kv_layers > 0:
        return "keys of another layer were made from the stream before it"
    if config.per_layer_width > 0 or config.layer_scale:
        return "its blocks add an embedding or a factor after the MLP"
    return None


def has_score_parts(model: Model) -> bool:
    """Whether ``score_parts`` reads a model: its sites are found, and its scores have parts.

    >>> from fenchel.model import ModelConfig
    >>> has_score_parts(Transformer(ModelConfig(vocabulary=16, kind="encoder")))
    False
    """
    if not can_be_hooked(model):
        return False
    subject = hooked(model).model
    return not (isinstance(subject, Transformer) and _why_no_sums(subject.config))


def _own_parts(
    subject: HookedModel, recorded: RecordedPass, layer: int, head: int, group: int
) -> tuple[list[str], Tensor, Tensor]:
    """Names of the parts, and their queries and keys (C, T, D), of a Transformer."""
    model, block = subject.model, subject.blocks[layer - 1].block
    assert isinstance(model, Transformer)
    assert isinstance(block, Block)
    names, x_CTM = _stream_parts(subject, recorded, layer)
    T, x_1TM = x_CTM.shape[1], recorded.streams[0]
    attention = model.attention(layer - 1)
    rotary = model._rotary(0, T, None, x_1TM)[int(attention.local)]
    angles = rotary if attention.rotates else None
    q_CTD, k_CTD = _queries_and_keys(block, attention, x_CTM, head, group, angles)
    growth = attention.temperature(
        ForwardContext(query_scale=model._query_scale(0, T, None, x_1TM))
    )
    if growth is not None:  # (T, 1), or (H, T, 1) where every head has its own
        q_CTD = q_CTD * (growth if growth.ndim == 2 else growth[head]).double()
    return names, q_CTD, k_CTD


def _stream_parts(
    subject: HookedModel, recorded: RecordedPass, layer: int
) -> tuple[list[str], Tensor]:
    """The names and values (C, T, M), in float64, of the parts of the stream before a layer.

    The last one, "bias", is what norms after branches add; without them it is zero.
    """
    x_TM = recorded.streams[0][0].double()
    names, x_CTM = ["embedding", "bias"], torch.stack((x_TM, torch.zeros_like(x_TM)))
    for n in range(1, layer):
        block = subject.blocks[n - 1].block
        assert isinstance(block, Block)
        after = {"attention": block.attention_post_norm, "mlp": block.mlp_post_norm}
        for part, norm in after.items():
            y_TM = recorded.branches[part, n][0]
            y_TM = block.scale * (y_TM if norm is None else norm(y_TM)).double()
            x_CTM = torch.cat((x_CTM[:-1], y_TM[None], x_CTM[-1:]))
            names.insert(-1, f"{part} {n}")
            if block.post:
                x_CTM = _frozen(
                    block.attention_norm if part == "attention" else block.mlp_norm, x_CTM
                )
    return names, x_CTM


def _queries_and_keys(
    block: Block,
    attention: Attention,
    x_CTM: Tensor,
    head: int,
    group: int,
    angles: Angles | None,
) -> tuple[Tensor, Tensor]:
    """The parts of the queries and keys of one head, (C, T, D) each."""
    H, G, D = attention.heads, attention.groups, attention.head_width
    y_CTM = x_CTM if block.post else _frozen(block.attention_norm, x_CTM)
    W, b = matrix_of(attention.qkv).double(), attention.qkv.bias
    found = []
    for first, count, at, norm in (
        (0, H, head, attention.q_norm),
        (0 if attention.l2 else H * D, G, group, attention.k_norm),  # l2: one map for both
    ):
        own = slice(at * D, (at + 1) * D)
        joint = attention.joint_norm and norm is not None  # it needs all heads for its scale
        start, rows_count = (first, count * D) if joint else (first + own.start, D)
        rows = slice(start, start + rows_count)
        z_CTD = y_CTM @ W[rows].T
        if b is not None:
            z_CTD[-1] += b[rows].double()
        z_CTD = z_CTD if norm is None else _frozen(norm, z_CTD)
        z_CTD = z_CTD[..., own] if joint else z_CTD
        if angles is not None:
            z_CTD = rotate(z_CTD[:, None], angles, layout=attention.rotary_layout)[:, 0]
        found.append(z_CTD)
    return found[0], found[1]


def _frozen(norm: nn.Module, x: Tensor) -> Tensor:
    """The parts of norm(x) at the scale that it has for their sum; its bias is the last part's."""
    if isinstance(norm, nn.Identity):
        return x
    assert isinstance(norm, RMSNorm | nn.LayerNorm)
    centred = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    r = (centred.sum(0).square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    y = centred * r
    if norm.elementwise_affine:
        y = y * (norm.weight if isinstance(norm, nn.LayerNorm) else norm.gain).double()
    if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
        y[-1] += norm.bias.double()
    return y


def _parts_by_rows(
    subject: HookedModel,
    ids: Sequence[int],
    recorded: RecordedPass,
    layer: int,
    head: int,
    group: int,
) -> tuple[list[str], Tensor, Tensor]:
    """Names of the parts, and their queries and keys (C, T, D), of a model of transformers."""
    names, parts = ["embedding"], [recorded.streams[0][0]]
    for n in range(1, layer):
        if ("attention", n) not in recorded.branches:
            raise ValueError(
                f"scores of {subject.name} have no parts: its attention is no module of its own."
            )
        attention_TM = recorded.branches["attention", n][0]
        rest_TM = recorded.streams[n][0] - recorded.streams[n - 1][0] - attention_TM
        mlp = recorded.branches.get(("mlp", n))  # some blocks have no module for it
        names += [f"attention {n}", f"mlp {n}"]
        parts += [attention_TM, rest_TM if mlp is None else mlp[0]]
    x_CTM, total_TM = torch.stack(parts), recorded.streams[layer - 1][0]
    if not _close(x_CTM.sum(0), total_TM):
        raise ValueError(
            f"scores of {subject.name} have no parts: the stream before layer {layer} is not the "
            "sum of the embedding and what attention and MLPs returned."
        )
    rows = torch.cat((total_TM[None], x_CTM, torch.zeros_like(x_CTM[:1])))
    taps = _Rows(layer, rows)
    with _norms_of_first_row(subject.blocks[layer - 1].block, taps):
        subject.logits(subject.batch(ids, rows=len(rows)), taps)
    assert taps.call is not None
    found = []
    for x, at in ((taps.call.q, head), (taps.call.k, group)):
        x_RTD = x[:, at].double()
        x_CTD = torch.cat((x_RTD[1:-1] - x_RTD[-1], x_RTD[-1:]))
        if not _close(x_CTD.sum(0), x_RTD[0]):
            raise ValueError(
                f"scores of {subject.name} have no parts: its queries or keys are not linear in "
                "the normalised stream."
            )
        found.append(x_CTD)
    return [*names, "bias"], found[0], found[1]


class _Rows(Taps):
    """A batch of other streams before a layer, and the attention call of that layer."""

    def __init__(self, layer: int, rows: Tensor) -> None:
        self.layer, self.rows = layer, rows
        self.call: AttentionCall | None = None

    def stream(self, layer: int, x_BTM: Tensor) -> Tensor:
        return self.rows.to(x_BTM.dtype) if layer == self.layer - 1 else x_BTM

    def attention(self, layer: int, call: AttentionCall) -> Tensor | None:
        self.call = call if layer == self.layer else self.call
        return None


@contextmanager
def _norms_of_first_row(block: nn.Module, taps: _Rows) -> Iterator[None]:
    """Context manager: norms of a block scale all rows as the first, until its attention call."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if taps.call is not None or not args:
            return None
        return _norm_of_first_row(module, args[0], out)

    norms = [module for module in block.modules() if "norm" in type(module).__name__.lower()]
    handles = [module.register_forward_hook(hook) for module in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _norm_of_first_row(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What a norm gives for all rows of x at the scale of row 0: a gain, a scale per token, a bias.

    The gain is the weight of the module, 1 + weight or 1, and x may be centred first; whichever it
    is, y[0] must be that.
    """
    bias = getattr(module, "bias", None)
    bias = torch.zeros((), dtype=x.dtype, device=x.device) if bias is None else bias
    weight: Tensor | None = getattr(module, "weight", None)
    ones = torch.ones_like(x[0, ..., :1])
    gains = (ones,) if weight is None else (weight, 1.0 + weight, ones)
    for centred, gain in product((x, x - x.mean(-1, keepdim=True)), gains):
        z = centred * gain
        dot = (z[:1] * (y[:1] - bias)).sum(-1, keepdim=True)
        scaled = z * (dot / z[:1].square().sum(-1, keepdim=True)) + bias
        if _close(scaled[0], y[0]):
            return scaled
    raise ValueError(
        f"scores of this model have no parts: {type(module).__name__} is not a scale per token."
    )


def _close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    return bool((x.double() - y.double()).norm() <= _ROUNDING * y.double().norm())


def _log_prior(call: AttentionCall, head: int, i: int) -> Tensor | None:
    """log u (S,) of the keys of query i, in float64; -inf where it does not see one."""
    q, k, _, spec = call
    if spec.prior is None:
        return None
    T, S = q.shape[2], k.shape[2]
    rows = {"rows": slice(i, i + 1), "device": q.device}
    log_S = spec.prior.log(T, S, B=1, H=q.shape[1], **rows)  # type: ignore[arg-type]
    return log_S.expand(1, q.shape[1], 1, S)[0, head - 1, 0].double()


def _above_mean(log_S: Tensor, j: int, p_S: Tensor) -> float | None:
    """The log-prior of key j less its mean, where it is more than a mask."""
    finite = log_S.isfinite()
    if not bool((log_S[finite] != 0.0).any()):
        return None
    return float(log_S[j] - (p_S[finite] * log_S[finite]).sum())
