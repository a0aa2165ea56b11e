"""The order in which prompts are read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fenchel.generation import Decoder, GenerationSettings, Sampling, Scheduler, scheduler
from fenchel.generation.scheduler import Job
from fenchel.model import ModelConfig, Transformer

Build = Callable[..., Transformer]
CHUNK, GREEDY = 4, GenerationSettings(max_new_tokens=3, sampling=Sampling(temperature=0.0))


@pytest.fixture(autouse=True)
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk per turn."""
    monkeypatch.setattr(scheduler, "READ_SECONDS", 0.0)


def small(rows: int) -> Scheduler:
    """A scheduler of a small model that reads chunks of 4 tokens."""
    model = Transformer(ModelConfig(vocabulary=50, context=64, width=16, layers=1, heads=2))
    return Scheduler(Decoder(model, rows=rows, chunk=CHUNK))


def submit(to: Scheduler, length: int, first: int = 1, seed: int = 0, new: int = 3) -> Job:
    """A request with a prompt of some tokens."""
    prompt = [(first + i) % 50 for i in range(length)]
    request = replace(GREEDY.request(prompt), seed=seed, max_new_tokens=new)
    return to.submit(request, lambda _: None)


def turns_until_first_token(to: Scheduler, job: Job) -> int:
    """How many turns a request waits for its first token."""
    turns = 0
    while job.first_token is None:
        to.turn()
        turns += 1
    return turns


@pytest.mark.parametrize("long", [1, 2, 5])
def test_a_short_prompt_waits_for_one_chunk_of_long_ones(long: int) -> None:
    served = small(rows=8)
    for first in range(long):
        submit(served, 60, first)
    served.turn()
    assert turns_until_first_token(served, submit(served, 3)) <= 2


def test_a_sequence_waits_for_one_chunk_between_two_tokens() -> None:
    served = small(rows=4)
    submit(served, 3)
    served.turn()
    submit(served, 60)
    facts = served.turn()
    assert (facts.prompt_tokens, facts.active) == (CHUNK, 1)


def test_a_long_prompt_has_every_other_chunk_however_many_short_ones_arrive() -> None:
    served = small(rows=16)
    long = submit(served, 40)
    for number in range(2 * 40 // CHUNK + 1):
        submit(served, 3, first=number)
        served.turn()
    assert long.first_token is not None


def test_the_last_free_row_is_for_the_request_that_waits_longest() -> None:
    served = small(rows=3)
    submit(served, 40)
    served.turn()
    second, short = submit(served, 30, first=7), list[Job]()
    while second.started is None:
        short.append(submit(served, 3, new=50))
        served.turn()
        assert second.started or served.decoder.free
    assert sum(job.started is not None for job in short) == 1


def test_prompts_of_equal_length_are_read_in_the_order_of_their_arrival() -> None:
    served = small(rows=4)
    jobs = [submit(served, 30, first) for first in (0, 11, 22)]
    turns_until_first_token(served, jobs[0])
    assert jobs[1].started is None or jobs[1].row is None
    assert jobs[2].started is None
    turns_until_first_token(served, jobs[2])
    times = [job.first_token or 0.0 for job in jobs]
    assert 0.0 not in times
    assert times == sorted(times)


@settings(max_examples=25, deadline=None)
@example([(40, 3, 2), (3, 1, 20)])
@given(st.lists(st.tuples(*[st.integers(1, n) for n in (40, 3, 20)]), min_size=1, max_size=8))
def test_every_request_ends_whatever_arrives_while_others_are_read(
    arrivals: list[tuple[int, int, int]],
) -> None:
    served, jobs = small(rows=3), list[Job]()
    for number, (length, choices, new) in enumerate(arrivals):
        # Choices of one prompt share its reading and need a row each afterwards.
        for seed in range(choices):
            jobs.append(submit(served, length, first=number, seed=seed, new=new))
        served.turn()
    for _ in range(1000):
        if not served.busy:
            break
        served.turn()
    assert all(job.finished and job.new_tokens == job.request.max_new_tokens for job in jobs)
    assert served.decoder.free == 3
