"""fenchel/attention/top_k.py: the best keys as a prior, and no more dropped than is said."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, Causal, Prior, attend, top_k
from fenchel.choice import Capped, Choice, Entmax, Softmax, Sparsemax, membership

PRIORS: dict[str, Prior | None] = {"none": None, "causal": Causal(), "alibi": ALiBi(4) + Causal()}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize(
    "choice", [Softmax(), Softmax(3.0), Entmax(1.5), Sparsemax(), Capped(0.6)], ids=repr
)
def test_no_more_is_dropped_than_the_bound(choice: Choice, prior: Prior | None, draw) -> None:
    for size in (0.3, 2.0, 20.0):
        q, k = size * draw(2, 4, 9, 5), draw(2, 2, 9, 5)
        spec = {"choice": choice, "prior": prior}
        v = torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9)
        whole = attend(q, k, v, **spec, backend="reference")
        for keep in (1, 3, 8, 9, 20):
            best = top_k(q, k, keep, **spec)
            kept = best.prior.log(9, 9, B=2, H=4) > -torch.inf
            assert (kept.sum(-1) <= keep).all()
            dropped = torch.where(kept, 0.0, whole).sum(-1)
            assert (dropped <= best.dropped * (1 + 1e-12)).all()
            assert (best.dropped <= 1).all()
            if keep >= 9:
                assert (best.dropped == 0).all()


def test_the_bound_is_attained_where_all_dropped_keys_tie_with_the_last_one_kept() -> None:
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64).view(1, 1, 5, 1)
    best = top_k(q, k, 2, scale=1.0)
    p = torch.softmax(k.flatten(), 0)
    assert best.dropped.item() == pytest.approx(float(p[2:].sum()), rel=1e-8)


def test_a_sparse_map_that_needs_fewer_keys_loses_nothing(draw) -> None:
    q, k, v = 4 * draw(1, 2, 6, 5), 4 * draw(1, 2, 6, 5), draw(1, 2, 6, 3)
    best = top_k(q, k, 4, choice=Sparsemax())
    assert (best.dropped == 0).any()
    exact, ours = (
        attend(q, k, v, choice=Sparsemax()),
        attend(q, k, v, choice=Sparsemax(), prior=best.prior),
    )
    same = best.dropped == 0
    torch.testing.assert_close(ours[same], exact[same])


def test_the_map_is_a_member_of_the_family() -> None:
    def best_two(z: Tensor) -> Tensor:
        kept = z >= z.topk(2, -1).values[..., -1:]
        return torch.softmax(z.masked_fill(~kept, -torch.inf), -1)

    assert membership(best_two).member


def test_bad_input_gets_one_sentence(draw) -> None:
    q = draw(1, 2, 3, 4)
    with pytest.raises(ValueError, match="keeps at least one key"):
        top_k(q, q, 0)
