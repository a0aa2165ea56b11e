"""fenchel/train/step.py: a step is a function of the seed and its number."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fenchel.data import Batch
from fenchel.model import ModelConfig
from fenchel.model.sigma_linear import SigmaLinear
from fenchel.train.step import autocast, deterministic, mix

NAN = float("nan")
CALM = ModelConfig(vocabulary=31, context=8, width=8, layers=2, heads=2)  # without dropout


def gradient(s: Any, step: int) -> dict[str, Tensor]:
    """The gradient of a step as the optimiser gets it, with the weights left alone."""
    found: dict[str, Tensor] = {}

    def look() -> None:
        found.update((name, p.grad.clone()) for name, p in s.model.named_parameters())

    s.optimiser.step = look
    s.stepper(step)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def test_a_step_depends_on_the_seed_and_its_number_alone(small: Callable[..., Any]) -> None:
    one, two, other = small("1"), small("2"), small("3", seed=2)
    other.model.load_state_dict(one.model.state_dict())
    first = gradient(one, 4)
    gradient(two, 9)  # what was done before does not matter
    assert same(first, gradient(two, 4))
    assert not same(first, gradient(one, 5))
    assert not same(first, gradient(other, 4))


def test_a_step_neither_draws_from_nor_seeds_the_noise_that_all_share(
    small: Callable[..., Any],
) -> None:
    s = small()
    before = torch.random.get_rng_state()
    assert s.stepper(0).broken is None
    spoil_output(s)
    assert s.stepper(1).broken
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "settings", [{}, {"layers": 4, "distinct_layers": 2}, {"scores": "l2"}], ids=str
)
def test_micro_batches_of_singular_vectors_take_the_steps_of_the_whole_batch(
    small: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """The vectors move on once per step, however many passes and layers read the weight."""
    model = replace(CALM, sigma_reparam=True, **settings)
    given = {"model": model, "optim": {"optimiser": "sgd", "learning_rate": 0.5}, "clip": 1e9}
    whole, divided = small("1", **given), small("2", accumulate=4, **given)
    layers = {n: m for n, m in whole.model.named_modules() if isinstance(m, SigmaLinear)}
    assert layers
    for step in range(3):
        expected = {}
        for name, layer in layers.items():
            left = normalize(layer.weight.detach() @ layer.right, dim=0)
            expected[name] = left, normalize(layer.weight.detach().T @ left, dim=0)
        whole.stepper(step)
        divided.stepper(step)
        for name, layer in layers.items():
            torch.testing.assert_close((layer.left, layer.right), expected[name])
    before = small("3", **given).model.state_dict()
    found = divided.model.state_dict()
    for name, x in whole.model.state_dict().items():
        torch.testing.assert_close(found[name], x, rtol=0.0, atol=2e-5)
    assert max(float((x - before[name]).abs().max()) for name, x in found.items()) > 1e-2
    assert all(layer.iterations == 1 for layer in layers.values())


def test_every_part_of_every_step_has_noise_of_its_own(small: Callable[..., Any]) -> None:
    s = small(accumulate=2)
    s.model.train()
    row = s.batches.at(0).inputs[:1]
    batch = Batch(row.expand(4, -1), row.expand(4, -1))
    first, second = s.stepper._hidden(batch, 0)
    third, _ = s.stepper._hidden(batch, 1)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(first, next(s.stepper._hidden(batch, 0)))
    other = small("other", accumulate=2, seed=2)
    other.model.load_state_dict(s.model.state_dict())
    assert not torch.equal(first, next(other.stepper._hidden(batch, 0)))


def test_a_compiled_step_has_the_same_gradient_and_is_compiled(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, compiler = [], torch.compile

    def compiled(method: Any) -> Any:
        given.append(method.__self__)
        return compiler(method, backend="aot_eager")  # needs no compiler of C++

    monkeypatch.setattr(torch, "compile", compiled)
    torch.compiler.reset()  # of the graphs of other tests
    plain, fast = small("1", model=CALM), small("2", model=CALM, compile=True)
    assert given == list(fast.model.blocks)
    expected = gradient(plain, 3)
    for name, found in gradient(fast, 3).items():
        torch.testing.assert_close(found, expected[name], msg=name)


def test_a_pass_that_cannot_be_compiled_is_one_sentence(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = torch.compile

    def compiled(model: nn.Module) -> Any:
        def no_compiler(*_: Any) -> Any:
            raise RuntimeError("there is no compiler")

        return compiler(model, backend=no_compiler)

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(ValueError, match=r"compiled here \(.*no compiler.*train.compile=false"):
        small(model=CALM, compile=True).stepper(0)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_parts_is_the_step_of_one_large_batch(
    small: Callable[..., Any], parts: int
) -> None:
    whole, divided = small("1", model=CALM), small("2", model=CALM, accumulate=parts)
    at_once, added_up = gradient(whole, 3), gradient(divided, 3)
    for name, expected in at_once.items():
        torch.testing.assert_close(added_up[name], expected, rtol=1e-4, atol=1e-7)
    assert divided.stepper(4).loss == pytest.approx(whole.stepper(4).loss, rel=1e-6)


def test_the_gradient_is_that_of_the_mean_over_all_targets(small: Callable[..., Any]) -> None:
    s = small(model=CALM, accumulate=2, smoothing=0.1, clip=1e9)
    found = gradient(s, 3)
    batch = s.batches.at(3)
    loss = nn.functional.cross_entropy(
        s.model(batch.inputs).flatten(0, 1), batch.targets.flatten(), label_smoothing=0.1
    )
    loss.backward()
    for name, p in s.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-7)
    assert s.stepper(3).loss == pytest.approx(loss.item(), rel=1e-6)


def test_the_gradient_is_clipped_and_its_norm_before_is_reported(
    small: Callable[..., Any],
) -> None:
    free, cut = small("1", clip=1e9), small("2", clip=0.01)
    whole, short = gradient(free, 0), gradient(cut, 0)
    norm = torch.stack([g.square().sum() for g in whole.values()]).sum().sqrt().item()
    assert norm > 0.01
    assert cut.stepper(0).gradient_norm == pytest.approx(norm, rel=1e-5)
    for name in whole:
        torch.testing.assert_close(short[name], whole[name] * 0.01 / norm, rtol=1e-3, atol=1e-9)


def test_the_learning_rate_follows_the_schedule_by_number(small: Callable[..., Any]) -> None:
    s = small(optim={"schedule": "linear", "learning_rate": 0.5, "warmup": 0.0}, steps=10)
    assert [s.stepper(step).learning_rate for step in (4, 0, 9, 4)] == pytest.approx(
        [0.5 * s.stepper.schedule(step) for step in (4, 0, 9, 4)]
    )


def test_beta2_follows_its_warm_up_by_number_where_there_is_one(small: Callable[..., Any]) -> None:
    s = small(optim={"optimiser": "adamw", "beta2": 0.999, "beta2_warmup": 8})
    for step in (4, 0, 9):
        s.stepper(step)
        assert {g["betas"] for g in s.optimiser.param_groups} == {(0.9, s.stepper.beta2(step))}
    assert s.stepper.beta2(9) == pytest.approx(0.999)


def test_no_gradient_is_carried_into_the_next_step(small: Callable[..., Any]) -> None:
    s = small()
    s.stepper(0)
    assert all(p.grad is None for p in s.model.parameters())


# --- what is not finite


def spoil_parameter(s: Any) -> None:
    s.model.blocks[1].mlp.up.weight.register_hook(lambda g: g * NAN)


def spoil_output(s: Any) -> None:
    s.model.blocks[0].mlp.up.register_forward_hook(lambda _m, _i, output: output * torch.inf)


def spoil_one_part(s: Any) -> None:
    """Only the third of four parts; a clean one follows."""
    calls: list[int] = []

    def hook(_m: nn.Module, _i: object, output: Tensor) -> Tensor:
        calls.append(1)
        return output * NAN if len(calls) % 4 == 3 else output

    s.model.blocks[0].mlp.up.register_forward_hook(hook)


def spoil_read_out(s: Any) -> None:
    """Activations that are finite and logits that are not."""
    s.model.norm.register_forward_hook(lambda _m, _i, output: output * 1e30)
    with torch.no_grad():
        s.model.embed.weight.mul_(1e10)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_read_out, "the loss is the first"),
        (spoil_parameter, "the gradient of blocks.1.mlp.up.weight is the first"),
        (spoil_output, "the output of blocks.0.mlp.up is the first"),
        (spoil_one_part, "the output of blocks.0.mlp.up is the first"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_place(
    small: Callable[..., Any], spoil: Callable[[Any], None], says: str
) -> None:
    s = small(accumulate=4)
    s.stepper(0)
    spoil(s)
    before = s.bits()
    result = s.stepper(1)
    assert says in (result.broken or "")
    assert s.bits() == before
    assert all(p.grad is None for p in s.model.parameters())


def test_an_infinite_loss_with_finite_gradients_moves_nothing(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small()
    s.stepper(0)
    before = s.bits()
    read = s.stepper._gradient
    monkeypatch.setattr(s.stepper, "_gradient", lambda *args: read(*args) * math.inf)
    result = s.stepper(1)
    assert result.broken == "the loss is the first that is not finite"
    assert math.isfinite(result.gradient_norm)
    assert s.bits() == before


def test_a_gradient_whose_norm_overflows_moves_nothing(small: Callable[..., Any]) -> None:
    s = small()
    s.stepper(0)
    before = s.bits()
    s.model.norm.weight.register_hook(lambda g: torch.full_like(g, 1e30))
    assert "too large for its norm" in (s.stepper(1).broken or "")
    assert s.bits() == before


def test_a_good_step_after_a_bad_one_is_as_if_the_bad_one_had_not_been(
    small: Callable[..., Any],
) -> None:
    one, two = small("1"), small("2")
    one.stepper(0)
    two.stepper(0)
    spoilt = two.model.norm.weight.register_hook(lambda g: g * NAN)
    assert two.stepper(1).broken
    spoilt.remove()
    one.stepper(2)
    two.stepper(2)
    assert one.bits() == two.bits()


# --- precision and seeds


def test_precision_bfloat16_computes_in_bfloat16(small: Callable[..., Any]) -> None:
    s = small(precision="bfloat16")
    seen: list[torch.dtype] = []
    s.model.blocks[0].mlp.up.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    assert s.stepper(0).broken is None
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in s.model.parameters()} == {torch.float32}


def test_auto_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for has_it in (True, False):
        found = {"architecture": "x86_64", "avx512_bf16": has_it}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        assert isinstance(autocast("auto", cpu)(), torch.autocast) == has_it
    assert isinstance(autocast("float32", cpu)(), nullcontext)


def test_mixed_seeds_differ_for_every_order_and_grouping() -> None:
    seeds = {mix(a, b, c) for a in range(12) for b in range(12) for c in range(12)}
    assert len(seeds) == 12**3
    assert mix(1, 23) != mix(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(0, 0, 0) == mix(0, 0, 0) == 6436203349130839549  # the same on every machine


@pytest.mark.parametrize("kind", [{"logit_softcap": 2.0}, {"lm_head_bias": True}])
def test_a_model_that_reads_out_itself_is_trained_by_its_own_logits(
    kind: dict[str, Any], small: Callable[..., Any]
) -> None:
    s = small(model=replace(CALM, initial="normal", initial_std=0.5, **kind))
    if s.model.lm_head_bias is not None:
        s.model.lm_head_bias.data.uniform_(-1.0, 1.0)
    batch = s.batches.at(0)
    logits = s.model(batch.inputs)
    wanted = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    slopes = torch.autograd.grad(wanted, list(s.model.parameters()))
    found, result = gradient(s, 0), s.stepper(0)
    assert result.loss == pytest.approx(wanted.item(), rel=1e-5)
    size = torch.cat([slope.flatten() for slope in slopes]).norm()
    share = min(1.0, s.config.clip / size.item())
    for (name, _), slope in zip(s.model.named_parameters(), slopes, strict=True):
        torch.testing.assert_close(found[name], share * slope, atol=1e-6, rtol=1e-4)


def test_experts_are_balanced_and_the_reported_loss_has_no_balance_term(
    small: Callable[..., Any],
) -> None:
    model = replace(CALM, experts=3, experts_per_token=1)
    told, slopes = {}, {}
    for weight in (0.0, 1.0):
        s = small(str(weight), model=model, balance_weight=weight, clip=1e9)
        slopes[weight] = gradient(s, 0)
        told[weight] = s.stepper(0).loss
    assert told[0.0] == told[1.0]
    s = small("again", model=model)
    s.model.train()
    s.model(s.batches.at(0).inputs)
    uneven = s.model.balance()
    routers = [name for name, _ in s.model.named_parameters() if "router" in name]
    assert routers
    parameters = dict(s.model.named_parameters())
    pulls = torch.autograd.grad(uneven, [parameters[name] for name in routers])
    for name, pull in zip(routers, pulls, strict=True):
        apart = slopes[1.0][name] - slopes[0.0][name]
        torch.testing.assert_close(apart, pull, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_padded_targets_are_left_out_of_the_sum_and_of_the_count(
    small: Callable[..., Any], accumulate: int
) -> None:
    s = small(model=CALM, accumulate=accumulate, clip=1e9)
    inputs, targets, _ = s.batches.at(0)
    targets = targets.clone()
    targets[0, 3:] = targets[-1] = -100
    s.stepper.batches = SimpleNamespace(at=lambda _: Batch(inputs, targets))
    found, loss = gradient(s, 0), s.stepper(0).loss
    logits = s.model(inputs)
    plain = cross_entropy(logits.flatten(0, 1), targets.flatten())  # torch's mean counts the rest
    assert loss == pytest.approx(plain.item(), rel=1e-6)
    wanted = torch.autograd.grad(plain, list(s.model.parameters()))
    for (name, _), g in zip(s.model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)


def test_on_a_gpu_only_ordered_kernels_are_used_and_no_memory_is_filled() -> None:
    memory: Any = torch.utils.deterministic
    for before in (True, False):
        memory.fill_uninitialized_memory = before
        try:
            with deterministic(torch.device("cuda"), enabled=True):
                assert torch.are_deterministic_algorithms_enabled()
                assert not memory.fill_uninitialized_memory
            assert not torch.are_deterministic_algorithms_enabled()
            assert memory.fill_uninitialized_memory is before
        finally:
            memory.fill_uninitialized_memory = True
