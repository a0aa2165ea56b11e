"""Positions: rotations, distances, and what happens past the trained length."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Positions",
)

with app.setup:
    from dataclasses import replace
    from itertools import pairwise, product
    from pathlib import Path

    import marimo as mo
    import torch
    from torch.nn.functional import cross_entropy

    import fenchel
    from fenchel.attention import (
        ALiBi,
        Causal,
        LinearScaling,
        NTKScaling,
        RelativeBias,
        YarnScaling,
        head_patterns,
        rotary,
        trace,
    )
    from fenchel.attention.bias import bucket, slope
    from fenchel.attention.rotary import to_half, to_pairs
    from fenchel.evaluate import attention_maps
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
        text_field,
        token_ids,
        what_breaks,
    )
    from fenchel.model import ModelConfig, Transformer
    from fenchel.model.families import T5
    from fenchel.model.rotary_table import sinusoids


@app.cell
def _():
    header("positions")
    return


@app.cell
def _():
    guess = question(
        "A model is trained on texts of 32 tokens and then reads 128. Which way of telling it "
        "the order of the tokens still works, without further training?",
        [
            "rotations and sine waves: they have a value at every position",
            "a penalty that grows with the distance",
            "a learned vector for each position",
        ],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "a penalty that grows with the distance",
        "Having a value at position 100 is not the same as having learnt what to do with it. A learned "
        "table has no row 100 at all. The experiment at the end of this page measures all of them.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Attention reads a bag of words

    Write *dog bites man* on three cards and shuffle them. Attention compares every card with
    every other card and never asks where a card lies, so each card gets the same result in every
    order. The order must be put in from outside, and there are three places to put it: into the
    **token** (add a vector), into the **comparison** (rotate the query and the key), or into the
    **weights** (prefer near tokens).

    Positions count from 0: the first token has position 0.
    """)
    return


@app.cell
def _():
    kind = mo.ui.dropdown(
        ["none", "sinusoidal", "rotary", "alibi", "buckets"], value="rotary", label="Positions"
    )
    order = mo.ui.dropdown(
        {"man bites dog": [2, 1, 0], "bites dog man": [1, 0, 2]},
        value="man bites dog",
        label="New order",
    )
    mo.hstack([kind, order], justify="start")
    return kind, order


@app.function
def change(positions, order):
    """How far the output of each of three words moves in a new order, in an encoder."""
    config = ModelConfig(
        vocabulary=3, context=8, width=32, layers=1, heads=8, kind="encoder", initial="xavier",
        initial_std=1.0, positions=positions,
    )  # fmt: skip
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).double().eval()
    if model.relative_bias is not None:
        model.relative_bias.weight.data.mul_(2)
    words = torch.arange(3)
    with torch.no_grad():
        before = model(words[None], return_hidden=True)[0]
        after = model(words[order][None], return_hidden=True)[0]
    return (after - before[order]).norm(dim=-1)[torch.tensor(order).argsort()]


@app.cell
def _(kind, order):
    bar_chart(
        [
            {"word": _word, "change of its output": round(_moved, 9)}
            for _word, _moved in zip(
                ["dog", "bites", "man"], change(kind.value, order.value).tolist(), strict=True
            )
        ],
        "word",
        "change of its output",
        title=f"dog bites man in a new order, positions: {kind.value}",
        y_range=(0, 3.2),
    )
    return


@app.cell
def _():
    _orders = {"reversed": [2, 1, 0], "moved": [1, 0, 2]}
    _change = {
        (name, how): change(name, new).max().item()
        for name in ("none", "sinusoidal", "rotary", "alibi", "buckets")
        for how, new in _orders.items()
    }
    _none = max(_change["none", how] for how in _orders)
    _others = [
        c for (n, how), c in _change.items() if n != "none" and (n, how) != ("alibi", "reversed")
    ]
    _config = ModelConfig(
        vocabulary=9, context=8, width=32, layers=1, initial="xavier", positions="learned"
    )
    _model = Transformer(_config, generator=torch.Generator().manual_seed(0)).double().eval()
    _ids = torch.tensor([[3, 1, 4]])
    _padded = torch.tensor([[0, 0, 3, 1, 4]])
    _mask = torch.tensor([[False, False, True, True, True]])
    with torch.no_grad():
        _plain = _model(_ids)
        _behind = _model(_padded, token_mask_BS=_mask)[:, 2:]
    mo.vstack(
        [
            claim(
                "PO-25",
                "Without positions a new order gives the same outputs in the new order: the largest change is "
                f"{_none:.0e}. With positions it is at least {min(_others):.2f}. There is one exception: a "
                "penalty on $|i - j|$ (`alibi`) cannot tell a sentence from its mirror image, unless a causal mask "
                "says which way is back.",
                _none < 1e-12 and min(_others) > 0.05 and _change["alibi", "reversed"] < 1e-12,
            ),
            details(
                claim(
                    "PO-23",
                    "The first token has position 0, and padding before it does not count: with two empty slots in "
                    "front the model gives the same logits.",
                    torch.allclose(_plain, _behind, atol=1e-12)
                    and torch.equal(
                        sinusoids(torch.tensor([0]), 4),
                        torch.tensor([[0.0, 1.0, 0.0, 1.0]]).double(),
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A clock with many hands

    A clock tells the time with hands of different speeds: the fast hand separates neighbouring
    seconds, the slow one separates morning from evening. Give a token such a clock. It has $d/2$
    hands, hand $i$ turns by the angle $t_i$ per token, and what is written down is the tip of each
    hand, a sine and a cosine:

    $$\begin{aligned} PE(m)_{2i} &= \sin(m\, t_i), \\ PE(m)_{2i+1} &= \cos(m\, t_i), \\
    t_i &= 10000^{-2i/d}. \end{aligned}$$

    $m$ is the position, $d$ the width of the vector (even), $i = 0, \dots, d/2 - 1$. Angles are in
    radians: a full turn is $2\pi \approx 6.28$. Hand 0 turns by one radian per token; the last hand
    of 32 ($d = 64$) needs 47,117 tokens for a turn. This vector is *added* to the embedding of the token.
    """)
    return


@app.cell
def clock_hands():
    d = 64
    speeds = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    _stands = (0, 10, 20, 50, 80, 110, 140, 170, 190, 200)
    clocks = Scene(
        "clock_hands",
        {"m": 20, "gap": 30},
        pairs=[[speed, [0, 1], [0, 1]] for speed in speeds.tolist()],
        shown=[0, 8, 16, 31],
        names=["6 per turn", "63 per turn", "628 per turn", "47,117 per turn"],
        turn=-1,
        top=200,
        places=[{"m": m, "gap": n - m} for m, n in product(_stands, repeat=2)],
    )
    mo.vstack(
        [
            mo.md(
                "Four of the 32 hands, with the tokens per full turn, for two positions $m$ and $n$. *Drag $m$ and $n$. Which hand separates neighbours, which the beginning "
                "from the end? Then move both on together: what happens to the angles between the hands?*"
            ),
            clocks,
        ]
    )
    return clocks, d, speeds


@app.cell
def _(clocks, d, speeds):
    positions = torch.arange(300)
    waves = sinusoids(positions, d)
    W_q, W_k = torch.randn(
        2, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).div(d**0.5)
    mapped = (waves @ W_q) @ (waves @ W_k).T
    _m, _n = clocks.state["m"], clocks.state["m"] + clocks.state["gap"]
    _rows = [
        {"distance": k, "product": value[_m, _m + k].item(), "vectors": name}
        for name, value in (("as they are", waves @ waves.T), ("after W_Q and W_K", mapped))
        for k in range(0, 81, 2)
    ]
    mo.vstack(
        [
            claim(
                "PO-03",
                f"$PE({_m}) \\cdot PE({_n})$ = {(waves[_m] @ waves[_n]).item():.3f}, as the clocks say: the sum of the cosines of all 32 angles "
                "between their hands.",
                torch.isclose(waves[_m] @ waves[_n], (speeds * (_m - _n)).cos().sum()),
            ),
            line_chart(
                _rows,
                "distance",
                "product",
                "vectors",
                title=f"PE({_m}) . PE({_m} + distance), d = 64",
                x_range=(0, 200),
                y_range=(-35, 35),
                here=[{"distance": abs(_n - _m)}],
            ),
        ]
    )
    return mapped, positions, waves


@app.cell
def _():
    mo.md(r"""
    Move $m$: the curve *as they are* stays, the other one does not. Two clocks are compared by
    the angles between their hands, and these depend only on the time between them:

    $$PE(m) \cdot PE(n) = \sum_i \cos\big(t_i (m - n)\big).$$

    Inside a model the vectors first pass through the matrices $W_Q$ and $W_K$, which mix the hands.
    Then the statement is lost.
    """)
    return


@app.cell
def _(d, mapped, positions, speeds, waves):
    _k = 7
    _shift = torch.zeros(d, d, dtype=torch.float64)
    for _i, _t in enumerate(_k * speeds):
        _c, _s = _t.cos(), _t.sin()
        _shift[2 * _i : 2 * _i + 2, 2 * _i : 2 * _i + 2] = torch.stack([_c, _s, -_s, _c]).view(2, 2)
    _products = waves @ waves.T
    _far = positions[:, None] - positions
    _by_cosines = torch.cos(_far[..., None] * speeds).sum(-1)
    _along = _products[0]
    _rises = int((_along.diff() > 0).sum())

    def _spread(matrix):
        lines = [matrix.diagonal(k) for k in range(-100, 101)]
        return max((line.max() - line.min()).item() for line in lines)

    _odd = sinusoids(positions, 7)
    mo.vstack(
        [
            details(
                claim(
                    "PO-01",
                    "The library's vectors are these sines and cosines, entry by entry.",
                    torch.allclose(
                        waves[:, 0::2], torch.sin(positions[:, None] * speeds), atol=1e-12
                    )
                    and torch.allclose(
                        waves[:, 1::2], torch.cos(positions[:, None] * speeds), atol=1e-12
                    ),
                ),
                claim(
                    "PO-02",
                    r"Going on by $k$ tokens is one fixed rotation: $PE(m + k) = R_k\, PE(m)$ with the same $R_k$ for "
                    f"every $m$ (checked for $k = {_k}$ and 293 positions).",
                    torch.allclose(waves[_k:], waves[:-_k] @ _shift.T, rtol=0, atol=1e-12),
                ),
                claim(
                    "PO-03 E36",
                    r"Their products depend on $|m - n|$ alone: along a diagonal they differ by "
                    f"{_spread(_products):.0e}. This needs an even width (with 7 entries one is left without a "
                    f"partner and they differ by {_spread(_odd @ _odd.T):.3f}) and raw vectors: after random "
                    rf"$W_Q$ and $W_K$ they differ by {_spread(mapped):.1f}, and the standard deviation of all these "
                    f"scores is {mapped.std().item():.1f}.",
                    torch.allclose(_products, _by_cosines, atol=1e-9)
                    and _spread(_products) < 1e-10
                    and _spread(_odd @ _odd.T) > 1e-5
                    and _spread(mapped) > 3 * mapped.std(),
                ),
                claim(
                    "PO-03 E36",
                    f"A larger distance is not always a smaller product: it rises in {_rises} of 299 steps, and is "
                    f"{_along[100]:.1f} at distance 100 against {_along[50]:.1f} at 50.",
                    (_rises, round(_along[100].item(), 1), round(_along[50].item(), 1))
                    == (135, 17.9, 15.7),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Rotate both arrows

    Two people hold an arrow each and sit in numbered seats. Each turns the arrow by one step per seat
    number. If both move three seats to the right, both arrows turn three steps more, and the angle
    *between* them is what it was. The comparison of two arrows depends on that angle alone, so on how
    far apart the seats are, and on nothing else about them.

    Rotary positions (RoPE) do this to the query $q$ of position $m$ and to the key $k$ of position
    $n$, pair of entries by pair of entries. In pair $i$ of a head of width $d_k$:

    $$\begin{pmatrix} a \\ b \end{pmatrix} \mapsto
    \begin{pmatrix} \cos m t_i & -\sin m t_i \\ \sin m t_i & \cos m t_i \end{pmatrix}
    \begin{pmatrix} a \\ b \end{pmatrix}$$

    $$t_i = 10000^{-2i/d_k}.$$

    Read it line by line: the new first entry is $a \cos m t_i - b \sin m t_i$, the new second one $a \sin m t_i + b \cos m t_i$. That is the
    arrow $(a, b)$ turned anticlockwise by the angle $m t_i$; a key turns by $n t_i$. Nothing is added to the token. The values are not rotated.
    """)
    return


@app.function
def rotated(x, positions, **settings):
    """A vector (D,) rotated for each of the positions (T,): (T, D)."""
    every = x.expand(1, 1, len(positions), len(x))
    return rotary(every, torch.as_tensor(positions), **settings)[0, 0]


@app.cell
def rotating_arrows():
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _speeds = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    seats = Scene(
        "clock_hands",
        {"m": 10, "gap": 15},
        pairs=[
            [speed.item(), [q[i].item(), q[i + 8].item()], [k[i].item(), k[i + 8].item()]]
            for i, speed in enumerate(_speeds)
        ],
        shown=[0, 1, 2, 3],
        names=[f"pair {i}" for i in range(4)],
        turn=1,
        top=60,
        places=[{"m": m, "gap": n - m} for m, n in product(range(0, 61, 5), repeat=2)],
    )
    mo.vstack(
        [
            mo.md(
                "A query (blue) at position $m$ and a key (orange) at position $n$, 16 entries each: four of their eight pairs. *Move both on "
                "together, then exchange their places: does the product stay?*"
            ),
            seats,
        ]
    )
    return k, q, seats


@app.cell
def _(k, q, seats):
    _m, _n = seats.state["m"], seats.state["m"] + seats.state["gap"]

    def score(m, n):
        return (rotated(q, [m]) @ rotated(k, [n]).T).item()

    _curve = (rotated(q, [_m]) @ rotated(k, range(61)).T)[0]
    _here, _shifted, _swapped = score(_m, _n), score(_m + 100, _n + 100), score(_n, _m)
    mo.vstack(
        [
            line_chart(
                [{"position of the key": _j, "score": s} for _j, s in enumerate(_curve.tolist())],
                "position of the key",
                "score",
                title=f"q . k with the query at position {_m}",
                y_range=(-4, 7),
                here=[{"position of the key": _n, "score": _here}],
            ),
            claim(
                "PO-08",
                f"The score of the positions {_m} and {_n} is {_here:.3f}. It depends on $m - n$ alone: 100 tokens later it is the same. "
                f"The sign matters: with the places exchanged it is {_swapped:.3f}"
                + (", the same only because $m = n$." if _m == _n else "."),
                abs(_here - _shifted) < 1e-9 and (_m == _n or abs(_here - _swapped) > 1e-3),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Take one pair of entries as an arrow of length $r$ at the angle $\varphi$, and another of length $s$ at
            the angle $\psi$. Their product is $r s \cos(\varphi - \psi)$. Rotated by $m t$ and by $n t$ they have the
            angles $\varphi + m t$ and $\psi + n t$, so the product becomes $r s \cos(\varphi - \psi + (m - n) t)$: only
            $m - n$ is left. The lengths $r$ and $s$ do not change. The score is the sum over all pairs of entries.""",
        undergraduate=r"""
            Let $R_m$ be the block-diagonal matrix of the rotations by $m t_i$. Rotations of one plane commute and
            add their angles, so $R_m^\top R_n = R_{n-m}$ and
            $\langle R_m q, R_n k \rangle = q^\top R_m^\top R_n k = q^\top R_{n-m} k$. $R_m$ is orthogonal, hence
            $\|R_m q\| = \|q\|$. Its inverse is $R_{-m}$, which differs from $R_m$ unless all $m t_i$ are multiples of
            $\pi$; so the sign of $n - m$ matters.""",
        research=r"""
            Ask for linear maps with $\langle A_m q, A_n k\rangle = f(q, k, n - m)$ for all $q, k$ and integers $m, n$. With $A_0 = I$ this
            gives $A_m^\top A_n = A_{n-m}$, hence $A_m$ orthogonal and $A_m = A_1^m$: a representation of $\mathbb{Z}$ by
            orthogonal matrices, which a change of basis brings to rotations of planes (and $\pm 1$). The angles are
            free, and the basis can be absorbed in $W_Q$, $W_K$. RoPE fixes the angles as a geometric sequence
            (Su et al. 2021); $PE(m + k) = R_k\, PE(m)$ above is the same representation, on an added vector
            instead of a bilinear form.""",
    )
    return


@app.cell
def _(k, q):
    _D, _m = 16, 9
    _t = 10000.0 ** (-torch.arange(0, _D, 2, dtype=torch.float64) / _D)
    _R = torch.zeros(_D, _D, dtype=torch.float64)
    for _i, _angle in enumerate((_m * _t).tolist()):
        _c, _s = torch.tensor([_angle]).double().cos(), torch.tensor([_angle]).double().sin()
        _R[2 * _i, 2 * _i], _R[2 * _i, 2 * _i + 1] = _c, -_s
        _R[2 * _i + 1, 2 * _i], _R[2 * _i + 1, 2 * _i + 1] = _s, _c
    _by_entries = rotated(q, [_m], layout="pairs")[0]
    _all = rotated(q, range(500))

    _wide = 10000.0 ** (-2 * torch.arange(32).double() / 512)  # with d_model = 512, wrongly
    _right = 10000.0 ** (-2 * torch.arange(32).double() / 64)  # with d_k = 64
    _slow = _wide[-1].item(), _right[-1].item()
    _turn = tuple(2 * torch.pi / s for s in _slow)

    _pairs = rotated(q, [4], layout="pairs") @ rotated(k, [11], layout="pairs").T
    _half = rotated(to_half(q), [4]) @ rotated(to_half(k), [11]).T
    _mixed = rotated(q, [4]) @ rotated(k, [11]).T
    details(
        claim(
            "PO-05 PO-06 PO-10",
            r"The code multiplies entry by entry, with two products per entry, and builds no matrix. It equals the "
            r"block matrix of rotations on consecutive pairs $(2i, 2i+1)$, for queries and for keys.",
            torch.allclose(_by_entries, _R @ q, atol=1e-12)
            and torch.allclose(rotated(k, [_m], layout="pairs")[0], _R @ k, atol=1e-12),
        ),
        claim(
            "PO-09",
            "A rotation keeps lengths: over 500 positions the norm of a query changes by "
            f"{(_all.norm(dim=-1) - q.norm()).abs().max():.0e}.",
            torch.allclose(_all.norm(dim=-1), q.norm().expand(500), atol=1e-12),
        ),
        claim(
            "PO-07 E33",
            r"The exponent contains the width of a *head*, $d_k$, not of the model. With $d_k = 64$ the slowest hand "
            rf"moves by {_slow[1]:.4g} per token and needs {_turn[1]:,.0f} tokens for a turn. With "
            rf"$d_{{model}} = 512$ in its place it would move by {_slow[0]:.4f}, a turn in {_turn[0]:.0f} tokens, and "
            "nothing could tell token 5 from token 24 by it.",
            round(_slow[0], 4) == 0.3278
            and round(_turn[0]) == 19
            and f"{_slow[1]:.4g}" == "0.0001334"
            and round(_turn[1]) == 47117
            and torch.allclose(rotated(torch.eye(64).double()[31], [1])[0, 31], _right[-1].cos()),
        ),
        claim(
            "PO-11 E34",
            r"Two layouts are in use. One rotates entries $2i$ and $2i+1$ together, the other $i$ and $i + d_k/2$. After a "
            f"fixed reordering they are equal ({_pairs.item():.4f} and {_half.item():.4f}). Weights of one read by "
            f"the other give {_mixed.item():.4f}, without any error message.",
            torch.allclose(_pairs, _half, atol=1e-12)
            and torch.equal(to_pairs(to_half(q)), q)
            and (_pairs - _mixed).abs().item() > 0.1,
        ),
        title="Four details that are easily mistaken",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Near voices are louder

    At a long table you hear your neighbour best. You need no seat numbers for this, only distances: the
    farther, the quieter. ALiBi takes this literally. It adds to the score of key $j$ for query $i$

    $$\text{bias}_{ij} = -m_h\,|i - j|, \qquad m_h = 2^{-8h/H},$$

    with a fixed slope $m_h$ for each of the heads $h = 1, \dots, H$ ($H$ a power of two): some heads hear only their neighbours, some the whole
    table. T5 learns a number for each distance instead, and lets distances share one: near ones
    one by one, far ones in groups (*buckets*) that grow like powers.
    """)
    return


@app.cell
def _():
    head = mo.ui.slider(1, 8, value=3, label="Head $h$ of 8", show_value=True)
    head
    return (head,)


@app.cell
def _(head):
    _m = 2.0**-head.value
    _distance = torch.arange(41)
    _flat = torch.zeros(1, 8, 41, 16)
    _, _weights = fenchel.attend(
        _flat, _flat, _flat, prior=ALiBi(8) + Causal(), return_weights=True
    )
    _last = _weights[0, head.value - 1, -1].flip(0)
    mo.vstack(
        [
            line_chart(
                [{"distance": _d, "weight": w} for _d, w in enumerate(_last.tolist())],
                "distance",
                "weight",
                title="Weights of ALiBi where all scores are equal",
                y_range=(0, 0.45),
            ),
            claim(
                "PO-14 PO-15",
                f"Head {head.value} has the slope $1/{2**head.value}$: each further token has "
                f"{torch.tensor(-_m).exp().item():.3f} of the weight of the one before it.",
                torch.allclose(
                    _last[1:] / _last[:-1], torch.tensor(-_m).exp().expand(40), rtol=1e-4
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _rng = torch.Generator().manual_seed(0)
    _q, _k, _v = torch.randn(3, 1, 8, 24, 16, dtype=torch.float64, generator=_rng)
    _i, _j = torch.arange(24)[:, None], torch.arange(24)
    _slopes = slope(torch.arange(8), 8).double().view(8, 1, 1)
    _forms = {
        "-m |i - j|": -_slopes * (_i - _j).abs(),
        "-m (i - j)": -_slopes * (_i - _j),
        "+m j": _slopes * _j,
    }

    def _weights(bias, causal):
        shut = torch.where(_j > _i, -torch.inf, 0.0).double() if causal else 0.0
        return torch.softmax(_q @ _k.mT / 4 + bias + shut, -1)

    _apart = {
        causal: max(
            (_weights(a, causal) - _weights(_forms["-m |i - j|"], causal)).abs().max().item()
            for a in _forms.values()
        )
        for causal in (True, False)
    }
    _steps = trace(_q, _k, _v, prior=ALiBi(8) + Causal())
    _by_hand = _weights(_forms["-m |i - j|"], True)

    _learned = torch.randn(32, 8, dtype=torch.float64, generator=_rng)
    _t5 = trace(_q, _k, _v, prior=RelativeBias(_learned) + Causal(), scale=1.0)
    _row = bucket(_j - _i)
    _t5_by_hand = (_q @ _k.mT + _learned[_row].permute(2, 0, 1)).masked_fill(_j > _i, -torch.inf)
    _u = _steps.log_prior.exp()
    _product = _u * _steps.scores.exp()
    _six = slope(torch.arange(6), 6)
    mo.vstack(
        [
            details(
                claim(
                    "PO-14 PO-16",
                    r"ALiBi is $\mathrm{softmax}(QK^\top/\sqrt{d_k} + \text{bias})\,V$. It has nothing to learn and adds "
                    "nothing to the tokens, and the bias is linear in the distance.",
                    torch.allclose(_steps.weights, _by_hand, atol=1e-12)
                    and torch.allclose(_steps.outputs, _by_hand @ _v, atol=1e-12)
                    and not any(
                        "pos" in n or "relative" in n
                        for n, _ in Transformer(
                            ModelConfig(vocabulary=8, width=32, positions="alibi")
                        ).named_parameters()
                    ),
                ),
                claim(
                    "PO-15",
                    "Eight heads have the slopes 1/2, 1/4, ..., 1/256. If the number of heads is no power of two, the "
                    "slopes of the next smaller power come first, then every second one of the next larger: six heads "
                    f"have {', '.join(f'{m:.4g}' for m in _six.tolist())}.",
                    torch.allclose(_slopes.flatten(), 0.5 ** torch.arange(1, 9).double())
                    and torch.allclose(
                        _six,
                        torch.cat((0.25 ** torch.arange(1, 5), 0.5 ** torch.tensor([1.0, 3.0]))),
                    ),
                ),
                claim(
                    "E38",
                    r"Under a causal mask $-m|i-j|$, $-m(i-j)$ and $+m j$ give the same weights (within "
                    f"{_apart[True]:.0e}): a shift of all scores of a query changes nothing. Without the mask they "
                    f"differ by up to {_apart[False]:.2f}.",
                    _apart[True] < 1e-14 and _apart[False] > 0.1,
                ),
                claim(
                    "PO-24",
                    r"A bias is the logarithm of a *prior* $u_{ij}$, a preference before any score is known: the weights are "
                    r"proportional to $u_{ij}\, e^{z_{ij}}$.",
                    torch.allclose(
                        _steps.weights, _product / _product.sum(-1, keepdim=True), atol=1e-12
                    ),
                ),
                claim(
                    "PO-17",
                    "T5 adds a learned number, one per bucket and head, that is looked up by *key minus query*.",
                    torch.allclose(_t5.weights, torch.softmax(_t5_by_hand, -1), atol=1e-12),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _distances = [0, 1, 8, 15, 16, 20, 32, 64, 127, 128]
    _buckets = bucket(-torch.tensor(_distances)).tolist()
    _file = {"model_type": "t5", "vocab_size": 32, "d_model": 32, "num_heads": 4, "d_kv": 8}
    _file |= {"d_ff": 64, "num_layers": 2}
    _t5 = T5.read(_file, (), Path("config.json"))
    _model = Transformer(_t5)
    mo.vstack(
        [
            line_chart(
                [{"distance": _d, "bucket": bucket(torch.tensor(-_d)).item()} for _d in range(161)],
                "distance",
                "bucket",
                title="The 32 buckets of T5 (causal): half one by one, half like a logarithm",
            ),
            details(
                claim(
                    "PO-18",
                    f"Distances {', '.join(map(str, _distances))} are in buckets "
                    f"{', '.join(map(str, _buckets))}.",
                    _buckets == [0, 1, 8, 15, 16, 17, 21, 26, 31, 31],
                ),
                claim(
                    "E39",
                    r"T5 itself has no $1/\sqrt{d_k}$ (the factor on its scores is "
                    f"{_t5.score_scale:g}), and one table per stack serves all its layers.",
                    _t5.score_scale == 1.0
                    and _t5.layers == 2
                    and [n for n, _ in _model.named_parameters() if "relative_bias" in n]
                    == ["relative_bias.weight", "encoder.relative_bias.weight"]
                    and _model.relative_bias.weight.shape == (32, 4)
                    and bucket(torch.tensor([3, -3]), both_sides=True).unique().numel() == 2,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Slower clocks for longer texts

    A model trained on 32 tokens has seen its slow hands move only a little. At token 100 they stand where
    they never stood in training. The remedy is to slow the clock down by a factor $s$. Which hands?

    - **Position interpolation** (`linear`): all hands, $t_i / s$. Simple; but the fast hands, which tell neighbours
      apart, are slowed too.
    - **Base scaling** (`base`): replace 10000 by $10000\,\alpha$, so $t_i = (10000\,\alpha)^{-2i/d}$. A larger base means
      *lower* frequencies. The fastest hand, $i = 0$, stays.
    - **NTK scaling** (`NTK`) is base scaling too, with the base chosen so that the slowest hand, $i = d/2 - 1$, slows
      by *exactly* $s$. From $(b')^{-(d-2)/d} = b^{-(d-2)/d} / s$ follows $b' = b\, s^{d/(d-2)}$.
    - **By parts** (`YaRN`): fast hands stay, slow hands are interpolated, those between are blended.

    Here $d$ is the width of a head and $b$ the base.
    """)
    return


@app.cell
def _():
    factor = mo.ui.slider(
        steps=[2.0, 4.0, 8.0, 16.0, 32.0], value=8.0, label="Factor $s$", show_value=True
    )
    factor
    return (factor,)


@app.cell
def _(factor):
    _d, _b, _s = 64, 10000.0, factor.value
    _t = _b ** (-torch.arange(0, _d, 2, dtype=torch.float64) / _d)
    _scaled = {
        "linear": LinearScaling(_s).frequencies(_t, _b, _d),
        "base": (_b * _s) ** (-torch.arange(0, _d, 2, dtype=torch.float64) / _d),
        "NTK": NTKScaling(_s).frequencies(_t, _b, _d),
        "YaRN": YarnScaling(_s, trained=4096).frequencies(_t, _b, _d),
    }
    slowed = {_name: _t / _new for _name, _new in _scaled.items()}
    mo.vstack(
        [
            line_chart(
                [
                    {"hand": _i, "slowed by": x, "rule": _name}
                    for _name, _by in slowed.items()
                    for _i, x in enumerate(_by.tolist())
                ],
                "hand",
                "slowed by",
                "rule",
                title=f"How much slower each hand becomes, s = {_s:g}, d = 64",
                log_y=True,
                y_range=(1, 40),
            ),
            claim(
                "PO-20 PO-21",
                f"NTK keeps the fastest hand and slows the slowest by exactly {slowed['NTK'][-1]:.3f}; interpolation "
                f"slows every hand by {_s:g}; by parts begins like the one and ends like the other.",
                torch.isclose(slowed["NTK"][0], _t.new_tensor(1.0))
                and torch.isclose(slowed["NTK"][-1], _t.new_tensor(_s))
                and torch.allclose(slowed["linear"], _t.new_full((32,), _s))
                and torch.isclose(slowed["YaRN"][0], _t.new_tensor(1.0))
                and torch.isclose(slowed["YaRN"][-1], _t.new_tensor(_s)),
            ),
            details(
                claim(
                    "PO-19",
                    rf"With $\alpha = s$ the slowest hand slows by {slowed['base'][-1]:.3f} only, a little less than "
                    rf"$s$: $(10000\,\alpha)^{{-2i/d}} = \alpha^{{-2i/d}} \cdot 10000^{{-2i/d}}$.",
                    torch.allclose(slowed["base"], _s ** (torch.arange(0, _d, 2).double() / _d))
                    and slowed["base"][-1] < _s,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _new_base = 10000 * 8 ** (64 / 62)
    _t = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    _ntk = NTKScaling(8.0).frequencies(_t, 10000.0, 64)
    details(
        claim(
            "E35",
            f"The worked numbers for $s = 8$, $d = 64$: NTK means the base {_new_base:,.0f} and slows the last hand by "
            f"{(_t / _ntk)[-1]:.3f}; the base 80,000 slows it by {8 ** (62 / 64):.3f}.",
            round(_new_base) == 85550
            and torch.allclose(_ntk, _new_base ** (-torch.arange(0, 64, 2).double() / 64))
            and f"{(_t / _ntk)[-1]:.3f}" == "8.000"
            and f"{8 ** (62 / 64):.3f}" == "7.497",
        ),
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The experiment: trained on 32 tokens, read at 128

    A toy language of 17 tokens: in 17 of 20 places a token is a fixed function of the one *two before
    it*, else it is drawn at random. To predict it a model must find the place two back, and nothing else. A
    model of one layer is trained on 32 tokens with each kind of positions, then reads 128 tokens
    with the same parameters. The loss is the average surprise per token in nats (natural logarithm
    of one over the probability of the right token); guessing costs $\log 17 = 2.83$. The training takes
    some seconds.
    """)
    return


@app.cell
def _():
    V, CONTEXT, LAG = 17, 32, 2

    def toy(generator, sequences, length):
        ids = torch.randint(V, (sequences, length), generator=generator)
        keep = torch.rand(sequences, length, generator=generator) < 0.85
        for t in range(LAG, length):
            ids[:, t] = torch.where(keep[:, t], (5 * ids[:, t - LAG] + 1) % V, ids[:, t])
        return ids

    def trained(positions, seed=0, steps=150):
        settings = {"buckets": {"buckets": 16, "bucket_distance": 16}}.get(positions, {})
        if positions in ("sinusoidal", "learned"):  # as large as the vectors that are added
            settings["embedding_scale"] = 32**0.5
        config = ModelConfig(
            vocabulary=V, context=CONTEXT, width=32, layers=1, heads=4, positions=positions,
            **settings,
        )  # fmt: skip
        model = Transformer(config, generator=torch.Generator().manual_seed(seed))
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
        generator = torch.Generator().manual_seed(seed + 100)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 10) * (1 - step / steps)
            ids = toy(generator, 32, CONTEXT)
            cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimiser.step()
            optimiser.zero_grad()
        return model.eval()

    long_ids = toy(torch.Generator().manual_seed(10**6), 32, 128)

    @torch.no_grad()
    def losses(model, ids=long_ids):
        logits = model(ids)[:, :-1].transpose(1, 2)
        by_position = cross_entropy(logits, ids[:, 1:], reduction="none").mean(0)
        parts = [("0 to 32", LAG, 32), ("32 to 64", 32, 64), ("64 to 128", 64, 128)]
        return {name: by_position[a:b].mean().item() for name, a, b in parts if b <= ids.shape[1]}

    kinds = ("learned", "sinusoidal", "rotary", "alibi", "buckets", "none")
    models = {name: trained(name) for name in kinds}
    found = {
        name: losses(model.with_context(128)) if name != "learned"
        # a learned table has 32 rows
        else losses(model, long_ids[:, :CONTEXT])
        for name, model in models.items()
    }  # fmt: skip
    return found, losses, models


@app.cell
def _(found, models):
    try:
        models["learned"].with_context(128)
        _refusal = ""
    except ValueError as _error:
        _refusal = str(_error)
    _in, _far = "0 to 32", "64 to 128"
    mo.vstack(
        [
            bar_chart(
                [
                    {"positions": name, "loss (nats)": loss, "tokens": part}
                    for name, by_part in found.items()
                    for part, loss in by_part.items()
                ],
                "positions",
                "loss (nats)",
                "tokens",
                title="Loss by place in the text; trained on the first 32 tokens",
            ),
            claim(
                "PO-04 PO-12 E37",
                "Sinusoids and plain rotary positions are *defined* at every position and useless past the trained "
                f"length: from {found['sinusoidal'][_in]:.2f} to {found['sinusoidal'][_far]:.2f} and from "
                f"{found['rotary'][_in]:.2f} to {found['rotary'][_far]:.2f} nats, which is worse than guessing.",
                all(
                    found[name][_in] < 1.2
                    and found[name]["32 to 64"] > 2.0
                    and found[name][_far] > 2.83
                    for name in ("sinusoidal", "rotary")
                ),
            ),
            claim(
                "PO-16 E37",
                f"ALiBi reads on at the same loss ({found['alibi'][_in]:.2f} and {found['alibi'][_far]:.2f}). It costs "
                f"something: rotary positions reach {found['rotary'][_in]:.2f} within the trained length, since a fixed "
                "slope cannot point at one distance.",
                abs(found["alibi"][_far] - found["alibi"][_in]) < 0.3
                and found["rotary"][_in] < found["alibi"][_in],
            ),
            details(
                claim(
                    "PO-12 PO-13",
                    f"A learned table works within its 32 rows ({found['learned'][_in]:.2f} nats) and ends "
                    "there: the library refuses to read on.",
                    found["learned"][_in] < 1.2 and "without a row for later ones" in _refusal,
                ),
            ),
            mo.md(
                "The buckets of T5 read on as well here: far tokens share the last bucket, which training has seen. The "
                "model without positions learns a little, since a causal mask already tells the first token from the "
                "second by how many keys are open."
            ),
        ]
    )
    return


@app.cell
def _():
    ways = mo.ui.slider(
        steps=[2, 4, 8], value=4, label="Factor $s$ of the scaling", show_value=True
    )
    ways
    return (ways,)


@app.cell
def _(losses, models):
    def _scaled(way, s):
        # the same parameters with other frequencies
        settings = {"rotary_scaling": way, "rotary_factor": float(s)}
        if way == "yarn":
            settings["rotary_trained_context"] = 32
        if way == "base":
            settings = {"rotary_base": 10000.0 * s}
        config = replace(models["rotary"].config, context=128, **settings)
        model = Transformer(config)
        model.load_state_dict(models["rotary"].state_dict())
        return model.eval()

    names = {
        "linear": "linear",
        "base": "base",
        "NTK": "ntk",
        "YaRN": "yarn",
    }
    scaled = {s: {name: losses(_scaled(way, s)) for name, way in names.items()} for s in (2, 4, 8)}
    return (scaled,)


@app.cell
def _(found, scaled, ways):
    bar_chart(
        [
            {"rule": name, "loss (nats)": loss, "tokens": part}
            for name, by_part in ({"plain": found["rotary"]} | scaled[ways.value]).items()
            for part, loss in by_part.items()
        ],
        "rule",
        "loss (nats)",
        "tokens",
        title=f"Rotary positions, frequencies lowered by s = {ways.value}, no further training",
        y_range=(0, 4.5),
    )
    return


@app.cell
def _(found, scaled):
    _plain = found["rotary"]
    _in, _mid, _far = "0 to 32", "32 to 64", "64 to 128"
    _four = scaled[4]
    mo.vstack(
        [
            details(
                claim(
                    "PO-22 E35",
                    "At the same factor NTK reads on as well as base scaling or better, for 2, 4 and 8: tokens 32 to 64 cost "
                    + ", ".join(
                        f"{scaled[s]['NTK'][_mid]:.2f} against {scaled[s]['base'][_mid]:.2f}"
                        for s in (2, 4, 8)
                    )
                    + " nats. It is the same rule with a slightly larger base.",
                    all(scaled[s]["NTK"][_mid] < scaled[s]["base"][_mid] + 0.05 for s in (2, 4, 8)),
                ),
                claim(
                    "PO-22 E35",
                    "Neither reads as far as its factor promises: with $s = 4$ tokens 64 to 128 cost "
                    f"{_four['NTK'][_far]:.2f} nats. By parts they cost {_four['YaRN'][_far]:.2f}, with a small "
                    f"loss inside ({_four['YaRN'][_in]:.2f} against {_plain[_in]:.2f}).",
                    _four["NTK"][_far] > 2.83
                    and _four["base"][_far] > 2.83
                    and _four["YaRN"][_far] < 2.0
                    and _four["YaRN"][_in] > _plain[_in],
                ),
                claim(
                    "PO-21 PO-22",
                    "Interpolation without further training spoils what was learnt, already inside the trained length: "
                    f"{_four['linear'][_in]:.2f} nats with $s = 4$. It slows the hand that tells two back from "
                    "one back. (It is meant to be followed by some training.)",
                    all(scaled[s]["linear"][_in] > _plain[_in] + 0.5 for s in (2, 4, 8)),
                ),
            ),
            mo.md(
                "You may read that base scaling is for two to four times the length and NTK for more. This experiment "
                "does not support such a rule; it says which hands matter for *this* task. Measure on yours."
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        rotate = names["rotate"]
        x = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for m in (0, 1, 5, 40):
            y = rotate(x, m)
            assert torch.is_tensor(y), "Return a tensor."
            assert y.shape == x.shape, "The result has as many entries as x."
            if m == 0:
                assert torch.allclose(y, x), "At position 0 nothing is rotated."
            assert torch.allclose(y.norm(), x.norm()), (
                "A rotation keeps the length: look at the signs of the two sines."
            )
            expected = rotated(x, [m], layout="pairs")[0]
            assert torch.allclose(y[:2], expected[:2]), (
                "Pair 0 turns by m radians, anticlockwise: (a, b) to (a cos - b sin, a sin + b cos)."
            )
            assert torch.allclose(y, expected), (
                "Pair 0 is right, a later pair is not: pair i turns by m * 10000 ** (-2 i / len(x))."
            )

    exercise = Exercise(
        lesson="positions",
        task="Mend `rotate(x, m)`: rotary positions for one vector `x` of even length at position `m`, in "
        "consecutive pairs $(2i, 2i+1)$ with base 10000.",
        starter="""
    def rotate(x, m):
        i = torch.arange(len(x) // 2)
        angle = m * 10000.0 ** (-i / len(x))
        a, b = x[0::2], x[1::2]
        y = torch.empty_like(x)
        y[0::2] = a * torch.cos(angle) + b * torch.sin(angle)
        y[1::2] = a * torch.sin(angle) + b * torch.cos(angle)
        return y
    """,
        solution="""
    def rotate(x, m):
        i = torch.arange(len(x) // 2, dtype=x.dtype)
        angle = m * 10000.0 ** (-2 * i / len(x))
        a, b = x[0::2], x[1::2]
        y = torch.empty_like(x)
        y[0::2] = a * torch.cos(angle) - b * torch.sin(angle)
        y[1::2] = a * torch.sin(angle) + b * torch.cos(angle)
        return y
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
    ## Your own model past its context
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
    _T = own.config.context
    _text = (
        "The people of the town came to the river in the morning, and those who had come before them "
        "told what they had seen. Nobody believed it at first. Then the water began to rise, and all "
        "of them went up the hill together, where the old house stood among the trees. "
    )
    _encoded = own.tokenizer.encode_whole(_text)
    _long = _encoded * (2 * _T // len(_encoded) + 2)
    _starts = range(0, len(_encoded), max(1, len(_encoded) // 8))
    _ids = torch.tensor([_long[_start : _start + 2 * _T] for _start in _starts])
    _reads_on = own.config.positions != "learned"
    _ways = {"as trained": own.model.with_context(2 * _T)} if _reads_on else {}
    if own.config.positions == "rotary" and own.config.rotary_scaling is None:
        _ways |= {
            f"{_way}, factor 2": own.model.with_context(2 * _T, rotary_scaling=_way)
            for _way in ("linear", "ntk", "yarn")
            if _way != "ntk" or own.config.rotary_width >= 4
        }
    _edges = [round(_part * _T / 4) for _part in range(9)]
    _rows = []
    with torch.no_grad():
        _inside = own.model(_ids[:, :_T])
        for _name, _model in (_ways or {"as trained": own.model}).items():
            _read = _ids[:, : _model.config.context]
            _logits = _model(_read)
            _loss = cross_entropy(
                _logits[:, :-1].transpose(1, 2).double(), _read[:, 1:], reduction="none"
            ).mean(0)
            _rows += [
                {"tokens up to": b, "loss (nats)": _loss[a : b - 1].mean().item(), "rule": _name}
                for a, b in pairwise(_edges)
                if b <= len(_loss) + 1
            ]
        _outside = _ways["as trained"](_ids) if _reads_on else None
    mo.vstack(
        [
            mo.md(
                f"Your model has *{own.config.positions}* positions and a context of {_T}. Below it reads "
                f"{2 * _T if _reads_on else _T} tokens of a short English story, repeated where it is too short, from "
                f"{len(_starts)} different beginnings; the loss is their average."
            ),
            line_chart(
                _rows,
                "tokens up to",
                "loss (nats)",
                "rule",
                title=f"Loss of your model along a text; trained up to {_T}",
                points=True,
            ),
            claim(
                "PO-04 PO-12 E37",
                "Reading on changes nothing inside the context, and there is a finite answer at every position after "
                "it. Whether it is a good one is what the chart shows."
                if _reads_on
                else "A learned table ends with its context, and so does the chart.",
                (
                    torch.allclose(_outside[:, :_T], _inside, rtol=1e-3, atol=1e-3)
                    and torch.isfinite(_outside).all()
                )
                if _reads_on
                else own.model.pos_embed.weight.shape[0] == _T,
            ),
        ]
    )
    return (own,)


@app.cell
def _():
    own_text = text_field(
        "we the people of the united states, in order to form a more perfect union"
    )
    own_text
    return (own_text,)


@app.cell
def _(own, own_text):
    _ids = token_ids(own_text.value, own.tokenizer, min(32, own.config.context))
    own_maps = attention_maps(own.model, torch.tensor([_ids])).double()
    _heads = {
        f"{n + 1}.{h + 1}": (n, h)
        for n in range(own_maps.shape[0])
        for h in range(own_maps.shape[1])
    }
    own_head = mo.ui.dropdown(
        _heads, value=next(iter(_heads)), label="Head (1.2 is the second of the first layer)"
    )
    own_head
    return own_head, own_maps


@app.cell
def _(own, own_head, own_maps):
    _layer, _head = own_head.value
    _weights = own_maps[_layer, _head]
    _n = len(_weights)
    _gap = (torch.arange(_n)[:, None] - torch.arange(_n)).abs()
    _open = torch.ones(_n, _n).tril(0 if own.config.kind == "decoder" else _n)
    _even = _open / _open.sum(-1, keepdim=True)
    _rows = [
        {"distance": d, "share of the weight": p[_gap == d].sum().item() / _n, "weights": name}
        for name, p in (("of this head", _weights), ("evenly spread", _even))
        for d in range(_n)
    ]
    _mean = sum(row["distance"] * row["share of the weight"] for row in _rows[:_n])
    _pattern = head_patterns(_weights[None, None])
    mo.vstack(
        [
            line_chart(
                _rows,
                "distance",
                "share of the weight",
                "weights",
                title=f"How far back head {_layer + 1}.{_head + 1} reads in your {_n} tokens",
                points=True,
                y_range=(0, 1),
            ),
            details(
                claim(
                    "AT-34",
                    f"On average this head reads {_mean:.2f} tokens away, and puts {_pattern.previous.item():.3f} of its weight on the token before.",
                    abs(_mean - _pattern.distance.item()) < 1e-6
                    and abs(_rows[1]["share of the weight"] - _pattern.previous.item()) < 1e-6,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "The toy needs one distance, and a short one. A task that must find a token *by its content* far away can punish "
        "ALiBi, whose slopes make far tokens quiet, and be kinder to rotary positions with a scaling. Layers above the "
        "first, longer training and training on mixed lengths all change the table. And a score that depends on "
        "$m - n$ alone is a statement about one layer: above it the tokens have already seen their neighbours, and with a "
        "causal mask the first tokens of a text have fewer of them."
    )
    return


@app.cell
def _():
    footer("positions")
    return


if __name__ == "__main__":
    app.run()
