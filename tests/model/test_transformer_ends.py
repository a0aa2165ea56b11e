"""fenchel/model/transformer.py: what happens before the first block and after the last."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from fenchel.model import Transformer
from fenchel.model.rotary_table import sinusoids
from fenchel.model.transformer import token_positions

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


def test_a_head_for_masked_words_bends_and_norms_before_it_reads(build: Build, ids: Tensor) -> None:
    model = build(
        kind="encoder", lm_head_transform=True, mlp="gelu", norm="layer", embedding_width=10
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


def test_an_encoder_beside_a_decoder_looks_both_ways(build: Build, ids: Tensor) -> None:
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
        (lambda: decoder.encode(ids), "a model of kind='decoder' has no encoder beside it"),
        (lambda: encoder.encode(ids), "a model of kind='encoder' has no encoder beside it"),
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
