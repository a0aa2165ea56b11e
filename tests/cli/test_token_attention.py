"""fenchel/cli/token_attention.py: what an answer read, in a terminal."""

import re

import pytest
import torch
from rich.cells import cell_len

from fenchel.cli.token_attention import attention_lines
from fenchel.generation.attention_trace import TraceAttention, TraceSettings, trace_text
from fenchel.model import ModelConfig, Transformer

TOKENS = ["She", " sells", " sea", "\x1b[2J", " shells", "\n", "東京", "!"]
ANSI = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocabulary=11, context=16, width=32, layers=3, heads=2))


def test_a_line_per_token_names_what_it_read(model: Transformer) -> None:
    settings = TraceSettings(entropy=True, attention=TraceAttention(top=3))
    traces = trace_text(model, list(range(8)), 5, settings)
    head, *rows, empty, text = attention_lines(TOKENS, traces, width=100)
    assert head.split() == ["token", "p", "rank", "keys", "read"]
    assert empty == ""
    assert [row.split()[0] for row in rows] == ["↵", "東京", "!"]
    for row, trace in zip(rows, traces, strict=True):
        assert f"{trace.p:.3f}" in row
        assert trace.last_third is not None
        position, weight = trace.last_third.top[0]
        shown = TOKENS[position].strip("\x1b").replace(" ", "·").replace("\n", "↵")
        assert f"{shown} {weight:.2f}" in row
        assert f"(rest {trace.last_third.rest:.2f})" in row
    assert "\x1b" not in "".join((*rows, text))
    assert re.sub("[▁▂▃▄▅▆▇█ ]", "", text) == "She·sells·sea[2J·shells↵東京!"
    assert "█" in text  # the token that was read most


def test_lines_fit_the_width_and_colours_change_no_text(model: Transformer) -> None:
    settings = TraceSettings(attention=TraceAttention(top=6))
    traces = trace_text(model, list(range(8)), 2, settings)
    plain = attention_lines(TOKENS, traces, width=48)
    coloured = attention_lines(TOKENS, traces, width=48, colour=True)
    assert all(cell_len(line) <= 48 for line in plain[1:])
    assert all(cell_len(ANSI.sub("", line)) <= 48 for line in coloured[1:])
    assert coloured[: len(traces) + 1] == plain[: len(traces) + 1]
    assert ANSI.sub("", "".join(coloured[len(traces) + 2 :])) == "She·sells·sea[2J·shells↵東京!"


def test_traces_without_positions_are_refused(model: Transformer) -> None:
    traces = trace_text(model, list(range(8)), 6, TraceSettings(entropy=True))
    with pytest.raises(ValueError, match="no positions"):
        attention_lines(TOKENS, traces)
    with pytest.raises(ValueError, match="do not fit"):
        attention_lines(["a"], traces)
