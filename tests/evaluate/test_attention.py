"""fenchel/evaluate/attention.py: the maps are those the model attends by."""

import pytest
import torch
from torch import Tensor

from fenchel.evaluate import attention_health, attention_maps
from fenchel.model import ModelConfig, Transformer

SETTINGS = {"vocabulary": 19, "context": 9, "width": 16, "heads": 4, "kv_heads": 2, "layers": 2}


def lively(choice: str) -> Transformer:
    model = Transformer(ModelConfig(choice=choice, **SETTINGS)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(19, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("choice", ["softmax", "entmax", "sparsemax"])
def test_mixing_the_values_by_the_maps_gives_what_the_layer_gives(choice: str, ids: Tensor) -> None:
    model = lively(choice)
    maps = attention_maps(model, ids)
    assert maps.shape == (2, 4, 9, 9)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 9))
    assert (maps.triu(1) == 0).all()
    values: list[Tensor] = []
    mixed: list[Tensor] = []
    for block in model.blocks:
        block.attention.out.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    model(ids, observe=lambda *what: values.append(what[3]))
    for p, v, out in zip(maps, values, mixed, strict=True):
        by_head = v[0].repeat_interleave(2, dim=0)  # each key/value head serves two
        torch.testing.assert_close((p @ by_head).transpose(0, 1).flatten(1), out[0])


def test_health_is_that_of_the_maps(ids: Tensor) -> None:
    model = lively("entmax")
    maps, told = attention_maps(model, ids), attention_health(model, ids)
    layers = {"max_logit", "entropy", "effective", "support"}
    heads = {"head_max_logit", "head_rms", "head_entropy"}
    assert told.keys() == {f"attention/{name}" for name in layers | heads}
    entropy = torch.special.entr(maps).sum(-1)
    assert told["attention/entropy"] == pytest.approx(entropy.mean((1, 2)).tolist(), rel=1e-5)
    support = (maps > 0).sum(-1).double().mean((1, 2))
    assert told["attention/support"] == pytest.approx(support.tolist(), rel=1e-5)
    by_head = torch.tensor(told["attention/head_entropy"])
    torch.testing.assert_close(by_head, entropy.mean(2))
    top = torch.tensor(told["attention/head_max_logit"])
    assert top.shape == (2, 4)
    assert top.amax(1).tolist() == pytest.approx(told["attention/max_logit"])


@pytest.mark.parametrize(
    "settings",
    [
        {"softcap": 0.5},
        {"windows": (2, 0)},
        {"score_scale": 2.0},
        {"positions": "alibi"},
        {"positions": "buckets"},
        {"sinks": True},
        {"sinks": True, "sink_score": "token"},
        {"qk_norm": True},
        {"layer_choices": ("sparsemax", "softmax")},
        {"distinct_layers": 1},
        {"kv_heads": 4, "scores": "l2"},
    ],
    ids=str,
)
def test_maps_and_health_follow_the_attention_of_each_layer(
    settings: dict[str, object], ids: Tensor
) -> None:
    """Mixing the values of the layer by its map gives what the layer gives to its last map."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SETTINGS, **settings})).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.normal_(0, 0.5, generator=torch.Generator().manual_seed(n))
    maps, told = attention_maps(model, ids), attention_health(model, ids)
    values: list[Tensor] = []
    mixed: list[Tensor] = []
    for block in model.blocks:
        block.attention.out.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    model(ids, observe=lambda *what: values.append(what[3]))
    assert len(maps) == len(mixed) == 2
    for p, v, out in zip(maps, values, mixed, strict=True):
        by_head = v[0].repeat_interleave(4 // v.shape[1], dim=0)
        torch.testing.assert_close((p @ by_head).transpose(0, 1).flatten(1), out[0])
    if not model.config.sinks:  # the health counts the sink as one more key
        entropy = torch.special.entr(maps).sum(-1)
        assert told["attention/entropy"] == pytest.approx(entropy.mean((1, 2)).tolist(), rel=1e-4)
