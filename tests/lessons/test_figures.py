"""fenchel/lessons/figures.py: the data behind each figure, and the files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fenchel.lessons import figures


def lines(axes: Any) -> dict[str, tuple[Any, Any]]:
    """The data of every labelled line, by its label."""
    return {
        line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_the_cone_has_its_apex_its_size_and_its_600_points() -> None:
    figure = figures.lipschitz_double_cone()
    (axes,) = figure.axes
    assert tuple(figure.get_size_inches()) == (6.0, 4.2)
    assert figure.dpi == 160
    assert axes.get_title()
    assert axes.get_legend() is not None
    graph, upper, lower = (line.get_xydata() for line in axes.get_lines()[:3])
    assert len(graph) == 601  # 600 points and the apex between them
    for line in (upper, lower):
        assert [0.0, 0.0] in line.tolist()
        np.testing.assert_allclose(np.abs(line[:, 1]), np.abs(line[:, 0]))
    np.testing.assert_allclose(graph[:, 1], np.sin(graph[:, 0]))
    assert graph[-1, 0] == pytest.approx(1.5 * math.pi)
    assert [line.get_linestyle() for line in axes.get_lines()[1:3]] == ["--", "--"]
    assert axes.get_lines()[3].get_marker() == "o"


def test_errors_go_from_the_loss_to_the_gradients() -> None:
    network = figures.slopes_to_networks().axes[3]
    places = {text.get_gid(): text.get_position() for text in network.texts if text.get_text()}
    arrows = {text.get_gid(): text for text in network.texts if "->" in (text.get_gid() or "")}
    for start, end in (("delta2", "delta1"), ("delta1", "gradient1"), ("delta2", "gradient2")):
        arrow = arrows[f"{start} -> {end}"]
        assert arrow.xy == places[end], "the head of the arrow"
        assert arrow.xyann == places[start], "its tail"
    assert not arrows.keys() & {"delta1 -> delta2", "gradient1 -> delta1"}
    assert places["delta1"][0] < places["delta2"][0]


def test_the_other_panels_have_the_right_slopes() -> None:
    one, two, matrix, _ = figures.slopes_to_networks().axes
    x, tangent = lines(one)["slope 2 at $x = 1$"]
    np.testing.assert_allclose(tangent, 1.0 + 2.0 * (x - 1.0), atol=1e-6)
    (arrows,) = (c for c in two.collections if type(c).__name__ == "Quiver")
    np.testing.assert_allclose(arrows.U, -2.0 * arrows.X, atol=1e-6)
    np.testing.assert_allclose(arrows.V, -6.0 * arrows.Y, atol=1e-6)
    gradient = np.outer([0.5, -1.0, 0.2], [1.0, 2.0, -0.5, 0.0])
    np.testing.assert_allclose(matrix.images[0].get_array(), gradient, atol=1e-6)


def test_schedules_peak_at_one_and_decay() -> None:
    drawn = lines(figures.learning_rate_schedules().axes[0])
    assert len(drawn) == 5
    for name, (step, factor) in drawn.items():
        assert factor.max() == pytest.approx(1.0)
        if name != "constant":
            assert factor[0] == pytest.approx(0.01)
            assert factor[99] == pytest.approx(1.0)
            assert step[-1] == 1000
    assert drawn["warm-up, cosine"][1][550] == pytest.approx(0.5)
    assert drawn["warm-up, linear"][1][-1] == 0.0
    assert drawn["inverse square root"][1][399] == pytest.approx(0.5)


def test_gelu_dips_and_the_slope_of_relu_jumps() -> None:
    values, slopes = figures.gelu_and_relu().axes
    x, y = lines(values)["GELU"]
    assert y.min() == pytest.approx(-0.16997, abs=1e-5)
    assert x[y.argmin()] == pytest.approx(-0.7518, abs=1e-3)
    assert ((np.minimum(x, 0.0) <= y) & (y <= np.maximum(x, 0.0))).all()
    assert lines(slopes)["GELU"][1].max() == pytest.approx(1.1289, abs=1e-4)
    assert lines(slopes)["GELU"][1].min() == pytest.approx(-0.1289, abs=1e-4)
    assert set(lines(slopes)["ReLU"][1]) == {0.0, 1.0}


def test_unscaled_attention_collapses_and_scaled_does_not() -> None:
    entropy, largest, sensitivity = (lines(a) for a in figures.attention_collapse().axes)
    assert entropy["unscaled"][0].tolist() == [1, 4, 16, 64, 256, 1024]
    assert entropy["unscaled"][1][3] == pytest.approx(0.55, abs=0.05)
    assert entropy["scaled"][1][3] == pytest.approx(3.68, abs=0.05)
    assert (np.diff(entropy["unscaled"][1]) < 0).all()
    assert (np.diff(largest["unscaled"][1]) > 0).all()
    assert np.ptp(largest["scaled"][1]) < 0.05
    assert (sensitivity["unscaled"][1] <= 0.5).all()


def test_sensitivity_grows_with_the_square_of_the_length() -> None:
    (axes,) = figures.attention_blowup().axes
    (norm, pairs, law) = (line.get_xydata() for line in axes.get_lines())
    slopes = np.diff(np.log(norm[4:, 1])) / np.diff(np.log(norm[4:, 0]))
    np.testing.assert_allclose(slopes, 2.0, atol=0.02)
    np.testing.assert_allclose(pairs[4:, 1], law[4:, 1], rtol=0.02)
    assert (norm[:, 1] >= 0.99 * pairs[:, 1]).all()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_divergence_rises_from_its_law_to_its_limit() -> None:
    (axes,) = figures.kl_along_beta().axes
    drawn = lines(axes)
    beta, divergence = drawn[r"KL(softmax($\beta z$) || uniform)"]
    _, small = drawn[r"$\beta^2\,\mathrm{Var}(z)/2$"]
    assert (np.diff(divergence) > 0).all()
    assert divergence[-1] == pytest.approx(math.log(4), abs=0.01)
    p = torch.softmax(beta[50] * torch.tensor([0.0, 1.0, 2.0, 4.0]).double(), -1)
    assert divergence[50] == pytest.approx(float((p * (4 * p).log()).sum()))
    np.testing.assert_allclose(small[1:8], divergence[1:8], rtol=0.12)
    assert small[2] == pytest.approx(divergence[2], rel=0.03)


def test_too_large_logits_are_too_confident() -> None:
    sharp, true = figures.reliability_diagram().axes
    for bar in sharp.patches:  # of equal width, all of them below the diagonal
        assert bar.get_width() == pytest.approx(1 / 15)
        assert bar.get_height() < bar.get_x() + bar.get_width()
    confidence, accuracy = sharp.get_lines()[1].get_data()
    assert (np.asarray(accuracy) < np.asarray(confidence)).all()
    confidence, accuracy = true.get_lines()[1].get_data()
    assert np.abs(np.asarray(accuracy) - np.asarray(confidence)).max() < 0.05


def test_the_raw_step_lies_between_its_bound_and_the_exact_one() -> None:
    (axes,) = figures.raw_and_exact_step().axes
    drawn = lines(axes)
    middle, bound = (
        drawn["raw step, median of 20"][1],
        drawn[r"$2\sqrt{\kappa}/(1+\kappa)$, median"][1],
    )
    assert (np.diff(middle) < 0).all()
    assert (bound < middle).all()
    assert drawn["raw step"][1].max() < 1.0
    assert drawn["exact step"][1][0] == 1.0


def test_every_figure_is_written_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(figures.FIGURES) == 9
    two = {name: figures.FIGURES[name] for name in ("lipschitz_double_cone", "kl_along_beta")}
    monkeypatch.setattr(figures, "FIGURES", two)
    assert figures.main([str(tmp_path / "new")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written][:2] == [
        "lipschitz_double_cone.svg",
        "lipschitz_double_cone.webp",
    ]
    assert len(written) == 4
    assert written[0].read_text().startswith("<?xml")
    assert written[1].read_bytes()[8:12] == b"WEBP"


def test_without_webp_it_is_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.delitem(Image.SAVE, "WEBP")
    one = {"lipschitz_double_cone": figures.lipschitz_double_cone}
    monkeypatch.setattr(figures, "FIGURES", one)
    names = [path.name for path in figures.write(tmp_path)]
    assert names == ["lipschitz_double_cone.svg", "lipschitz_double_cone.png"]
    assert (tmp_path / names[1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_anything_but_one_directory_is_answered_by_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(arguments) == 2
    assert "DIR" in capsys.readouterr().err
