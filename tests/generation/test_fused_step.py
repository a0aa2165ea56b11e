"""fenchel/generation/fused_step.py: the model's own numbers, from kernels made for one token."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.generation import (
    Decoder,
    GenerationSettings,
    KVCache,
    RowSampling,
    Sampling,
    fused_step,
    generate,
    steps,
)
from fenchel.generation.fused_step import RecordedStep, Step, capture_graph, why_not_fused
from fenchel.generation.generate import row_bucket
from fenchel.generation.plain_decoder import why_not_plain
from fenchel.kernels import decode_attention
from fenchel.model import Transformer
from tests.generation.conftest import run_and_keep

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"kv_heads": 1, "head_size": 6, "qkv_bias": True, "windows": (5, 0), "score_scale": 0.7},
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    {"positions": "none", "mlp": "geglu_tanh", "tied": False, "epsilon": 0.1},
    {"layer_choices": ("entmax", "sparsemax"), "beta": 1.3, "kv_heads": 2},
]
T, B, READ = 8, 2, 5


@pytest.fixture
def recorder(device: str) -> Callable[[Step, torch.device], Step]:
    """A CUDA graph on a GPU, and the step itself elsewhere."""
    return capture_graph if device == "cuda" else run_and_keep


def recorded(
    model: Transformer,
    ids: Tensor,
    lengths: list[int],
    rows: int,
    record: Any,
    steered: tuple[int, ...] = (),
    **kind: Any,
) -> RecordedStep:
    """A recorded step whose rows have read the first tokens of ``ids``; others are free."""
    cache = KVCache(
        model.config,
        batch=rows,
        positions=T,
        device=ids.device,
        slack=0,
        kernel_layout=True,
        **kind,
    )
    for row, n in enumerate(lengths):
        model(ids[row : row + 1, :n], cache=cache.select([row], [0]))
    step = RecordedStep(model, cache, (rows,), fused=True, steered=steered, record=record)
    # Recording has run steps; what they wrote for free rows is written again.
    for row, n in enumerate(lengths):
        model(ids[row : row + 1, :n], cache=cache.select([row], [0]))
    free = rows - len(lengths)
    greedy = [(Sampling(temperature=0.0), 0)] * rows
    step.set_sampling(RowSampling.of(greedy))
    tokens = [int(ids[row, n]) for row, n in enumerate(lengths)]
    active = [True] * len(lengths) + [False] * free
    step.set_rows([*lengths, *[0] * free], [0] * rows, active, [*tokens, *[0] * free])
    return step


@pytest.mark.parametrize(
    ("shape", "rows", "thin"),
    [(shape, B, B) for shape in SHAPES] + [(SHAPES[1], B, 0), (SHAPES[2], B + 1, 0)],
    ids=lambda s: " ".join(s) if isinstance(s, dict) else str(s),
)
@torch.inference_mode()
def test_a_fused_step_gives_the_logits_of_the_model(
    shape: dict[str, Any],
    rows: int,
    thin: int,
    lively: Build,
    prompts: Draw,
    recorder: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For rows of unequal lengths; above ``thin`` by torch's products, and with a free row."""
    monkeypatch.setattr(fused_step, "THIN_ROWS", thin)
    model, ids = lively(**shape, context=T).to(device), prompts(B, T).to(device)
    for block in model.blocks:
        block.mlp_norm.weight.mul_(1.5)  # unlike the other norm's, which was drawn the same
    whole, lengths = model(ids), [READ, READ - 2]
    step = recorded(model, ids, lengths, rows, recorder)
    for more in range(T - READ):
        logits = step.step(rows, longest=READ + more + 1)
        for row, n in enumerate(lengths):
            wanted = whole[row, n + more]
            torch.testing.assert_close(logits[row], wanted, atol=1e-4, rtol=1e-4)
            assert int(step.rows.drawn[row]) == int(wanted.argmax())
        numbers = [n + more + 1 for n in lengths]
        assert step.rows.number[:B].tolist() == numbers
        if max(numbers) < T:
            tokens = [int(ids[row, n]) for row, n in enumerate(numbers)]
            rest = [0] * (rows - B)
            step.set_rows(
                [*numbers, *rest], [0] * rows, [True] * B + [False] * (rows - B), [*tokens, *rest]
            )


@pytest.mark.parametrize("thin", [B, 0])
@torch.inference_mode()
def test_the_directions_of_a_row_are_added_after_their_layers(
    thin: int,
    lively: Build,
    prompts: Draw,
    recorder: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_step, "THIN_ROWS", thin)
    model, ids = lively(context=T, layers=3).to(device), prompts(B, T).to(device)
    width = model.config.width
    vectors = {n: torch.randn(B, width, device=device) * size for n, size in ((0, 0.3), (2, 0.1))}
    step = recorded(model, ids, [READ] * B, B, recorder, steered=(1, 3))
    step.set_vectors(vectors)
    logits = step.step(B, longest=READ + 1)
    cache = KVCache(model.config, batch=B, positions=T, device=device, slack=0)
    model(ids[:, :READ], cache=cache)  # what the cache has was read without directions
    steer = {n: v.unsqueeze(1) for n, v in vectors.items()}
    wanted = model(ids[:, READ : READ + 1], cache=cache, steer=steer)[:, 0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=lambda s: " ".join(s))
@torch.inference_mode()
def test_a_fused_step_reads_an_int8_cache(
    shape: dict[str, Any], lively: Build, prompts: Draw, recorder: Any, device: str
) -> None:
    """The logits of the model on an int8 cache, and near those without one."""
    model, ids = lively(**shape, context=T).to(device), prompts(B, T).to(device)
    whole = model(ids)
    cache = KVCache(model.config, batch=B, positions=T, device=device, kind="int8", slack=0)
    model(ids[:, :READ], cache=cache)
    wanted = model(ids[:, READ : READ + 1], cache=cache)[:, 0]
    step = recorded(model, ids, [READ] * B, B, recorder, kind="int8")
    logits = step.step(B, longest=READ + 1)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert float((logits - whole[:, READ]).norm() / whole[:, READ].norm()) < 2e-2
    assert not torch.equal(logits, whole[:, READ])


@pytest.fixture
def fused(device: str, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decoders of ``generate`` have fused steps; counts their recordings."""
    recorded: list[int] = []

    def record(step: Step, where: torch.device) -> Step:
        recorded.append(1)
        return recorder(step, where)

    def decoder(
        self: GenerationSettings, model: Transformer, *, rows: int = 1, longest: int | None = None
    ) -> Decoder:
        return Decoder(
            model,
            rows=row_bucket(rows),
            cache=self.cache,
            step=self.step,
            positions=longest,
            one_bucket=True,
            record=record,
        )

    if device != "cuda":
        monkeypatch.setattr(steps, "why_not_fused", lambda _: None)
    monkeypatch.setattr(GenerationSettings, "decoder", decoder)
    monkeypatch.setattr(decode_attention, "SHORT", 512)
    return recorded


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"cache": "int8", "temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
    ],
)
def test_fused_tokens_are_those_of_the_model_and_a_recording_serves_its_bucket(
    settings: dict[str, Any], lively: Build, prompts: Draw, device: str, fused: list[int]
) -> None:
    model = lively(layers=1, width=8, heads=1, context=8).to(device)
    for rows in (3, 4):
        ids = prompts(rows, 3).to(device)
        plain, graph = (
            generate(model, ids, max_new_tokens=3, seed=4, step=step, **settings)
            for step in ("model", "fused")
        )
        assert torch.equal(graph, plain)
    assert len(fused) == 1


def test_past_the_context_a_fused_step_goes_on_as_the_model_does(
    lively: Build, prompts: Draw, device: str, fused: list[int]
) -> None:
    model, ids = lively(layers=1, width=8, heads=1, context=8).to(device), prompts(1, 3).to(device)
    plain, graph = (
        generate(model, ids, max_new_tokens=14, seed=2, step=step) for step in ("model", "fused")
    )
    assert torch.equal(graph, plain)
    assert fused


def test_a_pooled_decoder_does_not_keep_its_model_alive(
    lively: Build, prompts: Draw, device: str, fused: list[int]
) -> None:
    model = lively(layers=1, width=8, heads=1, context=8).to(device)
    ids = prompts(1, 3).to(device)
    generate(model, ids, max_new_tokens=2, step="fused")
    generate(model, ids, max_new_tokens=2, step="fused")
    assert len(fused) == 1
    with torch.no_grad():
        model.embed.weight = torch.nn.Parameter(model.embed.weight.clone())
    generate(model, ids, max_new_tokens=2, step="fused")
    assert len(fused) == 2  # other memory
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@torch.inference_mode()
def test_few_rows_of_a_long_context_have_a_recording_for_short_sequences(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "SHORT", 4)

    def lengths(rows: tuple[int, ...], **shape: Any) -> list[tuple[int, int]]:
        model = lively(kv_heads=2, context=T, **shape)
        cache = KVCache(model.config, batch=rows[-1], positions=T, slack=0, kernel_layout=True)
        step = RecordedStep(
            model, cache, rows, fused=True, record=lambda step, _: lambda: step.args[2].tokens
        )
        return [(B, step.step(B, longest=n)) for B in rows for n in (1, 4, 5, T)]  # type: ignore[misc]

    assert lengths((1, 8)) == [(1, 4), (1, 4), (1, T), (1, T), (8, 4), (8, 4), (8, T), (8, T)]
    assert lengths((16,)) == [(16, T)] * 4
    assert lengths((1,), choice="entmax") == [(1, T)] * 4  # its kernels are the same for any length


@torch.inference_mode()
def test_the_memory_of_a_recorded_step_lives_as_long_as_the_recording(lively: Build) -> None:
    """A graph does not keep the memory it replays in, and neither does this recorder."""
    made: list[weakref.ref[fused_step.FusedStep]] = []

    def record(step: Any, _: object) -> Callable[[], None]:
        made.append(weakref.ref(step.args[2]))
        return lambda: None

    model = lively()
    cache = KVCache(model.config, batch=3, positions=T, slack=0, kernel_layout=True)
    rows = RecordedStep(model, cache, (1, 2, 3), fused=True, record=record)  # type: ignore[arg-type]
    gc.collect()
    assert len(made) == len(rows._steps)
    assert all(reference() is not None for reference in made)


def test_what_it_cannot_serve_is_named(lively: Build) -> None:
    assert why_not_fused(lively()) == "it is in torch.float32 on cpu"
    assert "heads are 264 wide" in str(why_not_fused(lively(width=264, heads=1)))
    model = lively(choice="hard")
    assert "Hard" in str(why_not_plain(model, sparse=True))
    for choice in ("entmax", "sparsemax"):
        assert "choice is" in str(why_not_plain(lively(choice=choice)))
        assert why_not_plain(lively(choice=choice), sparse=True) is None
    assert "Entmax" in str(why_not_plain(lively(choice="entmax", entmax_alpha=2.5), sparse=True))
