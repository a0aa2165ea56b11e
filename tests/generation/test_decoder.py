"""fenchel/generation/decoder.py: sequences that join and leave change no other's logits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.generation import Decoder, KVCache, fused_step, steps
from fenchel.generation.cpu_step import why_not_packed
from fenchel.generation.decoder import LEAST_COPY, Row
from fenchel.kernels import decode_attention
from fenchel.model import Transformer
from tests.generation.conftest import run_and_keep

Build = Callable[..., Transformer]
CONTEXT = 24
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"kv_heads": 2},
    "windows": {"windows": (5, 0), "kv_heads": 1},
    "learned": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    "alibi": {"positions": "alibi"},
    "alibi windows": {"positions": "alibi", "windows": (4, 0)},
    "entmax": {"choice": "entmax", "windows": (0, 6)},
    "alpha per head": {"choice": "entmax", "entmax_alpha_learned": True, "temperature": "log"},
    "buckets": {"positions": "buckets", "buckets": 8, "bucket_distance": 10},
    "sinks": {"sinks": True, "qk_norm": True},
    "gates": {"gate": "head", "windows": (4, 0)},
    "sigmoid": {"choice": "sigmoid", "log_odds": -2.0},
    "delta": {"delta_layers": (1, 0), "delta_key_width": 6, "delta_value_width": 5},
    "temperature": {"temperature": "log", "sinks": True, "sink_score": "token"},
    "shared keys": {"layers": 4, "windows": (4, 0), "shared_kv_layers": 2, "full_head_size": 12},
}
Event = tuple[str, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, CONTEXT - 1)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("return"), st.integers(1, CONTEXT - 1)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=14,
)


@pytest.fixture(autouse=True)
def narrow_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows whose slots come round within the context."""
    monkeypatch.setattr("fenchel.generation.decoder.SLACK", 2)
    monkeypatch.setattr("fenchel.generation.decoder.LEAST_COPY", 3)


def ids_of(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def join(decoder: Decoder, *prompts: list[int], chunk: int = 5) -> list[Row]:
    """Rows whose next token is the last of their prompt."""
    rows = []
    for prompt in prompts:
        row = decoder.take(prompt)
        rest = prompt[row.length : -1]
        while rest:
            decoder.read([row], [rest[:chunk]])
            rest = rest[chunk:]
        row.token, row.end = prompt[-1], decoder.context
        rows.append(row)
    decoder.arrived()
    return rows


def play(decoder: Decoder, events: list[Event]) -> Iterator[tuple[list[int], Tensor]]:
    """The ids that a sequence has read and the logits after them, at every step of each."""
    V = decoder.model.config.vocabulary
    read: dict[Row, list[int]] = {}
    left: list[list[int]] = []
    for number, (what, size) in enumerate(events):
        if what in ("join", "return") and decoder.free:
            prompt = ids_of(50 * number, size + 1, V)
            if what == "return" and left:  # a beginning that a row may still have
                prompt = [*left[size % len(left)][:size], 1]
            read |= zip(join(decoder, prompt), [prompt], strict=True)
        elif what == "leave" and read:
            row = list(read)[size % len(read)]
            left.append(read.pop(row))
            decoder.leave(row, left[-1])
        else:
            for step in range(size if read else 0):
                for row in [row for row in read if row.length == CONTEXT]:
                    decoder.leave(row, read.pop(row))
                if not read:
                    break
                logits = decoder.step()
                for i, (row, ids) in enumerate(read.items()):
                    yield ids, logits[row.index]
                    row.token = ids_of(1000 * number + 50 * step + i, 1, V)[0]
                    ids.append(row.token)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=12)
@given(events=EVENTS, invariant=st.booleans())
def test_the_logits_of_a_sequence_are_those_of_the_model_on_it_alone(
    shape: str, events: list[Event], invariant: bool, lively: Build
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    with torch.inference_mode():
        decoder = Decoder(model, rows=3, invariant=invariant and shape != "delta")
        for ids, logits in play(decoder, events):
            wanted = model(torch.tensor([ids]))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("step", ["packed", "cpu", "model"])
@pytest.mark.parametrize("shape", ["grouped", "windows", "learned"])
@settings(max_examples=6)
@given(events=EVENTS, invariant=st.booleans())
def test_every_kind_of_step_gives_those_logits(
    shape: str, step: str, events: list[Event], invariant: bool, lively: Build
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT)
    if step == "packed" and why_not_packed(model) is not None:
        pytest.skip("this torch has no oneDNN")
    with torch.inference_mode():
        decoder = Decoder(model, rows=3, invariant=invariant, step=step)
        assert decoder.kind.name == step
        for ids, logits in play(decoder, events):
            wanted = model(torch.tensor([ids]))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("step", "shape"), [("model", "windows"), ("cpu", "windows"), ("model", "delta")]
)
def test_prompts_of_unequal_lengths_are_read_together(step: str, shape: str, lively: Build) -> None:
    """The model pads them on the right; without modules they are one after another."""
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    prompts = [ids_of(n, n, 31) for n in (12, 3, 20)]
    with torch.inference_mode():
        decoder = Decoder(model, rows=4, step=step, chunk=64)
        rows = [decoder.take(prompt) for prompt in prompts]
        assert decoder.fits([(0, 12), (0, 3), (0, 20)])
        logits = decoder.logits(decoder.read(rows, prompts))
        for prompt, row, z in zip(prompts, rows, logits, strict=True):
            wanted = model(torch.tensor([prompt]))[0, -1]
            torch.testing.assert_close(z, wanted, atol=1e-9, rtol=1e-9)
            row.token = 7
        logits = decoder.step()
        for prompt, row in zip(prompts, rows, strict=True):
            wanted = model(torch.tensor([[*prompt, 7]]))[0, -1]
            torch.testing.assert_close(logits[row.index], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("step", ["model", "cpu", "graph"])
def test_sequences_move_as_far_as_prompts_that_are_being_read_let_them(
    step: str, lively: Build
) -> None:
    """One of the last rows takes the only free one below; the other stays where it is."""
    model, prompts = lively(context=CONTEXT), [ids_of(n, n, 31) for n in (4, 3, 9, 6)]
    with torch.inference_mode():
        decoder = Decoder(model, rows=4, step=step, record=run_and_keep)
        rows = join(decoder, *prompts)
        rows[0].token = None  # as while it is read
        decoder.leave(rows[1])
        logits = decoder.step()
        assert [row.index for row in rows[2:]] == [2, 1]
        for prompt, row in zip(prompts[2:], rows[2:], strict=True):
            wanted = model(torch.tensor([prompt]))[0, -1]
            torch.testing.assert_close(logits[row.index], wanted, atol=1e-3, rtol=1e-3)


def test_what_is_read_together_is_one_chunk(lively: Build) -> None:
    without_padding = Decoder(lively(), rows=2, step="cpu", chunk=6)
    padded = Decoder(lively(), rows=2, step="model", chunk=6)
    assert without_padding.fits([(0, 5), (3, 1)])
    assert not without_padding.fits([(0, 5), (3, 2)])
    assert padded.fits([(0, 3), (0, 1)])
    assert not padded.fits([(0, 5), (0, 1)])
    assert not padded.fits([(0, 3), (3, 1)])


def require_recorded_steps(
    model: Transformer, events: list[Event], close: float, *, step: str, cache: Any = "model"
) -> None:
    """Compare recorded steps with the model; without a GPU they are the steps themselves."""
    record = fused_step.capture_graph if model.lm_head_weight.is_cuda else run_and_keep
    with torch.inference_mode():
        decoder = Decoder(model, rows=3, step=step, record=record, cache=cache)
        for ids, logits in play(decoder, events):
            wanted = model(torch.tensor([ids], device=logits.device))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=close, rtol=close)


@pytest.mark.parametrize("shape", ["grouped", "windows", "learned", "sinks", "gates"])
@settings(max_examples=6)
@given(events=EVENTS)
def test_a_recorded_model_has_a_number_per_row(
    shape: str, events: list[Event], lively: Build
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    require_recorded_steps(model, events, 1e-9, step="graph")


@pytest.fixture
def fused_anywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are interpreted where there is no GPU."""
    if device != "cuda":
        monkeypatch.setattr(steps, "why_not_fused", lambda _: None)


@pytest.mark.usefixtures("fused_anywhere")
@pytest.mark.parametrize("short", [512, 12], ids=["short context", "long context"])
@pytest.mark.parametrize("shape", ["windows", "learned"])
def test_fused_steps_have_a_number_per_row(
    shape: str, short: int, device: str, lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a long context short sequences, until the twelfth token, have a recording of theirs."""
    monkeypatch.setattr(decode_attention, "SHORT", short)
    events = [("join", 9), ("step", 4), ("join", 4), ("leave", 0), ("return", 9), ("step", 2)]
    model = lively(**SHAPES[shape], context=CONTEXT).to(device)
    require_recorded_steps(model, events, 1e-4, step="fused")


@pytest.mark.usefixtures("fused_anywhere")
def test_fused_steps_read_an_int8_cache_of_unequal_rows(device: str, lively: Build) -> None:
    """To within the rounding of int8, in windows too."""
    events = [("join", 9), ("join", 4), ("step", 3)]
    model = lively(**SHAPES["windows"], context=CONTEXT).to(device)
    require_recorded_steps(model, events, 0.2, step="fused", cache="int8")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("float16", "grouped"), ("int8", "grouped"), ("int8", "windows"), ("int8", "alibi")],
)
@settings(max_examples=10)
@given(events=EVENTS)
def test_a_smaller_cache_holds_what_a_cache_of_one_row_holds(
    kind: Any, shape: str, events: list[Event], lively: Build
) -> None:
    """Keys are rounded once: the logits are those of the model with a cache of that kind."""
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    with torch.inference_mode():
        decoder = Decoder(model, rows=3, cache=kind)
        for ids, logits in play(decoder, [one for one in events if one[0] != "return"]):
            cache = KVCache(
                model.config, batch=1, positions=CONTEXT, dtype=torch.float64, kind=kind
            )
            # More new keys than a window has slots would be read before they are rounded.
            for token in ids:
                wanted = model(torch.tensor([[token]]), cache=cache)[0, -1]
            torch.testing.assert_close(logits, wanted, atol=0.2, rtol=0.2)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        *((shape, "model", torch.float32) for shape in SHAPES if shape != "delta"),
        ("windows", "int8", torch.float32),
        ("windows", "model", torch.bfloat16),
    ],
)
@settings(max_examples=6)
@given(
    others=st.lists(st.tuples(st.booleans(), st.integers(1, CONTEXT - 1)), max_size=8),
    length=st.integers(2, 12),
    early=st.booleans(),
)
def test_with_invariant_the_other_rows_change_no_bit(
    shape: str,
    kind: Any,
    dtype: torch.dtype,
    others: list[tuple[bool, int]],
    length: int,
    early: bool,
    lively: Build,
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT).to(dtype)
    ids = ids_of(7, CONTEXT, model.config.vocabulary)

    def run(around: list[tuple[bool, int]]) -> Tensor:
        decoder = Decoder(model, rows=5, invariant=True, cache=kind)
        beside: list[Row] = []
        if early and around:  # the sequence has another row then
            beside += join(decoder, [*ids_of(9, around[0][1], 9), 1])
            decoder.step()
        (row,) = join(decoder, ids[:length])
        logits = []
        for at in range(length, CONTEXT):
            for other in [other for other in beside if other.length == CONTEXT]:
                beside.remove(other)
                decoder.leave(other)
            logits.append(decoder.step()[row.index].clone())
            row.token = ids[at]
            if around[at - length :]:
                leaves, size = around[at - length]
                if leaves and beside:
                    decoder.leave(beside.pop())
                elif decoder.free:
                    beside += join(decoder, ids_of(at, size + 1, model.config.vocabulary))
        return torch.stack(logits)

    with torch.inference_mode():
        assert torch.equal(run(others), run([]))


def test_memory_stays_as_it_was_allocated(lively: Build) -> None:
    model = lively(context=CONTEXT)
    with torch.inference_mode():
        decoder = Decoder(model, rows=3)
        addresses = [x.data_ptr() for x in decoder.cache._buffers()]
        for _ in play(decoder, [("join", 20), ("step", 12), ("join", 3), ("step", 12)] * 6):
            pass
    assert [x.data_ptr() for x in decoder.cache._buffers()] == addresses
    config = model.config
    assert decoder.cache.bytes == 2 * config.layers * 3 * config.width * CONTEXT * 4


@torch.inference_mode()
def test_a_prompt_takes_the_row_that_shares_the_longest_beginning(lively: Build) -> None:
    decoder = Decoder(lively(context=CONTEXT), rows=3)
    first, second = ids_of(1, 12, 31), ids_of(2, 12, 31)
    rows = join(decoder, first, second)
    for row, ids in zip(rows, (first, second), strict=True):
        decoder.leave(row, ids)
    assert decoder.take([*second[:8], 30, 29]).index == rows[1].index
    again = decoder.take([*first, 5])
    assert again.index == rows[0].index
    assert again.ids == first[:-1]  # the last was never read
    whole = decoder.take(first)  # from the row in use, and never all of a prompt
    assert whole.ids == first[:-1]
    assert whole.index not in (rows[0].index, rows[1].index)
    assert LEAST_COPY > 3  # the usual one; a shorter beginning is quicker to read than to copy


@torch.inference_mode()
def test_a_beginning_is_not_used_again_where_a_window_dropped_it(lively: Build) -> None:
    decoder, ids = Decoder(lively(context=CONTEXT, windows=(3, 0)), rows=1), ids_of(1, 20, 31)
    (row,) = join(decoder, ids)
    decoder.leave(row, ids)
    assert decoder.reusable([*ids[:18], 0]) == 18
    assert decoder.reusable([*ids[:10], 0]) == 0


@torch.inference_mode()
def test_with_invariant_without_prefixes_and_after_damage_nothing_is_used_again(
    lively: Build,
) -> None:
    ids, model = ids_of(1, 12, 31), lively(context=CONTEXT)
    for decoder, damaged in (
        (Decoder(model, invariant=True), False),
        (Decoder(model, prefixes=False), False),
        (Decoder(model), True),
    ):
        (row,) = join(decoder, ids)
        decoder.leave(row, ids, damaged=damaged)
        assert decoder.reusable(ids) == 0
    assert not any(bool(x[0].any()) for x in decoder.cache._buffers())


@pytest.mark.parametrize(
    ("step", "settings", "match"),
    [
        ("graph", {}, "needs a model on a GPU"),
        ("fused", {}, "needs a model on a GPU"),
        ("tape", {}, "one of auto, fused, graph, packed, cpu, model"),
        ("cpu", {"softcap": 3.0}, "softcap is 3.0"),
        ("packed", {"choice": "entmax"}, "choice is 'entmax'"),
        ("cpu", {"choice": "sigmoid"}, "choice is 'sigmoid'"),
        ("cpu", SHAPES["delta"], r"delta_layers is \(1, 0\)"),
    ],
)
def test_a_kind_that_cannot_serve_gets_one_sentence(
    step: str, settings: dict[str, Any], match: str, lively: Build
) -> None:
    with pytest.raises(ValueError, match=match):
        Decoder(lively(**settings), step=step)


def test_what_cannot_be_recorded_is_named(lively: Build) -> None:
    def why_not(name: str, cache: Any = "model", **shape: Any) -> str:
        call = steps.DecodeCall(lively(**shape), cache, record=run_and_keep)
        (kind,) = [kind for kind in steps.STEPS if kind.name == name]
        return str(kind.why_not(call))

    assert "Entmax" in why_not("graph", choice="entmax")
    assert "Sparsemax" in why_not("graph", layer_choices=("softmax", "sparsemax"))
    assert "experts" in why_not("graph", experts=2)
    assert why_not("graph", windows=(3,)) == "None"
    assert "only a fused step" in why_not("graph", cache="int8")
    assert "not in float16" in why_not("fused", cache="float16")
    assert "on cpu" in why_not("fused")
    assert "states of its gated DeltaNet" in why_not("graph", delta_layers=(1, 0))
    for positions in ("alibi", "buckets"):
        assert "bias of its positions" in why_not("graph", positions=positions)
    with pytest.raises(ValueError, match="experts compute"):
        Decoder(lively(experts=2), invariant=True)


def test_recording_is_chosen_on_a_gpu_for_enough_tokens(lively: Build, device: str) -> None:
    """And unless a hook would miss the replays."""
    model = lively().to(device)

    def chosen(**facts: Any) -> bool:
        return steps.step_kind(steps.DecodeCall(model, record=run_and_keep, **facts)).recorded

    assert chosen(tokens=steps.RECORDED_TOKENS) == chosen() == (device == "cuda")
    assert not chosen(tokens=steps.RECORDED_TOKENS - 1)
    assert not chosen(invariant=True)
    model.blocks[0].register_forward_hook(lambda *_: None)
    assert not chosen()
