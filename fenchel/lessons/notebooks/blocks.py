"""Norms and blocks: normalisation, where it stands, and how a stack begins."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Norms and blocks",
)

with app.setup:
    import math
    import time
    import warnings
    from itertools import pairwise

    import marimo as mo
    import torch
    from torch.nn.functional import cross_entropy, gelu

    import fenchel
    from fenchel.attention import Causal, attend, attention_weights, entropy
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
        number,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )
    from fenchel.model import ModelConfig, Transformer
    from fenchel.model.initialisation import post_norm_trouble
    from fenchel.model.norm import RMSNorm


@app.cell
def _():
    header("blocks")
    return


@app.cell
def _():
    guess = question(
        "Twelve blocks, the same settings, the same text. In one model a norm stands *before* each part, in the other one *after* "
        "each sum. Which of them learns?",
        ["both, equally well", "the one with norms before", "the one with norms after"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "the one with norms before",
        "A norm after the sum turns down what was there before, twelve times two times over. The last section trains both: "
        "one learns, the other hardly begins.",
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
        y_range=(-15, 25),
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
            details(
                claim(
                    "NB-03 E65",
                    r"Before $\gamma$ and $b$ the result has mean 0 and variance $\sigma^2/(\sigma^2 + \varepsilon)$: nearly 1, and "
                    f"{_small.var(-1, correction=0)[0]:.2f} for entries a thousand times as small. Its length is about "
                    rf"$\sqrt{{d}} = {_d**0.5:.2f}$ ({_normal.norm(dim=-1)[0]:.2f} here).",
                    _normal.mean(-1).abs().max() < 1e-12
                    and torch.allclose(
                        _normal.var(-1, correction=0), (_var / (_var + _eps)).squeeze()
                    )
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
                    "E66",
                    r"So RMSNorm is not LayerNorm made cheap: it drops $b$ and the subtraction. The two agree "
                    "only on rows whose mean is 0.",
                    torch.allclose(_rms(_centred), _ln(_centred) - _b, atol=1e-9)
                    and (_rms(_x) - (_ln(_x) - _b)).abs().max() > 0.1
                    and [name for name, _ in _rms.named_parameters()] == ["weight"],
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Why does LayerNorm undo stretching and shifting? Multiply all marks of a class by 3: the average is three times as large, each
            distance from it too, and so is the usual spread. A distance measured in spreads is the same. Add 5 to all marks: the average
            rises by 5, no distance changes. So LayerNorm sees only how the entries of a token compare with each other. RMSNorm
            measures from 0, not from the average: it undoes stretching, but not shifting.""",
        undergraduate=r"""
            With $c = x - \mu \mathbf 1$, $\mathrm{LN}(x) = c / \sqrt{|c|^2/d + \varepsilon}$ (before $\gamma$ and $b$) has the length $\sqrt d$ up to $\varepsilon$. Its Jacobian at $\varepsilon = 0$ is
            $\frac{\sqrt d}{|c|}\left(I - \frac{\mathbf 1 \mathbf 1^\top}{d} - \frac{c c^\top}{|c|^2}\right)$: a projection that removes two directions, shift and stretch, times
            $1/\sigma$. So a token with a small spread is sensitive, at most by $1/\sqrt\varepsilon$. Under *post* a gradient meets such a factor after every
            sum; under *pre* it also travels along the stream, past all norms.""",
        research=r"""
            With norms before, $\partial \mathcal L / \partial h_l$ has a term that does not depend on the weights of the blocks above (Xiong et al. 2020), and the
            variance of the stream grows with depth, so late branches change it little; depth-scaled branches and DeepNorm (Wang et al.
            2022) trade between the two. The bound $\mathbb{E}|h_n|^2 = (1 + \alpha^2)^n$ assumes notes uncorrelated with the stream.""",
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

    A block has two notes to add, one by multi-head attention ($\mathrm{MHA}$, [masks and heads](../masks_and_heads/)) and one by the
    feed-forward layer ($\mathrm{FFN}$, [residuals](../residuals/)). The norm can stand *before* each of them or *after* the sum:

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
        y_range=(1, 1e12),
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
                rf"A factor below 1 is no protection: $\alpha = 0.5$ and 96 notes give $1.25^{{96}}$, {number(1.25**96, 3)}. "
                r"$\alpha = 1/\sqrt{n}$ for $n$ notes keeps the variance below $e = 2.718$, however many they are.",
                f"{1.25**96:.0e}" == "2e+09"
                and all((1 + 1 / n) ** n < math.e for n in range(1, 2000)),
            ),
            details(
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
            details(
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
        y_range=(0, 3),
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
            details(
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
            details(
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
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Two experiments

    They train small models, which takes some seconds: a toy language (17 tokens, each a noisy function of an earlier one), first with RMSNorm and with LayerNorm,
    then with 12 layers and norms before or after. Losses are in nats per token; guessing costs $\log 17 = 2.83$.
    """)
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
            details(
                claim(
                    "NB-06",
                    f"RMSNorm learns the toy about as well as LayerNorm: {_norms['rms']:.2f} and {_norms['layer']:.2f} nats after "
                    f"80 steps, {abs(_norms['rms'] - _norms['layer']):.2f} apart; guessing costs 2.83.",
                    abs(_norms["rms"] - _norms["layer"]) < 0.3 and max(_norms.values()) < 2.5,
                ),
            ),
            mo.md(
                "RMSNorm takes one average where LayerNorm takes two. Written out in torch, on this machine, just now: "
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
        lesson="blocks",
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
    _seen, _hooks = {}, []
    for _l, _block in enumerate(own.model.blocks):
        for _part in ("attention", "mlp"):
            _norm = getattr(_block, f"{_part}_norm")

            def _keep(module, given, made, name=f"{_part} {_l + 1}"):
                _seen[name] = (module, given[0].double(), made.double())

            _hooks.append(_norm.register_forward_hook(_keep))
    with torch.no_grad():
        own.model(_ids)
    for _hook in _hooks:
        _hook.remove()

    def _formula(module, x):
        if own.config.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        normed = x / (x.square().mean(-1, keepdim=True) + own.config.epsilon).sqrt()
        bias = getattr(module, "bias", None)
        gain = getattr(module, "gain", module.weight)
        shift = 0.0 if bias is None else bias.double()
        return normed * (1.0 if gain is None else gain.double()) + shift

    def _size(x):
        return x.square().mean().sqrt().item()

    _rows = [
        {"norm of": name, "size": _size(x), "of": which}
        for name, (_, before, after) in _seen.items()
        for which, x in (("before the norm", before), ("after it", after))
    ]
    mo.vstack(
        [
            mo.md(
                f"The model has *{own.config.norm_place}* norms of the kind *{own.config.norm}*. Sizes are root mean squares of the entries, for the text "
                "*the people of the*."
            ),
            bar_chart(
                _rows, "norm of", "size", "of", title="The stream before and after each norm"
            ),
            claim(
                "NB-01 NB-05",
                "Every norm of the model is the formula above, with its own $\\gamma$: written out, the results agree.",
                all(
                    torch.allclose(_formula(module, x), y, rtol=1e-3, atol=1e-4)
                    for module, x, y in _seen.values()
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "The compound interest "
        "assumes that notes are unrelated to the stream: notes that point along it grow faster, notes against it erase. "
        "And a deep pre-norm stack has its own cost: late notes are small beside a large stream, so late layers change little."
    )
    return


@app.cell
def _():
    footer("blocks")
    return


if __name__ == "__main__":
    app.run()
