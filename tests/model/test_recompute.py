"""fenchel/model/block.py: blocks that a backward pass runs again, against blocks that are kept."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fenchel.attention import head_entropy
from fenchel.generation import KVCache
from fenchel.model import ModelConfig, Transformer
from fenchel.model.lora import add_lora

SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "dropout": {"dropout": 0.2, "mlp_dropout": 0.1},
    "entmax, grouped keys": {"choice": "entmax", "kv_heads": 1},
    "sparsemax, dropout of weights": {"choice": "sparsemax", "attention_dropout": 0.3},
    "experts": {"experts": 3, "experts_per_token": 2, "dropout": 0.1},
    "sigma": {"sigma_reparam": True},
    "sigma, shared": {"sigma_reparam": True, "layers": 4, "distinct_layers": 2},
    "shared, dropout": {"layers": 4, "distinct_layers": 2, "dropout": 0.1},
    "buckets, windows": {"positions": "buckets", "windows": (3, 0)},
    "alibi, sinks": {"positions": "alibi", "sinks": True, "softcap": 4.0},
    "l2, post": {"scores": "l2", "norm_place": "post", "norm": "layer"},
    "parallel, learned": {"parallel": True, "positions": "learned", "bias": True},
    "narrow embedding": {"embedding_width": 8},
    "shared keys": {"shared_kv_layers": 1, "per_layer_width": 4, "dropout": 0.1},
}


def build(**settings: Any) -> Transformer:
    shape = {"vocabulary": 37, "context": 16, "width": 16, "layers": 3, "heads": 2}
    given = {**shape, "initial": "normal", "initial_std": 0.3, **settings}
    return Transformer(ModelConfig(**given), generator=torch.Generator().manual_seed(0)).train()


def ids_of(rows: int = 3, positions: int = 12) -> Tensor:
    return torch.randint(37, (rows, positions), generator=torch.Generator().manual_seed(1))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {n: b.clone() for n, b in model.named_buffers()}


def passes(
    model: Transformer, *, recompute: bool, dtype: torch.dtype | None = None, **given: Any
) -> dict[str, Tensor]:
    """Two passes, forward and backward, whose gradients add up; then gradients and buffers."""
    torch.manual_seed(7)
    half = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    for number in range(2):
        with half:
            hidden = model(
                ids_of() // (number + 1), return_hidden=True, recompute=recompute, **given
            )
        loss = hidden.float().square().sum() / 100 + (model.balance() or 0.0)
        loss.backward()
    found = state(model)
    return found | {"noise": torch.rand(3)}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits_as_blocks_that_are_kept(name: str, dtype: torch.dtype | None) -> None:
    settings = SETTINGS[name]
    expected = passes(build(**settings), recompute=False, dtype=dtype)
    assert all(x.isfinite().all() and x.any() for x in expected.values())
    require_same(passes(build(**settings), recompute=True, dtype=dtype), expected)


LEARNED = {"positions": "buckets", "windows": (3, 3, 0)}
"""With documents in rows, the first layer computes a prior with a gradient for the second, too."""


@pytest.mark.parametrize("settings", [{}, {"positions": "alibi"}, LEARNED], ids=str)
def test_documents_of_one_row_and_the_priors_that_layers_share(settings: dict[str, Any]) -> None:
    segments = torch.tensor([0] * 5 + [1] * 3 + [2] * 4).expand(3, -1)
    expected = passes(build(**settings), recompute=False, segments_BT=segments)
    require_same(passes(build(**settings), recompute=True, segments_BT=segments), expected)


def test_an_encoder_beside_the_decoder() -> None:
    def gradients(*, recompute: bool) -> dict[str, Tensor]:
        model = build(kind="encoder-decoder", dropout=0.1, norm="rms")
        torch.manual_seed(7)
        mask = torch.ones(3, 12, dtype=torch.bool)
        mask[0, 9:] = False
        memory = model.encode(ids_of(), token_mask_BS=mask, recompute=recompute)
        given: dict[str, Any] = {"memory_BSM": memory, "memory_mask_BS": mask}
        hidden = model(ids_of(3, 7), return_hidden=True, recompute=recompute, **given)
        assert model.encoder is not None
        calls: list[int] = []
        for block in (*model.encoder.blocks, *model.blocks):
            block.attention.register_forward_pre_hook(lambda *_: calls.append(1))
        hidden.square().sum().backward()
        assert len(calls) == 6 * recompute
        return state(model)

    require_same(gradients(recompute=True), gradients(recompute=False))


def test_adapters_beside_frozen_weights() -> None:
    """The input of the first block has no gradient."""

    def gradients(*, recompute: bool) -> dict[str, Tensor]:
        model = build(dropout=0.1)
        add_lora(
            model, rank=2, targets=("q", "v", "up"), generator=torch.Generator().manual_seed(2)
        )
        for p in model.parameters():
            if p.requires_grad:
                p.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
        return passes(model, recompute=recompute)

    expected = gradients(recompute=False)
    assert all("lora" in name or name == "noise" for name in expected)
    require_same(gradients(recompute=True), expected)


def test_every_block_runs_twice_and_keeps_its_input_alone() -> None:
    alive = {}
    for recompute in (False, True):
        model, calls = build(layers=4, distinct_layers=2), list[int]()
        wide: list[weakref.ref[Any]] = []
        for n, block in enumerate(model.blocks):
            block.mlp.register_forward_pre_hook(lambda *_, n=n, calls=calls: calls.append(n))
            block.mlp.up.register_forward_hook(
                lambda *given, wide=wide: wide.append(weakref.ref(given[2].untyped_storage()))
            )
        hidden = model(ids_of(), return_hidden=True, recompute=recompute)
        alive[recompute] = sum(ref() is not None for ref in wide)
        hidden.sum().backward()
        assert calls == [0, 0, 1, 1] + [1, 1, 0, 0] * recompute
        assert not any(ref() is not None for ref in wide)
        with torch.no_grad():
            model(ids_of(), recompute=recompute)
        assert calls[-4:] == [0, 0, 1, 1]
    assert alive == {False: 4, True: 0}


def test_observers_see_one_pass_and_their_derivative_is_exact() -> None:
    def gradients(*, recompute: bool) -> tuple[dict[str, Tensor], list[int]]:
        model, seen = build(dropout=0.1), list[int]()
        entropies: list[Tensor] = []

        def observe(layer: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
            seen.append(layer)
            entropies.append(head_entropy(q, k, **model.attention(layer).spec))

        torch.manual_seed(7)
        hidden = model(ids_of(), return_hidden=True, recompute=recompute, observe=observe)
        (hidden.square().sum() / 100 + torch.cat(entropies).square().sum()).backward()
        return state(model), seen

    (found, seen), (expected, once) = gradients(recompute=True), gradients(recompute=False)
    assert seen == once == [0, 1, 2]
    require_same(found, expected)


def test_experts_keep_no_activations_after_the_backward_pass() -> None:
    """The balance of a second pass would hold those of its block, layer after layer."""
    model, inner = build(experts=3), list[weakref.ref[Any]]()
    experts = [block.mlp for block in model.blocks]
    hidden, balance = model(ids_of(), return_hidden=True, recompute=True), model.balance()
    before = [mlp.balance for mlp in experts]
    for mlp in experts:
        mlp.register_forward_pre_hook(
            lambda _, given: inner.append(weakref.ref(given[0].untyped_storage()))
        )
    (hidden.sum() + balance).backward()
    assert all(mlp.balance is x for mlp, x in zip(experts, before, strict=True))
    assert len(inner) == 3
    assert not any(ref() is not None for ref in inner)


def test_a_graph_that_is_kept_can_be_used_again() -> None:
    """Priors and buffers of a third pass are those of the first."""
    segments = torch.tensor([0] * 5 + [1] * 7).expand(3, -1)
    model = build(sigma_reparam=True, dropout=0.1, **LEARNED)
    hidden = model(ids_of(), return_hidden=True, recompute=True, segments_BT=segments)
    loss, parameters = hidden.square().sum(), [p for p in model.parameters() if p.numel() > 1]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Casts(TorchDispatchMode):
    """The memory of the bfloat16 copies of matrices that are made within."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {p.data_ptr() for p in model.parameters() if p.ndim == 2}
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func.__name__ == "_to_copy.default" and result.dtype == torch.bfloat16
        if is_cast and args[0].data_ptr() in self.weights:
            self.made.append(weakref.ref(result.untyped_storage()))
        return result


def test_autocast_stores_no_cast_of_the_weights_of_a_block() -> None:
    """Else until the pass has ended; a block that serves several layers shares its casts."""
    alive = {}
    for shared in (False, True):
        model = build(layers=4, distinct_layers=2 if shared else None)
        with torch.autocast("cpu", torch.bfloat16), Casts(model) as casts:
            hidden = model(ids_of(), return_hidden=True, recompute=True)
            alive[shared] = sum(ref() is not None for ref in casts.made)
        assert hidden.requires_grad
        assert len(casts.made) == (2 if shared else 4) * 5  # qkv, out, gate, up, down
    assert alive == {False: 0, True: 10}


def test_a_cache_is_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="append to the cache twice; leave out one of them"):
        model(ids_of(), cache=KVCache(model.config, batch=3, positions=16), recompute=True)
