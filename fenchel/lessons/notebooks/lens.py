"""What does layer 2 know? The stream of a model, read before it is finished."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="What does layer 2 know?",
)

with app.setup:
    import marimo as mo
    import torch

    import fenchel
    from fenchel.interpretability import fit_lens, last_laws, lens
    from fenchel.lessons.course import MODEL
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
    header("lens")
    return


@app.cell
def _():
    guess = question(
        "A model of three layers has, after each word, a favourite for the next. For how many "
        "words is it the same already after the first layer?",
        ["for about one in ten", "for about half", "for all"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "for about half",
        "After *United* comes *States*, and after a full stop a capital: such words need no further thought. Which Secretary is "
        "meant does, and there the favourite changes from layer to layer.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Reading a draft

    Three editors share one page. Each adds a note; nobody erases. At the end a reader names the next word.
    And after the first editor?

    A transformer is such a page. The *stream* $x$ at a word begins as its embedding; every layer adds two notes, of its attention $a_l$ and
    multilayer perceptron $m_l$:

    $$x_l = x_{l-1} + a_l + m_l .$$

    The reader is the end of the model: a norm, a matrix and softmax. To show it $x_1$ or $x_2$ for $x_3$ is the *logit lens*.
    """)
    return


@app.cell
def _():
    shipped = fenchel.load(MODEL, dtype=torch.float32)
    sentence = (
        "The Secretary of the Treasury will lay before Congress a report upon the state of the finances of the United States "
        "during the last fiscal year, and the people of this country are at peace with all the nations of the world."
    )
    ids = shipped.tokenizer.encode_whole(sentence)
    words = [shipped.tokenizer.decode([token]) for token in ids]
    found = lens(shipped.model, ids)
    return found, ids, sentence, shipped, words


@app.cell
def _(ids):
    place = mo.ui.slider(
        start=1, stop=len(ids) - 1, value=4, label="words that are read", show_value=True
    )
    place
    return (place,)


@app.cell
def _(found, ids, place, shipped, words):
    t = place.value
    favourite = int(found.top[-1, t, 0])
    laws = last_laws(shipped.model, ids[: t + 1], favourite)
    name = shipped.tokenizer.decode([favourite])
    with torch.no_grad():
        own_law = shipped.model(torch.tensor([ids[: t + 1]]))[0, -1].softmax(-1)
    mo.vstack(
        [
            mo.md(f"The model has read: *{''.join(words[1 : t + 1])}*"),
            bar_chart(
                [{"layer": str(law.layer), "probability": law.next} for law in laws],
                "layer",
                "probability",
                title=f"How likely each layer finds “{name.strip()}”",
                y_range=(0, 1),
            ),
            table(
                [
                    {
                        "layer": law.layer,
                        "it would write": shipped.tokenizer.decode(law.tokens[:1]),
                        "with probability": law.probabilities[0],
                        "second": shipped.tokenizer.decode(law.tokens[1:2]),
                        "its probability": law.probabilities[1],
                    }
                    for law in laws
                ]
            ),
            claim(
                "NB-13",
                "The last row is the model's own law: reading the finished page is no lens at all.",
                abs(laws[-1].next - own_law[favourite].item()) < 1e-5
                and int(own_law.argmax()) == favourite,
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    *Read four words, to "The Secretary of the": layer 1 takes "the" for the beginning of a phrase like "the present", and the name of an office is
    not there. Layer 2 has one. Read 20, to "the United": is there anything left to decide?*
    """)
    return


@app.cell
def _(found):
    rows = found.agreement()
    settled = found.first()
    share = sum(layer == 1 for layer in settled[1:]) / len(settled[1:])
    mo.vstack(
        [
            mo.md(r"""
            ## How far is a layer from the end?

            Count the words whose favourite is already the final one. And measure how far the whole law $p_l$ of a layer is from the final one, $p$, by the
            divergence of [cross-entropy](../cross_entropy/), in nats:

            $$\mathrm{KL}(p \| p_l) = \sum_w p(w) \log \frac{p(w)}{p_l(w)} .$$
            """),
            table(
                [
                    {
                        "layer": row.layer,
                        "same favourite": row.top,
                        "KL to the final law (nats)": row.kl,
                    }
                    for row in rows
                ]
            ),
            claim(
                "NB-13",
                f"After layer 1 the favourite is the final one for {rows[0].top:.0%} of the words, after layer 2 for {rows[1].top:.0%}.",
                0.3 < rows[0].top < 0.6 and rows[0].top < rows[1].top < rows[2].top == 1.0,
            ),
            claim(
                "SM-39",
                f"The laws come closer layer by layer: {rows[0].kl:.2f}, {rows[1].kl:.2f} and 0 nats away.",
                rows[0].kl > rows[1].kl > rows[2].kl == 0.0,
            ),
            details(
                claim(
                    "NB-13",
                    f"A favourite can be lost again: it stays from layer 1 on for {share:.0%} of the words, fewer than have it there.",
                    share < rows[0].top,
                ),
            ),
        ]
    )
    return


@app.cell
def _(ids, shipped):
    notes = {}
    handles = [
        part.register_forward_hook(
            lambda *arguments, key=(n, kind): notes.update({key: arguments[-1]})
        )
        for n, block in enumerate(shipped.model.blocks, start=1)
        for kind, part in (("attention", block.attention), ("mlp", block.mlp), ("page", block))
    ]
    with torch.no_grad():
        page = shipped.model.embed(torch.tensor([ids]))
        shipped.model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    total = page + sum(note for (_, kind), note in notes.items() if kind != "page")
    gap = (total - notes[3, "page"]).abs().max().item()
    mo.vstack(
        [
            claim(
                "AT-09 NB-12",
                f"The page is a sum: the embedding and the six notes of three layers add up to the finished page, to {gap:.0e}.",
                gap < 1e-4,
            ),
            proof(
                school=r"""
                    Why may one read a page that is not finished? Because nobody erases. If the first editor has written the answer in large letters, two more notes
                    leave it there: $x_3 = x_1 + (\text{notes of layers 2 and 3})$. The reader adds up how strongly the page speaks for every word; what was written
                    early counts in that sum as much as what was written late.""",
                undergraduate=r"""
                    Up to its norm the reader is linear: a word $w$ gets $\langle u_w, x_3 \rangle / s$ with $u_w$ the row of the last matrix times the gain of the norm, and $s$ the
                    length that the norm divides by. With $x_3 = x_0 + \sum_l (a_l + m_l)$ the logit is the sum of what each note gives to $w$, divided by the same $s$. The logit lens leaves the
                    later notes out and divides by the length of the shorter sum: exact for the notes that are there, and blind to what the later ones would answer to them.""",
                research=r"""
                    Later layers read what earlier ones wrote, so $x_L$ is a function of $x_l$. To first order it is $\bar x_L + J (x_l - \bar x_l)$ with $J$ the mean derivative
                    (the Jacobian lens, with its offset): it counts, on average, what later layers make of a note. The logit lens is $J = I$ without an offset. Neither is causal: that a layer can be read
                    so does not say that the model uses it so. Patching tests that (`fenchel patch`).""",
            ),
        ]
    )
    return


@app.cell
def _(found, ids, shipped):
    other = (
        "It is the duty of the Government to protect the rights of its citizens at home and abroad, to maintain the public credit, and "
        "to see that the laws are faithfully executed in every part of the Union."
    )
    fitted = fit_lens(shipped.model, [shipped.tokenizer.encode_whole(other)])
    with_offset = lens(shipped.model, ids, "jacobian", fit=fitted)
    pairs = list(zip(found.agreement(), with_offset.agreement(), strict=True))[:-1]
    mo.vstack(
        [
            mo.md(r"""
            ## A reader who knows the editors

            A reader who has seen many pages grow can guess what later editors will add to a note. That is the *Jacobian lens*: instead of $x_l$ read

            $$\bar x_L + J (x_l - \bar x_l),$$

            with $J$ the average slope of the finished page in the draft and $\bar x$ average pages. Here it is fitted to one other sentence.
            """),
            bar_chart(
                [
                    {"layer": f"layer {row.layer}", "KL (nats)": row.kl, "what is read": read}
                    for pair in pairs
                    for row, read in zip(
                        pair, ("the page as it is", "with what will be added"), strict=True
                    )
                ],
                "layer",
                "KL (nats)",
                "what is read",
                title="How far the law is from the final one",
            ),
            claim(
                "SM-39",
                "The guess pays: both layers come closer to the final law, without any training.",
                all(two.kl < one.kl for one, two in pairs),
            ),
        ]
    )
    return


@app.cell
def _():
    def check(names):
        settled_from = names["settled_from"]
        for ranks, expected in (
            ([1, 1, 1], 1),
            ([7, 1, 1], 2),
            ([1, 4, 1], 3),
            ([5, 2, 3, 1], 4),
            ([2, 1, 1, 1], 2),
        ):
            got = settled_from(ranks)
            assert got == expected, (
                f"With the ranks {ranks} the answer stays on top from layer {expected} on, not {got}."
            )

    exercise = Exercise(
        lesson="lens",
        task="`ranks` has, for one word, the place of the final favourite in the law of each layer: 1 is on top, and the last is always 1. Write "
        "`settled_from(ranks)`: the first layer, counted from 1, from which on it *stays* on top. The starter forgets that a favourite can be lost.",
        starter="""
    def settled_from(ranks):
        return ranks.index(1) + 1
    """,
        solution="""
    def settled_from(ranks):
        layer = len(ranks)
        while layer > 1 and ranks[layer - 2] == 1:
            layer -= 1
        return layer
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
def _(run_path, sentence):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    mine = lens(own.model, own.tokenizer.encode_whole(sentence)[: own.config.context])
    mo.vstack(
        [
            mo.md("The same sentence, read by your model:"),
            table(
                [
                    {"layer": row.layer, "same favourite": row.top, "KL (nats)": row.kl}
                    for row in mine.agreement()
                ]
            ),
            claim(
                "NB-13",
                "Whatever the model, its last layer agrees with itself.",
                mine.agreement()[-1].top == 1.0 and mine.agreement()[-1].kl == 0.0,
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        "A large share after layer 1 need not mean much: a frequent word is often right. In deep models the page of an early layer is written for "
        "other layers and not for the reader, and the logit lens reads nonsense there; a fitted lens reads more. And a lens shows what *can* be "
        "read, not what the model reads: to know that, change the page and see what it says then."
    )
    return


@app.cell
def _():
    footer("lens")
    return


if __name__ == "__main__":
    app.run()
