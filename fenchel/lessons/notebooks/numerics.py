"""Numbers in a computer: overflow, half precision, accumulation."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Numbers in a computer: overflow, half precision, accumulation",
)

with app.setup:
    import math

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import entropy, scale_warning
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
    from fenchel.train import TrainConfig, count_targets, total_loss
    from fenchel.train.loss_scale import LossScale, LossScaler


@app.cell
def _():
    header("numerics")
    return


@app.cell
def _():
    guess = question(
        "Softmax computes $e^z$ of every score $z$. What is the largest score whose exponential fits into a number of 16 bits (float16)?",
        ["about 11", "about 89", "about 710"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "about 11",
        "The largest float16 is 65504, and $\\log 65504 = 11.09$. 89 is the limit of 32 bits, 710 that of 64. Scores of 20 occur in attention, so a "
        "softmax written as in the book would fail. One subtraction saves it.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A display with few digits

    A pocket calculator shows a few digits and a power of ten. A computer does the same with powers of two: some bits for the digits, some for the
    exponent. Few digits mean rounding. A small exponent range means *overflow* (the number becomes infinite) and *underflow* (it becomes 0). Four formats are in
    use:
    """)
    return


@app.cell
def _():
    dtypes = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
    }
    _rows = []
    for _name, _dtype in dtypes.items():
        _info = torch.finfo(_dtype)
        _rows.append(
            {
                "format": _name,
                "bits": _info.bits,
                "rounding (epsilon)": _info.eps,
                "largest number": _info.max,
                "smallest above 0": _info.smallest_normal * _info.eps,
                "largest score for exp": round(math.log(_info.max), 2),
            }
        )
    table(_rows)
    return (dtypes,)


@app.cell
def _():
    mo.md(r"""
    *Epsilon* is the step from 1 to the next number. bfloat16 has the range of float32 and a third of its digits; float16 has more digits and a small range. The
    quantity to compute is *log-sum-exp*, $\log \sum_i e^{x_i}$, the logarithm of what softmax divides by. Below, three scores $c,\ c - 1,\ c - 2$, and $c$ grows.
    """)
    return


@app.cell
def _():
    form_of = mo.ui.dropdown(
        ["float16", "bfloat16", "float32"], value="float32", label="Computed in"
    )
    height = mo.ui.slider(
        steps=[0.0, 5.0, 10.0, 12.0, 50.0, 80.0, 88.0, 90.0, 110.0],
        value=90.0,
        label="Largest score $c$",
        show_value=True,
    )
    mo.vstack([form_of, height])
    return form_of, height


@app.cell
def _(dtypes, form_of, height):
    dtype = dtypes[form_of.value]

    def three(c):
        return torch.tensor([c, c - 1.0, c - 2.0])

    def naive(x):
        return x.exp().sum().log()

    def stable(x):
        c = x.max()
        return c + (x - c).exp().sum().log()

    def exact(x):
        return torch.logsumexp(x.double(), 0).item()

    x = three(height.value).to(dtype)
    by_book, by_trick = naive(x).item(), stable(x).item()
    _points = [
        (c, name, value)
        for c in range(0, 121, 2)
        for name, rule in (("as in the book", naive), ("largest taken out", stable))
        if math.isfinite(value := rule(three(float(c)).to(dtype)).item())
    ]
    # the sum of the three terms is 1.5 times the largest
    limit = math.log(torch.finfo(dtype).max / (1 + math.exp(-1) + math.exp(-2)))
    mo.vstack(
        [
            line_chart(
                [{"largest score": c, "log-sum-exp": v, "rule": name} for c, name, v in _points],
                "largest score",
                "log-sum-exp",
                "rule",
                title=f"Log-sum-exp in {form_of.value}: one line ends",
                y_range=(0, 125),
            ),
            table(
                [
                    {
                        "as in the book": by_book,
                        "largest taken out": by_trick,
                        "in float64": exact(x),
                    }
                ]
            ),
            claim(
                "SM-14",
                "Taking the largest score out first is right to the digits of the format, for every $c$. As in the book the result is infinite "
                f"here from $c = {limit:.2f}$ on, where the sum of the three exponentials passes the largest number.",
                abs(by_trick - exact(x)) <= 2 * torch.finfo(dtype).eps * max(1.0, abs(exact(x)))
                and math.isfinite(by_book) == (height.value < limit),
            ),
        ]
    )
    return naive, stable


@app.cell
def _():
    mo.md(r"""
    ## Measure from the highest peak

    Heights above sea level can be large while the *differences* of the peaks are small. So measure from the highest peak. With $c = \max_i x_i$,

    $$\log \sum_i e^{x_i} = c + \log \sum_i e^{x_i - c}.$$

    No exponent is positive any more, so nothing overflows. One term is $e^0 = 1$, so the sum is never 0 and its logarithm is safe.
    """)
    return


@app.cell
def _(naive, stable):
    _edge32 = torch.tensor([88.72, 88.73])
    _edge16 = torch.tensor([11.08, 11.10]).half()
    deep = torch.tensor([-1000.0, -1001.0])
    empty = torch.full((3,), -math.inf)
    mo.vstack(
        [
            claim(
                "E72 SM-15",
                "One case is left. If *every* score is $-\\infty$ (all alternatives are forbidden by a mask), then $c = -\\infty$ and $x_i - c$ is "
                f"$\\infty - \\infty$: the trick alone gives {stable(empty).item()}. The right value is $\\log 0 = -\\infty$, and fenchel returns it, with weights of 0.",
                stable(empty).isnan()
                and fenchel.Softmax().value(empty) == -math.inf
                and (fenchel.Softmax().weights(empty) == 0).all()
                and abs(fenchel.Softmax().value(torch.tensor([1000.0, 1000.0])).item() - 1000.6931)
                < 1e-3,
            ),
            details(
                claim(
                    "SM-15",
                    f"In float32 $e^{{88.72}}$ is {_edge32.exp()[0].item():.3g} and $e^{{88.73}}$ is infinite; in float16 $e^{{11.08}}$ is "
                    f"{_edge16.exp()[0].item():.0f} and $e^{{11.10}}$ is infinite. The limits are $\\log$ of the largest number, 88.72 and 11.09.",
                    _edge32.exp().isfinite().tolist() == [True, False]
                    and _edge16.exp().isfinite().tolist() == [True, False]
                    and round(math.log(torch.finfo(torch.float32).max), 2) == 88.72
                    and round(math.log(torch.finfo(torch.float16).max), 2) == 11.09,
                ),
                claim(
                    "SM-14",
                    f"It saves the other end as well. For scores $-1000, -1001$ the book gives {naive(deep).item()}, the trick {stable(deep).item():.3f}.",
                    naive(deep) == -math.inf and abs(stable(deep).item() + 999.6867) < 1e-3,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            $e^{x} = e^{c + (x - c)} = e^c \cdot e^{x - c}$. So $e^c$ is a factor of every term: $\sum_i e^{x_i} = e^c \sum_i e^{x_i - c}$. The logarithm of a product is
            the sum of the logarithms, and $\log e^c = c$. This holds for any $c$; the largest $x_i$ is the choice for which every exponent is at most 0, so every term lies
            between 0 and 1, and the largest term is exactly 1. In softmax the factor $e^c$ stands above and below the fraction and cancels.""",
        undergraduate=r"""
            With $K$ scores the sum $S = \sum e^{x_i - c}$ satisfies $1 \le S \le K$, so $0 \le \log S \le \log K$. A term that underflows is below the smallest number
            of the format and would not have changed a sum of at least 1. The relative error of $S$ is about $K \epsilon$ for plain summation, and an error
            $\delta$ of $S$ changes $\log S$ by $\delta/S \le \delta$; the result $c + \log S$ is rounded once more. So the absolute error is of the order of
            $\epsilon\,(K + |c|)$: no cancellation. Since softmax is unchanged by a shift, its gradient needs no term for $c$, and $c$ may be treated as a constant.""",
        research=r"""
            Blanchard, Higham and Higham (2021) give the error bounds of the shifted and unshifted forms. The shift need not be known in advance: a running maximum
            $c$ and a sum that is multiplied by $e^{c - c'}$ when the maximum grows give the result in one pass (Milakov and Gimelshein 2018), which is what fused attention
            kernels do tile by tile. A row without any admissible key needs a rule beside the formula, in the backward pass too.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A factor applied twice

    You change euros into dollars, and the cashier changes the amount once more. No alarm sounds; you just have the wrong amount. Attention divides its scores by
    $\sqrt{d_k}$ ($d_k$ is the width of a head, `D` in the menu below), and a temperature divides them too: both are one factor on the scores. If each of two places applies it, the numbers stay
    finite and the weights become too even. `fenchel.attention.scale_warning` recognises such factors.
    """)
    return


@app.cell
def _():
    mistake = mo.ui.dropdown(
        ["right", "1/sqrt(D) twice", "temperature 2 twice", "1/sqrt(D) missing", "1/D"],
        value="1/sqrt(D) twice",
        label="What the code does",
    )
    mistake
    return (mistake,)


@app.cell
def _(mistake):
    _g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 4, 32, 64, generator=_g)
    settings = {
        "right": (1 / 8, 1.0),
        "1/sqrt(D) twice": (1 / 8, 1 / 8),
        "temperature 2 twice": (0.5 / 8, 0.5),
        "1/sqrt(D) missing": (1.0, 1.0),
        "1/D": (1 / 64, 1.0),
    }

    def with_factors(scale, beta):
        choice = fenchel.Softmax(beta)
        _, weights = fenchel.attend(q, k, k, choice=choice, scale=scale, return_weights=True)
        return weights, scale_warning(q, k, choice=choice, scale=scale)

    said = {name: with_factors(*pair) for name, pair in settings.items()}
    _weights, _sentence = said[mistake.value]
    spread = {name: entropy(w).mean().item() for name, (w, _) in said.items()}
    mo.vstack(
        [
            bar_chart(
                [
                    {"rank of the key": i, "mean weight": w}
                    for i, w in enumerate(
                        _weights.sort(-1, descending=True).values.mean((0, 1, 2)).tolist()[:12], 1
                    )
                ],
                "rank of the key",
                "mean weight",
                title=f"Weights of the best 12 of 32 keys: {mistake.value}",
                y_range=(0, 1),
            ),
            mo.md(f"The detector says: *{_sentence or 'nothing, the scale is right'}*"),
            claim(
                "SM-12",
                "It finds all four mistakes and is silent on the right code. None raises an error by itself; the entropy of the weights moves from "
                f"{spread['right']:.2f} nats to {spread['1/sqrt(D) twice']:.2f} (twice; uniform is {math.log(32):.2f}) or {spread['1/sqrt(D) missing']:.2f} "
                "(missing).",
                said["right"][1] is None
                and all(text for name, (_, text) in said.items() if name != "right")
                and all("twice" in said[name][1] for name in said if "twice" in name)
                and spread["1/sqrt(D) missing"] < spread["right"] < spread["1/sqrt(D) twice"],
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Half the bits

    Numbers of 16 bits take half the memory and are several times as fast on many machines. *Mixed precision* uses them where it is safe: products in 16 bits, sums and the
    stored weights (the *master weights*) in 32. Why not all in 16? Add 0.0001 to 1 a thousand times, as an optimiser with a small learning rate does:
    """)
    return


@app.cell
def _(dtypes):
    grown = {name: [1.0] for name in ("float16", "bfloat16", "float32")}
    for _name, _path in grown.items():
        _w = torch.ones((), dtype=dtypes[_name])
        for _ in range(1000):
            _w = _w + torch.tensor(1e-4, dtype=dtypes[_name])
            _path.append(_w.item())
    tenths = torch.full((10_000,), 0.1, dtype=torch.float16)
    _one_by_one = torch.zeros((), dtype=torch.float16)
    for _t in tenths:
        _one_by_one = _one_by_one + _t
    in_32 = tenths.sum(dtype=torch.float32).item()
    mo.vstack(
        [
            line_chart(
                [
                    {"step": i, "weight": v, "stored in": name}
                    for name, path in grown.items()
                    for i, v in list(enumerate(path))[::50]
                ],
                "step",
                "weight",
                "stored in",
                title="A thousand steps of 0.0001",
            ),
            claim(
                "OP-25",
                f"In float32 the weight arrives at {grown['float32'][-1]:.4f}. In float16 and bfloat16 it stays at {grown['float16'][-1]:g}: 1.0001 rounds to 1, each "
                "time. So the weights that an optimiser moves are stored in float32.",
                abs(grown["float32"][-1] - 1.1) < 1e-3
                and grown["float16"][-1] == grown["bfloat16"][-1] == 1.0,
            ),
            details(
                claim(
                    "OP-25",
                    f"Sums too: 10,000 times 0.1, added one by one in float16, stops at {_one_by_one.item():.0f}, where the next 0.1 is less than half a step. The same "
                    f"numbers summed in float32 give {in_32:.0f}.",
                    _one_by_one == 256 and abs(in_32 - 1000) < 1,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Weighing a feather

    A bathroom scale shows 0 for a feather. Put 65,536 feathers on it, read the scale, and divide. Gradients are feathers: in float16 anything below $3 \cdot 10^{-8}$ becomes 0.
    *Loss scaling* multiplies the loss by $c = 65536$. By the chain rule every gradient is then $c$ times as large and survives; at the end it is divided by $c$, in float32.
    """)
    return


@app.cell
def _():
    weight = mo.ui.slider(
        -11, -2, step=1, value=-8, label="Gradient $10^k$, $k$ =", show_value=True
    )
    weight
    return (weight,)


@app.cell
def _(weight):
    FACTOR = 65536.0

    def kept(g, rule):
        g = torch.tensor(g, dtype=torch.float32)
        if rule == "float16":
            return g.half().float().item()
        if rule == "bfloat16":
            return g.bfloat16().float().item()
        return ((g * FACTOR).half().float() / FACTOR).item()

    rules = ["float16", "float16, loss scaled", "bfloat16"]
    _exponents = [-11 + 0.25 * i for i in range(41)]
    g = 10.0**weight.value
    survivors = {rule: kept(g, rule) for rule in rules}
    mo.vstack(
        [
            line_chart(
                [
                    {
                        "gradient": 10.0**e,
                        "share lost": abs(kept(10.0**e, rule) / 10.0**e - 1),
                        "rule": rule,
                    }
                    for rule in rules
                    for e in _exponents
                ],
                "gradient",
                "share lost",
                "rule",
                title="What a gradient loses: 1 is all of it",
                y_range=(0, 1.05),
                log_x=True,
                here=[{"gradient": g}],
            ),
            table([{"gradient": g} | survivors]),
            claim(
                "OP-25 E73",
                "bfloat16 keeps the gradient at every size, to two digits, and needs no scaling. Scaled float16 keeps it down to about $10^{-11}$.",
                abs(survivors["bfloat16"] / g - 1) < 0.01
                and abs(survivors["float16, loss scaled"] / g - 1) < 0.05,
            ),
        ]
    )
    return


@app.cell
def _():
    # A layer in float16: its activations and their gradients are float16, its weights float32.
    _g = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 8, generator=_g))
    inputs = torch.randn(16, 8, generator=_g)
    seen = {}

    def tiny_loss():
        with torch.autocast("cpu", dtype=torch.float16):
            out = layer(inputs)
        seen["activation"] = out.dtype
        out.register_hook(lambda grad: seen.update(gradient=grad.dtype, largest=grad.abs().max()))
        return 1e-8 * out.float().sum()

    wanted = 1e-8 * inputs.sum(0).expand(8, 8)  # the gradient, exactly
    tiny_loss().backward()
    unscaled = layer.weight.grad.clone()
    scaler = LossScaler(torch.device("cpu"), layer.parameters())

    def scaled_gradient(start):
        """The gradient with loss scaling from a factor on, and the factor that it ended with."""
        scaler.scale = LossScale(start, 0)
        layer.weight.grad = None

        def accumulate():
            loss = tiny_loss()
            scaler.backward(loss)
            return loss.item()

        scaler.gradient(accumulate)
        return layer.weight.grad.clone(), scaler.scale.factor

    recovered, _ = scaled_gradient(65536.0)
    lowered, factor = scaled_gradient(2.0**50)
    _error = ((recovered - wanted).norm() / wanted.norm()).item()
    feather = torch.tensor(1e-8)
    mo.vstack(
        [
            details(
                claim(
                    "E73",
                    f"$10^{{-8}}$ is {feather.half().item():g} in float16; times 65536 it is {(feather * 65536).half().item():.1e} and is kept.",
                    feather.half() == 0 and f"{(feather * 65536).half().item():.1e}" == "6.6e-04",
                ),
                claim(
                    "E73 OP-25",
                    "A common mistake is to think that only the forward pass is in 16 bits. In a layer under mixed precision the activation is "
                    f"{str(seen['activation'])[6:]} and so is its gradient; only the weights and *their* gradient are {str(unscaled.dtype)[6:]}. So the gradient of a small "
                    f"loss arrives as {unscaled.abs().max().item():g}, and with loss scaling within {100 * _error:.2f} % of the truth.",
                    seen["activation"] == seen["gradient"] == torch.float16
                    and layer.weight.dtype == unscaled.dtype == torch.float32
                    and (unscaled == 0).all()
                    and _error < 0.01,
                ),
                claim(
                    "OP-25",
                    f"Too large a factor overflows. fenchel then halves it and repeats the step: started at $2^{{50}}$, it ends at $2^{{{math.log2(factor):.0f}}}$ with the "
                    "right gradient.",
                    factor < 2.0**50 and ((lowered - wanted).norm() / wanted.norm()) < 0.01,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Small portions of a large batch

    A batch that does not fit into memory is cut into *micro-batches*, and their gradients are added up: *gradient accumulation*. How are they combined? Two school classes: three
    pupils with the marks 1, 2, 3 and one pupil with 10. The mean of all four is 4. The mean of the two class means, 2 and 10, is 6. The pupil of the small class counted as much as three. So:
    add up the *sums*, count the targets of all parts, divide once.
    """)
    return


@app.cell
def _():
    cut = mo.ui.slider(
        1, 7, step=1, value=3, label="Sequences in the first part, of 8", show_value=True
    )
    cut
    return (cut,)


@app.cell
def _():
    _g = torch.Generator().manual_seed(0)
    small = fenchel.Transformer(
        fenchel.ModelConfig(vocabulary=16, context=12, width=16, layers=1, heads=2)
    )
    small.initialise(_g)
    small.double().eval()
    sequences = torch.randint(16, (8, 13), generator=_g)
    batch_in, batch_out = sequences[:, :-1], sequences[:, 1:].clone()
    for _i, _length in enumerate([12, 12, 11, 9, 7, 5, 3, 2]):  # the rest is padding
        batch_out[_i, _length:] = -100

    def gradient_of(parts, rule):
        """The gradient accumulated over the parts, as one vector."""
        small.zero_grad()
        whole = sum(count_targets(batch_out[part]) for part in parts)
        for part in parts:
            share = (
                whole
                if rule == "sums, divided once"
                else len(parts) * count_targets(batch_out[part])
            )
            (total_loss(small(batch_in[part]), batch_out[part]) / share).backward()
        return torch.cat([p.grad.flatten() for p in small.parameters()])

    full = gradient_of([slice(0, 8)], "sums, divided once")
    errors = {
        (size, rule): (
            (gradient_of([slice(0, size), slice(size, 8)], rule) - full).norm() / full.norm()
        ).item()
        for size in range(1, 8)
        for rule in ("sums, divided once", "mean of means")
    }
    return (errors,)


@app.cell
def _(cut, errors):
    marks = torch.tensor([1.0, 2.0, 3.0, 10.0])
    mean_of_means = torch.stack([marks[:3].mean(), marks[3:].mean()]).mean()
    counted_once = (marks[:3].sum() + marks[3:].sum()) / 4
    _right = errors[cut.value, "sums, divided once"]
    _wrong = errors[cut.value, "mean of means"]
    mo.vstack(
        [
            line_chart(
                [
                    {"sequences in the first part": size, "relative error": e, "rule": rule}
                    for (size, rule), e in errors.items()
                ],
                "sequences in the first part",
                "relative error",
                "rule",
                title="Error of the gradient of a small transformer",
                points=True,
                here=[
                    {"sequences in the first part": cut.value, "relative error": e}
                    for e in (_right, _wrong)
                ],
            ),
            claim(
                "E74 OP-16",
                f"Marks 1, 2, 3 and 10: the batch has the mean {counted_once.item():.1f}, the mean of means is {mean_of_means.item():.1f}.",
                counted_once == 4.0 and mean_of_means == 6.0 and marks.mean() == 4.0,
            ),
            details(
                claim(
                    "OP-16 E74",
                    f"A transformer, 8 sequences of different length in parts of {cut.value} and {8 - cut.value}: sums divided once reproduce the gradient of the "
                    f"whole batch to {_right:.0e}; the mean of means is off by {100 * _wrong:.0f} %.",
                    _right < 1e-10 and _wrong > 0.01,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def curve(*, parts=1, precision=None, seed=0, steps=60):
        """The losses of a short training of a small model on a repeating text."""
        draw = torch.Generator().manual_seed(seed)
        model = fenchel.Transformer(
            fenchel.ModelConfig(vocabulary=12, context=16, width=32, layers=1, heads=2)
        )
        model.initialise(draw)
        text = torch.randint(12, (40,), generator=draw).repeat(8)
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
        scaler = (
            LossScaler(torch.device("cpu"), model.parameters())
            if precision == torch.float16
            else None
        )
        losses = []
        for _ in range(steps):
            starts = torch.randint(len(text) - 17, (24,), generator=draw)
            windows = torch.stack([text[i : i + 17] for i in starts.tolist()])
            targets = windows[:, 1:].clone()
            targets[:3, 8:] = -100  # unequal parts

            def accumulate(windows=windows, targets=targets):
                count, total = count_targets(targets), 0.0
                for part_in, part_out in zip(
                    windows[:, :-1].chunk(parts), targets.chunk(parts), strict=True
                ):
                    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                        logits = model(part_in)
                    loss = total_loss(logits, part_out) / count
                    loss.backward() if scaler is None else scaler.backward(loss)
                    total += loss.item()
                return total

            losses.append(accumulate() if scaler is None else scaler.gradient(accumulate))
            optimiser.step()
            optimiser.zero_grad()
        return losses

    curves = {
        "float32, whole batch": curve(),
        "float32, 4 micro-batches": curve(parts=4),
        "bfloat16": curve(precision=torch.bfloat16),
        "float16, loss scaled": curve(precision=torch.float16),
    }
    return curve, curves


@app.cell
def _(curves):
    base = curves["float32, whole batch"]
    apart = {
        name: max(abs(a - b) for a, b in zip(row, base, strict=True))
        for name, row in curves.items()
    }
    tiny_model = fenchel.Transformer(
        fenchel.ModelConfig(vocabulary=8, context=8, width=8, layers=1, heads=1)
    )

    def refused(name):
        try:
            TrainConfig(precision=name)
        except ValueError:
            return True
        return False

    mo.vstack(
        [
            mo.md("## Both at work: four trainings of one small model"),
            line_chart(
                [
                    {"step": i, "loss (nats)": v, "training": name}
                    for name, row in curves.items()
                    for i, v in enumerate(row)
                ],
                "step",
                "loss (nats)",
                "training",
                title="Loss in four trainings",
            ),
            claim(
                "OP-26 PD-03 OP-16 OP-25",
                f"The four curves coincide to the eye: loss from {base[0]:.2f} to {base[-1]:.2f} nats. The largest distance from the first curve is "
                f"{apart['float32, 4 micro-batches']:.0e} with accumulation, {apart['bfloat16']:.3f} in bfloat16, {apart['float16, loss scaled']:.3f} in float16.",
                base[-1] < 0.5 * base[0]
                and apart["float32, 4 micro-batches"] < 1e-3
                and max(apart.values()) < 0.1,
            ),
            details(
                claim(
                    "OP-28",
                    "Weights are float32 unless you convert them, and `train.precision` chooses the format of the computation: float32, bfloat16, float16, or auto, which "
                    "is bfloat16 where the hardware has it. Any other word is refused.",
                    all(p.dtype == torch.float32 for p in tiny_model.parameters())
                    and not any(map(refused, ("auto", "float32", "bfloat16", "float16")))
                    and refused("float8")
                    and tiny_model.bfloat16()(torch.zeros(1, 4, dtype=torch.long)).dtype
                    == torch.bfloat16,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        logsumexp = names["logsumexp"]
        for case in ([1.0, 2.0], [1000.0, 999.0], [-1000.0, -1001.0], [-math.inf, 3.0]):
            x = torch.tensor(case)
            value = float(logsumexp(x))
            wanted = float(torch.logsumexp(x, 0))
            assert abs(value - wanted) < 1e-3, (
                f"For {case} the result is {wanted:.4f}, not {value}."
            )
        value = float(logsumexp(torch.full((3,), -math.inf)))
        assert value == -math.inf, f"If every score is -inf the result is -inf, not {value}."

    exercise = Exercise(
        lesson="numerics",
        task="Write `logsumexp(x)` for a vector of scores of any size, among them $-\\infty$, without a ready-made one. It must not overflow, underflow or "
        "return nan.",
        starter="""
    def logsumexp(x):
        return torch.log(torch.exp(x).sum())
    """,
        solution="""
    def logsumexp(x):
        c = x.max()
        if c == -math.inf:  # nothing is allowed: log 0
            return c
        return c + torch.log(torch.exp(x - c).sum())
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
        logits = own.model(ids)[0, -1].float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half_logits = own.model(ids)[0, -1].float()
    full_weights = fenchel.Softmax().weights(logits)
    half_weights = fenchel.Softmax().weights(half_logits)
    lse = fenchel.Softmax().value(logits).item()
    lse_64 = torch.logsumexp(logits.double(), 0).item()
    mo.vstack(
        [
            mo.md(
                "After *the people of the*, your model in float32 and with its products in bfloat16. Its largest logit is "
                f"{logits.max().item():.2f}; float16 could take the exponential of scores up to 11.09."
            ),
            table(
                [
                    {
                        "token": own.tokenizer.decode([i]),
                        "float32": full_weights[i].item(),
                        "bfloat16": half_weights[i].item(),
                    }
                    for i in full_weights.topk(6).indices.tolist()
                ]
            ),
            claim(
                "SM-14",
                f"Log-sum-exp of your {len(logits)} logits is {lse:.5f} in float32 and {lse_64:.5f} in float64; raised by 1,000 they still give {len(logits)} finite "
                "weights that sum to 1.",
                abs(lse - lse_64) <= 1e-5 * (1 + abs(lse_64))
                and abs(fenchel.Softmax().weights(logits + 1000.0).sum().item() - 1) < 1e-4,
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The trick protects the exponential, not the scores. If $q \cdot k$ overflows before softmax sees it, no shift helps: in float16 that happens above 65504, which "
        r"is why large models cap or normalise their scores. Loss scaling protects against underflow and makes overflow likelier, hence the factor that adapts. And accumulation equals a "
        r"large batch only for layers that treat each sequence by itself: batch normalisation sees smaller batches."
    )
    return


@app.cell
def _():
    footer("numerics")
    return


if __name__ == "__main__":
    app.run()
