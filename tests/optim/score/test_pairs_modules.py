"""fenchel/optim/score/pairs.py on layers of torch and on layers written by hand.

Each layer below computes its own scores in ``scores``, without a pair.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fenchel.optim import (
    HeadProjection,
    LayerArguments,
    QueryKeyPair,
    ScoreDescent,
    ScoreTrust,
    attention_pairs,
    remaining_parameters,
)

B, T, M, H = 6, 12, 32, 4
D = M // H
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
PADDED = torch.zeros(B, T, dtype=torch.bool)
PADDED[2:, 9:] = True


def heads(y: Tensor, n: int = H) -> Tensor:
    return y.unflatten(-1, (n, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    y = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """As in nanoGPT: one linear map and the number of heads."""

    def __init__(self, name: str, said: dict[str, Any], groups: int = H, norm: Any = None) -> None:
        super().__init__()
        self.rows = [H * D, groups * D, groups * D]
        self.fused, self.groups, self.causal = name, groups, said.get("is_causal", True)
        setattr(self, name, nn.Linear(M, sum(self.rows)))
        if norm is not None:
            self.q_norm, self.k_norm = norm(), norm()
        for attribute, value in said.items():
            setattr(self, attribute, value)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = getattr(self, self.fused)(x).split(self.rows, dim=-1)
        q, k, v = heads(q), heads(k, self.groups), heads(v, self.groups)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.parts(x), self.causal)

    def scores(self, x: Tensor) -> Tensor:
        q, k, _ = self.parts(x)
        return q @ k.repeat_interleave(H // self.groups, 1).mT * D**-0.5

    def allowed(self) -> Tensor:
        return CAUSAL if self.causal else torch.ones_like(CAUSAL)


class Separate(nn.Module):
    """As in minGPT: three linear maps."""

    def __init__(self, q: str, k: str, said: dict[str, Any]) -> None:
        super().__init__()
        self.names = q, k, "v"
        for name in self.names:
            setattr(self, name, nn.Linear(M, M, bias=False))
        for attribute, value in said.items():
            setattr(self, attribute, value)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(getattr(self, name)(x)) for name in self.names)
        return attend(q, k, v, True)

    def scores(self, x: Tensor) -> Tensor:
        q, k = (heads(getattr(self, name)(x)) for name in self.names[:2])
        return q @ k.mT * D**-0.5

    def allowed(self) -> Tensor:
        return CAUSAL


class OfTorch(nn.Module):
    """nn.MultiheadAttention, alone or inside of a layer of nn.Transformer."""

    def __init__(self, kind: str, *, batch_first: bool, mask: str | None, padded: bool) -> None:
        super().__init__()
        self.kind, self.batch_first, self.padded = kind, batch_first, padded
        self.mask: Tensor | None = None
        if mask is not None:
            self.mask = ~CAUSAL
        if mask == "float":
            self.mask = torch.zeros(T, T).masked_fill(~CAUSAL, -torch.inf)
        if mask == "per head":
            self.mask = (~CAUSAL).expand(B * H, T, T)
        given: dict[str, Any] = {"batch_first": batch_first}
        if kind == "attention":
            self.layer: Any = nn.MultiheadAttention(M, H, **given)
        elif kind == "encoder":
            self.layer = nn.TransformerEncoderLayer(M, H, 48, 0.0, norm_first=True, **given)
        else:
            self.layer = nn.TransformerDecoderLayer(M, H, 48, 0.0, norm_first=True, **given)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        padding = PADDED if self.padded else None
        if self.kind == "attention":
            y, _ = self.layer(x, x, x, padding, False, self.mask)
        elif self.kind == "encoder":
            y = self.layer(x, src_mask=self.mask, src_key_padding_mask=padding)
        else:
            y = self.layer(x, x.roll(1, 0), tgt_mask=self.mask, tgt_key_padding_mask=padding)
        out: Tensor = y if self.batch_first else y.transpose(0, 1)
        return out

    def stream(self, x: Tensor) -> Tensor:
        normed: Tensor = x if self.kind == "attention" else self.layer.norm1(x)
        return normed

    def scores(self, x: Tensor) -> Tensor:
        attention = self.layer if self.kind == "attention" else self.layer.self_attn
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        q, k, _ = (heads(x @ w.T + b) for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
        return q @ k.mT * D**-0.5

    def allowed(self) -> Tensor:
        pairs = (torch.ones_like(CAUSAL) if self.mask is None else CAUSAL).expand(B, T, T)
        return (pairs & ~PADDED[:, None, :] if self.padded else pairs).unsqueeze(1)


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.read = nn.Embedding(31, M), layer, nn.Linear(M, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        read: Tensor = self.read(x + self.layer(x))
        return read


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": lambda: Fused("c_attn", {"n_head": H, "n_embd": M}),
    "qkv and heads": lambda: Fused("qkv", {"num_heads": H}),
    "qkv and width": lambda: Fused("qkv", {"head_dim": D}),
    "scale is a root": lambda: Fused("qkv", {"heads": H, "scale": D**0.5}),
    "grouped": lambda: Fused("qkv_proj", {"num_heads": H, "head_dim": D}, 2),
    "not causal": lambda: Fused("qkv", {"num_heads": H, "is_causal": False}),
    "identity norms": lambda: Fused("qkv", {"num_heads": H}, norm=nn.Identity),
    "norms": lambda: Fused("qkv", {"num_heads": H}, norm=lambda: nn.LayerNorm(D)),
    "minGPT": lambda: Separate("query", "key", {"n_head": H}),
    "nanochat": lambda: Separate("c_q", "c_k", {"n_head": H, "head_dim": D}),
    "wq": lambda: Separate("wq", "wk", {"n_heads": H}),
    "torch": lambda: OfTorch("attention", batch_first=True, mask="bool", padded=False),
    "torch, open": lambda: OfTorch("attention", batch_first=True, mask=None, padded=False),
    "torch, time first": lambda: OfTorch("attention", batch_first=False, mask="float", padded=True),
    "torch, per head": lambda: OfTorch("attention", batch_first=True, mask="per head", padded=True),
    "encoder": lambda: OfTorch("encoder", batch_first=False, mask=None, padded=True),
    "causal encoder": lambda: OfTorch("encoder", batch_first=True, mask="float", padded=False),
    "decoder": lambda: OfTorch("decoder", batch_first=True, mask="bool", padded=True),
}  # fmt: skip


@pytest.mark.parametrize("method", ["descent", "trust"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_scores_of_the_layer_itself_move_by_lr(kind: str, method: str) -> None:
    torch.manual_seed(0)
    model, lr = Model(LAYERS[kind]()), 0.05
    (pair,) = attention_pairs(model)
    optimiser: torch.optim.Optimizer = ScoreDescent([pair], lr=lr)
    if method == "trust":
        optimiser = ScoreTrust(torch.optim.AdamW(model.parameters(), lr=0.1), [pair], lr=lr)
    for step in range(3):
        ids = torch.randint(31, (B, T), generator=torch.Generator().manual_seed(step))
        loss = cross_entropy(model(ids).flatten(0, 1), (3 * ids + 1).remainder(31).flatten())
        loss.backward()
        x = model.embed(ids).detach()
        if isinstance(model.layer, OfTorch):
            x = model.layer.stream(x).detach()
        before = model.layer.scores(x).detach()
        optimiser.step()
        moved = (model.layer.scores(x).detach() - before) * model.layer.allowed()
        pairs = model.layer.allowed().expand(B, 1, T, T).sum()
        rms = (moved.square().sum(dim=(0, 2, 3)) / pairs).sqrt()
        torch.testing.assert_close(rms, torch.full_like(rms, lr), rtol=1e-3, atol=0)
        model.zero_grad()


def test_cross_attention_is_left_to_other_optimisers() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(M, H, 48), 2)
    names = [pair.name for pair in attention_pairs(decoder)]
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(M, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mix(x, x.flip(0), x)[0]
            return y

    model = Mixed()
    score = ScoreDescent(attention_pairs(model))
    with pytest.raises(ValueError, match="mix receives queries and keys that are two tensors"):
        model(torch.randn(2, T, M))
    score.close()
    model(torch.randn(2, T, M))


def test_the_rest_of_a_layer_of_torch_can_be_given_to_another_optimiser() -> None:
    attention = nn.MultiheadAttention(M, H)
    pairs = attention_pairs(attention)
    parts = remaining_parameters(pairs, [attention.in_proj_weight, attention.in_proj_bias])
    assert [tuple(piece.part.shape) for piece in parts] == [(M, M), (M,)]


class Unsaid(nn.Module):
    def __init__(self, **said: object) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        for name, value in said.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Unsaid(), "qkv has 36 rows, and its layer does not split them into heads"),
        (Unsaid(num_heads=5), "num_heads=5, head_dim=None"),
        (Unsaid(num_heads=2, head_dim=7), "36 rows, which 2 heads of queries, 7 wide"),
        (Unsaid(num_heads=2, logit_scale=nn.Parameter(torch.ones(1))), "logit_scale is a param"),
        (nn.MultiheadAttention(8, 2, kdim=4), "its keys read 4 entries and its queries 8"),
        (nn.MultiheadAttention(8, 2, vdim=4), "three weights and one bias"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "append keys that no token makes"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(layer: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention_pairs(layer)


def test_a_parameter_that_two_layers_share_is_refused() -> None:
    """Each of them would write its own step into it."""
    layers = [Fused("qkv", {"num_heads": H}, norm=lambda: nn.LayerNorm(D)) for _ in range(2)]
    layers[1].q_norm = layers[0].q_norm
    pairs = attention_pairs(nn.ModuleList(layers))
    with pytest.raises(ValueError, match="0 and 1 share a parameter of queries and keys"):
        ScoreDescent(pairs)
    layers[0].q_norm.requires_grad_(False)
    ScoreDescent(pairs).close()


def test_a_pair_by_hand_with_a_reader_of_its_own() -> None:
    """The scores of a layer that hides its stream in a dict and mixes by a matrix named mix."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(M, 3 * M, bias=False)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            q, k, v = (heads(y) for y in self.mix(batch["stream"]).chunk(3, -1))
            return attend(q, k, v, False)

    torch.manual_seed(0)
    layer = Hidden()
    pair = QueryKeyPair(
        "hidden", layer,
        HeadProjection(layer.mix.weight, 0, M, H), HeadProjection(layer.mix.weight, M, 2 * M, H),
        scale=D**-0.5, causal=False, read=lambda args, _: LayerArguments(args[0]["stream"]),
    )  # fmt: skip
    score, x = ScoreDescent([pair], lr=0.1), torch.randn(3, T, M)
    layer({"stream": x}).square().sum().backward()

    def scores() -> Tensor:
        q, k, _ = (heads(y) for y in layer.mix(x).detach().chunk(3, -1))
        return q @ k.mT * D**-0.5

    before = scores()
    score.step()
    rms = (scores() - before).square().mean(dim=(0, 2, 3)).sqrt()
    torch.testing.assert_close(rms, torch.full((H,), 0.1), rtol=1e-3, atol=0)
