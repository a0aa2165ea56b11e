"""fenchel/inspection/undrawn.py: shapes as ever, numbers only where there is room for them."""

import subprocess
import sys

import torch
from torch import nn

from fenchel.inspection.undrawn import Undrawn


def test_elsewhere_numbers_are_drawn_as_ever() -> None:
    def layers() -> list[nn.Parameter]:
        torch.manual_seed(0)
        made = nn.Linear(3, 4), nn.Embedding(5, 2)
        made[0].weight.data.normal_()
        return [p for one in made for p in one.parameters()]

    plain = layers()
    with Undrawn():
        same = layers()
    for one, other in zip(plain, same, strict=True):
        assert torch.equal(one, other)


def test_a_model_is_laid_out_without_torchs_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from fenchel.inspection.undrawn import Undrawn\n"
        "from fenchel.model import ModelConfig, Transformer\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "with Undrawn(), torch.device('meta'):\n"
        "    model = Transformer(ModelConfig(vocabulary=9, context=4, width=8, heads=2))\n"
        "assert all(p.is_meta for p in model.parameters())\n"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
