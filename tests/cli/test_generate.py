"""fenchel generate: what its settings change, and what they do not."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.generation import Decoder, GenerationSettings, KVCache, Sampling, stream_text


@pytest.fixture
def words(run_directory: Path) -> list[str]:
    return ["generate", str(run_directory), "--prompt", "the people", "--max-new-tokens", "40"]


def text_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["text"])


def test_a_program_gets_counts_and_why_the_text_ended(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = text_of(words, capsys)[5:8]
    for more, finish in (([], "length"), (["--stop", stop], "stop")):
        assert main([*words, *more, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["finish"] == finish
        assert (result["new_tokens"] == 40) == (finish == "length")
        assert 0 < result["prompt_tokens"] < 12


def test_text_ends_before_the_first_of_several_stops(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = text_of(words, capsys)
    stops = [whole[12:15], whole[7:10]]
    first = min(whole.index(stop) for stop in stops)
    flags = [word for stop in stops for word in ("--stop", stop)]
    assert text_of([*words, *flags], capsys) == whole[:first]
    assert main([*words, *flags]) == 0
    assert capsys.readouterr().out == f"the people{whole[:first]}\n"


def test_guessing_ahead_does_not_change_the_text(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_of([*words, "--draft", "4"], capsys) == text_of(words, capsys)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_the_cache_that_is_named_stores_the_keys(
    kind: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache of the named dtype is filled, and the text is the one it gives from Python."""
    dtypes: set[torch.dtype] = set()
    append = KVCache.append

    def watched(cache: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dtypes.update(x.dtype for x in cache.layers[layer].keys.buffers())
        return append(cache, layer, k, v)

    monkeypatch.setattr(KVCache, "append", watched)
    greedy = [*words, "--temperature", "0", "--device", "cpu"]
    text = text_of([*greedy, "--cache", kind], capsys)
    stored = {"float16": {torch.float16}, "int8": {torch.int8, torch.float32}}
    assert dtypes == stored[kind]
    model, tokenizer, _ = load(words[1])
    prompt = torch.tensor([tokenizer.end_id, *tokenizer.encode(words[3])])
    settings = GenerationSettings(
        max_new_tokens=40,
        sampling=Sampling(temperature=0.0),
        stop=[tokenizer.end_id],
        cache=cast("Any", kind),
    )
    assert text == "".join(stream_text(model, tokenizer, prompt, settings))


def test_weights_have_the_dtype_and_the_device_that_are_named(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[torch.dtype, str]] = []
    read = Decoder.read

    def watched(decoder: Decoder, *parts: Any, **keywords: Any) -> Tensor:
        found.append((decoder.model.lm_head_weight.dtype, str(decoder.device)))
        return read(decoder, *parts, **keywords)

    monkeypatch.setattr(Decoder, "read", watched)
    for dtype in ("float64", "bfloat16"):
        found.clear()
        assert text_of([*words, "--device", "cpu", "--dtype", dtype], capsys)
        assert set(found) == {(getattr(torch, dtype), "cpu")}


def test_a_penalty_changes_what_is_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = [*words, "--temperature", "0"]
    assert text_of([*greedy, "--repetition-penalty", "5"], capsys) != text_of(greedy, capsys)


@pytest.fixture
def exported(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The run as a Hugging Face directory, whose generation_config.json names tokens only."""
    assert main(["convert", str(run_directory), str(tmp_path / "exported")]) == 0
    (tmp_path / "exported" / "manifest.json").unlink()  # the tests change files
    capsys.readouterr()
    return tmp_path / "exported"


def say(directory: Path, **settings: object) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_sampling_settings_of_a_checkpoint_hold_unless_a_flag_is_given(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words[1] = words[1], str(exported)
    silent = text_of(words, capsys)
    assert silent == text_of(["generate", run, *words[2:]], capsys)  # tokens alone change nothing
    assert main(words) == 0
    begins = "A text begins with <|end|>, the model's begin token.\n"
    assert capsys.readouterr().err == begins
    flags = ["--temperature", "1.7", "--top-k", "30", "--repetition-penalty", "1.2"]
    # of the same file: other weights in memory have another alignment, and may round otherwise
    by_flags = text_of([*words, *flags, "--top-p", "1"], capsys)
    say(exported, do_sample=True, temperature=1.7, top_k=30, repetition_penalty=1.2)
    by_file = text_of(words, capsys)
    assert by_file == by_flags
    assert by_file != silent
    back = ["--temperature", "0.8", "--top-k", "300", "--top-p", "0.95"]
    assert text_of([*words, *back, "--repetition-penalty", "1"], capsys) == silent
    assert main([*words, "--top-k", "5"]) == 0
    shown = capsys.readouterr()
    source = exported / "generation_config.json"
    taken = "temperature 1.7, no top_p, repetition_penalty 1.2"
    assert shown.err == f"{begins}Settings of {source}: {taken}.\n"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings_from"] == str(source)
    assert found["settings"]["top_k"] == 30


def test_penalties_and_biases_are_flags(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = text_of(words, capsys)
    assert plain != text_of([*words, "--frequency-penalty", "2"], capsys)
    assert plain != text_of([*words, "--presence-penalty", "2"], capsys)
    only = text_of([*words, "--logit-bias", "98=100", "--logit-bias", "99=-100"], capsys)
    assert len(set(only)) == 1
    for wrong in ("98", "98=x", "1=2=3"):
        assert main([*words, "--logit-bias", wrong]) == 2
        assert "should be ID=VALUE" in capsys.readouterr().err


def test_the_ends_of_a_text_are_those_of_the_checkpoint(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words[1] = str(exported)
    whole = text_of(words, capsys)
    tokenizer = load(exported).tokenizer
    third = tokenizer.encode(whole)[2]
    end = tokenizer.end_id
    say(exported, eos_token_id=[end, third])
    ended = text_of(words, capsys)
    assert whole.startswith(ended)
    assert tokenizer.encode(ended)[-1] == third
    assert third not in tokenizer.encode(ended)[:-1]
    assert main(words) == 0
    assert f"ends [{end}, {third}]." in capsys.readouterr().err


def test_a_damaged_file_beside_a_checkpoint_gets_one_sentence(
    words: list[str], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(exported, do_sample=True, temperature=-1.0)
    assert main(["generate", str(exported), *words[2:]]) == 2
    assert "generation_config.json: temperature=" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--draft", "-1"],
        ["--stop", ""],
        ["--repetition-penalty", "0"],
        ["--max-new-tokens", "-3"],
        ["--device", "abacus"],
        ["--device", "meta"],
    ],
)
def test_a_wrong_flag_gets_one_sentence(
    wrong: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *wrong]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1


def test_the_prompt_may_stand_behind_the_directory_or_come_from_standard_input(
    words: list[str],
    run_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(words) == 0
    by_flag = capsys.readouterr().out
    short = ["generate", str(run_directory), "--max-new-tokens", "40"]
    assert main([*short[:2], "the", "people", *short[2:]]) == 0
    assert capsys.readouterr().out == by_flag
    monkeypatch.setattr(sys, "stdin", io.StringIO("the people\n"))
    assert main([*short, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == by_flag
    assert main([*words, "the"]) == 2
    assert "give the prompt once" in capsys.readouterr().err


def test_a_prompt_beyond_the_context_is_cut_with_a_notice(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_directory), "--max-new-tokens", "1", "--prompt"]
    assert main([*words, "the people"]) == 0
    assert "left out" not in capsys.readouterr().err
    assert main([*words, "the people of peace " * 20]) == 0
    said = capsys.readouterr().err
    found = re.search(r"the prompt has (\d+) tokens and the model reads 16: its first (\d+)", said)
    assert found is not None
    assert int(found[1]) - int(found[2]) == 16


def test_log_probabilities_and_attention_come_with_the_tokens(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(words, capsys)
    assert main([*words, "--json", "--logprobs", "2", "--attention"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == text
    assert "".join(token["text"] for token in result["tokens"]).startswith(text[:20])
    for token in result["tokens"]:
        assert token["logprob"] <= token["top"][0][2] + 1e-6
        assert len(token["top"]) == 2
        assert token["fenchel"]["attention"]["layers"]
    assert main([*words, "--attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 40  # a line per token after the text
    assert main([*words, "--logprobs", "2"]) == 2
    assert "--json" in capsys.readouterr().err


def test_the_context_ends_the_text_without_past_context(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    short = [*words, "--context", "16"]
    assert text_of([*short, "--no-past-context"], capsys) in text_of(short, capsys)
    assert len(text_of([*short, "--no-past-context"], capsys)) < len(text_of(short, capsys))


def test_an_invariant_text_is_the_plain_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_of([*words, "--invariant"], capsys) == text_of(words, capsys)
