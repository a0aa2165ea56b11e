"""fenchel/generation/cpu_step.py: the model's own numbers, in fewer operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fenchel.attention import attend as fenchel_attend
from fenchel.generation import KVCache, cpu_step, generate
from fenchel.generation.cpu_step import CpuStep, PackedForward, why_not_cpu_step
from fenchel.model import Transformer
from fenchel.model.mlp import Mlp
from fenchel.torch_internals import packs_linear_weights

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2, "head_size": 6, "qkv_bias": True},
    {"kv_heads": 1, "windows": (5, 0), "score_scale": 0.7},
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    {"positions": "none", "mlp": "geglu_tanh", "tied": False},
    {"positions": "none", "head_size": 1, "mlp": "relu"},
    {"rotary_scaling": "llama3", "rotary_factor": 4.0, "rotary_trained_context": 4, "epsilon": 0.1},
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(s) or "usual")


@every_shape
@pytest.mark.parametrize("B", [3, 9])
@pytest.mark.parametrize("filled", [False, True], ids=["full", "filled"])
@torch.inference_mode()
def test_a_step_gives_the_logits_of_the_model(
    shape: dict[str, Any], filled: bool, B: int, lively: Build, prompts: Draw
) -> None:
    T = 40
    model, ids = lively(**shape, context=T).double(), prompts(B, T)
    present = torch.ones(B, T, dtype=torch.bool)
    if filled:
        present[0, :4] = present[2, :2] = False
    whole = model(ids, token_mask_BS=present)
    cache = KVCache(model.config, batch=B, positions=T, dtype=torch.float64)
    lean = CpuStep(model, cache, batch=B)
    model(ids[:, :6], token_mask_BS=present[:, :6], cache=cache)
    for t in range(6, T):
        logits = lean.step(ids[:, t], present[:, : t + 1] if filled else None)
        torch.testing.assert_close(logits, whole[:, t], atol=1e-10, rtol=1e-10)


@every_shape
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"]
)
@torch.inference_mode()
def test_packed_tokens_of_several_sequences_give_the_logits_of_the_model(
    shape: dict[str, Any],
    dtype: torch.dtype,
    close: float,
    lively: Build,
    prompts: Draw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences of 9, 2 and 11 tokens, one after another; attention is that of the model."""
    monkeypatch.setattr(cpu_step, "PACKED_EXACT", 16)  # 24 rows are computed
    if not packs_linear_weights(dtype):
        pytest.skip("this torch has no oneDNN for this dtype")
    model, lengths = lively(**shape), [9, 2, 11]
    ids = [prompts(n, seed=n) for n in lengths]
    wanted = torch.cat([model(one[None])[0] for one in ids])
    model.to(dtype)
    forward = PackedForward.of(model)
    assert forward is not None

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
        outputs = [fenchel_attend(*part, **model.attention(layer).spec) for part in parts]
        return torch.cat(outputs, 2)[0].transpose(0, 1).flatten(1)

    positions = torch.cat([torch.arange(n) for n in lengths])
    for some in (None, [8, 10, 21], []):
        logits = forward.logits(forward(torch.cat(ids), positions, attend, some)).float()
        rows = wanted if some is None else wanted[some]
        torch.testing.assert_close(logits, rows, atol=close, rtol=close)


def test_large_or_wide_weights_are_not_packed(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PackedForward.of(lively().double()) is None
    assert PackedForward.of(lively(choice="entmax")) is None
    monkeypatch.setattr(cpu_step, "PACKED_BYTES", 1000)
    assert PackedForward.of(lively()) is None


class Count(TorchDispatchMode):
    """How many operations torch is asked for."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_layer_takes_about_thirty_operations(lively: Build, prompts: Draw) -> None:
    counts = []
    for layers in (2, 3):
        model = lively(layers=layers)
        cache = KVCache(model.config, batch=1, positions=8)
        lean = CpuStep(model, cache, batch=1)
        model(prompts(1, 4), cache=cache)
        token = prompts(1)
        with Count() as lean_count:
            lean.step(token)
        with Count() as model_count:
            model(token[None], cache=cache)
        counts.append((lean_count.operations, model_count.operations))
    (less, more), (less_3, more_3) = counts
    assert less_3 - less <= 30
    assert less_3 - less < 0.75 * (more_3 - more)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"softcap": 3.0}, "softcap is 3.0"),
        ({"choice": "entmax"}, "choice is 'entmax'"),
        ({"positions": "alibi"}, "positions are 'alibi'"),
        ({"qk_norm": True}, "qk_norm is True"),
        ({"experts": 2}, "experts is 2"),
        ({"parallel": True}, "parallel is True"),
    ],
)
def test_what_it_does_not_know_it_names(
    settings: dict[str, Any], reason: str, lively: Build
) -> None:
    assert why_not_cpu_step(lively()) is None
    assert why_not_cpu_step(lively(**settings)) == reason


def test_a_changed_model_is_read_by_itself(lively: Build, prompts: Draw) -> None:
    model, calls = lively(), list[int]()
    assert why_not_cpu_step(lively().bfloat16()) == "it is in torch.bfloat16 on cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in str(why_not_cpu_step(lively()))
        assert generate(lively(), prompts(1, 3), max_new_tokens=4).shape == (1, 7)
    model.blocks[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert why_not_cpu_step(model) == "its Mlp has a forward hook"
    generate(model, prompts(1, 3), max_new_tokens=4, temperature=0.0)
    assert len(calls) == 4  # no call of the hook is left out
    calls.clear()
    handle = register_module_forward_hook(lambda layer, *_: calls.append(isinstance(layer, Mlp)))
    try:  # a hook of all modules
        generate(lively(), prompts(1, 3), max_new_tokens=4, temperature=0.0)
    finally:
        handle.remove()
    assert sum(calls) == 4 * len(model.blocks)
    other = lively(choice="entmax")
    mixed = lively()
    mixed.blocks[0].attention.choice = other.blocks[0].attention.choice
    assert "chooses by Entmax" in str(why_not_cpu_step(mixed))
