"""The double cone of a Lipschitz constant, checked at points and drawn.

    |f(x) - f(x_0)| <= L |x - x_0|

confines the graph of f between two cones of slope +L and -L with their tip at (x_0, f(x_0)).
``cone`` evaluates f at points and counts those outside; for a function of a vector, lengths take
the place of absolute values and the picture shows |f(x) - f(x_0)| over |x - x_0|.

Lesson: lipschitz.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_GRID = 600


@dataclass(frozen=True, eq=False)
class Cone:
    """Values of a function and the cone of slope L about one of them."""

    x: Tensor
    """The points: (N,) or (N, d)."""
    y: Tensor
    """f there: (N,) or (N, m)."""
    x0: Tensor
    y0: Tensor
    L: float

    @property
    def distance(self) -> Tensor:
        """|x - x_0|: (N,)."""
        return _length(self.x - self.x0)

    @property
    def change(self) -> Tensor:
        """|f(x) - f(x_0)|: (N,)."""
        return _length(self.y - self.y0)

    @property
    def outside(self) -> Tensor:
        """Which points lie outside the cone, beyond rounding: (N,)."""
        eps = torch.finfo(self.y.dtype).eps
        sizes = _length(self.y) + self.y0.norm() + self.L * self.distance
        edge: Tensor = self.L * self.distance + 4.0 * eps * sizes
        return self.change > edge

    @property
    def violations(self) -> int:
        """How many points lie outside."""
        return int(self.outside.sum())

    def plot(self, *paths: str | Path) -> Any:
        """Draw the cone with matplotlib, save it under every path given, and return the figure.

        The ending of a path chooses the format: .svg, .png, .webp, .pdf. Where the installed Pillow
        writes no WebP, the picture is a .png beside it.
        """
        figure = new_figure()
        axes = figure.subplots()
        if self.x.dim() == 1:
            self._draw_graph(axes)
        else:
            self._draw_lengths(axes)
        axes.set_title(f"the double cone of slope {self.L:g}")
        axes.legend(loc="upper right")
        for path in paths:
            save_figure(figure, path)
        return figure

    def _draw_graph(self, axes: Any) -> None:
        # The tip is added to the points: a cone drawn over a grid without it comes out blunt.
        x = torch.cat([self.x, self.x0.reshape(1)]).sort()
        y = torch.cat([self.y, self.y0.reshape(1)])[x.indices]
        edge = self.L * (x.values - self.x0).abs()
        axes.plot(x.values, y, label="f")
        axes.plot(x.values, self.y0 + edge, "--", color="gray", label=f"slope ±{self.L:g}")
        axes.plot(x.values, self.y0 - edge, "--", color="gray")
        axes.plot(self.x0, self.y0, "o", color="black", label="$(x_0, f(x_0))$")
        if self.violations:
            axes.plot(self.x[self.outside], self.y[self.outside], ".", color="red", label="outside")
        axes.set_xlabel("x")

    def _draw_lengths(self, axes: Any) -> None:
        far = torch.stack([torch.zeros(()), self.distance.amax()])
        axes.plot(self.distance, self.change, ".", label="$|f(x) - f(x_0)|$")
        axes.plot(far, self.L * far, "--", color="gray", label=f"slope {self.L:g}")
        axes.set_xlabel("$|x - x_0|$")


def cone(
    f: Callable[[Tensor], Tensor],
    x0: float | Tensor,
    L: float,
    *,
    x: Tensor | None = None,
) -> Cone:
    """Compare ``f`` with the cone of slope ``L`` whose tip is at ``x0``.

    For a number x0, ``f`` acts on a whole tensor of numbers, and ``x`` is by default 600 points
    within 3 pi / 2 on either side. For a vector x0 (d,), ``x`` is (N, d) and ``f`` acts on rows.

    >>> cone(torch.sin, 0.0, 1.0).violations, cone(torch.sin, 0.0, 0.9).violations
    (0, 100)
    """
    if L < 0:
        raise ValueError(f"a Lipschitz constant is not negative, got L={L}.")
    start = torch.as_tensor(x0)
    start = start if start.is_floating_point() and start.dim() else start.double()
    if x is None:
        if start.dim():
            raise ValueError("for a vector x0 give the points to evaluate: x of shape (N, d).")
        x = start + torch.linspace(-1.5 * pi, 1.5 * pi, _GRID, dtype=torch.float64)
    if x.dim() != start.dim() + 1 or x.shape[1:] != start.shape:
        raise ValueError(
            f"x must be a list of points like x0; got x {tuple(x.shape)} for x0 "
            f"{tuple(start.shape)}."
        )
    values = f(torch.cat([start.unsqueeze(0).to(x), x]))
    if len(values) != len(x) + 1:
        raise ValueError(f"f must give one value per point; got {len(values)} for {len(x) + 1}.")
    return Cone(x, values[1:], start.to(x), values[0], float(L))


def new_figure(size: tuple[float, float] = (6.0, 4.2)) -> Any:
    """An empty figure of matplotlib, ``size`` in inches, 160 dots per inch."""
    try:
        Figure = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            'drawing needs matplotlib, which is not installed; pip install "fenchel[plot]".'
        ) from error
    return Figure(figsize=size, dpi=160, layout="constrained")


def save_figure(figure: Any, path: str | Path) -> Path:
    """Save a figure and return its path: a .png where the installed Pillow writes no WebP."""
    try:
        figure.savefig(path)
    except KeyError:  # Pillow's table of formats lacks this one
        path = Path(path).with_suffix(".png")
        figure.savefig(path)
    return Path(path)


def _length(v: Tensor) -> Tensor:
    return v.abs() if v.dim() < 2 else v.flatten(1).norm(dim=-1)
