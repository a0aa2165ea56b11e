"""Gradient flow and the learning rate: one loop, its continuous limit, momentum, schedules."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Gradient flow and the learning rate",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch.autograd.functional import jacobian

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
    from fenchel.optim import constant, sgd, sgd_average, warmup_cosine, warmup_linear


@app.cell
def _():
    header("gradient_flow")
    return


@app.cell
def _():
    guess = question(
        "Descent on $x^2$ subtracts the learning rate times the slope, $2x$. Which rate arrives at 0 in a single "
        "step, and which one never arrives although no step takes it further away?",
        [
            "1 arrives at once, 2 never",
            "0.5 arrives at once, 1 never",
            "0.1 arrives at once, 0.5 never",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "0.5 arrives at once, 1 never",
        "A step multiplies $x$ by $1 - 2\\eta$. That is 0 at $\\eta = 0.5$ and $-1$ at $\\eta = 1$: from 3 to "
        "$-3$ and back, for ever.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One loop for everything

    You tune a guitar string. Hear how far it is off, turn the peg the other way, not too far, listen
    again. Training has the same four parts: **measure** the slope, step **opposite** to it, **control** the size
    of the step, **repeat**. With $\theta$ (theta) for whatever is being tuned, $L$ for the *loss*, the number that says
    how wrong it still is, $\nabla L$ for its gradient, and $\eta$ (eta; some books write $\alpha$) for the learning rate:

    $$\theta_{k+1} = \theta_k - \eta\, \nabla L(\theta_k).$$

    Here it is in code. Every experiment of this lesson calls this one function.
    """)
    return


@app.function
def walk(gradient, start, rate, steps, momentum=0.0):
    """The places of a descent, the start included; ``rate`` is a number or a function of the step."""
    place, velocity, places = start, 0.0, [start]
    for step in range(steps):
        slope = gradient(place)  # measure
        velocity = momentum * velocity + slope  # without momentum, the slope itself
        size = rate(step) if callable(rate) else rate  # control
        place = place - size * velocity  # opposite
        places.append(place)
    return places  # repeated


@app.cell
def _():
    mo.md("""
    ```python
    def walk(gradient, start, rate, steps, momentum=0.0):
        place, velocity, places = start, 0.0, [start]
        for step in range(steps):
            slope = gradient(place)                        # measure
            velocity = momentum * velocity + slope         # without momentum, the slope itself
            size = rate(step) if callable(rate) else rate  # control
            place = place - size * velocity                # opposite
            places.append(place)
        return places                                      # repeated
    ```
    """)
    return


@app.cell
def _():
    _draw = torch.Generator().manual_seed(0)
    _X = torch.randn(20, 3, dtype=torch.float64, generator=_draw)
    _Y = torch.randn(20, 2, dtype=torch.float64, generator=_draw)
    _best = torch.linalg.lstsq(_X, _Y).solution
    fitted = walk(
        lambda W: 2 / 20 * _X.T @ (_X @ W - _Y), torch.zeros(3, 2, dtype=torch.float64), 0.1, 400
    )[-1]
    _x = torch.linspace(-2, 2, 32, dtype=torch.float64)

    def network_loss(theta):
        """A network with one hidden layer of 8 units, all its 25 weights in one vector."""
        w, b, u, c = theta[:8], theta[8:16], theta[16:24], theta[24]
        return ((torch.tanh(_x[:, None] * w + b) @ u + c - torch.sin(2 * _x)) ** 2).mean()

    _start = torch.randn(25, dtype=torch.float64, generator=_draw)
    trained = walk(lambda theta: jacobian(network_loss, theta), _start, 0.1, 300)
    losses = [network_loss(trained[k]).item() for k in (0, 300)]
    straight = walk(lambda p: 2 * p, torch.tensor([3.0, -4.0], dtype=torch.float64), 0.1, 10)
    mo.vstack(
        [
            claim(
                "OP-03",
                f"On the bowl $x^2 + y^2$ from $(3, -4)$ it goes straight to the origin: ten steps end at "
                f"$({straight[-1][0]:.4f}, {straight[-1][1]:.4f})$, each $0.8$ times the one before.",
                all(torch.allclose(b, 0.8 * a) for a, b in pairwise(straight))
                and round(straight[-1][0].item(), 4) == 0.3221,
            ),
            details(
                claim(
                    "BP-17",
                    "The same function, unchanged, tunes a number, a point, a matrix (a table of numbers) and a network ([backpropagation](../backpropagation/)): "
                    "the $3 \\times 2$ matrix of a linear fit ends where the sum of squared errors is least, which can be computed "
                    "directly, and the loss of a small network falls "
                    f"from {losses[0]:.2f} to {losses[1]:.3f}.",
                    abs(walk(lambda x: 2 * x, 3.0, 0.1, 60)[-1]) < 1e-4
                    and straight[-1].norm() < straight[0].norm()
                    and torch.allclose(fitted, _best, atol=1e-6)
                    and losses[1] < 0.2 * losses[0],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Too small, right, too large

    Turn the peg too timidly and you tune all evening. Turn it too far and the string is off on the other
    side; further still and each correction is worse than the error. On $x^2$ the slope is $2x$, so one step is

    $$x_{k+1} = x_k - \eta \cdot 2 x_k = (1 - 2\eta)\, x_k .$$
    """)
    return


@app.cell
def walk_on_the_parabola():
    strings = Scene(
        "walk_on_the_parabola",
        {"rate": 0.7, "start": 3.0, "steps": 5},
        low=0.02,
        high=1.2,
        steps=12,
        frame={"x": [-5, 5], "y": [-1, 25]},
        xTicks=[-4, -2, 0, 2, 4],
        yTicks=[0, 5, 10, 15, 20, 25],
        places=all_places(
            rate=[0.02, *(i / 10 for i in range(1, 13))], start=[0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
        ),
    )
    mo.vstack(
        [
            mo.md(
                "*Drag the orange ring, the tip of the first step. Where must it stand to arrive in one step? From where on does "
                "every step end higher than it began?*"
            ),
            strings,
        ]
    )
    return (strings,)


@app.cell
def _(strings):
    alpha = strings.state["rate"]
    parabola = walk(lambda x: 2 * x, strings.state["start"], alpha, 12)
    _factor = 1 - 2 * alpha
    regime = (
        "too small: it creeps"
        if alpha < 0.05
        else "it approaches from one side"
        if alpha < 0.5
        else "there in one step"
        if alpha == 0.5
        else "it overshoots, and still arrives"
        if alpha < 1
        else "back and forth for ever"
        if alpha == 1
        else "too large: it diverges"
    )
    mo.vstack(
        [
            mo.md(f"**Rate {alpha:g}: {regime}.**"),
            claim(
                "OP-04",
                f"Each step multiplies the place by $1 - 2\\eta$, here by {_factor:.4g}; 12 steps lead from {parabola[0]:g} to {parabola[-1]:.4g}. "
                "It shrinks exactly if $0 < \\eta < 1$, and changes sides exactly if $\\eta > 0.5$.",
                all(math.isclose(b, _factor * a, abs_tol=1e-12) for a, b in pairwise(parabola))
                and (abs(parabola[-1]) < parabola[0] * (1 - 1e-9)) == (alpha < 1)
                and (parabola[1] < -1e-12) == (alpha > 0.5),
            ),
        ]
    )
    return


@app.cell
def _():
    _swept = [k / 100 for k in range(-10, 131)]
    _ends = {a: walk(lambda x: 2 * x, 3.0, a, 2000 if 0 < a < 1 else 20) for a in _swept}
    mo.vstack(
        [
            details(
                claim(
                    "OP-04",
                    f"Of {len(_swept)} rates from {_swept[0]:g} to {_swept[-1]:g}, exactly those strictly between 0 and 1 "
                    "arrive; 0 stays at 3, 1 alternates between 3 and $-3$, 0.5 needs one step.",
                    all((abs(places[-1]) < 1e-9) == (0 < a < 1) for a, places in _ends.items())
                    and set(_ends[0.0]) == {3.0}
                    and set(_ends[1.0]) == {3.0, -3.0}
                    and _ends[0.5][1] == 0.0,
                ),
            ),
            mo.md(r"""
            The number 1 is special to $x^2$. What counts is the bend: the slope of $\frac c2 x^2$ is $c\,x$, so it changes by $c$ per
            unit, and the limit is $\eta < 2/c$; for $x^2$, $c = 2$. A landscape with many directions must respect the strongest bend of all.
            """),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The flow behind the steps

    A film is a row of still pictures. Take more pictures per second and the movement becomes smooth. Descent is such
    a film: make the steps shorter and take more of them. What it approaches is a continuous slide downhill, like a
    leaf in slow water, whose speed at each place is the slope:

    $$\frac{d\theta}{dt} = -\nabla L(\theta).$$

    The left side is the speed, the slope of $\theta$ over time; $t$ is time, and $n$ steps of rate $\eta$ take the time $n \eta$. Jumping along the
    speed for a time $\eta$, then measuring again, is *Euler's method*: gradient descent is exactly that. On
    $x^2$ from 3 the slide is known: $x(t) = 3 e^{-2t}$, with $e \approx 2.718$; in equal times it loses equal shares of
    what is left.
    """)
    return


@app.cell
def _():
    eta = mo.ui.slider(
        steps=[0.5, 0.25, 0.1, 0.05, 0.025, 0.0125],
        value=0.25,
        label=r"Learning rate $\eta$",
        show_value=True,
    )
    eta
    return (eta,)


@app.cell
def _(eta):
    jumps = walk(lambda x: 2 * x, 3.0, eta.value, round(1 / eta.value))
    _times = [k * eta.value for k in range(len(jumps))]
    _smooth = [k / 40 for k in range(41)]
    mo.vstack(
        [
            line_chart(
                [{"time": t, "x": x, "line": "descent"} for t, x in zip(_times, jumps, strict=True)]
                + [{"time": t, "x": 3 * math.exp(-2 * t), "line": "flow"} for t in _smooth],
                "time",
                "x",
                "line",
                title=f"Descent with rate {eta.value:g}, and the flow",
                y_range=(0, 3),
            ),
            claim(
                "OP-06",
                f"At time 1 descent is at {jumps[-1]:.4f} and the flow at {3 * math.exp(-2):.4f}. Descent runs ahead: "
                "it keeps the slope of the start of each step, and on $x^2$ the slope falls during the step.",
                all(x <= 3 * math.exp(-2 * t) + 1e-12 for t, x in zip(_times, jumps, strict=True)),
            ),
        ]
    )
    return


@app.cell
def _():
    flow = 3 * math.exp(-2)
    _rates = [0.1, 0.05, 0.025, 0.0125]
    ends = [walk(lambda x: 2 * x, 3.0, r, round(1 / r))[-1] for r in _rates]
    gaps = [flow - end for end in ends]
    mo.vstack(
        [
            table(
                [
                    {"rate": r, "steps": round(1 / r), "x at time 1": e, "gap to the flow": g}
                    for r, e, g in zip(_rates, ends, gaps, strict=True)
                ]
            ),
            details(
                claim(
                    "OP-06 E85",
                    "Ten steps of 0.1 end at 0.3221, eighty of 0.0125 at 0.3958, the flow at 0.4060. The gaps "
                    f"are {', '.join(f'{g:.3f}' for g in gaps)}: half the rate, half the gap. So *descent follows the flow* means: "
                    r"up to an error proportional to $\eta$, written $O(\eta)$ (first order), and not exactly.",
                    [round(x, 4) for x in (ends[0], ends[-1], flow)] == [0.3221, 0.3958, 0.4060]
                    and [round(g, 3) for g in gaps] == [0.084, 0.041, 0.020, 0.010]
                    and all(1.9 < a / b < 2.15 for a, b in pairwise(gaps)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Momentum

    A marble rolls; a slope does not move it at once but pushes it, and it keeps some of its speed. Give descent such a
    memory, a velocity $v$ that keeps the share $\beta$ (usually 0.9; in the lessons on choice $\beta$ has another meaning) in each step
    and adds the present slope $g$. There are two customs, and both are called momentum. The arrow $\leftarrow$ reads
    *becomes*:

    $$\begin{aligned}
    \text{average:} \quad & v \leftarrow \beta v + (1 - \beta)\, g \\
    \text{sum:} \quad & v \leftarrow \beta v + g \\
    \text{both:} \quad & \theta \leftarrow \theta - \eta v
    \end{aligned}$$

    The average is `fenchel.optim.sgd_average`; the sum is `fenchel.optim.sgd`, and what torch does by default.
    """)
    return


@app.cell
def _():
    def places_of(build, steps, gradient=lambda x: 2 * x):
        """x of an optimiser of torch from x = 3."""
        weight = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        optimiser = build([weight])
        places = [3.0]
        for _ in range(steps):
            weight.grad = gradient(weight.detach())
            optimiser.step()
            places.append(weight.item())
        return places

    average = places_of(lambda p: sgd_average(p, lr=0.1, momentum=0.9), 20)
    summed = places_of(lambda p: sgd(p, lr=0.1, momentum=0.9), 20)
    damped = places_of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), 20)
    by_hand, _v = [3.0], 0.0
    for _ in range(20):
        _v = 0.9 * _v + (1 - 0.9) * 2 * by_hand[-1]
        by_hand.append(by_hand[-1] - 0.1 * _v)
    shorter = walk(lambda x: 2 * x, 3.0, 0.1 * (1 - 0.9), 20, momentum=0.9)
    mo.vstack(
        [
            claim(
                "OP-07 E67",
                f"From 3 with $\\eta = 0.1$ the first step ends at {average[1]:.2f} by the average and at {summed[1]:.2f} by "
                "the sum, a step ten times as long. They are one method: the average with rate $\\eta$ is the sum with rate "
                r"$(1 - \beta)\eta$. A rate taken from a paper is worth nothing without the custom.",
                round(average[1], 2) == 2.94
                and round(summed[1], 2) == 2.40
                and math.isclose((3 - summed[1]) / (3 - average[1]), 10.0)
                and all(
                    math.isclose(a, b, rel_tol=1e-9) for a, b in zip(shorter, average, strict=True)
                ),
            ),
            details(
                claim(
                    "OP-07",
                    f"The average, written out, agrees with the library for 20 steps; they end at {average[-1]:.4f}.",
                    all(
                        math.isclose(a, b, rel_tol=1e-9)
                        for a, b in zip(by_hand, average, strict=True)
                    ),
                ),
                claim(
                    "E67",
                    r"torch's `dampening` $= \beta$ is neither of them: it leaves the first gradient undamped, so its first "
                    f"step also ends at {damped[1]:.2f}; its second one matches neither custom.",
                    round(damped[1], 2) == 2.40
                    and abs(damped[2] - summed[2]) > 0.1
                    and abs(damped[2] - average[2]) > 0.1,
                ),
            ),
        ]
    )
    return (places_of,)


@app.cell
def _():
    mo.md(r"""
    ### What momentum does: a bump and a ravine

    The first landscape is a valley with a small bump on its slope: $\frac12 x^2$ plus a hump at 1.5. The second is a
    ravine, $\frac12 x^2 + \frac{50}{2} y^2$, fifty times as steep across as along. Choose $\beta$.
    """)
    return


@app.cell
def _():
    beta = mo.ui.slider(
        steps=[0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95],
        value=0.9,
        label=r"Momentum $\beta$ (sum)",
        show_value=True,
    )
    beta
    return (beta,)


@app.cell
def _():
    def bump_slope(x):
        """Of x^2 / 2 + 0.6 exp(-((x - 1.5) / 0.25)^2)."""
        return x - 0.6 * 2 * (x - 1.5) / 0.25**2 * math.exp(-(((x - 1.5) / 0.25) ** 2))

    curvature = torch.tensor([1.0, 50.0], dtype=torch.float64)

    def ravine_slope(point):
        return curvature * point

    line_chart(
        [
            {"x": x, "height": x**2 / 2 + 0.6 * math.exp(-(((x - 1.5) / 0.25) ** 2))}
            for x in (k / 20 for k in range(-30, 63))
        ],
        "x",
        "height",
        title="The valley with a bump; every walk starts at 3",
    )
    return bump_slope, curvature, ravine_slope


@app.cell
def _(beta, bump_slope, ravine_slope):
    _corner = torch.tensor([10.0, 1.0], dtype=torch.float64)
    _memories = sorted({0.0, beta.value})
    _bump = {m: walk(bump_slope, 3.0, 0.02, 250, momentum=m) for m in _memories}
    _ravine = {m: walk(ravine_slope, _corner, 0.02, 250, momentum=m) for m in _memories}
    mo.vstack(
        [
            line_chart(
                [
                    {"step": k, "x": x, "momentum": f"{m:g}"}
                    for m, places in _bump.items()
                    for k, x in enumerate(places)
                    if k % 5 == 0
                ],
                "step",
                "x",
                "momentum",
                title=f"Valley with a bump: momentum {beta.value:g} ends at x = {round(_bump[beta.value][-1], 3) + 0.0:.3f}",
                y_range=(-3, 3.2),
            ),
            line_chart(
                [
                    {"step": k, "distance": p.norm().item(), "momentum": f"{m:g}"}
                    for m, places in _ravine.items()
                    for k, p in enumerate(places)
                    if k % 5 == 0
                ],
                "step",
                "distance",
                "momentum",
                title=f"Ravine: distance {_ravine[beta.value][-1].norm():.2g} after 250 steps",
                y_range=(1e-8, 20),
                log_y=True,
            ),
        ]
    )
    return


@app.cell
def _(bump_slope, curvature, places_of, ravine_slope):
    stuck = walk(bump_slope, 3.0, 0.02, 2000)[-1]
    passed = walk(bump_slope, 3.0, 0.02, 2000, momentum=0.9)[-1]
    steady = places_of(lambda p: sgd(p, lr=0.01, momentum=0.9), 200, torch.ones_like)
    _signs = iter([1.0, -1.0] * 100)
    zigzag = places_of(
        lambda p: sgd(p, lr=0.01, momentum=0.9), 200, lambda x: next(_signs) * torch.ones_like(x)
    )
    _low, _high = curvature.tolist()
    _corner = torch.tensor([10.0, 1.0], dtype=torch.float64)

    def arrival(rate, momentum):
        """Steps until the distance stays below a hundredth."""
        far = [p.norm() > 0.01 for p in walk(ravine_slope, _corner, rate, 600, momentum)]
        return 1 + max(k for k, is_far in enumerate(far) if is_far)

    _root = (math.sqrt(_high) - math.sqrt(_low)) / (math.sqrt(_high) + math.sqrt(_low))
    best_plain = arrival(2 / (_low + _high), 0.0)
    best_heavy = arrival(4 / (math.sqrt(_low) + math.sqrt(_high)) ** 2, _root**2)
    mo.vstack(
        [
            claim(
                "OP-08",
                f"*It passes small bumps.* From 3, plain descent stops in front of the bump, at {stuck:.3f}; with $\\beta = "
                f"0.9$ the same rate arrives at {abs(passed):.1e}.",
                stuck > 1.5 and abs(bump_slope(stuck)) < 1e-9 and abs(passed) < 1e-6,
            ),
            claim(
                "OP-08",
                f"*A ravine needs both.* With the settings that guarantee the fastest approach for each, plain descent needs {best_plain} steps to come within "
                f"0.01 of the bottom, momentum {best_heavy}.",
                best_heavy < best_plain / 3,
            ),
            details(
                claim(
                    "OP-08",
                    "*It speeds up where slopes agree and slows down where they change sign.* A constant slope drives the step to "
                    f"{(steady[-2] - steady[-1]) / 0.01:.2f} times that of plain descent, an alternating one to "
                    rf"{abs(zigzag[-2] - zigzag[-1]) / 0.01:.3f} times: $\frac1{{1-\beta}}$ and $\frac1{{1+\beta}}$.",
                    math.isclose((steady[-2] - steady[-1]) / 0.01, 1 / (1 - 0.9), rel_tol=1e-4)
                    and math.isclose(
                        abs(zigzag[-2] - zigzag[-1]) / 0.01, 1 / (1 + 0.9), rel_tol=1e-4
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    # x'' + a x' + 2 x = 0 from x = 3 at rest, at time 3, for the friction a = 1.
    _a, _T = 1.0, 3.0
    _w = math.sqrt(2 - _a**2 / 4)
    marble = 3 * math.exp(-_a * _T / 2) * (math.cos(_w * _T) + _a / (2 * _w) * math.sin(_w * _T))
    ticks = [0.1, 0.05, 0.025, 0.0125]
    heavy = [
        walk(lambda x: 2 * x, 3.0, s**2, round(_T / s), momentum=1 - _a * s)[-1] for s in ticks
    ]
    heavy_gaps = [abs(x - marble) for x in heavy]
    # A small rate and a fixed beta: the flow, 1 / (1 - beta) times as fast.
    hurried = walk(lambda x: 2 * x, 3.0, 1e-5, round(0.1 / 1e-5), momentum=0.9)[-1]
    _n = 200
    clocks = {
        "constant": constant(),
        "linear": warmup_linear(0, _n),
        "warm-up and cosine": warmup_cosine(40, _n),
    }

    def of_sum_1(factor):
        """The schedule, divided by the sum of its factors."""
        total = sum(factor(k) for k in range(_n))
        return lambda k: factor(k) / total

    played = {
        name: walk(lambda x: 2 * x, 3.0, of_sum_1(factor), _n) for name, factor in clocks.items()
    }
    details(
        mo.md(r"""
    Plain descent is a leaf in honey: take the push away and it stops. A marble in water has mass and friction.
    Newton's law for it, with acceleration $\ddot\theta$ and speed $\dot\theta$ (one dot per derivative in time), is

    $$\ddot\theta + a\,\dot\theta = -\nabla L(\theta), \qquad a = \frac{1 - \beta}{\sqrt{\eta}},$$

    and momentum steps, in the form of the sum, are its film, one picture per $\sqrt\eta$ of time. A *schedule* changes the rate during training.
    In the flow it changes the clock only: the same slide, played faster or slower,

    $$\dot\theta = -s(t)\,\nabla L(\theta).$$

    $s(t)$ is the rate at time $t$. The new clock shows the sum of all rates so far.
    """),
        line_chart(
            [
                {"step": k, "x": x, "schedule": name}
                for name, places in played.items()
                for k, x in enumerate(places)
                if k % 5 == 0
            ],
            "step",
            "x",
            "schedule",
            title="Three schedules whose rates sum to 1",
        ),
        claim(
            "OP-29",
            f"*Momentum.* The marble is at {marble:.4f} at time 3. With $\\sqrt\\eta = 0.1, 0.05, 0.025, 0.0125$ the steps miss "
            f"it by {', '.join(f'{g:.3f}' for g in heavy_gaps)}: first order again.",
            all(1.7 < x / y < 2.3 for x, y in pairwise(heavy_gaps)),
        ),
        claim(
            "OP-29",
            "*Momentum, tiny rates.* With $\\beta = 0.9$ fixed and $\\eta = 10^{-5}$ the mass no longer counts. Rates that "
            f"sum to 0.1 end at {hurried:.3f}, where plain descent needs a sum of 1: the flow, ten times as fast.",
            math.isclose(hurried, 3 * math.exp(-2), rel_tol=0.01),
        ),
        claim(
            "OP-29",
            "*Schedules.* Three shapes, the same sum of rates, nearly the same end: "
            f"{', '.join(f'{places[-1]:.4f}' for places in played.values())}; the flow says {3 * math.exp(-2):.4f}.",
            all(abs(p[-1] - 3 * math.exp(-2)) < 0.01 for p in played.values())
            and max(p[100] for p in played.values()) - min(p[100] for p in played.values()) > 0.1,
        ),
        title="Momentum and schedules, seen as flows",
    )
    return


@app.cell
def _():
    _n = 400

    def spread(factor, seed):
        """Mean square of 4,000 walkers on x^2 whose slopes carry noise of deviation 1."""
        draw = torch.Generator().manual_seed(seed)
        return (
            walk(
                lambda x: 2 * x + torch.randn(4000, dtype=torch.float64, generator=draw),
                torch.full((4000,), 3.0, dtype=torch.float64),
                lambda k: 0.1 * factor(k),
                _n,
            )[-1]
            .square()
            .mean()
            .item()
        )

    restless = spread(constant(), 0)
    calmed = spread(warmup_cosine(0, _n), 1)
    theory = 0.1 / (4 * (1 - 0.1))
    details(
        claim(
            "OP-29",
            "*And what the flow does not show.* If slopes carry noise, as in training on random batches, a constant rate never "
            f"settles: its mean square stays at {restless:.4f} (theory: $\\eta / (4(1 - \\eta)) = {theory:.4f}$ for noise of "
            f"mean 0 and mean square 1). A cosine schedule to 0 ends at {calmed:.5f}. This is why rates are lowered at the end.",
            math.isclose(restless, theory, rel_tol=0.1) and calmed < 0.1 * restless,
        ),
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            *Why 0.5 and 1.* One step turns $x$ into $(1 - 2\eta)x$. Repeated multiplication by a number $r$ shrinks to 0
            exactly if $-1 < r < 1$, that is, $0 < \eta < 1$. For $r = 0$ one step is enough; for $r < 0$ the sign changes each
            time; for $r = -1$ only the sign changes.

            *Why half the rate gives half the gap.* Within one step descent keeps the slope of its start. The longer the step, the
            more the true slope has changed: the mistake of one step grows with its length *squared*. Half the length means a
            quarter of the mistake per step, and twice as many steps: half in all.

            *Why $1/(1-\beta)$.* With slope 1 the velocity settles where a step changes nothing: $v = \beta v + 1$, so $v = 1/(1 -
            \beta)$, 10 for $\beta = 0.9$. With signs alternating, $v$ and then $-v$: $-v = \beta v - 1$, so $v = 1/(1+\beta)$.""",
        undergraduate=r"""
            *Limit of the rate.* On a quadratic with positive definite Hessian $H$ the error is multiplied by $I - \eta H$; it converges from every
            start iff $0 < \eta < 2 / \lambda_{\max}(H)$. The best rate $2/(\lambda_{\min} + \lambda_{\max})$ contracts by
            $(\kappa - 1)/(\kappa + 1)$ per step, $\kappa = \lambda_{\max}/\lambda_{\min}$.

            *Euler's error.* $(1 - 2\eta)^{1/\eta} = e^{\frac1\eta \log(1 - 2\eta)} = e^{-2 - 2\eta - O(\eta^2)} = e^{-2}(1 - 2\eta) + O(\eta^2)$: on
            $x^2$ from 3 the gap is $6 e^{-2} \eta \approx 0.81\,\eta$.

            *Momentum as an ODE.* Eliminating $v$: $\theta_{k+1} - 2\theta_k + \theta_{k-1} = -(1-\beta)(\theta_k - \theta_{k-1}) - \eta
            \nabla L$. Divide by $s^2 = \eta$: the left side tends to $\ddot\theta$, and $(1-\beta)/s$ multiplies $\dot\theta$.

            *Clock.* With $\tau(t) = \int_0^t s$, $\theta(t) = \phi(\tau(t))$ solves $\dot\theta = -s \nabla L$ if $\phi' = -\nabla L(\phi)$.""",
        research=r"""
            Modified equations: descent is, to second order, the flow of $L + \frac\eta4 \|\nabla L\|^2$ (Barrett and Dherin 2021).
            Training at a fixed rate often sits near $\lambda_{\max} \approx 2/\eta$, where the flow is no longer a good model (Cohen et al.
            2021). Polyak's heavy ball (1964) contracts a quadratic by $(\sqrt\kappa - 1)/(\sqrt\kappa + 1)$ per step, asymptotically, with
            the settings used above. Nesterov's method with its growing momentum has the friction $3/t$ (Su, Boyd and Candès 2014). With noise the
            limit is a stochastic differential equation whose diffusion is proportional to $\eta$; schedules then trade bias for
            variance, which a change of clock alone cannot express.""",
    )
    return


@app.cell
def _():
    def check(names):
        descend = names["momentum"]
        one = descend(lambda x: 2 * x, 3.0, 0.1, 0.9, 1)
        assert abs(one - 2.40) > 1e-9, (
            "One step from 3 ends at 2.40: that is the sum. The average weights the new slope by 1 - beta and ends at 2.94."
        )
        assert abs(one - 2.94) < 1e-9, (
            f"One step from 3 should end at 2.94, yours ends at {one:.4f}."
        )
        plain = descend(lambda x: 2 * x, 3.0, 0.1, 0.0, 10)
        assert abs(plain - 3 * 0.8**10) < 1e-9, (
            "With beta = 0 it should be plain descent, 0.3221 after 10 steps."
        )
        expected, v = 3.0, 0.0
        for _ in range(25):
            v = 0.8 * v + 0.2 * (expected**3)
            expected -= 0.05 * v
        found = descend(lambda x: x**3, 3.0, 0.05, 0.8, 25)
        assert abs(found - expected) < 1e-9, (
            "On another slope, x cubed, 25 steps differ: keep v between steps."
        )

    exercise = Exercise(
        lesson="gradient_flow",
        task="Write `momentum(slope, x, rate, beta, steps)`: where momentum in its *average* form ends, from "
        "velocity 0. The starter has the other form.",
        starter="""
    def momentum(slope, x, rate, beta, steps):
        v = 0.0
        for _ in range(steps):
            v = beta * v + slope(x)
            x = x - rate * v
        return x
    """,
        solution="""
    def momentum(slope, x, rate, beta, steps):
        v = 0.0
        for _ in range(steps):
            v = beta * v + (1 - beta) * slope(x)
            x = x - rate * v
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
    theta = torch.nn.utils.parameters_to_vector(own.model.parameters()).detach()

    def loss_and_gradient(vector):
        """Of the model with these weights on the text."""
        torch.nn.utils.vector_to_parameters(vector, own.model.parameters())
        logits = own.model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
        weights = list(own.model.parameters())
        parts = torch.autograd.grad(loss, weights, allow_unused=True)
        filled = [
            torch.zeros_like(w) if g is None else g for w, g in zip(weights, parts, strict=True)
        ]
        return loss.item(), torch.nn.utils.parameters_to_vector(filled).detach()

    loss, slope = loss_and_gradient(theta)
    length = slope.norm().item()
    _unit = slope / length
    _h = 1e-4
    own_bend = (
        _unit
        @ (loss_and_gradient(theta + _h * _unit)[1] - loss_and_gradient(theta - _h * _unit)[1])
    ).item() / (2 * _h)
    limit = 2 / max(abs(own_bend), 1e-3)
    tried = [(r * limit, loss_and_gradient(theta - r * limit * slope)[0]) for r in
             (0.001, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)]  # fmt: skip
    _small = 1e-5 / length
    _after = loss_and_gradient(theta - _small * slope)[0]
    _expected = loss - _small * length**2 + _small**2 * length**2 * own_bend / 2
    _parabola = (
        f"A parabola of that bend is back at its starting height at the rate $2/{own_bend:.3g} = {limit:.3g}$, and "
        "lowest at half of it."
        if own_bend > 0
        else "It bends downwards there: the slope steepens along the way, and no parabola says where to stop."
    )
    mo.vstack(
        [
            mo.md(
                f"One step of plain descent on your model, with twelve rates, on *{_text}*. The loss before is {loss:.4f} nats. "
                f"Along its gradient the loss bends by {own_bend:.3g} per unit. {_parabola}"
            ),
            line_chart(
                [{"rate": r, "loss after one step": v} for r, v in tried],
                "rate",
                "loss after one step",
                title="One step of descent on your model",
                log_x=True,
                points=True,
            ),
            claim(
                "OP-04 BP-17",
                f"For a short step the parabola is right: it predicts a drop of {loss - _expected:.4g}, the model drops by "
                f"{loss - _after:.4g}.",
                math.isclose(loss - _after, loss - _expected, rel_tol=0.02),
            ),
            details(
                claim(
                    "OP-06",
                    "That short step lowers the loss. Near the flow, downhill is downhill; of the rates in the chart, "
                    f"{sum(v < loss for _, v in tried)} of {len(tried)} do.",
                    _after < loss,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The limit $2/c$ is that of a parabola. On a real loss the bend changes from place to place, and a rate that "
        r"diverges at the start may be harmless later; this is one reason to begin with a warm-up. Momentum passes *small* bumps: "
        r"arrive too slowly, or meet a taller one, and it stays in front; and it rolls past good places too. The flow is "
        r"a limit of small rates: close to $2/c$ steps zigzag, and no flow does."
    )
    return


@app.cell
def _():
    footer("gradient_flow")
    return


if __name__ == "__main__":
    app.run()
