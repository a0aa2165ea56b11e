"""Vectors and similarity: length, inner product, distance and cosine, in few and many dimensions."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Vectors and similarity in high dimension",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.nn.functional import cosine_similarity, cross_entropy, linear, normalize

    import fenchel
    from fenchel.data import TextTokenizer
    from fenchel.evaluate import nearest_rows, neighbours
    from fenchel.lessons.scene import Scene
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
    header("similarity")
    return


@app.cell
def _():
    guess = question(
        "Draw two arrows at random, in a space of 1,000 dimensions. What is the angle between them?",
        ["anything from 0 to 180 degrees", "close to 90 degrees", "close to 0 degrees"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "close to 90 degrees",
        "Nearly always between 85 and 95 degrees. With so many directions to choose from, two of them "
        "rarely have anything in common.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Four numbers about two lists

    A *vector* is a list of numbers. Here, invented grades from 0 to 1 for *furry*, *barks* and
    *large*:

    cat $u = (0.8,\ 0.2,\ 0.1)$, dog $v = (0.7,\ 0.3,\ 0.2)$.

    How similar are they? Four everyday ideas, each with its formula. The index $i$ runs over the
    entries.

    - **How far is it as the crow flies?** Walk 3 streets east and 4 north, and you are 5 away
      (Pythagoras). That is the *length*, or *norm*: $\|u\| = \sqrt{\sum_i u_i^2}$.
    - **How far from one to the other?** The *Euclidean distance* is the length of the difference:
      $\|u - v\|$.
    - **What does the shopping cost?** Amount times price, summed: the *inner product*
      $\langle u, v \rangle = \sum_i u_i v_i$. It is large where both lists are large in the same places.
    - **Is it the same melody?** Played louder it is still the same. Divide both lengths out, and only
      the direction is left, the *cosine*:

    $$\cos(u, v) = \frac{\langle u, v \rangle}{\|u\|\,\|v\|}.$$
    """)
    return


@app.cell
def two_arrows():
    arrows = Scene("two_arrows", {"ux": 1.6, "uy": 0.4, "length": 1.4, "angle": 1.05})
    mo.vstack(
        [
            mo.md(
                "A list of two numbers is an arrow on paper. *Drag the tips. Stretch $v$: which of the three numbers stays? Turn $v$ until the "
                "inner product is 0, then further.*"
            ),
            arrows,
        ]
    )
    return (arrows,)


@app.cell
def _(arrows):
    cat = torch.tensor([0.8, 0.2, 0.1], dtype=torch.float64)
    dog = torch.tensor([0.7, 0.3, 0.2], dtype=torch.float64)
    _turn = arrows.state["angle"]
    u_arrow = torch.tensor([arrows.state["ux"], arrows.state["uy"]], dtype=torch.float64)
    v_arrow = arrows.state["length"] * torch.tensor(
        [math.cos(_turn), math.sin(_turn)], dtype=torch.float64
    )
    return cat, dog, u_arrow, v_arrow


@app.cell
def _(cat, dog, u_arrow, v_arrow):
    product = sum(a * b for a, b in zip(cat.tolist(), dog.tolist(), strict=True))
    lengths = [sum(a * a for a in w.tolist()) ** 0.5 for w in (cat, dog)]
    squares = sum((a - b) ** 2 for a, b in zip(cat.tolist(), dog.tolist(), strict=True))
    plain = product / (lengths[0] * lengths[1])
    early = round(round(lengths[0], 2) * round(lengths[1], 2), 2)
    pairs = torch.randn(
        2, 10_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    cosines = cosine_similarity(*pairs, dim=-1)
    _cosine = cosine_similarity(u_arrow, v_arrow, dim=0)
    parallel = torch.tensor([2.0, -3.0, -1.0], dtype=torch.float64)
    mo.vstack(
        [
            claim(
                "GE-01 GE-02",
                f"The inner product of cat and dog is {product:.2f}, their lengths are {lengths[0]:.4f} "
                f"and {lengths[1]:.4f}; torch agrees.",
                f"{product:.2f} {lengths[0]:.4f} {lengths[1]:.4f}" == "0.64 0.8307 0.7874"
                and abs(product - (cat @ dog).item()) < 1e-12
                and abs(lengths[0] - cat.norm().item()) < 1e-12,
            ),
            claim(
                "E43 GE-16",
                f"Your arrows have the cosine {_cosine:.3f}, and so have $u$ and $2v$: stretching changes the inner product and the "
                "distance only. A cosine of 1 means the same direction, not the same vector: it is 1 for $v$ and $2v$ too.",
                torch.isclose(_cosine, cosine_similarity(u_arrow, 2 * v_arrow, dim=0), atol=1e-12)
                and torch.isclose(
                    cosine_similarity(parallel, 2 * parallel, dim=0), parallel.new_tensor(1.0)
                )
                and not torch.equal(parallel, 2 * parallel),
            ),
            details(
                claim(
                    "GE-06 E16",
                    f"Their cosine is {plain:.4f}. Round late: with lengths rounded to {lengths[0]:.2f} and {lengths[1]:.2f} first, and their "
                    f"product to {early:.2f}, it looks like {product / early:.2f}.",
                    f"{plain:.4f}" == "0.9785"
                    and f"{early:.2f} {product / early:.2f}" == "0.66 0.97"
                    and f"{plain:.2f}" == "0.98",
                ),
                claim(
                    "GE-04 GE-07",
                    f"The differences are 0.1, -0.1, -0.1. Their squares sum to {squares:.2f}, so the distance "
                    f"is {squares**0.5:.4f}.",
                    f"{squares:.2f} {squares**0.5:.4f}" == "0.03 0.1732"
                    and abs(squares**0.5 - (cat - dog).norm().item()) < 1e-12,
                ),
                claim(
                    "GE-05",
                    "A cosine lies between -1 (opposite) and 1 (same direction). Over 10,000 random pairs the "
                    f"extremes are {cosines.min().item():.4f} and {cosines.max().item():.4f}.",
                    (cosines.abs() <= 1 + 1e-12).all()
                    and torch.isclose(cosine_similarity(cat, -cat, dim=0), cat.new_tensor(-1.0)),
                ),
                claim(
                    "GE-16",
                    r"The inner product mixes two things, angle and length: $\langle u, v \rangle = \|u\|\,\|v\| \cos(u, v)$. For your "
                    f"arrows, {u_arrow @ v_arrow:.3f} = {u_arrow.norm():.3f} · {v_arrow.norm():.3f} · {_cosine:.3f}.",
                    torch.isclose(
                        u_arrow @ v_arrow, u_arrow.norm() * v_arrow.norm() * _cosine, atol=1e-12
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One identity ties them together

    Distance and inner product are two views of the same triangle. Multiply out each square
    $(u_i - v_i)^2 = u_i^2 - 2 u_i v_i + v_i^2$ and add up:

    $$\|u - v\|^2 = \|u\|^2 + \|v\|^2 - 2 \langle u, v \rangle .$$

    For *unit vectors*, those of length 1, the right side is $2 - 2\cos(u, v)$. The larger the cosine,
    the smaller the distance: whoever sorts by one has sorted by the other.
    """)
    return


@app.cell
def _():
    generator = torch.Generator().manual_seed(1)
    agreement = {}
    worst = 0.0
    for d_ in (3, 10, 100, 1000):
        stored = normalize(torch.randn(500, d_, dtype=torch.float64, generator=generator), dim=-1)
        asked = normalize(torch.randn(50, d_, dtype=torch.float64, generator=generator), dim=-1)
        products = asked @ stored.T
        distances = (asked[:, None] - stored).norm(dim=-1)
        worst = max(worst, (distances.square() - (2 - 2 * products)).abs().max().item())
        same = products.argsort(descending=True) == distances.argsort()
        agreement[d_] = same.all(-1).double().mean().item()
    claim(
        "GE-10 E42",
        "Unit vectors: 50 queries sort 500 vectors by cosine and by distance. Share of queries with the same "
        "order: "
        + ", ".join(f"{share:.0%} in {d_} dimensions" for d_, share in agreement.items())
        + ".",
        all(share == 1.0 for share in agreement.values()) and worst < 1e-12,
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            **Why the cosine stays between -1 and 1.** Take $u$ and $v$ of length 1. A squared length is
            never negative, so $0 \le \|u - v\|^2 = 2 - 2\langle u, v\rangle$, hence
            $\langle u, v\rangle \le 1$. The same with $u + v$ gives $\langle u, v\rangle \ge -1$. Other
            vectors are first divided by their lengths, which is what the cosine does.

            **Why the order is the same.** $2 - 2c$ falls when $c$ rises, and the square root of a smaller
            number is smaller.""",
        undergraduate=r"""
            For any real inner product $\|u - v\|^2 = \langle u - v, u - v\rangle$, and bilinearity and symmetry give
            the identity. With $u/\|u\|$ and $v/\|v\|$ in place of $u$ and $v$ it reads
            $0 \le \|\tfrac{u}{\|u\|} \mp \tfrac{v}{\|v\|}\|^2 = 2 \mp 2 \cos(u, v)$: the inequality of Cauchy and Schwarz,
            with equality exactly for parallel vectors. On the unit sphere $\|u - v\| = \sqrt{2 - 2\cos}$ is a
            strictly decreasing function of the cosine, so both induce one order.""",
        research=r"""
            On the sphere the chord $\sqrt{2 - 2\cos\theta} = 2 \sin(\theta/2)$ and the angle $\theta$ are monotone
            in each other; the angle is a metric, $1 - \cos$ is not (it violates the triangle inequality; its square root
            does not). The claim that cosine discriminates better *because* the dimension is large is therefore empty
            for normalised embeddings. What differs between the measures is only how they treat norms.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Many dimensions

    Two strangers answer $d$ yes-or-no questions by tossing coins. On 3 questions they may well agree
    on all. On 1,000 questions they agree on about half, give or take 16: agreements and
    disagreements cancel. Two random directions are such strangers, and $d$, the *dimension*, is the
    number of entries.
    """)
    return


@app.cell
def _():
    dimension = mo.ui.slider(
        steps=[3, 10, 30, 100, 300, 1000], value=3, label="Dimension $d$", show_value=True
    )
    dimension
    return (dimension,)


@app.cell
def _(dimension):
    d = dimension.value
    draws = torch.randn(2, 4000, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    random_cosines = cosine_similarity(*draws, dim=-1)
    gaps = (draws[0] - draws[1]).norm(dim=-1)
    degrees = random_cosines.clamp(-1, 1).acos().rad2deg()
    counts = torch.histc(degrees, bins=36, min=0, max=180) / len(degrees)
    line_chart(
        [
            {"angle in degrees": 5 * i + 2.5, "share of pairs": share}
            for i, share in enumerate(counts.tolist())
        ],
        "angle in degrees",
        "share of pairs",
        title=f"Angle between two random directions, d = {d}",
        x_range=(0, 180),
        y_range=(0, 0.6),
    )
    return d, gaps, random_cosines


@app.cell
def _(d, gaps, random_cosines):
    spread = random_cosines.std().item()
    relative = (gaps.std() / gaps.mean()).item()
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)

    def beyond(dim):
        density = (1 - grid**2) ** ((dim - 3) / 2)
        outside = torch.where(grid.abs() > 0.2, density, 0.0)
        return (torch.trapezoid(outside, grid) / torch.trapezoid(density, grid)).item()

    tails = {dim: beyond(dim) for dim in (3, 10, 100, 1000)}
    mo.vstack(
        [
            table(
                [
                    {
                        "dimension": d,
                        "spread of the cosine": spread,
                        "1/√d": d**-0.5,
                        "spread of the distance / its mean": relative,
                        "1/√(2d)": (2 * d) ** -0.5,
                    }
                ]
            ),
            claim(
                "GE-08 E42",
                f"In {d} dimensions the cosine of random pairs has mean 0 and standard deviation (its typical size) "
                rf"{spread:.3f}; the law is $1/\sqrt{{d}}$ = {d**-0.5:.3f}. Distances concentrate just as fast: their spread is "
                rf"{relative:.3f} of their mean, near $1/\sqrt{{2d}}$ = {(2 * d) ** -0.5:.3f}.",
                abs(spread * d**0.5 - 1) < 0.05
                and abs(random_cosines.mean().item()) < 4 * (d * 4000) ** -0.5
                and abs(relative * (2 * d) ** 0.5 - 1) < 0.07,
            ),
            details(
                claim(
                    "GE-15 E83",
                    "There is no threshold such as $d > 100$. The chance that $|\\cos|$ exceeds 0.2 falls smoothly: "
                    + ", ".join(f"{tail:.2f} in {dim}" for dim, tail in tails.items())
                    + " dimensions. Judge a cosine by the scale $1/\\sqrt{d}$.",
                    [f"{tail:.2f}" for tail in tails.values()] == ["0.80", "0.56", "0.04", "0.00"]
                    and abs((random_cosines.abs() > 0.2).double().mean().item() - beyond(d)) < 0.03,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Turn the space so that the first arrow is $(1, 0, \dots, 0)$. The second is a random arrow of length 1
            with entries $c_1, \dots, c_d$, and the cosine is its first entry, $c_1$. Pythagoras says
            $c_1^2 + \dots + c_d^2 = 1$. No direction is preferred, so each of the $d$ squares has the same average,
            and that must be $1/d$. So the typical size of the cosine is $1/\sqrt{d}$: 0.58 in 3 dimensions, 0.03 in 1,000.

            How often can it be large? If $c_1^2 > 0.04$ happened in a share $s$ of the draws, the average of
            $c_1^2$ would be at least $0.04\,s$. So $s \le 1 / (0.04\,d)$: at most 2.5% in 1,000 dimensions.""",
        undergraduate=r"""
            For $g \sim \mathcal{N}(0, I_d)$, $g / \|g\|$ is uniform on the sphere by rotation invariance, and
            $\mathbb{E} c_1^2 = 1/d$ exactly, by symmetry. $c_1$ has the density $\propto (1 - c^2)^{(d - 3)/2}$ on $[-1, 1]$
            (the claim above integrates it), so $\sqrt{d}\, c_1 \to \mathcal{N}(0, 1)$. For independent Gaussian $u, v$,
            $\|u - v\|^2 = 2 \chi^2_d$ has mean $2d$ and standard deviation $2\sqrt{2d}$; the root halves the relative
            spread: $\tfrac12 \cdot \sqrt{2/d} = 1/\sqrt{2d}$ to first order.""",
        research=r"""
            $c_1^2 \sim \mathrm{Beta}(\tfrac12, \tfrac{d-1}{2})$, and Lévy's inequality bounds the tail by
            $2 e^{-d t^2 / 2}$, far below Chebyshev's. Consequently $e^{\Omega(d t^2)}$ unit vectors fit with
            pairwise $|\cos| < t$ (Johnson and Lindenstrauss 1984 use the same tail). Trained
            embeddings are not isotropic: after removing the mean row (Mu and Viswanath 2018) their effective dimension is what counts,
            not the width.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Which measure finds the right neighbour?

    It is often said that cosine is better than distance *because* the dimension is high. Test it. A
    library holds 1,000 melodies, each a random vector. Each of 300 of them is hummed badly (noise is added) and searched
    for: by cosine, by distance, by inner product. Then every recording gets a loudness of its own: each stored
    vector is multiplied by a random factor. The noise grows with the dimension, or the search would become easy.
    """)
    return


@app.cell
def _():
    def found(asked, stored, true):
        by = {
            "cosine": (normalize(asked, dim=-1) @ normalize(stored, dim=-1).T).argmax(-1),
            "distance": torch.cdist(asked, stored).argmin(-1),
            "inner product": (asked @ stored.T).argmax(-1),
        }
        return {name: (best == true).double().mean().item() for name, best in by.items()}

    def melodies(d, spread, seed):
        rng = torch.Generator().manual_seed(seed)
        stored = torch.randn(1000, d, dtype=torch.float64, generator=rng)
        noise = torch.randn(300, d, dtype=torch.float64, generator=rng)
        factors = (spread * torch.randn(1000, 1, dtype=torch.float64, generator=rng)).exp()
        return found(
            stored[:300] + (d / 12.8 - 1) ** 0.5 * noise, factors * stored, torch.arange(300)
        )

    def loudness_levels(seed):
        rng = torch.Generator().manual_seed(seed)
        tunes = normalize(torch.randn(40, 128, dtype=torch.float64, generator=rng), dim=-1)
        levels = torch.arange(1.0, 26.0, dtype=torch.float64)
        stored = (levels[:, None, None] * tunes).flatten(0, 1)
        noise = torch.randn(stored.shape, dtype=torch.float64, generator=rng)
        return found(stored + 0.02 * noise, stored, torch.arange(1000))

    trials = {
        (d_, spread_): [melodies(d_, spread_, seed) for seed in range(5)]
        for d_ in (16, 128, 1024)
        for spread_ in (0.0, 1.0)
    }
    levels = [loudness_levels(seed) for seed in range(5)]

    def mean(runs, name):
        return sum(run[name] for run in runs) / len(runs)

    return levels, mean, trials


@app.cell
def _(levels, mean, trials):
    tasks = {
        "same loudness": trials[128, 0.0],
        "random loudness": trials[128, 1.0],
        "loudness matters": levels,
    }
    mo.vstack(
        [
            bar_chart(
                [
                    {"task": task, "share found": mean(runs, name), "search by": name}
                    for task, runs in tasks.items()
                    for name in ("cosine", "distance", "inner product")
                ],
                "task",
                "share found",
                "search by",
                title="Share of melodies found, d = 128, mean of five trials",
                y_range=(0, 1),
            ),
            claim(
                "GE-11 GE-14 PD-04",
                "Random loudness: cosine finds what it found before, distance falls to "
                f"{mean(trials[128, 1.0], 'distance'):.2f} and the inner product, which prefers loud recordings, to "
                f"{mean(trials[128, 1.0], 'inner product'):.2f}; and so in 16 and 1,024 dimensions. Cosine helps where "
                "length is a nuisance.",
                all(
                    loud["cosine"] == quiet["cosine"]
                    and loud["cosine"] > loud["distance"] + 0.1
                    and loud["distance"] > loud["inner product"] + 0.1
                    for d_ in (16, 128, 1024)
                    for quiet, loud in zip(trials[d_, 0.0], trials[d_, 1.0], strict=True)
                ),
            ),
            details(
                claim(
                    "GE-09 E42",
                    "Recordings of one loudness: cosine and distance do equally well, in 16, 128 and 1,024 dimensions: "
                    + ", ".join(
                        f"{mean(trials[d_, 0.0], 'cosine'):.3f} and {mean(trials[d_, 0.0], 'distance'):.3f}"
                        for d_ in (16, 128, 1024)
                    )
                    + ". A high dimension favours neither.",
                    all(
                        abs(run["cosine"] - run["distance"]) < 0.03
                        for d_ in (16, 128, 1024)
                        for run in trials[d_, 0.0]
                    ),
                ),
                claim(
                    "GE-11",
                    "Now store 40 melodies at 25 loudnesses each and ask for melody *and* loudness. Distance finds "
                    f"{mean(levels, 'distance'):.0%}, cosine {mean(levels, 'cosine'):.0%}: it cannot tell the 25 apart. Distance "
                    "helps where magnitude matters.",
                    all(run["distance"] > 0.99 and run["cosine"] < 0.1 for run in levels),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    q = torch.tensor([1.0, 0.0], dtype=torch.float64)
    two = torch.tensor([[1.0, 0.0], [3.0, 3.0]], dtype=torch.float64)
    rng_ = torch.Generator().manual_seed(3)
    keys = torch.randn(2000, 16, dtype=torch.float64, generator=rng_)
    keys = keys * torch.rand(2000, 1, dtype=torch.float64, generator=rng_) * 3
    queries = torch.randn(200, 16, dtype=torch.float64, generator=rng_)
    longest = keys.norm(dim=-1).max()
    height = (longest**2 - keys.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()
    lifted = torch.cat([keys, height], -1)
    floor = torch.cat([queries, queries.new_zeros(200, 1)], -1)
    best_product = (queries @ keys.T).argmax(-1)
    by_loop = [max(range(2000), key=lambda i: row[i]) for row in (queries @ keys.T).tolist()]
    nearest_plain = torch.cdist(queries, keys).argmin(-1)
    details(
        mo.md(r"""
    With fixed prices, which basket costs most? Not the one that looks most like the price list: a big basket
    wins. Finding the stored $v$ with the largest $\langle q, v \rangle$ for a *query* $q$ is called *maximum
    inner product search*. Attention scores and the last layer of a language model rank by inner products, so it
    matters that this is a different question from "who is nearest".

    It can be turned into that question by one extra coordinate. Let $M$ be the greatest length. Lift every $v$ off the floor
    until all are equally long, and leave $q$ on the floor:

    $$\tilde v = \left(v,\ \sqrt{M^2 - \|v\|^2}\right), \qquad \tilde q = (q,\ 0).$$

    Now $\|\tilde q - \tilde v\|^2 = \|q\|^2 + M^2 - 2\langle q, v\rangle$ by the identity above. Only the last term differs between
    the stored vectors, so the nearest $\tilde v$ has the largest inner product.
    """),
        claim(
            "GE-13",
            "Query (1, 0), stored (1, 0) and (3, 3). The inner products are 1 and 3, so the second wins; by distance "
            "(0 against 3.61) and by cosine (1 against 0.71) the first does.",
            (two @ q).tolist() == [1.0, 3.0]
            and (two - q).norm(dim=-1).argmin() == 0
            and cosine_similarity(two, q[None], dim=-1).argmax() == 0
            and f"{(two[1] - q).norm():.2f} {cosine_similarity(two[1], q, dim=0):.2f}"
            == "3.61 0.71",
        ),
        claim(
            "GE-12 GE-13",
            "2,000 stored vectors of unequal length, 200 queries, exact search over all. The nearest vector is the "
            f"one with the largest inner product in {(nearest_plain == best_product).double().mean().item():.0%} of the queries; "
            "after lifting, in 100%.",
            best_product.tolist() == by_loop
            and torch.equal(torch.cdist(floor, lifted).argmin(-1), best_product)
            and (nearest_plain == best_product).double().mean() < 0.5
            and torch.allclose(lifted.norm(dim=-1), longest.expand(2000)),
        ),
        title="The largest inner product",
    )
    return


@app.cell
def _():
    def check(names):
        lift = names["lift"]
        rng = torch.Generator().manual_seed(5)
        stored = torch.randn(300, 6, dtype=torch.float64, generator=rng)
        stored = stored * torch.rand(300, 1, dtype=torch.float64, generator=rng) * 4
        result = lift(stored)
        assert torch.is_tensor(result), "Return a tensor."
        assert result.shape == (300, 7), "One column more: 300 rows of 6 become 300 rows of 7."
        assert torch.allclose(result[:, :6], stored), "Keep the first columns as they are."
        assert torch.isfinite(result).all(), (
            "A number is not finite: rounding can make M² - |v|² slightly negative; clamp it at 0."
        )
        lengths = result.norm(dim=-1)
        assert torch.allclose(lengths, lengths[:1].expand(300)), (
            "All rows should end up equally long: the extra entry is sqrt(M² - |v|²)."
        )
        asked = torch.randn(50, 6, dtype=torch.float64, generator=rng)
        nearest = torch.cdist(torch.cat([asked, asked.new_zeros(50, 1)], -1), result).argmin(-1)
        assert torch.equal(nearest, (asked @ stored.T).argmax(-1)), (
            "The nearest row is not the one with the largest inner product."
        )

    exercise = Exercise(
        lesson="similarity",
        task="Write `lift(V)`: the rows of `V` with one extra entry each, such that all rows have the same length. "
        "Then the nearest row to a query with an extra 0 has the largest inner product with it. Useful: "
        "`V.square().sum(-1, keepdim=True)` is the column of the squared lengths, `x.max()` the largest entry, `x.clamp(min=0)` "
        "replaces what is below 0 by 0, `x.sqrt()` takes roots, and `torch.cat([A, B], -1)` puts two tables side by side.",
        starter="""
    def lift(V):
        extra = torch.zeros(len(V), 1, dtype=V.dtype)
        return torch.cat([V, extra], -1)
    """,
        solution="""
    def lift(V):
        squares = V.square().sum(-1, keepdim=True)
        extra = (squares.max() - squares).clamp(min=0).sqrt()
        return torch.cat([V, extra], -1)
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
    mo.md(r"""
    ## Length as confidence

    A speaker can say *what* (direction) and *how firmly* (length). At the end of a language model a vector $h$ meets
    one row $e_i$ per word; the inner products $\langle h, e_i \rangle$ become shares by [softmax](../softmax/) (a larger
    score gets a larger share, and the shares sum to 1). Stretch $h$:
    """)
    return


@app.cell
def _():
    firmness = mo.ui.slider(
        steps=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0], value=1.0, label="Length of $h$", show_value=True
    )
    firmness
    return (firmness,)


@app.cell
def _(firmness):
    rows_ = normalize(
        torch.tensor([[3.0, 1.0], [1.0, 1.0], [1.0, 3.0], [-2.0, 1.0]], dtype=torch.float64), dim=-1
    )
    h = normalize(torch.tensor([2.0, 1.0], dtype=torch.float64), dim=0)
    scores = firmness.value * rows_ @ h
    shares = fenchel.Softmax().weights(scores)
    tops = [fenchel.Softmax().weights(s * rows_ @ h).max().item() for s in (0.25, 0.5, 1, 2, 4, 8)]
    longer = rows_.clone()
    longer[1] *= 3
    mo.vstack(
        [
            bar_chart(
                [{"word": f"word {i}", "share": s} for i, s in enumerate(shares.tolist())],
                "word",
                "share",
                title=f"Shares of four words, |h| = {firmness.value:g}",
                y_range=(0, 1),
            ),
            details(
                claim(
                    "GE-16",
                    "Stretching $h$ keeps the order of the words and raises the first share: "
                    + ", ".join(f"{top:.2f}" for top in tops)
                    + " at lengths 0.25 to 8. Stretching the *row* of a word changes the order: three times as long, "
                    "word 1 overtakes word 0. So length acts like confidence, and only together with the angle.",
                    torch.equal(scores.argsort(), (rows_ @ h).argsort())
                    and all(a < b for a, b in pairwise(tops))
                    and (rows_ @ h).argmax() == 0
                    and (longer @ h).argmax() == 1,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    rng3 = torch.Generator().manual_seed(4)
    x = torch.randn(3, dtype=torch.float64, generator=rng3)
    A = torch.randn(3, 3, dtype=torch.float64, generator=rng3)
    B = torch.randn(3, 3, dtype=torch.float64, generator=rng3)
    by_hand = torch.stack(
        [
            torch.stack([sum(A[i, k] * B[k, j] for k in range(3)) for j in range(3)])
            for i in range(3)
        ]
    )
    column = x[:, None]
    details(
        mo.md(r"""
    A *matrix* is a table of numbers that turns one vector into another: entry $j$ of $xA$ is
    $\sum_i x_i A_{ij}$, the inner product of $x$ with column $j$. Think of a conveyor belt that is read from left to right: in
    $x A B$ the machine $A$ works first, then $B$. This course writes vectors as rows throughout. Many books write columns, and
    then everything is mirrored: $B^\top A^\top x^\top$. The *transpose* $^\top$ exchanges rows and columns. What a book of columns
    writes as $q^\top k$ is here $q k^\top$, the same number.
    """),
        claim(
            "GE-03 E84",
            r"$xAB = (xA)B = x(AB)$: $A$ first. The other order gives another result. In columns the same computation is "
            r"$B^\top A^\top x^\top$, since $(AB)^\top = B^\top A^\top$. torch's `linear` takes the transpose: "
            r"`linear(x, A.T)` is $xA$.",
            torch.allclose(A @ B, by_hand)
            and torch.allclose((x @ A) @ B, x @ (A @ B))
            and not torch.allclose(x @ A @ B, x @ B @ A)
            and torch.allclose((B.T @ A.T @ column)[:, 0], x @ A @ B)
            and torch.allclose((A @ B).T, B.T @ A.T)
            and torch.allclose(linear(x, A.T), x @ A),
        ),
        title="Rows, and the order of products",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Words become neighbours

    A language model stores one vector per word, its *embedding*. These numbers are not written by hand: training finds them. A small model reads
    sentences such as *the wise queen rules here* and *a wild dog sleeps there* for 120 steps. King and queen stand in the
    same places, so training pushes them the same way.
    """)
    return


@app.cell
def _():
    words = "the a wise old small wild king queen cat dog rules sleeps here there <|end|>".split()
    _word_level = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, "<|end|>"))
    _word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(_word_level)
    frames = (
        ("the", ("wise", "old"), ("king", "queen"), "rules", ("here", "there")),
        ("a", ("small", "wild"), ("cat", "dog"), "sleeps", ("here", "there")),
    )

    def sentence(coins):
        frame = frames[coins[0]]
        return [
            words.index(slot if isinstance(slot, str) else slot[coin])
            for slot, coin in zip(frame, coins, strict=True)
        ]

    rng4 = torch.Generator().manual_seed(0)
    small = fenchel.Transformer(
        fenchel.ModelConfig(vocabulary=len(words), context=8, width=32, layers=1), generator=rng4
    )
    optimiser = torch.optim.AdamW(small.parameters(), lr=1e-2)
    for _step in range(120):
        _ids = torch.tensor(
            [sentence(coins) for coins in torch.randint(2, (16, 5), generator=rng4).tolist()]
        )
        cross_entropy(small(_ids)[:, :-1].flatten(0, 1), _ids[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return small, tokenizer


@app.cell
def _(small, tokenizer):
    of_king = neighbours(small, tokenizer, "king", count=5)
    firsts = {
        w: neighbours(small, tokenizer, w, count=20).rows for w in ("king", "queen", "cat", "dog")
    }
    mo.vstack(
        [
            table(
                [
                    {"near king": row.token, "cosine": row.cosine, "inner product": row.product}
                    for row in of_king.rows
                ]
            ),
            claim(
                "TR-20",
                f"The nearest word to *king* is *queen*, with cosine {of_king.rows[0].cosine:.2f} and the largest inner product; "
                f"random directions of this width have cosines of size {of_king.spread:.2f}. And *cat* finds *dog*.",
                [rows[0].token for rows in firsts.values()] == ["queen", "king", "dog", "cat"]
                and all(rows[0].product == max(r.product for r in rows) for rows in firsts.values())
                and of_king.rows[0].cosine > 3 * of_king.spread,
            ),
        ]
    )
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
    own_table = own.model.embed.weight.detach().double()
    near = neighbours(own.model, own.tokenizer, " the", count=8)
    row_the = own_table[own.tokenizer.encode(" the")].mean(0)
    centred = normalize(own_table - own_table.mean(0), dim=-1)
    unit = normalize(row_the - own_table.mean(0), dim=0)
    own_cosines, order = (centred @ unit).sort(descending=True)
    apart = (centred - unit).norm(dim=-1)[order]
    first_ids, _ = nearest_rows(own_table, row_the, 8)
    mo.vstack(
        [
            mo.md(
                "The rows nearest to *the* in the embedding of your model, after subtracting the mean row:"
            ),
            table(
                [
                    {
                        "token": repr(row.token),
                        "cosine": row.cosine,
                        "in units of 1/√d": row.cosine / near.spread,
                        "inner product": row.product,
                    }
                    for row in near.rows
                ]
            ),
            claim(
                "TR-20 GE-10",
                f"Your model has {len(own_table):,} rows of {own_table.shape[1]} numbers. Sorted by cosine they are sorted by "
                "the distance of the unit vectors too. "
                f"The nearest row lies {near.rows[0].cosine / near.spread:.1f} random spreads above 0.",
                (apart.diff() > -1e-6).all()
                and torch.allclose((centred @ unit)[first_ids], own_cosines[:8], atol=1e-5)
                and all(a.cosine >= b.cosine for a, b in pairwise(near.rows))
                and all(abs(row.cosine) <= 1 + 1e-6 for row in near.rows),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Cosine and distance give the same order only for vectors of one length; with unequal lengths they answer different "
        r"questions, and the inner product a third. The scale $1/\sqrt{d}$ is that of *random* directions: the rows of a trained "
        r"embedding share a common part, and before it is subtracted all their cosines are large. And the vector 0 has no direction: its cosine is not defined."
    )
    return


@app.cell
def _():
    footer("similarity")
    return


if __name__ == "__main__":
    app.run()
