"""inspection/heads.py: every number of a row against its definition, written out densely."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import (
    ALiBi,
    AttentionCall,
    AttentionSpec,
    Causal,
    Padding,
    Prior,
    Window,
    attend,
)
from fenchel.attention.bias import add_sink
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.inspection import heads as inspected
from fenchel.inspection.heads import (
    head_similarity,
    row_stats,
    row_weights,
    select_heads,
    sensitivities,
)
from fenchel.inspection_result import Method

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


@pytest.mark.parametrize("prior", ["none", "causal", "window", "alibi"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_sink_counts_as_a_key_and_as_no_token(
    prior: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspected, "_BLOCK", 4 * H * T)
    plain, r = call(PRIORS[prior], CHOICES[choice]), torch.tensor([-1.0, 0.0, 1.0, 3.0])
    k, v, with_prior = add_sink(plain.k, plain.v, r, plain.spec.prior)
    c = AttentionCall(plain.q, k, v, AttentionSpec(plain.spec.choice, with_prior, 0.3))
    z, log_u, _ = dense(plain)
    scores = torch.cat([r.double().view(H, 1, 1).expand(H, T, 1), z + log_u], -1)
    choose = {"softmax": Softmax(), "entmax": Entmax(1.5), "sparsemax": Sparsemax()}[choice]
    whole = choose.weights(scores)  # z has the temperature already
    rest, p = whole[..., 0], whole[..., 1:]
    found = row_stats(c)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    close(found.not_taken, rest)
    close(found.entropy, torch.special.entr(whole).sum(-1))
    close(found.support, (whole > 0).sum(-1).double())
    close(found.first, p[..., 0])
    close(found.itself, p.diagonal(dim1=-2, dim2=-1))
    close(found.distance, (p * (i - j).abs()).sum(-1))
    close(found.columns, p.sum(1))
    close(row_weights(c, 6), p[:, :6, :6])


@pytest.mark.parametrize("choice", CHOICES)
def test_the_sensitivity_of_a_head_leaves_the_sink_in_its_place(choice: str) -> None:
    plain, r = call(Causal(), CHOICES[choice]), torch.tensor([-1.0, 0.0, 1.0, 3.0])
    k, v, prior = add_sink(plain.k, plain.v, r, Causal())
    c = AttentionCall(plain.q, k, v, AttentionSpec(plain.spec.choice, prior, 0.3))
    head = 2
    method = Method(
        dtype="float32", device="cpu", algorithm="", tolerance=1e-3, iterations=40, failure=1e-9,
        seed=0,
    )  # fmt: skip
    found = sensitivities(select_heads(c, [head]), method, torch.Generator().manual_seed(0))
    at = tuple(x.double() for x in (plain.q[:, [head]], plain.k[:, [1]], plain.v[:, [1]]))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = AttentionSpec(c.spec.choice, Causal(), 0.3)
        return attend(q, k, v, **spec, sink=r[head].double(), backend="reference").flatten()

    parts = torch.autograd.functional.jacobian(f, at)
    J = torch.cat([part.flatten(1) for part in parts], -1)
    exact = float(torch.linalg.matrix_norm(J, 2))
    interval = found.sigma["qkv"][0]
    assert interval.lower * (1 - 1e-3) <= exact <= interval.upper * (1 + 1e-3)
    assert exact <= found.bound[0] * (1 + 1e-6)
    alone = float(torch.linalg.matrix_norm(parts[2].flatten(1), 2))
    assert found.sigma["v"][0].lower * (1 - 1e-3) <= alone <= found.sigma["v"][0].upper * (1 + 1e-3)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
