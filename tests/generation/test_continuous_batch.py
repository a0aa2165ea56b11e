"""fenchel/generation/continuous_batch.py: who joins and who leaves changes no other's logits."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.generation import KVCache, cuda_graph
from fenchel.generation.continuous_batch import ContinuousBatch, NewRow, PackedPrefill, Row
from fenchel.kernels import decode_attention
from fenchel.model import Transformer

Build = Callable[..., Transformer]
CONTEXT = 24
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"kv_heads": 2},
    "windows": {"windows": (5, 0), "kv_heads": 1},
    "learned": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    "alibi": {"positions": "alibi"},
    "alibi windows": {"positions": "alibi", "windows": (4, 0)},
    "entmax": {"choice": "entmax", "windows": (0, 6)},
    "buckets": {"positions": "buckets", "buckets": 8, "bucket_distance": 10},
    "sinks": {"sinks": True, "qk_norm": True},
}
Event = tuple[str, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, CONTEXT - 1)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=14,
)


def ids_of(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def join(batch: ContinuousBatch, *prompts: list[int]) -> list[Row]:
    """Rows whose next token is the last of their prompt."""
    before = [prompt[:-1] for prompt in prompts]
    batch.prefill_chunk = 5
    prefill = batch.prefill(before)
    while not prefill.done:
        prefill.read()
    return batch.join(prefill, [NewRow(i, prompt[-1]) for i, prompt in enumerate(prompts)])


def play(batch: ContinuousBatch, events: list[Event]) -> Iterator[tuple[list[int], Tensor]]:
    """The ids that a sequence has read and the logits after them, at every step of each."""
    V = batch.model.config.vocabulary
    read: dict[Row, list[int]] = {}
    for number, (what, size) in enumerate(events):
        if what == "join" and batch.free:
            sizes = [size, 1 + size // 2][: batch.free]
            prompts = [ids_of(50 * number + i, n + 1, V) for i, n in enumerate(sizes)]
            read |= zip(join(batch, *prompts), prompts, strict=True)
        elif what == "leave" and read:
            row = list(read)[size % len(read)]
            del read[row]
            batch.leave(row)
        else:
            for step in range(size if read else 0):
                for row in [row for row in read if row.length == CONTEXT]:
                    del read[row]
                    batch.leave(row)
                if not read:
                    break
                logits = batch.step()
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
        batch = ContinuousBatch(model, rows=3, invariant=invariant)
        for ids, logits in play(batch, events):
            wanted = model(torch.tensor([ids]))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("shape", ["grouped", "windows", "learned"])
@settings(max_examples=12)
@given(events=EVENTS, invariant=st.booleans())
def test_packed_weights_and_prompts_give_those_logits_too(
    shape: str, events: list[Event], invariant: bool, lively: Build
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT)
    with torch.inference_mode():
        batch = ContinuousBatch(model, rows=3, invariant=invariant)
        if not isinstance(batch.prefill([[1]]), PackedPrefill):
            pytest.skip("this torch has no oneDNN")
        for ids, logits in play(batch, events):
            wanted = model(torch.tensor([ids]))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)


def test_packed_prompts_compute_their_tokens_and_padded_ones_the_longest(lively: Build) -> None:
    batch, padded = ContinuousBatch(lively(), rows=2), ContinuousBatch(lively().double(), rows=2)
    with torch.inference_mode():
        assert padded.prefill([[1, 2, 3, 4, 5], [6]]).read() == 10
        if isinstance(batch.prefill([[1]]), PackedPrefill):
            assert batch.prefill([[1, 2, 3, 4, 5], [6]]).read() == 6
            batch.prefill_chunk = padded.prefill_chunk = 6
            assert batch.fits([5, 1])
    assert not padded.fits([5, 1])


def test_the_last_block_computes_what_is_needed_or_with_invariant_all(lively: Build) -> None:
    """Whether another request scores the same prompt must not change the shapes of its products."""
    with torch.inference_mode():
        for invariant, scored, tokens in ((False, False, 1), (False, True, 4), (True, False, 4)):
            batch = ContinuousBatch(lively(), rows=2, invariant=invariant)
            prefill = batch.prefill([[1, 2, 3, 4]], scored=scored)
            prefill.read()
            if isinstance(prefill, PackedPrefill):
                assert len(prefill.hidden_TM) == tokens
            wanted = batch.model(torch.tensor([[1, 2, 3, 4]]), last=True)[0]
            logits = batch.logits(prefill.last_hidden_PM)
            torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)


def require_recorded_steps(
    model: Transformer, events: list[Event], close: float, *, fused: bool
) -> None:
    """Compare recorded steps with the model; without a GPU they are the steps themselves."""
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        if not model.lm_head_weight.is_cuda:
            patch.setitem(cuda_graph.RECORDERS, "graph", lambda step, _: step)
        if fused:
            patch.setattr(cuda_graph, "why_not_fused", lambda _: None)
        batch = ContinuousBatch(model, rows=3, record="graph")
        assert batch.recorded is not None
        for ids, logits in play(batch, events):
            wanted = model(torch.tensor([ids], device=logits.device))[0, -1]
            torch.testing.assert_close(logits, wanted, atol=close, rtol=close)


@pytest.mark.parametrize("shape", ["grouped", "windows", "learned", "sinks"])
@settings(max_examples=6)
@given(events=EVENTS)
def test_recorded_steps_have_a_number_per_row(
    shape: str, events: list[Event], lively: Build
) -> None:
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    require_recorded_steps(model, events, 1e-9, fused=False)


@pytest.mark.parametrize("short", [512, 12], ids=["short context", "long context"])
@pytest.mark.parametrize("shape", ["windows", "learned"])
def test_fused_steps_have_a_number_per_row(
    shape: str, short: int, device: str, lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a long context short sequences, until the twelfth token, have a recording of theirs."""
    monkeypatch.setattr(decode_attention, "SHORT", short)
    events = [("join", 9), ("step", 4), ("leave", 1), ("step", 1), ("join", 4), ("step", 2)]
    model = lively(**SHAPES[shape], context=CONTEXT).to(device)
    require_recorded_steps(model, events, 1e-4, fused=True)


def test_few_rows_of_a_long_context_have_a_recording_for_short_sequences(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cuda_graph.RECORDERS, "graph", lambda step, _: lambda: step.args)
    monkeypatch.setattr(cuda_graph, "why_not_fused", lambda _: None)
    monkeypatch.setattr(decode_attention, "SHORT", 8)
    rows = cuda_graph.RecordedRows(lively(kv_heads=2, context=CONTEXT), (1, 8, 16))
    rows.record()
    found = {
        (B, n): rows.step(B, longest=n)[1].tokens  # type: ignore[union-attr]
        for B in (1, 8, 16)
        for n in (1, 8, 9, CONTEXT)
    }
    assert {n for (B, n), tokens in found.items() if tokens == 8} == {1, 8}
    assert {B for (B, n), tokens in found.items() if tokens == 8} == {1, 8}
    assert rows.step(1)[1].tokens == CONTEXT  # type: ignore[union-attr]
    sparse = cuda_graph.RecordedRows(lively(choice="entmax", context=CONTEXT), (1,))
    sparse.record()
    assert list(sparse._steps) == [(1, CONTEXT)]  # its kernels are the same for any length


def test_the_memory_of_a_recorded_step_lives_as_long_as_the_recording(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph does not keep the memory it replays in, and neither does this recorder."""
    made: list[weakref.ref[cuda_graph.FusedStep]] = []

    def record(step: Any, _: object) -> Callable[[], None]:
        made.append(weakref.ref(step.args[1]))
        return lambda: None

    monkeypatch.setitem(cuda_graph.RECORDERS, "graph", record)
    monkeypatch.setattr(cuda_graph, "why_not_fused", lambda _: None)
    rows = cuda_graph.RecordedRows(lively(), (1, 2, 3))
    rows.record()
    gc.collect()
    assert len(made) == len(rows._steps)
    assert all(reference() is not None for reference in made)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("float16", "grouped"), ("int8", "grouped"), ("int8", "windows"), ("int8", "alibi")],
)
@settings(max_examples=10)
@given(events=EVENTS)
def test_a_smaller_cache_holds_what_its_own_cache_holds(
    kind: Any, shape: str, events: list[Event], lively: Build
) -> None:
    """Keys are rounded once: the logits are those of the model with a cache of that kind."""
    model = lively(**SHAPES[shape], context=CONTEXT).double()
    with torch.inference_mode():
        batch = ContinuousBatch(model, rows=3, cache=kind)
        for ids, logits in play(batch, events):
            cache = KVCache(
                model.config, batch=1, positions=CONTEXT, dtype=torch.float64, kind=kind
            )
            # More new keys than a window stores would be read before they are rounded.
            for part in torch.tensor([ids]).split(5, dim=1):
                wanted = model(part, cache=cache)[0, -1]
            torch.testing.assert_close(logits, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        *((shape, "model", torch.float32) for shape in SHAPES),
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
        batch = ContinuousBatch(model, rows=5, invariant=True, cache=kind)
        beside: list[Row] = []
        if early and around:  # the row of the sequence and its first column are others then
            beside += join(batch, [*ids_of(9, around[0][1], 9), 1])
            batch.step()
        (row,) = join(batch, ids[:length])
        logits = []
        for at in range(length, CONTEXT):
            for other in [other for other in beside if other.length == CONTEXT]:
                beside.remove(other)
                batch.leave(other)
            logits.append(batch.step()[row.index].clone())
            row.token = ids[at]
            if around[at - length :]:
                leaves, size = around[at - length]
                if leaves and beside:
                    batch.leave(beside.pop())
                elif batch.free:
                    beside += join(batch, ids_of(at, size + 1, model.config.vocabulary))
        return torch.stack(logits)

    with torch.inference_mode():
        assert torch.equal(run(others), run([]))


def test_memory_is_that_of_the_rows_and_a_quarter(lively: Build) -> None:
    """However many sequences come and go, the cache stays as it was allocated."""
    model = lively(context=CONTEXT)
    with torch.inference_mode():
        batch = ContinuousBatch(model, rows=3)
        tensors = [x for layer in batch.cache.layers for s in layer.stores for x in s.buffers()]
        addresses = [x.data_ptr() for x in tensors]
        for _ in play(batch, [("join", 20), ("step", 12), ("join", 3), ("step", 12)] * 6):
            pass
        after = [x for layer in batch.cache.layers for s in layer.stores for x in s.buffers()]
    assert [x.data_ptr() for x in after] == addresses
    columns = CONTEXT - 1 + 16  # the least slack
    config = model.config
    assert batch.cache.bytes == 2 * config.layers * 3 * config.width * columns * 4
