"""fenchel/model/lora.py: an adapter changes little, learns alone and merges without a trace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.model import Transformer
from fenchel.model.lora import adapters, add_lora, merge

Build = Callable[..., Transformer]
WHERE = ("qkv", "out", "up")


def stir(model: Transformer) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if p.requires_grad:
            noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.data += noise if "lora_B" in name else 0


def test_a_fresh_adapter_changes_nothing(build: Build, ids: Tensor) -> None:
    model = build()
    before = model(ids)
    names = [f"blocks.{n}.attention.{part}" for n in range(3) for part in ("qkv", "out")]
    assert add_lora(model, rank=2) == names
    assert torch.equal(model(ids), before)


def test_an_adapter_adds_alpha_over_r_times_b_a(build: Build) -> None:
    model = build(layers=1)
    add_lora(model, rank=2, alpha=3.0, targets=["up"])
    stir(model)
    up = model.blocks[0].mlp.up
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = up.weight + 1.5 * sum(torch.outer(up.lora_B[:, r], up.lora_A[r]) for r in range(2))
    torch.testing.assert_close(up(x), x @ whole.T)
    torch.testing.assert_close(up.matrix, whole)


def test_only_the_adapters_learn_and_they_are_few(build: Build, ids: Tensor) -> None:
    model = build()
    add_lora(model, rank=2, targets=WHERE)
    stir(model)
    model(ids).square().sum().backward()
    learn = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learn == adapters(model).keys()
    M, rows, F = 24, (4 + 2 * 2) * 6, 20
    assert sum(x.numel() for x in adapters(model).values()) == 3 * 2 * (
        (M + rows) + (M + M) + (M + F)
    )


def test_merging_is_exact_and_leaves_no_trace(build: Build, ids: Tensor) -> None:
    plain, model = build(), build()
    add_lora(model, rank=3, targets=WHERE)
    stir(model)
    adapted = model(ids)
    assert not torch.allclose(adapted, plain(ids))
    assert len(merge(model)) == 9
    torch.testing.assert_close(model(ids), adapted, atol=1e-10, rtol=1e-10)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(p.requires_grad for p in model.parameters())


def test_adapters_alone_are_enough_to_keep(build: Build, ids: Tensor) -> None:
    one, two = build(), build()
    add_lora(one, rank=2)
    stir(one)
    add_lora(two, rank=2)
    rest = two.load_state_dict(adapters(one), strict=False)
    assert not rest.unexpected_keys
    assert torch.equal(two(ids), one(ids))


def test_attention_by_distance_reads_the_adapted_matrix(build: Build, ids: Tensor) -> None:
    model = build(scores="l2", kv_heads=None)
    add_lora(model, rank=2)
    stir(model)
    adapted = model(ids)
    merge(model)
    torch.testing.assert_close(model(ids), adapted, atol=1e-12, rtol=1e-12)


def test_rows_of_queries_keys_and_values_have_adapters_of_their_own(
    build: Build, ids: Tensor
) -> None:
    """Against three maps: each part is W_p + s B_p A_p, and a part without one stays as it is."""
    model = build(layers=1)
    add_lora(model, rank=2, alpha=3.0, targets=("q", "v"))
    stir(model)
    qkv = model.blocks[0].attention.qkv
    H, G = 4 * 6, 2 * 6
    A_q, A_v = qkv.lora_A.split(2)
    B_q, B_v = qkv.lora_B.split([H, G])
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    W_q, W_k, W_v = qkv.weight.split([H, G, G])
    three = (x @ (W_q + 1.5 * B_q @ A_q).T, x @ W_k.T, x @ (W_v + 1.5 * B_v @ A_v).T)
    torch.testing.assert_close(qkv(x), torch.cat(three, -1))
    adapted = model(ids)
    merge(model)
    torch.testing.assert_close(model(ids), adapted, atol=1e-12, rtol=1e-12)


def test_what_cannot_be_adapted_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="no linear map of this model is called 'wq'"):
        add_lora(build(), targets=["wq"])
    with pytest.raises(ValueError, match="rank 1 or more"):
        add_lora(build(), rank=0)
    with pytest.raises(ValueError, match="name it or them"):
        add_lora(build(), targets=["qkv", "v"])
    with pytest.raises(ValueError, match="scores by distance"):
        add_lora(build(scores="l2", kv_heads=None), targets=["v"])
    model = build()
    add_lora(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.qkv has an adapter already"):
        add_lora(model)
    sigma = build(sigma_reparam=True)
    with pytest.raises(ValueError, match="divided by its norm"):
        add_lora(sigma)
    assert all(p.requires_grad for p in sigma.parameters())
