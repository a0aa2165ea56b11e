"""fenchel/interpretability/jacobian_lens.py: J is autograd's; a file serves its own model only."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.interpretability import JacobianLens, fit_lens, hooked
from fenchel.interpretability.jacobian_lens import TextJacobians
from fenchel.model import Transformer
from tests.interpretability.conftest import SHAPES, L, M, T, build, draw


def streams(model: Transformer, ids: list[int]) -> list[Tensor]:
    """The outputs of all blocks, by hooks."""
    found: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda _, __, x: found.append(x)) for block in model.blocks
    ]
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def block_jacobians(model: Transformer, ids: list[int], layer: int) -> Tensor:
    """d x_L / d x_layer by torch.autograd.functional.jacobian, (T, M, T, M)."""
    grabbed: dict[str, Any] = {}
    block = model.blocks[layer]

    def grab(_: Any, args: tuple[Any, ...]) -> None:
        grabbed["context"] = args[1]

    handle = block.register_forward_pre_hook(grab)
    x = streams(model, ids)[layer - 1].detach()
    handle.remove()

    def rest(x_TM: Tensor) -> Tensor:
        x_BTM = x_TM[None]
        for n in range(layer, L):
            x_BTM = model.blocks[n](x_BTM, grabbed["context"], n)
        return x_BTM[0]

    J = torch.autograd.functional.jacobian(rest, x[0])
    assert isinstance(J, Tensor)
    return J


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "shared"])
def test_the_matrices_are_those_of_autograd(shape: str) -> None:
    """Sums over later targets, means over sources, both between the skipped and the last."""
    model, texts, skip = build(shape), [draw(1), draw(2, T - 3)], 2
    fitted = fit_lens(model, texts, skip=skip, rows=5)
    assert (fitted.layers, fitted.texts) == ((1, 2), 2)
    for layer in (1, 2):
        wanted, squares, own = [], [], []
        for ids in texts:
            inside = slice(skip, len(ids) - 1)
            J_tisj = block_jacobians(model, ids, layer)[inside, :, inside]
            later_isj = J_tisj.sum(0)
            wanted.append(later_isj.mean(1))
            squares.append(later_isj.square().sum((0, 2)).mean())
            own.append(streams(model, ids)[layer - 1][0, inside].mean(0))
        J = torch.stack(wanted).mean(0)
        torch.testing.assert_close(fitted.jacobians[layer], J, rtol=1e-9, atol=1e-9)
        mean = torch.stack(own).mean(0)
        torch.testing.assert_close(fitted.mean_in[layer], mean, rtol=1e-9, atol=1e-9)
        spread = torch.stack(wanted).sub(J).square().sum((1, 2)).sum().sqrt() / J.norm()
        assert fitted.spread_texts[layer] == pytest.approx(float(spread), rel=1e-4)
        assert fitted.error(layer) == pytest.approx(float(spread) / 2**0.5, rel=1e-4)
        over = (torch.stack(squares).mean() - J.square().sum()).sqrt() / J.norm()
        assert fitted.spread_positions[layer] == pytest.approx(float(over), rel=1e-4)
    last = [streams(model, ids)[-1][0, skip : len(ids) - 1].mean(0) for ids in texts]
    assert fitted.mean_out is not None
    torch.testing.assert_close(fitted.mean_out, torch.stack(last).mean(0), rtol=1e-9, atol=1e-9)


def test_random_signs_keep_what_a_position_does_to_itself() -> None:
    """Over all patterns of signs the mean is exact; a fit draws one pattern per text."""
    model, ids, skip = build(), draw(1, 7), 2
    patterns = product((-1.0, 1.0), repeat=len(ids) - 1 - skip)
    found = [
        TextJacobians(
            hooked(model), ids, skip=skip, rows=M, signs_T=torch.tensor([1.0, 1.0, *signs, 1.0])
        ).jacobians
        for signs in patterns
    ]
    inside = range(skip, len(ids) - 1)
    for layer in (1, 2):
        J_tisj = block_jacobians(model, ids, layer)
        wanted = torch.stack([J_tisj[t, :, t] for t in inside]).mean(0)
        mean = torch.stack(found).mean(0)[layer - 1]
        torch.testing.assert_close(mean, wanted, rtol=1e-9, atol=1e-9)
    one, again = (fit_lens(model, [ids], skip=skip, targets="same") for _ in range(2))
    assert torch.equal(one.jacobians[1], again.jacobians[1])
    drawn = min(float((one.jacobians[1] - J[0]).abs().max()) for J in found)
    assert drawn < 1e-9
    with pytest.raises(ValueError, match="'later' or 'same'"):
        fit_lens(model, [ids], skip=skip, targets="all")  # type: ignore[arg-type]


@torch.no_grad()
def test_the_two_read_outs() -> None:
    fitted, x = fit_lens(build(), [draw(1)], skip=2), torch.randn(4, M).double()
    J, mean = fitted.jacobians[2], fitted.mean_in[2]
    assert fitted.mean_out is not None
    torch.testing.assert_close(fitted.read(2, x, offset=False), x @ J.T)
    torch.testing.assert_close(fitted.read(2, mean[None]), fitted.mean_out[None])
    torch.testing.assert_close(fitted.read(2, x) - fitted.read(2, 0 * x), x @ J.T)
    with pytest.raises(ValueError, match="no layer 3; it has 1-2"):
        fitted.read(3, x)


def test_a_linear_model_is_read_exactly() -> None:
    """Blocks whose branches are zero are the identity: J is I and nothing spreads."""
    model = build(initial="zero")
    for name, p in model.named_parameters():
        if "out" in name or "down" in name:
            p.detach().zero_()
    fitted = fit_lens(model, [draw(1), draw(2)], skip=2)
    for layer in (1, 2):
        torch.testing.assert_close(fitted.jacobians[layer], torch.eye(M, dtype=torch.float64))
        assert fitted.spread_texts[layer] == fitted.spread_positions[layer] == 0.0


def test_the_fit_stops_at_its_error_bar() -> None:
    texts = [draw(seed) for seed in range(9)]
    whole = fit_lens(build(), texts, skip=2)
    enough = max(fit_lens(build(), texts[:6], skip=2).error(n) for n in (1, 2)) * 1.0001
    assert fit_lens(build(), texts, skip=2, error=enough).texts <= 6
    assert fit_lens(build(), texts, skip=2, error=0.0).texts == whole.texts == 9
    assert not fit_lens(build(), texts[:1], skip=2).spread_texts


def test_a_text_without_a_position_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="give at least 18"):
        fit_lens(build(), [draw(1, 17)])
    with pytest.raises(ValueError, match="none was given"):
        fit_lens(build(), [])


def test_a_file_holds_the_lens_of_its_model_in_any_dtype(tmp_path: Path) -> None:
    made = fit_lens(
        build(dtype=torch.float32), [draw(1), draw(2)], skip=2, targets="same", about="two texts"
    )
    made.save(tmp_path / "l.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        found = JacobianLens.load(tmp_path / "l.safetensors", build(dtype=torch.float32).to(dtype))
        assert (found.texts, found.positions, found.skip) == (2, made.positions, 2)
        assert (found.about, found.layers, found.targets) == ("two texts", (1, 2), "same")
        for n in (1, 2):
            assert torch.equal(found.jacobians[n], made.jacobians[n])
            assert torch.equal(found.mean_in[n], made.mean_in[n])
            assert found.error(n) == pytest.approx(made.error(n), rel=1e-6)
    with pytest.raises(ValueError, match="exists and is not overwritten"):
        made.save(tmp_path / "l.safetensors")


def spoil(path: Path, how: str) -> Transformer:
    """A file that is no lens for the model that is returned."""
    model = build(dtype=torch.float32)
    fit_lens(model, [draw(1), draw(2)], skip=2).save(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata())
    tensors = load_file(path)
    match how:
        case "width":
            tensors["jacobian.1"] = torch.zeros(M + 2, M + 2)
        case "vector":
            tensors["jacobian.1"] = torch.zeros(M)
        case "weights":
            model = build("gpt2", torch.float32)
        case "nan":
            tensors["jacobian.2"][3, 1] = torch.nan
        case "layer":
            tensors["jacobian.3"] = tensors.pop("jacobian.2")
        case "names":
            tensors["other"] = torch.zeros(2)
        case "empty":
            tensors = {"mean_out": tensors["mean_out"]}
        case "means":
            del tensors["mean_in.2"]
        case "dtype":
            tensors["jacobian.2"] = tensors["jacobian.2"].double()
        case "targets":
            about["targets"] = "the source position alone"
        case "texts":
            about["texts"] = "many"
    path.unlink()
    if how == "pickle":
        torch.save({"J": {0: torch.eye(M)}}, path)
    else:
        save_file(tensors, path, about)
    return model


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("width", "made for a model of width 18 and this one has 16"),
        ("vector", "of width another and this one has 16"),
        ("weights", "made with other weights"),
        ("nan", "nan or inf"),
        ("layer", "a matrix for layer 3 and the model has 3 layers"),
        ("names", "holds a tensor other"),
        ("empty", "has no matrix"),
        ("means", "only some of the means"),
        ("dtype", "float32 or float16"),
        ("targets", "does not say how its matrices were made"),
        ("texts", "from how many texts"),
        ("pickle", "is a pickle, which can run code"),
    ],
)
def test_a_file_of_another_model_or_form_is_refused(
    how: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "l.safetensors"
    model = spoil(path, how)
    with pytest.raises(ValueError, match=sentence):
        JacobianLens.load(path, model)


def test_a_published_lens_is_converted(tmp_path: Path) -> None:
    """Layers count from 0 there and from 1 here; it has no means, and so no offset."""
    model, J = build(dtype=torch.float32), torch.randn(M, M)
    made = JacobianLens.from_matrices(model, {0 + 1: J, 1 + 1: J.half()}, texts=1000)
    made.save(tmp_path / "l.safetensors")
    found = JacobianLens.load(tmp_path / "l.safetensors", model)
    assert not found.has_offset
    x = torch.randn(2, M)
    torch.testing.assert_close(found.read(1, x, offset=False), x @ J.T)
    with pytest.raises(ValueError, match="has no means"):
        found.read(1, x)
    for layer, matrix in ((3, J), (0, J), (1, J[1:])):
        with pytest.raises(ValueError, match=r"should be of \(16, 16\) for a layer from 1 to 2"):
            JacobianLens.from_matrices(model, {layer: matrix})
