"""fenchel/hf/multihead.py: another map in nn.MultiheadAttention, sound with everything it takes."""

import copy
from typing import Any

import pytest
import torch
from entmax import entmax15  # type: ignore[import-untyped]
from torch import Tensor, nn

import fenchel
from fenchel import Entmax, Softmax, attach
from fenchel.torch_internals import has_forward_hooks


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(**how: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, **how).eval()
    for p in layer.parameters():  # biases begin at zero
        nn.init.normal_(p, std=0.5)
    return layer


SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 10, "vdim": 6, "batch_first": True},
]


def inputs_of(layer: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, T) = (3, 5), keys and values of S = 7, in the order of the layer."""
    sizes = (5, 16), (7, layer.kdim or 16), (7, layer.vdim or 16)
    drawn_ = [drawn(3, *size, seed=n) for n, size in enumerate(sizes)]
    q, k, v = drawn_ if layer.batch_first else [x.transpose(0, 1) for x in drawn_]
    return q, k, v


MASKS: list[dict[str, Tensor]] = [
    {},
    {"attn_mask": torch.ones(5, 7).triu(2).bool()},
    {"attn_mask": drawn(5, 7)},
    {"attn_mask": drawn(12, 5, 7) > 0.8},
    {"key_padding_mask": torch.tensor([[0] * 7, [0] * 5 + [1] * 2, [0] * 3 + [1] * 4]).bool()},
    {
        "attn_mask": drawn(5, 7),
        "key_padding_mask": drawn(3, 7).where(torch.arange(7) < 5, -torch.inf),
    },
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_softmax_is_the_layer_itself_in_values_weights_and_gradients(
    settings: dict[str, Any], mask: int
) -> None:
    layer = layer_of(**settings).double()
    given = {k: m if m.dtype == torch.bool else m.double() for k, m in MASKS[mask].items()}
    results = []
    for choice in (None, Softmax()):
        for how in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            qkv = [x.double().requires_grad_() for x in inputs_of(layer)]
            attached = None if choice is None else attach(layer, choice)
            out, weights = layer(*qkv, **given, **how)
            if attached is not None:
                attached.detach()
            gradients = torch.autograd.grad(out.square().sum(), [*qkv, *layer.parameters()])
            results.append([out, *gradients, *([] if weights is None else [weights])])
    assert len(results[0]) == len(results[1]) + 1
    for torchs, ours in zip(results[:3], results[3:], strict=True):
        for a, b in zip(torchs, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_entmax_is_that_of_the_reference_and_detach_restores_the_layer() -> None:
    layer = layer_of(batch_first=True)
    x, mask = drawn(2, 6, 16), torch.ones(6, 6).triu(1).bool()
    before = layer(x, x, x, attn_mask=mask)[0]
    with attach(layer, "entmax") as attachment:
        out, weights = layer(x, x, x, attn_mask=mask, average_attn_weights=False)
        again = copy.deepcopy(layer)(x, x, x, attn_mask=mask)[0]
    q, k, v = (
        y.unflatten(-1, (4, 4)).transpose(1, 2)
        for y in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    scores = (q @ k.mT / 2.0).masked_fill(mask, -torch.inf)
    wanted = entmax15(scores, dim=-1)
    torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, layer.out_proj((wanted @ v).transpose(1, 2).flatten(2)))
    assert torch.equal(out, again)
    assert (weights == 0).sum() > mask.sum() * 8  # more than the mask forbids
    assert attachment.calls == {"": 1}
    assert torch.equal(layer(x, x, x, attn_mask=mask)[0], before)
    assert not has_forward_hooks(layer)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_fused_path_of_encoders_is_off_while_a_map_is_attached(
    padded: bool, grad: bool
) -> None:
    """In evaluation without gradients encoder layers bypass nn.MultiheadAttention altogether."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(block, num_layers=2).eval()
    x = drawn(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [4], [2]]) if padded else None
    with torch.set_grad_enabled(grad):
        plain = encoder(x, src_key_padding_mask=padding)
        with attach(encoder, Softmax()) as attachment:
            same = encoder(x, src_key_padding_mask=padding)
        assert attachment.calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}
        with attach(encoder, Entmax(1.5)):
            other = encoder(x, src_key_padding_mask=padding)
        again = encoder(x, src_key_padding_mask=padding)
    real = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(same[real], plain[real], rtol=1e-4, atol=1e-5)
    assert (other - same)[real].abs().max() > 1e-3
    assert torch.equal(again, plain)
    assert encoder.use_nested_tensor


def test_one_sequence_a_decoder_layer_and_what_is_refused() -> None:
    layer = layer_of()
    x = drawn(6, 16)
    with attach(layer, Softmax()):
        out, weights = layer(x, x, x)
    torch.testing.assert_close(out, layer(x, x, x)[0], rtol=1e-4, atol=1e-5)
    assert weights.shape == (6, 6)
    decoder = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    y, memory = drawn(2, 5, 16), drawn(2, 7, 16, seed=1)
    with attach(decoder, Softmax()) as attachment:
        torch.testing.assert_close(decoder(y, memory), decoder(y, memory))
    assert attachment.calls == {"self_attn": 2, "multihead_attn": 2}
    with pytest.raises(ValueError, match=r"in a layer of your own call fenchel\.attend"):
        attach(nn.Linear(2, 2), "entmax")
    with pytest.raises(ValueError, match="name the map for a module of torch"):
        attach(decoder)
    with attach(layer, "entmax"), pytest.raises(ValueError, match="detach what is attached"):
        attach(layer, "sparsemax")


def test_dropout_and_gradients_in_training() -> None:
    layer = layer_of(batch_first=True, dropout=0.5).train()
    x = drawn(2, 6, 16)
    with fenchel.attach(layer, "sparsemax"):
        first, second = layer(x, x, x)[0], layer(x, x, x)[0]
        first.sum().backward()
    assert not torch.equal(first, second)
    assert layer.in_proj_weight.grad is not None
