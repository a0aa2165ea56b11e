"""fenchel/model/delta_net.py: a layer with a state in place of keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.checkpoints.peft_adapter import require_exchange
from fenchel.generation import generate
from fenchel.generation.decoder import Decoder
from fenchel.generation.kv_cache import KVCache
from fenchel.interpretability import lens
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families.qwen3_5 import QWEN3_5
from fenchel.model.flops import forward_flops
from fenchel.model.lora import add_lora
from fenchel.optim.score.pairs import attention_pairs

SIZES: dict[str, Any] = {
    "vocabulary": 19,
    "context": 96,
    "width": 24,
    "heads": 2,
    "layers": 3,
    "delta_layers": (1, 0, 1),
    "delta_key_heads": 2,
    "delta_value_heads": 4,
    "delta_key_width": 6,
    "delta_value_width": 5,
}
IDS = torch.randint(0, 19, (2, 80), generator=torch.Generator().manual_seed(0))


def build(**settings: Any) -> Transformer:
    generator = torch.Generator().manual_seed(1)
    model = Transformer(
        ModelConfig(**{**SIZES, "initial": "normal", **settings}), generator=generator
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def test_a_cache_continues_what_one_pass_computes() -> None:
    model = build()
    whole = model(IDS)
    cache = KVCache(model.config, batch=2, positions=96, dtype=torch.float64)
    parts = [model(part, cache=cache) for part in IDS.split([30, 1, 1, 40, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_documents_of_a_row_are_read_as_if_alone() -> None:
    model, lengths = build(), (20, 1, 59)
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    apart = [model(part) for part in IDS.split(lengths, 1)]
    torch.testing.assert_close(model(IDS, segments_BT=segments), torch.cat(apart, 1))


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(left: bool) -> None:
    model = build()
    alone = model(IDS[:, :9])
    padding = torch.zeros(2, 4, dtype=torch.long)
    parts, present = [padding, IDS[:, :9]], [torch.zeros(2, 4), torch.ones(2, 9)]
    mask = torch.cat(present if left else present[::-1], 1).bool()
    padded = model(torch.cat(parts if left else parts[::-1], 1), token_mask_BS=mask)
    torch.testing.assert_close(padded[mask].view(2, 9, -1), alone)


def test_recomputation_gives_the_same_gradients() -> None:
    model = build()

    def gradients(*, recompute: bool) -> tuple[Tensor, ...]:
        loss = model(IDS, recompute=recompute).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    slopes = gradients(recompute=False)
    assert all(float(slope.abs().max()) > 0 for slope in slopes)
    for one, other in zip(slopes, gradients(recompute=True), strict=True):
        assert torch.equal(one, other)


def test_rows_that_do_not_decode_keep_their_states() -> None:
    """A prompt is read in two chunks while another sequence steps between them."""
    model = build()
    with torch.inference_mode():
        decoder = Decoder(model, rows=2)
        second, first = decoder.take(list(range(8))), decoder.take([3, 1])
        assert second.index < first.index  # so that a step computes both rows
        decoder.read([first], [[3, 1]])
        decoder.read([second], [[0, 1, 2, 3]])
        for token in (4, 1, 5):
            first.token = token
            decoder.step()
        last = decoder.logits(decoder.read([second], [[4, 5, 6, 7]]))[0]
        torch.testing.assert_close(last, model(torch.arange(8)[None])[0, -1])


def test_what_it_cannot_do_gets_one_sentence() -> None:
    model = build().float()
    for refused, says in (
        (lambda: generate(model, IDS[:1, :4], max_new_tokens=2, step="cpu"), "delta_layers is"),
        (lambda: Decoder(model, invariant=True), "states of all rows at once"),
        (lambda: model.attention(0), "layer 0 is a gated DeltaNet"),
    ):
        with pytest.raises(ValueError, match=says):
            refused()
    with pytest.raises(ValueError, match="qwen3_5_text are not exchanged with PEFT"):
        require_exchange(QWEN3_5)
    row = (decoder := Decoder(model, rows=1)).take([1, 2, 3])
    with torch.inference_mode():
        decoder.read([row], [[1, 2, 3]])
    with pytest.raises(ValueError, match="cannot go back to 2"):
        decoder.rewind(row, 2)


def test_lenses_adapters_and_score_optimisers_serve_the_rest() -> None:
    model = build().float()
    assert lens(model, IDS[0, :6].tolist(), kind="logit") is not None
    assert [pair.name for pair in attention_pairs(model)] == ["blocks.1.attention"]
    names = add_lora(model, targets=("qkv", "in_proj", "out_proj"))
    assert len(names) == 1 + 2 * 2
    draft = generate(model, IDS[:1, :4], max_new_tokens=3, temperature=0.0, draft=4)
    assert (
        draft.tolist() == generate(model, IDS[:1, :4], max_new_tokens=3, temperature=0.0).tolist()
    )


def test_its_operations_grow_with_the_length_alone() -> None:
    config = ModelConfig(**{**SIZES, "delta_layers": (1,)})
    short, long = (forward_flops(config, T) for T in (640, 1280))
    assert long.total == 2 * short.total
