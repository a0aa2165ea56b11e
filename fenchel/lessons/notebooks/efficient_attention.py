"""Efficient attention and caches: what attention costs, and four ways to pay less."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Efficient attention and caches",
)

with app.setup:
    import math
    import statistics
    import time

    import marimo as mo
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import fenchel
    from fenchel.attention import Global, Strided, linear_attend, linear_step, random_features
    from fenchel.evaluate import attention_maps
    from fenchel.generation import KVCache
    from fenchel.generation.kv_cache import quantise_int8
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
        details,
        footer,
        header,
        heat_chart,
        line_chart,
        no_run,
        proof,
        question,
        run_picker,
        table,
        text_field,
        token_ids,
        what_breaks,
    )
    from fenchel.model import attention_entries, forward_flops


@app.cell
def _():
    header("efficient_attention")
    return


@app.cell
def _():
    guess = question(
        "Attention first maps every token by four matrices (the projections), then compares every "
        "token with every other (the scores). With vectors of 512 numbers, from which length of "
        "the text on do the scores cost more?",
        ["from 23 tokens", "from 512 tokens", "from 1,024 tokens"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "from 1,024 tokens",
        "The two costs are $8 n d^2$ and $4 n^2 d$; they are equal where $n = 2d$. Below twice the "
        "width, the famous square of the length is the *smaller* part.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Two bills

    $n$ people meet. First everybody fills in four forms, each with $d$ questions about $d$
    topics: that work grows with the number of people. Then everybody talks with everybody: that
    work grows with the number of *pairs*. In a small group the forms take longer, in a crowd the
    talks do.

    Attention is the same. $n$ is the number of tokens, $d$ the *width*, how many numbers a token
    carries. One *operation* is one addition or one multiplication of two numbers; a product of an
    $n \times d$ and a $d \times m$ matrix takes $2 n d m$ of them.

    | step | operations |
    | --- | --- |
    | queries, keys, values and the output: four products with $d \times d$ matrices | $4 \cdot 2nd^2 = 8nd^2$ |
    | scores $QK^\top$: each query with each key | $2n^2d$ |
    | softmax of $H$ heads: maximum, difference, exponential, sum, quotient | about $5Hn^2$ |
    | weights times values, $PV$ | $2n^2d$ |
    """)
    return


@app.cell
def _():
    width = mo.ui.slider(
        steps=[64, 128, 256, 512, 1024, 4096], value=512, label="Width $d$", show_value=True
    )
    length = mo.ui.slider(
        steps=[2**p for p in range(5, 16)], value=1024, label="Length $n$", show_value=True
    )
    mo.vstack([width, length])
    return length, width


@app.cell
def _(length, width):
    config = fenchel.ModelConfig(
        vocabulary=256, width=width.value, layers=1, heads=8, mlp="gelu", context=2**16
    )
    lengths = [2**p for p in range(5, 16)]
    bills = {n: forward_flops(config, n) for n in lengths}
    here = bills[length.value]
    crossing = forward_flops(config, 2 * width.value)
    mo.vstack(
        [
            line_chart(
                [
                    {"length n": n, "operations": cost, "part": part}
                    for n, bill in bills.items()
                    for part, cost in (
                        ("projections", bill.projections),
                        ("scores", bill.scores),
                    )
                ],
                "length n",
                "operations",
                "part",
                title=f"Operations of attention, width {width.value}",
                y_range=(1e5, 1e14),
                here=[
                    {"length n": length.value, "operations": cost}
                    for cost in (here.projections, here.scores)
                ],
                log_x=True,
                log_y=True,
            ),
            table(
                [
                    {
                        "n": length.value,
                        "projections": f"{here.projections:,}",
                        "scores": f"{here.scores:,}",
                        "scores / projections": here.scores / here.projections,
                        "weights": f"{attention_entries(config, length.value):,}",
                    }
                ]
            ),
            claim(
                "EF-03 E57",
                f"The lines cross at $n = 2d = {2 * width.value:,}$: there both cost "
                f"{crossing.scores:,} operations. Shorter texts pay mostly for projections.",
                crossing.scores == crossing.projections == 8 * (2 * width.value) * width.value**2
                and all(
                    bill.projections == 8 * n * width.value**2
                    and bill.scores == 4 * n * n * width.value
                    and (bill.scores > bill.projections) == (n > 2 * width.value)
                    for n, bill in bills.items()
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _q, _k, _v = torch.randn(3, 1, 4, 96, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    with FlopCounterMode(display=False) as _counter:
        _, _weights = fenchel.attend(_q, _k, _v, backend="reference", return_weights=True)
    counted = _counter.get_total_flops()
    entries = _weights.numel()
    details(
        claim(
            "EF-01 E57",
            f"Counted while it runs: 4 heads of width 8 over 96 tokens take {counted:,} operations, "
            f"$4n^2d$ with $d = 32$, half for $QK^\\top$ and half for $PV$. The weights are {entries:,} "
            "numbers: $Hn^2$, the number of heads $H$ included. Time is $O(n^2d)$, memory $O(Hn^2 + nd)$; $O$ is read *of the order of*: up to a fixed factor.",
            counted == 4 * 96**2 * 32
            and entries == 4 * 96**2
            and entries
            == attention_entries(
                fenchel.ModelConfig(vocabulary=9, width=32, heads=4, layers=1), T=96
            ),
        ),
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## First way: never write the square down

    You travel and want the average price of a meal. Prices come in parcels, each in its own
    currency, and you can carry one line of notes. It is enough: keep the *strongest currency so
    far* as the unit, the sum of weights, and the weighted sum of prices. When a stronger currency
    turns up, convert the two sums once and go on. At the end, divide.

    In softmax the unit is the largest score $m$ so far, since weights are counted as $e^{s - m}$. A
    query reads its keys block by block, with scores $S$ and values $V$ of the block, and carries
    a maximum $m$, a sum $l$ and a weighted sum of values $acc$:

    $$\begin{aligned} m' &= \max(m, \max S) \\ l' &= l\,e^{m-m'} + \textstyle\sum e^{S-m'} \\
    acc' &= acc\,e^{m-m'} + e^{S-m'}V \end{aligned}$$

    At the end the output is $acc / l$. This is *online softmax*, the heart of FlashAttention. It
    is attention itself, not an approximation. Here it is in full; it also counts the numbers that
    it moves between the large slow memory and the small fast one.
    """)
    return


@app.cell
def _():
    def tiled(Q, K, V, rows, columns):
        """Outputs, log-sum-exp of each row, and how many numbers were moved."""
        n, d = Q.shape
        out, lse, moved = torch.empty_like(V), Q.new_empty(n), 0
        for i in range(0, n, rows):
            q = Q[i : i + rows] / math.sqrt(d)
            moved += q.numel()
            m = q.new_full((len(q), 1), -math.inf)
            total, acc = q.new_zeros(len(q), 1), q.new_zeros(len(q), d)
            for j in range(0, n, columns):
                k, v = K[j : j + columns], V[j : j + columns]
                moved += k.numel() + v.numel()
                S = q @ k.T  # rows x columns, in the small memory
                new = torch.maximum(m, S.max(1, keepdim=True).values)
                weights = torch.exp(S - new)
                total = total * torch.exp(m - new) + weights.sum(1, keepdim=True)  # l
                acc = acc * torch.exp(m - new) + weights @ v
                m = new
            out[i : i + rows] = acc / total
            lse[i : i + rows] = (m + total.log()).squeeze(1)
            moved += acc.numel() + len(q)
        return out, lse, moved

    mo.show_code()
    return (tiled,)


@app.cell
def _():
    block = mo.ui.slider(
        steps=[4, 8, 16, 32, 64, 128], value=32, label="Rows of a block", show_value=True
    )
    block
    return (block,)


@app.cell
def _(block, tiled):
    n, d = 128, 16
    Q, K, V = torch.randn(
        3, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)
    exact = fenchel.attend(Q[None], K[None], V[None], backend="reference")[0]
    in_blocks, _, moved = tiled(Q, K, V, block.value, 16)
    error = (in_blocks - exact).abs().max().item()
    traffic = {r: 2 * n * d + n + 2 * n * n * d // r for r in (4, 8, 16, 32, 64, 128)}
    stored = 4 * n * d + 4 * n * n
    mo.vstack(
        [
            bar_chart(
                [{"rows of a block": "square", "numbers moved": stored}]
                + [{"rows of a block": f"{r}", "numbers moved": t} for r, t in traffic.items()],
                "rows of a block",
                "numbers moved",
                title=f"Traffic, n = {n}, d = {d}",
                here=f"{block.value}",
            ),
            claim(
                "EF-04 EF-05 E56",
                f"With blocks of {block.value} rows and 16 columns the largest difference from "
                f"plain attention is {error:.1e}: the rounding of 64-bit numbers. Exact, though no "
                r"$n \times n$ matrix was ever stored.",
                error < 2e-15,
            ),
            details(
                claim(
                    "EF-08",
                    f"It moved {moved:,} numbers: $2nd + n + 2n^2d / r$ with $r = {block.value}$ rows. "
                    f"Storing the square moves $4nd + 4n^2 = {stored:,}$ (read $Q, K, V$; write and "
                    r"read the scores; write and read the weights; write the output). Blocks win if $r$ is above about "
                    "$d/2$; larger blocks move less.",
                    moved == traffic[block.value]
                    and (moved < stored) == (block.value > n * d / (d + 2 * n)),
                ),
            ),
        ]
    )
    return K, Q, V, d, exact, n


@app.cell
def _():
    mo.md(r"""
    A processor multiplies faster than it fetches, so less traffic is less time, although the
    number of operations, $O(n^2d)$, is the same. The rows of a block must fit into the small memory, so
    their number is limited: real kernels often use 64 or 128.
    """)
    return


@app.cell
def _():
    proof(
        school=r"""
            After any number of blocks three things are true. $m$ is the largest score so far. $l$ is the sum of
            $e^{s-m}$ over the scores $s$ so far. $acc$ is the sum of $e^{s-m}v$ over the same scores and their
            values. Suppose it holds, and a block with a larger score $m'$ arrives. Every old term $e^{s-m}$
            should become $e^{s-m'}$. But $e^{s-m'} = e^{s-m} \cdot e^{m-m'}$: one common factor, so it is enough
            to multiply the two sums by it. Then add the new terms. All three things hold again, and after
            the last block $acc/l$ is the weighted average of the values. The common factor $e^{-m}$ is in both, and
            cancels.""",
        undergraduate=r"""
            Map each key to the triple $(s_j, 1, v_j)$ and define
            $(m_1, l_1, a_1) \oplus (m_2, l_2, a_2) = (m, l_1e^{m_1-m} + l_2e^{m_2-m},
            a_1e^{m_1-m} + a_2e^{m_2-m})$ with $m = \max(m_1, m_2)$. Under $(m, l, a) \mapsto (le^m, ae^m)$ this is
            addition of vectors, hence associative and commutative, with $(-\infty, 0, 0)$ neutral: blocks may come in any size
            and order, and in parallel. *Backward.* With $L = m + \log l$ per row saved, $P = e^{S-L}$ is rebuilt block by
            block. For an output gradient $G$: $dV = P^\top G$, and by the softmax Jacobian
            $dS = P * (GV^\top - \Delta)$ with $\Delta_i = \sum_j P_{ij} (GV^\top)_{ij} = \langle G_i, O_i \rangle$, one number per row; then $dQ = dS\,K/\sqrt d$ and
            $dK = dS^\top Q/\sqrt d$. Only $O$ and $L$ are stored.""",
        research=r"""
            The recurrence is in Milakov and Gimelshein (2018); Rabe and Staats (2021) note the $O(1)$ extra memory per query;
            Dao et al. (2022) tile both axes for the memory hierarchy and count $\Theta(n^2d^2/M)$ transfers with a fast memory of
            $M$ numbers: $r \approx M/4d$ in the count above. Every map whose weights follow from one number
            per row can be recomputed in the same way; `fenchel.attend(backend="blocked")` does so for entmax as well.""",
    )
    return


@app.cell
def _(K, Q, V, d, n, tiled):
    _at = [x.clone().requires_grad_() for x in (Q, K, V)]
    _G = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _out = fenchel.attend(*(x[None] for x in _at), backend="reference")[0]
    _wanted = torch.autograd.grad((_G * _out).sum(), _at)
    _O, _L, _ = tiled(Q, K, V, 32, 16)
    _delta = (_G * _O).sum(1, keepdim=True)
    _dQ, _dK, _dV = (torch.zeros_like(Q) for _ in range(3))
    for _i in range(0, n, 32):
        _rows = slice(_i, _i + 32)
        for _j in range(0, n, 16):
            _cols = slice(_j, _j + 16)
            _P = torch.exp(Q[_rows] @ K[_cols].T / math.sqrt(d) - _L[_rows, None])
            _dS = _P * (_G[_rows] @ V[_cols].T - _delta[_rows])
            _dV[_cols] += _P.T @ _G[_rows]
            _dQ[_rows] += _dS @ K[_cols] / math.sqrt(d)
            _dK[_cols] += _dS.T @ Q[_rows] / math.sqrt(d)
    _gap = max((a - b).abs().max().item() for a, b in zip(_wanted, (_dQ, _dK, _dV), strict=True))
    details(
        claim(
            "EF-06",
            "Training needs derivatives, and they need the weights again. They are recomputed block by "
            "block from one saved number per row, $L = m + \\log l$, as $e^{S - L}$: the gradients "
            f"differ from those of plain attention by {_gap:.1e}. The price is a second computation of the "
            "scores, in the backward pass.",
            _gap < 1e-13,
        ),
    )
    return


@app.cell
def _():
    def saved_numbers(n, backend):
        """How many numbers a forward pass keeps for the backward pass, besides q, k and v."""
        sizes = {}

        def keep(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
            return x

        q, k, v = torch.randn(3, 1, 1, n, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            fenchel.attend(q, k, v, backend=backend)
        return sum(sizes.values()) - 3 * n * 64

    def milliseconds(call):
        call()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    def slope(lengths, values):
        logs = [[math.log(x) for x in xs] for xs in (lengths, values)]
        return statistics.linear_regression(*logs).slope

    return milliseconds, saved_numbers, slope


@app.cell
def _(milliseconds, saved_numbers, slope):
    measured = []
    for _n in (256, 512, 1024, 2048):
        _q = torch.randn(1, 1, _n, 64, generator=torch.Generator().manual_seed(0))
        for _backend, _name in (("reference", "square stored"), ("blocked", "in blocks")):
            with FlopCounterMode(display=False) as _counter:
                fenchel.attend(_q, _q, _q, backend=_backend)
            measured.append(
                {
                    "length n": _n,
                    "version": _name,
                    "numbers stored": saved_numbers(_n, _backend),
                    "operations": _counter.get_total_flops(),
                    "milliseconds here": milliseconds(
                        lambda q=_q, b=_backend: fenchel.attend(q, q, q, backend=b)
                    ),
                }
            )
    fits = {
        (version, what): slope(
            [row["length n"] for row in measured if row["version"] == version],
            [row[what] for row in measured if row["version"] == version],
        )
        for version in ("square stored", "in blocks")
        for what in ("numbers stored", "operations", "milliseconds here")
    }
    _times = [fits[v, "milliseconds here"] for v in ("square stored", "in blocks")]
    mo.vstack(
        [
            mo.md("""
    The growth can be measured. On paper with logarithmic axes a power $n^a$ is a straight line of
    slope $a$.
    """),
            line_chart(
                measured,
                "length n",
                "numbers stored",
                "version",
                title="Numbers stored, besides Q, K, V",
                log_x=True,
                log_y=True,
                points=True,
            ),
            details(
                claim(
                    "EF-02 EF-07 E56",
                    "What is stored grows like "
                    f"$n^{{{fits['square stored', 'numbers stored']:.2f}}}$ with the square and like "
                    f"$n^{{{fits['in blocks', 'numbers stored']:.2f}}}$ in blocks: $n$ numbers for the rows "
                    "and $nd$ for the output, nothing else. Operations grow like "
                    f"$n^{{{fits['in blocks', 'operations']:.2f}}}$ in both. (Time on this computer, just now: "
                    f"$n^{{{_times[0]:.1f}}}$ and $n^{{{_times[1]:.1f}}}$; not checked, since it depends on what "
                    "else the computer does.)",
                    all(
                        row["numbers stored"]
                        == (
                            row["length n"] ** 2
                            if row["version"] == "square stored"
                            else 65 * row["length n"]
                        )
                        for row in measured
                    )
                    and abs(fits["square stored", "numbers stored"] - 2) < 1e-9
                    and abs(fits["in blocks", "numbers stored"] - 1) < 1e-9
                    and abs(fits["in blocks", "operations"] - 2) < 1e-9
                    and abs(fits["square stored", "operations"] - 2) < 1e-9,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Second way: keep what does not change

    In a meeting somebody takes minutes. When a new speaker asks a question, nobody repeats the
    morning: the answer comes from the minutes, and then one line is added to them.

    A model that writes text adds one token at a time. The keys and values of earlier tokens do not
    change, so they are kept, in the *KV cache*. For the new token's $q$, $k$, $v$:

    $$\begin{aligned} K &\leftarrow (K, k), \quad V \leftarrow (V, v), \\
    o &= \mathrm{softmax}\!\left(\frac{q K^\top}{\sqrt{d_k}}\right) V . \end{aligned}$$

    $d_k$ is the width of a key. *Both* $K$ and $V$ grow by a row, and only one row of attention is
    computed.
    """)
    return


@app.cell
def _():
    _q, _k, _v = torch.randn(
        3, 1, 2, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)
    _whole = fenchel.attend(_q, _k, _v, prior=fenchel.Causal())
    K_cache, V_cache = _k[:, :, :0], _v[:, :, :0]
    _rows = []
    for _t in range(20):
        K_cache = torch.cat((K_cache, _k[:, :, _t : _t + 1]), 2)
        V_cache = torch.cat((V_cache, _v[:, :, _t : _t + 1]), 2)
        _rows.append(fenchel.attend(_q[:, :, _t : _t + 1], K_cache, V_cache))
    _gap = (torch.cat(_rows, 2) - _whole).abs().max().item()
    claim(
        "EF-13 EF-16 E55",
        f"Twenty tokens, one at a time beside the cache, give what causal attention over all gives "
        f"at once, to {_gap:.1e}.",
        _gap < 1e-14,
    )
    return


@app.cell
def _():
    cached_to = mo.ui.slider(
        steps=[32, 64, 128, 256, 512, 1024, 2048],
        value=512,
        label="Tokens written so far, $n$",
        show_value=True,
    )
    cached_to
    return (cached_to,)


@app.cell
def _(cached_to):
    _config = fenchel.ModelConfig(
        vocabulary=256, width=256, layers=1, heads=4, mlp="gelu", context=4096
    )

    def _step(n, S):
        bill = forward_flops(_config, n, S=S)
        return bill.projections + bill.scores

    _n = cached_to.value
    _with, _without = _step(1, _n), _step(_n, _n)
    _total = {
        m: (
            sum(forward_flops(_config, 1, S=s).scores for s in range(1, m + 1)),
            sum(forward_flops(_config, s, S=s).scores for s in range(1, m + 1)),
        )
        for m in (1024, 2048)
    }
    _growth = [b / a for a, b in zip(_total[1024], _total[2048], strict=True)]
    mo.vstack(
        [
            line_chart(
                [
                    {"token n": n, "operations": cost, "version": version}
                    for n in (32, 64, 128, 256, 512, 1024, 2048)
                    for version, cost in (
                        ("with the cache", _step(1, n)),
                        ("everything again", _step(n, n)),
                    )
                ],
                "token n",
                "operations",
                "version",
                title="Operations for the next token",
                here=[{"token n": _n, "operations": cost} for cost in (_with, _without)],
                log_x=True,
                log_y=True,
            ),
            claim(
                "EF-14 E55",
                f"Token {_n} costs {_with:,} operations with the cache and {_without:,} without: "
                r"$O(nd + d^2)$ instead of $O(n^2d + nd^2)$.",
                _with == 8 * 256**2 + 4 * _n * 256
                and _without == 8 * _n * 256**2 + 4 * _n**2 * 256
                and _without == _n * _with,
            ),
            details(
                claim(
                    "EF-14 E55",
                    "A cache does not remove the square: all scores of a text of $n$ tokens together grow "
                    f"{_growth[0]:.2f}-fold when $n$ doubles, like $n^2d$; without the cache "
                    f"{_growth[1]:.2f}-fold, like $n^3d$.",
                    abs(_growth[0] - 4) < 0.01 and abs(_growth[1] - 8) < 0.02,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    def _model(**settings):
        _config = fenchel.ModelConfig(
            vocabulary=50, context=24, width=32, layers=2, heads=4, initial="xavier", **settings
        )
        return fenchel.Transformer(_config, generator=torch.Generator().manual_seed(0)).double()

    _seen = {}

    def _watch(layer, _q, k, _v):
        _seen[layer] = k

    _ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
    _rows = []
    with torch.no_grad():
        for _name, _settings in {
            "rotary": {},
            "ALiBi": {"positions": "alibi"},
            "window of 6": {"windows": (6,)},
        }.items():
            _m = _model(**_settings)
            _cache = KVCache(_m.config, batch=2, positions=24, dtype=torch.float64)
            _parts = torch.cat([_m(x, cache=_cache) for x in _ids.split([7, 1, 1, 1, 14], 1)], 1)
            _rows.append(
                {"model": _name, "largest difference": (_parts - _m(_ids)).abs().max().item()}
            )
        _m = _model()
        _alone = _m(_ids[1:, :20])
        _cache = KVCache(_m.config, batch=2, positions=24, dtype=torch.float64)
        for _row, _length in enumerate((12, 8)):  # two prompts of unequal lengths, then 12 tokens
            _m(_ids[_row, None, :_length], cache=_cache.select([_row], [0]))
        _both = _cache.select(slice(0, 2), [12, 8])
        _pairs = torch.stack((_ids[0, 12:], _ids[1, 8:20]))
        _rest = torch.cat([_m(x, cache=_both) for x in _pairs.split(1, 1)], 1)
        _gap = (_rest[1] - _alone[0, 8:]).abs().max().item()
        _rows.append({"model": "rows of unequal lengths", "largest difference": _gap})
        _m(_ids, observe=_watch)
        _cache = KVCache(_m.config, batch=2, positions=24, dtype=torch.float64)
        _m(_ids, cache=_cache)
        _same = torch.equal(_cache.layers[0].keys.read(slice(0, 2), 0, 24), _seen[0])
    mo.vstack(
        [
            table(_rows),
            details(
                claim(
                    "EF-15",
                    "Positions must be right as well. Rotary keys are stored as they are used, after their "
                    "rotation; ALiBi counts distances from the end of the cache; a window stores its last "
                    "keys only; rows of a batch have lengths of their own. In each case reading in pieces equals "
                    "reading at once.",
                    _same and all(row["largest difference"] < 1e-12 for row in _rows),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Third way: a smaller cache

    The minutes grow with every line. $B$ texts at once, $n$ tokens each, $G$ heads of keys and
    values of width $d_k$: each layer keeps

    $$2\,B\,G\,n\,d_k \ \text{numbers.}$$

    They are *activations*, results of the computation, and not parameters of the model. With one
    key head per query head, $G = H$, this is *multi-head attention* (MHA). Query heads can share
    keys, like colleagues who share one set of minutes: $G$ sets in *grouped-query attention*
    (GQA), a single one in *multi-query attention* (MQA). A cache is then $H/G$ times smaller.
    """)
    return


@app.cell
def _():
    groups = mo.ui.slider(
        steps=[1, 2, 4, 8, 16, 32], value=8, label="Key heads $G$", show_value=True
    )
    mo.vstack(
        [
            mo.md(
                "One text of 4,096 tokens, 32 query heads of width 128, numbers of two bytes. A MiB is $2^{20}$ bytes."
            ),
            groups,
        ]
    )
    return (groups,)


@app.cell
def _(groups):
    def _mebibytes(G, **keywords):
        _config = fenchel.ModelConfig(
            vocabulary=8, context=4096, width=4096, heads=32, kv_heads=G, layers=1
        )
        _cache = KVCache(
            _config, batch=1, positions=4096, dtype=torch.float16, device="meta", **keywords
        )
        return _cache.bytes / 2**20

    _sizes = {G: _mebibytes(G) for G in (1, 2, 4, 8, 16, 32)}
    _G = groups.value
    _q = torch.randn(1, 32, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _k, _v = torch.randn(
        2, 1, _G, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).unbind(0)
    _repeated = [x.repeat_interleave(32 // _G, 1) for x in (_k, _v)]
    mo.vstack(
        [
            bar_chart(
                [{"key heads": f"{G}", "MiB per layer": size} for G, size in _sizes.items()],
                "key heads",
                "MiB per layer",
                title="Cache of one layer",
                here=f"{_G}",
            ),
            claim(
                "EF-11 E54",
                f"MHA keeps {_sizes[32]:g} MiB per layer, GQA with 8 key heads {_sizes[8]:g}, MQA "
                f"{_sizes[1]:g}. Multiply by the number of layers. With {_G} key heads: {_sizes[_G]:g} MiB.",
                (_sizes[32], _sizes[8], _sizes[1]) == (64, 16, 2)
                and all(size * 2**20 == 2 * G * 4096 * 128 * 2 for G, size in _sizes.items()),
            ),
            details(
                claim(
                    "EF-09 EF-10",
                    f"Sharing is exactly repeating: {_G} key heads for 32 query heads give the outputs of 32 "
                    f"key heads with {32 // _G} equal copies each, from a cache {32 // _G} times smaller.",
                    torch.allclose(
                        fenchel.attend(_q, _k, _v), fenchel.attend(_q, *_repeated), atol=1e-14
                    )
                    and _sizes[32] / _sizes[_G] == 32 // _G,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    _n, _s = quantise_int8(_x)
    _int8 = ((_s * _n - _x).norm() / _x.norm()).item()
    _half = ((_x.half().float() - _x).norm() / _x.norm()).item()
    mo.vstack(
        [
            mo.md(r"""
    Fewer bits per number help too. *int8* writes each key as 128 whole numbers from $-127$ to
    $127$ and one scale $s$, like a map that gives heights in steps of its own contour interval.
    """),
            table(
                [
                    {"stored as": "float32", "bytes per number": 4.0, "relative error": 0.0},
                    {"stored as": "float16", "bytes per number": 2.0, "relative error": _half},
                    {
                        "stored as": "int8, a scale per token",
                        "bytes per number": 1 + 4 / 128,
                        "relative error": _int8,
                    },
                ]
            ),
            details(
                claim(
                    "EF-12",
                    f"On normal numbers int8 has a relative error of {_int8:.4f}, two thirds of a percent, at about a "
                    "quarter of the memory of float32. No entry is off by more than half a step.",
                    abs(_int8 - 0.0066) < 2e-4
                    and _half < _int8
                    and _n.element_size() == 1
                    and ((_s * _n - _x).abs() <= _s * 0.5001).all(),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Fourth way: another kernel

    A thousand students and a hundred schools. You can ask every student about every school: a
    hundred thousand questions. Or each student fills in one short profile (likes sports, likes
    music, ...), the profiles are added up, and each school is compared with the *sum*. The sum is
    made once, so the work grows with students plus schools and no longer with pairs. What is lost:
    a profile says less than an answer about that one school.

    *Linear attention* does this. $\varphi$ maps a vector to positive numbers (*features*), and
    $\varphi(q) \cdot \varphi(k)$ takes the place of $e^{q \cdot k / \sqrt{d}}$:

    $$O = \frac{\varphi(Q)\,\big(\varphi(K)^\top V\big)}{\varphi(Q)\,\big(\varphi(K)^\top \mathbf 1\big)} .$$

    $\mathbf 1$ is a column of ones, so the denominator is one number per row, and each row is
    divided by its own. The brackets are everything: $\varphi(K)^\top V$ has $d \times d$ numbers, however long the text.
    """)
    return


@app.cell
def _():
    _q, _k, _v = torch.randn(
        3, 1, 1, 60, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)

    def _phi(x):
        return torch.nn.functional.elu(x) + 1

    _A = _phi(_q) @ _phi(_k).mT
    _square = _A @ _v / _A.sum(-1, keepdim=True)
    _causal = _A.tril() @ _v / _A.tril().sum(-1, keepdim=True)
    _state, _outs = None, []
    for _t in range(60):
        _one = (x[:, :, _t : _t + 1] for x in (_q, _k, _v))
        _out, _state = linear_step(*_one, _state)
        _outs.append(_out)
    _stepped = torch.cat(_outs, 2)
    _signed = (_q @ _k.mT).sum(-1)
    _counts = {}
    for _n in (32, 33, 64, 256):
        _x = torch.randn(1, 1, _n, 32, generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as _linear:
            linear_attend(_x, _x, _x)
        with FlopCounterMode(display=False) as _softmax:
            fenchel.attend(_x, _x, _x, backend="reference")
        _counts[_n] = _linear.get_total_flops(), _softmax.get_total_flops()
    mo.vstack(
        [
            claim(
                "EF-17",
                "With $\\varphi(x) = \\mathrm{elu}(x) + 1$ (which is $x + 1$ above 0 and $e^x$ below) the two orders "
                "of multiplication give the same.",
                torch.allclose(linear_attend(_q, _k, _v), _square, atol=1e-12),
            ),
            table(
                [{"n": n, "linear": f"{a:,}", "softmax": f"{b:,}"} for n, (a, b) in _counts.items()]
            ),
            details(
                claim(
                    "EF-21",
                    "Without the future, the sums stop at the present token. One state of "
                    f"{_state.M.shape[-2]} x {_state.M.shape[-1]} numbers (and {_state.n.shape[-2]} for the "
                    "denominator), updated token by token, gives the masked form: a cache that never grows.",
                    torch.allclose(_stepped, _causal, atol=1e-12)
                    and torch.allclose(linear_attend(_q, _k, _v, causal=True), _causal, atol=1e-12)
                    and _state.M.shape[-2:] == (16, 16),
                ),
                claim(
                    "E58",
                    "The features must be positive. With $\\varphi(x) = x$ the denominators of these 60 queries "
                    f"run from {_signed.min():.1f} to {_signed.max():.1f}, through 0: some averages explode.",
                    _signed.min() < 0 < _signed.max() and (_A.sum(-1) > 0).all(),
                ),
                claim(
                    "EF-20",
                    "Operations, counted at $d = 32$: $O(nd^2)$ against $O(n^2d)$. Linear attention is the cheaper "
                    "one from the first $n$ above $d$.",
                    all((a < b) == (n > 32) for n, (a, b) in _counts.items())
                    and _counts[64][0] * 4 == _counts[256][0]
                    and _counts[64][1] * 16 == _counts[256][1],
                ),
            ),
        ]
    )
    return


@app.cell
def _(milliseconds, slope):
    _g = torch.Generator().manual_seed(0)
    _q, _k, _v = torch.randn(3, 1, 1, 64, 16, dtype=torch.float64, generator=_g).unbind(0)
    _exact = fenchel.attend(_q, _k, _v)

    def _error(out):
        return ((out - _exact).norm() / _exact.norm()).item()

    errors = {
        m: statistics.mean(
            _error(
                linear_attend(
                    _q, _k, _v, features=random_features(16, m, generator=_g, dtype=torch.float64)
                )
            )
            for _ in range(4)
        )
        for m in (64, 1024, 16384)
    }
    _elu = _error(linear_attend(_q, _k, _v))
    _w = random_features(16, 2**16, generator=_g, dtype=torch.float64).w

    def _phi(x):
        x = x / 2  # 16^(1/4): the scores are divided by sqrt(16)
        return torch.exp(x @ _w.T - x.square().sum(-1, keepdim=True) / 2) / len(_w) ** 0.5

    _a, _b = 0.5 * _q[0, 0], 0.5 * _k[0, 0]
    _kernel, _scores = _phi(_a) @ _phi(_b).T, _a @ _b.T / 4
    _off = ((_kernel - _scores.exp()).norm() / _scores.exp().norm()).item()
    _from_softmax = ((_kernel - _scores.softmax(-1)).norm() / _scores.softmax(-1).norm()).item()
    _ms = []
    for _n in (64, 256, 1024, 2048):
        _x = torch.randn(1, 1, _n, 64, generator=torch.Generator().manual_seed(0))
        _ms.append(
            {
                "n": _n,
                "softmax, ms": milliseconds(
                    lambda x=_x: fenchel.attend(x, x, x, backend="reference")
                ),
                "linear, ms": milliseconds(lambda x=_x: linear_attend(x, x, x)),
            }
        )
    _slopes = [
        slope([r["n"] for r in _ms], [r[c] for r in _ms]) for c in ("softmax, ms", "linear, ms")
    ]
    mo.vstack(
        [
            mo.md(r"""
    How close does it come to softmax? *Random features* $\varphi(x) = e^{w \cdot x - |x|^2/2}/\sqrt m$, for
    $m$ vectors $w$ of normal random numbers, are right on average: the mean of $\varphi(q) \cdot \varphi(k)$ is
    $e^{q \cdot k}$. On average, as a coin is fair on average. Below: width 16, scores of variance 1.
    """),
            bar_chart(
                [{"features": f"{m:,}", "relative error": e} for m, e in errors.items()]
                + [{"features": "elu + 1", "relative error": _elu}],
                "features",
                "relative error",
                title="Distance from softmax attention",
            ),
            details(
                claim(
                    "EF-19 E58",
                    "With 64, 1,024 and 16,384 random features the output is off by "
                    f"{errors[64]:.2f}, {errors[1024]:.2f} and {errors[16384]:.2f} times its size: it falls slowly, "
                    f"and many more features than the width are needed. elu + 1 is another kernel, {_elu:.2f} away, "
                    "and no number of features brings it closer.",
                    errors[64] > errors[1024] > errors[16384]
                    and errors[64] > 0.8
                    and 0.3 < errors[16384] < 0.8
                    and 0.5 < _elu < 1.1,
                ),
                claim(
                    "EF-18 E58",
                    f"What the kernel approximates is $e^{{q \\cdot k}}$ (here to {100 * _off:.1f} %, short vectors, "
                    "65,536 features) and not softmax, which exists only after the division by a row's sum "
                    f"(distance {_from_softmax:.0f} times its size).",
                    _off < 0.05 and _from_softmax > 10,
                ),
            ),
            mo.md(
                f"Time on this computer, just now: softmax grows like $n^{{{_slopes[0]:.1f}}}$, linear "
                f"attention like $n^{{{_slopes[1]:.1f}}}$ (width 64)."
            ),
            table(_ms),
        ]
    )
    return


@app.cell
def _():
    pattern = mo.ui.dropdown(
        ["window", "window and stride", "window and global tokens"],
        value="window and stride",
        label="Pattern",
    )
    mo.vstack(
        [
            mo.md(r"""
    ## Looking at fewer keys

    A reader of a long contract looks at the last lines, and at the first page of every chapter. A
    *sparse pattern* says beforehand which pairs are scored; the others get no weight.
    """),
            pattern,
        ]
    )
    return (pattern,)


@app.cell
def _(pattern):
    _priors = {
        "window": fenchel.Window(3),
        "window and stride": (fenchel.Window(3) | Strided(6)) + fenchel.Causal(),
        "window and global tokens": (fenchel.Window(3) | Global(2)) + fenchel.Causal(),
    }

    def _open(name, n):
        return (_priors[name].log(n, n)[0, 0] == 0).double()

    _mask = _open(pattern.value, 24)
    _q, _k, _v = torch.randn(
        3, 1, 1, 24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).unbind(0)
    _out, _p = fenchel.attend(_q, _k, _v, prior=_priors[pattern.value], return_weights=True)
    _pairs = {name: [int(_open(name, n).sum()) for n in (256, 512)] for name in _priors}
    mo.vstack(
        [
            heat_chart(
                _mask,
                title="1: the query scores the key",
                of="scored",
                of_range=(0, 1),
                axes=("query", "key"),
            ),
            details(
                claim(
                    "EF-22",
                    f"{int(_mask.sum())} of {24 * 24} pairs are scored; the weights are 0 elsewhere and each row "
                    "still sums to 1. Doubling a text from 256 to 512 tokens multiplies the pairs by "
                    + ", ".join(f"{b / a:.2f} ({name})" for name, (a, b) in _pairs.items())
                    + ": a stride of fixed size is still a square.",
                    torch.equal(_p[0, 0] > 0, _mask > 0)
                    and torch.allclose(_p.sum(-1), torch.ones(1, 1, 24, dtype=torch.float64))
                    and _pairs["window"][1] / _pairs["window"][0] < 2.02
                    and _pairs["window and global tokens"][1]
                    / _pairs["window and global tokens"][0]
                    < 2.02
                    and _pairs["window and stride"][1] / _pairs["window and stride"][0] > 3.5,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The loop that writes

    All of this serves four lines: compute logits (a score per token of the vocabulary), choose a
    token, append it, repeat with the cache.

    ```python
    new = prompt
    for _ in range(12):
        logits = model(new, cache=cache)[:, -1]      # one row of attention per layer
        new = logits.argmax(-1, keepdim=True)        # or a draw from softmax(logits / T)
        text = torch.cat((text, new), 1)
    ```
    """)
    return


@app.cell
def _():
    _model = fenchel.Transformer(
        fenchel.ModelConfig(
            vocabulary=50, context=24, width=32, layers=2, heads=4, kv_heads=2, initial="xavier"
        ),
        generator=torch.Generator().manual_seed(0),
    ).double()
    _prompt = torch.tensor([[3, 1, 4, 1, 5]])
    _cache = KVCache(_model.config, batch=1, positions=24, dtype=torch.float64)
    _text, _new, _read = _prompt, _prompt, 0
    with torch.no_grad():
        for _ in range(12):
            _read += _new.shape[1]
            _new = _model(_new, cache=_cache)[:, -1].argmax(-1, keepdim=True)
            _text = torch.cat((_text, _new), 1)
        _again = _prompt
        for _ in range(12):
            _again = torch.cat((_again, _model(_again)[:, -1:].argmax(-1)), 1)
    _library = fenchel.generate(_model, _prompt, max_new_tokens=12, temperature=0.0)
    claim(
        "EF-23",
        f"The loop writes 12 tokens and reads {_read} positions in all; without a cache it would read "
        f"{sum(range(5, 17))}. Both give the same text as `fenchel.generate`.",
        torch.equal(_text, _again) and torch.equal(_text, _library) and _read == 16,
    )
    return


@app.cell
def _():
    def check(names):
        update = names["update"]
        for scale in (1.0, 1000.0):
            g = torch.Generator().manual_seed(0)
            s = scale * torch.randn(12, dtype=torch.float64, generator=g)
            v = torch.randn(12, 3, dtype=torch.float64, generator=g)
            m, total, acc = -math.inf, 0.0, torch.zeros(3, dtype=torch.float64)
            for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
                state = update(m, total, acc, s[part], v[part])
                assert isinstance(state, tuple), "Return three things: m, l, acc."
                assert len(state) == 3, "Return three things: m, l, acc."
                m, total, acc = state
            result = torch.as_tensor(acc) / total
            assert torch.isfinite(result).all(), (
                "Scores of 1,000 overflow: every exponential needs the new maximum taken off."
            )
            wanted = s.softmax(0) @ v
            assert abs(float(m) - s.max().item()) < 1e-12, "m should be the largest score so far."
            assert torch.allclose(result, wanted), (
                "acc / l is not the average by softmax: multiply the old l and acc by e^(m - m')."
            )

    exercise = Exercise(
        lesson="efficient_attention",
        task="Write `update(m, l, acc, s, v)`: one step of online softmax for one query, with the block's "
        "scores `s` and values `v` (one row per score). It returns the new `m, l, acc`.",
        starter="""
    def update(m, l, acc, s, v):
        weights = torch.exp(s)
        return s.max(), l + weights.sum(), acc + weights @ v
    """,
        solution="""
    def update(m, l, acc, s, v):
        new = max(m, s.max().item())
        old = math.exp(m - new)      # e^(-inf) is 0: the first block starts from nothing
        weights = torch.exp(s - new)
        return new, l * old + weights.sum(), acc * old + weights @ v
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
    _context = own.config.context
    _ids = own.tokenizer.encode_whole("the people of the united states " * 20)[: min(_context, 64)]
    _row = torch.tensor([_ids])
    _cache = KVCache(own.config, batch=1, positions=len(_ids))
    with torch.no_grad():
        _whole = own.model(_row)
        _pieces = torch.cat([own.model(x, cache=_cache) for x in _row.split(1, 1)], 1)
    own_gap = ((_pieces - _whole).norm() / _whole.norm()).item()
    _bill = forward_flops(own.config, _context)
    _crossing = _context * _bill.projections / _bill.scores  # one grows like n, the other like n^2
    _full, _small = (
        KVCache(own.config, batch=1, positions=_context, kind=kind).bytes / 2**10
        for kind in ("model", "int8")
    )
    mo.vstack(
        [
            mo.md(
                f"Your model is {own.config.width} wide and reads {_context} tokens: "
                f"its scores would overtake its projections at about {_crossing:.0f} tokens. Its cache "
                f"takes {_full:.0f} KiB, or {_small:.0f} KiB in int8 with room for one layer that is converted back."
            ),
            bar_chart(
                [
                    {"part": part, "operations": cost}
                    for part, cost in zip(_bill._fields, _bill, strict=True)
                ],
                "part",
                "operations",
                title=f"Operations of your model for {_context} tokens",
            ),
            claim(
                "EF-13 EF-23",
                f"Read token by token beside the cache, your model gives the same logits as at once "
                f"(relative difference {own_gap:.1e}, the rounding of its numbers).",
                own_gap < 1e-3,
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
    _ids = token_ids(own_text.value, own.tokenizer, min(64, own.config.context))
    own_maps = attention_maps(own.model, torch.tensor([_ids])).double()
    _heads = {
        f"{n + 1}.{h + 1}": (n, h)
        for n in range(own_maps.shape[0])
        for h in range(own_maps.shape[1])
    }
    own_head = mo.ui.dropdown(_heads, value=next(iter(_heads)), label="Head (layer.head)")
    own_head
    return own_head, own_maps


@app.cell
def _(own, own_head, own_maps):
    _layer, _head = own_head.value
    _n = own_maps.shape[-1]
    _gap = (torch.arange(_n)[:, None] - torch.arange(_n)).abs()
    _weights = own_maps[_layer, _head]
    _rows = [
        {"window (tokens)": w, "share": share, "what": what}
        for what, shares in (
            (
                "weight of this head inside",
                [_weights[_gap < w].sum().item() / _n for w in range(1, _n + 1)],
            ),
            ("cache that the window keeps", [w / _n for w in range(1, _n + 1)]),
        )
        for w, share in enumerate(shares, start=1)
    ]
    _inside = [row["share"] for row in _rows[:_n]]
    _half = _n // 2
    _band = _weights.triu(1 - _half).tril(_half - 1)
    _cache, _shape = KVCache(own.config, batch=1, positions=_n), own.config.at_layer(_layer)
    _kept = _cache.layers[_layer]
    _bytes = _kept.keys.bytes + _kept.values.bytes
    mo.vstack(
        [
            mo.md(
                f"The cache of your {_n} tokens takes {_cache.bytes / 2**10:.1f} KiB. What would a window save, and what would it miss?"
            ),
            line_chart(
                _rows,
                "window (tokens)",
                "share",
                "what",
                title=f"A window in head {_layer + 1}.{_head + 1}",
                y_range=(0, 1),
            ),
            details(
                claim(
                    "EF-11",
                    f"Layer {_layer + 1} keeps {_bytes / 2**10:.1f} KiB: keys and values, {_shape.groups} groups, {_kept.slots} tokens, {_shape.head_width} numbers of 4 "
                    f"bytes. A window of {_half} keeps {_half / _n:.0%} of it and, averaged over the queries, {_inside[_half - 1]:.0%} of the weight of this head.",
                    _bytes == 2 * _shape.groups * _kept.slots * _shape.head_width * 4
                    and abs(_band.sum().item() / _n - _inside[_half - 1]) < 1e-9,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Online softmax needs nothing but a common factor in all weights: it is exact for any block size, and not for maps "
        r"such as sparsemax, whose threshold depends on all scores at once (those are solved row by row). The cache needs "
        r"keys that never change: a model that looks at later tokens, or a new adapter under a running text, "
        r"makes it wrong. And the count $8nd^2 + 4n^2d$ is of operations: on a machine that waits for memory, the version with fewer operations can be the slower one."
    )
    return


@app.cell
def _():
    footer("efficient_attention")
    return


if __name__ == "__main__":
    app.run()
