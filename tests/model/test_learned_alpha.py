"""An exponent of entmax per head that is learned: fenchel/model/attention.py and what reads it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.attention import attend, backend_support, selected_backend
from fenchel.checkpoints.hf_export import save
from fenchel.choice import Entmax
from fenchel.generation import generate
from fenchel.generation.cpu_step import why_not_cpu
from fenchel.generation.plain_decoder import why_not_plain
from fenchel.inspection.heads import heads
from fenchel.inspection_result import Method
from fenchel.model import ModelConfig, Transformer
from fenchel.model.config import LEARNED_ALPHA
from fenchel.optim import OptimConfig, build_optimiser

LOW, HIGH = LEARNED_ALPHA
V, CONTEXT, H = 11, 12, 4
METHOD = Method(
    dtype="float64", device="cpu", algorithm="", tolerance=0.1, iterations=5, failure=1e-3, seed=0
)


def build(**settings: Any) -> Transformer:
    """A model in float64 whose heads have different exponents."""
    usual = {"vocabulary": V, "context": CONTEXT, "width": 16, "layers": 2, "heads": H}
    learned = {"entmax_alpha_learned": True, "initial": "normal"}
    learned |= {} if "layer_choices" in settings else {"choice": "entmax"}
    config = ModelConfig(**{**usual, **learned, "initial_std": 0.5, **settings})
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    for n, logit in enumerate(logits_of(model)):
        nn.init.normal_(logit, std=1.5, generator=torch.Generator().manual_seed(n))
    return model


def logits_of(model: Transformer) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("alpha_logit")]


def draw(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(5))


def loss(model: Transformer, ids: Tensor) -> Tensor:
    memory = {"memory_BSM": model.encode(ids)} if model.config.kind == "encoder-decoder" else {}
    return cross_entropy(model(ids[:, :-1], **memory).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"kv_heads": 2, "temperature": "log"}, 2),
        ({"layer_choices": ("softmax", "entmax"), "sinks": True, "softcap": 3.0}, 1),
        ({"kind": "encoder-decoder", "layers": 1}, 3),  # encoder, decoder, cross-attention
    ],
    ids=["decoder", "one layer", "encoder-decoder"],
)
def test_the_gradient_of_every_exponent_is_that_of_differences(
    settings: dict[str, Any], layers: int
) -> None:
    model, ids = build(**settings), draw(2, CONTEXT)
    loss(model, ids).backward()
    logits, step = logits_of(model), 1e-5
    assert len(logits) == layers
    for logit in logits:
        assert logit.shape == (H,)
        for h in range(H):
            ends = []
            for move in (step, -2 * step, step):  # up, down, back
                with torch.no_grad():
                    logit[h] += move
                    ends.append(float(loss(model, ids)))
            assert float(logit.grad[h]) == pytest.approx(
                (ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-9
            )
        assert logit.grad.abs().amin() > 1e-7  # or the differences say nothing


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_every_head_chooses_by_its_own_exponent(backend: str) -> None:
    model, seen = build(kv_heads=2, layers=1), []
    model(draw(2, CONTEXT), observe=lambda _, *qkv: seen.append(model.attention_call(0, *qkv)))
    (q, k, v, spec), alphas = seen[0], model.attention(0).choice.alpha.flatten().tolist()
    assert len(set(alphas)) == H
    found = attend(q, k, v, **spec, backend=backend)
    for h, alpha in enumerate(alphas):
        one = q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1]
        fixed = attend(*one, choice=Entmax(alpha), prior=spec.prior, scale=spec.scale)
        torch.testing.assert_close(found[:, h : h + 1], fixed)
    assert "an alpha that is a number" in str(backend_support(q, k, v, **spec)["triton"])


def test_long_texts_train_in_tiles_and_short_ones_in_one_piece() -> None:
    """Tiles with an exponent per head are solved again in the backward pass: slower, and small."""
    alpha = torch.full((H, 1, 1), 1.4, requires_grad=True)
    for T, backend in ((256, "reference"), (2048, "blocked")):
        q = torch.zeros(1, H, T, 8, requires_grad=True)
        assert selected_backend(q, q, q, choice=Entmax(alpha)) == backend
        assert selected_backend(q, q, q, choice=Entmax(1.4)) == "blocked"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exponent_starts_at_its_setting_and_stays_in_its_range(dtype: torch.dtype) -> None:
    fresh = Transformer(
        ModelConfig(vocabulary=V, choice="entmax", entmax_alpha=1.3, entmax_alpha_learned=True)
    )
    torch.testing.assert_close(fresh.attention(0).choice.alpha.flatten(), torch.full((2,), 1.3))
    model = build(layers=1).to(dtype)
    (logit,) = logits_of(model)
    nn.init.constant_(logit, 200.0)
    with torch.no_grad():
        logit[::2] = -200.0
    alpha = model.attention(0).choice.alpha
    assert alpha.dtype == torch.float32
    torch.testing.assert_close(alpha.flatten(), torch.tensor([LOW, HIGH] * (H // 2)))
    loss(model, draw(2, CONTEXT)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_exponents_do_not_decay_and_fall_where_even_weights_are_wanted() -> None:
    model, seen = build(layers=1, positions="none", kind="encoder"), []
    settings = OptimConfig(optimiser="adamw", learning_rate=0.05, weight_decay=0.5)
    optimiser = build_optimiser(model, settings, steps=30)
    (logit,) = logits_of(model)
    groups = [group for part in optimiser.members for group in part.param_groups]
    (decay,) = (g["weight_decay"] for g in groups if any(p is logit for p in g["params"]))
    assert decay == 0.0
    with torch.no_grad():
        model(draw(4, CONTEXT), observe=lambda _, *qkv: seen.extend(qkv))
    q, k, v = seen
    before = logit.detach().clone()
    for _ in range(30):
        o = attend(q, k, v, choice=model.attention(0).choice)
        (o - v.mean(2, keepdim=True)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    assert (logit < before - 0.5).all()


def test_a_model_learns_its_exponents_with_its_other_weights() -> None:
    model, ids = build(initial_std=0.2), draw(4, CONTEXT)
    optimiser = build_optimiser(model, OptimConfig(learning_rate=0.01), steps=8)
    before, first = [logit.detach().clone() for logit in logits_of(model)], loss(model, ids)
    for _ in range(8):
        loss(model, ids).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert loss(model, ids) < first
    for logit, old in zip(logits_of(model), before, strict=True):
        assert (logit - old).abs().amin() > 1e-3


def test_decoding_gives_the_tokens_of_the_whole_text() -> None:
    model, prompt = build(temperature="log").eval(), draw(2, 4)
    found = generate(model, prompt, max_new_tokens=6, temperature=0.0)
    with torch.no_grad():
        assert torch.equal(model(found)[:, 3:-1].argmax(-1), found[:, 4:])
    assert why_not_cpu(model) == "choice is 'entmax'"
    assert why_not_plain(model, sparse=True) == "entmax_alpha_learned is True"


def test_an_inspection_shows_every_exponent_and_the_sensitivity_at_it() -> None:
    model, calls = build(kv_heads=2, layers=1).requires_grad_(False), []
    model(draw(1, CONTEXT), observe=lambda _, *qkv: calls.append(model.attention_call(0, *qkv)))
    chosen, alphas = [1, 3], model.attention(0).choice.alpha.flatten()[[1, 3]].tolist()
    found = list(heads(calls[0], 1, chosen, METHOD, torch.Generator()))
    assert [head.alpha for head in found] == pytest.approx(alphas)
    for head, alpha in zip(found, alphas, strict=True):
        fixed = build(kv_heads=2, layers=1, entmax_alpha_learned=False, entmax_alpha=alpha)
        call = fixed.attention_call(0, *calls[0][:3])
        (other,) = heads(call, 1, [head.head - 1], METHOD, torch.Generator())
        assert head.support == other.support
        assert head.sensitivity.most == pytest.approx(other.sensitivity.most, rel=1e-5)
        assert head.sigma["qkv"].lower == pytest.approx(other.sigma["qkv"].lower, rel=1e-2)
        assert head.bound == pytest.approx(other.bound, rel=1e-5)
        assert other.alpha == alpha


@pytest.mark.parametrize("source", [b"{}", b'{"fenchel": {"map": "entmax", "alpha": 1.5}}'])
def test_no_family_of_hugging_face_holds_it(source: bytes, tmp_path: Path) -> None:
    """Neither does the record of a map that was attached to its directory."""
    model = build()
    model.source_files = {"config.json": source}
    with pytest.raises(ValueError, match=r"no Hugging Face family .* entmax_alpha_learned=True"):
        save(model, None, tmp_path / "out")
