"""Tokenizers, perplexity and calibration: how a text is cut, scored, and believed."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(
    width="medium",
    app_title="Tokenizers, perplexity and calibration",
)

with app.setup:
    import json
    import math
    from collections import Counter
    from itertools import pairwise, product
    from pathlib import Path

    import marimo as mo
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy, one_hot

    import fenchel
    from fenchel.attention import head_entropy
    from fenchel.data import (
        END,
        PAD,
        Batches,
        train_tokenizer,
        windows,
    )
    from fenchel.evaluate import (
        Evaluation,
        Score,
        calibration_error,
        compare,
        fit_temperature,
        label_smoothing,
        outcomes,
        reliability,
        score,
        smoothed_targets,
        summarise,
    )
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
        text_field,
        what_breaks,
    )
    from fenchel.train import count_targets, per_sequence, target_losses, total_loss


@app.cell
def _():
    header("tokens_and_calibration")
    return


@app.cell
def _():
    guess = question(
        "Two models give the text *hello world* exactly the same probability. Can their perplexities differ?",
        ["no, never", "yes, if they cut the text differently", "only by rounding"],
    )
    guess
    return (guess,)


@app.cell
def _(guess):
    answer(
        guess.value,
        "yes, if they cut the text differently",
        "Perplexity is a cost *per piece*. The same total over four pieces or over eleven gives 15.64 or 2.72.",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Cutting a text: characters and byte pairs

    A model reads numbers, so a text is cut into *tokens*, pieces from a fixed list, the *vocabulary*. Single characters
    always work, but make long sequences. Shorthand is better: whoever writes "the" all day invents a sign for it.

    *Byte-pair encoding* (BPE) invents such signs greedily: find the pair of neighbours that occurs most often, make it one
    piece, repeat. Below it learns from 400 words of a toy language in the manner of Turkish (without its vowel harmony): a stem such as
    *okul* (school), then perhaps *lar* (plural), *ım* or *ın* (my, your), and *da*, *dan*, *a*, *la* (in, from, to, with).
    """)
    return


@app.cell
def _():
    stems = "ev okul kitap deniz yol orman göz kapı masa şehir araba çocuk".split()
    endings = (
        (("", "lar"), (0.6, 0.4)),
        (("", "ım", "ın"), (0.6, 0.2, 0.2)),
        (("", "da", "dan", "a", "la"), (0.3, 0.25, 0.2, 0.15, 0.1)),
    )

    def toy_words(seed, count):
        """Words as tuples of their parts, drawn with a few frequent and many rare stems."""
        rng = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(stems), generator=rng).tolist()
        often = 1 / torch.arange(1, len(stems) + 1)

        def pick(weights):
            return torch.multinomial(torch.as_tensor(weights), 1, generator=rng).item()

        drawn = []
        for _ in range(count):
            parts = (stems[order[pick(often)]], *(ends[pick(w)] for ends, w in endings))
            drawn.append(tuple(part for part in parts if part))
        return drawn

    def merge(pieces, pair):
        """Join every occurrence of a pair of neighbours, from the left."""
        out, i = [], 0
        while i < len(pieces):
            step = 2 if tuple(pieces[i : i + 2]) == pair else 1
            out.append("".join(pieces[i : i + step]))
            i += step
        return tuple(out)

    def count_pairs(words):
        pairs = Counter()
        for pieces, times in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += times
        return pairs

    def train_bpe(counts, merges):
        """The most frequent pair, again and again: [(pair, how often)]."""
        words = {tuple(word): times for word, times in counts.items()}
        learned = []
        for _ in range(merges):
            pairs = count_pairs(words)
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            learned.append((best, pairs[best]))
            words = {merge(pieces, best): times for pieces, times in words.items()}
        return learned

    def cut_bpe(word, learned):
        pieces = tuple(word)
        for pair, _times in learned:
            pieces = merge(pieces, pair)
        return pieces

    toy_parts = toy_words(0, 400)
    toy_counts = Counter("".join(parts) for parts in toy_parts)
    all_merges = train_bpe(toy_counts, 40)
    lengths = [
        sum(n * len(cut_bpe(w, all_merges[:k])) for w, n in toy_counts.items())
        / sum(toy_counts.values())
        for k in range(41)
    ]
    return all_merges, cut_bpe, lengths, merge, toy_counts, toy_parts, toy_words, train_bpe


@app.cell
def _():
    merges = mo.ui.slider(0, 40, step=1, value=3, label="Number of merges", show_value=True)
    merges
    return (merges,)


@app.cell
def _(all_merges, cut_bpe, lengths, merges):
    learned = all_merges[: merges.value]
    examples = ["okul", "ormanlarda", "kitaplarımdan", "denizdan"]
    mo.vstack(
        [
            mo.md(
                "No merge yet: single characters."
                if not learned
                else "Merges so far: "
                + ", ".join(f"{a}+{b} ({times} times)" for (a, b), times in learned[-6:])
            ),
            table([{"word": w, "pieces": " | ".join(cut_bpe(w, learned))} for w in examples]),
            line_chart(
                [{"merges": k, "pieces per word": x} for k, x in enumerate(lengths)],
                "merges",
                "pieces per word",
                title=f"After {len(learned)} merges a word has {lengths[len(learned)]:.2f} pieces",
                y_range=(2, 7.5),
                here=[{"merges": len(learned), "pieces per word": lengths[len(learned)]}],
            ),
        ]
    )
    return (examples,)


@app.cell
def _(all_merges, cut_bpe, examples, lengths, merge, toy_counts):
    first_pairs = Counter()
    for _word, _n in toy_counts.items():
        for _i in range(len(_word) - 1):
            first_pairs[_word[_i : _i + 2]] += _n
    characters = train_tokenizer(list(toy_counts), 300, "characters")
    known = {c for word in toy_counts for c in word}
    strange = ["naïve 😀", "ŵyr", "λόγος"]
    small_bytes = train_tokenizer(list(toy_counts), 300, "bpe")
    mo.vstack(
        [
            claim(
                "TR-15",
                f"The first merge is the most frequent pair, {''.join(all_merges[0][0])} with {all_merges[0][1]} occurrences. "
                "Merging never changes the text, and never makes it longer.",
                all_merges[0][1]
                == max(first_pairs.values())
                == first_pairs["".join(all_merges[0][0])]
                and all("".join(cut_bpe(w, all_merges)) == w for w in [*toy_counts, *examples])
                and all(a >= b for a, b in pairwise(lengths))
                and merge(("a", "a", "a"), ("a", "a")) == ("aa", "a"),
            ),
            details(
                claim(
                    "TR-19",
                    "Characters are the simplest tokenizer: *hello world* has 11, *çocuk* has 5. A file counts otherwise: it stores *bytes*, numbers from 0 to 255, "
                    "one for each plain letter and two for *ç*, so *çocuk* has 6.",
                    len("hello world") == 11
                    and len(characters.encode("çocuk")) == 5 == len("çocuk")
                    and len("çocuk".encode()) == 6,
                ),
                claim(
                    "TR-15 E53",
                    "Merging *characters* covers only the characters seen in training: ï, 😀 and λ have no piece, and need an *unknown* "
                    "token that loses them. Merging *bytes* covers every text, because all 256 bytes are in the vocabulary: "
                    + ", ".join(
                        f"{text} takes {len(small_bytes.encode(text))} tokens" for text in strange
                    )
                    + ", and decoding gives each back.",
                    all(any(c not in known for c in text) for text in strange)
                    and all(
                        small_bytes.decode(small_bytes.encode(text)) == text for text in strange
                    ),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The other way round: Unigram

    BPE adds pieces to a small list. *Unigram* strikes pieces from a large one. Give every piece $x$ a probability $p(x)$, as if words were
    strings of beads drawn from a bag. A cut into pieces $x_1, \dots, x_n$ then has the probability $p(x_1) \cdots p(x_n)$, and a word that of
    all its cuts together.
    """)
    return


@app.cell
def _():
    def cuts(word, p):
        """(start, end, probability) of every known piece in a word."""
        return [
            (i, j, p[word[i:j]])
            for j in range(1, len(word) + 1)
            for i in range(j)
            if word[i:j] in p
        ]

    def viterbi(word, p, without=None):
        """The most probable cut and its log-probability."""
        best = [(0.0, ())] + [(-math.inf, ())] * len(word)
        for i, j, q in cuts(word, p):
            total = best[i][0] + math.log(q)
            if word[i:j] != without and total > best[j][0]:
                best[j] = (total, (*best[i][1], word[i:j]))
        return best[-1]

    def em_round(counts, p):
        """New probabilities, and the log-likelihood of the text under the old ones."""
        used, likelihood = Counter(), 0.0
        for word, times in counts.items():
            before = [1.0] + [0.0] * len(word)  # probability of the part before each place
            after = [0.0] * len(word) + [1.0]
            pieces = cuts(word, p)
            for i, j, q in pieces:
                before[j] += before[i] * q
            for i, j, q in sorted(pieces, reverse=True):
                after[i] += q * after[j]
            likelihood += times * math.log(before[-1])
            for i, j, q in pieces:
                used[word[i:j]] += times * before[i] * q * after[j] / before[-1]
        used = {x: max(n, 1e-12) for x, n in used.items() if n > 1e-12 or len(x) == 1}
        total = sum(used.values())
        return {x: n / total for x, n in used.items()}, likelihood

    def train_unigram(counts, size):
        """EM and pruning from all substrings down to ``size`` pieces; the likelihood per round."""
        every = Counter()
        for word, times in counts.items():
            for i in range(len(word)):
                for j in range(i + 1, len(word) + 1):
                    every[word[i:j]] += times
        p = {x: n for x, n in every.items() if n > 1 or len(x) == 1}
        p = {x: n / sum(p.values()) for x, n in p.items()}
        history = []
        while True:
            rounds = []
            for _ in range(3):
                p, likelihood = em_round(counts, p)
                rounds.append(likelihood)
            history.append(rounds)
            if len(p) <= size:
                return p, history
            used = Counter()
            for word, times in counts.items():
                for x in viterbi(word, p)[1]:
                    used[x] += times
            cost = {
                x: used[x] and used[x] * (math.log(p[x]) - viterbi(x, p, without=x)[0])
                for x in p
                if len(x) > 1
            }
            going = sorted(cost, key=lambda x: (cost[x], x))
            for x in going[: max(1, min(len(p) - size, len(p) // 4))]:
                del p[x]

    return em_round, train_unigram, viterbi


@app.cell
def _():
    pieces_allowed = mo.ui.dropdown(
        {"35 pieces": 35, "45 pieces": 45, "60 pieces": 60}, value="45 pieces", label="Vocabulary"
    )
    pieces_allowed
    return (pieces_allowed,)


@app.cell
def _(cut_bpe, pieces_allowed, toy_counts, toy_parts, train_bpe, train_unigram, viterbi):
    def both(parts, size):
        """BPE and Unigram with ``size`` pieces: how they cut, and the rounds of EM."""
        counts = Counter("".join(word) for word in parts)
        letters = {c for word in counts for c in word}
        greedy = train_bpe(counts, size - len(letters))
        p, rounds = train_unigram(counts, size)
        return (
            {"BPE": lambda w: cut_bpe(w, greedy), "Unigram": lambda w: viterbi(w, p)[1]},
            rounds,
            p,
        )

    def borders(pieces):
        return {sum(map(len, pieces[:k])) for k in range(1, len(pieces))}

    def judge_cuts(cut, parts):
        """Pieces per word, and the harmonic mean of precision and recall of borders (F1)."""
        hit = found = true = pieces = 0
        for word in parts:
            made = cut("".join(word))
            hit += len(borders(made) & borders(word))
            found += len(borders(made))
            true += len(borders(word))
            pieces += len(made)
        return pieces / len(parts), 2 * hit / (found + true)

    ways, rounds_45, p_now = both(toy_parts, pieces_allowed.value)
    judged = {name: judge_cuts(cut, toy_parts) for name, cut in ways.items()}
    words_shown = sorted(toy_counts, key=lambda w: (-len(w), w))[:5]
    mo.vstack(
        [
            table(
                [
                    {"word": w} | {name: " | ".join(cut(w)) for name, cut in ways.items()}
                    for w in words_shown
                ]
            ),
            bar_chart(
                [
                    {"measure": measure, "value": judged[name][k], "tokenizer": name}
                    for k, measure in enumerate(("pieces per word", "borders right"))
                    for name in judged
                ],
                "measure",
                "value",
                "tokenizer",
                title=f"Two tokenizers with {pieces_allowed.value} pieces; borders: 1 if all cuts fall between the true parts",
                y_range=(0, 4.5),
            ),
        ]
    )
    return both, judge_cuts, judged, p_now, rounds_45


@app.cell
def _(both, em_round, judge_cuts, judged, p_now, rounds_45, toy_counts, toy_words, viterbi):
    def every_cut(word):
        for marks in product((False, True), repeat=len(word) - 1):
            pieces, start = [], 0
            for i, mark in enumerate(marks, start=1):
                if mark:
                    pieces.append(word[start:i])
                    start = i
            yield (*pieces, word[start:])

    short = [w for w in toy_counts if len(w) <= 9][:40]
    brute = {
        w: max(
            sum(math.log(p_now[x]) for x in c) for c in every_cut(w) if all(x in p_now for x in c)
        )
        for w in short
    }
    _, total_now = em_round(toy_counts, p_now)
    by_all_cuts = {
        w: sum(math.prod(p_now[x] for x in c) for c in every_cut(w) if all(x in p_now for x in c))
        for w in short
    }
    trials = []
    for _seed in range(5):
        _parts = toy_words(_seed, 400)
        _ways, _, _ = both(_parts, 45)
        trials.append({name: judge_cuts(cut, _parts) for name, cut in _ways.items()})
    f1 = {name: sum(t[name][1] for t in trials) / 5 for name in ("BPE", "Unigram")}
    mo.vstack(
        [
            details(
                mo.md(r"""
                - *Which cut is best?* Walk through the word from left to right, and remember for each place only the best way to get there
                  (**Viterbi**). No need to try all cuts.
                - *Where do the probabilities come from?* Cut with the present ones, count each piece as often as it is used on average, make the counts the new
                  probabilities, repeat (**expectation-maximisation**, EM). Each round makes the text more probable, or leaves it as it is.
                - *Which pieces go?* Those whose removal costs the text least, until the list is short enough (**pruning**).
                """),
                claim(
                    "TR-16",
                    f"Viterbi finds the best of all cuts: checked against all {sum(2 ** (len(w) - 1) for w in short):,} cuts of {len(short)} words. "
                    "The probabilities of the pieces sum to 1.",
                    all(math.isclose(viterbi(w, p_now)[0], best) for w, best in brute.items())
                    and math.isclose(sum(p_now.values()), 1.0)
                    and math.isclose(
                        em_round(dict.fromkeys(short, 1), p_now)[1],
                        sum(map(math.log, by_all_cuts.values())),
                    ),
                ),
                claim(
                    "TR-16",
                    f"EM never lowers the likelihood of the text: {len(rounds_45)} times three rounds, from "
                    f"{rounds_45[0][0]:.0f} nats at first to {total_now:.0f} with {len(p_now)} pieces left.",
                    all(b >= a - 1e-6 for rounds in rounds_45 for a, b in pairwise(rounds)),
                ),
                title="Viterbi, EM, pruning",
            ),
            claim(
                "TR-17",
                "With equally many pieces Unigram needs fewer per word here: "
                f"{judged['Unigram'][0]:.2f} against {judged['BPE'][0]:.2f}. BPE is left with pieces that only led to longer ones.",
                judged["Unigram"][0] < judged["BPE"][0],
            ),
            details(
                claim(
                    "TR-17",
                    "In five drawn texts with 45 pieces the borders of Unigram agree better with the true parts on average (F1, which is 1 if all do), "
                    f"{f1['Unigram']:.2f} against {f1['BPE']:.2f}, though not in each ("
                    + ", ".join(f"{t['Unigram'][1]:.2f} and {t['BPE'][1]:.2f}" for t in trials)
                    + "). It is an observation on a toy, and fades with 60 pieces: choose them in the menu.",
                    f1["Unigram"] > f1["BPE"] + 0.03
                    and all(t["Unigram"][0] < t["BPE"][0] for t in trials),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## The loss of a text, one token at a time

    Guess a sentence word by word, each time with all words before in view. The probability of the whole is the product of the
    guesses, so its *negative log-likelihood* in nats is a sum:

    $$-\log P(x) = -\sum_{t=1}^{T} \log P(x_t \mid x_{<t}) .$$

    $x$ is a text of $T$ tokens, $x_t$ its token number $t$, and $x_{<t}$ all tokens before it; the bar is read *given*. While a model learns, the tokens before are always the true ones ([teacher forcing](../masks_and_heads/)).
    """)
    return


@app.cell
def _():
    V = 8
    tiny = fenchel.Transformer(
        fenchel.ModelConfig(vocabulary=V, context=16, width=16, layers=1, heads=2),
        generator=torch.Generator().manual_seed(0),
    ).double()

    def train_on_noise(shift, seed=0):
        """Loss on fresh random tokens, after 80 steps with targets that are shifted or not."""
        rng = torch.Generator().manual_seed(seed)
        model = fenchel.Transformer(
            fenchel.ModelConfig(vocabulary=V, context=16, width=16, layers=1, heads=2),
            generator=rng,
        )
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(81):
            ids = torch.randint(V, (32, 13), generator=rng)
            loss = cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, shift : 12 + shift].flatten()
            )
            if step < 80:
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
        return loss.item()

    copied, predicted = train_on_noise(shift=0), train_on_noise(shift=1)
    with torch.no_grad():
        every = torch.tensor([[0, a, b] for a in range(V) for b in range(V)])
        log_p = tiny(every[:, :-1]).log_softmax(-1)
        log_text = log_p.gather(-1, every[:, 1:, None])[..., 0].sum(-1)
        changed = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]])
        first_rows = tiny(changed)[:, :-1]
    targets = torch.tensor([[3, 1, 4, 1, 5, 2], [2, 7, -100, -100, -100, -100]])
    scores = torch.randn(2, 6, V, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses = target_losses(scores, targets)
    token_mean = losses.sum() / count_targets(targets)
    sequence_mean = per_sequence(losses, targets).mean()
    wider = target_losses(
        torch.cat([scores, scores], 1), torch.cat([targets, torch.full_like(targets, -100)], 1)
    )
    by_words = train_tokenizer(["we the people"], 300)
    mo.vstack(
        [
            claim(
                "TR-06",
                f"A model of {V} tokens, and all {V * V} texts of two tokens after BOS: the product of the guesses gives each a probability, and they sum to "
                f"{log_text.exp().sum().item():.6f}.",
                torch.isclose(log_text.exp().sum(), log_text.new_tensor(1.0))
                and torch.isclose(
                    total_loss(tiny(every[:, :-1]).detach(), every[:, 1:]), -log_text.sum()
                ),
            ),
            details(
                mo.md(r"""
                Three details decide whether this is computed right.

                - **The first token** has nothing before it. A special token is put there: *begin of sequence* (BOS). Another says that the text is over (EOS). In
                  fenchel `<|end|>` is both. A third, PAD, fills short rows of a batch, and is never a target.
                - **The shift.** Row $t$ of the output has seen tokens up to $x_t$ itself. So it predicts $x_{t+1}$, and the targets are the inputs shifted by one. Without
                  the shift the answer stands in the question.
                - **The mean.** Over all real tokens of a batch, or first within each sequence? Both are in use. They differ when lengths differ.
                """),
                claim(
                    "TR-08 E50",
                    "Two texts that differ in the last token have the same output in all rows before: the causal mask lets no row see later tokens. Row $t$ "
                    f"does see token $t$. Trained on random tokens *without* the shift, a model reaches a loss of {copied:.3f} by copying; with the shift it "
                    f"stays at {predicted:.2f}, as it must: $\\log {V}$ = {math.log(V):.2f}.",
                    torch.equal(first_rows[0], first_rows[1])
                    and copied < 0.2
                    and abs(predicted - math.log(V)) < 0.2,
                ),
                claim(
                    "TR-07 E51",
                    f"Sequences of 6 and 2 targets: the mean over tokens is {token_mean.item():.4f}, the mean of the means per sequence {sequence_mean.item():.4f}. Fenchel trains on the first. "
                    "Padding, a target of -100, changes neither. Perplexity needs the mean over tokens; the formula above is a sum.",
                    not torch.isclose(token_mean, sequence_mean)
                    and torch.isclose(
                        token_mean, cross_entropy(scores.flatten(0, 1), targets.flatten())
                    )
                    and torch.isclose(wider.sum() / count_targets(targets), token_mean)
                    and torch.isclose(sequence_mean, (losses[0].mean() + losses[1, :2].mean()) / 2),
                ),
                claim(
                    "TR-18",
                    f"`{END}` has id {by_words.end_id} and `{PAD}` id {by_words.pad_id}. A text that spells them out gets ordinary tokens: no text can end itself. "
                    "Generation without a prompt starts from the first, and stops when it is drawn again.",
                    (by_words.end_id, by_words.pad_id) == (0, 1)
                    and not {0, 1} & set(by_words.encode(f"a {END} b {PAD}"))
                    and by_words.decode([by_words.end_id, *by_words.encode("we"), by_words.pad_id])
                    == "we",
                ),
                title="The first token, the shift, the mean",
            ),
        ]
    )
    return (tiny,)


@app.cell
def _(tiny):
    E = tiny.embed.weight.detach()
    untied = fenchel.Transformer(
        fenchel.ModelConfig(vocabulary=8, context=16, width=16, layers=1, heads=2, tied=False)
    )
    sizes = [sum(p.numel() for p in model.parameters()) for model in (untied, tiny)]
    some_ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        hidden = tiny(some_ids, return_hidden=True)
        out = tiny(some_ids)
    try:
        hidden @ E
        refused = False
    except RuntimeError:
        refused = True
    details(
        mo.md(r"""
    A dictionary is read in two directions: from word to meaning, and from meaning to word. The table $E$ has one row of $d$ numbers for each of
    the $V$ tokens. At the entrance a token is its row, $e_i = E_i$. At the exit the state $h_t$ is compared with all rows by inner products,
    $P(x_{t+1} \mid x_1, \dots, x_t) = \mathrm{softmax}(h_t E^\top)$. Using one table for both is called *weight tying*.
            """),
        claim(
            "TR-09",
            "Looking up row $i$ is the same as multiplying a *one-hot* row (a 1 at place $i$, 0 elsewhere) with $E$.",
            torch.equal(one_hot(torch.arange(8), 8).double() @ E, E[torch.arange(8)])
            and torch.equal(tiny.embed(some_ids)[0].detach(), E[[3, 1, 4]]),
        ),
        claim(
            "TR-10",
            f"The tied output is $h E^\\top$, and it saves a table of $V d$ = 8 x 16 = {sizes[0] - sizes[1]} parameters.",
            torch.allclose(out, hidden @ E.T) and sizes[0] - sizes[1] == 8 * 16,
        ),
        claim(
            "TR-11",
            "Transpose it: $h$ has 16 entries and $E$ is 8 x 16, so $h E$ does not fit, and torch refuses. Tying needs the same width at both ends.",
            refused and hidden.shape[-1] == E.shape[1] and (hidden @ E.T).shape[-1] == 8,
        ),
        title="One table, used twice",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Perplexity, and why it needs one tokenizer

    Among how many equally likely candidates does the model hesitate at each token? A die of $k$ faces costs $\log k$ nats per throw; undo the logarithm
    of the mean loss:

    $$\mathrm{perplexity} = \exp\Big(-\frac{1}{T} \sum_t \log P(x_t \mid x_{<t})\Big).$$

    $T$ counts tokens. It is a price per slice, and whoever cuts more slices has cheaper slices. Per *byte* of the text the prices can be
    compared: *bits per byte* = total nats / ($\log 2$ · bytes). Let *hello world* cost 11 nats in all.
    """)
    return


@app.cell
def _():
    splits = {
        "two pieces": ("hello", " world"),
        "four pieces": ("hel", "lo", " wor", "ld"),
        "eleven characters": tuple("hello world"),
    }
    split = mo.ui.dropdown(list(splits), value="four pieces", label="Cut")
    split
    return split, splits


@app.cell
def _(split, splits):
    def scored(pieces):
        text = "".join(pieces)
        return Score(
            11 / len(pieces),
            math.exp(11 / len(pieces)),
            11 / (len(text.encode()) * math.log(2)),
            len(pieces),
        )

    shown = scored(splits[split.value])
    two, four, eleven = map(scored, splits.values())

    class Uniform(torch.nn.Module):
        def forward(self, ids):
            return torch.zeros(*ids.shape, 50, dtype=torch.float64)

    of_uniform = score(Uniform(), np.arange(40), bytes=39, context=8)
    by_four = Evaluation("A", four, tokenizer="four pieces", text="hello world")
    by_eleven = Evaluation("B", eleven, tokenizer="characters", text="hello world")
    try:
        compare(by_four, by_eleven, by="perplexity")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    mo.vstack(
        [
            bar_chart(
                [
                    {
                        "cut": name,
                        "perplexity": scored(pieces).perplexity,
                        "bits per byte": scored(pieces).bits_per_byte,
                    }
                    for name, pieces in splits.items()
                ],
                "cut",
                "perplexity",
                title=f"{'|'.join(splits[split.value])}: perplexity {shown.perplexity:.2f}, {shown.bits_per_byte:.3f} bits per byte",
                y_range=(0, 250),
                here=split.value,
            ),
            claim(
                "TR-14 E52",
                f"11 nats over four pieces are a perplexity of {four.perplexity:.2f}, over eleven characters {eleven.perplexity:.2f}, over two pieces {two.perplexity:.1f}. "
                "(The four pieces are invented; the tokenizer of GPT-2 cuts *hello world* into two.)",
                f"{four.perplexity:.2f} {eleven.perplexity:.2f}" == "15.64 2.72"
                and two.tokens == 2
                and f"{two.perplexity:.1f}" == "244.7",
            ),
            claim(
                "TR-13",
                f"The bits per byte are {shown.bits_per_byte:.3f} for every cut. `fenchel.evaluate.compare` refuses to compare perplexities of two tokenizers: "
                f"*{refusal}*",
                "different tokenizers" in refusal
                and abs(shown.bits_per_byte - four.bits_per_byte) < 1e-12
                and abs(compare(by_four, by_eleven).difference) < 1e-12,
            ),
            details(
                claim(
                    "TR-12",
                    f"A model that knows nothing and guesses uniformly among $V$ tokens has perplexity $V$: {of_uniform.perplexity:.1f} for 50.",
                    math.isclose(of_uniform.perplexity, 50)
                    and math.isclose(of_uniform.loss, math.log(50)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    proof(
        school=r"""
            Let a text have the probability $P$. Cut into $T$ tokens, the product of the $T$ guesses is $P$, whatever they are. The perplexity is
            $(1/P)^{1/T}$, the $T$-th root of $1/P$: the geometric mean of "one in how many". More tokens, higher root, smaller number, for the same $P$. Bits per byte
            are $\log_2(1/P)$ divided by the bytes, and $T$ does not occur in them. For the uniform guess each factor is $1/V$, so $1/P = V^T$ and the root is $V$.""",
        undergraduate=r"""
            $\exp(-\frac1T \log P)$ is strictly decreasing in $T$ at fixed $P < 1$. Cross-entropy per byte is $\frac{1}{B} \mathbb{E}[-\log_2 P]$, bounded below by the entropy rate of the source per
            byte (Shannon), with equality for the true model. By the chain rule $\sum_x \prod_t P(x_t \mid x_{<t}) = 1$ over texts of a fixed length; over all texts that end with EOS it is 1 exactly if the model ends
            almost surely, and less otherwise.""",
        research=r"""
            With a tokenizer under which a string has several token sequences, a model gives the string the *sum* over them; scoring the canonical one gives an upper bound of
            its surprisal (Cao and Rimell 2021). Unigram makes this explicit and can sample cuts as a regulariser (Kudo 2018). BPE by greedy merges is due to Sennrich, Haddow and Birch (2016), the byte-level
            variant to the GPT-2 report; on morphology see Bostrom and Durrett (2020). Bits per byte also depend on the context that windows leave to each target.""",
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Is the model as sure as it should be?

    A weather service that says 90% should be right nine times in ten. A model is *calibrated* if this holds at every confidence, its confidence being
    the probability of its first choice. A model that has learned its text by heart is not. Below, a small model of characters trains for 400 steps
    on the same 60 words of the toy language, and is tested on 480 others.
    """)
    return


@app.cell
def _(toy_words):
    def overfit(seed, smoothing):
        """Losses on both texts while training, then logits and targets of the validation text."""
        rng = torch.Generator().manual_seed(seed)
        drawn = ["".join(parts) for parts in toy_words(seed, 540)]
        words = [drawn[i] for i in torch.randperm(540, generator=rng).tolist()]
        alphabet = sorted({c for word in words for c in word} | {" "})
        train, held_out = (
            np.array([alphabet.index(c) for c in " ".join(part)])
            for part in (words[:60], words[60:])
        )
        model = fenchel.Transformer(
            fenchel.ModelConfig(vocabulary=len(alphabet), context=16, width=32, layers=1, heads=2),
            generator=rng,
        )
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        batches = Batches(train, batch=16, context=16, seed=seed)

        @torch.no_grad()
        def read(ids):
            parts = [
                (model(w.inputs)[w.scored], w.targets[w.scored])
                for w in windows(ids, context=16, stride=8, batch=64)
            ]
            return tuple(torch.cat(each) for each in zip(*parts, strict=True))

        curve = []
        for step in range(401):
            if step % 25 == 0:
                both = [cross_entropy(*read(ids)).item() for ids in (train, held_out)]
                curve.append({"step": step, "training": both[0], "validation": both[1]})
            batch = batches.at(step)
            loss = total_loss(model(batch.inputs), batch.targets, smoothing=smoothing)
            (loss / batch.targets.numel()).backward()
            optimiser.step()
            optimiser.zero_grad()
        return curve, *read(held_out)

    curve, logits, truths = overfit(0, 0.0)
    _, smooth_logits, smooth_truths = overfit(0, 0.1)
    middle = len(truths) // 2
    fitted = fit_temperature(logits[:middle], truths[:middle])
    return curve, fitted, logits, middle, smooth_logits, smooth_truths, truths


@app.cell
def _(curve):
    gaps = [row["validation"] - row["training"] for row in curve]
    lowest = min(curve, key=lambda row: row["validation"])
    mo.vstack(
        [
            line_chart(
                [
                    {"step": row["step"], "loss in nats": row[name], "text": name}
                    for row in curve
                    for name in ("training", "validation")
                ],
                "step",
                "loss in nats",
                "text",
                title="Learning by heart: the two losses part",
                y_range=(0, 3.5),
            ),
            claim(
                "RG-12",
                f"The training loss keeps falling, to {curve[-1]['training']:.2f}. The loss on unseen words is lowest at step {lowest['step']} "
                f"({lowest['validation']:.2f}) and rises to {curve[-1]['validation']:.2f}. Watch the gap: {abs(gaps[0]):.2f}, then {gaps[len(gaps) // 2]:.2f}, then {gaps[-1]:.2f} nats.",
                gaps[-1] > 0.4
                and gaps[0] < 0.1
                and lowest["step"] < curve[-1]["step"]
                and curve[-1]["validation"] > lowest["validation"] + 0.1
                and curve[-1]["training"] < lowest["training"],
            ),
        ]
    )
    return


@app.cell
def _():
    temperature = mo.ui.slider(
        steps=[0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0],
        value=1.0,
        label="Temperature $T$: probabilities are softmax$(z / T)$",
        show_value=True,
    )
    bins = mo.ui.slider(steps=[5, 10, 15, 30], value=15, label="Number of bins", show_value=True)
    kind = mo.ui.dropdown(
        {"equal width": "width", "equal mass": "mass"}, value="equal width", label="Bins of"
    )
    mo.vstack(
        [
            mo.md(r"""
    How far from calibrated is it? Sort the $n$ predictions into bins $B_m$ by confidence, from unsure to sure. In each bin, compare the share that is right with
    the mean confidence. The average of these gaps is the *expected calibration error*:
    $\mathrm{ECE} = \sum_m \frac{|B_m|}{n} \left|\mathrm{acc}(B_m) - \mathrm{conf}(B_m)\right|$. Here $|B_m|$ is the number of predictions in a bin, $\mathrm{acc}$ the share that is right and $\mathrm{conf}$ the mean confidence.
    One knob can repair much of it: divide all logits by a *temperature*. From here on $T$ is that temperature, the $1/\beta$ of [softmax](../softmax/), and no longer a number of tokens.
            """),
            temperature,
            bins,
            kind,
        ]
    )
    return bins, kind, temperature


@app.cell
def _(bins, kind, logits, middle, temperature, truths):
    measured = outcomes(logits[middle:], truths[middle:], temperature=temperature.value)
    diagram = reliability(measured.confidence, measured.hit, bins=bins.value, by=kind.value)
    ece = calibration_error(diagram)
    line_chart(
        [
            {"confidence": b.confidence, "share right": b.accuracy, "line": "the model"}
            for b in diagram
        ]
        + [
            {"confidence": x, "share right": x, "line": "calibrated"}
            for x in (diagram[0].confidence, 1.0)
        ],
        "confidence",
        "share right",
        "line",
        title=f"Reliability on unseen words, T = {temperature.value:g}: ECE {ece:.3f}",
        x_range=(0, 1),
        y_range=(0, 1),
        points=True,
    )
    return diagram, ece, measured


@app.cell
def _(diagram, ece, fitted, kind, logits, measured, middle, truths):
    by_hand, _N = 0.0, len(measured.hit)
    for _b in diagram:
        _inside = (measured.confidence.double() > _b.low) & (
            measured.confidence.double() <= _b.high
        )
        _gap = measured.hit[_inside].double().mean() - measured.confidence[_inside].double().mean()
        by_hand += int(_inside.sum()) / _N * abs(_gap.item())
    plain = outcomes(logits[middle:], truths[middle:], temperature=fitted.temperature)
    eces = {
        m: calibration_error(reliability(plain.confidence, plain.hit, bins=m))
        for m in (1, 5, 15, 50)
    }
    by_mass = calibration_error(reliability(plain.confidence, plain.hit, by="mass"))
    ninety = torch.full((100,), 0.9, dtype=torch.float64)
    nine_of_ten = reliability(ninety, torch.arange(100) % 10 != 0)
    nine_of_nine = reliability(ninety, torch.ones(100))
    mo.vstack(
        [
            details(
                claim(
                    "RG-06",
                    "A hundred predictions of confidence 0.9: with 90 right the error is 0, with 100 right it is 0.1. Being right too often is a miss as well.",
                    calibration_error(nine_of_ten) < 1e-9
                    and abs(calibration_error(nine_of_nine) - 0.1) < 1e-9,
                ),
                claim(
                    "RG-03 RG-04",
                    f"The sum over {len(diagram)} bins of equal {kind.value}, written out, is {by_hand:.4f}, as the library says.",
                    abs(by_hand - ece) < 1e-6 and sum(b.size for b in diagram) == _N,
                ),
                claim(
                    "E80 RG-04",
                    f"ECE depends on the bins, so name them. At $T = {fitted.temperature:.2f}$: "
                    + ", ".join(f"{e:.3f} with {m}" for m, e in eces.items())
                    + f", {by_mass:.3f} with 15 of equal mass. Fenchel takes 15 of equal width, the first choice only, and leaves empty bins out; $n$ counts predictions. One bin sees only the "
                    "average, where gaps up and down cancel.",
                    len({round(e, 6) for e in eces.values()}) > 1
                    and eces[1] <= min(eces.values()) + 1e-9
                    and abs(eces[15] - summarise(plain).ece) < 1e-12
                    and all(b.size > 0 for b in diagram),
                ),
            ),
        ]
    )
    return


@app.cell
def _(fitted, logits, measured, middle, truths):
    grid = [0.5, 0.75, 1.0, 1.5, 2.0, 4.0]
    at = {t: summarise(outcomes(logits[middle:], truths[middle:], temperature=t)) for t in grid}
    before = at[1.0]
    after = summarise(outcomes(logits[middle:], truths[middle:], temperature=fitted.temperature))
    first_half = [
        cross_entropy(logits[:middle].double() / t, truths[:middle]).item()
        for t in (fitted.temperature * 0.98, fitted.temperature, fitted.temperature * 1.02)
    ]
    mo.vstack(
        [
            claim(
                "RG-05",
                f"The temperature with the least loss on the first half of the unseen words is {fitted.temperature:.2f}. On the second half it lowers the loss from {before.loss:.3f} to {after.loss:.3f} "
                f"and the ECE from {before.ece:.3f} to {after.ece:.3f}. Accuracy stays {after.accuracy:.3f}: dividing all logits keeps their order.",
                fitted.temperature > 1.2
                and after.loss < before.loss
                and after.ece < before.ece
                and first_half[1] < min(first_half[0], first_half[2])
                and measured.hit.double().mean().item() == before.accuracy == after.accuracy,
            ),
            details(
                claim(
                    "RG-05",
                    "$T > 1$ makes a model less confident, $T < 1$ more: mean confidence "
                    + ", ".join(f"{at[t].confidence:.2f}" for t in grid)
                    + " at $T$ = 0.5 to 4.",
                    all(at[a].confidence > at[b].confidence for a, b in pairwise(grid)),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    mo.md(r"""
    ## Teaching a little doubt

    A pupil who gets full marks only for being certain learns to be certain, even when guessing. *Label smoothing* asks for a little less: the target is mixed with the uniform
    distribution over the $V$ classes,

    $$q = (1 - a)\, y + \frac{a}{V} \mathbf{1},$$

    where $y$ is the plain target, 1 for the true class and 0 for the others, and $\mathbf 1$ a row of ones. So the true class gets $1 - a + a/V$ and each other one $a/V$.
    The chart shows the loss of a model whose logit for the true class lies by some *gap* above all others, which are equal. Choose $a$:
    """)
    return


@app.cell
def _():
    amount = mo.ui.slider(
        steps=[0.01, 0.05, 0.1, 0.2, 0.3], value=0.1, label="Smoothing $a$", show_value=True
    )
    amount
    return (amount,)


@app.cell
def _(amount, logits, middle, smooth_logits, smooth_truths, truths):
    a = amount.value
    best = label_smoothing(10, a)
    gaps_ = torch.linspace(0, 10, 101, dtype=torch.float64)
    trial = torch.zeros(101, 10, dtype=torch.float64)
    trial[:, 0] = gaps_
    zeros = torch.zeros(101, dtype=torch.long)
    smoothed, sharp = (target_losses(trial[None], zeros[None], smoothing=s)[0] for s in (a, 0.0))
    tenth = label_smoothing(10, 0.1)
    q_ = smoothed_targets(torch.tensor([4]), 10, a).double()
    z_ = torch.randn(
        1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    slope = torch.autograd.grad(total_loss(z_[None], torch.tensor([[4]]), smoothing=a), z_)[0]
    with_smoothing = summarise(outcomes(smooth_logits[middle:], smooth_truths[middle:]))
    without = summarise(outcomes(logits[middle:], truths[middle:]))
    mo.vstack(
        [
            line_chart(
                [
                    {"logit gap": g, "loss in nats": v, "target": name}
                    for name, values in (("smoothed", smoothed), ("plain", sharp))
                    for g, v in zip(gaps_.tolist(), values.tolist(), strict=True)
                ],
                "logit gap",
                "loss in nats",
                "target",
                title=f"The smoothed loss has its minimum {best.minimum:.4f} at the gap {best.gap:.3f}",
                y_range=(0, 3),
                here=[{"logit gap": best.gap, "loss in nats": best.minimum}],
            ),
            details(
                claim(
                    "RG-07 E47",
                    f"With $V = 10$ and $a = {a:g}$ the true class gets {best.confidence:.3f} and each other {best.other:.3f}: together 1, as in torch. (Another convention shares $a$ among "
                    "the $V - 1$ others only.)",
                    math.isclose(q_.sum().item(), 1.0, rel_tol=1e-6)
                    and math.isclose(q_[0, 4].item(), 1 - a + a / 10, rel_tol=1e-6)
                    and torch.isclose(
                        cross_entropy(z_, torch.tensor([4]), label_smoothing=a),
                        -(q_ * z_.log_softmax(-1)).sum(),
                        rtol=1e-6,
                    ),
                ),
                claim(
                    "RG-08",
                    "The slope in the logits is $p - q$, with $p$ the probabilities of the model: above the best gap, more confidence costs. For $V = 10$, $a = 0.1$ the best gap of the logits is "
                    f"{tenth.gap:.3f} and the least loss {tenth.minimum:.4f}.",
                    f"{tenth.gap:.3f} {tenth.minimum:.4f}" == "4.511 0.5003"
                    and torch.allclose(slope, (z_.softmax(-1) - q_).detach(), atol=1e-6)
                    and abs(gaps_[smoothed.argmin()].item() - best.gap) < 0.06
                    and abs(smoothed.min().item() - best.minimum) < 1e-3,
                ),
                claim(
                    "E47",
                    f"So a smoothed loss never reaches 0, and its exponential is no perplexity: at its best it would be {math.exp(tenth.minimum):.2f} where 1 is perfect. Report the plain loss too.",
                    smoothed.min() > 0 and tenth.minimum > 0.5 and math.exp(tenth.minimum) > 1.6,
                ),
                claim(
                    "RG-09",
                    f"The model above, trained again with $a = 0.1$: mean confidence {with_smoothing.confidence:.2f} instead of {without.confidence:.2f} at accuracy {with_smoothing.accuracy:.2f} and "
                    f"{without.accuracy:.2f}, ECE {with_smoothing.ece:.3f} instead of {without.ece:.3f}. An observation, not a theorem.",
                    with_smoothing.ece < without.ece - 0.03
                    and with_smoothing.confidence < without.confidence,
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    rng5 = torch.Generator().manual_seed(1)
    queries = (
        (
            torch.randn(1, 4, 16, 8, generator=rng5)
            * torch.tensor([0.3, 3.0, 4.0, 5.0]).view(1, 4, 1, 1)
        )
        .double()
        .requires_grad_()
    )
    keys = torch.randn(1, 4, 16, 8, generator=rng5).double().mul(2).requires_grad_()
    floor = 1.2
    start = queries.detach().clone()
    entropies = [head_entropy(queries, keys).detach()]
    descent = torch.optim.Adam([queries, keys], lr=0.05)
    for _step in range(60):
        penalty = (floor - head_entropy(queries, keys)).clamp(min=0).square().mean()
        descent.zero_grad()
        penalty.backward()
        descent.step()
        entropies.append(head_entropy(queries, keys).detach())
    first_gradient = queries.detach()[0, 0] - start[0, 0]
    details(
        mo.md(r"""
    Attention weights can be too sure as well: a head that gives one key all its weight hardly learns any more. An *entropy floor* $c$ adds the penalty $\max(0, c - H)^2$ per head
    to the loss, $H$ being the mean entropy (average surprise, [cross-entropy](../cross_entropy/)) of its rows. It acts on heads below the floor only.
            """),
        line_chart(
            [
                {"step": k, "entropy in nats": h, "head": f"head {i}"}
                for k, row in enumerate(entropies)
                for i, h in enumerate(row.tolist(), 1)
            ],
            "step",
            "entropy in nats",
            "head",
            title=f"Four heads under the penalty alone, floor {floor}",
        ),
        claim(
            "RG-13",
            "Three sharp heads rise from "
            + ", ".join(f"{h:.2f}" for h in entropies[0][1:].tolist())
            + f" to the floor {floor} within 60 steps; the head that was above it stays as it was. In training: `train.entropy_floor`.",
            (entropies[0][1:] < floor).all()
            and entropies[0][0] > floor
            and (entropies[-1][1:] > floor - 0.05).all()
            and first_gradient.abs().max() == 0,
        ),
        title="The same idea inside attention",
    )
    return


@app.cell
def _():
    def check(names):
        measure = names["bits_per_byte"]
        value = measure([11 / 4] * 4, "hello world")
        assert abs(value - 1.4427) < 1e-3, (
            "Four tokens of 2.75 nats on 'hello world' are 1.443 bits per byte: add up, turn nats into bits "
            "(divide by log 2), divide by the bytes."
        )
        value = measure([1.0] * 11, "hello world")
        assert abs(value - 1.4427) < 1e-3, (
            "Eleven tokens of 1 nat: the same 1.443, however many tokens there are."
        )
        value = measure([math.log(2)] * 4, "çüş")
        assert abs(value - 4 / 6) < 1e-6, (
            "'çüş' has 3 characters and 6 bytes: count the bytes of text.encode()."
        )

    exercise = Exercise(
        lesson="tokens_and_calibration",
        task="Write `bits_per_byte(losses, text)`: from the loss of each token in nats and the text itself.",
        starter="""
    def bits_per_byte(losses, text):
        return math.exp(sum(losses) / len(losses))  # this is the perplexity
    """,
        solution="""
    def bits_per_byte(losses, text):
        bits = sum(losses) / math.log(2)
        return bits / len(text.encode())
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
    own_text = text_field("We the people of the united states form a more perfect union.")
    own_text
    return (own_text,)


@app.cell
def _(own_text, run_path):
    mo.stop(run_path is None, no_run())
    own = fenchel.load(run_path, dtype=torch.float32)
    phrase = own_text.value.strip() or "We"
    own_ids = np.array([own.tokenizer.end_id, *own.tokenizer.encode(phrase)])
    own_score = score(own.model, own_ids, bytes=len(phrase.encode()), context=own.config.context)
    short_ids = torch.from_numpy(own_ids[: min(8, own.config.context)])[None].long()
    other_ids = short_ids.clone()
    other_ids[0, -1] = (other_ids[0, -1] + 1) % own.config.vocabulary
    with torch.no_grad():
        rows_a, rows_b = (own.model(x)[0, :-1] for x in (short_ids, other_ids))
    metrics = Path(run_path) / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        if metrics.exists()
        else []
    )
    own_curve = [
        {"step": line["step"], "loss in nats": line[f"{part}/loss"], "text": part}
        for line in lines
        for part in ("train", "validation")
        if isinstance(line.get(f"{part}/loss"), float)
    ]
    _title = "The two losses of your run: watch the gap"
    _curve = (
        [line_chart(own_curve, "step", "loss in nats", "text", title=_title, points=True)]
        if own_curve
        else []
    )
    pieces_of_phrase = [own.tokenizer.decode([i]) for i in own_ids[1:].tolist()]
    mo.vstack(
        [
            mo.md(
                f"Your tokenizer cuts the phrase into {len(pieces_of_phrase)} pieces: `{'|'.join(pieces_of_phrase)}`"
            ),
            *_curve,
            claim(
                "TR-12 TR-13",
                f"Perplexity {own_score.perplexity:.1f} per token of this tokenizer, {own_score.bits_per_byte:.3f} bits per byte with any: "
                f"{own_score.tokens} tokens x {own_score.loss:.3f} nats / ({len(phrase.encode())} bytes x log 2).",
                math.isclose(own_score.perplexity, math.exp(own_score.loss), rel_tol=1e-9)
                and math.isclose(
                    own_score.bits_per_byte,
                    own_score.tokens * own_score.loss / (len(phrase.encode()) * math.log(2)),
                    rel_tol=1e-9,
                ),
            ),
            details(
                claim(
                    "TR-08",
                    "Changing the last token of a text leaves all earlier rows of your model's output as they were.",
                    torch.allclose(rows_a, rows_b, atol=1e-5),
                ),
            ),
        ]
    )
    return


@app.cell
def _():
    what_breaks(
        r"Bits per byte compare models on one text only, and with the same amount of context. A calibrated model need not be good: one that always states the base rates is calibrated and useless. A temperature fitted on one "
        r"text may not fit another. And the tokenizer is part of the model: with another one the same weights mean nothing."
    )
    return


@app.cell
def _():
    footer("tokens_and_calibration")
    return


if __name__ == "__main__":
    app.run()
