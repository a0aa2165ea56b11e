"""inspection/heads.py: every number of a row against its definition, written out densely."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, AttentionCall, AttentionSpec, Causal, Padding, Prior, Window
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.inspection import heads as inspected
from fenchel.inspection.heads import head_similarity, row_stats, row_weights

H, G, T, D = 4, 2, 9, 5


def call(
    prior: Prior | None, choice: Choice, size: float = 2.0, softcap: float | None = None
) -> AttentionCall:
    draw = torch.Generator().manual_seed(0)
    q = size * torch.randn(1, H, T, D, generator=draw)
    k, v = (size * torch.randn(1, G, T, D, generator=draw) for _ in range(2))
    return AttentionCall(q, k, v, AttentionSpec(choice, prior, 0.3, softcap))


def dense(c: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """(beta z, log u, p), each (H, T, T), in float64."""
    k = c.k.repeat_interleave(H // G, 1).double()
    z = c.spec.scale * (c.q.double() @ k.mT)[0]
    if c.spec.softcap is not None:
        z = c.spec.softcap * torch.tanh(z / c.spec.softcap)
    log_u = torch.zeros_like(z)
    if c.spec.prior is not None:
        log_u = c.spec.prior.log(T, T, B=1, H=H, dtype=torch.float64)[0].expand_as(z)
    return z * c.spec.choice.beta, log_u, c.spec.choice.weights(z, log_u)


PRIORS = {
    "none": None,
    "causal": Causal(),
    "window": Window(2, 0),
    "padding": Causal() + Padding(torch.tensor([7])),
    "alibi": Causal() + ALiBi(H),
}
CHOICES = {"softmax": Softmax(1.7), "entmax": Entmax(1.5), "sparsemax": Sparsemax()}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_rows_are_their_definitions(
    prior: str, choice: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspected, "_BLOCK", 4 * H * T)  # four queries at a time
    c = call(PRIORS[prior], CHOICES[choice], softcap=softcap)
    z, log_u, p = dense(c)
    found = row_stats(c)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    open_ = log_u > -torch.inf
    best = (z + log_u).sort(-1, descending=True).values
    lone = open_.sum(-1) == 1
    wanted = {
        "entropy": torch.special.entr(p).sum(-1),
        "support": (p > 0).sum(-1).double(),
        "max_logit": torch.where(open_, z.abs(), 0.0).amax(-1),
        "margin": torch.where(lone, torch.nan, best[..., 0] - best[..., 1]),
        "first": p[..., 0],
        "itself": p.diagonal(dim1=-2, dim2=-1),
        "distance": (p * (i - j).abs()).sum(-1),
    }
    for name, value in wanted.items():
        close(getattr(found, name), value)
    close(found.columns, p.sum(1))
    close(row_weights(c, 6), p[:, :6, :6])


@pytest.mark.parametrize("choice", CHOICES)
def test_the_row_sensitivity_is_the_largest_eigenvalue(choice: str) -> None:
    c = call(Causal(), CHOICES[choice])
    _, _, p = dense(c)
    s = c.spec.choice.spread(p)
    J = torch.diag_embed(s) - s[..., None] * s[..., None, :] / s.sum(-1)[..., None, None]
    wanted = c.spec.choice.beta * torch.linalg.eigvalsh(J)[..., -1]
    close(row_stats(c).sensitivity, wanted.clamp(min=0.0))


def test_heads_overlap_by_the_roots_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspected, "_BLOCK", 2 * H * T)
    c = call(Causal(), Sparsemax())
    p = dense(c)[2]
    wanted = torch.einsum("hij,gij->hg", p.sqrt(), p.sqrt()) / T
    close(head_similarity(c), wanted)
    twins = c._replace(q=c.q[:, :1].expand(1, H, T, D), k=c.k[:, :1])
    close(head_similarity(twins), torch.ones(H, H, dtype=torch.float64))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
