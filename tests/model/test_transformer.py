"""fenchel/model/transformer.py, against transformers and against its laws."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fenchel.model import ModelConfig, Transformer, evaluating, forward_context
from fenchel.model.rotary_table import sinusoids
from fenchel.model.transformer import meta_model, token_positions

V, CONTEXT = 29, 12


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(V, shape, generator=seeded(seed))


def lively(**settings: Any) -> Transformer:
    """A model none of whose parameters is zero, as after some training."""
    model = Transformer(ModelConfig(vocabulary=V, context=CONTEXT, **settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=seeded(p.numel()))
            p.copy_(noise * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2) + (p.ndim == 1))
    return model


SHAPES: list[dict[str, Any]] = [
    {"width": 24, "heads": 3, "layers": 2},
    {"width": 24, "heads": 6, "kv_heads": 2, "layers": 2, "tied": False},
    {"width": 24, "heads": 2, "norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    {"width": 24, "heads": 2, "positions": "none", "choice": "entmax", "layers": 1},
    {"width": 24, "heads": 2, "choice": "sparsemax", "dropout": 0.1, "layers": 1},
    {"width": 24, "heads": 4, "kv_heads": 1, "choice": "hard", "layers": 1},
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " ".join(map(str, s.values())))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [6, 2, 1])
def test_with_llamas_weights_it_gives_llamas_logits(tied: bool, groups: int) -> None:
    settings = {"width": 24, "heads": 6, "kv_heads": groups, "layers": 2, "hidden": 40}
    ours = lively(**settings, tied=tied, rotary_base=500.0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=groups,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=ours.config.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config).eval()
    weights = {
        "model.embed_tokens.weight": ours.embed.weight,
        "model.norm.weight": ours.norm.weight,
    }
    weights["lm_head.weight"] = ours.lm_head_weight
    for n, block in enumerate(ours.blocks):
        q, k, v = block.attention.qkv.weight.split([24, 4 * groups, 4 * groups])
        gate, up = _gate_and_up(block.mlp)
        at = f"model.layers.{n}."
        weights |= {
            at + "self_attn.q_proj.weight": q,
            at + "self_attn.k_proj.weight": k,
            at + "self_attn.v_proj.weight": v,
            at + "self_attn.o_proj.weight": block.attention.out.weight,
            at + "mlp.gate_proj.weight": gate,
            at + "mlp.up_proj.weight": up,
            at + "mlp.down_proj.weight": block.mlp.down.weight,
            at + "input_layernorm.weight": block.attention_norm.weight,
            at + "post_attention_layernorm.weight": block.mlp_norm.weight,
        }
    theirs.load_state_dict(weights, strict=True)
    ids = some_ids(3, CONTEXT)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-5, rtol=1e-5)


def _gate_and_up(mlp: Any) -> tuple[Tensor, Tensor]:
    return mlp.gate.weight, mlp.up.weight


def test_with_gpt2s_weights_it_gives_gpt2s_logits() -> None:
    ours = lively(
        width=24, heads=3, layers=2, norm="layer", positions="learned", mlp="gelu", bias=True
    )
    config = GPT2Config(
        vocab_size=V,
        n_positions=CONTEXT,
        n_embd=24,
        n_layer=2,
        n_head=3,
        activation_function="gelu",
        layer_norm_epsilon=ours.config.epsilon,
        attn_implementation="eager",
    )
    theirs = GPT2LMHeadModel(config).eval()
    assert ours.pos_embed is not None
    weights = {
        "transformer.wte.weight": ours.embed.weight,
        "lm_head.weight": ours.embed.weight,
        "transformer.wpe.weight": ours.pos_embed.weight,
        "transformer.ln_f.weight": ours.norm.weight,
        "transformer.ln_f.bias": ours.norm.bias,
    }
    for n, block in enumerate(ours.blocks):
        parts = {
            "ln_1": block.attention_norm,
            "ln_2": block.mlp_norm,
            "attn.c_attn": block.attention.qkv,
            "attn.c_proj": block.attention.out,
            "mlp.c_fc": block.mlp.up,
            "mlp.c_proj": block.mlp.down,
        }
        for name, part in parts.items():
            # Theirs stores matrices as inputs x outputs.
            weight = part.weight if part.weight.ndim == 1 else part.weight.T
            weights[f"transformer.h.{n}.{name}.weight"] = weight
            weights[f"transformer.h.{n}.{name}.bias"] = part.bias
    theirs.load_state_dict(weights, strict=True)
    ids = some_ids(2, CONTEXT)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-5, rtol=1e-5)


@every_shape
def test_later_tokens_change_no_earlier_logit(shape: dict[str, Any]) -> None:
    model = lively(**shape)
    ids = some_ids(2, CONTEXT)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 3) % V
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@every_shape
def test_every_parameter_gets_a_gradient(shape: dict[str, Any]) -> None:
    model = lively(**shape).train()
    model(some_ids(2, CONTEXT)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        hard_score = shape.get("choice") == "hard" and "qkv" in name
        assert hard_score or p.grad.abs().sum() > 0, name


def test_without_positions_the_last_token_sees_a_bag_of_words() -> None:
    ids = some_ids(1, CONTEXT)
    shuffled = torch.cat([ids[:, :-1].flip(-1), ids[:, -1:]], dim=-1)
    blind, sighted = (lively(width=24, heads=2, layers=1, positions=p) for p in ("none", "rotary"))
    torch.testing.assert_close(blind(ids)[:, -1], blind(shuffled)[:, -1], atol=1e-5, rtol=0)
    assert not torch.allclose(sighted(ids)[:, -1], sighted(shuffled)[:, -1], atol=1e-3)


def test_a_fresh_model_guesses_evenly_whatever_its_depth() -> None:
    for layers in (1, 12):
        config = ModelConfig(vocabulary=500, context=CONTEXT, width=64, layers=layers)
        model = Transformer(config, generator=seeded())
        ids = torch.randint(500, (4, CONTEXT), generator=seeded())
        loss = torch.nn.functional.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        assert loss.item() == pytest.approx(torch.tensor(500.0).log().item(), abs=0.1)


def test_a_fresh_block_is_the_identity() -> None:
    model = Transformer(ModelConfig(vocabulary=V, context=CONTEXT, width=16, positions="none"))
    x = torch.randn(2, 5, 16, generator=seeded())
    torch.testing.assert_close(model.blocks[0](x), x)


def test_the_same_generator_gives_the_same_weights() -> None:
    config = ModelConfig(vocabulary=V, context=CONTEXT, width=16)
    one, two = (Transformer(config, generator=seeded(3)).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_number_of_parameters_is_that_of_the_formulas() -> None:
    """4 d^2 for attention, 8 d^2 + 5 d for the MLP with biases: 1,048,576 and 2,099,712 at 512."""
    config = ModelConfig(vocabulary=8, context=4, width=512, heads=8, layers=1, mlp="gelu")
    with torch.device("meta"):
        block = Transformer(config).blocks[0]
        biased = Transformer(
            ModelConfig(vocabulary=8, width=512, heads=8, layers=1, mlp="gelu", bias=True)
        ).blocks[0]
    assert sum(p.numel() for p in block.attention.parameters()) == 1_048_576
    assert sum(p.numel() for p in biased.mlp.parameters()) == 2_099_712


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="13 positions were given and the model reads 12"):
        lively(width=16)(some_ids(1, CONTEXT + 1))


def test_an_observer_sees_every_layer_and_changes_nothing() -> None:
    model, seen = lively(width=24, heads=6, kv_heads=2, layers=3), []
    ids = some_ids(2, 5)
    told = model(ids, observe=lambda *what: seen.append(what))
    torch.testing.assert_close(told, model(ids))
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    assert [tuple(t.shape) for t in seen[0][1:]] == [(2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)]


Build = Callable[..., Transformer]


def layer_norm(x: Tensor, module: torch.nn.LayerNorm) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return module.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + module.bias


def test_the_embedding_is_scaled_placed_typed_normed_and_lifted(build: Build, ids: Tensor) -> None:
    model = build(
        kind="encoder",
        positions="learned",
        embedding_width=10,
        embedding_scale=3.0,
        token_types=2,
        embedding_norm=True,
        norm="layer",
    )
    types = ids % 2
    x = 3.0 * model.embed.weight[ids] + model.pos_embed.weight[:9] + model.type_embed.weight[types]
    wanted = layer_norm(x, model.embed_norm) @ model.embed_proj.weight.T + model.embed_proj.bias
    torch.testing.assert_close(model._embed(ids, 0, None, types), wanted)
    zeros = model._embed(ids, 0, None, torch.zeros_like(ids))
    torch.testing.assert_close(model._embed(ids, 0, None, None), zeros)


def test_sinusoids_are_added_after_the_scale(build: Build, ids: Tensor) -> None:
    model = build(positions="sinusoidal", embedding_scale=24**0.5)
    wanted = 24**0.5 * model.embed.weight[ids] + sinusoids(torch.arange(2, 11), 24)
    torch.testing.assert_close(model._embed(ids, 2, None, None), wanted)


def test_logits_are_scaled_biased_and_capped_in_this_order(build: Build, ids: Tensor) -> None:
    model = build(tied=False, logit_scale=0.4, lm_head_bias=True, logit_softcap=1.5)
    plain = build(tied=False)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "lm_head_bias"})
    z = 0.4 * plain(ids) + model.lm_head_bias
    torch.testing.assert_close(model(ids), 1.5 * torch.tanh(z / 1.5))
    assert model(ids).abs().max() < 1.5


def test_the_masked_language_head_applies_gelu_and_a_norm_before_the_embedding(
    build: Build, ids: Tensor
) -> None:
    model = build(
        kind="encoder",
        lm_head_transform=True,
        mlp="gelu",
        norm="layer",
        embedding_width=10,
        bias=True,
    )
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    logits = model(ids)
    wide = gelu(seen[0] @ model.lm_head_proj.weight.T + model.lm_head_proj.bias)
    wanted = layer_norm(wide, model.lm_head_norm) @ model.embed.weight.T
    torch.testing.assert_close(logits, wanted)


def test_a_tied_narrow_embedding_is_read_down_the_way_it_came_up(build: Build, ids: Tensor) -> None:
    model = build(embedding_width=10)
    stream = model(ids, return_hidden=True)
    assert stream.shape == (3, 9, 10)
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    torch.testing.assert_close(model(ids), seen[0] @ model.embed_proj.weight @ model.embed.weight.T)


def test_the_pooler_reads_the_first_position(build: Build, ids: Tensor) -> None:
    model = build(kind="encoder", pooler=True)
    stream = model(ids, return_hidden=True)
    wanted = torch.tanh(stream[:, 0] @ model.pooler.weight.T + model.pooler.bias)
    torch.testing.assert_close(model.pool(stream), wanted)
    with pytest.raises(ValueError, match="this model has no pooler; build it with pooler=True"):
        build().pool(stream)


def test_tying_saves_a_table(build: Build) -> None:
    tied, untied = (sum(p.numel() for p in build(tied=tied).parameters()) for tied in (True, False))
    assert untied - tied == 37 * 24


def test_shared_blocks_are_one_block_many_times(build: Build, ids: Tensor) -> None:
    shared, whole = build(distinct_layers=1, layers=4), build(layers=4)
    weights = shared.state_dict()
    for n in range(1, 4):
        weights |= {
            name.replace("blocks.0.", f"blocks.{n}."): value
            for name, value in shared.state_dict().items()
            if name.startswith("blocks.0.")
        }
    whole.load_state_dict(weights)
    torch.testing.assert_close(shared(ids), whole(ids))


def test_positions_count_tokens_and_not_slots() -> None:
    present = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)
    assert token_positions(present).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 1, 2]]


def test_the_encoder_of_an_encoder_decoder_is_bidirectional(build: Build, ids: Tensor) -> None:
    model = build(kind="encoder-decoder", positions="buckets", buckets=8, bucket_distance=4)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 37
    before, after = model.encode(ids), model.encode(changed)
    assert not torch.allclose(before[:, 0], after[:, 0])


def test_an_encoder_has_buckets_of_its_own_for_later_keys(build: Build, ids: Tensor) -> None:
    model = build(kind="encoder-decoder", positions="buckets", buckets=8, bucket_distance=4)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 37
    model.encoder.relative_bias.weight.data[4:] = -1e4  # nobody looks at a later key any more
    before, after = model.encode(ids), model.encode(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_what_does_not_fit_is_refused_in_one_sentence(build: Build, ids: Tensor) -> None:
    decoder, encoder, both = build(), build(kind="encoder"), build(kind="encoder-decoder")
    there = torch.ones(3, 9, dtype=torch.bool)
    memory = both.encode(ids)
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: decoder(ids, token_mask_BS=there[:, 1:]),
            r"token_mask should be bool of shape \(3, 9\)",
        ),
        (lambda: decoder(ids, token_mask_BS=there.long()), r"got torch\.int64 of \(3, 9\)"),
        (
            lambda: build(token_types=2)(ids, types_BT=ids),
            r"types run from \d+ to \d+ and the model has 0 to 1",
        ),
        (lambda: decoder(ids, types_BT=ids), "types_BT was given to a model without types"),
        (
            lambda: decoder(ids, memory_BSM=memory),
            "memory_BSM was given and kind='decoder' has no cross-attention",
        ),
        (lambda: decoder.encode(ids), "a model of kind='decoder' has no separate encoder"),
        (lambda: encoder.encode(ids), "a model of kind='encoder' has no separate encoder"),
        (lambda: both(ids), r"give memory_BSM=model\.encode\(ids\)"),
        (lambda: encoder(ids, cache=object()), "call it without a cache"),
        (lambda: decoder(ids + 30), r"ids run from \d+ to \d+ and the model has 0 to 36"),
        (lambda: decoder(torch.zeros(1, 12, dtype=torch.int64)), "12 positions were given"),
        (lambda: both.encode(torch.zeros(1, 12, dtype=torch.int64)), "12 positions were given"),
        (lambda: decoder(ids[0]), r"ids should be \(B, T\) with T at least 1"),
    ]
    for call, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            call()


def test_every_module_is_given_back_as_it_came() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model[1].eval()  # as somebody has it who trains only a part
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert [module.training for module in model.modules()] == before == [True, True, *[False] * 3]


CONFIG = ModelConfig(vocabulary=9, context=4, width=8, heads=2)


def test_it_has_the_shapes_of_the_model() -> None:
    shapes = {name: p.shape for name, p in Transformer(CONFIG).state_dict().items()}
    found = meta_model(CONFIG)
    assert {name: p.shape for name, p in found.state_dict().items()} == shapes
    assert all(p.is_meta for p in found.parameters())


def test_it_needs_no_compiler() -> None:
    code = (
        "import sys\n"
        "from fenchel.model import ModelConfig\n"
        "from fenchel.model.transformer import meta_model\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "meta_model(ModelConfig(vocabulary=9, context=4, width=8, heads=2))\n"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


PACKED: list[dict[str, Any]] = [
    *SHAPES,
    {"width": 24, "heads": 2, "positions": "alibi"},
    {"width": 24, "heads": 2, "positions": "buckets", "windows": (3, 0)},
    {"width": 24, "heads": 2, "positions": "sinusoidal", "sinks": True},
    {"width": 24, "heads": 2, "windows": (2,), "qk_norm": True},
]


@pytest.mark.parametrize("shape", PACKED, ids=lambda s: " ".join(map(str, s.values())))
@pytest.mark.parametrize("shared", [True, False])
def test_a_document_of_a_packed_row_is_read_as_if_it_stood_alone(
    shape: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of the document by itself, whatever its neighbours are."""
    if not shared:  # every layer then computes the prior for itself
        monkeypatch.setattr(forward_context, "SHARED_SEGMENTS", 0)
    model, lengths = lively(**shape), [5, 4, 3]
    numbers = [n for n, length in enumerate(lengths) for _ in range(length)]
    segments = torch.tensor([numbers, [7] * 12])
    ids = some_ids(2, 12)
    packed = model(ids, segments_BT=segments)
    end = 0
    for length in lengths:
        part = ids[:1, end : end + length]
        torch.testing.assert_close(packed[:1, end : end + length], model(part))
        end += length
    torch.testing.assert_close(packed[1:], model(ids[1:]))
    with pytest.raises(ValueError, match="in the shape of the ids, without a cache"):
        model(ids, segments_BT=segments[:, 1:])
