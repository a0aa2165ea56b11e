"""fenchel/attention/mask.py: which keys a sparse pattern leaves open."""

import pytest
import torch

from fenchel.attention import ALiBi, Causal, Global, Padding, Prior, Strided, Window, attend
from fenchel.choice import Softmax, Sparsemax

n = 12
QUERY, KEY = torch.arange(n)[:, None], torch.arange(n)
PATTERNS = {
    "strided": (Strided(3), (QUERY - KEY) % 3 == 0),
    "global": (Global(2), (QUERY < 2) | (KEY < 2)),
    "local and strided": (
        (Window(2) | Strided(4)) + Causal(),
        (((QUERY - KEY >= 0) & (QUERY - KEY <= 2)) | ((QUERY - KEY) % 4 == 0)) & (KEY <= QUERY),
    ),
    "local and global": (
        Window(1, 1) | Global(2),
        ((QUERY - KEY).abs() <= 1) | (QUERY < 2) | (KEY < 2),
    ),
}
every_pattern = pytest.mark.parametrize(("prior", "open_"), PATTERNS.values(), ids=PATTERNS.keys())


@every_pattern
def test_open_keys_are_those_of_the_pattern(prior: Prior, open_: torch.Tensor) -> None:
    assert torch.equal(prior.log(n, n)[0, 0] > -torch.inf, open_)
    for first in range(n):
        for last in range(first, n):
            low, high = prior.key_range(first, last, n)
            rows = open_[first : last + 1]
            assert not rows[:, :low].any()
            assert not rows[:, high:].any()
            low, high = prior.zero_range(first, last, n)
            assert rows[:, low:high].all()


@every_pattern
def test_sparse_attention_is_dense_attention_under_the_mask(
    prior: Prior, open_: torch.Tensor, draw
) -> None:
    q, k, v = draw(1, 2, n, 4), draw(1, 2, n, 4), draw(1, 2, n, 3)
    for choice in (Softmax(), Sparsemax()):
        z = (q @ k.mT / 2).masked_fill(~open_, -torch.inf)
        for backend in ("reference", "blocked", "auto"):
            ours = attend(q, k, v, choice=choice, prior=prior, backend=backend)
            torch.testing.assert_close(ours, choice.weights(z) @ v)


def test_joined_masks_may_differ_between_sequences() -> None:
    prior = Padding(torch.tensor([1, 3])) | Global(2)
    assert any(prior.varies())
    seen = prior.log(4, 4, B=2)[:, 0, 3] > -torch.inf
    assert seen.tolist() == [[True, True, False, False], [True, True, True, False]]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Strided(0), "1 or more"),
        (lambda: Global(-1), "0 or more"),
        (lambda: (Causal() | ALiBi(2)).log(3, 3, H=2), "ALiBi is a bias; use [+]"),
    ],
)
def test_what_is_no_pattern_is_refused(build, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
