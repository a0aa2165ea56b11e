"""Slopes and gradients: measured by small steps, and followed downhill."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Slopes and gradients",
)

with app.setup:
    import math
    from itertools import combinations, pairwise, product

    import marimo as mo
    import torch
    from torch.autograd.functional import hessian, jacobian

    import fenchel
    from fenchel.lessons.scene import Scene, all_places
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        claim,
        details,
        footer,
        header,
        line_chart,
        no_run,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )


@app.cell
def _():
    header("slopes")
    return


@app.cell
def _():
    guess = question(
        "You stand at 3 on the curve $x^2$, lowest at 0. Ten times you step downhill by a tenth of the slope. "
        "Where do you end?",
        ["at 0: ten tenths make a whole", "near 0.3", "near 0.03"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "near 0.3",
        "Each step is a tenth of the slope *where you then stand*, and the slope shrinks on the way. Every "
        "step leaves 80 % of the distance: $3 \\cdot 0.8^{10} = 0.32$.",
    )
    return


@app.cell
def _():
    line_text = r"""
    ## The slope of a line

    A taxi charges a fixed fee and a price per kilometre. Two receipts show the price: divide the difference in money by the
    difference in distance. The fee cancels, and any two receipts give the same price, the *slope* of a line

    $$y = m\,x + b, \qquad \text{slope} = \frac{y_2 - y_1}{x_2 - x_1} = m .$$
    """
    mo.md(line_text)
    return (line_text,)


@app.cell
def _():
    _places = [-2.0, -0.5, 0.0, 1.0, 3.0]

    def measured(m, b):
        """The slope between every two places on a line."""
        return [(m * x + b - (m * w + b)) / (x - w) for w, x in combinations(_places, 2)]

    lines = {m: [s for b in (-1.0, 0.0, 4.0) for s in measured(m, b)] for m in (2.0, -0.5)}
    details(
        mo.md(
            "$x$ is the distance, $y$ the bill, $b$ the fee, $m$ the price; $(x_1, y_1)$ and $(x_2, y_2)$ are the receipts. "
            "For a curve, $h$ is the step to the second place, and $\\lim_{h \\to 0}$ the number that is approached as $h$ shrinks."
        ),
        claim(
            "DV-02",
            f"With prices 2 and -0.5 and three fees, all {len(lines[2.0])} pairs of places give the slopes "
            f"{lines[2.0][0]:g} and {lines[-0.5][0]:g}.",
            all(math.isclose(s, m) for m, slopes in lines.items() for s in slopes),
        ),
        title="The letters",
    )
    return


@app.cell
def _():
    limit_text = r"""
    ## The slope of a curve

    A road looks bent from afar; walk on it, and every few metres look straight. So measure a curve like a line, between two
    places, bring them together, and the answers settle on the *derivative*

    $$f'(x) = \lim_{h \to 0} \frac{f(x + h) - f(x)}{h} .$$

    *Make the step $h$ smaller: the dashed line settles.*
    """
    mo.md(limit_text)
    return (limit_text,)


@app.cell
def _():
    curve = mo.ui.dropdown(
        ["x squared", "x cubed", "1 over x", "square root of x"], value="x squared", label="Curve"
    )
    place = mo.ui.slider(0.5, 4.0, step=0.5, value=3.0, label="Place $x$", show_value=True)
    gap = mo.ui.slider(
        steps=[2.0, 1.0, 0.5, 0.1, 0.01, 0.001], value=1.0, label="Step $h$", show_value=True
    )
    mo.vstack([curve, place, gap])
    return curve, gap, place


@app.cell
def _(curve, gap, place):
    f = {
        "x squared": lambda x: x**2,
        "x cubed": lambda x: x**3,
        "1 over x": lambda x: 1 / x,
        "square root of x": lambda x: x**0.5,
    }[curve.value]
    x0 = torch.tensor(place.value, dtype=torch.float64)
    quotient = (f(x0 + gap.value) - f(x0)) / gap.value
    slope = jacobian(f, x0)
    _grid = torch.linspace(0.25, 6.0, 60, dtype=torch.float64)
    line_chart(
        [
            {"x": x, "y": y, "line": name}
            for name, ys in (
                (curve.value, f(_grid)),
                ("through two places", f(x0) + quotient * (_grid - x0)),
            )
            for x, y in zip(_grid.tolist(), ys.tolist(), strict=True)
        ],
        "x",
        "y",
        "line",
        title=f"Slope between two places {gap.value:g} apart: {quotient.item():.4f}",
        x_range=(0, 6.2),
        y_range=(
            0,
            {"x squared": 36, "x cubed": 216, "1 over x": 4, "square root of x": 2.5}[curve.value],
        ),
        here=[
            {"x": x, "y": f(torch.tensor(x)).item()} for x in (place.value, place.value + gap.value)
        ],
    )
    return f, slope, x0


@app.cell
def _(curve, f, slope, x0):
    steps = [2.0, 1.0, 0.5, 0.1, 0.01, 0.001]
    quotients = [((f(x0 + h) - f(x0)) / h).item() for h in steps]
    _bounds = [h / 2 * max(abs(hessian(f, x0)), abs(hessian(f, x0 + h))).item() for h in steps]
    mo.vstack(
        [
            table(
                [
                    {"h": h, "slope between two places": q, "away from the limit": q - slope.item()}
                    for h, q in zip(steps, quotients, strict=True)
                ]
            ),
            claim(
                "DV-01",
                f"For {curve.value} at $x = {x0.item():g}$ the quotients approach {slope.item():.4f}, and a step of "
                "$h$ is off by at most $h/2$ times the largest bend between the two places. (The *bend* is "
                "the slope of the slope.)",
                all(
                    abs(q - slope.item()) <= b + 1e-9
                    for q, b in zip(quotients, _bounds, strict=True)
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def cube(x):
        return x**3

    three = torch.tensor(3.0, dtype=torch.float64)
    tiny = [10.0**-k for k in range(16)]
    off = {
        "forward": [abs((cube(three + h) - cube(three)) / h - 27).item() for h in tiny],
        "centred": [abs((cube(three + h) - cube(three - h)) / (2 * h) - 27).item() for h in tiny],
    }
    chosen = fenchel.sensitivity.difference_jacobian(cube, three[None])
    found = (chosen @ torch.ones(1, dtype=torch.float64)).item()
    shrinks = fenchel.sensitivity.remainder(cube, three[None], torch.ones(1, dtype=torch.float64))
    details(
        mo.md(r"""
            On paper, as small as you like. A computer keeps about 16 digits: subtract two almost equal numbers and
            few digits remain. The error of the measured slope first falls with $h$, then rises again.
            Measuring the same distance to both sides, $\frac{f(x+h) - f(x-h)}{2h}$, is better throughout
            the falling part: the bend cancels.
            """),
        line_chart(
            [
                {"h": h, "error": max(e, 1e-12), "difference": name}
                for name, errors in off.items()
                for h, e in zip(tiny, errors, strict=True)
            ],
            "h",
            "error",
            "difference",
            title="Error of the measured slope of x cubed at 3, which is 27",
            log_x=True,
            log_y=True,
        ),
        claim(
            "DV-01",
            f"With $h = 10^{{-2}}$ the error is {off['forward'][2]:.2g} to one side and {off['centred'][2]:.1g} to both. "
            f"With $h = 10^{{-15}}$ it is {off['forward'][15]:.2g}: too small a step is worse than $10^{{-8}}$. "
            f"`fenchel.sensitivity.difference_jacobian` chooses its step and finds {found:.10f}.",
            off["centred"][2] < 0.01 * off["forward"][2]
            and off["forward"][15] > 1e3 * off["forward"][8]
            and abs(found - 27) < 1e-8,
        ),
        claim(
            "DV-01",
            "A second test of a derivative: replace the curve by its straight line and look at what is left "
            f"over. It falls like $h^{{{shrinks.slope:.2f}}}$, faster than $h$; a wrong slope would leave "
            "$h^1$.",
            abs(shrinks.slope - 2) < 0.05,
        ),
        title="How small is small enough?",
    )
    return


@app.cell
def _():
    gradient_text = r"""
    ## Two directions: the gradient

    On a hillside there is no single slope. Walk east and you may climb; walk north and you may descend. Measure
    both, each while the other coordinate is held still. These two numbers, the *partial derivatives*, written
    with a round $\partial$, are enough: they form an arrow, the *gradient* $\nabla f$, and the slope in every other direction
    follows from it. For the bowl $f(x, y) = x^2 + y^2$

    $$\nabla f = \left(\frac{\partial f}{\partial x}, \frac{\partial f}{\partial y}\right) = (2x, 2y).$$

    A step of length 1 that goes $a$ to the east and $b$ to the north has the slope
    $a \frac{\partial f}{\partial x} + b \frac{\partial f}{\partial y}$, here $2xa + 2yb$. The arrow points where the bowl
    rises most steeply, and its length is that steepest slope.
    """
    mo.md(gradient_text)
    return (gradient_text,)


@app.cell
def arrow_on_the_bowl():
    hillside = Scene(
        "arrow_on_the_bowl",
        {"x": 1.5, "y": 1.0, "angle": 340},
        places=[
            {"x": x, "y": y, "angle": angle}
            for x, y in [(1.5, 1.0), *product([-2.0, -1.0, 0.0, 1.0, 2.0], repeat=2)]
            for angle in sorted([*range(0, 360, 15), 340])
        ],
    )
    mo.vstack(
        [
            mo.md(
                "*Drag the blue ring: you stand there. Drag the orange ring round it: that is the way you go. In which directions is "
                "the slope 0, and where does the orange line end as you turn?*"
            ),
            hillside,
        ]
    )
    return (hillside,)


@app.cell
def _(hillside):
    def bowl(point):
        return (point**2).sum()

    here = torch.tensor([hillside.state["x"], hillside.state["y"]], dtype=torch.float64)
    _turn = math.radians(hillside.state["angle"])
    _way = torch.tensor([math.cos(_turn), math.sin(_turn)], dtype=torch.float64)
    partials = fenchel.sensitivity.difference_jacobian(bowl, here)
    measured_pair = torch.stack(
        [partials @ axis for axis in torch.eye(2, dtype=torch.float64)]
    ).flatten()
    yours = (partials @ _way).item()
    degrees = torch.arange(0.0, 360.0, 1.0, dtype=torch.float64)
    unit = torch.stack([degrees.deg2rad().cos(), degrees.deg2rad().sin()], dim=1)
    _h = 1e-5
    by_direction = torch.stack(
        [(bowl(here + _h * u) - bowl(here - _h * u)) / (2 * _h) for u in unit]
    )
    steepest = (2 * here).norm()
    mo.vstack(
        [
            claim(
                "DV-03",
                f"Measured one coordinate at a time, the slopes are {measured_pair[0]:.4f} and "
                f"{measured_pair[1]:.4f}: $(2x, 2y)$. In your direction $(a, b)$ = ({_way[0]:.3f}, {_way[1]:.3f}) it is "
                f"{yours:.4f}: $2xa + 2yb$.",
                torch.allclose(measured_pair, 2 * here, atol=1e-9)
                and math.isclose(yours, (2 * here @ _way).item(), abs_tol=1e-8),
            ),
            details(
                claim(
                    "DV-03",
                    f"Of 360 directions none is steeper than the length of the gradient, {steepest:.4f}; the slope in the "
                    "direction $(a, b)$ is $2xa + 2yb$ in each of them.",
                    by_direction.max() <= steepest + 1e-8
                    and by_direction.max() >= steepest * math.cos(math.radians(0.5)) - 1e-8
                    and torch.allclose(by_direction, unit @ (2 * here), atol=1e-8),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    descent_text = r"""
    ## Walking downhill

    In fog you cannot see the valley, but your feet feel the slope. So: feel the slope, take a step the other
    way, longer where it is steep, and repeat. This is *gradient descent*. Almost all training of
    networks is a variant of it:

    $$x_{k+1} = x_k - \eta\, f'(x_k).$$

    $x_k$ is the place after $k$ steps and $\eta$ the *learning rate*, the share of the slope that
    becomes a step. *Drag the orange ring, the tip of the first step: how long a share of the slope brings you down fastest? Then
    let the ball walk.*
    """
    mo.md(descent_text)
    return (descent_text,)


@app.cell
def walk_on_the_parabola():
    downhill = Scene(
        "walk_on_the_parabola",
        {"rate": 0.1, "start": 3.0, "steps": 3},
        low=0.02,
        high=0.55,
        steps=15,
        frame={"x": [-0.6, 3.4], "y": [-0.5, 10]},
        xTicks=[0, 1, 2, 3],
        yTicks=[0, 2, 4, 6, 8, 10],
        places=all_places(
            rate=[0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55],
            start=[0.5, 1.0, 1.5, 2.0, 2.5, 3.0],
        ),
    )
    downhill
    return (downhill,)


@app.cell
def _(downhill):
    def descend(gradient, x, alpha, count):
        """The places of ``count`` steps of gradient descent, the start included."""
        path = [x]
        for _ in range(count):
            path.append(path[-1] - alpha * gradient(path[-1]))
        return path

    _start, _rate = downhill.state["start"], downhill.state["rate"]
    path = descend(lambda x: 2 * x, _start, _rate, 15)
    lengths = [abs(b - a) for a, b in pairwise(path)]
    weight = torch.nn.Parameter(torch.tensor([_start], dtype=torch.float64))
    optimiser = fenchel.optim.sgd([weight], lr=_rate)
    by_library = [_start]
    for _ in range(15):
        optimiser.zero_grad()
        (weight**2).sum().backward()
        optimiser.step()
        by_library.append(weight.item())
    mo.vstack(
        [
            claim(
                "OP-01",
                f"After 15 steps from {_start:g} with the rate {_rate:g}: {path[-1]:.5f} by this formula, {by_library[-1]:.5f} by `fenchel.optim.sgd`, which "
                "gets its slopes by automatic differentiation. They agree at every step.",
                all(
                    math.isclose(a, b, rel_tol=1e-12) for a, b in zip(path, by_library, strict=True)
                ),
            ),
            details(
                claim(
                    "OP-05",
                    f"With a constant learning rate the steps shrink by themselves, from {lengths[0]:.3g} to "
                    f"{lengths[-1]:.2g}: the slope goes to 0 at the bottom, and a step is a share of it.",
                    all(b < a or a == b == 0 for a, b in pairwise(lengths)),
                ),
            ),
        ]
    )
    return (descend,)


@app.cell
def _(descend):
    worked = descend(lambda x: 2 * x, 3.0, 0.1, 11)

    def _agrees(values, expected):
        return all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, expected, strict=True))

    mo.vstack(
        [
            mo.md(r"### The first steps by hand, with $\eta = 0.1$"),
            table(
                [
                    {"step": k, "x": x, "x squared": x**2, "slope 2x": 2 * x, "next step": -0.2 * x}
                    for k, x in enumerate(worked)
                    if k in (0, 1, 2, 3, 10, 11)
                ]
            ),
            claim(
                "OP-02",
                "From 3 the places are 2.4, 1.92, 1.536; the heights 9, 5.76, 3.6864; the slopes 6, 4.8, 3.84. "
                r"After $k$ steps the place is $3 \cdot 0.8^k$.",
                _agrees(worked[:4], [3.0, 2.4, 1.92, 1.536])
                and _agrees([x**2 for x in worked[:3]], [9.0, 5.76, 3.6864])
                and _agrees([2 * x for x in worked[:3]], [6.0, 4.8, 3.84])
                and _agrees(worked, [3 * 0.8**k for k in range(12)]),
            ),
            details(
                claim(
                    "OP-02 E15",
                    f"After ten steps $x = {worked[10]:.4f}$ and $x^2 = {worked[10] ** 2:.4f}$. It is easy to count one too "
                    f"many: the start is step 0, and {worked[11]:.4f} with {worked[11] ** 2:.4f} belongs to step 11.",
                    (round(worked[10], 4), round(worked[10] ** 2, 4)) == (0.3221, 0.1038)
                    and (round(worked[11], 4), round(worked[11] ** 2, 4)) == (0.2577, 0.0664),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            *Why $2x$.* A square of side $x$ grows to side $x + h$. It gains two strips of area $x h$ and
            one small corner $h^2$: together $2xh + h^2$. Per unit of $h$ that is $2x + h$, and as $h$
            shrinks, $2x$ is left. The error is exactly $h$, as in the table above.

            *Why the arrow is the steepest way.* Go from $(x, y)$ by $h$ in the direction $(a, b)$ with $a^2 + b^2 = 1$. The bowl gains
            $(x + ha)^2 + (y + hb)^2 - x^2 - y^2 = h\,(2xa + 2yb) + h^2$, so the slope is $2xa + 2yb$. Multiply out both sides to see that
            $(2xa + 2yb)^2 + (2xb - 2ya)^2 = (4x^2 + 4y^2)(a^2 + b^2) = 4x^2 + 4y^2$. The first square is therefore at most
            $4x^2 + 4y^2$, the squared length of the gradient, and reaches it only where the second square is 0: where $(a, b)$
            points along $(x, y)$.

            *Why $0.8^k$.* One step goes from $x$ to $x - 0.1 \cdot 2x = 0.8\,x$. Ten steps multiply by $0.8$
            ten times. A tenth of the slope is a fifth of $x$, and four fifths remain.""",
        undergraduate=r"""
            By Taylor's theorem $f(x + h) = f(x) + h f'(x) + \frac{h^2}{2} f''(\xi)$ for a $\xi$ between $x$ and
            $x + h$, so the quotient is off by $\frac h2 f''(\xi)$, and the centred one by $\frac{h^2}{6} f'''(\xi)$.
            In several variables $f(x + h u) = f(x) + h \langle \nabla f, u \rangle + o(h)$. By Cauchy and Schwarz
            $\langle \nabla f, u \rangle \le \|\nabla f\|$ for a unit vector $u$, and if $\nabla f \ne 0$ with equality only at
            $u = \nabla f / \|\nabla f\|$: the gradient is the steepest direction. On
            $\frac c2 x^2$ a step multiplies $x$ by $1 - \eta c$; here $c = 2$.""",
        research=r"""
            The derivative is the linear map $Df(x)$; the gradient is its representation by an inner product,
            $Df(x)[u] = \langle \nabla f, u \rangle$, and changes with it, so that *steepest* is a statement about a metric.
            Other norms give other steps: the maximum norm gives sign descent, the spectral norm orthogonalised
            matrices, as in `fenchel.optim.Muon`; the course returns to this in the space of scores. With unit
            round-off $\epsilon$ the forward quotient errs by about $\frac h2 |f''| + 2\epsilon |f| / h$,
            least at $h \sim \sqrt\epsilon$ where $f$ and $f''$ are of order 1; the centred one is best at $h \sim \epsilon^{1/3}$.
            `difference_jacobian` extrapolates two centred quotients to order $h^4$.""",
    )
    return


@app.cell
def _():
    def check(names):
        last = names["last_place"]
        x = last(lambda x: x * x, 3.0, 0.1, 10)
        assert x < 3.0, "On x squared from 3 you moved uphill: subtract the slope."
        assert abs(x - 0.32212) < 1e-3, (
            f"Ten steps on x squared from 3 should end at 0.3221, yours end at {x:.4f}. "
            "Is the slope measured at the new place each time, and is h small?"
        )
        x = last(lambda x: (x - 2) ** 4 / 4 + x, 0.0, 0.05, 200)
        assert abs(x - 1.0) < 1e-3, f"(x - 2)^4 / 4 + x is lowest at 1; you end at {x:.4f}."
        assert last(lambda x: x * x, 3.0, 0.1, 0) == 3.0, "No step leaves you where you are."

    exercise = Exercise(
        lesson="slopes",
        task="Write `last_place(f, x, rate, steps)`: where descent ends. You get the curve `f` and no formula "
        "for its slope, so measure it. The starter has the right loop and three mistakes.",
        starter="""
    def last_place(f, x, rate, steps):
        h = 1.0
        slope = (f(x + h) - f(x)) / h
        for _ in range(steps):
            x = x + rate * slope
        return x
    """,
        solution="""
    def last_place(f, x, rate, steps):
        h = 1e-5
        for _ in range(steps):
            slope = (f(x + h) - f(x - h)) / (2 * h)
            x = x - rate * slope
        return x
    """,
        check=check,
    )
    form = exercise.form()
    form
    return exercise, form


@app.cell
def _(exercise, form):
    exercise.verdict(form.value)
    return


@app.cell
def _():
    picker = run_picker()
    picker
    return (picker,)


@app.cell
def _(picker):
    run_path = picker.value
    return (run_path,)


@app.cell
def _(run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float64)
    _text = "we the people of the united states"
    ids = torch.tensor([own.tokenizer.encode_whole(_text)[: own.config.context]])
    weights = list(own.model.parameters())

    def loss():
        logits = own.model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])

    own.model.zero_grad()
    loss().backward()
    arrow = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights]
    length = math.sqrt(sum((g**2).sum().item() for g in arrow))

    @torch.no_grad()
    def loss_at(distance):
        """The loss after moving all weights a distance along the gradient; they are put back."""
        saved = [w.clone() for w in weights]
        for w, g in zip(weights, arrow, strict=True):
            w += distance / length * g
        value = loss().item()
        for w, s in zip(weights, saved, strict=True):
            w.copy_(s)
        return value

    _h = 1e-5
    felt = (loss_at(_h) - loss_at(-_h)) / (2 * _h)
    walk = [(d, loss_at(-d)) for d in (0.0, *(2.0**-k for k in range(20, -1, -1)))]
    mo.vstack(
        [
            mo.md(
                f"Your model has {sum(w.numel() for w in weights):,} weights: a landscape in that many "
                "directions, whose height is the *loss*, here the mean surprise ([cross-entropy](../cross_entropy/); in nats, the unit of natural "
                f"logarithms) at each next *token*, a word or a piece of one, of *{_text}*. Below, all weights move straight downhill, along the gradient."
            ),
            line_chart(
                [{"distance downhill": d, "loss": v} for d, v in walk],
                "distance downhill",
                "loss",
                title="Loss of your model along its gradient",
                points=True,
            ),
            claim(
                "DV-01 DV-03",
                f"Two measurements beside each other give the slope {felt:.6f}; the length of the gradient, computed "
                f"by [backpropagation](../backpropagation/), is {length:.6f}.",
                math.isclose(felt, length, rel_tol=1e-3),
            ),
            details(
                claim(
                    "OP-01",
                    "A small enough step downhill lowers the loss: "
                    f"from {walk[0][1]:.4f} to {min(v for _, v in walk):.4f} at best.",
                    min(v for _, v in walk) < walk[0][1],
                ),
            ),
        ]
    )
    return


@app.cell
def _(descent_text, gradient_text, limit_text, line_text):
    before = [
        len(text.split("$$")[0].split())
        for text in (line_text, limit_text, gradient_text, descent_text)
    ]
    # Evaluated and not shown: it is about the page.
    _ = claim(
        "PD-06",
        f"Each of the {len(before)} main formulas comes after a picture in words, {min(before)} words at least.",
        min(before) >= 40,
    )
    what_breaks(
        r"A corner has no slope: $|x|$ at 0 gives $+1$ from the right and $-1$ from the left, and networks "
        r"with ReLU are full of corners. A gradient of 0 need not be a lowest point; it may be a summit or a "
        r"pass. And *steps shrink by themselves* needs a learning rate that is small enough: above "
        r"$\eta = 1$ on $x^2$ every step is longer than the one before, as the next lesson shows."
    )
    return


@app.cell
def _():
    footer("slopes")
    return


if __name__ == "__main__":
    app.run()
