"""fenchel/hf/adapter.py: one call as transformers makes it, against the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from fenchel.attention import attend
from fenchel.choice import Entmax, Softmax
from fenchel.hf import register, unregister
from fenchel.hf.adapter import IRRELEVANT_KEYWORDS, AttentionFunction

QKV = tuple[Tensor, Tensor, Tensor]


class Layer(nn.Module):
    """What a call brings with it: a module in evaluation that says whether it is causal."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def plain(qkv: QKV, mask: Tensor | None = None, scale: float = 0.7, **terms: Any) -> Tensor:
    """softmax(c tanh(q k^T scale / c) + bias + mask, with sinks) v written out: (B, T, H, E)."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    z = scale * q @ k.mT
    if "softcap" in terms:
        z = terms["softcap"] * torch.tanh(z / terms["softcap"])
    z = z + terms.get("position_bias", 0.0)
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf)
    if "s_aux" in terms:
        z = torch.cat([z, terms["s_aux"].view(1, -1, 1, 1).expand(*z.shape[:3], 1)], -1)
    p = z.softmax(-1)[..., : k.shape[2]]
    out = p @ v
    if "head_mask" in terms:
        out = out * terms["head_mask"].view(1, -1, 1, 1)
    return out.transpose(1, 2)


def terms_of(kind: str, draw: Any) -> dict[str, Any]:
    H, T, S = 6, 4, 7
    return {
        "nothing": {},
        "softcap": {"softcap": 0.8},
        "s_aux": {"s_aux": draw(H)},
        "position_bias": {"position_bias": draw(1, H, T, S)},
        "head_mask": {"head_mask": draw(H)},
        "all": {
            "softcap": 0.8,
            "s_aux": draw(H),
            "position_bias": draw(2, H, T, S),
            "head_mask": draw(1, H, 1, 1),
        },
    }[kind]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kind", ["nothing", "softcap", "s_aux", "position_bias", "head_mask", "all"]
)
def test_every_term_that_is_honoured_is_in_the_formula(
    kind: str, masked: bool, qkv: QKV, draw: Any
) -> None:
    terms = terms_of(kind, draw)
    mask = (draw(2, 1, 4, 7) > -0.5).logical_or(torch.arange(7) == 0) if masked else None
    out, weights = AttentionFunction(Softmax())(Layer(), *qkv, mask, scaling=0.7, **terms)
    torch.testing.assert_close(out, plain(qkv, mask, **terms), atol=1e-12, rtol=1e-10)
    assert out.is_contiguous()
    assert weights is None
    if kind != "nothing":  # the term is felt
        assert not torch.allclose(out, plain(qkv, mask))


@pytest.mark.parametrize("kind", ["nothing", "s_aux"])
def test_weights_are_returned_with_output_attentions(kind: str, qkv: QKV, draw: Any) -> None:
    terms = terms_of(kind, draw)
    out, p = AttentionFunction(Entmax(1.5))(Layer(), *qkv, None, output_attentions=True, **terms)
    assert p is not None
    v = qkv[2].repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, (p @ v).transpose(1, 2))
    assert (p == 0).any()


def test_the_map_is_the_one_that_was_named(qkv: QKV) -> None:
    out, _ = AttentionFunction(Entmax(1.5))(Layer(), *qkv, None, scaling=2.0)
    torch.testing.assert_close(out.transpose(1, 2), attend(*qkv, choice=Entmax(1.5), scale=2.0))


@pytest.mark.parametrize("name", ["indices", "cu_seq_lens_q", "logit_bias", "seq_idx"])
def test_an_unknown_keyword_is_refused_by_name(name: str, qkv: QKV) -> None:
    with pytest.raises(ValueError, match=f"Layer passes {name} to its attention"):
        AttentionFunction(Softmax())(Layer(), *qkv, None, **{name: torch.zeros(1)})
    AttentionFunction(Softmax())(Layer(), *qkv, None, **{name: None})  # None asks for nothing


def test_what_is_done_elsewhere_changes_nothing(qkv: QKV) -> None:
    one, _ = AttentionFunction(Softmax())(Layer(), *qkv, None)
    other, _ = AttentionFunction(Softmax())(
        Layer(), *qkv, None, **dict.fromkeys(IRRELEVANT_KEYWORDS, 3)
    )
    assert torch.equal(one, other)


def test_a_causal_layer_without_a_mask_is_refused(qkv: QKV) -> None:
    with pytest.raises(ValueError, match="its mask is None"):
        AttentionFunction(Softmax())(Layer(is_causal=True), *qkv, None)
    with pytest.raises(ValueError, match="its mask is None"):
        AttentionFunction(Softmax())(Layer(), *qkv, None, is_causal=True)
    AttentionFunction(Softmax())(Layer(is_causal=True), *qkv, None, is_causal=False)
    q, k, v = qkv
    AttentionFunction(Softmax())(
        Layer(is_causal=True), q[:, :, :1], k, v, None
    )  # one query sees its past


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_number_of_a_mask_forbids(dtype: torch.dtype, qkv: QKV) -> None:
    q, k, v = (x.to(dtype) for x in qkv)
    mask = torch.zeros(2, 1, 4, 7, dtype=dtype)
    mask[0, :, :, 3:] = torch.finfo(dtype).min
    mask[1, :, 2] = torch.finfo(dtype).min  # a row that nothing is open to
    out, p = AttentionFunction(Softmax())(Layer(), q, k, v, mask, output_attentions=True)
    assert p is not None
    assert (p[0, :, :, 3:] == 0).all()
    assert (out[1, 2] == 0).all()
    assert (out[1, 1] != 0).all()


@pytest.mark.parametrize("mask", [torch.ones(4, 7, dtype=torch.bool), torch.ones(7), object()])
def test_a_mask_that_would_broadcast_to_something_else_is_refused(mask: Any, qkv: QKV) -> None:
    """One flag a token, (B, S), would pass for (T, S) where B = T."""
    with pytest.raises(ValueError, match=r"Layer passes a mask of"):
        AttentionFunction(Softmax())(Layer(), *qkv, mask)
    with pytest.raises(ValueError, match="float or bool"):
        AttentionFunction(Softmax())(Layer(), *qkv, torch.ones(2, 1, 4, 7, dtype=torch.int64))


def test_dropout_is_for_training(qkv: QKV) -> None:
    layer = Layer()
    still, _ = AttentionFunction(Softmax())(layer, *qkv, None, dropout=0.5)
    torch.testing.assert_close(still, plain(qkv, scale=5**-0.5))
    torch.manual_seed(0)
    moved, _ = AttentionFunction(Softmax())(layer.train(), *qkv, None, dropout=0.5)
    assert not torch.allclose(still, moved)


def test_shapes_that_cannot_be_honoured_are_refused(qkv: QKV) -> None:
    with pytest.raises(ValueError, match="one sink per head, 6"):
        AttentionFunction(Softmax())(Layer(), *qkv, None, s_aux=torch.zeros(5))
    with pytest.raises(ValueError, match="head mask"):
        AttentionFunction(Softmax())(Layer(), *qkv, None, head_mask=torch.ones(6, 4))


def test_attention_and_mask_stand_under_one_name() -> None:
    register("fenchel-test", Entmax(1.5))
    assert AttentionInterface()["fenchel-test"].choice == Entmax(1.5)
    mask = AttentionMaskInterface()["fenchel-test"](batch_size=2, q_length=3, kv_length=3)
    assert torch.equal(mask, torch.ones(2, 1, 3, 3, dtype=torch.bool).tril())  # said, not implied
    register("fenchel-test", Softmax())  # ours may be replaced
    unregister("fenchel-test")
    assert "fenchel-test" not in AttentionInterface()
    assert "fenchel-test" not in AttentionMaskInterface()


@pytest.mark.parametrize(
    "name", ["", "someone/kernel", "paged|x", "a@b", "eager", "sdpa", "_fenchel-1"]
)
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        register(name)
    unregister("sdpa")
    assert "sdpa" in AttentionInterface()
