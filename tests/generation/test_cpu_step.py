"""fenchel/generation/cpu_step.py: the model's own numbers, in fewer operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fenchel.generation import KVCache, cpu_step, generate
from fenchel.generation.cpu_step import CpuForward, why_not_cpu, why_not_packed
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
@pytest.mark.parametrize("B", [1, 3, 9])
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@torch.inference_mode()
def test_a_step_gives_the_logits_of_the_model(
    shape: dict[str, Any], unequal: bool, B: int, lively: Build, prompts: Draw
) -> None:
    T = 40
    model, ids = lively(**shape, context=T).double(), prompts(B, T)
    lengths = [6 - (b % 3 if unequal else 0) for b in range(B)]
    wholes = [model(ids[b : b + 1, 6 - n :])[0] for b, n in enumerate(lengths)]
    cache, forward = (
        KVCache(model.config, batch=B, positions=T, dtype=torch.float64),
        CpuForward(model),
    )
    for b, n in enumerate(lengths):
        model(ids[b : b + 1, 6 - n : 6], cache=cache.select([b], [0]))
    view = cache.select(slice(0, B), lengths)
    for t in range(6, T):
        logits = forward.step(view, ids[:, t])
        for b, n in enumerate(lengths):
            wanted = wholes[b][t - 6 + n]
            torch.testing.assert_close(logits[b], wanted, atol=1e-10, rtol=1e-10)


@every_shape
@pytest.mark.parametrize(
    ("packed", "dtype", "close"),
    [(False, torch.float64, 1e-9), (True, torch.float32, 1e-4), (True, torch.bfloat16, 0.1)],
    ids=["plain", "packed", "packed bfloat16"],
)
@torch.inference_mode()
def test_prompts_one_after_another_give_the_logits_of_the_model(
    shape: dict[str, Any],
    packed: bool,
    dtype: torch.dtype,
    close: float,
    lively: Build,
    prompts: Draw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences of 9, 2 and 11 tokens, and then one token and three more of some of them."""
    monkeypatch.setattr(cpu_step, "PACKED_EXACT", 16)  # 24 rows are computed
    if packed and not packs_linear_weights(dtype):
        pytest.skip("this torch has no oneDNN for this dtype")
    model, lengths = lively(**shape).to(torch.float32 if packed else dtype), [9, 2, 11]
    ids = [prompts(n + 4, seed=n).tolist() for n in lengths]
    wanted = [model(torch.tensor([one]))[0] for one in ids]
    model.to(dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    cache = KVCache(model.config, batch=3, positions=16, dtype=kept, slack=0)
    forward, read = CpuForward(model, packed=packed), [0, 0, 0]
    for rows, new in (([0, 1, 2], [9, 2, 11]), ([2, 0], [1, 3])):
        views = [cache.select([row], [read[row]]) for row in rows]
        parts = [ids[row][read[row] : read[row] + n] for row, n in zip(rows, new, strict=True)]
        logits = forward.logits(forward.read(views, parts)).to(wanted[0].dtype)
        for row, n, z in zip(rows, new, logits, strict=True):
            read[row] += n
            torch.testing.assert_close(z, wanted[row][read[row] - 1], atol=close, rtol=close)
    last = ids[1][read[1] : read[1] + 4]
    every = forward.logits(forward.read([cache.select([1], [read[1]])], [last], every=True))
    expected = wanted[1][read[1] : read[1] + 4]
    torch.testing.assert_close(every.to(expected.dtype), expected, atol=close, rtol=close)


def test_large_or_wide_weights_are_not_packed(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "float64" in str(why_not_packed(lively().double()))
    assert why_not_packed(lively(choice="entmax")) is not None
    monkeypatch.setattr(cpu_step, "PACKED_BYTES", 1000)
    assert "above 1,000" in str(why_not_packed(lively()))


class Count(TorchDispatchMode):
    """How many operations torch is asked for."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_layer_takes_fewer_operations_than_the_module(lively: Build, prompts: Draw) -> None:
    counts = []
    for layers in (2, 3):
        model = lively(layers=layers)
        cache = KVCache(model.config, batch=1, positions=8)
        forward = CpuForward(model)
        model(prompts(1, 4), cache=cache)
        token = prompts(1)
        with Count() as lean_count:
            forward.step(cache, token)
        with Count() as model_count:
            model(token[None], cache=cache)
        counts.append((lean_count.operations, model_count.operations))
    (less, more), (less_3, more_3) = counts
    assert less_3 - less <= 37
    assert less_3 - less < more_3 - more


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
def test_a_setting_that_it_does_not_support_is_named(
    settings: dict[str, Any], reason: str, lively: Build
) -> None:
    assert why_not_cpu(lively()) is None
    assert why_not_cpu(lively(**settings)) == reason


def test_a_changed_model_is_read_by_itself(lively: Build, prompts: Draw) -> None:
    model, calls = lively(), list[int]()
    assert why_not_cpu(lively().bfloat16()) == "it is in torch.bfloat16 on cpu"
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in str(why_not_cpu(lively()))
        assert generate(lively(), prompts(1, 3), max_new_tokens=4).shape == (1, 7)
    model.blocks[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert why_not_cpu(model) == "its Mlp has a forward hook"
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
    mixed.blocks[0].attention.fixed_choice = other.blocks[0].attention.choice
    assert "chooses by Entmax" in str(why_not_cpu(mixed))
