"""fenchel/sensitivity/lipschitz_cone.py: the double cone, checked and drawn."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.sensitivity import cone, jacobian, lipschitz_cone, spectral_norm

Draw = Callable[..., Tensor]


def test_the_sine_stays_in_its_cone_and_leaves_a_narrower_one() -> None:
    assert cone(torch.sin, 0.0, 1.0).violations == 0
    narrow = cone(torch.sin, 0.0, 0.9)
    assert narrow.violations == 100
    assert len(narrow.x) == 600
    assert int(narrow.outside.sum()) == 100
    assert narrow.x[narrow.outside].abs().max() < 1.0


def test_the_points_may_be_chosen() -> None:
    x = torch.linspace(-1.0, 1.0, 11, dtype=torch.float64)
    seen = cone(torch.exp, 0.5, 1.0, x=x)
    assert seen.violations == int((seen.change > seen.distance).sum()) > 0
    assert cone(torch.exp, 0.5, math.e, x=x).violations == 0


def test_a_function_of_vectors_is_measured_by_lengths(draw: Draw) -> None:
    W, x0 = draw(3, 4), draw(3)
    f = lambda x: torch.tanh(x @ W)  # noqa: E731
    L = float(torch.linalg.matrix_norm(W, 2))
    points = x0 + draw(500, 3)
    assert cone(f, x0, L, x=points).violations == 0
    near = x0 + 1e-4 * draw(500, 3)
    local = float(spectral_norm(jacobian(f, x0)).upper)
    assert cone(f, x0, 1.001 * local, x=near).violations == 0
    assert cone(f, x0, 0.2 * local, x=near).violations > 0


def test_mistakes_are_refused(draw: Draw) -> None:
    with pytest.raises(ValueError, match="not negative"):
        cone(torch.sin, 0.0, -1.0)
    with pytest.raises(ValueError, match="points to evaluate"):
        cone(torch.sin, draw(3), 1.0)
    with pytest.raises(ValueError, match="list of points"):
        cone(torch.sin, draw(3), 1.0, x=draw(5, 2))
    with pytest.raises(ValueError, match="one value per point"):
        cone(lambda x: x[:-1], 0.0, 1.0)


def test_without_matplotlib_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(lipschitz_cone, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install \"fenchel\[plot\]\""):
        cone(torch.sin, 0.0, 1.0).plot()


class Recorder:
    """Stands for matplotlib: keeps what it was asked to draw."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def subplots(self) -> "Recorder":
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        def record(*arguments: Any, **options: Any) -> None:
            self.calls.append((name, arguments, options))

        return record


def test_the_picture_has_a_sharp_tip_and_goes_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lipschitz_cone, "import_module", lambda _: SimpleNamespace(Figure=Recorder))
    drawn = cone(torch.sin, 0.0, 0.9).plot("cone.svg", "cone.webp")
    assert drawn.settings["figsize"] == (6.0, 4.2)
    assert drawn.settings["dpi"] == 160
    names = [name for name, _, _ in drawn.calls]
    assert names.count("savefig") == 2
    lines = [arguments for name, arguments, _ in drawn.calls if name == "plot"]
    x, upper = lines[1][0], lines[1][1]
    assert len(x) == 601
    assert upper.min() == 0.0  # the tip itself is among the points
    dashed = [options for _, arguments, options in drawn.calls if "--" in arguments]
    assert len(dashed) == 2
    assert ("legend", (), {"loc": "upper right"}) in drawn.calls


def test_without_webp_the_picture_is_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    image.init()
    monkeypatch.delitem(image.SAVE, "WEBP")
    cone(torch.sin, 0.0, 1.0).plot(tmp_path / "cone.webp")
    assert image.open(tmp_path / "cone.png").format == "PNG"


def test_matplotlib_writes_the_files(tmp_path: Path, draw: Draw) -> None:
    cone(torch.sin, 0.0, 1.0).plot(tmp_path / "cone.svg", tmp_path / "cone.png")
    vectors = cone(lambda x: x.sin(), draw(2), 1.0, x=draw(50, 2))
    vectors.plot(tmp_path / "lengths.png")
    assert (tmp_path / "cone.svg").read_text().startswith("<?xml")
    assert (tmp_path / "cone.png").stat().st_size > 1000
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 3
