"""Softmax attention by torch's own fused kernels.

scaled_dot_product_attention solves exactly the Shannon case, softmax(beta scale q k^T + log u) v.
The prior is passed as a flag where the kernels have one (causal, as many queries as keys), not at
all where it forbids nothing (one causal query on its whole cache), and as a dense mask otherwise.
beta is multiplied into the scale.

Derivatives: reverse only. torch raises on forward mode and on a second derivative; it does not
return zeros. ``attend`` therefore never picks this back end while a tangent is carried.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fenchel.attention.mask import Causal
from fenchel.attention.prior import PriorLike
from fenchel.attention.spec import AttentionSpec


def causal_flag(prior: PriorLike, T: int, S: int) -> bool | None:
    """``is_causal`` where torch's kernels apply the prior without a mask; None where they cannot.

    >>> causal_flag(None, 4, 4), causal_flag(Causal(), 4, 4), causal_flag(Causal(), 1, 4)
    (False, True, False)
    """
    if prior is None:
        return False
    if type(prior) is Causal and not prior.strict:
        if T == 1:
            return False
        if T == S:  # by branches: under torch.compile the comparison may be symbolic
            return True
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    B, H, T, D = q.shape
    S = k.shape[-2]
    scale, beta = spec.scale_for(D), spec.choice.beta
    if isinstance(beta, Tensor):  # a learned temperature must stay in the graph
        q, beta = q * beta.to(q.dtype), 1.0
    if scale == 0.0:  # torch scales after it masks, and 0 times -inf is nan
        q, scale = q * 0.0, 1.0
    mask, flag = None, causal_flag(spec.prior, T, S)
    if flag is None and spec.prior is not None:
        mask = spec.prior.log(T, S, B=B, H=H, device=q.device, dtype=q.dtype)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=flag is True,
        scale=scale * beta,
        enable_gqa=k.shape[1] != H,
    )
