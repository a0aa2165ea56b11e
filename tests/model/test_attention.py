"""fenchel/model/attention.py and block.py: each setting against its formula, written out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fenchel.attention import Causal, attend, rotary
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax, by_name
from fenchel.model import ModelConfig, Transformer, l2_as_dot_product
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.forward_context import ForwardContext
from fenchel.sensitivity.bounds.attention import distance_attention

Build = Callable[..., Transformer]
T, H, G, D, M = 7, 4, 2, 6, 24
SOFTMAX = Softmax()


def stream(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def by_heads(
    layer: Attention,
    x: Tensor,
    *,
    change: Callable[[Tensor, str], Tensor] = lambda x, _: x,
    score: Callable[[Tensor, int], Tensor] = lambda z, _: z / D**0.5,
    choice: Choice = SOFTMAX,
) -> Tensor:
    """Head by head: ``change`` a query or key, ``score`` its products, choose, mix."""
    qkv, heads = x @ layer.qkv.weight.T, []
    for h in range(H):
        g = h // (H // G)
        at = [h * D, (H + g) * D, (H + G + g) * D]
        q, k, v = (qkv[..., start : start + D] for start in at)
        z = score(change(q, "q") @ change(k, "k").mT, h)
        heads.append(choice.weights(z)[..., -T:] @ v)
    return torch.cat(heads, -1) @ layer.out.weight.T


def later(window: int = 99) -> Tensor:
    i = torch.arange(T)
    return (i[:, None] < i) | (i[:, None] - i >= window)


def masked(z: Tensor, window: int = 99) -> Tensor:
    return z.masked_fill(later(window), -torch.inf)


def one(build: Build, **settings: Any) -> tuple[Attention, Tensor]:
    layer = build(layers=1, positions="none", **settings).blocks[0].attention
    return layer, stream(2, T, M)


def test_a_window_counts_the_keys_it_shows(build: Build) -> None:
    layer, x = one(build, windows=(3,))
    wanted = by_heads(layer, x, score=lambda z, _: masked(z / D**0.5, 3))
    torch.testing.assert_close(layer(x, ForwardContext()), wanted)


def test_an_encoders_window_reaches_both_ways(build: Build) -> None:
    layer, x = one(build, kind="encoder", windows=(3,))
    far = (torch.arange(T)[:, None] - torch.arange(T)).abs() >= 3
    wanted = by_heads(layer, x, score=lambda z, _: (z / D**0.5).masked_fill(far, -torch.inf))
    torch.testing.assert_close(layer(x, ForwardContext()), wanted)


def test_scale_and_cap_come_before_the_mask(build: Build) -> None:
    layer, x = one(build, score_scale=0.7, softcap=1.5)
    wanted = by_heads(layer, x, score=lambda z, _: masked(1.5 * torch.tanh(0.7 * z / 1.5)))
    torch.testing.assert_close(layer(x, ForwardContext()), wanted)


def test_queries_and_keys_are_normed_before_they_are_turned(build: Build) -> None:
    model = build(layers=1, qk_norm=True, rotary_layout="pairs")
    layer, x = model.blocks[0].attention, stream(2, T, M)
    gain = {"q": layer.q_norm.weight, "k": layer.k_norm.weight}

    def change(part: Tensor, name: str) -> Tensor:
        normed = rms(part, gain[name]).unsqueeze(1)
        return rotary(normed, torch.arange(T), layout="pairs").squeeze(1)

    wanted = by_heads(layer, x, change=change, score=lambda z, _: masked(z / D**0.5))
    context = ForwardContext(rotary=model._rotary(0, T, None, x))
    torch.testing.assert_close(layer(x, context), wanted)


def test_all_heads_are_normed_together_and_a_layer_may_not_rotate(build: Build) -> None:
    model = build(layers=2, kv_heads=2, qk_norm=True, qk_norm_width="all", rotary_layers=(0, 1))
    layer, x = model.blocks[0].attention, stream(2, T, M)
    q, k, v = layer.qkv(x).split([H * D, 2 * D, 2 * D], -1)
    q, k = rms(q, layer.q_norm.weight), rms(k, layer.k_norm.weight)
    q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in (q, k, v))
    wanted = layer.out(attend(q, k, v, prior=Causal()).transpose(1, 2).flatten(2))
    context = ForwardContext(rotary=model._rotary(0, T, None, x))
    torch.testing.assert_close(layer(x, context), wanted)
    assert model.blocks[1].attention.angles(context) is context.rotary[0]


def test_rotary_fraction_rotates_only_that_share_of_a_head(build: Build) -> None:
    model = build(layers=1, rotary_fraction=0.67)
    assert model.config.rotary_width == 4
    layer, x = model.blocks[0].attention, stream(2, T, M)

    def change(part: Tensor, _: str) -> Tensor:
        turned = rotary(part[..., :4].unsqueeze(1), torch.arange(T)).squeeze(1)
        return torch.cat([turned, part[..., 4:]], -1)

    wanted = by_heads(layer, x, change=change, score=lambda z, _: masked(z / D**0.5))
    torch.testing.assert_close(
        layer(x, ForwardContext(rotary=model._rotary(0, T, None, x))), wanted
    )


@pytest.mark.parametrize("choice", ["softmax", "entmax"])
def test_a_sink_takes_the_rest(build: Build, choice: str) -> None:
    layer, x = one(build, sinks=True, choice=choice)

    def score(z: Tensor, h: int) -> Tensor:
        return torch.cat([layer.sink[h].expand(2, T, 1), masked(z / D**0.5)], -1)

    wanted = by_heads(layer, x, score=score, choice=by_name(choice))
    torch.testing.assert_close(layer(x, ForwardContext()), wanted)


@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize("kind", ["head", "element"])
def test_a_gate_multiplies_the_heads_before_they_are_mixed(
    build: Build, kind: str, activation: str
) -> None:
    layer, x = one(build, gate=kind, gate_activation=activation, qkv_bias=True)
    heads = []
    for h in range(H):
        g = h // (H // G)
        rows = (h, H + g, H + G + g)
        q, k, v = (
            x @ layer.qkv.weight[r * D : r * D + D].T + layer.qkv.bias[r * D : r * D + D]
            for r in rows
        )
        heads.append(masked(q @ k.mT / D**0.5).softmax(-1) @ v)
    u = x @ layer.output_gate.weight.T + layer.output_gate.bias
    factor = 1 / (1 + (-u).exp()) if activation == "sigmoid" else (1 + u.exp()).log()
    each = 1 if kind == "element" else D
    gated = torch.cat(heads, -1) * factor.repeat_interleave(each, -1)
    torch.testing.assert_close(layer(x, ForwardContext()), gated @ layer.out.weight.T)


def test_layers_choose_by_their_own_maps(build: Build) -> None:
    model = build(layer_choices=("softmax", "entmax"), entmax_alpha=1.3)
    kinds = [block.attention.choice for block in model.blocks]
    assert kinds == [Softmax(), Entmax(1.3), Softmax()]


def test_attention_by_distance_is_the_map_whose_bound_is_known(build: Build) -> None:
    layer, x = one(build, scores="l2", kv_heads=None, kind="encoder")
    W_q, W_v = layer.qkv.weight.view(2, H, D, M)
    heads = [distance_attention(x, W_q[h].T, W_v[h].T) for h in range(H)]
    wanted = torch.cat(heads, -1) @ layer.out.weight.T
    torch.testing.assert_close(layer(x, ForwardContext()), wanted)


def test_cross_attention_reads_all_of_the_source(build: Build) -> None:
    model = build(kind="encoder-decoder", layers=1)
    cross, x, memory = model.blocks[0].cross_attention, stream(2, T, M), stream(2, 5, M)
    kv, heads = memory @ cross.kv.weight.T, []
    for h in range(H):
        g = h // (H // G)
        q = x @ cross.q.weight[h * D : h * D + D].T
        k, v = (kv[..., start : start + D] for start in (g * D, (G + g) * D))
        heads.append((q @ k.mT / D**0.5).softmax(-1) @ v)
    wanted = torch.cat(heads, -1) @ cross.out.weight.T
    torch.testing.assert_close(cross(x, ForwardContext(memory=memory)), wanted)


def test_a_cache_with_a_memory_makes_the_sources_keys_once(build: Build, ids: Tensor) -> None:
    model, made = build(kind="encoder-decoder"), []

    class Remembering:
        length = 0

        def __init__(self) -> None:
            self.kept: dict[int, tuple[Tensor, Tensor]] = {}

        def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
            return k, v

        def new_positions(self, _: int) -> None: ...

        def key_positions(self, _: int) -> None: ...

        def advance(self, positions: int) -> None: ...

        def cross_kv(self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> Any:
            if layer not in self.kept:
                made.append(layer)
                self.kept[layer] = compute()
            return self.kept[layer]

    cache, memory = Remembering(), model.encode(ids)
    first = model(ids, cache=cache, memory_BSM=memory)
    again = model(ids, cache=cache, memory_BSM=torch.zeros_like(memory))
    assert made == [0, 1, 2]
    assert torch.equal(first, again)


class Ring:
    """Keeps the last ``size`` slots of every layer and no more."""

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.held:
            k, v = (torch.cat(two, 2) for two in zip(self.held[layer], (k, v), strict=True))
        self.held[layer] = k[:, :, -self.size :], v[:, :, -self.size :]
        return k, v

    def new_positions(self, _: int) -> None:
        """Every row continues at ``length``."""

    def key_positions(self, _: int) -> None:
        """The keys are the last ones, in order."""

    def advance(self, positions: int) -> None:
        self.length += positions


@pytest.mark.parametrize("positions", ["rotary", "alibi", "buckets", "learned"])
def test_a_cache_may_drop_keys_outside_every_window(
    build: Build, ids: Tensor, positions: str
) -> None:
    model, ring = build(windows=(3,), positions=positions), Ring(2)
    parts = [model(ids[:, t : t + 1], cache=ring) for t in range(9)]
    assert ring.held[0][0].shape[2] == 2
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_norms_stand_where_they_are_put(build: Build, norm: str, scale: float) -> None:
    settings = {"layers": 1, "positions": "none", "norm": norm, "residual_scale": scale}
    x = stream(2, T, M)

    def n(module: Any, x: Tensor) -> Tensor:
        if norm == "rms":
            return rms(x, module.weight)
        return layer_norm(x, (M,), module.weight, module.bias)

    def branches(**place: Any) -> tuple[Block, Callable[[Tensor], Tensor], Any]:
        block = build(**settings, **place).blocks[0]
        return block, lambda x: block.attention(x, ForwardContext()), block.mlp

    b, look, think = branches(norm_place="pre")
    y = x + scale * look(n(b.attention_norm, x))
    torch.testing.assert_close(b(x), y + scale * think(n(b.mlp_norm, y)))

    b, look, think = branches(norm_place="post")
    y = n(b.attention_norm, x + scale * look(x))
    torch.testing.assert_close(b(x), n(b.mlp_norm, y + scale * think(y)))

    b, look, think = branches(norm_place="both")
    y = x + scale * n(b.attention_post_norm, look(n(b.attention_norm, x)))
    wanted = y + scale * n(b.mlp_post_norm, think(n(b.mlp_norm, y)))
    torch.testing.assert_close(b(x), wanted)

    b, look, think = branches(norm_place="after")
    y = x + scale * n(b.attention_post_norm, look(x))
    torch.testing.assert_close(b(x), y + scale * n(b.mlp_post_norm, think(y)))

    b, look, think = branches(parallel=True)
    wanted = x + scale * look(n(b.attention_norm, x)) + scale * think(n(b.mlp_norm, x))
    torch.testing.assert_close(b(x), wanted)


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi", "buckets"])
def test_without_positions_shuffled_tokens_give_shuffled_outputs(
    build: Build, ids: Tensor, positions: str
) -> None:
    model = build(kind="encoder", positions=positions)
    shuffle = torch.tensor([4, 0, 8, 2, 7, 1, 3, 6, 5])
    same = torch.allclose(model(ids[:, shuffle]), model(ids)[:, shuffle])
    assert same == (positions == "none")


def test_a_whole_sequence_is_its_tokens_one_by_one(build: Build) -> None:
    """Maps act on every position alone, so a matrix of tokens is only a stack of them."""
    layer, x = one(build)
    whole = layer(x, ForwardContext())
    for t in range(T):
        torch.testing.assert_close(layer(x[:, : t + 1], ForwardContext())[:, t], whole[:, t])


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax(), Hard()], ids=repr)
def test_near_keys_are_chosen(qkv: tuple[Tensor, Tensor, Tensor], choice: Choice) -> None:
    q, k, v = qkv
    far = torch.cdist(q, k.repeat_interleave(2, 1)).square()
    log_u = Causal().log(4, 7, dtype=q.dtype)
    exact = choice.weights(-0.3 * far, log_u) @ v.repeat_interleave(2, 1)
    ours = attend(*l2_as_dot_product(q, k), v, choice=choice, prior=Causal(), scale=0.6)
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"temperature": "log"}, lambda m: math.log(max(2, m + 1)) / math.log(16)),
        (
            {"temperature": "log", "windows": (3,)},
            lambda m: math.log(min(3, max(2, m + 1))) / math.log(3),
        ),
        (
            {"temperature": "stepped", "temperature_growth": 0.5, "temperature_floor": 4},
            lambda m: 1 + 0.5 * math.log(1 + m // 4),
        ),
        (
            {"temperature": "stepped", "temperature_floor": 4, "temperature_offset": 1},
            lambda m: 1 + 0.1 * math.log(1 + (m + 1) // 4),
        ),
        (
            {"temperature": "stepped", "temperature_floor": 4, "temperature_layers": "unrotated"},
            lambda _: 1.0,
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_queries_grow_with_their_position(
    settings: dict[str, Any], factor: Callable[[int], float]
) -> None:
    """By the formulas of Scalable-Softmax, Ministral 3 and Llama 4, one number at a time."""
    queries = {}
    for name, more in (("grown", settings), ("plain", {"windows": settings.get("windows", ())})):
        config = ModelConfig(vocabulary=9, context=16, width=16, layers=1, **more)
        model = Transformer(config, generator=torch.Generator().manual_seed(0))
        model(
            torch.arange(16)[None] % 9, observe=lambda _l, q, _k, _v, n=name: queries.update({n: q})
        )
    expected = torch.tensor([factor(m) for m in range(16)]).view(16, 1)
    torch.testing.assert_close(queries["grown"], queries["plain"] * expected)


def test_a_sink_of_the_token_is_a_sink_per_query() -> None:
    """Weights shrink by Z / (Z + e^r), r a linear map of the layer's input."""
    config = ModelConfig(
        vocabulary=9, width=16, layers=1, sinks=True, sink_score="token", initial="normal"
    )
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    attention, seen = model.attention(0), []
    torch.nn.init.normal_(attention.sink_map.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rotary = model._rotary(0, 5, None, x)
    attention(
        x, ForwardContext(rotary=rotary, attention_override=lambda _, call: seen.append(call))
    )
    q, k, v, _ = seen[0]
    z = (q @ k[:, :, 1:].mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    r = torch.einsum("btm,hm->bht", x, attention.sink_map.weight) + attention.sink_map.bias[:, None]
    Z = z.exp().sum(-1)
    expected = ((Z / (Z + r.exp()))[..., None] * z.softmax(-1)) @ v[:, :, 1:]
    torch.testing.assert_close(attend(*seen[0][:3], **seen[0].spec), expected)
