"""Masks and heads: who may be asked, several attentions side by side, layer upon layer."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Masks and heads",
)

with app.setup:
    import math

    import marimo as mo
    import torch

    import fenchel
    from fenchel.attention import (
        head_patterns,
        self_attention,
    )
    from fenchel.evaluate import attention_maps
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
        details,
        footer,
        header,
        heat_chart,
        no_run,
        proof,
        question,
        run_picker,
        table,
        text_field,
        token_ids,
        what_breaks,
        words_and_weights,
    )
    from fenchel.model import ForwardContext
    from fenchel.pipeline import PRESETS
    from fenchel.sensitivity import influence


@app.function
def matrix(rows):
    """A float64 tensor of numbers set by hand."""
    return torch.tensor(rows, dtype=torch.float64)


@app.function
def draw(*shape, seed=0):
    """Normal numbers, the same at every visit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@app.cell
def _():
    header("masks_and_heads")
    return


@app.cell
def _():
    guess = question(
        "A layer of attention of width 512 has one *head*. You replace it by eight heads of width 64, which attend in eight "
        "different ways. How many parameters does it have now?",
        ["eight times as many", "as many as before", "an eighth"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "as many as before",
        "Each head is narrower by as much as there are more of them: 8 tables of 512 x 64 are one table of 512 x 512, cut into "
        "columns. What is new is that there are eight rows of weights in place of one.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Masks: who may be asked

    When a model learns to guess the next word, it must not read it. Think of sealed envelopes: word $i$ may open
    those of positions $j \le i$. Other rules hide *padding*, the blanks that fill up short texts, or everything
    far away. And some rules only discourage: *the nearer, the better*.

    All of them say how welcome a key is before its score is known. Call this $u_{ij}$, a **prior**: 1 welcome,
    0 forbidden, in between discouraged. It multiplies the exponentials, so its logarithm is added to the
    scores:

    $$p_{ij} \propto u_{ij}\, e^{s_{ij}} = e^{s_{ij} + \log u_{ij}}, \qquad \log 0 = -\infty .$$

    $\propto$ reads *proportional to*: the weights of a row are then divided by their sum.
    """)
    return


@app.cell
def _():
    rules = {
        "causal": fenchel.Causal(),
        "causal, without oneself": fenchel.Causal(strict=True),
        "padding: four real tokens": fenchel.Padding(torch.tensor([4])),
        "causal and padding": fenchel.Causal() + fenchel.Padding(torch.tensor([4])),
        "window of two": fenchel.Window(1),
        "two sentences": fenchel.Segments(torch.tensor([[0, 0, 0, 1, 1, 1]])),
        "nearer is better (ALiBi) and causal": fenchel.ALiBi(1) + fenchel.Causal(),
    }
    rule = mo.ui.dropdown(list(rules), value="causal", label="Rule")
    rule
    return rule, rules


@app.cell
def _(rule, rules):
    _x = draw(1, 1, 6, 4, seed=7)
    _p = fenchel.attend(_x, _x, _x, prior=rules[rule.value], return_weights=True)[1][0, 0]
    _u = rules[rule.value].log(6, 6)[0, 0].double().exp().expand(6, 6)
    mo.vstack(
        [
            heat_chart(
                _p,
                title=f"Weights of six tokens, {rule.value}",
                of="weight",
                of_range=(0, 1),
                axes=("query", "key"),
            ),
            claim(
                "AT-21 AT-25",
                "A key with $u = 0$ has the weight 0 exactly, not nearly.",
                (_p[_u == 0] == 0).all(),
            ),
        ]
    )
    return


@app.cell
def _():
    _q, _k, _v = draw(3, 1, 1, 6, 4, seed=8)
    _full = fenchel.attend(_q, _k, _v, prior=fenchel.Causal())
    _k2, _v2 = _k.clone(), _v.clone()
    _k2[..., 4:, :], _v2[..., 4:, :] = 9.0, -7.0
    _changed = fenchel.attend(_q, _k2, _v2, prior=fenchel.Causal())
    _z = _q @ _k.mT / 2
    _M = fenchel.Causal().log(6, 6, dtype=torch.float64)
    _strict, _sp = fenchel.attend(
        _q, _k, _v, prior=fenchel.Causal(strict=True), return_weights=True
    )
    _keep = (_M == 0).double()
    _scores_times = torch.softmax(_z * _keep, -1)
    _weights_times = torch.softmax(_z, -1) * _keep
    _both = fenchel.Causal() + fenchel.Padding(torch.tensor([4]), side="left")
    _late = fenchel.attend(_q[..., -2:, :], _k, _v, prior=_both)
    mo.vstack(
        [
            claim(
                "AT-23 PD-02",
                "Nothing leaks: other keys and values at positions 4 and 5 leave the outputs 0 to 3 as they are, to the "
                "last bit, and change those after.",
                torch.equal(_full[..., :4, :], _changed[..., :4, :])
                and not torch.allclose(_full[..., 4:, :], _changed[..., 4:, :]),
            ),
            claim(
                "AT-26",
                "Multiplying by 0 does not hide a key. A score times 0 is 0, and $e^0 = 1$ is a weight like others: up to "
                f"{_scores_times[_keep.expand_as(_z) == 0].max():.2f} here. A weight times 0 is gone, and the rest no longer "
                f"sums to 1: down to {_weights_times.sum(-1).min():.2f}.",
                (_scores_times[_keep.expand_as(_z) == 0] > 0).all()
                and _weights_times.sum(-1).min() < 0.9,
            ),
            details(
                claim(
                    "AT-21 AT-22",
                    r"The causal mask is $M_{ij} = -\infty$ for $j > i$ and 0 otherwise, added after the scaling: "
                    r"$\mathrm{softmax}(QK^\top/\sqrt{d_k} + M)$ has only zeros above the diagonal.",
                    torch.equal(_M[0, 0] == -torch.inf, torch.ones(6, 6).triu(1).bool())
                    and torch.allclose(torch.softmax(_z + _M, -1) @ _v, _full, atol=1e-12),
                ),
                claim(
                    "AT-10 E98",
                    "Is a token before itself? With $j \\le i$ each has at least one key, its own. With $j < i$ the first token "
                    "has none, 0 divided by 0, and no token sees itself; here the empty row gives zeros by rule.",
                    (_strict[..., 0, :] == 0).all()
                    and (_sp.diagonal(dim1=-2, dim2=-1) == 0).all()
                    and torch.isfinite(_strict).all()
                    and torch.equal(_full[..., 0, :], _v[..., 0, :]),
                ),
                claim(
                    "AT-27",
                    "Rules combine by adding logarithms. When earlier keys are cached and only two new queries come, they count "
                    "as the last two positions: the rows agree with those of the whole.",
                    torch.allclose(
                        _late, fenchel.attend(_q, _k, _v, prior=_both)[..., -2:, :], atol=1e-12
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _z = draw(1, 4, seed=9).float()
    _hidden = torch.tensor([[True, True, False, False]])
    _inf, _big = (torch.softmax(_z.masked_fill(_hidden, x), -1) for x in (-torch.inf, -1e9))
    _leaf = _z.clone().requires_grad_()
    (_slope,) = torch.autograd.grad(
        torch.softmax(_leaf.masked_fill(_hidden, -torch.inf), -1)[0, 2], _leaf
    )
    _none = torch.softmax(torch.full((1, 4), -torch.inf), -1)
    _leaf2 = _z.clone().requires_grad_()
    _leak = torch.softmax(_leaf2 + torch.full((1, 4), -1e9), -1)
    (_slope2,) = torch.autograd.grad(_leak[0, 0], _leaf2)
    _half = torch.tensor([-1e9, -65504.0]).half() - torch.tensor(40.0).half()
    _q, _k, _v = draw(3, 1, 1, 4, 64, seed=10)
    _closed = fenchel.Dense(torch.zeros(4, 4, dtype=torch.bool))
    _empty = fenchel.attend(_q, _k, _v, prior=_closed)
    _log_u = -0.5 * (torch.arange(4)[:, None] - torch.arange(4)).abs().double()
    _right = fenchel.attend(_q, _k, _v, prior=fenchel.Dense(_log_u))
    _as_prior = _log_u.exp() * (_q @ _k.mT / 8).exp()
    _divided = torch.softmax((_q @ _k.mT + _log_u) / 8, -1) @ _v
    _weak = fenchel.attend(_q, _k, _v, prior=fenchel.Dense(0.0625 / 0.5 * _log_u))
    _repaired = torch.softmax((_q @ _k.mT + 8 * _log_u) / 8, -1) @ _v
    details(
        mo.md("The first is a large number in place of $-\\infty$."),
        claim(
            "AT-24 E27",
            "As long as one key is open, $-10^9$ and $-\\infty$ give the same weights and finite gradients.",
            torch.equal(_inf, _big) and torch.isfinite(_slope).all(),
        ),
        claim(
            "AT-24 E27",
            "If *every* key is forbidden, $-\\infty$ gives NaN (not a number), and $-10^9$ something worse: equal "
            f"weights, {_leak[0, 0]:.2f} for each of four forbidden keys, with gradients that are not zero. A silent "
            "leak. fenchel gives such a row the output 0. In the 16-bit format float16 $-10^9$ is $-\\infty$ anyway, and so is "
            "its least number, $-65504$, once a score of $-40$ is added.",
            _none.isnan().all()
            and torch.allclose(_leak, torch.full((1, 4), 0.25))
            and (_slope2 != 0).any()
            and (_half == -torch.inf).all()
            and (_empty == 0).all(),
        ),
        mo.md(
            r"The second is the place of the mask. $(QK^\top + M)/\sqrt{d_k}$ divides $M$ too. For 0 and $-\infty$ that "
            "makes no difference; for anything between it does."
        ),
        claim(
            "E26",
            "A penalty of 0.5 per step of distance, divided along with the scores, acts as 0.0625 at $d_k = 64$.",
            torch.allclose(_divided, _weak, atol=1e-12)
            and not torch.allclose(_divided, _right, atol=1e-3),
        ),
        claim(
            "E104",
            r"Masks, padding and penalties are all logarithms of a prior, one input: $p \propto u\,e^{\beta s}$. "
            r"Inside the bracket it would have to be $\sqrt{d_k} \log u$.",
            torch.allclose(_as_prior / _as_prior.sum(-1, keepdim=True) @ _v, _right, atol=1e-12)
            and torch.allclose(_repaired, _right, atol=1e-12),
        ),
        title="Two traps",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## One pass, every answer

    A pupil who learns a poem is told the right word after each wrong one, and goes on from there. A model learns in the same way: it reads a text that
    is already written, and at each position guesses the next token from the *true* ones before it, not from its own guesses. This is **teacher
    forcing**. The causal mask lets a single pass do it for all positions.
    """)
    return


@app.cell
def _():
    def _model(kind):
        config = fenchel.ModelConfig(
            vocabulary=20, context=8, width=32, heads=4, layers=2, kind=kind, initial="xavier"
        )
        return fenchel.Transformer(config, generator=torch.Generator().manual_seed(0)).double()

    _text = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
    _other = _text.clone()
    _other[0, -1] = 11
    with torch.no_grad():
        _decoder, _encoder = _model("decoder"), _model("encoder")
        _whole = _decoder(_text)
        _begun = torch.stack([_decoder(_text[:, : i + 1])[0, -1] for i in range(7)])
        _moved = {
            name: [(row != 0).any().item() for row in (model(_other) - model(_text))[0]]
            for name, model in (("decoder", _decoder), ("encoder", _encoder))
        }
        _hidden = [text.clone() for text in (_text, _other)]
        for text in _hidden:
            text[0, -1] = 0  # the mask token takes the place of what is to be guessed
        _blind = torch.equal(*(_encoder(text) for text in _hidden))
    _losses = torch.nn.functional.cross_entropy(_whole[0, :-1], _text[0, 1:], reduction="none")
    _alone = [
        torch.nn.functional.cross_entropy(_begun[i], _text[0, i + 1]).item() for i in range(6)
    ]
    _x, _y = draw(3, 4, seed=50), draw(2, 4, seed=51)
    _both = torch.cat([_x, _y])[None, None]
    _packed, _p = fenchel.attend(
        _both,
        _both,
        _both,
        prior=fenchel.Segments(torch.tensor([[0, 0, 0, 1, 1]])),
        return_weights=True,
    )
    _apart = torch.cat([fenchel.attend(each, each, each) for each in (_x, _y)])
    mo.vstack(
        [
            claim(
                "TR-08 TR-06",
                "A text of 7 tokens in one pass, or its 7 beginnings read one by one: the same logits, to "
                f"{(_whole[0] - _begun).abs().max():.0e}. So one pass has six answers and six losses, on average {_losses.mean():.3f} nats.",
                torch.allclose(_whole[0], _begun, atol=1e-12)
                and torch.allclose(_losses, _losses.new_tensor(_alone), atol=1e-12),
            ),
            details(
                mo.md(r"""
                Stack the rows of two sentences into one table, $X = \binom{X_1}{X_2}$. The table of scores then has four *blocks*: each sentence with itself, and
                each with the other. A mask keeps the first two, so $P = \begin{pmatrix} P_1 & 0 \\ 0 & P_2 \end{pmatrix}$ and
                $P V = \binom{P_1 V_1}{P_2 V_2}$: tables of blocks are multiplied like tables of numbers. Texts of any length fill a batch in this way, without padding. In the
                menu above it is the rule *two sentences*.
                """),
                claim(
                    "AT-27 AT-38",
                    "Three tokens and two, packed: the blocks between the sentences are 0 exactly, and the outputs are those of each sentence alone, "
                    f"to {(_packed[0, 0] - _apart).abs().max():.0e}.",
                    (_p[0, 0, :3, 3:] == 0).all()
                    and (_p[0, 0, 3:, :3] == 0).all()
                    and torch.allclose(_packed[0, 0], _apart, atol=1e-12),
                ),
                title="Whole sentences side by side: block matrices",
            ),
            details(
                mo.md(r"""
                A model that reads finished texts, to sort or to search them, may look to both sides: an **encoder**, such as BERT. Without the causal mask the next
                token stands in view, so it is trained on a cloze: some tokens are replaced by a special one, and guessed from both sides. A model that
                writes is a **decoder**. An *encoder-decoder* has both: the decoder puts its queries to the outputs of the encoder, which is cross-attention.
                """),
                claim(
                    "AT-23 PD-16",
                    f"Change the last of 7 tokens: {sum(_moved['encoder'])} rows of the encoder change and {sum(_moved['decoder'])} of the decoder. Once the token is replaced by the "
                    "special one, the encoder cannot tell which it was: its outputs are the same to the last bit.",
                    all(_moved["encoder"]) and _moved["decoder"] == [False] * 6 + [True] and _blind,
                ),
                title="Encoders: both sides in view",
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Why does $-\infty$ hide a key, and 0 not? The weight of key $j$ is $e^{s_j}$ divided by the sum of all. $e^{-\infty} = 0$: the key adds nothing
            to the sum and gets nothing of it, and the others share as if it were not there. $e^0 = 1$: a score of 0 is an ordinary
            score, neither good nor bad. To take a candidate off the list, put no vote into the box; a vote of 0 points is a vote.""",
        undergraduate=r"""
            Let $u \in [0, \infty)^m$ be the prior of a row and $S$ its support. The weights $p_j = u_j e^{s_j} / \sum_k u_k e^{s_k}$ solve
            $\max_p \langle p, s \rangle - \mathrm{KL}(p \| u)$ over the simplex, where $\mathrm{KL} = \infty$ unless $p$ vanishes outside $S$. So masks,
            penalties and paddings are one object, products of priors are sums of their logarithms, and the derivative of an output in $s_j$ or $v_j$ is 0
            for every $j \notin S$, exactly. For the causal mask the Jacobian of the outputs by the inputs is block lower triangular, and products of
            such tables stay so: no depth lets the future in.""",
        research=r"""
            Heads are a factorisation: $\sum_i P_i X W^V_i W^O_i$ is a sum of $h$ terms of rank at most $d_k$ with their own stochastic matrices
            $P_i$. Many heads can be removed after training (Michel, Levy and Neubig 2019), and the roles of some are known (induction
            heads, Olsson et al. 2022). Rollout (Abnar and Zuidema 2020) multiplies averages and ignores values and signs; the Jacobian
            does not.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A meeting: several heads

    Four colleagues report. Each says a cost and a week, but only some know what they talk about: each contribution
    advertises *I know costs* or *I know dates*. One listener writes the minutes for both topics and gets a
    mixture. Two listeners, one for costs and one for dates, each write their own column; side by side
    the two columns are the report.

    A listener is a **head**: attention with its own $W_Q, W_K, W_V$. Heads work in parallel, their outputs are put side by
    side, and a last table $W_O$ mixes them:

    $$H_i = \mathrm{Attention}(X W^Q_i, X W^K_i, X W^V_i),$$

    $$O = [H_1 \; H_2 \cdots H_h]\, W^O .$$

    $h$ is the number of heads and $H_i$ the output of head $i$.
    """)
    return


@app.cell
def _():
    _knows = matrix([[4.0, 0.0], [0.0, 4.0], [1.0, 0.0], [0.0, 0.0]])  # costs, dates
    _says = matrix([[40.0, 12.0], [90.0, 6.0], [50.0, 20.0], [70.0, 30.0]])  # cost, week
    _two, _of_two = fenchel.attend(
        matrix([[[2.0, 0.0]], [[0.0, 2.0]]]),
        _knows.expand(2, 4, 2),
        _says.T.reshape(2, 4, 1),
        return_weights=True,
    )
    _two = _two.flatten()
    _one, _of_one = fenchel.attend(matrix([[2.0, 2.0]]), _knows, _says, return_weights=True)
    _one = _one[0]
    _listeners = {
        "one for both": _of_one[0],
        "the one for costs": _of_two[0, 0],
        "the one for dates": _of_two[1, 0],
    }
    mo.vstack(
        [
            bar_chart(
                [
                    {"colleague": who, "weight": w, "listener": listener}
                    for listener, weights in _listeners.items()
                    for who, w in zip(
                        ("knows costs", "knows dates", "knows some costs", "knows nothing"),
                        weights.tolist(),
                        strict=True,
                    )
                ],
                "colleague",
                "weight",
                "listener",
                title="Who listens to whom",
                y_range=(0, 1),
            ),
            claim(
                "AT-43 AT-28",
                f"Two heads report a cost of {_two[0]:.1f} and week {_two[1]:.1f}, close to those who know (40 and 6). One head "
                f"that listens for both gives {_one[0]:.1f} and {_one[1]:.1f}: it has one set of weights for both columns.",
                (_two - matrix([40.0, 6.0])).abs().max() < 1
                and (_one - matrix([40.0, 6.0])).abs().max() > 10,
            ),
        ]
    )
    return


@app.cell
def _():
    _size = fenchel.ModelConfig(
        vocabulary=8, context=8, width=512, heads=8, layers=1, positions="none", initial="normal"
    )
    layer = (
        fenchel.Transformer(_size, generator=torch.Generator().manual_seed(0))
        .double()
        .blocks[0]
        .attention
    )
    _x = draw(2, 6, 512, seed=11)
    with torch.no_grad():
        _whole = layer(_x, ForwardContext())
        _WQ, _WK, _WV = (w.T.reshape(512, 8, 64) for w in layer.qkv.weight.chunk(3))
        _heads = [
            fenchel.attend(_x @ _WQ[:, i], _x @ _WK[:, i], _x @ _WV[:, i], prior=fenchel.Causal())
            for i in range(8)
        ]
        _loop = torch.cat(_heads, -1) @ layer.out.weight.T
        _reads = torch.func.jacrev(lambda x: layer.qkv(x)[:64])(_x[0, 0])
        _part = _x[0, 0].where(torch.arange(512) < 64, 0.0)
        _fused = _x[0] @ _WQ.reshape(512, 512)
        _right = _fused.view(6, 8, 64).transpose(0, 1)
        _wrong = _fused.view(8, 6, 64)
        _shapes = fenchel.attend(
            *(y.view(2, 6, 8, 64).transpose(1, 2) for y in layer.qkv(_x).chunk(3, -1)),
            return_weights=True,
        )
    _counts = [layer.qkv.weight.numel(), layer.out.weight.numel()]
    _sizes = {name: PRESETS[name].model for name in ("small", "base", "large")}
    mo.vstack(
        [
            claim(
                "AT-32 AT-33",
                f"512 / 8 = {_size.head_width} numbers per head. One head has 3 x 512 x 64 = {3 * 512 * 64:,} parameters, all heads "
                f"{_counts[0]:,}, with $W^O$ {sum(_counts):,} = 4 x 512²: the number of heads does not matter.",
                _size.head_width == 64
                and _counts[0] == 786_432 == 8 * 3 * 512 * 64
                and sum(_counts) == 1_048_576 == 4 * 512**2,
            ),
            details(
                claim(
                    "AT-28 AT-29 AT-30",
                    "A layer of the library with width 512 and 8 heads equals the loop over its heads, each with tables of 512 x 64, "
                    "joined and multiplied by $W^O$. Each projection is one table and nothing more: it is linear.",
                    torch.allclose(_whole, _loop, atol=1e-12)
                    and _WQ[:, 0].shape == (512, 64)
                    and torch.allclose(layer.qkv(_x + 2 * _x), 3 * layer.qkv(_x)),
                ),
                claim(
                    "AT-31 E77",
                    "In practice all heads share one product: $(n, 512)$ is cut into $(n, 8, 64)$ and **transposed** to $(8, n, 64)$. "
                    "Without the transpose the shape would fit and the numbers would be of the wrong tokens.",
                    all(torch.allclose(_right[i], _x[0] @ _WQ[:, i]) for i in range(8))
                    and _wrong.shape == _right.shape
                    and not torch.allclose(_wrong, _right),
                ),
                claim(
                    "AT-38",
                    "The *batch* (several texts at once) comes first, then the heads: weights [2, 8, 6, 6], outputs per head [2, 8, 6, 64], the layer [2, 6, 512].",
                    _shapes[1].shape == (2, 8, 6, 6)
                    and _shapes[0].shape == (2, 8, 6, 64)
                    and _whole.shape == (2, 6, 512),
                ),
                claim(
                    "AT-42",
                    "Usual sizes keep 64 numbers per head: "
                    + ", ".join(f"{s['width']} with {s['heads']} heads" for s in _sizes.values())
                    + ".",
                    [(s["width"], s["heads"]) for s in _sizes.values()]
                    == [(512, 8), (768, 12), (1024, 16)]
                    and all(s["width"] == 64 * s["heads"] for s in _sizes.values()),
                ),
                claim(
                    "E78",
                    "The query of one head is not 64 *of* the 512 numbers of a token. It is 64 mixtures of all 512: every one of its "
                    f"numbers depends on every one of the token's ({_reads.count_nonzero():,} derivatives, none of them 0), and none "
                    "of the 64 mixtures follows from the others (rank 64). A head that reads 64 numbers and no others has "
                    f"{64 * (512 - 64):,} derivatives that are 0.",
                    _reads.shape == (64, 512)
                    and torch.allclose(_reads, _WQ[:, 0].T)
                    and (_reads != 0).all()
                    and torch.linalg.matrix_rank(_reads) == 64
                    and not torch.allclose(
                        layer.qkv(_part)[:64], layer.qkv(_x[0, 0])[:64], atol=0.1
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _previous = torch.eye(8).roll(1, 0)  # row i on key i - 1
    _previous[0] = 0.0
    _previous[0, 0] = 1.0
    _even = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    _first = torch.zeros(8, 8)
    _first[:, 0] = 1.0
    made = head_patterns(torch.stack([_previous, _even, _first, _first])[None])
    details(
        mo.md(
            "Five numbers tell much: entropy, mean distance, weight on the first and on "
            "the previous token, and how alike two heads are. Here are four heads made by hand; your own model follows "
            "at the end."
        ),
        table(
            [
                {
                    "head": name,
                    "entropy": made.entropy[i].item(),
                    "mean distance": made.distance[i].item(),
                    "on first": made.first[i].item(),
                    "on previous": made.previous[i].item(),
                    "likeness to head 3": made.similarity[i, 3].item(),
                }
                for i, name in enumerate(
                    ("0: previous token", "1: even", "2: first token", "3: first token")
                )
            ]
        ),
        claim(
            "AT-34",
            "Each shows in its numbers: the head of the previous token by its weight there, the even head by its entropy, the "
            "head of the first token by its distance; two equal heads have likeness 1, so one of them is spare.",
            made.previous.argmax() == 0
            and made.entropy.argmax() == 1
            and made.distance[2] == made.distance.max()
            and math.isclose(made.similarity[2, 3].item(), 1.0, abs_tol=1e-6)
            and made.similarity[0, 3] < 0.5,
        ),
        title="What has a head specialised in?",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Layer upon layer: positions stop belonging to one token

    Whisper down a line: each person hears only the neighbour, yet after four rounds a rumour has travelled four
    places. A layer of attention is one round. Below, every token sees itself and the one before it.

    *Rollout* multiplies the weights of the layers, each averaged with the skip connection $I$ (a token keeps what it
    has): $R = \prod_\ell \tfrac12 (I + p_\ell)$, with $p_\ell$ the table of weights of layer $\ell$, the later layers on the left. A cleaner
    measure takes the whole network: by how much does output $i$ move
    when input $j$ moves a little? That is the size of one block of its Jacobian, the table of all its slopes.
    """)
    return


@app.cell
def _():
    depth = mo.ui.slider(1, 5, value=2, label="Layers", show_value=True)
    depth
    return (depth,)


@app.cell
def _(depth):
    _near = fenchel.Window(1)
    _start = draw(6, 4, seed=15)
    _tables = [0.5 * draw(3, 4, 4, seed=20 + i) for i in range(depth.value)]

    def _network(x):
        for tables in _tables:
            x = x + self_attention(x, *tables, prior=_near)
        return x

    rollout = torch.eye(6, dtype=torch.float64)
    _x = _start
    for _W in _tables:
        _, _p = fenchel.attend(
            *(_x @ w for w in _W), prior=_near, return_weights=True, backend="reference"
        )
        rollout = (torch.eye(6, dtype=torch.float64) + _p) / 2 @ rollout
        _x = _x + self_attention(_x, *_W, prior=_near)
    moved = influence(fenchel.jacobian(_network, _start))
    _reach = [int((m[-1] > 0).sum()) for m in (rollout, moved)]
    mo.vstack(
        [
            heat_chart(
                moved / moved.sum(-1, keepdim=True),
                title="How far each input can move each output",
                of="share of the row",
                of_range=(0, 1),
                axes=("output", "input"),
            ),
            claim(
                "AT-12",
                f"After {depth.value} layers the last output depends on {_reach[1]} inputs, by rollout and by the Jacobian alike. "
                "What stands at a position is no longer that token alone.",
                _reach == [depth.value + 1, depth.value + 1]
                and torch.allclose(rollout.sum(-1), torch.ones(6, dtype=torch.float64)),
            ),
        ]
    )
    return


@app.cell
def _():
    Q2 = matrix([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    K2 = matrix([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    V2 = matrix([[2.0, 0.0, 1.0], [1.0, 1.0, 0.0]])

    def check(names):
        attention = names["attention"]
        o = attention(Q2, K2, V2)
        assert torch.is_tensor(o), "Return a tensor."
        assert o.shape == V2.shape, f"The output has one row per query: expected {tuple(V2.shape)}."
        assert torch.isfinite(o).all(), "There is a NaN: is some row without any open key?"
        unscaled = fenchel.attend(Q2, K2, V2, scale=1.0)
        assert not torch.allclose(o, fenchel.attend(Q2, K2, V2)), (
            "The scale is right. Now hide the later keys before softmax: fill their scores with -inf."
        )
        assert not torch.allclose(o, unscaled), (
            "Divide the scores by the root of d_k, the number of columns of Q."
        )
        torch.testing.assert_close(
            o[0], V2[0], msg="Token 0 may use only itself: its output is its own value."
        )
        for n, d, e in ((2, 3, 3), (7, 5, 2), (9, 16, 4)):
            q, k, v = draw(n, d, seed=40), draw(n, d, seed=41), draw(n, e, seed=42)
            assert torch.allclose(
                attention(q, k, v), fenchel.attend(q, k, v, prior=fenchel.Causal())
            ), f"It differs for {n} tokens of width {d}: is the root taken of d_k = {d}?"

    exercise = Exercise(
        lesson="masks_and_heads",
        task="Write causal attention, `attention(Q, K, V)`, without `fenchel.attend`: scale, hide later keys, softmax, mix. "
        "`torch.ones(n, n).triu(1).bool()` marks the places above the diagonal of an $n \\times n$ table, where the key is later than the query, "
        "and `scores.masked_fill(marks, -torch.inf)` fills them.",
        starter="""
    def attention(Q, K, V):
        scores = Q @ K.T
        return torch.softmax(scores, -1) @ V
    """,
        solution="""
    def attention(Q, K, V):
        n, d_k = Q.shape
        scores = Q @ K.T / d_k**0.5
        later = torch.ones(n, n).triu(1).bool()  # key j > query i
        return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ V
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
def _():
    own_text = text_field("we the people of the united states, in order to form a")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    _ids = token_ids(own_text.value, own.tokenizer, min(24, own.config.context))
    own_tokens = [own.tokenizer.decode([each]) for each in _ids]
    maps = attention_maps(own.model, torch.tensor([_ids])).double()
    layers = [head_patterns(layer_maps[None]) for layer_maps in maps]
    own_words = words_and_weights(own_tokens, maps, causal=own.config.kind == "decoder")
    _rows = [
        {
            "head": f"{n}.{h + 1}",
            "entropy (nats)": layer_.entropy[h].item(),
            "mean distance": layer_.distance[h].item(),
            "on first": layer_.first[h].item(),
            "on previous": layer_.previous[h].item(),
        }
        for n, layer_ in enumerate(layers, 1)
        for h in range(maps.shape[1])
    ]
    mo.vstack(
        [
            mo.md(
                f"Your model has {maps.shape[0]} layers of {maps.shape[1]} heads, each of width {own.config.head_width}. On "
                f"{len(_ids)} tokens (head 2.1 is the first of the second layer):"
            ),
            bar_chart(_rows, "head", "entropy (nats)", title="Entropy of your heads"),
            mo.md("Which token reads which? Choose a head and a token."),
            own_words,
            details(
                claim(
                    "AT-34 AT-02",
                    f"Weights are shares and sum to at most 1; no head is more even than {len(_ids)} tokens allow, "
                    f"{math.log(len(_ids)):.2f} nats; and in a decoder, a model with the causal mask, no weight falls on a later token.",
                    maps.min() >= 0
                    and maps.sum(-1).max() < 1 + 1e-4
                    and all(row["entropy (nats)"] <= math.log(len(_ids)) + 1e-4 for row in _rows)
                    and (own.config.kind != "decoder" or maps.triu(1).abs().max() == 0),
                ),
            ),
        ]
    )
    return maps, own_tokens, own_words


@app.cell
def _(maps, own_tokens, own_words):
    _layer, _head = divmod(own_words.state["head"], maps.shape[1])
    _row = maps[_layer, _head, own_words.state["word"]]
    _read = int(_row.argmax())
    claim(
        "AT-34",
        f"In head {_layer + 1}.{_head + 1} the token “{own_tokens[own_words.state['word']]}” reads “{own_tokens[_read]}” most, "
        f"with a share of {_row[_read]:.3f}; its shares sum to at most 1.",
        _row[_read] == _row.max() and _row.sum() < 1 + 1e-4,
    )
    return


@app.cell
def _():
    what_breaks(
        "A mask hides a key from one layer. What an earlier layer has already mixed in, it cannot hide: a leak in one layer reaches all "
        "above it. And a large weight is not an explanation: it says what was mixed in, not what the later layers made of it."
    )
    return


@app.cell
def _():
    footer("masks_and_heads")
    return


if __name__ == "__main__":
    app.run()
