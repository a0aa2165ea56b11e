"""Residual connections, and the feed-forward layer that adds to the stream."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Residuals and the feed-forward layer",
)

with app.setup:
    import math
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch.nn.functional import dropout, gelu, relu

    import fenchel
    from fenchel.attention import Causal, attend
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
    from fenchel.model import ModelConfig, Transformer
    from fenchel.model.mlp import ACTIVATIONS, Mlp


@app.cell
def _():
    header("residuals")
    return


@app.cell
def _():
    guess = question(
        "Fifty layers are stacked, without skip connections. Does the gradient of the first layer vanish?",
        [
            "yes, in every deep stack",
            "it depends on how much each layer amplifies",
            "no, it explodes",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "it depends on how much each layer amplifies",
        "Fifty factors are multiplied. A little below 1 each, and nothing is left; a little above, and it "
        "explodes; at 1 it neither vanishes nor explodes. The slider below has all three.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Fifty people whisper

    A message is whispered along a line of fifty people. If each one passes on half of the volume,
    $0.5^{50}$ arrives, a millionth of a billionth. If each one doubles it, the last one is deafened.
    Now let everybody also hear the original through a loudspeaker: nobody loses the message, however
    quietly the neighbours whisper. The loudspeaker is the *skip connection* (or *residual connection*):

    $$h \;\leftarrow\; F(h) \quad\text{becomes}\quad h \;\leftarrow\; h + F(h).$$

    $h$ is the vector that is passed on, $F$ a layer. Here $F(h) = \tanh(h W)$, a function that keeps
    small numbers nearly as they are and squeezes large ones to between -1 and 1, and $W$ a random $64 \times 64$ matrix whose entries have
    the standard deviation $g/\sqrt{64}$. The *gain* $g$ says how much a layer amplifies. The *gradient* of a
    layer says how much the error at the end changes with its weights; if it is 0, the layer cannot learn.
    """)
    return


@app.cell
def _():
    gain = mo.ui.slider(
        steps=[0.5, 0.8, 1.0, 1.2, 1.5, 2.0], value=1.0, label="Gain $g$", show_value=True
    )
    gain
    return (gain,)


@app.function
def gradient_norms(gain, *, skips, layers=50, seed=0):
    """The norm of the gradient of every layer, at the start of training."""
    generator = torch.Generator().manual_seed(seed)
    n = 64
    weights = [
        (gain * n**-0.5 * torch.randn(n, n, generator=generator)).requires_grad_()
        for _ in range(layers)
    ]
    h, target = torch.randn(2, 32, n, generator=generator)
    for W in weights:
        h = torch.tanh(h @ W) + (h if skips else 0.0)
    grads = torch.autograd.grad(0.5 * (h - target).square().mean(), weights)
    return [g.norm().item() for g in grads]


@app.cell
def _(gain):
    line_chart(
        [
            {"layer": _l + 1, "norm of the gradient": x, "stack": _name}
            for _name, _skips in (("without skips", False), ("with skips", True))
            for _l, x in enumerate(gradient_norms(gain.value, skips=_skips))
        ],
        "layer",
        "norm of the gradient",
        "stack",
        title=f"Gradients of 50 layers, gain {gain.value:g}",
        y_range=(1e-16, 1e3),
        log_y=True,
    )
    return


@app.cell
def _():
    _half, _one, _two = (gradient_norms(g, skips=False) for g in (0.5, 1.0, 2.0))
    _half_s, _one_s, _two_s = (gradient_norms(g, skips=True) for g in (0.5, 1.0, 2.0))
    mo.vstack(
        [
            claim(
                "NB-24 E64",
                f"Without skips the first layer has the gradient {_half[0]:.0e} at gain 0.5, {_one[0]:.3f} at gain 1 (the "
                f"last one {_one[-1]:.3f}: nothing vanished) and {_two[0]:.0f} at gain 2 (the last one {_two[-1]:.2f}).",
                _half[0] < 1e-12
                and 0.3 < _one[0] / _one[-1] < 3
                and _two[0] > 100 > 100 * _two[-1],
            ),
            claim(
                "NB-24 NB-25 E64",
                "Skips prevent vanishing, not growth: with them the first layer has "
                f"{_half_s[0]:.1f}, {_one_s[0]:.1f} and {_two_s[0]:.0f}, and the last one {_half_s[-1]:.1f}, "
                f"{_one_s[-1]:.1f} and {_two_s[-1]:.1f}.",
                1 < _half_s[0] / _half_s[-1] < 5
                and _one_s[0] > 5 * _one_s[-1]
                and _two_s[0] > 100 > 10 * _two_s[-1],
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Without skips the signal is multiplied by about $g$ in each of $L$ layers: $g^L$. With $L = 50$ that is
            $10^{-15}$ for $g = 0.5$ and $10^{15}$ for $g = 2$ (the squeezing of $\tanh$ holds the second one
            back). With a skip a layer adds something of size $g$ to what was there, in a direction that has nothing
            to do with it, so by Pythagoras the length is multiplied by about $\sqrt{1 + g^2}$. That is never below
            1, so nothing vanishes; and it is above 1, so it grows.""",
        undergraduate=r"""
            By the chain rule $\partial h_L / \partial h_0 = \prod_l J_l$ without and $\prod_l (I + J_l)$ with skips, $J_l$ the
            Jacobian (matrix of derivatives) of $F_l$. For $J_l$ with independent entries of mean 0 and
            variance $g^2/n$, $\mathbb{E}\|J_l v\|^2 = g^2 \|v\|^2$, hence $g^{2L}$; and $\mathbb{E}\|(I + J_l) v\|^2 = (1 + g^2)\|v\|^2$, since
            $\mathbb{E}\langle v, J_l v\rangle = 0$, hence $(1 + g^2)^L$. With $F/\sqrt{L}$ in place of $F$ it is
            $(1 + g^2/L)^L < e^{g^2}$ at every depth.""",
        research=r"""
            $g = 1$ is critical for $\tanh$: below it the only fixed point of the variance is 0, above it nearby inputs
            separate (Poole et al. 2016; Schoenholz et al. 2017). Norms of products of random matrices hide their
            spectrum: the mean squared singular value is controlled here, the largest and the smallest are
            not; dynamical isometry asks for all of them (Pennington, Schoenholz and Ganguli 2017). A trained network is not
            random; Fixup, ReZero and zero-initialised branches choose $J_l = 0$ at the start.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A page that is passed along

    Read the skip the other way round. A page goes from layer to layer. Each layer reads it and *adds* a
    note below the others. This page is the **residual stream** $h$. In attention the note for token $t$ is
    a weighted sum of values, $O_t = \sum_i \pi_{i,t}\, v_i$ with weights $\pi$ that sum to 1:

    $$h_t^{\text{new}} = h_t^{\text{old}} + O_t .$$

    Small notes, many layers: the page changes smoothly, like the position of a car that moves a little every
    second. In mathematics, $h \leftarrow h + F(h)$ is one *Euler step* of length 1 along the motion
    $\frac{dh}{dt} = F(h)$ ("the speed at $h$ is $F(h)$"). A step of length 1 is long. With $L$ layers and
    steps of $1/L$ the stack follows the motion closely; with steps of 1 it need not.

    Try it with a point on a circle that should move a quarter of a turn: $F$ points sideways. Its
    distance from the centre should stay 1. *Drag the orange ring, the tip of the first step, down: shorter steps, more layers. Do you ever
    arrive exactly?*
    """)
    return


@app.cell
def residual_circle():
    stack = Scene("residual_circle", {"layers": 6}, places=all_places(layers=range(1, 33)))
    stack
    return (stack,)


@app.function
def circle(layers, step):
    """Points h <- h + step F(h) with F a quarter of a turn per unit of time, (layers + 1, 2)."""
    sideways = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64) * (math.pi / 2)
    path = [torch.tensor([1.0, 0.0], dtype=torch.float64)]
    for _ in range(layers):
        path.append(path[-1] + step * sideways @ path[-1])
    return torch.stack(path)


@app.cell
def _(stack):
    _L = stack.state["layers"]
    _last = circle(_L, 1 / _L)[-1]
    claim(
        "NB-23",
        f"{_L} layer{'' if _L == 1 else 's'} with steps of $1/{_L}$ end at ({_last[0]:.3f}, {_last[1]:.3f}), "
        f"{(_last - torch.tensor([0.0, 1.0])).norm():.3f} from the true end. Every step makes the distance from the centre "
        r"$\sqrt{1 + (\pi / 2L)^2}$ times as long.",
        math.isclose(_last.norm().item(), (1 + (math.pi / 2 / _L) ** 2) ** (_L / 2)),
    )
    return


@app.cell
def _():
    _end = torch.tensor([0.0, 1.0], dtype=torch.float64)
    _errors = [(circle(n, 1 / n)[-1] - _end).norm().item() for n in (8, 16, 32, 64, 128)]

    def _stack(steps):
        # one block of a Transformer, used `steps` times with steps of 1 / steps
        config = ModelConfig(
            vocabulary=20, context=8, width=32, heads=4, layers=steps, distinct_layers=1,
            residual_scale=1.0 / steps, initial="xavier", initial_std=1.0, final_norm=False,
        )  # fmt: skip
        model = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            return model(torch.arange(8)[None], return_hidden=True)

    _flow = _stack(256)
    _gaps = [((_stack(n) - _flow).norm() / _flow.norm()).item() for n in (1, 2, 4, 8)]

    _config = ModelConfig(
        vocabulary=9, context=8, width=16, layers=1, heads=1, positions="none", initial="xavier"
    )
    _block = Transformer(_config, generator=torch.Generator().manual_seed(0)).double().blocks[0]
    _h = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _q, _k, _v = _block.attention.qkv(_block.attention_norm(_h)).split(16, -1)
        _, _pi = attend(_q, _k, _v, prior=Causal(), return_weights=True)
        _note = _block.attention.out(_pi @ _v)
        _by_hand = _h + _note
        _by_hand = _by_hand + _block.mlp(_block.mlp_norm(_by_hand))
        _by_library = _block(_h)
    mo.vstack(
        [
            details(
                claim(
                    "NB-23 E63",
                    "With steps of $1/L$ the error halves when $L$ doubles: "
                    + ", ".join(f"{e:.3f}" for e in _errors)
                    + " for 8 to 128 layers. Eight steps of length 1 end at the distance "
                    f"{circle(8, 1.0)[-1].norm().item():,.0f} from the centre.",
                    all(0.4 < b / a < 0.55 for a, b in pairwise(_errors))
                    and circle(8, 1.0)[-1].norm() > 100,
                ),
                claim(
                    "NB-23 E63",
                    "The same with a block of a transformer, used again and again: 1, 2, 4 and 8 steps miss the motion by "
                    + ", ".join(f"{100 * g:.0f} %" for g in _gaps)
                    + ". One block as it is used, step 1, is not the motion.",
                    _gaps[0] > 0.1 and all(b < 0.75 * a for a, b in pairwise(_gaps)),
                ),
                claim(
                    "AT-09",
                    r"Attention adds $\sum_i \pi_{i,t} v_i$ (after one linear map $W_O$) to the stream, and the second half of the "
                    "block adds to the result. The weights of each token sum to 1.",
                    torch.allclose(_by_hand, _by_library, atol=1e-10)
                    and torch.allclose(_pi.sum(-1), torch.ones(1, 6).double()),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Each token alone: the feed-forward layer

    After attention the tokens have heard each other. Now each one goes to its own workbench. The bench is
    wide: the $d$ entries are spread out to $4d$, each of these is kept or damped by a simple rule, and the
    result is packed back into $d$ entries. The same bench serves every token:

    $$\mathrm{FFN}(x) = \mathrm{GELU}(x W_1 + b_1)\, W_2 + b_2 .$$

    The rule decides what bends. *ReLU* is a switch: $\max(0, x)$. *GELU* is the average of a lottery: keep $x$ with
    probability $\Phi(x)$, else put 0. $\Phi(x)$ is the share of a bell curve (mean 0, spread 1) to the left of $x$.
    On average $x\,\Phi(x)$ is left. *Sigmoid*, $1/(1 + e^{-x})$, maps to numbers between 0 and 1.
    """)
    return


@app.cell
def _():
    at = mo.ui.slider(-3.0, 3.0, step=0.25, value=-0.75, label="$x$", show_value=True)
    at
    return (at,)


@app.cell
def _(at):
    _grid = torch.linspace(-3, 3, 61, dtype=torch.float64)
    _rules = {"GELU": gelu, "ReLU": relu, "sigmoid": torch.sigmoid}
    _x = torch.tensor(at.value, dtype=torch.float64)
    mo.vstack(
        [
            line_chart(
                [
                    {"x": _at, "value": y, "rule": _name}
                    for _name, _rule in _rules.items()
                    for _at, y in zip(_grid.tolist(), _rule(_grid).tolist(), strict=True)
                ],
                "x",
                "value",
                "rule",
                title="Three rules",
                y_range=(-0.5, 3),
                here=[{"x": at.value, "value": _rule(_x).item()} for _rule in _rules.values()],
            ),
            table(
                [
                    {"x": at.value, "kept with probability": torch.special.ndtr(_x).item()}
                    | {_name: _rule(_x).item() for _name, _rule in _rules.items()}
                ]
            ),
        ]
    )
    return


@app.cell
def _():
    _x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    _exact = _x * 0.5 * (1 + torch.erf(_x / 2**0.5))
    _tanh = (_exact - ACTIVATIONS["gelu_tanh"](_x)).abs().max().item()
    _quick = (_exact - _x * torch.sigmoid(1.702 * _x)).abs().max().item()
    _low = _exact.argmin()
    _slope = torch.func.vmap(torch.func.grad(gelu))(_x)
    _steepest = _x[_slope.argmax()].item()
    _places = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    _survive = [round(p, 3) for p in torch.special.ndtr(_places).tolist()]
    _rng = torch.Generator().manual_seed(0)
    _three = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    _kept = torch.rand(1_000_000, 3, dtype=torch.float64, generator=_rng) < torch.special.ndtr(
        _three
    )
    _mean = (_three * _kept).mean(0)
    _near = torch.tensor([-1e-7, 1e-7], dtype=torch.float64)
    _jump = {
        name: torch.func.vmap(torch.func.grad(rule))(_near).diff().item()
        for name, rule in (("gelu", gelu), ("relu", relu))
    }
    _sigmoid = torch.sigmoid(_x)
    mo.vstack(
        [
            claim(
                "NB-19 E40",
                f"*Larger* inputs survive more often: with probability {', '.join(map(str, _survive))} at -1, 0, 1, 2. (Not "
                "those nearer to the mean.) A million lotteries at -1, 0.5 and 2 have the averages "
                f"{', '.join(f'{m:.3f}' for m in _mean.tolist())}; GELU is -0.1587, 0.3457, 1.954.",
                _survive == [0.159, 0.5, 0.841, 0.977]
                and torch.allclose(_mean, gelu(_three), atol=0.004)
                and [f"{y:.4g}" for y in gelu(_three).tolist()] == ["-0.1587", "0.3457", "1.954"],
            ),
            details(
                claim(
                    "NB-16 NB-17",
                    r"GELU is $x\,\Phi(x)$ with the exact bell curve. Two approximations are in use: by $\tanh$ (off by at most "
                    rf"{_tanh:.2e}) and $x \cdot \mathrm{{sigmoid}}(1.702x)$ (off by {_quick:.4f}). A checkpoint must be "
                    "read with the one it was trained with.",
                    torch.allclose(ACTIVATIONS["gelu"](_x), _exact, atol=1e-12)
                    and f"{_tanh:.2e}" == "4.73e-04"
                    and round(_quick, 4) == 0.0203,
                ),
                claim(
                    "NB-18",
                    "GELU lies between 0 and $x$ and is smooth. The slope of ReLU jumps at 0 by "
                    f"{_jump['relu']:g}, that of GELU by {_jump['gelu']:.0e} over the same tiny interval.",
                    (_exact * _x >= 0).all()
                    and (_exact.abs() <= _x.abs()).all()
                    and _jump["relu"] == 1.0
                    and _jump["gelu"] < 1e-6,
                ),
                claim(
                    "NB-20 E41",
                    f"It is not a dimmer that only goes up: it has its minimum {_exact[_low]:.5f} at {_x[_low]:.4f}, and its slope "
                    f"runs from {_slope.min():.4f} to {_slope.max():.4f}, above 1, at $\\sqrt 2$.",
                    round(_exact[_low].item(), 5) == -0.16997
                    and round(_x[_low].item(), 4) == -0.7518
                    and round(_slope.min().item(), 4) == -0.1289
                    and round(_slope.max().item(), 4) == 1.1289
                    and abs(_steepest - 2**0.5) < 1e-3,
                ),
                claim(
                    "NB-22",
                    r"ReLU is $\max(0, x)$. The sigmoid is between 0 and 1, rises everywhere, and its slope is at most 1/4, so 50 of "
                    f"them in a row, with nothing between them, leave at most {0.25**50:.0e} of a gradient.",
                    torch.equal(relu(_x), torch.where(_x > 0, _x, 0.0))
                    and torch.allclose(_sigmoid, 1 / (1 + torch.exp(-_x)))
                    and (_sigmoid.diff() > 0).all()
                    and (_sigmoid * (1 - _sigmoid)).max() <= 0.25,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Practising with players missing

    A team that always trains complete comes to rely on one player. *Dropout* sends each number away with
    probability $p$ while training, and multiplies those that stay by $1/(1 - p)$, so that the average is what it
    was. At evaluation it does nothing. It is applied to attention weights, and inside the feed-forward layer
    *after* the activation: $\mathrm{Dropout}(\mathrm{GELU}(x W_1 + b_1))\, W_2 + b_2$.
    """)
    return


@app.cell
def _():
    chance = mo.ui.slider(
        steps=[0.05, 0.1, 0.2, 0.3, 0.5], value=0.1, label="Dropout $p$", show_value=True
    )
    chance
    return (chance,)


@app.cell
def _(chance):
    _p = chance.value
    _keys = 4
    bar_chart(
        [
            {
                "weights dropped of 4": str(gone),
                "sum of the row": (_keys - gone) / _keys / (1 - _p),
                "probability": math.comb(_keys, gone) * _p**gone * (1 - _p) ** (_keys - gone),
            }
            for gone in range(_keys + 1)
        ],
        "weights dropped of 4",
        "sum of the row",
        title=f"Four equal weights under dropout {_p:g}: what a row sums to",
        y_range=(0, 2),
    )
    return


@app.cell
def _():
    _p = 0.1
    _q = torch.zeros(500, 4, 16, 8)
    _row = _q.new_full((4,), 0.25)
    _row[2] = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _dropped = attend(_q, _q, _q, dropout=_p, return_weights=True)
    _sums = _dropped.sum(-1)
    _config = ModelConfig(vocabulary=2, width=16, heads=2, mlp="gelu", bias=True, mlp_dropout=0.3)
    _mlp = Mlp(_config)
    for _parameter in _mlp.parameters():
        torch.nn.init.normal_(_parameter, generator=torch.Generator().manual_seed(0))
    _seen = []
    _mlp.down.register_forward_pre_hook(lambda _, given: _seen.append(given[0]))
    _x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _mlp.train()(_x)
        _mlp.eval()(_x)
        _wide = _mlp.up(_x)
    _trained, _evaluated = _seen
    _on = _trained != 0
    _other_order = gelu(_wide / 0.7)
    mo.vstack(
        [
            claim(
                "RG-01 E60",
                "Rows of weights no longer sum to 1: with $p = 0.1$, four equal weights of which one is dropped sum to "
                f"{(_row.sum() / (1 - _p)).item():.3f}. The average over {_sums.numel():,} rows of 16 weights is "
                f"{_sums.mean().item():.3f}, single rows lie between {_sums.min().item():.2f} and {_sums.max().item():.2f}.",
                round((_row.sum() / (1 - _p)).item(), 3) == 0.833
                and abs(_sums.mean().item() - 1) < 0.01
                and _sums.min() < 0.9
                and _sums.max() > 1.05
                and torch.allclose(_dropped[_dropped > 0], torch.tensor(1 / 16 / (1 - _p))),
            ),
            details(
                claim(
                    "RG-02 E59",
                    r"In the feed-forward layer dropout acts on the numbers that enter $W_2$: each is 0 or "
                    r"$\mathrm{GELU}(\cdot)/(1 - p)$. Before the activation it would be another function.",
                    torch.allclose(_trained[_on], gelu(_wide)[_on] / 0.7, atol=1e-5)
                    and 0.1 < (~_on).float().mean() < 0.55
                    and (_other_order - gelu(_wide) / 0.7).abs().max() > 0.05,
                ),
                claim(
                    "E60",
                    "At evaluation nothing is dropped and nothing is rescaled.",
                    torch.allclose(_evaluated, gelu(_wide), atol=1e-6)
                    and torch.equal(dropout(_x, 0.3, training=False), _x),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Two experiments

    They train small layers, which takes some seconds. A feed-forward layer alone learns a smooth function of 8 numbers, $\sin(2xA)B$ with
    random tables $A$ and $B$, with several widths inside; then the same with ReLU in place of GELU, six times each from other random beginnings.
    """)
    return


@app.cell
def _():
    def _fit(width, rule, seed, steps=250):
        rng = torch.Generator().manual_seed(seed)
        A, B = torch.randn(2, 8, 8, generator=rng) / 8**0.5
        x, new = torch.randn(2, 512, 8, generator=rng)
        y, new_y = torch.sin(2 * x @ A) @ B, torch.sin(2 * new @ A) @ B
        layer = Mlp(ModelConfig(vocabulary=2, width=8, heads=2, hidden=width, mlp=rule, bias=True))
        for p in layer.parameters():
            deviation = p.shape[-1] ** -0.5 if p.ndim == 2 else 0.0
            torch.nn.init.normal_(p, 0.0, deviation, generator=rng)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
            optimiser.zero_grad()
            (layer(x) - y).square().mean().backward()
            optimiser.step()
        with torch.no_grad():
            return ((layer(new) - new_y).square().mean() / new_y.var()).item()

    widths = (2, 8, 32, 128)
    by_width = {width: _fit(width, "gelu", 0) for width in widths}
    by_rule = {
        rule: torch.tensor([_fit(32, rule, seed) for seed in range(6)]) for rule in ("gelu", "relu")
    }
    return by_rule, by_width


@app.cell
def _(by_rule, by_width):
    _errors = list(by_width.values())
    _gelu, _relu = by_rule["gelu"], by_rule["relu"]
    _wins = int((_gelu < _relu).sum())
    mo.vstack(
        [
            line_chart(
                [{"width inside": w, "error": e} for w, e in by_width.items()],
                "width inside",
                "error",
                title="Error on new data, as a share of the variance of the target (d = 8)",
                log_x=True,
                points=True,
            ),
            claim(
                "NB-15",
                "A wider bench fits better: the error is "
                + ", ".join(f"{e:.2f}" for e in _errors)
                + " for 2, 8, 32 and 128 entries inside.",
                all(a > b for a, b in pairwise(_errors)) and _errors[-1] < _errors[1] / 2,
            ),
            details(
                table(
                    [
                        {"start": i, "error with GELU": a, "error with ReLU": b}
                        for i, (a, b) in enumerate(zip(_gelu.tolist(), _relu.tolist(), strict=True))
                    ]
                ),
                claim(
                    "NB-21",
                    f"GELU against ReLU: GELU is better in {_wins} of 6 pairs. The means differ by "
                    f"{(_gelu.mean() - _relu.mean()).abs().item():.3f}, less than the spread between starts, "
                    f"{torch.cat((_gelu, _relu)).std().item():.3f}. At this size the experiment shows no winner.",
                    (_gelu.mean() - _relu.mean()).abs() < torch.cat((_gelu, _relu)).std()
                    and max(_gelu.max(), _relu.max()) < 1.0,
                ),
                title="GELU against ReLU",
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        stack = names["stack"]
        start = torch.tensor([1.0, 0.0], dtype=torch.float64)
        quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64) * (math.pi / 2)

        def sideways(h):
            return quarter @ h

        end = stack(start, sideways, 64)
        assert torch.is_tensor(end), "Return a tensor."
        assert float(end.norm()) > 0.5, (
            "The point has lost its way: does each layer keep what it had, h + ...?"
        )
        assert float(end.norm()) < 2, (
            "The point has run away: with L layers each step has the length 1/L."
        )
        for layers in (1, 3, 64):
            assert torch.allclose(stack(start, sideways, layers), circle(layers, 1 / layers)[-1]), (
                f"With {layers} layers it differs from h + F(h) / {layers}, {layers} times."
            )

    exercise = Exercise(
        lesson="residuals",
        task="Write `stack(h, F, L)`: `L` residual layers with steps of $1/L$ along the motion `F`. The starter has the layers, but no "
        "skip connection.",
        starter="""
    def stack(h, F, L):
        for _ in range(L):
            h = F(h) / L
        return h
    """,
        solution="""
    def stack(h, F, L):
        for _ in range(L):
            h = h + F(h) / L
        return h
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
    mo.md("""
    ## The stream of your own model
    """)
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
    _ids = torch.tensor([own.tokenizer.encode_whole("the people of the")[: own.config.context]])
    _a = own.config.branch_scale
    _in, _out, _notes, _hooks = [], [], [], []
    for _block in own.model.blocks:
        _attention = _block.attention_post_norm or _block.attention
        _mlp = _block.mlp_post_norm or _block.mlp
        _hooks += [
            _block.register_forward_pre_hook(lambda _, given: _in.append(given[0])),
            _block.register_forward_hook(lambda _, __, made: _out.append(made)),
            _attention.register_forward_hook(lambda _, __, made: _notes.append(_a * made)),
            _mlp.register_forward_hook(lambda _, __, made: _notes.append(_a * made)),
        ]
    with torch.no_grad():
        own.model(_ids)
    for _hook in _hooks:
        _hook.remove()

    def _size(x):
        return x.double().square().mean().sqrt().item()

    _rows = [
        {"after": "embedding", "size": _size(_in[0]), "of": "stream"},
        *(
            row
            for _l in range(len(_out))
            for row in (
                {"after": f"block {_l + 1}", "size": _size(_out[_l]), "of": "stream"},
                {"after": f"block {_l + 1}", "size": _size(_notes[2 * _l]), "of": "attention note"},
                {"after": f"block {_l + 1}", "size": _size(_notes[2 * _l + 1]), "of": "FFN note"},
            )
        ),
    ]
    _post = own.config.norm_place == "post"
    mo.vstack(
        [
            mo.md(
                f"Your model has *{own.config.norm_place}* norms of the kind *{own.config.norm}*. Sizes are root mean squares of the "
                "entries, for the text *the people of the*."
            ),
            bar_chart(
                _rows,
                "after",
                "size",
                "of",
                title="The stream of your model and what is added to it",
            ),
            claim(
                "AT-09 NB-12",
                "The stream after each block is not the stream before it plus the two notes: a norm rescales the sum."
                if _post
                else "The stream after each block is the stream before it plus the two notes, and nothing else.",
                all(
                    torch.allclose(
                        _in[_l] + _notes[2 * _l] + _notes[2 * _l + 1],
                        _out[_l],
                        rtol=1e-3,
                        atol=1e-4,
                    )
                    != _post
                    for _l in range(len(_out))
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "All of this is about the *start* of training, with random weights. Training moves the gain of every layer, and a model "
        "that starts well can still become unstable; that is what clipping and schedules are for. And a motion is followed only with short "
        "steps: a trained stack takes steps of length 1, and nothing makes its layers steps of one motion."
    )
    return


@app.cell
def _():
    footer("residuals")
    return


if __name__ == "__main__":
    app.run()
