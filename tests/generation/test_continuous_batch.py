"""fenchel/generation/continuous_batch.py: who joins and who leaves changes no other's logits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.generation.continuous_batch import ContinuousBatch, Prefill, Row
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


def play(batch: ContinuousBatch, events: list[Event]) -> Iterator[tuple[list[int], Tensor]]:
    """The ids that a sequence has read and the logits after them, at every step of each."""
    V, chunk = batch.model.config.vocabulary, 5
    read: dict[Row, list[int]] = {}
    for number, (what, size) in enumerate(events):
        if what == "join" and batch.free:
            sizes = [size, 1 + size // 2][: batch.free]
            prompts = [ids_of(50 * number + i, n + 1, V) for i, n in enumerate(sizes)]
            prefill = Prefill(
                batch.model, [prompt[:-1] for prompt in prompts], cache=batch.kind, chunk=chunk
            )
            while not prefill.done:
                prefill.read()
            for i, prompt in enumerate(prompts):
                read[batch.join(prefill, i, prompt[-1])] = prompt
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
@settings(max_examples=12, deadline=None)
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
