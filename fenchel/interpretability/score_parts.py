"""Why a head attends there: one score as a sum over pairs of what wrote the two streams.

The stream before a layer is a sum of parts, x = sum_c x^c: the embedding and what the attention and
the MLP of every earlier layer added. A score is bilinear in the streams of its query and its key,

    z_ij = scale q_i . k_j,     q_i = R_i N_q(W_q N(x_i) + b_q),     k_j likewise,

once the norms N (of the stream) and N_q (of queries, where there is one) keep the scale 1/s that
they have at this x: N(x) = g (x / s) + b is then affine in x, rotations R are linear, and

    z_ij = sum over parts c, e of  scale q_i^c . k_j^e        exactly,

with one more part on each side, "bias", for what does not depend on the stream.

No choice depends on a shift of all scores of a query, so what a key stands out by is z_ij less the
mean sum_j p_j z_ij under the weights of that query. It has the same form with k_j less the mean key
sum_j p_j k_j. Without that, heads that attend to a sink have large scores that explain nothing.

Pairs cancel: the sum of their absolute values is often several times their sum, and single heads of
deep models are worse. So parts are whole branches, in the order of the layers; the sums over one
side (``by_query``, ``by_key``) are what a person reads first.

C parts, T tokens, M width of the stream, H heads, G heads of keys, D width per head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fenchel.attention import AttentionCall, attention_weights, rotate
from fenchel.attention.rotary import Angles
from fenchel.inspection.our_model import OurModel
from fenchel.inspection_result import ScoreParts
from fenchel.interpretability.hooked_model import Model, RecordedPass, hooked
from fenchel.model import Transformer
from fenchel.model.block import Block
from fenchel.model.norm import RMSNorm
from fenchel.model.sigma_linear import matrix_of


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
    transformer = _transformer(model)
    config, T = transformer.config, len(ids)
    if not 1 <= layer <= config.layers:
        raise ValueError(f"there is no layer {layer}; the model has 1 to {config.layers}.")
    if not 1 <= head <= config.heads:
        raise ValueError(f"there is no head {head}; a layer has 1 to {config.heads}.")
    for name, at in (("query", query), ("key", key)):
        if at is not None and not -T <= at < T:
            raise ValueError(f"there is no {name} {at} in a text of {T} tokens.")
    recorded = RecordedPass()
    subject = hooked(transformer)
    subject.logits(subject.batch(ids), recorded)
    call, i = recorded.calls[layer], query % T
    p_S = attention_weights(call.q, call.k, rows=[i], heads=[head - 1], **call.spec)[0, 0, 0]
    j = int(p_S.argmax()) if key is None else key % T
    log_S = _log_prior(call, head, i)
    if log_S is not None and not bool(log_S[j].isfinite()):
        seen = log_S.isfinite().nonzero().flatten().tolist()
        raise ValueError(f"query {i} sees the keys {seen[0]} to {seen[-1]} only, and not {j}.")
    names, x_CTM = _stream_parts(transformer, recorded, layer)
    block = subject.blocks[layer - 1].block
    assert isinstance(block, Block)
    attention = block.attention
    group = (head - 1) * config.groups // config.heads
    rotary = transformer._rotary(0, T, None, recorded.streams[0])[int(attention.local)]
    angles = rotary if attention.rotates else None
    q_CTD, k_CTD = _queries_and_keys(block, x_CTM, head - 1, group, angles)
    scale = call.spec.scale_for(call.q.shape[-1])
    p_S = p_S.double()
    above_CD = k_CTD[:, j] - torch.einsum("s,csd->cd", p_S, k_CTD)
    pairs_CC = scale * q_CTD[:, i] @ above_CD.T
    z_S = scale * (call.k[0, group].double() @ call.q[0, head - 1, i].double())
    score, mean = float(z_S[j]), float(p_S @ z_S)
    return ScoreParts(
        layer=layer,
        head=head,
        query=i,
        key=j,
        weight=float(p_S[j]),
        score=score,
        mean=mean,
        parts=names,
        pairs=pairs_CC.tolist(),
        remainder=score - mean - float(pairs_CC.sum()),
        prior=None if log_S is None else _above_mean(log_S, j, p_S),
        softcap=call.spec.softcap,
    )


def has_score_parts(model: Model) -> bool:
    """Whether ``score_parts`` takes the scores of a model apart.

    >>> from fenchel.model import ModelConfig
    >>> has_score_parts(Transformer(ModelConfig(vocabulary=16, sinks=True)))
    False
    """
    try:
        hooked(_transformer(model))
    except ValueError:
        return False
    return True


def _transformer(model: Model) -> Transformer:
    """The model, where its scores are sums over pairs of parts."""
    model = model.model if isinstance(model, OurModel) else model
    if not isinstance(model, Transformer):
        raise ValueError(
            "the parts of a score are taken apart in models that fenchel reads itself; this one is "
            "run by transformers."
        )
    config = model.config
    reasons = {
        "a stream that is normalised after every branch is not a sum of what branches added": (
            config.norm_place == "post"
        ),
        "scores by distance (scores='l2') are not bilinear": config.scores == "l2",
        "a sink that is no key has no stream": config.sinks,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"scores of this model have no parts: {reason}.")
    return model


def _stream_parts(
    model: Transformer, recorded: RecordedPass, layer: int
) -> tuple[list[str], Tensor]:
    """The names and values (C, T, M), in float64, of the parts of the stream before a layer.

    The last one, "bias", is zero there.
    """
    names, parts = ["embedding"], [recorded.streams[0][0]]
    subject = hooked(model)
    for n in range(1, layer):
        block = subject.blocks[n - 1].block
        assert isinstance(block, Block)
        norms = {"attention": block.attention_post_norm, "mlp": block.mlp_post_norm}
        for part, norm in norms.items():
            y = recorded.branches[part, n][0]
            parts.append(block.scale * (y if norm is None else norm(y)))
            names.append(f"{part} {n}")
    return [*names, "bias"], torch.stack([*parts, torch.zeros_like(parts[0])]).double()


def _queries_and_keys(
    block: Block, x_CTM: Tensor, head: int, group: int, angles: Angles | None
) -> tuple[Tensor, Tensor]:
    """The parts of the queries and keys of one head, (C, T, D) each."""
    attention = block.attention
    H, G, D = attention.heads, attention.groups, attention.head_width
    y_CTM = _frozen(block.attention_norm, x_CTM)
    W, b = matrix_of(attention.qkv).double(), attention.qkv.bias
    found = []
    for first, count, at, norm in (
        (0, H, head, attention.q_norm),
        (H * D, G, group, attention.k_norm),
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
