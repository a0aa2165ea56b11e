"""Constraints: Lagrange multipliers, the conditions of Karush, Kuhn and Tucker, and the dual."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Constraints: Lagrange multipliers and the KKT conditions",
)

with app.setup:
    import math

    import marimo as mo
    import torch
    from torch.autograd.functional import jacobian

    import fenchel
    from fenchel.lessons.convex_program import (
        ConvexProgram,
        dual_value,
        licq,
        multipliers,
        residuals,
        slater_point,
        solve,
    )
    from fenchel.lessons.scene import Scene, all_places
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
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
    header("lagrange")
    return


@app.cell
def _():
    guess = question(
        "A hill, and a straight fence that you must walk along. You stand at the highest point of "
        "the fence. In which direction does the slope of the hill rise?",
        ["along the fence", "straight across the fence", "in none: the ground is flat there"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "straight across the fence",
        "If it rose even a little along the fence, a step that way would lead higher. "
        "All that is left points across. It is not zero: the summit lies beyond the fence.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A hill and a fence

    The summit is at $(2, 2)$. At the point $(x, y)$ of the map you are

    $$f(x, y) = (x - 2)^2 + 2 (y - 2)^2$$

    metres below it. A fence runs where $x + y = 1$, and you have to stay on it. How close to the
    summit can you get? On the map, each ring is a line of equal height, and the blue arrow shows where the
    hill rises most steeply. Its orange part says how fast you climb per metre of fence, its green part how fast you would
    climb if the fence were not there. *Drag the blue ring along the fence. Where is the orange arrow gone, and how does the ring of your
    height then meet the fence?*
    """)
    return


@app.cell
def hill_and_fence():
    walk = Scene(
        "hill_and_fence",
        {"x": 1.0, "b": 1.0},
        places=all_places(x=[i / 20 for i in range(-30, 31)]),
        oneSided=False,
    )
    walk
    return (walk,)


@app.cell
def _():
    def depth(x):
        return (x[0] - 2.0) ** 2 + 2.0 * (x[1] - 2.0) ** 2

    def on_fence(x):
        return (x.sum() - 1.0).reshape(1)

    def slopes(x):
        """How fast the ground rises along the fence, and across it."""
        uphill = -jacobian(depth, x)
        return (uphill[0] - uphill[1]).item() / 2**0.5, uphill.sum().item() / 2**0.5

    def place(x):
        return torch.tensor([x, 1.0 - x], dtype=torch.float64)

    return depth, on_fence, place, slopes


@app.cell
def _(depth, place, slopes, walk):
    here = place(walk.state["x"])
    along, across = slopes(here)
    _better = depth(place(here[0].item() + math.copysign(0.01, along))).item()
    claim(
        "SM-27",
        f"At $x = {here[0]:g}$ you stand {depth(here):.3f} metres below the summit. The slope along the fence is {along:.3f}: "
        + (
            f"a step to the {'right' if along > 0 else 'left'} leads higher."
            if along
            else "no step along the fence leads higher."
        )
        + f" Across it, {across:.3f}, the fence is in the way.",
        math.isclose(math.hypot(along, across), jacobian(depth, here).norm().item())
        and (_better < depth(here).item()) == (along != 0),
    )
    return


@app.cell
def _():
    mo.md(r"""
    The best place is where the slope along the fence is 0. Lagrange's idea turns this into
    equations. Let $h(x, y) = x + y - 1$, which is 0 on the fence. The *gradient* $\nabla f$ is the
    list of the slopes of $f$ in the two directions of the map, and $\nabla h = (1, 1)$ points
    straight across the fence, its *normal*. Then "no slope along the fence" reads

    $$\nabla f + \nu\,\nabla h = 0, \qquad h = 0,$$

    with one new unknown $\nu$ (nu), the *multiplier*: $\nabla f$ is $-\nu$ times the normal. The sum
    $L = f + \nu h$ is called the *Lagrangian*.
    """)
    return


@app.cell
def _(depth, on_fence, place):
    fence = ConvexProgram(depth, equalities=on_fence)
    best = solve(fence, torch.zeros(2, dtype=torch.float64))
    at_best = residuals(fence, *best)
    # How much of the gradient is left when the part along the normal is taken off.
    left_over = [
        residuals(fence, *multipliers(fence, place(x))).stationarity.item()
        for x in (-1.0, 0.0, 1.0)
    ]
    moved = [
        solve(
            ConvexProgram(depth, equalities=lambda x, b=b: (x.sum() - b).reshape(1)),
            torch.zeros(2, dtype=torch.float64),
        )
        for b in (0.999, 1.001)
    ]
    gain = (depth(moved[0].x) - depth(moved[1].x)) / 0.002
    mo.vstack(
        [
            claim(
                "SM-28",
                r"There $\nabla f = (-4, -4) = -4\,\nabla h$ is a multiple of the normal. At "
                f"$x = -1$ and $x = 1$ a part of size {left_over[0]:.2f} and {left_over[2]:.2f} is left over: "
                "no multiplier works.",
                torch.allclose(
                    torch.func.grad(depth)(best.x),
                    torch.full((2,), -4.0, dtype=torch.float64),
                )
                and left_over[1] < 1e-9
                and min(left_over[0], left_over[2]) > 1.0,
            ),
            details(
                claim(
                    "SM-27",
                    f"The solver finds $(x, y) = (0, 1)$ and $\\nu = {best.nu.item():.0f}$; both equations "
                    "hold there to the last digits.",
                    torch.allclose(best.x, place(0.0), atol=1e-9)
                    and abs(best.nu.item() - 4.0) < 1e-9
                    and max(at_best.primal, at_best.stationarity) < 1e-9,
                ),
                claim(
                    "SM-27",
                    "The multiplier is a price. Move the fence towards the summit, to $x + y = 1 + \\varepsilon$: the best "
                    f"place rises by {gain.item():.3f} metres per unit of $\\varepsilon$, which is $\\nu$.",
                    abs(gain.item() - best.nu.item()) < 1e-3,
                ),
            ),
        ]
    )
    return (fence,)


@app.cell
def _():
    proof(
        school=r"""
            Walk along the fence from the best place by a small distance $s$: you go from $(0, 1)$ to $(s, 1 - s)$. The
            depth there is $(s - 2)^2 + 2(-1 - s)^2 = 6 + 3 s^2$. The terms with $s$ alone have cancelled,
            $-4 s + 4 s = 0$, and $3 s^2$ is never negative: every step along the fence leads down. Had a term
            $c\,s$ with $c \ne 0$ remained, a small step in one of the two directions would have led up, because
            $c\,s$ is larger than $3 s^2$ when $s$ is small. So "best on the fence" means "no slope along the fence".""",
        undergraduate=r"""
            Let $\nabla h$ have full row rank at $x^*$. By the implicit function theorem every direction $d$ with
            $\nabla h\, d = 0$ is the velocity of a curve in $\{h = 0\}$ through $x^*$. Along it $f$ has a minimum, so
            $\langle\nabla f, d\rangle = 0$. Hence $\nabla f \perp \ker \nabla h$, that is,
            $\nabla f \in \mathrm{range}(\nabla h^\top)$: there is $\nu$ with $\nabla f + \nabla h^\top \nu = 0$, and it is unique
            because $\nabla h^\top$ is injective. Let $v(b)$ be the minimum with $h = b$, with a differentiable minimiser $x(b)$. Then
            $v'(b) = \langle\nabla f, x'(b)\rangle = -\langle\nu, \nabla h\, x'(b)\rangle = -\nu$.""",
        research=r"""
            Between Banach spaces the rank condition becomes surjectivity of $h'(x^*)$: Lyusternik's theorem then gives the
            tangent space as the kernel, and the closed range theorem the multiplier in the dual space. Without it one
            has only Fritz John's condition, in which $\nabla f$ may carry the factor 0. For convex programs $-\nu$ is a
            subgradient of the value function $b \mapsto v(b)$, and existence of multipliers is its
            subdifferentiability at 0; Slater's condition gives that (Rockafellar 1970, sections 28 to 30).""",
    )
    return


@app.cell
def _(fence, place):
    # Two circles that touch in the origin: the only admissible point.
    touching = ConvexProgram(
        lambda x: x[0],
        equalities=lambda x: torch.stack(
            [x[0] ** 2 + (x[1] - 1) ** 2 - 1, x[0] ** 2 + (x[1] + 1) ** 2 - 1]
        ),
    )
    origin = torch.zeros(2, dtype=torch.float64)
    stuck = multipliers(touching, origin)
    no_way = torch.func.grad(lambda x: touching.lagrangian(x, stuck.mu, stuck.nu))(origin)
    details(
        claim(
            "E07",
            "One condition is easily forgotten, the *constraint qualification*: the normals of the "
            "constraints must be *linearly independent*: none is a sum of multiples of the others (the matrix $\\nabla h$ has full row "
            "rank). Our fence has a single normal that is not 0, so it holds. Two "
            "circles that touch in one point have parallel normals there; that point is the best for any $f$, since it is "
            f"the only one, and yet for $f = x$ a slope of {no_way.norm().item():.0f} remains that no multipliers cancel.",
            licq(fence, place(0.0))
            and not licq(touching, origin)
            and touching.h(origin).abs().max() == 0
            and abs(no_way.norm().item() - 1.0) < 1e-9,
        ),
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A fence that only blocks one side

    Now you may stand anywhere on the near side, $x + y \le b$. Two things can happen. Either the
    fence is in your way: then you lean against it, and it pushes back. Or the summit is on your side:
    then you stand on the summit, and the fence does nothing. The push is a multiplier again, called
    $\mu$ (mu) for an inequality $g \le 0$, here $g = x + y - b$. A fence can push, never pull, so $\mu \ge 0$. A fence
    that you do not touch does not push. These are the conditions of Karush, Kuhn and Tucker
    (*KKT*):

    | condition | formula | in words |
    | --- | --- | --- |
    | stationarity | $\nabla f + \mu\,\nabla g = 0$ | slope and push balance |
    | primal feasibility | $g \le 0$ | you are on your side |
    | dual feasibility | $\mu \ge 0$ | it pushes, never pulls |
    | complementary slackness | $\mu\,g = 0$ | no touch, no push |
    """)
    return


@app.cell
def fence_on_one_side():
    bound = Scene(
        "hill_and_fence",
        {"b": 1.0},
        places=all_places(b=[i / 2 for i in range(11)]),
        oneSided=True,
    )
    bound
    return (bound,)


@app.cell
def _(bound, depth):
    b = bound.state["b"]
    side = ConvexProgram(depth, lambda x: (x.sum() - b).reshape(1))
    found = solve(side, torch.full((2,), -3.0, dtype=torch.float64), gap=1e-9)
    held = residuals(side, *found)
    lowest = depth(found.x).item()
    push = max(0.0, 4.0 * (4.0 - b) / 3.0)
    _none = torch.zeros(0, dtype=torch.float64)
    _prices = [0.25 * i for i in range(33)]
    bounds_below = [
        dual_value(side, torch.tensor([m], dtype=torch.float64), _none, found.x).item()
        for m in _prices
    ]
    mo.vstack(
        [
            claim(
                "SM-30",
                f"With the fence at $b = {b:g}$ the solver finds ({found.x[0]:.3f}, {found.x[1]:.3f}) and the push "
                f"{found.mu.item():.3f}, as on the map. The four residuals of the solution (how far each condition is from holding): primal "
                f"{held.primal.item():.0e}, dual {held.dual.item():.0e}, slackness {held.slackness.item():.0e}, "
                f"stationarity {held.stationarity.item():.0e}.",
                max(held) < 1e-3
                and abs(found.mu.item() - push) < 1e-3
                and abs(found.x[0].item() - (2 - max(0, 4 - b) * 2 / 3)) < 1e-3,
            ),
            mo.md(
                r"""
                **The price instead of the fence.** Take the fence away and charge $\mu$ per metre beyond it (and pay
                $\mu$ per metre of room left). You then choose freely, and do at least as well as before, since a
                place on your side costs nothing. So the best $L = f + \mu g$, called the *dual function*, never
                exceeds the answer with the fence. Raise the price until it no longer does better: the two meet.
                """
            ),
            line_chart(
                [
                    {"price mu": m, "metres below the summit": v, "what": what}
                    for m, d in zip(_prices, bounds_below, strict=True)
                    for what, v in (("with a price: dual function", d), ("with the fence", lowest))
                ],
                "price mu",
                "metres below the summit",
                "what",
                title="The dual function",
                y_range=(-16, 12),
                here=[{"price mu": push, "metres below the summit": lowest}],
            ),
            claim(
                "SM-31",
                f"At every price the dual function stays below the answer, {lowest:.3f}; at the right price, "
                f"{push:.3f}, the *duality gap* is {held.gap.item():.0e}. Some point lies strictly on the near side "
                "(*Slater's condition*), which for a convex problem guarantees this.",
                max(bounds_below) <= lowest + 1e-6
                and abs(held.gap.item()) < 1e-6
                and slater_point(side, torch.full((2,), 5.0, dtype=torch.float64)) is not None,
            ),
        ]
    )
    return b, bounds_below, found, lowest, push


@app.cell
def _(b, bounds_below, depth, found, lowest, push):
    def by_price(m):
        return torch.tensor([2.0 - m / 2.0, 2.0 - m / 4.0], dtype=torch.float64)

    _recipe = [-3.0 * (0.25 * i) ** 2 / 8.0 + (4.0 - b) * 0.25 * i for i in range(33)]
    mo.vstack(
        [
            details(
                mo.md(r"""
            It works for every convex problem whose Lagrangian you can minimise by hand:

            1. Write $L = (x-2)^2 + 2(y-2)^2 + \mu (x + y - b)$.
            2. Minimise it without any fence (complete the square in $x$ and in $y$): $x = 2 - \mu/2$, $\;y = 2 - \mu/4$. Its minimum is
               $d(\mu) = (4 - b)\,\mu - \tfrac38 \mu^2$.
            3. Maximise $d$ over $\mu \ge 0$: $\mu = \tfrac43 (4 - b)$, or $0$ if that is negative.
            4. Put this $\mu$ into step 2.
            """),
                claim(
                    "SM-32",
                    f"The recipe gives $\\mu = {push:.3f}$ and the point ({by_price(push)[0].item():.3f}, "
                    f"{by_price(push)[1].item():.3f}), the same as the solver; its formula for $d$ is the curve above.",
                    torch.allclose(by_price(push), found.x, atol=1e-3)
                    and abs(depth(by_price(push)).item() - lowest) < 1e-4
                    and all(abs(r - d) < 1e-8 for r, d in zip(_recipe, bounds_below, strict=True)),
                ),
                title="The recipe",
            ),
        ]
    )
    return


@app.cell
def _(depth):
    def program(b):
        return ConvexProgram(depth, lambda x: (x.sum() - b).reshape(1))

    _none = torch.zeros(0, dtype=torch.float64)
    _cases = [
        ("the summit, beyond the fence", 1.0, (2.0, 2.0), 0.0),
        ("a fence that pulls", 5.0, (8 / 3, 7 / 3), -4 / 3),
        ("a push without a touch", 2.0, (0.0, 1.0), 4.0),
        ("any place on the near side", 1.0, (0.0, 0.0), 0.0),
    ]
    four = []
    for _, _b, _x, _mu in _cases:
        _r = residuals(
            program(_b),
            torch.tensor(_x, dtype=torch.float64),
            torch.tensor([_mu], dtype=torch.float64),
            _none,
        )
        four.append([round(r.item(), 9) for r in _r[:4]])
    _names = ["primal", "dual", "slackness", "stationarity"]
    caught = torch.tensor(four) > 0
    mo.vstack(
        [
            mo.md("Each condition rules out a mistake of its own:"),
            table(
                [
                    {"candidate": case[0]} | dict(zip(_names, row, strict=True))
                    for case, row in zip(_cases, four, strict=True)
                ]
            ),
            details(
                claim(
                    "SM-30",
                    "Four wrong answers, each with exactly one residual that is not 0, each time another one. "
                    "So none of the four conditions can be dropped.",
                    torch.equal(caught, torch.eye(4, dtype=torch.bool)),
                ),
            ),
        ]
    )
    return


@app.cell
def _(depth):
    # Sufficient: no point of the near side is better than the one that KKT certifies.
    _near = 4 * torch.randn(
        5000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    _near = _near[_near.sum(-1) <= 1.0]
    rivals = torch.func.vmap(depth)(_near)
    # Not necessary without Slater: x^2 <= 0 leaves only x = 0.
    needle = ConvexProgram(lambda x: x[0], lambda x: x.square())
    zero = torch.zeros(1, dtype=torch.float64)
    _none = torch.zeros(0, dtype=torch.float64)
    duals = [
        dual_value(needle, torch.tensor([m], dtype=torch.float64), _none, zero).item()
        for m in (1.0, 10.0, 100.0)
    ]
    # h not affine: the worst point of a circle is stationary too.
    circle = ConvexProgram(lambda x: x.sum(), equalities=lambda x: (x @ x - 2.0).reshape(1))
    top = torch.ones(2, dtype=torch.float64)
    _at_top = multipliers(circle, top)
    tilt = torch.func.grad(lambda x: circle.lagrangian(x, _at_top.mu, _at_top.nu))(top)
    details(
        mo.md(r"""
            For a *convex* program ($f$ and every $g$ curve upwards like a bowl: the straight line between two of their points is never below them; every equation $h = 0$ is a straight one, that is
            *affine*) two different things are true, and they need different assumptions.

            The first needs only one line. A convex $L = f + \mu g$ is lowest where it is stationary, at $x^*$, and $\mu g = 0$ there. So for every
            $x$ on your side $f(x^*) = L(x^*) \le L(x) = f(x) + \mu\,g(x) \le f(x)$, because $\mu \ge 0$ and $g(x) \le 0$.
            """),
        claim(
            "E04",
            f"KKT is **sufficient**, always: none of {len(rivals)} random points of the near side lies higher than "
            f"the certified $(0, 1)$; the best of them is {rivals.min().item():.2f} metres below the summit, the certified one 6.",
            rivals.min() >= 6.0,
        ),
        claim(
            "E04 SM-31",
            "KKT is **necessary** if Slater's condition holds. Without it a solution may have no multipliers: "
            "minimise $x$ subject to $x^2 \\le 0$. Only 0 is allowed, so 0 is best, but "
            f"$1 + \\mu \\cdot 2x = 1$ there. Prices 1, 10, 100 reach {duals[0]:g}, {duals[1]:g}, {duals[2]:g}: "
            "closer and closer to 0, and no price gets there.",
            slater_point(needle, zero + 1.0) is None
            and residuals(needle, *multipliers(needle, zero)).stationarity == 1
            and all(
                abs(d + 1 / (4 * m)) < 1e-6 for d, m in zip(duals, (1.0, 10.0, 100.0), strict=True)
            ),
        ),
        claim(
            "E04",
            "**Affine equations** matter. On the circle $x^2 + y^2 = 2$ the point $(1, 1)$ satisfies every condition "
            f"with $\\nu = {_at_top.nu.item():.1f}$, and $x + y = 2$ is the *largest* value there, not the least, "
            "which is $-2$.",
            tilt.abs().max() < 1e-9
            and circle.h(top).abs().max() < 1e-12
            and circle.objective(-top) < circle.objective(top),
        ),
        title="What the conditions guarantee, and when",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The unknown can be a whole curve

    You know little about a waiting time: it lies between 0 and 6 minutes, and perhaps its average. Which
    distribution claims least beyond that? The one with the
    largest *entropy* $-\int q \log q$, a measure of spread. The unknown is now a function $q$, the
    *density*: its area above a stretch of time is the probability of that stretch. Each thing that you know has a
    multiplier: $\nu_0$ for the whole area 1, $\nu_1$ for the mean, $\nu_2$ for the mean of $x^2$. The
    slope of the Lagrangian is 0 at every single point:

    $$\log q(x) + 1 + \nu_0 + \nu_1 x + \nu_2 x^2 = 0,$$

    $$q(x) = e^{-1 - \nu_0 - \nu_1 x - \nu_2 x^2}.$$

    The multipliers are the coefficients in the exponent. On a computer the curve is a list of 61 numbers.
    """)
    return


@app.cell
def _():
    known = mo.ui.dropdown(
        ["only the interval", "its mean, 2", "its mean, 2, and its variance, 0.8"],
        value="its mean, 2",
        label="What is known",
    )
    known
    return (known,)


@app.cell
def _(known):
    grid = torch.linspace(0.0, 6.0, 61, dtype=torch.float64)
    width = torch.full_like(grid, 0.1)
    width[0] = width[-1] = 0.05  # the trapezoidal rule

    def widest(powers, wanted):
        """The density of largest entropy with given moments, its multipliers, the moments."""
        moments = torch.stack([grid**k for k in powers])
        program = ConvexProgram(
            lambda q: (width * torch.special.xlogy(q, q)).sum(),
            equalities=lambda q: moments @ (width * q) - torch.tensor(wanted, dtype=torch.float64),
        )
        q, _, nu = solve(program, torch.full_like(grid, 1 / 6))
        return q, nu, moments

    _count = {"o": 1, "i": 2 + known.value.count("variance")}[known.value[0]]
    q, nu, moments = widest(range(_count), [1.0, 2.0, 4.8][:_count])
    exponent = q.log() + 1.0 + moments.T @ nu
    mo.vstack(
        [
            line_chart(
                [
                    {"minutes": x, "density": y}
                    for x, y in zip(grid.tolist(), q.tolist(), strict=True)
                ],
                "minutes",
                "density",
                title=f"Largest entropy, known: {known.value}",
                y_range=(0, 0.5),
            ),
            claim(
                "SM-29",
                f"Stationarity holds at each of the 61 points: the exponent is $-1 - \\sum_k \\nu_k x^k$ up to "
                f"{exponent.abs().max().item():.0e}.",
                exponent.abs().max() < 1e-8
                and (moments @ (width * q))[0].sub(1.0).abs() < 1e-9
                and (nu.numel() < 2 or abs((moments @ (width * q))[1].item() - 2.0) < 1e-9),
            ),
        ]
    )
    return grid, widest, width


@app.cell
def _(grid, widest, width):
    _middle = [1.0, 3.0, 9.0 + 0.25]  # mean 3 and variance 0.25: the ends of the interval are far
    bell, _, bell_moments = widest(range(3), _middle)
    gauss = torch.exp(-2.0 * (grid - 3.0) ** 2) / math.sqrt(math.pi / 2)
    flat, _, _ = widest(range(1), [1.0])
    twice = torch.cat([bell_moments, 2 * bell_moments[:1]])
    mo.vstack(
        [
            details(
                claim(
                    "SM-29",
                    "Nothing known: the uniform density. Mean 3 and variance 0.25: the bell curve of Gauss, to "
                    f"{(bell - gauss).abs().max().item():.0e}. Its formula was not put in: it follows from the moments and the entropy.",
                    torch.allclose(flat, torch.full_like(flat, 1 / 6), atol=1e-9)
                    and (bell - gauss).abs().max() < 1e-5,
                ),
                claim(
                    "E07 SM-29",
                    "The qualification in a space of functions: the linear map from changes of $q$ to changes of the "
                    "constraints must be *onto*: every small change of the constraints can be brought about. Here its matrix has rank 3 with 3 constraints. State one of them twice, and it "
                    "has 4 rows and rank 3: the multipliers are no longer unique.",
                    torch.linalg.matrix_rank(bell_moments * width) == 3
                    and twice.shape[0] == 4
                    and torch.linalg.matrix_rank(twice * width) == 3,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Softmax and sparsemax come out of KKT

    A distribution over $K$ alternatives is a point of the *simplex*
    $\Delta = \{p : p_i \ge 0,\ \sum_i p_i = 1\}$: one equation, $K$ inequalities. Give alternative $i$ a
    score $z_i$. Maximise the average score minus a cost for being one-sided. Two costs ($\propto$ reads *proportional to*: divide by
    the sum so that the weights add to 1):

    | cost | stationarity | solution |
    | --- | --- | --- |
    | $\sum_i p_i \log p_i$ | $z_i - \log p_i - 1 - \nu + \mu_i = 0$ | $p_i \propto e^{z_i}$: softmax |
    | $\tfrac12 \sum_i p_i^2$ | $z_i - p_i - \nu + \mu_i = 0$ | $p_i = \max(z_i - \nu, 0)$: sparsemax |

    $\log p$ falls without end towards 0, so the first cost keeps every $p_i$ off the fence $p_i = 0$ by itself, and
    every $\mu_i$ is 0. The second has a finite slope there: low scores lean against the fence.
    """)
    return


@app.cell
def _():
    lowered = mo.ui.slider(-2.0, 1.0, step=0.25, value=-0.5, label="Score of C", show_value=True)
    lowered
    return (lowered,)


@app.cell
def _(lowered):
    scores = torch.tensor([1.0, 0.75, lowered.value, 0.3], dtype=torch.float64)
    soft, sparse = fenchel.Softmax(), fenchel.Sparsemax()
    p, s = soft.weights(scores), sparse.weights(scores)
    p_prices = fenchel.choice.multipliers(soft, scores, p)
    s_prices = fenchel.choice.multipliers(sparse, scores, s)
    _names = ["A", "B", "C", "D"]
    stationary = scores - p.log() - 1.0 - p_prices.total
    mo.vstack(
        [
            bar_chart(
                [
                    {"alternative": n, "map": name, "weight": w, "push mu": m}
                    for name, weights, price in (
                        ("softmax", p, p_prices.floor),
                        ("sparsemax", s, s_prices.floor),
                    )
                    for n, w, m in zip(_names, weights.tolist(), price.tolist(), strict=True)
                ],
                "alternative",
                "weight",
                "map",
                title="Weights; the table shows the pushes too",
                y_range=(0, 1),
            ),
            claim(
                "SM-33",
                "Softmax: $z_i - \\log p_i - 1 - \\nu = 0$ for all four with one $\\nu = "
                f"{p_prices.total.item():.4f}$, and no push. Sparsemax: a push only where the weight is 0; here "
                f"{int((s_prices.floor > 1e-9).sum())} of 4 constraints push.",
                stationary.abs().max() < 1e-9
                and (p_prices.floor.abs() < 1e-9).all()
                and (s_prices.floor >= 0).all()
                and ((s_prices.floor > 1e-9) <= (s == 0)).all()
                and max(fenchel.kkt(sparse, scores, s)) < 1e-9,
            ),
            details(
                claim(
                    "SM-19",
                    "Both answers lie in the simplex: no negative entry, sum 1. The scores themselves do not.",
                    max(fenchel.kkt(soft, scores, w).primal for w in (p, s)) < 1e-9
                    and fenchel.kkt(soft, scores, scores).primal > 0.01,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _z = torch.tensor([1.0, 0.8, -3.0, 0.3], dtype=torch.float64)

    def _simplex(cost):
        return ConvexProgram(cost, lambda p: -p, lambda p: (p.sum() - 1.0).reshape(1))

    _middle = torch.full((4,), 0.25, dtype=torch.float64)
    by_entropy = solve(
        _simplex(lambda p: torch.special.xlogy(p, p).sum() - _z @ p), _middle, gap=1e-9
    )
    by_square = solve(_simplex(lambda p: 0.5 * p @ p - _z @ p), _middle, gap=1e-9)
    _lse = torch.logsumexp(_z, 0)
    _soft = fenchel.Softmax(beta=2.0)
    _nu = [
        fenchel.choice.multipliers(_soft, z, _soft.weights(z)).total.item() for z in (_z, _z + 1.0)
    ]
    mo.vstack(
        [
            details(
                claim(
                    "PD-20 SM-33",
                    "The general solver of this lesson, given the two problems and nothing else, returns softmax and "
                    "sparsemax. For the first all pushes vanish and the best total is "
                    f"$\\log \\sum_i e^{{z_i}} = {_lse.item():.4f}$, with $\\nu = {by_entropy.nu.item():.4f}$, one less.",
                    torch.allclose(by_entropy.x, fenchel.Softmax().weights(_z), atol=1e-6)
                    and torch.allclose(by_square.x, fenchel.Sparsemax().weights(_z), atol=1e-6)
                    and by_entropy.mu.max() < 1e-6
                    and torch.equal(by_square.mu > 0.01, by_square.x < 1e-6)
                    and abs(by_entropy.nu.item() - _lse.item() + 1.0) < 1e-6,
                ),
                claim(
                    "E05",
                    "Keep two letters apart that many books both call $\\lambda$: a multiplier ($\\mu$, $\\nu$) is *found*, "
                    "the inverse temperature $\\beta = 1/T$ is *chosen*. With $\\beta = 2$, raising all scores by 1 moves "
                    f"$\\nu$ from {_nu[0]:.3f} to {_nu[1]:.3f}; $\\beta$ and the weights stay.",
                    abs(_nu[1] - _nu[0] - 2.0) < 1e-9
                    and torch.allclose(_soft.weights(_z), _soft.weights(_z + 1.0)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        nearest = names["nearest"]
        n = torch.tensor([3.0, 4.0], dtype=torch.float64)
        for point, b in (((4.0, 7.0), 15.0), ((0.0, 1.0), 15.0), ((-2.0, 9.0), 5.0)):
            a = torch.tensor(point, dtype=torch.float64)
            x, mu = nearest(a, n, b)
            mu = float(mu)
            assert torch.is_tensor(x), "Return a tensor x and a number mu."
            assert float(n @ x) <= b + 1e-9, f"For a = {point} the point is beyond the fence."
            assert mu >= 0, f"For a = {point} the push is negative: a fence does not pull."
            assert abs(mu * (float(n @ x) - b)) < 1e-9, (
                f"For a = {point} there is a push without a touch: slackness fails."
            )
            assert torch.allclose(2 * (x - a) + mu * n, torch.zeros(2, dtype=torch.float64)), (
                f"For a = {point} stationarity fails: 2 (x - a) + mu n should be 0."
            )

    exercise = Exercise(
        lesson="lagrange",
        task="Write `nearest(a, n, b)`: the point $x$ nearest to $a$ among those with "
        r"$\langle n, x\rangle \le b$, and its multiplier $\mu$ for $f = |x - a|^2$ and "
        r"$g = \langle n, x\rangle - b$. ($\langle n, x\rangle$, the sum of the products $n_i x_i$, is `n @ x`.) The starter has the "
        r"stationary point for a given $\mu$; which $\mu$ puts it on the fence, and when is no push needed?",
        starter="""
    def nearest(a, n, b):
        mu = 0.0
        x = a - mu * n / 2  # stationarity: 2 (x - a) + mu n = 0
        return x, mu
    """,
        solution="""
    def nearest(a, n, b):
        # <n, a - mu n / 2> = b on the fence; no push if a is on the near side
        mu = max(0.0, float(2 * (n @ a - b) / (n @ n)))
        x = a - mu * n / 2
        return x, mu
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
    own = fenchel.load(run_path, dtype=torch.float32)
    ids = torch.tensor([own.tokenizer.encode_whole("the people of the")[: own.config.context]])
    with torch.no_grad():
        logits = own.model(ids)[0, -1].double()
    own_soft = fenchel.Softmax().weights(logits)
    own_sparse = fenchel.Sparsemax().weights(logits)
    own_prices = fenchel.choice.multipliers(fenchel.Sparsemax(), logits, own_sparse)
    certificate = fenchel.kkt(fenchel.Softmax(), logits, own_soft)
    _shown = logits.topk(6).indices
    mo.vstack(
        [
            mo.md(
                "After *the people of the* your model gives each token a *logit*, its score. Which token comes next is "
                "decided by a point of the simplex, with one constraint per token of the vocabulary:"
            ),
            table(
                [
                    {
                        "token": own.tokenizer.decode([i]),
                        "logit": logits[i].item(),
                        "softmax": own_soft[i].item(),
                        "sparsemax": own_sparse[i].item(),
                        "push mu (sparsemax)": own_prices.floor[i].item(),
                    }
                    for i in _shown.tolist()
                ]
            ),
            claim(
                "SM-30 SM-33",
                "The output of your model satisfies KKT, the largest residual is "
                f"{max(r.item() for r in certificate):.0e}. Sparsemax of the same logits would leave "
                f"{int((own_sparse > 0).sum())} tokens of {len(logits)}: on the others their constraint pushes.",
                max(certificate) < 1e-8
                and max(fenchel.kkt(fenchel.Sparsemax(), logits, own_sparse)) < 1e-8
                and ((own_prices.floor > 1e-9) <= (own_sparse == 0)).all(),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Convexity. On a landscape with several hills KKT still holds at every best point (with the qualification), but also at "
        r"saddles and at merely local tops, and the dual function may stay below the answer for good: the gap is then not 0. "
        r"Training a network is such a landscape; the choice of weights *inside* it, by softmax or sparsemax, is not."
    )
    return


@app.cell
def _():
    footer("lagrange")
    return


if __name__ == "__main__":
    app.run()
