"""Fresh embedding and LM head from the bigram counts of the training text.

A fresh block adds nothing to the stream (initialisation.py), so a fresh model computes

    logits_i = W n(e_i),      n(e) = sqrt(M) e / |e|      e_i the embedding of the last token i,

which is a bigram model of rank M. Descent takes some hundred steps to find a good one; the counts
give it at once. With c_ij the times that j follows i, n_i their sum over j, p_j the share of j, and
k ``PRIOR`` counts of prior knowledge, the estimate of a bigram model is

    q_ij = (c_ij + k p_j) / (n_i + k),
    log q_ij = log p_j + S_ij + (a constant of row i),      S_ij = log(1 + c_ij / (k p_j)),

where S is zero for every pair that does not occur. Softmax ignores constants of a row, so the mean
of S under p is subtracted: X = S - (S p) 1^T. A model with logits log p + A B^T then has, to second
order, the divergence

    sum_i (n_i / N) KL(q_i || model_i)  ~  1/2 sum_ij (n_i / N) p_j (X_ij - a_i . b_j)^2,

whose minimum is a truncated singular value decomposition: with r_i = sqrt(n_i / N), s_j = sqrt(p_j)
and U D V^T the first M - 1 terms of that of (r_i X_ij s_j),

    a_i = U_i D^1/2 / r_i,       b_j = V_j D^1/2 / s_j.

The last dimension is for log p. The norm before the LM head divides by the length of e_i, so every
row gets the same length, R, by its entry there:

    e_i = (a_i, sqrt(R^2 - |a_i|^2)),      W_j = (R / sqrt(M)) (b_j, (log p_j - mean) / R)

R is the length that 99 % of the a_i do not reach, and |a_i| is at most 0.95 R. Both factors are
rotated by a random orthogonal matrix, so that no entry of the stream is special, and e is scaled to
entries of size ``SIZE``, which the norms ignore: it is the size that AdamW's steps are measured by.
Where the LM head is tied to the embedding, only e is used: its rows are near each other when the
tokens are followed by the same ones, which is a better start than none (docs/log.md). There the
size is that of the logits too, SIZE M for a token after itself, and is reduced until it is at most
``SELF_LOGIT``: otherwise a wide model begins by repeating its input with certainty.

The decomposition is that of Halko, Martinsson and Tropp (2011): a random range finder with power
iterations. X is a sparse matrix minus one of rank one, and is never written out: the cost grows
with the pairs that occur, not with V^2. It is computed on ``device``: on one core 50,257 tokens of
width 768 take 15 s.

M width of the stream, V vocabulary, N pairs counted, Z pairs that occur.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import qr

from fenchel.model.transformer import Transformer

PRIOR = 300.0
"""k: how many counts of p are added to those of a row."""
SIZE = 0.3
"""Root mean square of the entries of the embedding."""
SELF_LOGIT = 16.0
"""Largest logit of a token after itself where the LM head is tied to the embedding."""
LARGEST_COUNT = 2**22
"""Tokens that are counted at most, in blocks from all over the text."""
_BLOCK = 2**12
_OVERSAMPLING = 32
"""Further columns of the range finder."""
_POWERS = 2
_CPU = torch.device("cpu")


class BigramFactors(NamedTuple):
    """Both (V, M)."""

    embedding: Tensor
    lm_head: Tensor


def applies_to(model: Transformer) -> bool:
    """Whether the logits are one matrix times the normalised stream of the embedding's width."""
    return model.lm_head_is_linear and model.embed_proj is None and model.config.final_norm


@torch.no_grad()
def start_from_bigrams(
    model: Transformer,
    ids: np.ndarray,
    generator: torch.Generator,
    device: torch.device = _CPU,
) -> None:
    """Overwrite the embedding, and the LM head where it is not tied, of a model that it applies to.

    ``ids`` are the tokens of the training text, ``generator`` is one of the CPU.
    """
    V, M = model.embed.weight.shape
    factors = bigram_factors(ids, V, M, generator, device)
    size = SIZE if model.lm_head is not None else min(SIZE, SELF_LOGIT / M)
    model.embed.weight.copy_(size * factors.embedding)
    if model.lm_head is not None:
        model.lm_head.weight.copy_(factors.lm_head / model.config.logit_scale)


def bigram_factors(
    ids: np.ndarray, V: int, M: int, generator: torch.Generator, device: torch.device = _CPU
) -> BigramFactors:
    """The embedding, in rows of root mean square 1, and the LM head.

    >>> ids = np.array([0, 1, 0, 1, 0, 1, 0, 2] * 200)
    >>> e, W = bigram_factors(ids, V=3, M=8, generator=torch.Generator().manual_seed(0))
    >>> (W @ e.T).softmax(0).argmax(0)  # of those that follow 0, 1 and 2
    tensor([1, 0, 0])
    """
    i_Z, j_Z, c_Z = _count_pairs(_sample(ids), V)
    n_V = torch.bincount(i_Z, c_Z, minlength=V)
    p_V = torch.bincount(j_Z, c_Z, minlength=V) + 1.0
    p_V /= p_V.sum()
    S_Z = torch.log1p(c_Z / (PRIOR * p_V[j_Z]))
    r_V, s_V = ((n_V + 1.0) / (n_V + 1.0).sum()).sqrt(), p_V.sqrt()
    # (r_i X_ij s_j) is a sparse matrix minus r t s^T, where t = S p is the mean of a row.
    t_V = torch.bincount(i_Z, S_Z * p_V[j_Z], minlength=V) * r_V
    values = (r_V[i_Z] * S_Z * s_V[j_Z]).float()
    at = torch.stack((i_Z, j_Z))
    sparse = torch.sparse_coo_tensor(at, values, (V, V), check_invariants=True).coalesce()
    log_p_V = p_V.log() - p_V.log().mean()
    r_V, s_V, t_V, log_p_V = (x.float().to(device) for x in (r_V, s_V, t_V, log_p_V))
    U, D, Vt = _truncated_svd(sparse.to(device), t_V, s_V, min(M, V) - 1, generator)
    a = U * D.sqrt() / r_V.unsqueeze(1)
    b = Vt.mT * D.sqrt() / s_V.unsqueeze(1)

    length_V = a.norm(dim=1)
    R = length_V.quantile(0.99).clamp(min=1.0)
    a *= (0.95 * R / length_V.clamp(min=1e-9)).clamp(max=1.0).unsqueeze(1)
    rest_V = (R.square() - a.square().sum(1)).sqrt()
    e = torch.cat((a, rest_V.unsqueeze(1)), 1) * (M**0.5 / R)
    W = torch.cat((b, log_p_V.unsqueeze(1) / R), 1) * (R / M**0.5)
    rotation, _ = qr(torch.randn(M, M, generator=generator))
    rows = rotation[: e.shape[1]].to(device)
    return BigramFactors(e @ rows, W @ rows)


def _sample(ids: np.ndarray) -> np.ndarray:
    """All ids, or of many ids ``LARGEST_COUNT`` in evenly spaced blocks."""
    if len(ids) <= LARGEST_COUNT:
        return ids
    starts = np.linspace(0, len(ids) - _BLOCK, LARGEST_COUNT // _BLOCK).astype(np.int64)
    return np.concatenate([ids[start : start + _BLOCK] for start in starts])


def _count_pairs(ids: np.ndarray, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and second tokens of the pairs that occur, and their counts: all (Z,)."""
    wide = np.asarray(ids, dtype=np.int64)
    pairs, counts = np.unique(wide[:-1] * V + wide[1:], return_counts=True)
    first, second = np.divmod(pairs, V)
    return torch.from_numpy(first), torch.from_numpy(second), torch.from_numpy(counts).double()


def _truncated_svd(
    sparse: Tensor, t: Tensor, s: Tensor, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``rank`` terms of the decomposition of sparse - t s^T: U, D and V^T.

    With Q R = X^T Q' of the last range Q', that of X is the small one of R^T within Q' and Q.
    """
    transposed = sparse.t().coalesce()
    columns = min(len(t), rank + _OVERSAMPLING)

    def times(x: Tensor) -> Tensor:
        product: Tensor = torch.sparse.mm(sparse, x)
        return product - torch.outer(t, s @ x)

    def transposed_times(x: Tensor) -> Tensor:
        product: Tensor = torch.sparse.mm(transposed, x)
        return product - torch.outer(s, t @ x)

    Q, _ = qr(times(torch.randn(len(t), columns, generator=generator).to(t.device)))
    for _ in range(_POWERS):
        Q, _ = qr(transposed_times(Q))
        Q, _ = qr(times(Q))
    Q_right, R = qr(transposed_times(Q))
    U, D, Vt = torch.linalg.svd(R.mT)
    return Q @ U[:, :rank], D[:rank], Vt[:rank] @ Q_right.mT
