"""fenchel/train/stability.py: what each switch does to a step, and that nothing else happens."""

import copy
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fenchel.attention import attend
from fenchel.data import Batch, DocumentIds, PackedBatches
from fenchel.model import ModelConfig, Transformer
from fenchel.model.forward_context import ForwardContext
from fenchel.train.stability import Stability

CALM = ModelConfig(vocabulary=31, context=8, width=16, layers=2, heads=2)  # without dropout
SHARED = ModelConfig(vocabulary=31, context=8, width=16, layers=2, heads=2, kv_heads=1)
STILL = {"learning_rate": 1e-12, "matrix_learning_rate": 1e-12, "weight_decay": 0.0}


def scores(model: Transformer, ids: Tensor) -> Tensor:
    """Every layer's scores with -inf where a key is ahead of its query: (L, B, H, T, T)."""
    found: list[Tensor] = []

    def observe(_layer: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        ahead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        found.append((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(ahead, -torch.inf))

    model(ids, observe=observe)
    return torch.stack(found)


def largest(model: Transformer, ids: Tensor) -> Tensor:
    """(L, H)."""
    z = scores(model, ids).detach()
    return z.abs().masked_fill(z == -torch.inf, 0.0).amax((1, 3, 4))


def gradient(s: Any, step: int) -> dict[str, Tensor]:
    """The gradient of a step as the optimiser gets it, with the weights left alone."""
    found: dict[str, Tensor] = {}

    def look() -> None:
        found.update((name, p.grad.clone()) for name, p in s.model.named_parameters())

    s.optimiser.step = look
    s.stepper(step)
    return found


def liven(s: Any) -> None:
    """Weights that are not those of a fresh model, whose heads all look alike."""
    with torch.no_grad():
        for n, p in enumerate(s.model.parameters()):
            p.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(n))


def test_without_a_switch_the_model_is_not_observed(small: Callable[..., Any]) -> None:
    s = small()
    asked: list[dict[str, Any]] = []
    s.model.register_forward_pre_hook(lambda _m, _a, given: asked.append(given), with_kwargs=True)
    result = s.stepper(0)
    assert [set(given) for given in asked] == [{"return_hidden"}]
    assert result.metrics == {}


# --- the entropy penalty


@pytest.mark.parametrize("model", [CALM, SHARED], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_is_that_of_the_loss_and_the_penalty(
    small: Callable[..., Any], model: ModelConfig, parts: int
) -> None:
    s = small(model=model, accumulate=parts, clip=1e9, entropy_floor=1.2, entropy_weight=0.7)
    liven(s)
    found = gradient(s, 3)
    batch = s.batches.at(3)
    whole = torch.zeros(())
    for ids, targets in zip(batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True):
        loss = nn.functional.cross_entropy(s.model(ids).flatten(0, 1), targets.flatten())
        entropy = torch.distributions.Categorical(logits=scores(s.model, ids)).entropy()
        lacking = (1.2 - entropy.mean((1, 3))).clamp(min=0.0)  # (L, H)
        whole = whole + (loss + 0.7 * lacking.square().mean()) / parts
    assert (lacking > 0).any()
    whole.backward()
    for name, p in s.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=2e-4, atol=1e-6)


def test_the_reported_loss_has_no_penalty_and_the_penalty_is_a_metric(
    small: Callable[..., Any],
) -> None:
    plain, floored = small("1", model=CALM), small("2", model=CALM, entropy_floor=3.0)
    a, b = plain.stepper(0), floored.stepper(0)
    assert a.loss == b.loss
    entropy = torch.distributions.Categorical(
        logits=scores(small("3", model=CALM).model, plain.batches.at(0).inputs)
    ).entropy()
    expected = 0.1 * (3.0 - entropy.mean((1, 3))).square().mean().item()
    assert b.metrics == {"entropy_penalty": pytest.approx(expected, rel=1e-5)}


def test_heads_above_the_floor_are_left_in_peace(small: Callable[..., Any]) -> None:
    plain, floored = small("1", model=CALM), small("2", model=CALM, entropy_floor=1e-6)
    a, b = gradient(plain, 0), gradient(floored, 0)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_floor_keeps_entropy_up_through_a_run(small: Callable[..., Any]) -> None:
    ends = {}
    floor = {"entropy_floor": 1.0, "entropy_weight": 10.0}
    for name, settings in (("plain", {}), ("floored", floor)):
        s = small(name, model=CALM, optim={"matrix_learning_rate": 0.3}, steps=40, **settings)
        for step in range(40):
            s.stepper(step)
        z = scores(s.model, s.batches.at(0).inputs)
        ends[name] = torch.distributions.Categorical(logits=z).entropy().mean((1, 3)).min().item()
    assert ends["floored"] > ends["plain"] + 0.1


# --- QK-clip


@pytest.mark.parametrize("model", [CALM, SHARED], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("parts", [1, 4])
def test_what_passed_the_limit_in_the_step_ends_on_it(
    small: Callable[..., Any], model: ModelConfig, parts: int
) -> None:
    """With a rate of nearly 0 the weights are those of the forward pass, and only the clip acts."""
    probe = small("0", model=model)
    liven(probe)
    ids = probe.batches.at(5).inputs
    before = largest(probe.model, ids)
    tau = before[0].max().item() * 0.8
    s = small("1", model=model, accumulate=parts, optim=STILL, qk_clip=tau)
    liven(s)
    result = s.stepper(5)
    first = largest(s.model, ids)[0]  # later layers read another stream now
    torch.testing.assert_close(first, before[0].clamp(max=tau), rtol=1e-4, atol=1e-5)
    assert result.metrics == {"clipped_heads": (before > tau).sum().item()}
    assert result.metrics["clipped_heads"] > 0


def test_a_block_that_serves_several_layers_is_scaled_back_once(small: Callable[..., Any]) -> None:
    model = replace(CALM, distinct_layers=1)
    probe = small("0", model=model)
    liven(probe)
    ids = probe.batches.at(5).inputs
    before = largest(probe.model, ids)
    tau = before.amax(0).min().item() * 0.8  # both heads above it, in one layer or the other
    s = small("1", model=model, optim=STILL, qk_clip=tau)
    liven(s)
    assert s.stepper(5).metrics == {"clipped_heads": 2.0}
    expected = before[0] * tau / before.amax(0)
    torch.testing.assert_close(largest(s.model, ids)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_limit_that_is_not_reached_changes_no_bit(small: Callable[..., Any]) -> None:
    plain, limited = small("1"), small("2", qk_clip=1e6)
    for step in range(3):
        plain.stepper(step)
        limited.stepper(step)
    assert plain.bits() == limited.bits()


def test_a_limit_holds_scores_through_a_run_at_a_rate_that_lets_them_grow(
    small: Callable[..., Any],
) -> None:
    ends = {}
    for name, limit in (("free", None), ("limited", 4.0)):
        s = small(name, model=CALM, optim={"matrix_learning_rate": 0.3}, qk_clip=limit, steps=40)
        for step in range(40):
            s.stepper(step)
        ends[name] = largest(s.model, s.batches.at(39).inputs).max().item()
    assert ends["free"] > 10.0
    assert ends["limited"] < 6.0  # the last step itself comes on top of the limit


def test_a_broken_step_scales_nothing_back(small: Callable[..., Any]) -> None:
    s = small(qk_clip=1e-3)
    s.model.norm.weight.register_hook(lambda g: g * float("nan"))
    before = s.bits()
    assert s.stepper(0).broken
    assert s.bits() == before


@pytest.mark.parametrize(
    ("settings", "switch", "says"),
    [
        ({"qk_norm": True}, {"qk_clip": 1.0}, "qk_norm would undo it"),
        ({"sigma_reparam": True}, {"qk_clip": 1.0}, "sigma_reparam would undo it"),
        ({"positions": "alibi"}, {"entropy_floor": 1.0}, "bias of positions"),
        ({"sinks": True}, {"entropy_floor": 1.0}, "sinks"),
    ],
)
def test_a_switch_that_cannot_serve_the_model_is_refused(
    small: Callable[..., Any], settings: dict[str, Any], switch: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        small(model=replace(CALM, **settings), **switch)


@pytest.mark.parametrize(
    "settings",
    [
        {"qk_norm": True},
        {"softcap": 2.0},
        {"sigma_reparam": True},
        {"windows": (3, 0)},
        {"score_scale": 0.7},
        {"choice": "entmax"},
        {"distinct_layers": 1},
    ],
    ids=str,
)
def test_the_penalty_follows_the_settings_of_the_model(
    small: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """Its value is that of the weights by which the layers mix."""
    s = small(model=replace(CALM, **settings), entropy_floor=3.0, entropy_weight=1.0)
    liven(s)
    if settings.get("sigma_reparam"):
        s.model.initialise(torch.Generator().manual_seed(0))
    batch, lacking = s.batches.at(0), []
    s.model.train()
    state = copy.deepcopy(s.model.state_dict())

    def observe(layer: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        block = s.model.blocks[layer * len(s.model.blocks) // 2]
        call = block.attention.attention_call(q, k, k, ForwardContext())
        _, p = attend(call.q, call.k, call.v, **call.spec, return_weights=True)
        lacking.append(3.0 - torch.special.entr(p).sum(-1).mean((0, 2)))

    s.model(batch.inputs, observe=observe)
    s.model.load_state_dict(state)  # sigma's singular vectors follow every forward pass
    expected = torch.cat(lacking).clamp(min=0.0).square().mean().item()
    assert s.stepper(0).metrics["entropy_penalty"] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_attention_is_refused(small: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="attention_layers and config, which Linear lacks"):
        Stability(nn.Linear(2, 2), small().config)


# --- documents that share rows


def packed() -> PackedBatches:
    """Five documents in four rows of 8 positions, 9 of which no document fills; of the second
    document the last two tokens alone are targets.
    """
    starts = np.array([0, 6, 11, 18, 22, 28])
    scored = np.ones(28, dtype=bool)
    scored[6:9] = False
    documents = DocumentIds(np.random.default_rng(0).integers(31, size=28), starts, scored)
    return PackedBatches(documents, batch=4, context=8, seed=1, pad=30)


def alone(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every document of a batch, (1, T) each."""
    assert batch.segments is not None
    found = []
    for inputs, targets, segments in zip(*batch, strict=True):
        for number in segments.unique():
            own = segments == number
            if (targets[own] >= 0).any():
                found.append((inputs[own][None], targets[own][None]))
    return found


@pytest.mark.parametrize("model", [CALM, SHARED], ids=["own keys", "shared keys"])
def test_the_penalty_of_packed_documents_is_that_of_each_alone(
    small: Callable[..., Any], model: ModelConfig
) -> None:
    """Value and gradient: neither a neighbour in the row nor padding has a part in them."""
    s = small(model=model, clip=1e9, entropy_floor=1.2, entropy_weight=5.0)
    liven(s)
    s.stepper.batches = packed()
    found = gradient(s, 0)
    documents = alone(s.stepper.batches.at(0))
    assert len(documents) == 5
    assert sum(ids.numel() for ids, _ in documents) == 4 * 8 - 9
    losses, entropies = [], []
    for inputs, targets in documents:
        logits = s.model(inputs).flatten(0, 1)
        losses.append(nn.functional.cross_entropy(logits, targets.flatten(), reduction="none"))
        z = scores(s.model, inputs)
        entropies.append(torch.distributions.Categorical(logits=z).entropy()[:, 0])  # (L, H, T)
    lacking = (1.2 - torch.cat(entropies, -1).mean(-1)).clamp(min=0.0)
    assert (lacking > 0).any()
    loss = torch.cat(losses).sum() / sum(int((targets >= 0).sum()) for _, targets in documents)
    (loss + 5.0 * lacking.square().mean()).backward()
    for name, p in s.model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_qk_clip_sees_the_pairs_within_documents_alone(
    small: Callable[..., Any], parts: int
) -> None:
    probe = small("0", model=CALM)
    liven(probe)
    batch = packed().at(0)
    within = torch.stack([largest(probe.model, ids) for ids, _ in alone(batch)]).amax(0)[0]
    across = largest(probe.model, batch.inputs)[0]
    assert (across > 1.05 * within).any()
    tau = within.max().item() * 0.8
    s = small("1", model=CALM, accumulate=parts, optim=STILL, qk_clip=tau)
    liven(s)
    s.stepper.batches = packed()
    s.stepper(0)
    after = torch.stack([largest(s.model, ids) for ids, _ in alone(batch)]).amax(0)[0]
    torch.testing.assert_close(after, within.clamp(max=tau), rtol=1e-4, atol=1e-5)


# --- the run


def test_a_run_with_every_switch_on_is_resumed_bit_for_bit(small: Callable[..., Any]) -> None:
    settings = {"qk_clip": 0.5, "entropy_floor": 2.0, "optim": {"beta2": 0.999, "beta2_warmup": 5}}
    whole, parted = small("1", **settings), small("2", **settings)
    whole.loop().train()
    parted.ear.at[5] = lambda: signal.raise_signal(signal.SIGINT)
    assert parted.loop().train().status == "interrupted"
    again = small("2", **settings)
    assert again.loop().train().status == "finished"
    assert again.bits() == whole.bits()
    told = [json.loads(line) for line in whole.run.metrics.read_text().splitlines()]
    assert any(line.get("train/clipped_heads", 0) > 0 for line in told)
    assert any(line.get("train/entropy_penalty", 0) > 0 for line in told)
