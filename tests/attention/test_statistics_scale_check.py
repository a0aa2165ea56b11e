"""fenchel/attention/statistics.py: slips that raise no error are told in a sentence."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fenchel.attention import Causal, scale_warning
from fenchel.choice import Entmax, Softmax

H, D = 8, 64


@pytest.fixture
def qk() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, H, 24, D, generator=generator),
        torch.randn(2, 2, 40, D, generator=generator),
    )


def by_hand(q: Tensor, k: Tensor, scale: float) -> tuple[float, float]:
    """Spread of the scores and mean largest weight, in numpy."""
    keys = np.repeat(k.double().numpy(), H // 2, axis=1)
    z = scale * np.einsum("bhtd,bhsd->bhts", q.double().numpy(), keys)
    e = np.exp(z - z.max(-1, keepdims=True))
    return float(z.std()), float((e / e.sum(-1, keepdims=True)).max(-1).mean())


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (1.0, "1/sqrt(D) were missing"),
        ((H * D) ** -0.5, "1/sqrt(d_model) for d_model 512"),
        (1.0 / D, "is 1/D"),
        (D**0.5, "which should divide"),
    ],
)
def test_each_wrong_scale_is_named_with_its_effect(
    scale: float, says: str, qk: tuple[Tensor, Tensor]
) -> None:
    warning = scale_warning(*qk, scale=scale)
    assert warning is not None
    assert says in warning
    assert "use 1/sqrt(64) = 0.125" in warning
    (spread, best), (meant, best_meant) = by_hand(*qk, scale), by_hand(*qk, D**-0.5)
    assert f"spread by {spread:.2g} where {meant:.2g} was meant" in warning
    assert f"best key {best:.2g} of its weight instead of {best_meant:.2g}" in warning
    assert warning.count(".\n") == 0


def test_a_wrong_scale_changes_the_spread_by_the_predicted_factor(
    qk: tuple[Tensor, Tensor],
) -> None:
    """sqrt(D) = 8 times too wide without the factor, sqrt(H) too narrow with d_model."""
    meant, best = by_hand(*qk, D**-0.5)
    assert meant == pytest.approx(1.0, rel=0.05)
    missing, sure = by_hand(*qk, 1.0)
    assert missing == pytest.approx(8.0, rel=0.05)
    assert sure > 0.8 > best
    narrow, vague = by_hand(*qk, (H * D) ** -0.5)
    assert narrow == pytest.approx(8.0**-0.5, rel=0.05)
    assert vague < best


@pytest.mark.parametrize("scale", [D**-0.5, 0.2, 0.09])
def test_a_right_or_a_chosen_scale_is_left_alone(scale: float, qk: tuple[Tensor, Tensor]) -> None:
    assert scale_warning(*qk, scale=scale) is None


def test_one_is_no_slip_where_scores_are_small_by_themselves(qk: tuple[Tensor, Tensor]) -> None:
    q, k = (normalize(x, dim=-1) for x in qk)
    assert scale_warning(q, k, scale=1.0) is None  # cosines
    assert scale_warning(qk[0] * D**-0.5, qk[1], scale=1.0) is None  # as T5 starts
    assert scale_warning(qk[0], qk[1], scale=1.0, prior=Causal()) is not None


def test_one_wide_head_is_the_whole_stream() -> None:
    x = torch.randn(1, 1, 9, 16, generator=torch.Generator().manual_seed(1))
    assert scale_warning(x, x, scale=16**-0.5) is None  # 1/sqrt(d_model) and right
    warning = scale_warning(x, x, scale=32**-0.5, width=32)
    assert warning is not None
    assert "d_model 32" in warning


def test_forbidden_keys_do_not_count(qk: tuple[Tensor, Tensor]) -> None:
    q, k = qk[0][:, :, :12], qk[1][:, :, :12].clone()
    before = scale_warning(q, k, scale=1.0, prior=Causal(strict=True))
    k[:, :, 11] *= 1e6  # which no query sees before itself
    assert before is not None
    assert scale_warning(q, k, scale=1.0, prior=Causal(strict=True)) == before


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_missing_scale_is_named(scale: float, qk: tuple[Tensor, Tensor]) -> None:
    assert "use 1/sqrt(64)" in (scale_warning(*qk, scale=scale) or "")


@pytest.mark.parametrize("beta", [D**-0.5, torch.full((H, 1, 1), D**-0.5)], ids=["number", "heads"])
@pytest.mark.parametrize("kind", [Softmax, lambda b: Entmax(1.5, b)], ids=["softmax", "entmax"])
def test_a_factor_in_both_scale_and_beta_is_named(qk, beta, kind) -> None:
    warning = scale_warning(*qk, choice=kind(beta))
    assert warning is not None
    assert "scale=0.125 and beta=0.125 apply 1/sqrt(D) twice" in warning
    spread, _ = by_hand(*qk, 1 / D)
    assert f"spread by {spread:.2g} where 1 was meant" in warning
    assert scale_warning(*qk, choice=kind(beta), scale=1.0) is None  # once, in beta


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.0])
def test_a_temperature_in_both_scale_and_beta_is_named(qk, temperature: float) -> None:
    t = 1.0 / temperature
    warning = scale_warning(*qk, scale=t * D**-0.5, choice=Softmax(t))
    assert warning is not None
    assert f"hold the factor {t:.4g} twice" in warning
    for scale, beta in ((t * D**-0.5, 1.0), (None, t), (D**-0.5 / t, t)):
        assert scale_warning(*qk, scale=scale, choice=Softmax(beta)) is None


def test_a_factor_split_between_scale_and_beta_is_judged_by_its_product(qk) -> None:
    warning = scale_warning(*qk, scale=4.0, choice=Softmax(0.25))
    assert warning is not None
    assert "scale * beta = 1 looks as if 1/sqrt(D) were missing" in warning


@pytest.mark.filterwarnings("error")
def test_without_an_admissible_key_there_is_no_warning() -> None:
    q = torch.randn(1, 1, 1, 4, generator=torch.Generator().manual_seed(0))
    assert scale_warning(q, q, scale=1.0, prior=Causal(strict=True)) is None
    assert scale_warning(q[:, :, :0], q, scale=1.0) is None
    assert scale_warning(q, q[:, :, :0], scale=1.0) is None
    wide = 9.0 * torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    warning = scale_warning(wide, wide, scale=1.0, prior=Causal(strict=True))
    assert warning is not None  # the row without a key is left out of the mean
    assert "nan" not in warning
