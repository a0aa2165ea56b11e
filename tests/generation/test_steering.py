"""fenchel/generation/steering.py: rows with vectors, emphasis and budgets of their own."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import entmax
import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.attention.spec import AttentionCall
from fenchel.choice import Choice, Hard, Softmax, Sparsemax
from fenchel.data import train_tokenizer
from fenchel.generation import (
    Decoder,
    Emphasis,
    GenerationSettings,
    HeadChoice,
    Sampling,
    Scheduler,
    Steering,
    fused_step,
    generate,
    scheduler,
    steps,
)
from fenchel.generation.cpu_step import why_not_packed
from fenchel.generation.scheduler import Request, Token, Update
from fenchel.generation.steering import within_budget
from fenchel.model import Transformer
from tests.generation.conftest import run_and_keep

Build = Callable[..., Transformer]
PROMPTS = ([3, 14, 15, 9, 2, 6], [5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1])
NEW = [4, 11, 6, 20, 9]
KINDS = ["model", "cpu", "packed", "graph", "fused"]
GREEDY, HARD = Sampling(temperature=0.0), Hard()


def vectors(width: int, *layers: int, seed: int = 0, size: float = 2.0) -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {layer: size * torch.randn(width, generator=draw) for layer in layers}


def hooked(model: Transformer, steering: Steering | None, ids: list[int]) -> Tensor:
    """Logits after the last token, by hooks and by softmax written out."""
    with ExitStack() as stack, torch.no_grad():
        for layer, v_M in {} if steering is None else steering.vectors.items():
            add = v_M.to(model.embed.weight)
            hook = model.blocks[layer - 1].register_forward_hook(lambda *a, add=add: a[-1] + add)
            stack.callback(hook.remove)
        changed = steering is not None and steering.changes_attention
        override = choosing_by(steering) if steering is not None and changed else None
        device = model.embed.weight.device
        z: Tensor = model(torch.tensor([ids], device=device), attention_override=override)[0, -1]
        return z


def choosing_by(steering: Steering) -> Callable[[int, AttentionCall], Tensor | None]:
    """Attention written out, with the maps of torch and of the package entmax."""

    def override(layer: int, call: AttentionCall) -> Tensor | None:
        q, k, v, spec = call
        (B, H, T, _), S = q.shape, k.shape[2]
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        z = spec.scale_for(q.shape[-1]) * q @ k.mT
        emphasis = steering.emphasis or Emphasis()
        for h in range(H):
            z[:, h] *= steering.heads.get((layer + 1, h + 1), HeadChoice()).beta
            layers, heads = emphasis.layers, emphasis.heads
            if (layers is None or layer + 1 in layers) and (heads is None or h + 1 in heads):
                for token in emphasis.tokens:
                    if token < T:
                        z[:, h, :, token + S - T] += emphasis.bias  # a sink stands before the keys
        assert spec.prior is not None
        z += spec.prior.log(T, S, B=B, H=H, device=z.device, dtype=z.dtype)
        for h in range(H):
            own = steering.heads.get((layer + 1, h + 1), HeadChoice()).choice
            z[:, h] = MAPS[type(own or spec.choice)](z[:, h])
        return z @ v

    return override


MAPS: dict[type[Choice], Callable[[Tensor], Tensor]] = {
    Softmax: lambda z: z.softmax(-1),
    Sparsemax: lambda z: entmax.sparsemax(z, dim=-1),
    Hard: lambda z: torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).to(z),
}


@pytest.fixture
def decoder_of(
    device: str, lively: Build, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, Any]], Decoder]:
    """A decoder of three rows by one kind of step; kernels are interpreted without a GPU."""
    if device != "cuda":
        monkeypatch.setattr(steps, "why_not_fused", lambda _: None)

    def build(kind: str, shape: dict[str, Any]) -> Decoder:
        model = lively(**{"kv_heads": 2, "context": 24, **shape})
        if kind == "packed" and why_not_packed(model) is not None:
            pytest.skip("this torch has no oneDNN")
        recorded = kind in ("graph", "fused")
        model = model.to(device if recorded else "cpu")
        record = fused_step.capture_graph if device == "cuda" and recorded else run_and_keep
        return Decoder(model, rows=3, step=kind, record=record, steered=(1, 2))

    return build


STEERED: dict[str, tuple[dict[str, Any], list[Steering | None]]] = {
    "vectors": (
        {},
        [Steering(vectors(32, 1)), None, Steering(vectors(32, 1, 2, seed=1))],
    ),
    "emphasis": (
        {},
        [
            Steering(emphasis=Emphasis(frozenset({1, 2}), 2.5, heads=frozenset({2, 3}))),
            None,
            Steering(emphasis=Emphasis(frozenset({0}), -4.0, layers=frozenset({2}))),
        ],
    ),
    "heads": (
        {},
        [
            Steering(heads={(1, 2): HeadChoice(0.3), (2, 4): HeadChoice(3.0, Sparsemax())}),
            None,
            Steering(
                emphasis=Emphasis(frozenset({1}), 1.0, heads=frozenset({3})),
                heads={(2, 1): HeadChoice(choice=Hard()), (2, 3): HeadChoice(choice=Sparsemax())},
            ),
        ],
    ),
    "heads of windows": (
        {"windows": (3, 0)},
        [Steering(heads={(1, 2): HeadChoice(2.0, Sparsemax())}), None, None],
    ),
    "sinks and gates": (
        {"sinks": True, "gate": "head", "windows": (5, 0)},
        [
            Steering(emphasis=Emphasis(frozenset({1, 4}), 2.0), heads={(1, 1): HeadChoice(0.7)}),
            None,
            None,
        ],
    ),
    "entmax": (
        {"choice": "sparsemax"},
        [
            Steering(
                heads={(n, h): HeadChoice(1.5, Softmax()) for n in (1, 2) for h in range(1, 5)}
            ),
            None,
            Steering(heads={(1, 1): HeadChoice(0.0)}),
        ],
    ),
    "both": (
        {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
        [Steering(vectors(32, 2), Emphasis(frozenset({3}), 3.0)), None, None],
    ),
}
SERVED = {"sinks and gates": ["model", "graph"], "entmax": ["model"]}
"""The kinds that serve a case, where not all do."""


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in STEERED for kind in SERVED.get(case, KINDS)],
)
def test_every_row_has_the_logits_of_a_model_steered_by_hooks(
    case: str, kind: str, decoder_of: Callable[[str, dict[str, Any]], Decoder]
) -> None:
    shape, steerings = STEERED[case]
    decoder = decoder_of(kind, shape)
    model, read = decoder.model, [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        rows = []
        for prompt, steering in zip(PROMPTS, steerings, strict=True):
            row = decoder.take(prompt, steering=steering)
            decoder.read([row], [prompt[:2]])
            decoder.read([row], [prompt[2:-1]])
            row.token, row.end = prompt[-1], decoder.context
            rows.append(row)
        decoder.arrived()
        for token in NEW:
            logits = decoder.step()
            for row, ids, steering in zip(rows, read, steerings, strict=True):
                wanted = hooked(model, steering, ids)
                torch.testing.assert_close(logits[row.index], wanted, atol=2e-3, rtol=2e-3)
                row.token = token
                ids.append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_attends_in_its_window_with_heads_of_its_own(
    kind: str, decoder_of: Callable[[str, dict[str, Any]], Decoder]
) -> None:
    decoder = decoder_of(kind, {"windows": (3, 0)})
    emphasis = Emphasis(frozenset({2, 7}), 2.0, heads=frozenset({1, 3}))
    steering = Steering(emphasis=emphasis, heads={(1, 2): HeadChoice(1.5, Sparsemax())})
    ids = [*PROMPTS[0]]
    with torch.inference_mode():
        row = decoder.take(ids, steering=steering)
        decoder.read([row], [ids[:-1]])
        row.token, row.end = ids[-1], decoder.context
        decoder.arrived()
        for token in NEW:
            wanted = hooked(decoder.model, steering, ids)
            torch.testing.assert_close(decoder.step()[row.index], wanted, atol=2e-3, rtol=2e-3)
            row.token = token
            ids.append(token)


@pytest.mark.parametrize("shape", [{}, {"norm_place": "both"}, {"experts": 2}], ids=str)
def test_generate_takes_it_for_any_kind_of_block(shape: dict[str, Any], lively: Build) -> None:
    model, steering = lively(**shape), Steering(vectors(32, 1))
    ids = torch.tensor([PROMPTS[0]])
    new = generate(model, ids, max_new_tokens=5, temperature=0.0, steer=steering)[0].tolist()
    for n in range(len(PROMPTS[0]), len(new)):
        assert new[n] == int(hooked(model, steering, new[:n]).argmax())
    plain = generate(model, ids, max_new_tokens=5, temperature=0.0)[0].tolist()
    assert new != plain


def test_a_prefix_is_never_shared_between_two_steerings(lively: Build) -> None:
    """One decoder, the same prompt: each time the text of a decoder of its own."""
    model = lively(context=64)
    prompt = [n % 30 for n in range(1, 41)]
    first, other = Steering(vectors(32, 1)), Steering(vectors(32, 1, seed=1))
    emphasised = Steering(emphasis=Emphasis(frozenset({3}), 3.0))
    warm, sparse = (Steering(heads={(1, 2): h}) for h in (HeadChoice(0.2), HeadChoice(1, HARD)))
    decoder = Decoder(model, rows=2)
    alike = Steering({1: first.vectors[1].clone()})
    for steering in (first, None, other, first, emphasised, None, warm, sparse, warm, alike):
        settings = GenerationSettings(max_new_tokens=6, sampling=GREEDY, steering=steering)
        found = run(decoder, settings.request(prompt))
        assert found == run(settings.decoder(model), settings.request(prompt))
    assert decoder.reusable([*prompt, 1], alike) == len(prompt)
    assert decoder.reusable([*prompt, 1], emphasised) in (0, len(prompt))
    assert decoder.reusable([*prompt, 1], Steering(vectors(32, 2))) == 0
    assert alike.key == first.key
    assert len({one.key for one in (first, other, emphasised, warm, sparse, Steering())}) == 6


def run_tokens(decoder: Decoder, *requests: Request) -> list[list[Token]]:
    scheduler, new = Scheduler(decoder), [list[Token]() for _ in requests]

    def receiver(tokens: list[Token]) -> Callable[[Update], None]:
        return lambda update: tokens.extend(update.tokens)

    for request, tokens in zip(requests, new, strict=True):
        scheduler.submit(request, receiver(tokens))
    while scheduler.busy:
        scheduler.turn()
    return new


def run(decoder: Decoder, *requests: Request) -> list[list[int]]:
    return [[token.id for token in row] for row in run_tokens(decoder, *requests)]


def test_with_invariant_a_steered_request_changes_no_bit_of_31_others(lively: Build) -> None:
    model = lively(context=32)
    settings = GenerationSettings(max_new_tokens=4, sampling=GREEDY, invariant=True, logprobs=3)
    heads = {(1, 1): HeadChoice(choice=HARD), (2, 2): HeadChoice(0.5)}
    steering = Steering(vectors(32, 1), Emphasis(frozenset({1}), 2.0), heads=heads)
    requests = [settings.request([n % 31, n // 31, 9]) for n in range(32)]

    plain = run_tokens(settings.decoder(model, rows=32), *requests)
    steered = replace(requests[0], steering=steering)
    beside = run_tokens(settings.decoder(model, rows=32), steered, *requests[1:])
    assert beside[0] != plain[0]
    assert beside[1:] == plain[1:]


@pytest.mark.parametrize("kind", ["model", "cpu", "graph"])
def test_no_token_is_further_from_the_unsteered_law_than_its_budget(
    kind: str, decoder_of: Callable[[str, dict[str, Any]], Decoder]
) -> None:
    """Measured by hooks on the sequence that was drawn; the strength is far too large."""
    kappa, steering = 0.05, Steering(vectors(32, 1, size=8.0), budget=0.05)
    decoder = decoder_of(kind, {})
    settings = GenerationSettings(
        max_new_tokens=8, sampling=Sampling(temperature=1.0), seed=5, logprobs=20, steering=steering
    )
    other = replace(settings.request(PROMPTS[1]), steering=None)
    tokens, beside = run_tokens(decoder, settings.request(PROMPTS[0]), other)
    assert len(tokens) == len(beside) == 8
    ids = list(PROMPTS[0])
    for token in tokens:
        p0 = hooked(decoder.model, None, ids).double().log_softmax(-1)
        p1 = hooked(decoder.model, steering, ids).double().log_softmax(-1)
        assert float((p1.exp() * (p1 - p0)).sum()) > kappa
        law = within_budget(p1[None], p0[None], torch.tensor([kappa]))[0]
        assert float((law.exp() * (law - p0)).sum()) <= kappa + 1e-6
        for number, logprob in token.top:
            assert logprob == pytest.approx(float(law[number]), abs=5e-3)
        ids.append(token.id)
    assert all(row is None for row in decoder.rows)


@pytest.mark.parametrize("kind", ["graph", "fused"])
def test_a_recorded_step_draws_within_the_budgets_of_rows_that_join_move_and_slide(
    kind: str, lively: Build, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first token of a prompt, and a law with penalties, are computed by the host."""
    monkeypatch.setattr(steps, "why_not_fused", lambda _: None)
    model = lively(kv_heads=2, context=24)
    drawn, counts = Sampling(temperature=1.0, top_p=0.9), list[int]()
    steer = Steering(vectors(32, 1, size=8.0), budget=0.3)
    wide = Steering(vectors(32, 1, seed=2), budget=0.02)
    settings = [
        GenerationSettings(max_new_tokens=n, sampling=sampling, seed=seed, steering=steering)
        for seed, (n, sampling, steering) in enumerate(
            [
                (5, drawn, steer),
                (16, drawn, None),
                (16, drawn, wide),
                (12, GREEDY, steer),
                (6, replace(drawn, presence_penalty=1.0), wide),
                (40, drawn, steer),
            ]
        )
    ]
    requests = [
        replace(one.request(PROMPTS[n % 3]), past_context=True) for n, one in enumerate(settings)
    ]
    wanted = run(Decoder(model, rows=6, step="model"), *requests)
    record = fused_step.capture_graph if device == "cuda" else run_and_keep
    decoder = Decoder(model.to(device), rows=6, step=kind, record=record, steered=(1,))

    def within(steered: Tensor, unsteered: Tensor, kappa: Tensor) -> Tensor:
        counts.append(len(steered))
        return within_budget(steered, unsteered, kappa)

    monkeypatch.setattr(scheduler, "within_budget", within)
    assert run(decoder, *requests) == wanted
    prompts, again, penalised = 5, 2, 5  # again: half a context, when one is full
    assert sum(counts) == prompts + again + penalised


def test_laws_keep_their_budget_and_reach_it(device: str) -> None:
    """Laws of every sharpness; a hundred thousand pairs were tried once."""
    draw = torch.Generator().manual_seed(3)
    for size in (0.1, 1.0, 10.0, 60.0):
        p0, p1 = (size * torch.randn(2_000, 17, generator=draw) for _ in range(2))
        kappa = 10 ** (4 * torch.rand(2_000, generator=draw) - 3.5)
        law = within_budget(p1.to(device), p0.to(device), kappa.to(device)).cpu().double()
        p0, p1 = (z.double().log_softmax(-1) for z in (p0, p1))
        kl, whole = ((p.exp() * (p - p0)).sum(-1) for p in (law, p1))
        assert float((kl - kappa).max()) <= 1e-6
        inside = whole <= kappa
        torch.testing.assert_close(law[inside], p1[inside], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(kl[~inside], kappa[~inside].double(), atol=1e-6, rtol=1e-5)


def test_the_law_is_the_solution_of_the_convex_program() -> None:
    import cvxpy  # here, so that the other tests run on GPU machines without a solver

    draw = torch.Generator().manual_seed(4)
    for kappa in (0.02, 0.3):
        p0, p1 = (torch.randn(6, generator=draw).double().log_softmax(-1) for _ in range(2))
        law = within_budget(p1[None], p0[None], torch.tensor([kappa]))[0].exp().numpy()
        p = cvxpy.Variable(6)
        gain, prior = (p1 - p0).numpy(), p0.exp().numpy()
        divergence = cvxpy.sum(cvxpy.kl_div(p, prior))  # p log(p / prior) - p + prior
        limits = [cvxpy.sum(p) == 1, divergence <= kappa]
        cvxpy.Problem(cvxpy.Maximize(gain @ p), limits).solve(solver="CLARABEL")
        assert np.abs(p.value - law).max() < 1e-5


def test_a_word_that_neither_law_allows_stays_forbidden() -> None:
    z = torch.tensor([[1.0, 2.0, -torch.inf]])
    law = within_budget(z.flip(0) + torch.tensor([[2.0, 0.0, 0.0]]), z, torch.tensor([0.01]))
    assert law[0, 2] == -torch.inf
    assert bool(law[0, :2].isfinite().all())


def test_words_that_one_law_excludes_keep_the_budget() -> None:
    """What p1 excludes is lost where kappa pays for it; else the law is p0."""
    draw = torch.Generator().manual_seed(5)
    p0, p1 = (3 * torch.randn(4_000, 9, generator=draw).double() for _ in range(2))
    for z, share in ((p0, 0.1), (p1, 0.3)):
        z[torch.rand(z.shape, generator=draw) < share] = -torch.inf
    p0[:2, :5], p1[:2, 5:], p1[2] = -torch.inf, -torch.inf, p0[2]  # no word in common; equal
    some = p0.isfinite().any(-1) & p1.isfinite().any(-1)
    p0, p1 = (z[some].log_softmax(-1) for z in (p0, p1))
    kappa = 10 ** (4 * torch.rand(len(p0), generator=draw) - 3).double()
    law = within_budget(p1, p0, kappa)
    kl = torch.where(law == -torch.inf, 0.0, law.exp() * (law - p0)).sum(-1)
    assert float((kl - kappa).max()) <= 1e-9
    both = p0.isfinite() & p1.isfinite()
    least = -p0.where(both, -torch.inf).logsumexp(-1)
    over = least > kappa
    assert min(int(over.sum()), int((~over & (least > 0.01)).sum())) > 500
    torch.testing.assert_close(law[over], p0[over], atol=1e-12, rtol=0.0)
    assert bool((law[~over].isfinite() == both[~over]).all())
    # On the words that both have: p0 (p1 / p0)^lam, with lam = 1 or the whole budget spent.
    at_1 = p1.where(both, -torch.inf).log_softmax(-1)
    whole = torch.where(both, at_1.exp() * (at_1 - p0), 0.0).sum(-1)
    paid = ~over & (whole > kappa)
    torch.testing.assert_close(kl[paid], kappa[paid], atol=1e-7, rtol=1e-6)
    free = ~over & (whole <= kappa)
    torch.testing.assert_close(law[free], at_1[free], atol=1e-9, rtol=1e-9)
    for row in paid.nonzero().squeeze(-1)[:200].tolist():
        tilt, gain = ((x[row] - p0[row])[both[row]] for x in (law, p1))
        lam = (tilt - tilt[0]) / (gain - gain[0])  # NaN at the first word
        assert bool(((lam[1:] - lam[-1]).abs() < 1e-6).all())
        assert -1e-9 <= float(lam[-1]) <= 1.0


def test_words_are_found_with_all_bytes_of_their_characters() -> None:
    tokenizer = train_tokenizer(["war and peace " * 9], 270)
    end = tokenizer.end_id
    ids = [end, *tokenizer.encode("war"), end, *tokenizer.encode(" 🎉é peace"), end]
    texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]  # of the first n tokens
    assert texts[-1] == "war 🎉é peace"
    for words in ("🎉", "é", "🎉é", "r", "ar 🎉", "peace", " ", "e"):
        found = Emphasis(texts=(words,)).found_in(tokenizer, ids).tokens
        expected = set[int]()
        for start in (m.start() for m in re.finditer(re.escape(words), texts[-1])):
            whole = [len(text.rstrip("\ufffd")) for text in texts]  # characters that are complete
            first = next(n for n, w in enumerate(whole) if w > start) - 1
            while whole[first] == start and texts[first].endswith("\ufffd"):
                first -= 1  # bytes of the same character
            last = next(n for n, w in enumerate(whole) if w >= start + len(words)) - 1
            expected |= set(range(first, last + 1))
        assert found == expected, words
    assert not found & {0, len(ids) - 1}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"vectors": {1: torch.zeros(5)}}, r"\(5,\) after layer 1 should be of \(32,\)"),
    "layer": ({"vectors": {9: torch.zeros(32)}}, "after layer 9 should be .* after layer 1 to 2"),
    "nan": ({"vectors": {1: torch.full((32,), torch.nan)}}, "layer 1 holds nan or inf"),
    "budget": ({"budget": 0.0}, "budget of 0 nats per token should be above 0"),
    "head": ({"emphasis": Emphasis(heads=frozenset({7}))}, "no head 7; the model has 1 to 4"),
    "bias": ({"emphasis": Emphasis(bias=float("nan"))}, "bias of nan should be -20 to 20"),
    "beta": ({"heads": {(1, 1): HeadChoice(-1.0)}}, "beta=-1 should be 0 to 100"),
    "no head": ({"heads": {(2, 5): HeadChoice()}}, "no head 2.5; the model has heads 1 to 4"),
    "tensor": ({"heads": {(1, 1): HeadChoice(1.0, Softmax(torch.ones(4, 1, 1)))}}, "has tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(case: str, lively: Build) -> None:
    keywords, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        generate(lively(), torch.tensor([[1, 2]]), max_new_tokens=2, steer=Steering(**keywords))


def test_a_budget_needs_a_second_row(lively: Build) -> None:
    request = GenerationSettings(max_new_tokens=2, steering=Steering(budget=0.1)).request([1])
    with pytest.raises(ValueError, match="takes a second row"):
        run(Decoder(lively(), rows=1), request)
    recorded = Decoder(lively(), rows=2, step="graph", record=run_and_keep)
    with pytest.raises(ValueError, match="adds nothing after layer 1"):
        run(recorded, replace(request, steering=Steering(vectors(32, 1))))


@pytest.mark.parametrize("turns", range(7))
def test_a_cancelled_request_with_a_budget_frees_both_rows(
    turns: int, lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its two prompts are read, and while it decodes."""
    monkeypatch.setattr(scheduler, "READ_SECONDS", 0.0)  # a chunk per turn
    decoder = Decoder(lively(context=64), rows=2, chunk=4)
    queue, ends = Scheduler(decoder), list[Any]()
    settings = GenerationSettings(max_new_tokens=40, steering=Steering(budget=0.1))
    request = settings.request([n % 30 for n in range(10)])
    job = queue.submit(request, lambda update: ends.append(update.finish))
    for _ in range(turns):
        queue.turn()
    job.cancelled = True
    while queue.busy:
        queue.turn()
    assert ends[-1] == "cancelled"
    assert decoder.free == 2


@pytest.mark.parametrize("step", ["model", "cpu"])
def test_prompts_with_budgets_are_read_together(
    step: str, lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their unsteered rows in one pass, they in another; each draws what it draws alone."""
    model = lively(kv_heads=2, context=64)
    steer = [Steering(vectors(32, 1, seed=n, size=8.0), budget=0.1 + 0.1 * n) for n in range(3)]
    requests = [
        GenerationSettings(max_new_tokens=9, seed=n, steering=one).request([*range(n, n + 6)])
        for n, one in enumerate(steer)
    ]
    alone = [run(Decoder(model, rows=2, step=step), request)[0] for request in requests]
    decoder, reads = Decoder(model, rows=6, step=step), list[int]()
    read = decoder.read

    def counted(rows: Any, parts: Any, **options: Any) -> Tensor:
        reads.append(len(rows))
        return read(rows, parts, **options)

    monkeypatch.setattr(decoder, "read", counted)
    assert run(decoder, *requests) == alone
    assert reads == [3, 3]
    assert decoder.free == 6


@pytest.mark.parametrize("cancelled", [{0}, {1}, {0, 2}, {0, 1, 2}])
@pytest.mark.parametrize("turns", range(4))
def test_some_of_the_prompts_with_budgets_are_cancelled(
    turns: int, cancelled: set[int], lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others draw what they draw alone, and all rows are freed."""
    monkeypatch.setattr(scheduler, "READ_SECONDS", 0.0)  # a chunk per turn
    model = lively(kv_heads=2, context=64)
    steer = Steering(vectors(32, 1), budget=0.1)
    settings = GenerationSettings(max_new_tokens=7, seed=3, steering=steer)
    prompts = [list(range(n, n + 5 + 4 * (n == 1))) for n in range(3)]  # one is longer
    alone = [run(Decoder(model, rows=2), settings.request(prompt))[0] for prompt in prompts]
    decoder = Decoder(model, rows=6, chunk=12)
    queue, ids = Scheduler(decoder), [list[int]() for _ in prompts]
    jobs = [
        queue.submit(
            settings.request(prompt),
            lambda update, own=own: own.extend(token.id for token in update.tokens),
        )
        for prompt, own in zip(prompts, ids, strict=True)
    ]
    for _ in range(turns):
        queue.turn()
    for number in cancelled:
        jobs[number].cancelled = True
    while queue.busy:
        queue.turn()
    assert [ids[n] for n in range(3) if n not in cancelled] == [
        alone[n] for n in range(3) if n not in cancelled
    ]
    assert decoder.free == 6
