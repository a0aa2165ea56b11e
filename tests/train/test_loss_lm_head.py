"""fenchel/train/loss.py: lm_head_loss against total_loss, differentiated by autograd."""

import pytest
import torch
from torch import Tensor

from fenchel.choice import Choice, Entmax, Hard, Sparsemax
from fenchel.model import ModelConfig, Transformer
from fenchel.train import loss
from fenchel.train.loss import lm_head_loss, sparse_embedding_gradient, total_loss


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def parts() -> tuple[Tensor, Tensor, Tensor]:
    """B=3, T=7, M=5, V=11."""
    targets = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    return draw(3, 7, 5).requires_grad_(), draw(11, 5).requires_grad_(), targets


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("rows", [1, 4, 21, 100])
def test_loss_and_gradients_are_those_of_the_logits_whatever_the_parts(
    parts: tuple[Tensor, Tensor, Tensor],
    smoothing: float,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "ROWS", rows)
    monkeypatch.setattr(loss, "LOGITS", {})
    stream, table, targets = parts
    ours = lm_head_loss(stream, table, targets, smoothing=smoothing)
    plain = total_loss(stream @ table.T, targets, smoothing=smoothing)
    torch.testing.assert_close(ours, plain, check_dtype=False)
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * ours, (stream, table)),
        torch.autograd.grad(3.0 * plain, (stream, table)),
        rtol=1e-6,
        atol=1e-6,  # the definition sums float64 logits in float32
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_target_whose_probability_underflows_has_its_loss(smoothing: float) -> None:
    hidden = torch.tensor([[[1.0], [250.0]]], requires_grad=True)
    table, targets = torch.tensor([[1.0], [-1.0], [0.5]]), torch.tensor([[1, 1]])
    ours = lm_head_loss(hidden, table, targets, smoothing=smoothing)
    plain = total_loss(hidden @ table.T, targets, smoothing=smoothing)
    assert ours > 400.0
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden) for x in (ours, plain)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("choice", [Entmax(1.25), Entmax(1.5), Sparsemax(), Hard()], ids=str)
def test_with_another_map_too_loss_and_gradients_are_those_of_the_logits(
    parts: tuple[Tensor, Tensor, Tensor],
    choice: Choice,
    smoothing: float,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "ROWS", rows)
    monkeypatch.setattr(loss, "LOGITS", {})
    stream, table, targets = parts
    ours = lm_head_loss(stream, table, targets, smoothing=smoothing, choice=choice)
    plain = total_loss(stream @ table.T, targets, smoothing=smoothing, choice=choice)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * ours, (stream, table)),
        torch.autograd.grad(3.0 * plain, (stream, table)),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            lm_head_loss(stream, table, targets, smoothing=smoothing, choice=choice), ours
        )


def test_large_logits_cost_a_sparse_loss_no_digits() -> None:
    h, W = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[1e4, 0.0], [1e4 - 1.0, 0.0], [0.0, 0.0]])
    wanted = Entmax(1.5).loss(torch.tensor([0.0, -1.0, -1e4]), torch.tensor(1))
    ours = lm_head_loss(h, W, torch.tensor([[1]]), choice=Entmax(1.5))
    torch.testing.assert_close(ours, wanted)


def test_under_autocast_it_reads_in_bfloat16_and_sums_in_float32(
    parts: tuple[Tensor, Tensor, Tensor],
) -> None:
    stream, table = (part.detach().float().requires_grad_() for part in parts[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = lm_head_loss(stream, table, parts[2])
        logits = torch.nn.functional.linear(stream, table)
    assert logits.dtype == torch.bfloat16
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, total_loss(logits, parts[2]), rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(ours, (stream, table))
    exact = torch.autograd.grad(total_loss(stream @ table.T, parts[2]), (stream, table))
    for found, wanted in zip(gradients, exact, strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_without_gradients_it_is_the_loss_alone(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    with torch.no_grad():
        loss = lm_head_loss(*parts)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, lm_head_loss(*parts).detach())


def test_a_second_derivative_is_refused_and_not_zero(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    loss = lm_head_loss(*parts)
    with pytest.raises(RuntimeError, match="has no second derivative; take total_loss"):
        torch.autograd.grad(loss, parts[0], create_graph=True)


def test_its_gradient_is_handed_over_once(parts: tuple[Tensor, Tensor, Tensor]) -> None:
    loss = lm_head_loss(*parts)
    torch.autograd.grad(loss, parts[0], retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated already; compute it again"):
        torch.autograd.grad(loss, parts[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_by_rows_is_the_whole_gradient(tied: bool, dtype: torch.dtype) -> None:
    config = ModelConfig(vocabulary=40, width=8, heads=2, layers=1, tied=tied)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.randint(9, (2, 3, 13), generator=torch.Generator().manual_seed(1))  # often the same
    found = {}
    for alone in (False, True):
        model.zero_grad()
        for part in ids:
            with sparse_embedding_gradient(model.tied_embedding if alone else None):
                stream = model(part[:, :-1], return_hidden=True)
            lm_head_loss(stream, model.lm_head_weight, part[:, 1:]).backward()
        found[alone] = {name: p.grad for name, p in model.named_parameters()}
    with sparse_embedding_gradient(model.tied_embedding):
        rows = torch.autograd.grad(model.embed(ids).sum(), model.embed.weight)[0].is_sparse
    assert rows == (tied and dtype == torch.float64)
    assert not model.embed.sparse
    for name, wanted in found[False].items():
        assert found[True][name].layout == torch.strided
        torch.testing.assert_close(found[True][name], wanted)


def test_rows_are_alone_only_inside() -> None:
    model = Transformer(ModelConfig(vocabulary=40, width=8, heads=2, layers=1))
    with pytest.raises(ValueError, match="40"), sparse_embedding_gradient(model.tied_embedding):
        model(torch.tensor([[40]]))
    assert not model.embed.sparse


@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("choice", [None, Entmax(1.5), Sparsemax()], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_ignored_targets_and_class_weights_are_those_of_the_logits(
    parts: tuple[Tensor, Tensor, Tensor],
    choice: Choice | None,
    weighted: bool,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "ROWS", rows)
    monkeypatch.setattr(loss, "LOGITS", {})
    stream, table, targets = parts
    targets = targets.clone()
    targets[0, 2:] = targets[2] = -100
    call = {"choice": choice, "smoothing": 0.1}
    if weighted:
        call["class_weights_V"] = draw(11).abs()
    ours = lm_head_loss(stream, table, targets, **call)
    plain = total_loss(stream @ table.T, targets, **call)
    torch.testing.assert_close(ours, plain, check_dtype=False)
    found, wanted = (torch.autograd.grad(x, (stream, table)) for x in (ours, plain))
    torch.testing.assert_close(found, wanted)
    assert found[0][2].count_nonzero() == 0


def test_a_target_outside_the_vocabulary_gets_a_sentence(
    parts: tuple[Tensor, Tensor, Tensor],
) -> None:
    stream, table, targets = parts
    for wrong in (-1, 11, 40):
        targets[1, 3] = wrong
        with pytest.raises(
            ValueError, match=f"index below 11, or -100 to be left out; got {wrong}"
        ):
            lm_head_loss(stream, table, targets)
