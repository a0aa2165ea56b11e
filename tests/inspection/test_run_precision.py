"""fenchel/inspection/run.py: rounding is measured, and undone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fenchel.inspection import inspect, open_model
from fenchel.inspection.run import precision, rounded


def test_weights_come_back_bit_for_bit(save: Callable[[str], Path]) -> None:
    model = open_model(save("gpt2")).model
    before = {name: p.clone() for name, p in model.named_parameters()}

    def interrupted() -> None:
        with torch.no_grad(), rounded(model, torch.bfloat16):
            assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_numbers_as_fine_as_the_models_own_change_nothing(
    save: Callable[[str], Path], text: Path
) -> None:
    subject = open_model(save("llama"))
    found = inspect(subject, str(text), max_tokens=12, iterations=4)
    trace = subject.trace(torch.arange(3, 15)[None])
    draw = torch.Generator().manual_seed(0)
    same = precision(trace, subject.model, found.heads, found.method, draw, coarse=torch.float32)
    assert max(same.stream) < 1e-6
    assert same.logits is not None
    assert same.logits < 1e-4
    assert found.precision is not None
    assert 1e-4 < found.precision.stream[-1] < 0.3  # bfloat16 keeps eight bits
    assert found.precision.again < 1e-5
    assert "bfloat16" in found.precision.statement


@pytest.mark.parametrize(("family", "token"), [("llama", "next"), ("bert", "last")])
def test_an_encoder_has_no_law_of_a_next_token(
    family: str, token: str, save: Callable[[str], Path], text: Path
) -> None:
    found = inspect(open_model(save(family)), str(text), max_tokens=8, iterations=3)
    assert found.precision is not None
    assert f"the probabilities of the {token} token by" in found.precision.statement
    assert found.subject["causal"] == (token == "next")
