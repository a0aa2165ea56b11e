"""The figures of the course as files: ``python -m fenchel.lessons.figures DIR``.

Each function computes its data with the library and returns a figure of matplotlib (the extra
``plot``). ``write`` saves every figure as .svg and .webp; where the installed Pillow writes no
WebP, as .svg and .png.

    lipschitz_double_cone    the sine in its double cone of slope 1
    slopes_to_networks       slope, gradient, matrix gradient, and errors through a network
    learning_rate_schedules  warm-up and decay side by side
    gelu_and_relu            both activations and their slopes
    attention_collapse       entropy, largest weight and sensitivity against the head width
    attention_blowup         sensitivity of attention against the length of tokens: t^2
    kl_along_beta            KL(softmax(beta z) || uniform) with its two limits
    reliability_diagram      accuracy against confidence, by two kinds of bins
    raw_and_exact_step       the share of the best descent that a plain gradient attains
"""

import sys
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu

from fenchel.attention import attend, self_attention
from fenchel.choice import Softmax
from fenchel.choice.hypothesis_test import tilted
from fenchel.evaluate import calibration_error, outcomes, reliability
from fenchel.optim import (
    constant,
    inverse_sqrt,
    score_bounds,
    warmup_cosine,
    warmup_hold,
    warmup_linear,
)
from fenchel.sensitivity import Witness, cone, self_attention_jacobian, spectral_norm, witness
from fenchel.sensitivity.lipschitz_cone import new_figure, save_figure


def lipschitz_double_cone() -> Any:
    """The sine on 600 points within 3 pi / 2 of 0, and the cone of slope 1 with its tip at 0."""
    return cone(torch.sin, 0.0, 1.0).plot()


BACKWARD = (
    ("loss", "delta2"),
    ("delta2", "delta1"),
    ("delta2", "gradient2"),
    ("delta1", "gradient1"),
)
"""The way of the errors through a network of two layers, from the loss to the gradients."""

_PLACES = {
    "x": (0.0, 2.0),
    "h": (1.0, 2.0),
    "y": (2.0, 2.0),
    "loss": (3.0, 2.0),
    "delta2": (2.0, 1.0),
    "delta1": (1.0, 1.0),
    "gradient2": (2.0, 0.0),
    "gradient1": (1.0, 0.0),
}
_LABELS = {
    "x": "$x$",
    "h": "$h$",
    "y": r"$\hat y$",
    "loss": "$L$",
    "delta2": r"$\delta_2$",
    "delta1": r"$\delta_1$",
    "gradient2": "$\\nabla W_2$\n$\\nabla b_2$",
    "gradient1": "$\\nabla W_1$\n$\\nabla b_1$",
}


def slopes_to_networks() -> Any:
    """One number, two numbers, a matrix, a network: the gradient in each."""
    figure = new_figure((12.0, 3.4))
    one, two, matrix, network = figure.subplots(1, 4)

    x = torch.linspace(-2.0, 2.0, 101)
    one.plot(x, x.square(), label="$f(x) = x^2$")
    one.plot(x, 2.0 * x - 1.0, "--", label="slope 2 at $x = 1$")
    one.plot(1.0, 1.0, "o", color="black")
    one.set(title="one number: a slope", xlabel="$x$", ylim=(-1.5, 4.0))
    one.legend()

    side = torch.linspace(-2.0, 2.0, 61)
    a, b = torch.meshgrid(side, side, indexing="xy")
    two.contour(a, b, a.square() + 3.0 * b.square(), levels=8, colors="gray", linewidths=0.8)
    p, q = (grid.flatten() for grid in torch.meshgrid(side[5::10], side[5::10], indexing="xy"))
    two.quiver(p, q, -2.0 * p, -6.0 * q, color="tab:blue", angles="xy")
    two.set(title="two numbers: $-\\nabla f$ points downhill", xlabel="$x$", ylabel="$y$")

    delta, inputs = torch.tensor([0.5, -1.0, 0.2]), torch.tensor([1.0, 2.0, -0.5, 0.0])
    gradient = torch.outer(delta, inputs)
    matrix.imshow(gradient.numpy(), cmap="coolwarm", vmin=-2.0, vmax=2.0)
    for i, row in enumerate(gradient.tolist()):
        for j, value in enumerate(row):
            matrix.text(j, i, f"{value + 0.0:g}", ha="center", va="center")
    matrix.set(title=r"a matrix: $\nabla W = \delta\,x^\top$", xticks=(), yticks=())
    matrix.set_xlabel(f"$x$ = {', '.join(f'{v:g}' for v in inputs.tolist())}")
    matrix.set_ylabel(rf"$\delta$ = {', '.join(f'{v:g}' for v in delta.tolist())}")

    for name, place in _PLACES.items():
        network.text(*place, _LABELS[name], ha="center", va="center", gid=name)
    for start, end in (("x", "h"), ("h", "y"), ("y", "loss")):
        _arrow(network, start, end, "black")
    for start, end in BACKWARD:
        _arrow(network, start, end, "tab:red")
    network.set(title="a network: errors go back", xlim=(-0.4, 3.4), ylim=(-0.6, 2.5))
    network.axis("off")
    return figure


def _arrow(axes: Any, start: str, end: str, colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "shrinkA": 14, "shrinkB": 14}
    gid = f"{start} -> {end}"
    axes.annotate("", xy=_PLACES[end], xytext=_PLACES[start], arrowprops=style, gid=gid)


def learning_rate_schedules() -> Any:
    """Schedules of 1000 steps with a warm-up of 100, as factors of the peak rate."""
    figure = new_figure()
    axes = figure.subplots()
    schedules = {
        "constant": constant(),
        "warm-up, cosine": warmup_cosine(100, 1000),
        "warm-up, linear": warmup_linear(100, 1000),
        "warm-up, hold, linear": warmup_hold(100, 1000),
        "inverse square root": inverse_sqrt(100),
    }
    for (name, schedule), dash in zip(schedules.items(), _DASHES, strict=True):
        axes.plot(range(1001), [schedule(t) for t in range(1001)], linestyle=dash, label=name)
    axes.set(title="learning-rate schedules", xlabel="step", ylabel="factor of the peak rate")
    axes.legend()
    return figure


_DASHES: tuple[Any, ...] = (":", "-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))


def gelu_and_relu() -> Any:
    """GELU and ReLU, their slopes, and the minimum of GELU."""
    figure = new_figure((9.0, 4.2))
    values, slopes = figure.subplots(1, 2)
    x = torch.linspace(-4.0, 4.0, 8001, dtype=torch.float64)
    for name, activation, dash in (("GELU", gelu, "-"), ("ReLU", relu, "--")):
        slope = torch.func.vmap(torch.func.grad(activation))(x)
        values.plot(x, activation(x), dash, label=name)
        slopes.plot(x, slope, dash, label=name)
    low = gelu(x).min()
    values.plot(x[gelu(x).argmin()], low, "o", color="black", label=f"minimum {float(low):.4f}")
    values.set(title="activations", xlabel="$x$")
    slopes.set(title="their slopes", xlabel="$x$")
    values.legend()
    slopes.legend()
    return figure


def attention_collapse() -> Any:
    """64 Gaussian queries and keys: rows of attention with and without the factor 1/sqrt(d_k)."""
    n, widths = 64, (1, 4, 16, 64, 256, 1024)
    generator = torch.Generator().manual_seed(0)
    curves: dict[str, list[tuple[float, float, float]]] = {"unscaled": [], "scaled": []}
    for width in widths:
        q, k = torch.randn(2, 1, 8, n, width, dtype=torch.float64, generator=generator)
        for name, scale in (("unscaled", 1.0), ("scaled", None)):
            _, p = attend(q, k, k, scale=scale, return_weights=True)
            means = torch.special.entr(p).sum(-1), p.amax(-1), Softmax().sensitivity(p)
            curves[name].append(tuple(float(m.mean()) for m in means))  # type: ignore[arg-type]
    figure = new_figure((12.0, 3.8))
    titles = "entropy (nats)", "largest weight", "sensitivity to scores"
    panels = figure.subplots(1, 3)
    panels[0].axhline(log(n), color="gray", linestyle=":", label="uniform, log 64")
    for index, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for name, dash in (("unscaled", "--"), ("scaled", "-")):
            axes.semilogx(widths, [point[index] for point in curves[name]], dash + "o", label=name)
        axes.set(title=title, xlabel="head width $d_k$", ylim=(0.0, None))
    panels[0].legend()
    return figure


def attention_blowup() -> Any:
    """The derivative along the worst known direction, and ratios of pairs of inputs, against t."""
    generator = torch.Generator().manual_seed(12)
    Q, K, V = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)
    lengths = torch.logspace(0, 3, 13).tolist()
    witnesses = [witness.blowup(Q, K, V, 5, t) for t in lengths]
    norms = [float(spectral_norm(self_attention_jacobian(w.X, Q, K, V)).lower) for w in witnesses]
    ratios = [_pair_ratio(w, (Q, K, V), 1e-6 / t) for w, t in zip(witnesses, lengths, strict=True)]
    figure = new_figure()
    axes = figure.subplots()
    axes.loglog(lengths, norms, linewidth=4, alpha=0.5, label=r"$\|d\mathrm{Att}(X_t)\|$")
    axes.loglog(lengths, ratios, "o", label="ratio of a pair of inputs")
    growth = [w.growth * w.rate for w in witnesses]
    axes.loglog(lengths, growth, "--", color="black", label=f"{witnesses[0].growth:.2f} $t^2$")
    title = "self-attention has no Lipschitz constant"
    axes.set(title=title, xlabel="length $t$ of the tokens", ylabel="sensitivity")
    axes.legend()
    return figure


def _pair_ratio(w: Witness, W: tuple[Tensor, Tensor, Tensor], step: float) -> float:
    near, at = (self_attention(X, *W) for X in (w.X + step * w.direction, w.X))
    return float((near - at).norm()) / step


def kl_along_beta() -> Any:
    """KL from uniform along the path softmax(beta z), its small-beta law and its limit."""
    z = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    beta = torch.linspace(0.0, 4.0, 201, dtype=torch.float64)
    path = tilted(z, beta[:, None])
    small = beta.square() * z.var(correction=0) / 2.0
    figure = new_figure()
    axes = figure.subplots()
    axes.plot(beta, path.divergence, label=r"KL(softmax($\beta z$) || uniform)")
    early = small < log(len(z))
    axes.plot(beta[early], small[early], "--", label=r"$\beta^2\,\mathrm{Var}(z)/2$")
    axes.axhline(log(len(z)), color="gray", linestyle=":", label="log 4: all weight on one")
    axes.set(title="from uniform to one choice", xlabel=r"$\beta$", ylabel="nats")
    axes.legend(loc="lower right")
    return figure


def reliability_diagram() -> Any:
    """Predictions whose logits are twice too large: confidence above accuracy in every bin."""
    generator = torch.Generator().manual_seed(0)
    z = 1.5 * torch.randn(20_000, 5, dtype=torch.float64, generator=generator)
    y = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
    figure = new_figure((9.0, 4.2))
    for axes, factor, title in zip(
        figure.subplots(1, 2),
        (2.0, 1.0),
        ("logits twice too large", "the true logits"),
        strict=True,
    ):
        measured = outcomes(factor * z, y)
        width = reliability(measured.confidence, measured.hit)
        mass = reliability(measured.confidence, measured.hit, by="mass")
        axes.plot([0.0, 1.0], [0.0, 1.0], ":", color="gray", label="calibrated")
        low = [each.low for each in width]
        size = [each.high - each.low for each in width]
        tops = [each.accuracy for each in width]
        label = f"equal width, ECE {calibration_error(width):.3f}"
        axes.bar(low, tops, size, align="edge", alpha=0.5, edgecolor="white", label=label)
        points = [each.confidence for each in mass], [each.accuracy for each in mass]
        axes.plot(
            *points, "o", color="tab:orange", label=f"equal mass, ECE {calibration_error(mass):.3f}"
        )
        axes.set(title=title, xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left")
    return figure


def raw_and_exact_step() -> Any:
    """The share of the best descent that the plain gradient attains, against cond(X)."""
    conditions, draws = (1.0, 3.0, 10.0, 30.0, 100.0), 20
    shares: list[list[float]] = []
    bounds: list[float] = []
    for condition in conditions:
        problems = [_score_problem(condition, seed) for seed in range(draws)]
        shares.append([score_bounds.efficiency(*problem) for problem in problems])
        bounds.append(median(score_bounds.efficiency_lower(*each[:3]) for each in problems))
    figure = new_figure()
    axes = figure.subplots()
    axes.axhline(1.0, color="black", label="exact step")
    middle = [median(row) for row in shares]
    axes.semilogx(conditions, middle, label="raw step, median of 20")
    flat = [(c, share) for c, row in zip(conditions, shares, strict=True) for share in row]
    axes.plot(*zip(*flat, strict=True), ".", color="tab:blue", alpha=0.5, label="raw step")
    axes.plot(conditions, bounds, "--", color="gray", label=r"$2\sqrt{\kappa}/(1+\kappa)$, median")
    title = "descent at equal change of the scores"
    axes.set(
        title=title, xlabel="condition number of $X$", ylabel="share of the best", ylim=(0, 1.05)
    )
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _score_problem(condition: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X of that condition number, W_Q, W_K and G for 16 tokens of width 8 and a head of width 2."""
    g = torch.Generator().manual_seed(seed)
    X, W_Q, W_K, G = (
        torch.randn(*shape, dtype=torch.float64, generator=g)
        for shape in ((16, 8), (8, 2), (8, 2), (16, 16))
    )
    U, s, V = torch.linalg.svd(X, full_matrices=False)
    return U * condition ** -torch.linspace(0.0, 1.0, len(s)).to(s) @ V, W_Q, W_K, G


FIGURES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        lipschitz_double_cone,
        slopes_to_networks,
        learning_rate_schedules,
        gelu_and_relu,
        attention_collapse,
        attention_blowup,
        kl_along_beta,
        reliability_diagram,
        raw_and_exact_step,
    )
}


def write(directory: str | Path) -> list[Path]:
    """Write every figure into a directory, made if it is missing; returns the paths."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        figure = draw()
        paths += [save_figure(figure, folder / f"{name}.{ending}") for ending in ("svg", "webp")]
    return paths


def main(arguments: Sequence[str]) -> int:
    """The command: one argument, the directory."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m fenchel.lessons.figures DIR", file=sys.stderr)
        return 2
    for path in write(arguments[0]):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
