"""fenchel/model/transformer.py: a model reads without dropout, and is given back as it came."""

import pytest
from torch import nn

from fenchel.model import evaluating


def test_every_module_is_given_back_as_it_came() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model[1].eval()  # as somebody has it who trains only a part
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert [module.training for module in model.modules()] == before == [True, True, *[False] * 3]
