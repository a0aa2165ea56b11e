"""Softmax attention by torch's own fused kernels.

scaled_dot_product_attention solves exactly the Shannon case, softmax(beta scale q k^T + log u) v.
The prior travels as a flag where the kernels know it (causal, square), as nothing where it forbids
nothing (one causal query on its whole cache), and as a dense mask otherwise. beta joins the scale.

Derivatives: reverse only. torch raises on forward mode and on a second derivative; it does not
return zeros. ``attend`` therefore never comes here while a tangent is being carried.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fenchel.attention.prior import Causal, Prior
from fenchel.choice import Choice


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    B, H, T, _ = q.shape
    S = k.shape[-2]
    beta: float | Tensor = choice.beta
    if isinstance(beta, Tensor):  # a learned temperature must stay in the graph
        q, beta = q * beta.to(q.dtype), 1.0
    mask, square = None, False
    if prior == Causal() and T == S:
        square = True
    elif prior is not None and not (prior == Causal() and T == 1):
        mask = prior.log(T, S, B=B, H=H, device=q.device, dtype=q.dtype)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=square,
        scale=scale * beta,
        enable_gqa=k.shape[1] != H,
    )
