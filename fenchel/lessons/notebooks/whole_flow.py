"""The whole flow on one page: text in, report out, and what each stage hands to the next."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="The whole flow on one page",
)

with app.setup:
    import atexit
    import json
    import math
    import shutil
    import tempfile
    from pathlib import Path

    import marimo as mo
    import torch
    from torch.nn.functional import cross_entropy

    import fenchel
    from fenchel.checkpoints import Progress
    from fenchel.data import Batches, TextConfig, prepare
    from fenchel.evaluate import attention_health, score
    from fenchel.interpretability import last_laws
    from fenchel.lessons.course import COURSE
    from fenchel.lessons.scene import Scene
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
        text_field,
        token_ids,
        what_breaks,
    )
    from fenchel.model import ForwardContext, ModelConfig, Transformer
    from fenchel.optim import OptimConfig, build_optimiser, build_schedule
    from fenchel.report import page
    from fenchel.sensitivity import influence, jacobian
    from fenchel.train import Loop, RunDir, Stepper, TrainConfig


@app.cell
def _():
    header("whole_flow")
    return


@app.cell
def _():
    guess = question(
        "This page trains a small transformer while you read it, from random numbers. How long does it take until the "
        "model finishes the sentence that begins with *she sells sea*?",
        ["some seconds", "some minutes", "a night"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "some seconds",
        "Sixty steps are enough, because the text has only one sentence to learn. The stages are those of the largest models: "
        "text, tokens, batches, model, loss, optimiser, run directory, report.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## A relay

    In a relay race each runner takes the baton from the one before and passes it on. Nobody runs
    backwards, and nobody needs to know who runs last. A training run is such a relay; the baton
    changes its shape on the way. Everything below really happens on this page, with a text of one sentence. *Drag the baton from
    stage to stage.*
    """)
    return


@app.cell
def relay(batches, corpus, first, first_logits, first_loss, fresh, line):
    ids = corpus.tokenizer.encode(line)
    _pieces = [corpus.tokenizer.decode([i]) for i in ids]
    _parameters = sum(p.numel() for p in fresh.parameters())
    _shape = " by ".join(map(str, first_logits.shape))
    _stages = [
        ("text", "text", "a string", f"{len(line) * 200:,} characters", line.strip()),
        (
            "tokens",
            "ids",
            "whole numbers, one per piece of text",
            f"{corpus.facts.train_tokens:,} ids from {corpus.facts.train_bytes:,} bytes",
            " | ".join(_pieces),
        ),
        (
            "batches",
            "8 x 32",
            "inputs and targets, 8 by 32 each",
            f"{batches.per_epoch} windows per epoch",
            f"{first.inputs[0, :6].tolist()} → {first.targets[0, :6].tolist()}",
        ),
        (
            "model",
            "logits",
            f"logits, {_shape}",
            f"{_parameters:,} parameters compute them",
            "one score per position and token of the vocabulary",
        ),
        (
            "loss",
            f"{first_loss:.2f}",
            "one number",
            f"{first_loss:.3f} nats at the first step",
            "mean of -log p of the right token",
        ),
        (
            "optimiser",
            "weights",
            "changed parameters",
            f"{_parameters:,} numbers, each a little moved",
            "against the gradient of the loss",
        ),
        (
            "run directory",
            "files",
            "files",
            "settings, metrics, tokenizer, checkpoints",
            "listed below",
        ),
        ("report", "page", "one page of HTML", "it opens without a network", "made below"),
    ]
    _keys = ("name", "baton", "hands", "size", "example")
    race = Scene(
        "relay",
        {"stage": 1},
        stages=[dict(zip(_keys, each, strict=True)) for each in _stages],
    )
    race
    return (ids,)


@app.cell
def _(batches, corpus, first, first_logits, first_loss, ids, line):
    mo.vstack(
        [
            details(
                claim(
                    "TR-21",
                    "Nothing is lost on the way to tokens: decoding gives the text back. The target of each position is the "
                    "input of the next. The batch of step 7 depends on the seed and on 7, and on nothing that came before.",
                    corpus.tokenizer.decode(ids) == line
                    and torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
                    and torch.equal(
                        batches.at(7).inputs,
                        Batches(corpus.train, batch=8, context=32, seed=0).at(7).inputs,
                    ),
                ),
                claim(
                    "TR-21",
                    f"A model that knows nothing pays $\\log V$ = {math.log(len(first_logits[0, 0])):.3f} nats per token, $V$ being the "
                    f"size of the vocabulary; the fresh one pays {first_loss:.3f}.",
                    abs(first_loss - math.log(first_logits.shape[-1])) < 0.2,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Inside the model

    A letter goes through an office: it is registered, passes the same kind of desk several times,
    each desk *adds* a note, and at the end the notes are compared with all possible answers. In
    symbols, with one row $x_t$ per position:

    $$\begin{aligned} x &= \mathrm{embed}(\text{ids}) \\ x &\leftarrow x + \mathrm{attention}(\mathrm{norm}(x)) \\
    x &\leftarrow x + \mathrm{MLP}(\mathrm{norm}(x)) \\ \text{logits} &= \mathrm{norm}(x)\,\mathrm{embed}^\top \end{aligned}$$

    The two middle lines are a *block*; a decoder stacks many. The last line uses the embedding again
    (a *tied* head): a token is likely where $x$ points in its direction.
    """)
    return


@app.cell
def _():
    _config = ModelConfig(
        vocabulary=40,
        context=12,
        width=16,
        layers=3,
        heads=2,
        positions="learned",
        initial="xavier",
    )
    _model = Transformer(_config, generator=torch.Generator().manual_seed(0)).double()
    _ids = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _x = _model.embed(_ids) + _model.pos_embed.weight
        for _block in _model.blocks:
            _x = _block(_x, ForwardContext())
        _by_hand = _model.norm(_x) @ _model.embed.weight.T
        _gap = (_by_hand - _model(_ids)).abs().max().item()
        _later = _ids.clone()
        _later[:, 8:] = 0
        _causal = torch.equal(_model(_later)[:, :8], _model(_ids)[:, :8])
    details(
        claim(
            "NB-28",
            f"Embedding, three blocks, norm, tied head, written out line by line, are the complete decoder (difference {_gap:.1g}). "
            "Later tokens do not change earlier rows, so every position of a text is an exercise of its own.",
            _gap < 1e-12 and _causal and _model.lm_head_weight is _model.embed.weight,
        ),
    )
    return


@app.cell
def _():
    depth = mo.ui.slider(0, 3, step=1, value=1, label="Layers passed", show_value=True)
    mo.vstack(
        [
            mo.md(r"""
    Is row $t$ still *about* token $t$ after some layers? A rumour starts with one person; after each round of
    talks more people are part of it. The chart shows how strongly each token can move the
    output at each position: the size of the derivative, per pair. Each query here sees its own token and the one before.
    """),
            depth,
        ]
    )
    return (depth,)


@app.cell
def _(depth, mixing):
    _moves = mixing[depth.value]
    _reach = [int((row > 1e-12).sum()) for row in _moves]
    _wanted = [min(t, depth.value) + 1 for t in range(8)]
    _layers = f"{depth.value} layer{'' if depth.value == 1 else 's'}"
    mo.vstack(
        [
            heat_chart(
                _moves,
                title=f"Influence after {_layers}",
                of="size of the derivative",
                of_range=(0, 8),
                axes=("output", "token"),
            ),
            claim(
                "AT-12",
                f"After {_layers} the last row depends on {_reach[-1]} "
                f"token{'s' if _reach[-1] > 1 else ''}: at first rows and tokens correspond one to one, and each layer mixes "
                'one more in. So "the vector of token $t$" is soon the vector of a place, not of a word.',
                _reach == _wanted and (_moves.triu(1).abs() < 1e-12).all(),
            ),
        ]
    )
    return


@app.cell
def _(corpus, files, metrics, outcome, report_size, result):
    _losses = [
        {"step": m["step"], "loss in nats": m["train/loss"]} for m in metrics if "train/loss" in m
    ]
    mo.vstack(
        [
            mo.md(r"""
    ## From loss to report

    A bowl and a marble: the loss is the height, the gradient says which way is up, and the optimiser
    moves each parameter a little the other way. After each step the next batch.
    """),
            line_chart(_losses, "step", "loss in nats", title="Loss while training", points=True),
            mo.accordion(
                {"Files of the run directory": mo.md("\n".join(f"- `{f}`" for f in files))}
            ),
            claim(
                "TR-21",
                f"Sixty steps take the loss from {_losses[0]['loss in nats']:.2f} to {_losses[-1]['loss in nats']:.2f} nats. On text "
                f"that was held back the model needs {result.bits_per_byte:.3f} bits per byte; a byte has 8. The report is "
                f"one file of {report_size // 1000} kB.",
                outcome.status == "finished"
                and _losses[-1]["loss in nats"] < 0.5 * _losses[0]["loss in nats"]
                and result.bits_per_byte < 0.5
                and report_size > 1000
                and {"metrics.jsonl", "report.html"} <= set(files),
            ),
            details(
                claim(
                    "TR-21",
                    "Bits per byte are the loss in other units: nats per token, times tokens, over bytes and $\\log 2$.",
                    math.isclose(
                        result.bits_per_byte,
                        result.loss
                        * result.tokens
                        / corpus.predicted_bytes(validation=True)
                        / math.log(2),
                        rel_tol=1e-6,
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Why is a small loss the same as a short text? The probability of a whole text is a product: that of the first token,
            times that of the second given the first, and so on. Products of small numbers are awkward; their logarithms add. So
            $-\log p(\text{text})$ is the *sum* of the losses of all positions. A thing of probability $1/2^b$ can be named with
            $b$ yes-or-no questions. So the sum, counted in questions instead of nats, is the length of the shortest file
            from which somebody with the same model can restore the text.""",
        undergraduate=r"""
            $-\log p(x_1, \dots, x_n) = \sum_t -\log p(x_t \mid x_{<t})$ by the chain rule of probability, and causal attention gives
            all terms in one pass. Arithmetic coding attains $-\log_2 p(x)$ bits up to two, and by Kraft's inequality no code is shorter
            on average than the entropy. The mean over positions is the cross-entropy $H(p_\text{text}, p_\text{model}) = H + \mathrm{KL}$; its gradient with respect to the
            logits is $p_\text{model} - \text{one-hot}$, which backpropagation carries through the blocks.""",
        research=r"""
            Nats per token depend on the tokenizer, bits per byte do not, as long as the text is counted in full: the first token
            included, and every token predicted once with some context (`fenchel.evaluate.score` strides through the text for that). Each stage is a pure function
            of its input and a seed; hence a run can be resumed at a step, and repeated bit for bit on one machine.""",
    )
    return


@app.cell
def _():
    temperature = mo.ui.slider(
        steps=[0.0, 0.5, 1.0, 2.0, 5.0], value=0.0, label="Temperature", show_value=True
    )
    temperature
    return (temperature,)


@app.cell
def _(corpus, model, temperature):
    _prompt = torch.tensor([corpus.tokenizer.encode("she sells sea")])
    _longer = fenchel.generate(
        model,
        _prompt,
        max_new_tokens=8,
        temperature=temperature.value,
        generator=torch.Generator().manual_seed(0),
    )
    _greedy, _text = _prompt, corpus.tokenizer.decode(_longer[0].tolist())
    with torch.no_grad():
        for _ in range(8):
            _greedy = torch.cat((_greedy, model(_greedy)[:, -1:].argmax(-1)), 1)
        _logits = model(_prompt)[0, -1]
    _p = fenchel.Softmax(beta=1 / max(temperature.value, 0.01)).weights(_logits)
    _pieces = {i: corpus.tokenizer.decode([i]) for i in _p.argsort(descending=True).tolist()}
    _likely = [i for i, piece in _pieces.items() if piece.isprintable() and "\ufffd" not in piece][
        :5
    ]
    _written = corpus.tokenizer.decode(_greedy[0].tolist())
    mo.vstack(
        [
            mo.md(f"The model continues *she sells sea*:\n\n> {_text}"),
            bar_chart(
                [{"token": f"{i}: {_pieces[i]}", "probability": _p[i].item()} for i in _likely],
                "token",
                "probability",
                title="The next token, of those that can be printed",
                y_range=(0, 1),
            ),
            claim(
                "EF-23",
                "Generation is a loop: logits, choose, append, repeat. At temperature 0 the most likely token is taken "
                f"each time: *{_written.strip()}*.",
                "shells on the sea shore" in _written
                and torch.equal(
                    _greedy, fenchel.generate(model, _prompt, max_new_tokens=8, temperature=0.0)
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    _g = torch.Generator().manual_seed(0)
    _q = torch.randn(5, 16, generator=_g, dtype=torch.float64)
    _k = torch.randn(9, 16, generator=_g, dtype=torch.float64)
    _v = torch.randn(9, 4, generator=_g, dtype=torch.float64)
    _found = fenchel.attend(_q[None], _k[None], _v[None], scale=1e4)[0]
    _best = _v[(_q @ _k.T).argmax(-1)]

    _wide_q, _wide_k = torch.randn(2, 200, 256, generator=_g, dtype=torch.float64).unbind(0)
    _dot = _wide_q @ _wide_k.T
    _entropies = [
        -torch.xlogy(w, w).sum(-1).mean().item()
        for w in (fenchel.Softmax(beta=b).weights(_dot) for b in (1.0, 1 / 16))
    ]

    _signal, _skipped = (torch.eye(16, dtype=torch.float64) for _ in range(2))
    for _ in range(50):
        _J = 0.3 * torch.randn(16, 16, generator=_g, dtype=torch.float64) / 4
        _signal, _skipped = _J @ _signal, _skipped + _J @ _skipped
    _sizes = [torch.linalg.matrix_norm(x, 2).item() for x in (_signal, _skipped)]

    _x = torch.randn(20, 32, generator=_g, dtype=torch.float64)
    _W = torch.randn(2, 32, 32, generator=_g, dtype=torch.float64) / 32**0.5
    _heads = [(_x @ w).unflatten(1, (4, 8)).transpose(0, 1) for w in _W]
    _patterns = fenchel.Softmax(beta=2.0).weights(_heads[0] @ _heads[1].mT)
    _apart = [
        (_patterns[a] - _patterns[b]).abs().sum(-1).mean().item() / 2
        for a in range(4)
        for b in range(a)
    ]
    mo.vstack(
        [
            mo.md("## Four ideas to keep"),
            claim(
                "PD-11",
                "**Attention is a search.** A query looks for the key with the largest inner product. Softmax makes the answer a "
                "mixture that can be differentiated; as its scores grow it becomes the search itself.",
                torch.allclose(_found, _best, atol=1e-9),
            ),
            claim(
                "PD-11",
                f"**Divide by $\\sqrt{{d_k}}$.** Inner products of width 256 have variance {_dot.var():.0f}, about $d_k$. Unscaled, a row of 200 weights has "
                f"an entropy of {_entropies[0]:.2f} nats: almost one key. Scaled it has {_entropies[1]:.2f}, of at most "
                f"{math.log(200):.2f}.",
                abs(_dot.var().item() / 256 - 1) < 0.1
                and _entropies[0] < 0.5
                and _entropies[1] > 4,
            ),
            claim(
                "PD-11",
                f"**Add, do not replace.** A derivative through 50 layers that shrink it has size {_sizes[0]:.0e}; with a skip "
                f"connection around each, {_sizes[1]:.1f}. The sum has a path that leaves it as it is.",
                _sizes[0] < 1e-6 and 0.5 < _sizes[1] < 1e3,
            ),
            claim(
                "PD-11",
                "**Several heads, several views.** Four heads of width 8 cost what one head of width 32 costs, and their weights differ: on "
                f"average {100 * sum(_apart) / 6:.0f} % of the weight lies elsewhere, and no two agree.",
                min(_apart) > 0.1,
            ),
        ]
    )
    return


@app.cell
def _():
    _place = {each.name: n for n, each in enumerate(COURSE)}
    _chain = [
        ("gradients", "slopes"),
        ("similarity", "similarity"),
        ("attention", "attention"),
        ("many heads, positions", "positions"),
        ("blocks", "blocks"),
        ("training", "optimisers"),
        ("efficient inference", "efficient_attention"),
        ("the whole", "whole_flow"),
    ]
    _order = [_place[name] for _, name in _chain]
    details(
        mo.md(
            "| idea | lesson |\n| --- | --- |\n"
            + "\n".join(
                f"| {idea} | [{_place[name]}. {COURSE[_place[name]].title}](../{name}/) |"
                for idea, name in _chain
            )
        ),
        claim(
            "PD-05",
            "Gradients make learning possible; similarity says what is close; attention is similarity that chooses; heads and "
            "positions refine it; blocks stack it; training fits it; caches make it quick to use. Each lesson needs only "
            f"earlier ones: all {sum(len(each.needs) for each in COURSE)} arrows point back.",
            _order == sorted(_order)
            and all(_place[need] < _place[each.name] for each in COURSE for need in each.needs),
        ),
        title="How the lessons hang together",
    )
    return


@app.cell
def _():
    def check(names):
        step = names["step"]
        g = torch.Generator().manual_seed(0)
        W = torch.randn(5, 7, dtype=torch.float64, generator=g)
        X = torch.randn(12, 5, dtype=torch.float64, generator=g)
        targets = torch.randint(7, (12,), generator=g)
        new = step(W.clone(), X, targets, 0.5)
        assert torch.is_tensor(new), "Return the new W."
        assert new.shape == W.shape, (
            "A gradient has the shape of its parameter: X.T @ (p - y) is 5 x 7."
        )
        leaf = W.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(X @ leaf, targets), leaf)
        moved = (W - new) / 0.5
        assert (moved * slope).sum() > 0, "The step goes up: subtract the gradient."
        assert not torch.allclose(moved, 12 * slope), (
            "The loss is a mean: divide by the number of rows."
        )
        assert torch.allclose(moved, slope), (
            "The gradient of the logits is p - y, y the one-hot target."
        )

    exercise = Exercise(
        lesson="whole_flow",
        task="The relay in three lines: write `step(W, X, targets, rate)`, one step of gradient descent for the logits "
        "`X @ W` and the mean cross-entropy, without autograd. Return the new `W`.",
        starter="""
    def step(W, X, targets, rate):
        p = torch.softmax(X @ W, dim=-1)
        y = torch.nn.functional.one_hot(targets, W.shape[1])
        return W + rate * X.T @ (p - y)
    """,
        solution="""
    def step(W, X, targets, rate):
        p = torch.softmax(X @ W, dim=-1)
        y = torch.nn.functional.one_hot(targets, W.shape[1])
        return W - rate * X.T @ (p - y) / len(X)
    """,
        check=check,
    )
    form = exercise.form()
    mo.vstack([mo.md("## Check your understanding"), form])
    return exercise, form


@app.cell
def _(exercise, form):
    exercise.verdict(form.value)
    return


@app.cell
def _(exercise):
    # Evaluated and not shown: it is about the page.
    _ = claim(
        "PD-25",
        "Every lesson ends with such a task, and the page marks it by running it: the code above as it stands is refused with a hint, "
        "a right one is accepted.",
        exercise.mark(exercise.starter) == "The step goes up: subtract the gradient."
        and exercise.mark(exercise.solution) is None
        and all(
            "Exercise(" in each.path.read_text(encoding="utf-8")
            for each in COURSE
            if each.path.exists()
        ),
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
def _():
    own_text = text_field("The ships and the sailors need the Secretary of the")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    own_ids = token_ids(own_text.value, own.tokenizer, own.config.context - 12)
    _ids = torch.tensor([own_ids])
    with torch.no_grad():
        _logits = own.model(_ids)
        _by_parts = own.model.logits(own.model(_ids, return_hidden=True))
    _file = Path(run_path) / "metrics.jsonl"
    _lines = _file.read_text(encoding="utf-8").splitlines() if _file.exists() else []
    _rows = [json.loads(row) for row in _lines]
    own_losses = [
        {"step": m["step"], "loss in nats": m["train/loss"]} for m in _rows if "train/loss" in m
    ]
    _chart = (
        [line_chart(own_losses, "step", "loss in nats", title="Loss of your run")]
        if own_losses
        else []
    )
    mo.vstack(
        [
            mo.md(
                f"The same stages made your run: a vocabulary of {own.config.vocabulary}, {own.config.layers} "
                f"layers of width {own.config.width}, {sum(p.numel() for p in own.model.parameters()):,} parameters."
            ),
            *_chart,
            claim(
                "NB-28",
                "In your model too, the logits are the last rows of the stream, compared with one vector per token: "
                f"{tuple(_logits.shape)} scores for {_ids.shape[1]} tokens.",
                torch.allclose(_logits, _by_parts, atol=1e-5)
                and _logits.shape == (*_ids.shape, own.config.vocabulary),
            ),
        ]
    )
    return own, own_ids


@app.cell
def _(own, own_ids):
    mo.stop(own.config.kind != "decoder")
    laws = last_laws(own.model, own_ids, top=6)
    layer = mo.ui.dropdown(
        {f"{law.layer} of {len(laws)}": i for i, law in enumerate(laws)},
        value=f"{len(laws)} of {len(laws)}",
        label="Read after block",
    )
    layer
    return laws, layer


@app.cell
def _(laws, layer, own, own_ids):
    _law = laws[layer.value]
    _whole = fenchel.generate(
        own.model, torch.tensor([own_ids]), max_new_tokens=12, temperature=0.0
    )
    _new = _whole[0, len(own_ids) :]
    with torch.no_grad():
        _again = own.model(_whole[:, :-1])[0, len(own_ids) - 1 :]
    _behind = _again.max(-1).values - _again.gather(-1, _new[:, None])[:, 0]
    mo.vstack(
        [
            bar_chart(
                [
                    {"next token": f"{i}: {own.tokenizer.decode([token])}", "probability": p}
                    for i, (token, p) in enumerate(
                        zip(_law.tokens, _law.probabilities, strict=True), start=1
                    )
                ],
                "next token",
                "probability",
                title=f"What comes next, after block {_law.layer}",
                y_range=(0, 1),
            ),
            mo.md(
                f"With the likeliest token each time, your text goes on: *…{own.tokenizer.decode(_new.tolist())}*"
            ),
            details(
                claim(
                    "EF-23",
                    f"Written token by token beside a cache, these {len(_new)} tokens are the likeliest after reading everything again, too.",
                    _behind.max() < 1e-3 and _new[0] in laws[-1].tokens,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"The relay stops being one when a stage looks back: a tokenizer trained on the held-back text, a batch that depends on an earlier one, a model "
        r"that sees later tokens. Each makes the loss smaller and the report wrong. And a text of one sentence is learnt by heart: a loss "
        r"near zero here says nothing about another text."
    )
    return


@app.cell
def _():
    # Stages 1 to 5, in a temporary folder. The slow cells stand last, so that the rest of the page
    # appears before they are done.
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    line = "she sells sea shells on the sea shore;\n"
    (folder / "shells.txt").write_text(line * 200, encoding="utf-8")
    corpus = prepare(
        TextConfig(source=str(folder / "shells.txt"), vocabulary=300), folder / "tokens"
    )
    batches = Batches(corpus.train, batch=8, context=32, seed=0)
    config = ModelConfig(vocabulary=corpus.facts.vocabulary, context=32, width=32, layers=1)
    fresh = Transformer(config, generator=torch.Generator().manual_seed(0))
    first = batches.at(0)
    with torch.no_grad():
        first_logits = fresh(first.inputs)
    first_loss = cross_entropy(first_logits.flatten(0, 1), first.targets.flatten()).item()
    return batches, config, corpus, first, first_logits, first_loss, folder, fresh, line


@app.cell
def _(batches, config, corpus, folder):
    # Stages 6 to 8: sixty steps, the run directory, the report. A few seconds.
    class Quiet:
        """A callback that shows nothing: the metrics are read from the run directory."""

        def step(self, step, steps):
            """A step is complete."""

        def log(self, metrics):
            """A line of metrics was written."""

        def message(self, text):
            """A sentence for the person who runs it."""

    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    run = RunDir(folder / "run")
    run.create()
    _optim = OptimConfig(learning_rate=1e-2)
    _stepper = Stepper(
        model,
        batches,
        build_optimiser(model, _optim),
        build_schedule(_optim, steps=60),
        config=TrainConfig(steps=60, log_every=5),
        seed=0,
    )
    _size = corpus.predicted_bytes(validation=True)
    _loop = Loop(
        _stepper,
        steps=60,
        run=run,
        settings={"vocabulary": config.vocabulary},
        validate=lambda m: score(m, corpus.validation, bytes=_size, context=32)._asdict(),
        probe=lambda batch: attention_health(model, batch.inputs[:2]),
        callback=Quiet(),
        progress=Progress(),
    )
    outcome = _loop.train()
    result = score(model, corpus.validation, bytes=_size, context=32)
    report_size = page(run.path).stat().st_size
    last = run.path / "checkpoints" / "step-000060"
    files = [
        str(p.relative_to(run.path)) + ("/" if p.is_dir() else "")
        for p in sorted(run.path.iterdir()) + sorted(last.iterdir())
    ]
    metrics = [
        json.loads(row)
        for row in (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return files, metrics, model, outcome, report_size, result


@app.cell
def _():
    _config = ModelConfig(
        vocabulary=40,
        context=8,
        width=8,
        layers=3,
        heads=2,
        positions="none",
        windows=(2,),
        initial="xavier",
    )
    _model = Transformer(_config, generator=torch.Generator().manual_seed(0)).double()
    _ids = torch.randint(40, (8,), generator=torch.Generator().manual_seed(1))
    _X = (30 * _model.embed.weight[_ids]).detach()

    def _after(layers):
        def rows(X):
            X = X[None]
            for block in _model.blocks[:layers]:
                X = block(X, ForwardContext())
            return X[0]

        return rows

    mixing = [influence(jacobian(_after(layers), _X)) for layers in range(4)]
    return (mixing,)


@app.cell
def _():
    footer("whole_flow")
    return


if __name__ == "__main__":
    app.run()
