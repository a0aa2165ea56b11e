"""What a step of the score optimisers costs beside the model it trains, counted and not timed.

The layers lie on the meta device: nothing is computed, and a step that read a number
from the device, which synchronises it, would fail.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fenchel.attention import Causal, angles
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import Muon, ScoreDescent, ScoreTrust, attention_pairs
from fenchel.optim.score.output_change import OutputProbes

PARAMETERS, TOKENS = 124e6, 2**19  # GPT-2 small and its published batch
STEP = 6 * PARAMETERS * TOKENS


class Attention(nn.Module):
    """Only what a pair is found by."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = self.groups = 12
        self.head_width = 64
        self.scale, self.mask, self.rotary_layout = None, Causal(), "half"
        self.local, self.l2 = False, False
        self.q_norm = self.k_norm = None
        self.qkv = nn.Linear(768, 3 * 768, bias=False, device="meta")

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def stepped(layers: int, rotary: bool, norm: str) -> FlopCounterMode:
    model = nn.ModuleList(Attention() for _ in range(layers))
    score = ScoreDescent(attention_pairs(model), norm=norm)
    rotation = angles(torch.arange(1024, device="meta"), 64) if rotary else None
    for layer in model:
        layer(torch.empty(8, 1024, 768, device="meta"), rotation)
        layer.qkv.weight.grad = torch.empty_like(layer.qkv.weight)
    with FlopCounterMode(display=False) as count:
        score.step()
    return count


@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_is_less_than_a_thousandth_of_the_model_s(rotary: bool) -> None:
    flops = stepped(12, rotary, "spectral").get_total_flops()
    assert 0 < flops < 1e-3 * STEP, flops / STEP


class Launches(TorchDispatchMode):
    """Counts the operations on the device: all that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ]
        self.count += not any(views)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def forward_launches() -> int:
    """Launches of one forward pass of a model of twelve layers."""
    config = ModelConfig(vocabulary=512, context=1024, width=768, layers=12, heads=12)
    with torch.device("meta"):
        model = Transformer(config)
    with Launches() as launches:
        model(torch.zeros(8, 1024, dtype=torch.long, device="meta"))
    return launches.count


@pytest.mark.parametrize("name", ["trust", "score"])
def test_a_step_launches_no_more_for_more_layers_and_less_than_a_forward_pass(
    name: str, forward_launches: int
) -> None:
    """On a GPU each launch takes microseconds, however little it computes."""
    counts = []
    for layers in (2, 12):
        model = nn.ModuleList(Attention() for _ in range(layers))
        pairs = attention_pairs(model)
        muon = Muon(model.parameters())
        optimiser = ScoreDescent(pairs) if name == "score" else ScoreTrust(muon, pairs)
        rotation = angles(torch.arange(1024, device="meta"), 64)
        count = {}
        for one in (muon, optimiser, muon, optimiser):  # the first step of each prepares more
            for layer in model:
                layer(torch.empty(8, 1024, 768, device="meta"), rotation)
                layer.qkv.weight.grad = torch.empty_like(layer.qkv.weight)
            with Launches() as launches:
                one.step()
            count[one] = launches.count
        counts.append(count[optimiser] - (count[muon] if name == "trust" else 0))
    assert counts[0] == counts[1], counts
    assert 0 < counts[1] < forward_launches / 2, (counts, forward_launches)


def test_the_limit_on_outputs_launches_no_more_for_more_layers_and_computes_little(
    forward_launches: int,
) -> None:
    counts, flops = [], 0
    for layers in (2, 12):
        config = ModelConfig(vocabulary=512, context=1024, width=768, layers=layers, heads=12)
        with torch.device("meta"):
            model = Transformer(config)
        probes = OutputProbes(model, attention_pairs(model))
        for _ in range(2):  # the first step prepares more
            ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")
            model(ids, return_hidden=True)
            with Launches() as launches, FlopCounterMode(display=False) as count:
                probes.limit(probes.before(), 0.1)
        counts.append(launches.count)
        flops = count.get_total_flops()
    assert counts[0] == counts[1], counts
    assert 0 < counts[1] < forward_launches / 2, (counts, forward_launches)
    assert 0 < flops < 1e-3 * STEP, flops / STEP
