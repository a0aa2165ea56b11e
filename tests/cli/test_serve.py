"""fenchel serve: which directories it serves, and what is refused before a port is open."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from fenchel.checkpoints import load
from fenchel.checkpoints.tokenizer import suggested_generation
from fenchel.cli import main
from fenchel.cli.serve import read_key
from fenchel.data import train_tokenizer
from fenchel.generation import Sampling
from fenchel.generation.sampling import DEFAULTS, resolve_sampling
from fenchel.server.engine import Engine
from tests.cli.conftest import Ask


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "99999"], "a port is a number from 0 to 65535"),
        (["--rows", "0"], "--rows 0 should be 1 to 4096"),
        (["--deadline", "0"], "--deadline 0.0 should be a number of seconds above 0"),
        (["--origin", "localhost"], "should be as in http://localhost:3000"),
        (["--host", "0.0.0.0", "--port", "0"], "--without-key"),
    ],
)
def test_wrong_flags_get_a_sentence(
    tmp_path: Path,
    flags: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FENCHEL_KEY", raising=False)
    assert main(["serve", str(tmp_path), *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert sentence in said


def test_without_the_extra_the_message_names_the_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenchel.cli.serve.find_spec", lambda _: None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install 'fenchel[serve]'" in capsys.readouterr().err


def test_a_key_is_one_word_of_a_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    monkeypatch.setenv("FENCHEL_KEY", "other")
    assert read_key(file) == "sesame"
    assert read_key(None) == "other"
    for wrong in ("", "two words", "schlüssel"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="one word"):
            read_key(file)


def test_a_run_of_ours_is_served_and_chats_by_the_plain_template(
    run_directory: Path, served: Callable[..., int]
) -> None:
    chat = {"messages": [{"role": "user", "content": "peace"}], "max_tokens": 3}

    def without_template(ask: Ask) -> None:
        status, answer = ask("/v1/completions", {"prompt": "the people", "max_tokens": 3})
        assert status == 200
        assert answer["model"] == run_directory.name
        assert re.fullmatch("[0-9a-f]{12}", answer["system_fingerprint"])
        status, answer = ask("/v1/chat/completions", chat)
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")

    def with_template(ask: Ask) -> None:
        assert ask("/v1/chat/completions", {**chat, "model": "any"})[0] == 200

    assert served([str(run_directory)], without_template) == 0
    words = [str(run_directory), "--template", "plain", "--any-model", "--name", "x"]
    assert served(words, with_template) == 0


def test_a_steered_request_is_the_text_of_generate(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    served: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a direction at two strengths, within a budget, with emphasis, and with none of them."""
    out = tmp_path / "trade.safetensors"
    words = ["steer", str(run_directory), "--text", str(text_file), "--out", str(out)]
    assert main([*words, "--word", "trade"]) == 0
    strong = ["--steer", str(out), "--strength", "30"]
    cases: list[tuple[list[str], dict[str, Any]]] = [
        ([], {"steer": {}}),
        (["--steer", str(out)], {}),
        (strong, {"steer": {"trade": 30}}),
        ([*strong, "--token-kl", "0.2"], {"steer": {"trade": 30}, "token_kl": 0.2}),
        (
            ["--emphasise", "people", "--emphasis", "9"],
            {"steer": {}, "emphasise": ["people"], "emphasis": 9},
        ),
    ]
    prompt, texts = "peace and the people", list[str]()
    usual = ["--prompt", prompt, "--max-new-tokens", "6", "--seed", "4", "--json"]
    for flags, _ in cases:
        capsys.readouterr()
        assert main(["generate", str(run_directory), *usual, *flags]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])

    def use(ask: Ask) -> None:
        for text, (_, field) in zip(texts, cases, strict=True):
            body = {"prompt": prompt, "max_tokens": 6, "seed": 4, "fenchel": field}
            status, answer = ask("/v1/completions", body)
            assert (status, answer["choices"][0]["text"]) == (200, text)
        status, answer = ask("/v1/completions", {"prompt": "a", "fenchel": {"steer": {"x": 1}}})
        assert (status, answer["error"]["param"]) == (400, "fenchel.steer.x")

    assert texts[2] != texts[0]
    assert served([str(run_directory), "--steer", str(out)], use) == 0
    again = [str(run_directory), "--steer", str(out), "--steer", str(out)]
    assert main(["serve", *again, "--port", "0"]) == 2
    assert "have the same name" in capsys.readouterr().err


def test_a_tuned_model_draws_as_its_checkpoint_does(
    run_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    assert main(["convert", str(run_directory), str(checkpoint)]) == 0
    (checkpoint / "manifest.json").unlink()  # a file is another than the one that was written
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    tune = ["tune", str(checkpoint), "--text", str(text_file), "--steps", "1", "--out", str(run)]
    assert main([*tune, "--set", "train.threads=1"]) == 0
    expected = Sampling(temperature=0.5, top_k=7, repetition_penalty=1.25)

    def defaults(directory: Path) -> Sampling:
        return resolve_sampling(suggested_generation(directory)[0], {})[0]

    assert defaults(run) == defaults(checkpoint) == expected
    assert defaults(run_directory) == DEFAULTS


def test_an_encoder_gives_embeddings_and_continues_nothing(
    tmp_path: Path, served: Callable[..., int]
) -> None:
    tokenizer = train_tokenizer(["the people of these States"], 270).library
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    reference = BertForMaskedLM(config).eval()
    reference.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def use(ask: Ask) -> None:
        ids = tokenizer.encode("the people").ids
        status, answer = ask("/v1/embeddings", {"input": "the people"})
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == len(ids)
        with torch.no_grad():
            mean = reference.bert(torch.tensor([ids])).last_hidden_state[0].mean(0)
        found = torch.tensor(answer["data"][0]["embedding"])
        torch.testing.assert_close(found, mean / mean.norm(), atol=1e-5, rtol=0)
        status, answer = ask("/v1/completions", {"prompt": "the"})
        assert status == 400
        assert "use /v1/embeddings" in answer["error"]["message"]

    assert served([str(tmp_path)], use) == 0


def test_an_encoder_decoder_answers_a_prompt_as_generate_does(
    tmp_path: Path, served: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoder reads the prompt, also that of a chat, while others are served."""
    tokenizer = train_tokenizer(["the people of these States"], 270).library
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=3,
        eos_token_id=0,
        pad_token_id=1,
    )
    T5ForConditionalGeneration(config).eval().save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["generate", str(tmp_path), "--prompt", "the people", "--max-new-tokens", "9"]
    assert main([*words, "--seed", "4", "--json", "--device", "cpu"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]

    def use(ask: Ask) -> None:
        body = {"prompt": ["the people", "States"], "max_tokens": 9, "seed": 4}
        status, answer = ask("/v1/completions", body)
        assert status == 200
        assert len(answer["choices"]) == 2
        assert answer["choices"][0]["text"] == text
        messages = [{"role": "user", "content": "the people"}]
        assert ask("/v1/chat/completions", {"messages": messages, "max_tokens": 3})[0] == 200
        status, answer = ask("/v1/completions", {**body, "echo": True, "logprobs": 1})
        assert status == 400
        assert "no score" in answer["error"]["message"]

    flags = ["--template", "plain", "--device", "cpu"]
    assert served([str(tmp_path), *flags], use) == 0


def test_the_fingerprint_changes_with_one_bit_of_the_weights(run_directory: Path) -> None:
    model, tokenizer, _ = load(run_directory)

    def digits(rows: int = 4) -> str:
        return Engine(model, tokenizer, rows=rows).fingerprint()

    before = digits()
    assert before == digits()
    assert before != digits(rows=8)
    bits = model.lm_head_weight.detach().view(torch.int32)
    bits[3, 3] ^= 1
    assert before != digits()
