"""Sums, tables, the product of two tables, and the Python that the exercises need."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Sums, tables and a little Python",
)

with app.setup:
    import math

    import marimo as mo
    import torch

    import fenchel
    from fenchel.lessons.course import COURSE, PARTS
    from fenchel.lessons.widgets import (
        Exercise,
        answer,
        bar_chart,
        claim,
        details,
        footer,
        header,
        no_run,
        proof,
        question,
        run_picker,
        table,
        what_breaks,
    )


@app.cell
def _():
    header("sums_and_tables")
    return


@app.cell
def _():
    guess = question(
        "Two people have a shopping list each, with apples and bread. Two shops sell both, at their own prices. How many "
        "multiplications give all four bills?",
        ["4, one per bill", "8", "16"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "8",
        "A bill has two products, one for the apples and one for the bread, and there are four bills: "
        "$2 \\cdot 2 \\cdot 2$. This is a product of two tables, and nearly all the work of a large model is of this kind.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A sign for adding up

    A till adds the lines of a receipt. With $n_1$ apples at the price $c_1$ and $n_2$ loaves at the price $c_2$ the bill
    is $n_1 c_1 + n_2 c_2$. For a longer receipt there is a shorter way to write it:

    $$\sum_{i=1}^{k} n_i c_i = n_1 c_1 + n_2 c_2 + \dots + n_k c_k .$$

    $\sum$ (a Greek S, for *sum*) says: put $i = 1$, then 2, up to $k$, into what follows, and add. The small letter $i$ is the *index*: which line
    of the receipt.
    """)
    return


@app.cell
def _():
    _n, _c = [5.0, 1.0, 2.0], [2.0, 3.0, 0.5]
    _bill = sum(n * c for n, c in zip(_n, _c, strict=True))
    _doubled = sum(2 * n * c for n, c in zip(_n, _c, strict=True))
    _table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mo.vstack(
        [
            claim(
                "BP-02",
                f"5 apples at 2, 1 loaf at 3 and 2 eggs at 0.5: $\\sum_i n_i c_i = {_bill:g}$. Twice of everything costs twice as much, "
                f"{_doubled:g}: a common factor moves out of the sum.",
                _bill == 14 and _doubled == 2 * _bill,
            ),
            details(
                claim(
                    "PD-07",
                    "A sum over two indices adds a whole table, row by row or column by column: "
                    f"$\\sum_i \\sum_j A_{{ij}} = \\sum_j \\sum_i A_{{ij}} = {_table.sum().item():g}$ for the rows (1, 2, 3) and (4, 5, 6).",
                    _table.sum(1).sum() == _table.sum(0).sum() == 21,
                ),
                title="Two indices",
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A table times a table

    A **matrix** is a table of numbers. $A_{ij}$ is the number in row $i$ and column $j$, always the row first. Below, each row of $A$ is the list of a
    person and each column of $B$ holds the prices of a shop. The bill of person $i$ in shop $j$ meets a row with a column:

    $$(A B)_{ij} = \sum_k A_{ik} B_{kj} .$$

    Row against column, product by product, then add. *Walk over the four cells. Which numbers does a cell read, and which does it never see?*
    """)
    return


@app.cell
def _():
    cell = mo.ui.slider(1, 4, value=1, label="Cell of the product", show_value=True)
    cell
    return (cell,)


@app.cell
def _():
    A = torch.tensor([[5.0, 1.0], [2.0, 4.0]])
    B = torch.tensor([[2.0, 1.0], [3.0, 4.0]])

    def drawn(values, marked, name):
        """A table with some of its cells marked."""
        lines = "".join(
            "<tr>"
            + "".join(
                f"<td><mark>{v:g}</mark></td>" if (r, c) in marked else f"<td>{v:g}</td>"
                for c, v in enumerate(row)
            )
            + "</tr>"
            for r, row in enumerate(values.tolist())
        )
        return mo.Html(f"<div><b>{name}</b><table><tbody>{lines}</tbody></table></div>")

    return A, B, drawn


@app.cell
def _(A, B, cell, drawn):
    _i, _j = divmod(cell.value - 1, 2)
    _terms = [(A[_i, k].item(), B[k, _j].item()) for k in range(2)]
    _bill = (A @ B)[_i, _j].item()
    _rows = [
        {"part of the bill": part, "money": a * b}
        for part, (a, b) in zip(("apples", "bread"), _terms, strict=True)
    ]
    mo.vstack(
        [
            mo.hstack(
                [
                    drawn(A, {(_i, 0), (_i, 1)}, "A: lists"),
                    drawn(B, {(0, _j), (1, _j)}, "B: prices"),
                    drawn(A @ B, {(_i, _j)}, "A B: bills"),
                ],
                justify="start",
                gap=3,
            ),
            bar_chart(
                [*_rows, {"part of the bill": "the bill", "money": _bill}],
                "part of the bill",
                "money",
                title=f"Person {_i + 1} in shop {_j + 1}",
                y_range=(0, 20),
            ),
            claim(
                "BP-01 AT-37",
                f"Row {_i + 1} against column {_j + 1}: "
                f"{' + '.join(f'{a:g} · {b:g}' for a, b in _terms)} = {_bill:g}. It reads one row of $A$ and one column of $B$, and "
                "nothing else.",
                sum(a * b for a, b in _terms) == _bill,
            ),
        ]
    )
    return


@app.cell
def _(A, B):
    _tall, _wide = torch.ones(3, 2), torch.ones(2, 5)
    _refused = ""
    try:
        _wide @ _tall
    except RuntimeError as _error:
        _refused = str(_error)
    mo.vstack(
        [
            claim(
                "BP-01 PD-07",
                "Shapes tell what fits: $(3 \\times 2)$ times $(2 \\times 5)$ gives $3 \\times 5$. The inner numbers must agree; they are summed "
                "over and vanish. In the other order torch refuses.",
                (_tall @ _wide).shape == (3, 5) and "cannot be multiplied" in _refused,
            ),
            claim(
                "BP-01",
                r"The order matters: $A B$ and $B A$ are different tables. The *transpose* $A^\top$ exchanges rows and columns, "
                r"$(A^\top)_{ij} = A_{ji}$, and $(A B)^\top = B^\top A^\top$: read the bills by shops instead of by people, and the order turns round.",
                not torch.equal(A @ B, B @ A) and torch.equal((A @ B).T, B.T @ A.T),
            ),
            proof(
                school=r"""
                    Why row against column, and not cell against cell? Because a bill needs a whole list and a whole price list, and no bill needs the list of
                    another person. Now let the prices of the shops be sums of prices of three suppliers, another table $C$. You may first compute
                    what each person owes in each shop and then pass the bills on, $(A B) C$, or first the prices by supplier, $A (B C)$:
                    each person pays the same, since it is the same money added in another order.""",
                undergraduate=r"""
                    $((A B) C)_{il} = \sum_j (\sum_k A_{ik} B_{kj}) C_{jl} = \sum_k A_{ik} (\sum_j B_{kj} C_{jl}) = (A (B C))_{il}$, by exchanging finite sums. A
                    product of tables is the composition of linear maps: $x \mapsto x A$ followed by $y \mapsto y B$ is $x \mapsto x (A B)$, which is why
                    the rule is what it is. $(A B)^\top_{ji} = \sum_k A_{ik} B_{kj} = \sum_k B^\top_{jk} A^\top_{ki}$.""",
                research=r"""
                    The schoolbook product of $n \times n$ tables takes $n^3$ multiplications; Strassen (1969) needs $n^{2.81}$, and the exponent is not known. The
                    order of a chain changes its cost, not its value: $(A B) C$ against $A (B C)$ is what linear attention exploits. On hardware the
                    product is limited by reading numbers, not by multiplying them, until the tables are large.""",
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Python in ten minutes

    In an exercise you change a few lines of a Python program that is nearly right. It uses *torch*, a library for tables of numbers. This is all you need:
    """)
    return


@app.cell
def _():
    names = {"torch": torch, "math": math, "x": torch.tensor([1.0, 2.0, 4.0])}
    names["A"] = torch.tensor([[5.0, 1.0], [2.0, 4.0]])
    lines = [
        ("x = torch.tensor([1., 2., 4.])", "x", "a list of numbers, a tensor"),
        ("2 * x + 1", "2 * x + 1", "entry by entry"),
        ("x ** 2", "x ** 2", "power"),
        ("x[0], x[-1]", "x[0].item(), x[-1].item()", "counting starts at 0; -1 is the last"),
        ("x.sum()", "x.sum().item()", "the sum sign"),
        ("torch.exp(x)", "torch.exp(x)", "e to the power of each entry"),
        ("A = torch.tensor([[5., 1.], [2., 4.]])", "A", "a table, by rows"),
        ("A.shape", "tuple(A.shape)", "rows, columns"),
        ("A[0, 1]", "A[0, 1].item()", "row 0, column 1"),
        ("A * A", "A * A", "cell by cell"),
        ("A @ A", "A @ A", "row against column"),
        ("A.T", "A.T", "transpose"),
        ("A.sum(-1)", "A.sum(-1)", "along the last axis: one sum per row"),
    ]
    results = [eval(code, names) for _, code, _ in lines]

    def _shown(value):
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(_shown, value))}]"
        return f"{value:.4g}"

    mo.vstack(
        [
            table(
                [
                    {
                        "you write": written,
                        "you get": _shown(value.tolist() if torch.is_tensor(value) else value),
                        "": said,
                    }
                    for (written, _, said), value in zip(lines, results, strict=True)
                ]
            ),
            mo.md(r"""
            A *function* takes something and returns something; a *loop* repeats what is indented below it:

            ```python
            def total(n, c):            # a function of two lists
                money = 0.0
                for i in range(len(n)):  # i = 0, 1, 2, ...
                    money = money + n[i] * c[i]
                return money             # without return the answer is lost

            total([5, 1], [2, 3])        # 13.0
            ```
            """),
            claim(
                "PD-25",
                "`*` multiplies cell by cell, `@` row against column: for $A$ above the first cells are "
                f"{results[9][0, 0].item():g} and {results[10][0, 0].item():g}. To confuse the two is the most common slip, and no error is "
                "raised when the shapes fit both.",
                results[9][0, 0] == 25 and results[10][0, 0] == 27 and results[4] == 7,
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        bills = names["bills"]
        A = torch.tensor([[5.0, 1.0], [2.0, 4.0]])
        B = torch.tensor([[2.0, 1.0], [3.0, 4.0]])
        found = bills(A, B)
        assert torch.is_tensor(found), "Return a tensor: the table C."
        assert not torch.equal(found, A * B), "This is cell by cell. A bill adds over all goods k."
        assert not torch.equal(found, B @ A), "Row of A against column of B: A[i, k] * B[k, j]."
        assert torch.equal(found, A @ B), f"Person 0 in shop 0 pays 13, not {found[0, 0].item():g}."
        A, B = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
        assert bills(A, B).shape == (2, 4), "2 people, 3 goods, 4 shops: the bills are 2 x 4."
        assert torch.equal(bills(A, B), A @ B), "It differs for 2 people, 3 goods and 4 shops."

    exercise = Exercise(
        lesson="sums_and_tables",
        task="Mend `bills(A, B)`, the product of two tables, without `@`: `C[i, j]` is the sum over `k` of `A[i, k] * B[k, j]`. The starter "
        "forgets to add up over the goods.",
        starter="""
    def bills(A, B):
        people, goods = A.shape
        shops = B.shape[1]
        C = torch.zeros(people, shops)
        for i in range(people):
            for j in range(shops):
                C[i, j] = A[i, j] * B[i, j]
        return C
    """,
        solution="""
    def bills(A, B):
        people, goods = A.shape
        shops = B.shape[1]
        C = torch.zeros(people, shops)
        for i in range(people):
            for j in range(shops):
                for k in range(goods):
                    C[i, j] = C[i, j] + A[i, k] * B[k, j]
        return C
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
    _told = {
        "Foundations": "How does a machine learn at all? By slopes: which way is downhill, and how far.",
        "Choice": "Scores become shares. Softmax is the best way to do it, in a sense that can be proved.",
        "Attention": "Tokens ask each other: similarity gives scores, scores give shares, shares mix.",
        "Models and training": "Many layers of it, what keeps them trainable, and how they are trained.",
        "Scale, and the whole": "What it costs, what size buys, and all of it on one page.",
    }
    assert _told.keys() == PARTS.keys()
    _others = [each for each in COURSE if each.name != "sums_and_tables"]
    _place = {each.name: n for n, each in enumerate(COURSE)}
    mo.vstack(
        [
            mo.md(
                "## The way ahead\n\n"
                + "\n".join(f"* **{part}.** {said}" for part, said in _told.items())
            ),
            bar_chart(
                [
                    {"part": part, "hours": sum(each.minutes for each in lessons) / 60}
                    for part, lessons in PARTS.items()
                ],
                "part",
                "hours",
                title="How long each part takes",
            ),
            details(
                mo.md(
                    "\n\n".join(
                        f"**{part}**\n\n"
                        + "\n".join(f"* [{each.title}](../{each.name}/)" for each in lessons)
                        for part, lessons in PARTS.items()
                    )
                ),
                title="All lessons, with links",
            ),
            claim(
                "PD-05",
                f"{len(_others)} lessons follow, and each needs only lessons before it. You can begin with any whose list *read before* is "
                "empty, or known to you.",
                all(_place[need] < _place[each.name] for each in COURSE for need in each.needs),
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
    _E = own.model.embed.weight.detach().double()
    _id = own.tokenizer.encode_whole("the people")[-1]
    _pick = torch.zeros(1, len(_E), dtype=torch.float64)
    _pick[0, _id] = 1.0
    mo.vstack(
        [
            mo.md(
                f"A model is made of tables. The first of this one has {_E.shape[0]:,} rows and {_E.shape[1]} columns: a row of {_E.shape[1]} numbers for every "
                f"token that it knows. The row of “{own.tokenizer.decode([_id]).strip()}” begins so:"
            ),
            bar_chart(
                [
                    {"column": str(j), "number": v}
                    for j, v in enumerate(_E[_id, : min(16, _E.shape[1])].tolist())
                ],
                "column",
                "number",
                title="The first numbers of one row",
            ),
            claim(
                "BP-01",
                f"A list of {len(_E):,} zeros with a single 1 at the place of the token, times the table, is that row: looking up a row is a "
                "product of tables too.",
                torch.equal((_pick @ _E)[0], _E[_id]),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "Shapes that happen to fit. `A * B` and `A @ B` both run for square tables, `A @ B` and `B @ A` too, and torch stretches a table with one row "
        "to any number of rows without a word. When a result is wrong, print the shapes first."
    )
    return


@app.cell
def _():
    footer("sums_and_tables")
    return


if __name__ == "__main__":
    app.run()
