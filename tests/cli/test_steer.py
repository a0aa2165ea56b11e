"""fenchel steer, and --steer in the commands that decode or evaluate."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fenchel.checkpoints import load, save
from fenchel.cli import main
from fenchel.generation import Emphasis, Steering, generate
from fenchel.model import ModelConfig, Transformer
from fenchel.steering.strength import log_laws


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "toward.txt").write_text("peace and trade\n\nevery nation has peace\n")
    (tmp_path / "away.txt").write_text("the people of these States\n")
    return str(tmp_path / "toward.txt"), str(tmp_path / "away.txt")


def steer(run: Path, text: Path, out: Path, *words: str) -> int:
    return main(["steer", str(run), "--text", str(text), "--out", str(out), *words])


def test_a_direction_is_made_and_moves_what_commands_draw(
    run_directory: Path,
    text_file: Path,
    texts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "d.safetensors"
    flags = ("--toward", texts[0], "--away", texts[1], "--kl", "0.2", "--json")
    assert steer(run_directory, text_file, out, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kl"]["mean"] == pytest.approx(0.2, rel=0.02)
    assert record["layer"] == 1

    def drawn(*more: str) -> str:
        words = ["generate", str(run_directory), "--prompt", "the", "--max-new-tokens", "8"]
        assert main([*words, "--seed", "1", "--json", *more]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    plain = drawn()
    assert drawn("--steer", str(out), "--strength", "0") == plain
    assert drawn("--steer", str(out), "--strength", "40") != plain

    def loss(*more: str) -> float:
        words = ["eval", str(run_directory), "--text", str(text_file), "--tokens", "40", "--json"]
        assert main([*words, *more]) == 0
        return float(json.loads(capsys.readouterr().out)["loss"])

    unsteered = loss()
    assert loss("--steer", str(out), "--strength", "0") == unsteered
    assert loss("--steer", str(out)) != unsteered


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_place": "after", "qk_norm": True, "qk_norm_width": "all"},
        {"experts": 2, "qk_norm": True},
    ],
    ids=("OLMo 2", "Qwen 3 with experts"),
)
def test_a_direction_is_evaluated_in_any_kind_of_block(
    settings: dict[str, Any],
    run_directory: Path,
    text_file: Path,
    texts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = load(run_directory).tokenizer
    shape = {"vocabulary": tokenizer.library.get_vocab_size(), "width": 16, "layers": 2, "heads": 2}
    config = ModelConfig(**shape, **settings)
    model, other = Transformer(config, generator=torch.Generator().manual_seed(0)), tmp_path / "m"
    save(model, tokenizer, other)
    out = tmp_path / "d.safetensors"
    flags = ("--toward", texts[0], "--away", texts[1], "--kl", "0.002", "--json")
    assert steer(other, text_file, out, *flags) == 0
    losses = []
    for strength in ("0", "4"):
        capsys.readouterr()
        words = ["--text", str(text_file), "--tokens", "40", "--json", "--strength", strength]
        assert main(["eval", str(other), "--steer", str(out), *words]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] != losses[1]
    assert main(["eval", str(other), "--steer", str(out), "--text", str(text_file), "--save"]) == 2
    assert "without --adapter or --steer" in capsys.readouterr().err


def test_texts_as_json_lines_make_the_direction_of_the_same_lines(
    run_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    sides = {"toward": ["peace and trade", "every nation"], "away": ["the people", "of States"]}
    for side, lines in sides.items():
        (tmp_path / f"{side}.txt").write_text("\n".join(lines))
        objects = "\n".join(json.dumps({"text": line}) for line in lines)
        (tmp_path / f"{side}.jsonl").write_text(objects)
    found = []
    for suffix in ("txt", "jsonl"):
        out = tmp_path / f"{suffix}.safetensors"
        files = [
            word for side in sides for word in (f"--{side}", str(tmp_path / f"{side}.{suffix}"))
        ]
        assert steer(run_directory, text_file, out, *files, "--json") == 0
        found.append(load_file(out)["direction.1"])
    assert torch.equal(*found)


def test_words_are_raised(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.safetensors"
    assert steer(run_directory, text_file, out, "--word", "peace", "--against", "trade") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "logits of 1 word pulled back to layer 1" in said
    assert f"--steer {out}" in said


def test_a_singular_direction_is_made_between_two_layers(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = (
        tmp_path / "s.safetensors",
        ["--singular", "1-2", "--number", "2", "--kl", "0.001", "--json"],
    )
    tokenizer, deeper = load(run_directory).tokenizer, tmp_path / "deeper"
    size = {"vocabulary": tokenizer.vocabulary_size, "width": 32, "layers": 2}
    config = ModelConfig(**size, initial="xavier")
    save(Transformer(config), tokenizer, deeper)
    assert steer(deeper, text_file, out, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["direction"].startswith("singular direction 2 of layers 1 to 2 on")
    assert record["layer"] == 1
    assert record["singular_values"][0] > record["singular_values"][1] > 0.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --toward FILE and --away FILE, --word WORD, or --singular LAYERS"),
        (["--word", "peace", "--singular", "1-2"], "give --toward FILE and --away FILE"),
        (["--singular", "1"], "--singular 1 should be two layers, as in 1-3"),
        (["--singular", "1-9"], "there is no layer 9"),
        (["--singular", "1-2", "--layer", "1"], "leave out --layer"),
        (["--word", "peace", "--number", "2"], "--number belongs to --singular"),
        (["--toward", "t"], "give --toward FILE and --away FILE"),
        (["--word", "peace", "--kl", "3"], "at most 1 nats"),
        (["--word", "peace", "--layer", "9"], "there is no layer 9"),
        (["--word", ""], "a word is empty"),
        (["--word", "peace", "--max-tokens", "1"], "--max-tokens 1 should be 2 or more"),
        (["--toward", "missing", "--away", "missing"], "missing"),
    ],
)
def test_bad_input_gets_a_sentence_and_leaves_nothing(
    words: list[str],
    sentence: str,
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert steer(run_directory, text_file, tmp_path / "x", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--strength", "2"], "--strength belongs to --steer"),
        (["--token-kl", "0.1"], "--token-kl belongs to --steer FILE, --emphasise WORDS"),
        (["--head-beta", "2.1"], "--head-beta 2.1 should be as in 2.1=0.5"),
        (["--head-beta", "1.1=much"], "--head-beta 1.1=much should give a number"),
        (["--head-beta", "1.9=2"], "there is no head 1.9; the model has heads 1 to"),
        (["--head-beta", "first=2"], "'first' names no head"),
        (["--head-choice", "1.1=softest"], "there is no choice map 'softest'"),
        (["--emphasis", "2"], "--emphasis and --emphasis-layers belong to --emphasise"),
        (["--emphasise", "war"], "the prompt has no text 'war' to emphasise"),
        (["--emphasise", "the", "--emphasis", "99"], "a bias of 99 should be -20 to 20"),
        (["--emphasise", "the", "--emphasis-layers", "9"], "there is no layer 9"),
        (["--emphasise", "the", "--token-kl", "0"], "should be above 0"),
        (["--emphasise", "the", "--attention"], "is not traced"),
    ],
)
def test_flags_of_steering_that_do_not_fit_are_refused(
    words: list[str], sentence: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run_directory), "--prompt", "the people", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_words_of_a_prompt_are_emphasised_within_a_budget(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest budget is no budget; the smallest leaves the law as it was."""

    def logprobs(*more: str) -> list[float]:
        words = ["generate", str(run_directory), "--prompt", "peace and the people of peace"]
        assert main([*words, "--max-new-tokens", "5", "--logprobs", "0", "--json", *more]) == 0
        return [token["logprob"] for token in json.loads(capsys.readouterr().out)["tokens"]]

    plain = logprobs()
    strong = logprobs("--emphasise", "peace", "--emphasis", "12")
    assert strong != pytest.approx(plain, abs=1e-4)
    assert logprobs("--emphasise", "peace", "--emphasis", "0") == pytest.approx(plain, abs=1e-6)
    limited = ("--emphasise", "peace", "--emphasis", "12", "--token-kl")
    assert logprobs(*limited, "1e-9") == pytest.approx(plain, abs=1e-3)
    assert logprobs(*limited, "50") == pytest.approx(strong, abs=1e-4)


def test_heads_choose_otherwise_within_a_budget(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def logprobs(*more: str) -> list[float]:
        words = ["generate", str(run_directory), "--prompt", "peace and the people of peace"]
        assert main([*words, "--max-new-tokens", "5", "--logprobs", "0", "--json", *more]) == 0
        return [token["logprob"] for token in json.loads(capsys.readouterr().out)["tokens"]]

    plain = logprobs()
    even = logprobs("--head-beta", "all=0")
    assert even != pytest.approx(plain, abs=1e-4)
    assert logprobs("--head-beta", "all=0", "--head-beta", "all=1") == pytest.approx(plain)
    assert logprobs("--head-choice", "1=hard") != pytest.approx(plain, abs=1e-4)
    assert logprobs("--head-choice", "all=softmax") == pytest.approx(plain, abs=1e-5)
    limited = logprobs("--head-beta", "all=0", "--token-kl", "1e-9")
    assert limited == pytest.approx(plain, abs=1e-3)


def test_an_emphasis_is_found_for_a_divergence(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_directory), "--prompt", "the people", "--max-new-tokens", "4"]
    emphasised = [*words, "--emphasise", "people", "--temperature", "0", "--json"]
    assert main([*emphasised, "--emphasis-kl", "1e-5"]) == 0
    said = capsys.readouterr()
    found = re.search(
        r"An emphasis of (\S+) moves the laws of (\d+) tokens by (\S+) nats", said.err
    )
    assert found is not None
    assert float(found[3]) == pytest.approx(1e-5, rel=0.03)
    # by itself: the laws of the tokens of the unsteered answer, and not the one after them
    model, tokenizer, _ = load(run_directory)
    ids = tokenizer.encode_whole("the people")
    room = model.config.context - len(ids)
    answer = generate(model, torch.tensor([ids]), max_new_tokens=room, temperature=0.0)[0].tolist()
    assert len(answer) - len(ids) == int(found[2])
    emphasis = Emphasis(texts=("people",), bias=float(found[1])).found_in(tokenizer, ids)
    steered, plain = (log_laws(model, answer, x) for x in (Steering(emphasis=emphasis), None))
    kl = (steered.exp() * (steered - plain)).sum(-1)[len(ids) - 1 : -1].mean()
    assert float(kl) == pytest.approx(float(found[3]), rel=0.02)
    assert main([*emphasised, "--emphasis", found[1]]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == json.loads(said.out)["text"]
    for wrong in (words, [*emphasised, "--emphasis", "1"]):
        assert main([*wrong, "--emphasis-kl", "0.1"]) == 2
        assert "belongs to --emphasise WORDS" in capsys.readouterr().err
    assert main([*emphasised, "--emphasis-kl", "2"]) == 2
    assert "a budget of 2 nats" in capsys.readouterr().err
