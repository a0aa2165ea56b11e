"""What a step of ScoreDescent costs beside the model it trains, counted and not timed.

The layers lie on the meta device: nothing is computed, and a step that asked the device for a
number, and so made it wait, would fail.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fenchel.attention import angles
from fenchel.optim import ScoreDescent, attention_pairs

PARAMETERS, TOKENS = 124e6, 2**19  # GPT-2 small and its published batch
STEP = 6 * PARAMETERS * TOKENS


class Attention(nn.Module):
    """Only what a pair is found by."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = self.groups = 12
        self.head_width = 64
        self.qkv = nn.Linear(768, 3 * 768, bias=False, device="meta")

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def stepped(layers: int, rotary: bool, norm: str) -> FlopCounterMode:
    model = nn.ModuleList(Attention() for _ in range(layers))
    score = ScoreDescent(attention_pairs(model), norm=norm)
    turn = angles(torch.arange(1024, device="meta"), 64) if rotary else None
    for layer in model:
        layer(torch.empty(8, 1024, 768, device="meta"), turn)
        layer.qkv.weight.grad = torch.empty_like(layer.qkv.weight)
    with FlopCounterMode(display=False) as count:
        score.step()
    return count


@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_is_less_than_a_thousandth_of_the_model_s(rotary: bool) -> None:
    flops = stepped(12, rotary, "spectral").get_total_flops()
    assert 0 < flops < 1e-3 * STEP, flops / STEP


class Calls(TorchFunctionMode):
    """Counts what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_more_layers_are_hardly_more_calls() -> None:
    """Only reading, writing and remembering go layer by layer; the products are batched."""
    counts = []
    for layers in (2, 12):
        with Calls() as calls:
            stepped(layers, True, "spectral")
        counts.append(calls.count)
    assert counts[1] < 2.5 * counts[0], counts
