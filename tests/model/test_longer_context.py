"""Transformer.with_context: positions past the context of training, defined and measured."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.generation import generate
from fenchel.generation.kv_cache import KVCache
from fenchel.model import ModelConfig, Transformer

KINDS = {
    "rotary": {}, "ntk": {"rotary_scaling": "ntk", "rotary_factor": 2.0},
    "yarn": {"rotary_scaling": "yarn", "rotary_factor": 2.0},
    "windows": {"windows": (4, 0), "rotary_local_base": 100.0},
    "alibi": {"positions": "alibi"}, "buckets": {"positions": "buckets"},
    "sinusoidal": {"positions": "sinusoidal"}, "none": {"positions": "none"},
}  # fmt: skip


def random_model(**settings: object) -> Transformer:
    sizes = {"vocabulary": 23, "context": 12, "width": 32, "layers": 2, "heads": 4}
    config = ModelConfig(**{**sizes, **settings}, initial="xavier")  # type: ignore[arg-type]
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_within_the_context_nothing_changes_and_past_it_a_cache_reads_the_same(kind: str) -> None:
    model = random_model(**KINDS[kind])  # type: ignore[arg-type]
    ids = torch.randint(23, (2, 40), generator=torch.Generator().manual_seed(1))
    longer = model.with_context(40)
    assert torch.equal(model(ids[:, :12]), longer(ids[:, :12]))
    with pytest.raises(ValueError, match=r"reads 12; .* model.with_context\(13\)"):
        model(ids[:, :13])
    assert model.config.context == 12
    whole = longer(ids)
    cache = KVCache(longer.config, batch=2, positions=40)
    parts = [longer(part, cache=cache) for part in ids.split((7, 6, 1, 26), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_generation_reads_all_of_the_longer_context() -> None:
    model = random_model()
    longer = model.with_context(40)
    ids = torch.randint(23, (1, 9), generator=torch.Generator().manual_seed(1))
    out = generate(longer, ids, max_new_tokens=20, temperature=0.0)
    greedy = ids
    for _ in range(20):
        greedy = torch.cat((greedy, longer(greedy)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, greedy)


def test_parameters_are_shared() -> None:
    model = random_model()
    longer = model.with_context(40)
    pairs = zip(model.parameters(), longer.parameters(), strict=True)
    assert all(one is two for one, two in pairs)


def test_what_a_table_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="table of 12 positions without a row for later ones"):
        random_model(positions="learned").with_context(13)
    learned = random_model(positions="learned")
    assert learned.with_context(8).config.context == 8
    with pytest.raises(ValueError, match=r"reads 12; shorten the sequence\.$"):
        learned(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="needs rotary positions that are not scaled yet"):
        random_model(positions="alibi").with_context(24, rotary_scaling="ntk")
    with pytest.raises(ValueError, match="needs rotary positions that are not scaled yet"):
        random_model(rotary_scaling="linear", rotary_factor=2.0).with_context(
            24, rotary_scaling="ntk"
        )


def test_scalings_keep_the_context_of_training() -> None:
    config = ModelConfig(vocabulary=23, context=64).with_context(256, "yarn")
    assert (config.rotary_trained_context, config.rotary_factor) == (64, 4.0)
    again = config.with_context(512)
    assert (again.rotary_trained_context, again.rotary_factor) == (64, 4.0)


CONTEXT, LONG, LAG, V = 32, 128, 5, 17


def lagged(seed: int, sequences: int, length: int) -> Tensor:
    """Each token is a function of the one LAG before it, 17 times out of 20."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (sequences, length), generator=generator)
    for t in range(LAG, length):
        keep = torch.rand(sequences, generator=generator) < 0.85
        ids[:, t] = torch.where(keep, (5 * ids[:, t - LAG] + 1) % V, ids[:, t])
    return ids


def trained(**settings: object) -> Transformer:
    config = ModelConfig(vocabulary=V, context=CONTEXT, width=32, layers=2, heads=4, **settings)  # type: ignore[arg-type]
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = 200
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 10) * (1 - step / steps)
        ids = lagged(step, 32, CONTEXT)
        cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


@torch.no_grad()
def losses(model: Transformer, rotary_scaling: str | None = None) -> tuple[float, float, float]:
    """Mean loss in the trained context, up to twice and up to four times as far."""
    ids = lagged(10**6, 64, LONG)
    logits = model.with_context(LONG, rotary_scaling=rotary_scaling)(ids)[:, :-1]
    by_place = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(0)
    return tuple(  # type: ignore[return-value]
        float(by_place[a:b].mean()) for a, b in ((LAG, CONTEXT), (CONTEXT, 64), (64, LONG))
    )


def test_rotary_positions_need_their_scaling_past_the_trained_context() -> None:
    """PO-22: plain rotary breaks at once, NTK reads twice as far, YaRN four times.

    Without further training "linear" is no choice: it changes the fast frequencies too, by which a
    distance of LAG is told from its neighbours.
    """
    model = trained()
    plain, linear, ntk, yarn = (losses(model, s) for s in (None, "linear", "ntk", "yarn"))
    assert plain[0] < 1.0
    assert plain[1] > plain[0] + 1.0 < plain[2]
    assert linear[0] > plain[0] + 1.0
    assert max(ntk[:2]) < plain[0] + 0.2 < ntk[2] - 1.0
    assert max(yarn) < plain[0] + 0.5


@pytest.mark.parametrize(
    ("settings", "nearby"),
    [
        ({"positions": "alibi"}, 0.2),
        ({"positions": "buckets", "buckets": 16, "bucket_distance": 16}, 0.2),
    ],
)
def test_functions_of_the_distance_read_on(settings: dict[str, object], nearby: float) -> None:
    within, twice, four_times = losses(trained(**settings))
    assert twice < within + nearby
    assert four_times < within + 1.0


def test_sinusoids_are_defined_and_useless_there() -> None:
    within, twice, four_times = losses(trained(positions="sinusoidal"))
    assert min(twice, four_times) > within + 1.0


def test_the_temperature_of_a_longer_context_keeps_its_steps() -> None:
    config = ModelConfig(vocabulary=8, context=16, temperature="stepped")
    assert config.with_context(64).temperature_step == 16
