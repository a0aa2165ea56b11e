"""Normalisation, residuals and blocks: what lets a deep stack be trained."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Normalisation, residuals and blocks",
)

with app.setup:
    import math
    import time
    import warnings
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch.nn.functional import cross_entropy, dropout, gelu, relu

    import fenchel
    from fenchel.attention import Causal, attend, attention_weights, entropy
    from fenchel.lessons.scene import Scene
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
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
    from fenchel.model.initialisation import post_norm_trouble
    from fenchel.model.mlp import ACTIVATIONS, Mlp
    from fenchel.model.norm import RMSNorm


@app.cell
def _():
    header("l14_blocks")
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
    stack = Scene("residual_circle", {"layers": 6})
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
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Marks on a common scale

    One teacher gives marks between 50 and 60, another between 0 and 100. To compare pupils you say how far
    above the average of the class a mark is, in units of the usual spread. **LayerNorm** does this to
    the $d$ entries of one token:

    $$\mathrm{LN}(x) = \gamma * \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} + b .$$

    $\mu$ is the mean of the $d$ entries, $\sigma^2 = \frac1d \sum_i (x_i - \mu)^2$ their variance (divided by $d$, not
    $d - 1$). $\gamma$ and $b$ are learned, one number per entry (many texts write $\beta$ for $b$); $*$ multiplies entry by entry; $\varepsilon = 10^{-5}$ keeps
    the division from failing. **RMSNorm** does not subtract the mean and adds nothing:
    $\gamma * x / \sqrt{\operatorname{mean}(x^2) + \varepsilon}$.
    """)
    return


@app.cell
def _():
    stretch = mo.ui.slider(
        steps=[0.1, 0.5, 1.0, 2.0, 10.0], value=1.0, label="Multiply $x$ by", show_value=True
    )
    shift = mo.ui.slider(-3.0, 3.0, step=0.5, value=0.0, label="Add to $x$", show_value=True)
    mo.vstack([stretch, shift])
    return shift, stretch


@app.cell
def _(shift, stretch):
    _x = torch.tensor([2.0, -1.0, 0.5, 1.0, -0.5], dtype=torch.float64)
    _y = stretch.value * _x + shift.value
    _layer = torch.nn.LayerNorm(5, elementwise_affine=False, dtype=torch.float64)
    _rms = RMSNorm(5, eps=1e-5).double()
    with torch.no_grad():
        _normed = {"x": _y, "LayerNorm": _layer(_y), "RMSNorm": _rms(_y)}
    bar_chart(
        [
            {"entry": str(_i), "value": v, "vector": _name}
            for _name, _values in _normed.items()
            for _i, v in enumerate(_values.tolist())
        ],
        "entry",
        "value",
        "vector",
        title="A vector of five entries, before and after",
        y_range=(-10, 20),
    )
    return


@app.cell
def _():
    _rng = torch.Generator().manual_seed(0)
    _n, _d, _eps = 6, 32, 1e-5
    _x = 3 * torch.randn(_n, _d, dtype=torch.float64, generator=_rng) + 1
    _gamma, _b = torch.randn(2, _d, dtype=torch.float64, generator=_rng)
    _ln, _rms = torch.nn.LayerNorm(_d, eps=_eps).double(), RMSNorm(_d, eps=_eps).double()
    for _norm in (_ln, _rms):
        _norm.requires_grad_(False)
    _plain = torch.nn.LayerNorm(_d, eps=_eps).double()
    _mu = _x.mean(-1, keepdim=True)
    _var = ((_x - _mu) ** 2).mean(-1, keepdim=True)
    with torch.no_grad():
        _ln.weight.copy_(_gamma)
        _ln.bias.copy_(_b)
        _rms.weight.copy_(_gamma)
        _normal = _plain(_x)
        _constant = torch.full((_d,), 7.0, dtype=torch.float64)
        _small = _plain(1e-3 * _x)
        _small_var = 1e-6 * _var
    _slope = torch.func.jacrev(_plain)(_constant).detach()
    _steep = torch.linalg.matrix_norm(_slope, 2).item()
    _centred = _x - _mu
    mo.vstack(
        [
            claim(
                "NB-01 NB-02",
                r"The library's norm is this formula. $\gamma$ and $b$ have one entry per feature and serve all "
                f"{_n} rows of the {_n} x {_d} input.",
                torch.allclose(_ln(_x), _gamma * (_x - _mu) / (_var + _eps).sqrt() + _b, atol=1e-10)
                and _ln.weight.shape == _ln.bias.shape == (_d,)
                and _ln(_x).shape == (_n, _d),
            ),
            claim(
                "NB-03 E65",
                r"Before $\gamma$ and $b$ the result has mean 0 and variance $\sigma^2/(\sigma^2 + \varepsilon)$: nearly 1, and "
                f"{_small.var(-1, correction=0)[0]:.2f} for entries a thousand times as small. Its length is about "
                rf"$\sqrt{{d}} = {_d**0.5:.2f}$ ({_normal.norm(dim=-1)[0]:.2f} here).",
                _normal.mean(-1).abs().max() < 1e-12
                and torch.allclose(_normal.var(-1, correction=0), (_var / (_var + _eps)).squeeze())
                and torch.allclose(
                    _small.var(-1, correction=0),
                    (_small_var / (_small_var + _eps)).squeeze(),
                )
                and torch.allclose(
                    _normal.norm(dim=-1), torch.full((_n,), _d**0.5).double(), rtol=1e-4
                ),
            ),
            claim(
                "E65",
                rf"Equal entries have no spread: LayerNorm maps them to $b$, and a small change is magnified by "
                rf"$1/\sqrt{{\varepsilon}} = {_steep:.0f}$.",
                torch.allclose(_ln(_constant), _b, atol=1e-9) and round(_steep) == 316,
            ),
            claim(
                "NB-05 NB-06",
                r"RMSNorm is $\gamma * x/\sqrt{\operatorname{mean}(x^2) + \varepsilon}$. A common factor changes nothing; a common shift does, "
                "unlike in LayerNorm.",
                torch.allclose(
                    _rms(_x),
                    _gamma * _x / (_x.square().mean(-1, keepdim=True) + _eps).sqrt(),
                )
                and torch.allclose(_rms(10 * _x), _rms(_x), rtol=1e-4)
                and (_rms(_x + 5) - _rms(_x)).abs().max() > 0.1
                and torch.allclose(_ln(10 * _x + 5), _ln(_x), rtol=1e-4, atol=1e-4),
            ),
            claim(
                "E66",
                r"So RMSNorm is not LayerNorm made cheap: it drops $b$ and the subtraction. The two agree "
                "only on rows whose mean is 0.",
                torch.allclose(_rms(_centred), _ln(_centred) - _b, atol=1e-9)
                and (_rms(_x) - (_ln(_x) - _b)).abs().max() > 0.1
                and [name for name, _ in _rms.named_parameters()] == ["weight"],
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ### Why not the average over the batch?

    *BatchNorm* takes mean and variance of one feature over all tokens in the batch. Then the result for your
    sentence depends on the sentences beside it, and on how much padding makes them equally long. (After
    training it uses averages stored until then.) LayerNorm looks at one token alone.
    """)
    return


@app.cell
def _():
    _rng = torch.Generator().manual_seed(0)
    _mine = torch.randn(3, 16, dtype=torch.float64, generator=_rng)
    _other = 2 + 3 * torch.randn(9, 16, dtype=torch.float64, generator=_rng)
    _pad = torch.zeros(6, 16, dtype=torch.float64)
    _layer = torch.nn.LayerNorm(16, elementwise_affine=False).double()
    _batch = torch.nn.BatchNorm1d(16, affine=False).double()
    _companions = {
        "nothing": [],
        "padding to 9 tokens": [_pad],
        "a sentence of 9 tokens, and padding": [_pad, _other],
    }

    def _first(norm, extra):
        return norm(torch.cat([_mine, *extra]))[:3]

    _moved = [
        {
            "my 3 tokens in a batch with": _name,
            "change under LayerNorm": (_first(_layer, _extra) - _first(_layer, [])).norm().item(),
            "change under BatchNorm": (_first(_batch, _extra) - _first(_batch, [])).norm().item(),
        }
        for _name, _extra in _companions.items()
    ]
    try:
        _batch(_mine[:1])
        _single = ""
    except ValueError as _error:
        _single = str(_error)
    mo.vstack(
        [
            table(_moved),
            claim(
                "NB-04",
                "LayerNorm gives the same result in every company; BatchNorm does not, and in training it refuses a "
                "batch of a single token, whose spread is 0.",
                all(row["change under LayerNorm"] == 0 for row in _moved)
                and all(row["change under BatchNorm"] > 0.5 for row in _moved[1:])
                and "more than 1 value per channel" in _single,
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Where the norm stands, and how large the notes are

    A block has two notes to add, one by multi-head attention ($\mathrm{MHA}$, lesson 10) and one by the
    feed-forward layer ($\mathrm{FFN}$, below). The norm can stand *before* each of them or *after* the sum:

    $$\text{pre: } h + F(\mathrm{LN}(h)), \qquad \text{post: } \mathrm{LN}(h + F(h)).$$

    Under *pre* the loudspeaker is never touched, and the stream grows with every note, so one more norm is
    needed at the end. Under *post* every norm turns down what was there before: after one note as large as
    the stream, and unrelated to it, half of the old variance is left, after the $2L$ notes of $L$ blocks $2^{-2L}$.

    How fast does a stream grow? If a note has the variance of the stream, is unrelated to it and has a factor $\alpha$ in front, the
    variance is multiplied by $1 + \alpha^2$ each time: $(1 + \alpha^2)^n$ after $n$ notes, compound interest.
    """)
    return


@app.cell
def _():
    alpha = mo.ui.dropdown(
        {"1": 1.0, "0.5": 0.5, "0.2": 0.2, "0.1": 0.1}, value="0.5", label=r"Factor $\alpha$"
    )
    alpha
    return (alpha,)


@app.cell
def _(alpha):
    line_chart(
        [
            {"notes": n, "variance of the stream": (1 + a * a) ** n, "factor": _name}
            for n in range(1, 97, 5)
            for _name, a in ((f"{alpha.value:g}", alpha.value), ("1 / sqrt(notes)", n**-0.5))
        ],
        "notes",
        "variance of the stream",
        "factor",
        title="Compound interest on the stream, from variance 1",
        log_y=True,
    )
    return


@app.function
def deep(norm_place, layers, **settings):
    """A fresh model of width 64, without the advice that the library gives on its depth."""
    sizes = {"vocabulary": 60, "context": 16, "width": 64, "heads": 4, "layers": layers}
    kind = {"norm": "layer", "mlp": "gelu", "positions": "learned", "tied": False}
    start = {"initial": "xavier", "initial_std": 1.0, "final_norm": norm_place == "pre"}
    config = ModelConfig(**(sizes | kind | start | settings), norm_place=norm_place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Transformer(config, generator=torch.Generator().manual_seed(0))


@app.cell
def _():
    def _grown(alpha, notes):
        generator = torch.Generator().manual_seed(0)
        h = torch.randn(256, 256, generator=generator)
        for _ in range(notes):
            h = h + alpha * h @ torch.randn(256, 256, generator=generator) / 16
        return h.var().item()

    _measured = _grown(0.5, 24), _grown(24**-0.5, 24)
    mo.vstack(
        [
            claim(
                "NB-07 E62",
                rf"A factor below 1 is no protection: $\alpha = 0.5$ and 96 notes give $1.25^{{96}}$, {1.25**96:,.0f}. "
                r"$\alpha = 1/\sqrt{n}$ for $n$ notes keeps the variance below $e = 2.718$, however many they are.",
                f"{1.25**96:.0e}" == "2e+09"
                and all((1 + 1 / n) ** n < math.e for n in range(1, 2000)),
            ),
            claim(
                "NB-07",
                f"With random linear notes, 24 of them: {_measured[0]:.0f} measured, $1.25^{{24}} = {1.25**24:.0f}$; with "
                rf"$1/\sqrt{{24}}$ {_measured[1]:.2f} measured. In the library: "
                '`residual_scale="depth"`.',
                0.7 < _measured[0] / 1.25**24 < 1.4
                and _measured[1] < 3
                and ModelConfig(vocabulary=9, layers=8, residual_scale="depth").branch_scale
                == 16**-0.5,
            ),
        ]
    )
    return


@app.cell
def _():
    _ids = torch.arange(48).view(3, 16)

    def _by_layer(place, layers):
        model = deep(place, layers)
        logits = model(_ids)[:, :-1].flatten(0, 1)
        cross_entropy(logits, _ids[:, 1:].flatten()).backward()
        return [block.mlp.down.weight.grad.norm().item() for block in model.blocks]

    def _variances(layers, final_norm):
        model, seen = deep("pre", layers, final_norm=final_norm), []
        model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with torch.no_grad():
            after = model(_ids, return_hidden=True)
        return seen[0].var().item(), after.var().item()

    depths = (6, 24, 54)
    _gradients = {(place, n): _by_layer(place, n) for place in ("pre", "post") for n in depths}
    _ratios = [_gradients["post", n][-1] / _gradients["pre", n][-1] for n in depths]
    _growths = [b / a for a, b in (_variances(n, final_norm=False) for n in depths)]
    _normed = [_variances(n, final_norm=True)[1] for n in depths]
    _config = ModelConfig(vocabulary=16, layers=54, norm_place="post", initial="xavier")
    _advice = post_norm_trouble(_config)
    mo.vstack(
        [
            line_chart(
                [
                    {"layer": _l + 1, "norm of the gradient": g, "norm": f"{place}, {n} layers"}
                    for (place, n), _norms in _gradients.items()
                    if n != 6
                    for _l, g in enumerate(_norms)
                ],
                "layer",
                "norm of the gradient",
                "norm",
                title="Gradients of the feed-forward layers of fresh models",
                log_y=True,
            ),
            claim(
                "NB-10",
                "At the start the gradient of the last layer is larger with norms after the notes than before, the more so "
                "the deeper: "
                + ", ".join(f"{r:.1f}" for r in _ratios)
                + " times at 6, 24 and 54 layers. A learning rate that is right for *pre* can be too large there: one reason for "
                "the warm-up that *post* usually needs.",
                _ratios[0] > 1.3 and _ratios[0] < _ratios[1] < _ratios[2],
            ),
            claim(
                "NB-13 E61",
                "Under *pre* the variance of the stream grows: "
                + ", ".join(f"{g:.1f}" for g in _growths)
                + " times at 6, 24 and 54 layers. The norm after the last block brings it back to "
                + ", ".join(f"{g:.2f}" for g in _normed)
                + ".",
                _growths[0] > 2
                and _growths[1] > 3 * _growths[0]
                and _growths[2] > 1.5 * _growths[1]
                and all(abs(g - 1) < 0.01 for g in _normed),
            ),
            claim(
                "NB-11",
                f"The library warns when it builds a post-norm model that is too deep: *{_advice}*",
                _advice is not None
                and post_norm_trouble(
                    ModelConfig(vocabulary=16, layers=6, norm_place="post", initial="xavier")
                )
                is None
                and post_norm_trouble(
                    ModelConfig(vocabulary=16, layers=54, norm_place="pre", initial="xavier")
                )
                is None,
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
                "NB-16 NB-17",
                r"GELU is $x\,\Phi(x)$ with the exact bell curve. Two approximations are in use: by $\tanh$ (off by at most "
                rf"{_tanh:.2e}) and $x \cdot \mathrm{{sigmoid}}(1.702x)$ (off by {_quick:.4f}). A checkpoint must be "
                "read with the one it was trained with.",
                torch.allclose(ACTIVATIONS["gelu"](_x), _exact, atol=1e-12)
                and f"{_tanh:.2e}" == "4.73e-04"
                and round(_quick, 4) == 0.0203,
            ),
            claim(
                "NB-19 E40",
                f"*Larger* inputs survive more often: with probability {', '.join(map(str, _survive))} at -1, 0, 1, 2. (Not "
                "those nearer to the mean.) A million lotteries at -1, 0.5 and 2 have the averages "
                f"{', '.join(f'{m:.3f}' for m in _mean.tolist())}; GELU is -0.1587, 0.3457, 1.954.",
                _survive == [0.159, 0.5, 0.841, 0.977]
                and torch.allclose(_mean, gelu(_three), atol=0.004)
                and [f"{y:.4g}" for y in gelu(_three).tolist()] == ["-0.1587", "0.3457", "1.954"],
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
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## How to begin

    A choir sings at a steady volume if every singer is as loud as those before. A linear map from $n_{in}$ to
    $n_{out}$ entries whose weights have the variance $v$ multiplies the variance of its input by $n_{in} v$.
    Backwards, gradients are multiplied by $n_{out} v$. *Xavier* initialisation takes the middle:
    $v = 2/(n_{in} + n_{out})$.

    Queries and keys may begin smaller than that: their products, the scores, are then near 0, and attention begins
    by looking at all tokens evenly. *Entropy* measures how even: it is 0 if one token gets all the weight, and $\log n$ if $n$
    tokens share it equally, in *nats*, the unit of the natural logarithm.
    """)
    return


@app.cell
def _():
    size_qk = mo.ui.slider(
        steps=[0.1, 0.3, 1.0, 2.0, 3.0],
        value=1.0,
        label="Factor on fresh queries and keys",
        show_value=True,
    )
    size_qk
    return (size_qk,)


@app.function
def fresh_entropy(factor):
    """Entropy (nats) of the weights of each of 16 tokens in the first layer of a fresh model."""
    model = deep("pre", 1, initial_qk=factor)
    seen = []
    with torch.no_grad():
        model(
            torch.arange(16)[None],
            observe=lambda _, q, k, __: seen.append(
                entropy(attention_weights(q, k, prior=Causal()))
            ),
        )
    return seen[0][0].mean(0)


@app.cell
def _(size_qk):
    line_chart(
        [
            {"token": _t + 1, "entropy (nats)": h, "weights": _name}
            for _name, _values in (
                (f"factor {size_qk.value:g}", fresh_entropy(size_qk.value).tolist()),
                ("even", [math.log(n) for n in range(1, 17)]),
            )
            for _t, h in enumerate(_values)
        ],
        "token",
        "entropy (nats)",
        "weights",
        title="How evenly a fresh model attends",
    )
    return


@app.cell
def _():
    def _gain(inputs, outputs, deviation):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(500, inputs, generator=generator)
        return (x @ (deviation * torch.randn(inputs, outputs, generator=generator))).var().item()

    _square = _gain(512, 512, math.sqrt(2 / 1024))
    _mistaken = _gain(512, 512, 2 / 1024)
    _up, _down = (_gain(a, b, math.sqrt(2 / 2560)) for a, b in ((512, 2048), (2048, 512)))
    _mlp = deep("pre", 1).blocks[0].mlp
    _x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    _halved = _x.relu().square().mean().item()
    _bent = gelu(_x).square().mean().item()
    _evenness = [fresh_entropy(f).mean().item() for f in (0.1, 0.3, 1.0, 2.0, 3.0)]
    mo.vstack(
        [
            claim(
                "NB-26 E46",
                f"Xavier keeps the variance between equal widths ({_square:.2f}). $2/(n_{{in}} + n_{{out}})$ is a *variance*: "
                f"torch and numpy take the standard deviation, its root. Without the root {_mistaken:.3f} is left.",
                abs(_square - 1) < 0.03
                and round(_mistaken, 3) == 0.002
                and abs(_mlp.up.weight.var().item() / (2 / (64 + 256)) - 1) < 0.05,
            ),
            claim(
                "E46",
                f"Between unequal widths it is a compromise: 512 to 2048 leaves {_up:.2f} of the variance, and the way back "
                f"multiplies by {_down:.2f}. ReLU halves the mean square ({_halved:.2f}; GELU leaves {_bent:.2f}), which a "
                "gain of 2 in the variance (He) makes up for.",
                round(_up, 2) == 0.40
                and abs(_down - 1.6) < 0.03
                and abs(_halved - 0.5) < 0.01
                and _bent < 0.5,
            ),
            claim(
                "NB-27",
                "Smaller queries and keys attend more evenly: the mean entropy is "
                + ", ".join(f"{h:.2f}" for h in _evenness)
                + " nats for the factors of the slider.",
                all(a > b for a, b in pairwise(_evenness)),
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
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## All parts together

    One pre-norm block, with $x$ the stream that comes in:

    $$\begin{aligned} h_1 &= \mathrm{LN}(x), & h_2 &= x + \mathrm{MHA}(h_1, h_1, h_1), \\
    h_3 &= \mathrm{LN}(h_2), & y &= h_2 + \mathrm{FFN}(h_3). \end{aligned}$$

    A decoder is an embedding, a stack of such blocks, a last norm, and the embedding once more, transposed, as
    the map to the logits (*tied* head).
    """)
    return


@app.cell
def _():
    _sizes = {"vocabulary": 11, "context": 8, "width": 32, "heads": 4, "layers": 3}
    _kind = {"norm": "layer", "mlp": "gelu", "positions": "learned", "bias": True}
    _start = {"initial": "xavier", "initial_std": 0.5}
    _ids = torch.tensor([[1, 5, 2, 8, 3, 0]])

    def _model(place):
        config = ModelConfig(**_sizes, **_kind, **_start, norm_place=place)
        rng = torch.Generator().manual_seed(0)
        return Transformer(config, generator=rng).double().eval()

    def _heads(attention, x):
        q, k, v = (part.view(1, 6, 4, 8).transpose(1, 2) for part in attention.qkv(x).split(32, -1))
        return attention.out(attend(q, k, v, prior=Causal()).transpose(1, 2).reshape(1, 6, 32))

    def _pre(block, x):
        h1 = block.attention_norm(x)
        h2 = x + _heads(block.attention, h1)
        h3 = block.mlp_norm(h2)
        mlp = gelu(h3 @ block.mlp.up.weight.T + block.mlp.up.bias)
        return h2 + mlp @ block.mlp.down.weight.T + block.mlp.down.bias

    def _post(block, x):
        h = block.attention_norm(x + _heads(block.attention, x))
        return block.mlp_norm(h + block.mlp(h))

    _agree = {}
    with torch.no_grad():
        for _place, _step in (("pre", _pre), ("post", _post)):
            _m = _model(_place)
            _x = _m.embed.weight[_ids] + _m.pos_embed.weight[:6]
            for _block in _m.blocks:
                _x = _step(_block, _x)
            _agree[_place] = torch.allclose(_m.norm(_x) @ _m.embed.weight.T, _m(_ids), atol=1e-9)
        _mlp = _model("pre").blocks[0].mlp
        _tokens = torch.randn(
            5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        _alone = torch.stack([_mlp(t) for t in _tokens])
        _together = _mlp(_tokens)
    _wide = ModelConfig(vocabulary=8, width=512, heads=8, layers=1, mlp="gelu", bias=True)
    _big = Transformer(_wide).blocks[0]
    _attention = sum(m.weight.numel() for m in (_big.attention.qkv, _big.attention.out))
    _ffn = sum(m.weight.numel() for m in (_big.mlp.up, _big.mlp.down))
    _with_biases = sum(p.numel() for p in _big.mlp.parameters())
    mo.vstack(
        [
            claim(
                "NB-08 NB-12 NB-13 NB-28",
                "Three pre-norm blocks written out as above, with embedding, last norm and tied head, give the library's "
                "logits.",
                _agree["pre"],
            ),
            claim(
                "NB-09",
                "So do three post-norm blocks, each norm after its sum.",
                _agree["post"],
            ),
            claim(
                "NB-14",
                f"The feed-forward layer is {_wide.mlp_width // _wide.width} times as wide inside, and treats each token "
                "alone: all tokens at once or one by one, the result is the same.",
                torch.allclose(_alone, _together, atol=1e-12)
                and _wide.mlp_width == 4 * 512
                and _mlp.up.weight.shape == (128, 32)
                and _mlp.down.weight.shape == (32, 128),
            ),
            claim(
                "NB-29",
                f"At $d = 512$ attention has $4 d^2 = {_attention:,}$ weights and the feed-forward layer $8 d^2 = {_ffn:,}$; "
                f"with biases {_with_biases:,}.",
                _attention == 4 * 512**2 and _ffn == 8 * 512**2 and _with_biases == 2_099_712,
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Four experiments

    They train small models, which takes some seconds. Losses of the toy language are in nats per token; guessing
    costs $\log 17 = 2.83$.

    1. A feed-forward layer alone learns a smooth function of 8 numbers, $\sin(2xA)B$ with random tables $A$ and $B$, with several widths inside.
    2. The same with ReLU in place of GELU, six times each from other random beginnings.
    3. A toy language (17 tokens, each a noisy function of an earlier one), RMSNorm against LayerNorm.
    4. The same with 12 layers, norms before against norms after.
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
        ]
    )
    return


@app.cell
def _():
    def _toy(rng, sequences, length, lag):
        ids = torch.randint(17, (sequences, length), generator=rng)
        keep = torch.rand(sequences, length, generator=rng) < 0.85
        for t in range(lag, length):
            ids[:, t] = torch.where(keep[:, t], (5 * ids[:, t - lag] + 1) % 17, ids[:, t])
        return ids

    def _learn(*, steps, rate, sequences, length, lag, **settings):
        config = ModelConfig(vocabulary=17, context=length, width=32, heads=4, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Transformer(config, generator=torch.Generator().manual_seed(0))
        rng = torch.Generator().manual_seed(100)
        optimiser, found = torch.optim.AdamW(model.parameters(), lr=rate), []
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
            ids = _toy(rng, sequences, length, lag)
            loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    _small = {"steps": 80, "rate": 1e-2, "sequences": 16, "length": 24, "lag": 3, "layers": 2}
    by_norm = {name: _learn(**_small, norm=name) for name in ("rms", "layer")}
    _tall = {"steps": 60, "rate": 3e-3, "sequences": 8, "length": 16, "lag": 1, "layers": 12}
    _tall |= {"norm": "layer", "mlp": "gelu", "initial": "xavier"}
    by_place = {
        place: _learn(**_tall, norm_place=place, final_norm=place == "pre")
        for place in ("pre", "post")
    }

    def _milliseconds(f):
        x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(0))
        taken = []
        for _ in range(15):
            begin = time.perf_counter()
            f(x)
            taken.append(time.perf_counter() - begin)
        return 1000 * sorted(taken)[7]

    def _written_layer(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def _written_rms(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    times = {"LayerNorm": _milliseconds(_written_layer), "RMSNorm": _milliseconds(_written_rms)}
    return by_norm, by_place, times


@app.cell
def _(by_norm, by_place, times):
    def _last(found):
        return sum(found[-10:]) / 10

    _norms = {name: _last(found) for name, found in by_norm.items()}
    _places = {name: _last(found) for name, found in by_place.items()}
    mo.vstack(
        [
            claim(
                "NB-06",
                f"RMSNorm learns the toy about as well as LayerNorm: {_norms['rms']:.2f} and {_norms['layer']:.2f} nats after "
                f"80 steps, {abs(_norms['rms'] - _norms['layer']):.2f} apart; guessing costs 2.83.",
                abs(_norms["rms"] - _norms["layer"]) < 0.3 and max(_norms.values()) < 2.5,
            ),
            mo.md(
                "It has one average to take instead of two. Written out in torch, on this machine, just now: "
                f"{times['RMSNorm']:.2f} ms against {times['LayerNorm']:.2f} ms for 2048 tokens of width 256. (A fused kernel "
                "can turn this round: what counts is how often the numbers are read.)"
            ),
            line_chart(
                [
                    {"step": step + 1, "loss (nats)": sum(found[step : step + 5]) / 5, "norm": name}
                    for name, found in by_place.items()
                    for step in range(0, 56, 5)
                ],
                "step",
                "loss (nats)",
                "norm",
                title="12 layers, norms before (pre) or after (post) the notes",
            ),
            claim(
                "NB-10 NB-11",
                f"With 12 layers and the same settings *pre* learns ({_places['pre']:.2f} nats) and *post* learns little or nothing "
                f"({_places['post']:.2f}; guessing costs 2.83).",
                _places["pre"] < 2.2 and _places["post"] > _places["pre"] + 0.4,
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        layer_norm = names["layer_norm"]
        rng = torch.Generator().manual_seed(0)
        x = 2 + 3 * torch.randn(4, 6, dtype=torch.float64, generator=rng)
        gamma, b = torch.randn(2, 6, dtype=torch.float64, generator=rng)
        y = layer_norm(x, gamma, b, 1e-5)
        assert torch.is_tensor(y), "Return a tensor."
        assert y.shape == x.shape, "The result has the shape of x: mind keepdim=True."
        plain = (y - b) / gamma
        assert plain.mean(-1).abs().max() < 1e-6, (
            "Each row (token) should have mean 0 before gamma and b: average over the last axis."
        )
        expected = torch.nn.functional.layer_norm(x, (6,), gamma, b, 1e-5)
        assert torch.allclose(y, expected), (
            "The spread is not right: the variance divides by d, not d - 1 (correction=0)."
        )
        same = torch.ones(1, 6, dtype=torch.float64)
        same[0, 0] += 1e-4
        assert torch.allclose(
            layer_norm(same, gamma, b, 1e-5),
            torch.nn.functional.layer_norm(same, (6,), gamma, b, 1e-5),
        ), "Nearly equal entries: epsilon is added to the variance, under the root."

    exercise = Exercise(
        lesson="l14_blocks",
        task="Mend `layer_norm(x, gamma, b, eps)`: the formula of this lesson for each row of `x`.",
        starter="""
    def layer_norm(x, gamma, b, eps):
        mu = x.mean(-1, keepdim=True)
        sigma = x.std(-1, keepdim=True)
        return gamma * (x - mu) / (sigma + eps) + b
    """,
        solution="""
    def layer_norm(x, gamma, b, eps):
        mu = x.mean(-1, keepdim=True)
        variance = ((x - mu) ** 2).mean(-1, keepdim=True)
        return gamma * (x - mu) / torch.sqrt(variance + eps) + b
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
        "that starts well can still become unstable; that is what clipping and schedules are for. The compound interest "
        "assumes that notes are unrelated to the stream: notes that point along it grow faster, notes against it erase. "
        "And a deep pre-norm stack has its own cost: late notes are small beside a large stream, so late layers change little."
    )
    return


@app.cell
def _():
    footer("l14_blocks")
    return


if __name__ == "__main__":
    app.run()
