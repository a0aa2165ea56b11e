"""fenchel/interpretability/patching.py: shares of a difference, the tokens that show it."""

import pytest
import torch

from fenchel.interpretability import Site, patch
from tests.interpretability.conftest import L, T, build, draw


def prompts(first: int = 4) -> tuple[list[int], list[int]]:
    clean, corrupt = draw(1), draw(1)
    corrupt[first:6] = draw(9)[first:6]
    return clean, corrupt


def test_the_stream_before_its_words_mix_carries_all_and_the_rest_nothing() -> None:
    """After the last layer the last position has everything; position 4 differs, 2 does not."""
    clean, corrupt = prompts()
    found = patch(build(), clean, corrupt, ["stream"])
    share = {effect.site: effect.exact for effect in found.effects}
    assert share[Site("stream", L, None, T - 1)] == pytest.approx(1.0, abs=1e-6)
    assert share[Site("stream", L, None, T - 2)] == pytest.approx(0.0, abs=1e-6)
    assert min(site.position or 0 for site in share) == 4
    everywhere = patch(build(), clean, corrupt, [Site("stream", 1), Site("stream", 1, None, 2)])
    share = {effect.site: effect.exact for effect in everywhere.effects}
    assert share[Site("stream", 1)] == pytest.approx(1.0, abs=1e-6)
    assert share[Site("stream", 1, None, 2)] == pytest.approx(0.0, abs=1e-6)


@torch.no_grad()
def test_the_tokens_are_those_of_the_largest_terms_of_the_divergence() -> None:
    model, (clean, corrupt) = build(), prompts()
    found = patch(model, clean, corrupt, ["v"])
    a, b = (model(torch.tensor([ids]))[0, -1].log_softmax(-1) for ids in (clean, corrupt))
    terms = [(float(p.exp() * (p - q)), n) for n, (p, q) in enumerate(zip(a, b, strict=True))]
    assert found.answer == max(terms)[1]
    terms = [(float(q.exp() * (q - p)), n) for n, (p, q) in enumerate(zip(a, b, strict=True))]
    assert found.against == max(terms)[1]
    assert found.clean > found.base
    named = patch(model, clean, corrupt, ["v"], answer=3, against=4)
    assert (named.answer, named.against) == (3, 4)
    assert named.plain()["clean"] == pytest.approx(float(a[3] - a[4]))


def test_what_cannot_be_patched_gets_a_sentence() -> None:
    model, (clean, corrupt) = build(), prompts()
    with pytest.raises(ValueError, match="same number of tokens; these have 12 and 11"):
        patch(model, clean, corrupt[:-1])
    with pytest.raises(ValueError, match="that differ"):
        patch(model, clean, clean)
    with pytest.raises(ValueError, match="no part 'w'"):
        patch(model, clean, corrupt, ["w"])
    with pytest.raises(ValueError, match="no layer 7"):
        patch(model, clean, corrupt, [Site("mlp", 7)])
    with pytest.raises(ValueError, match="are the same"):
        patch(model, clean, corrupt, answer=3, against=3)
    with pytest.raises(ValueError, match="from 0 to 59"):
        patch(model, clean, corrupt, answer=60)
    for p in model.parameters():
        p.detach().zero_()
    with pytest.raises(ValueError, match="same law of the next token"):
        patch(model, clean, corrupt)
