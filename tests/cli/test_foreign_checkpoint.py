"""Every command on a trained checkpoint from elsewhere, with a beginning and an end of its own.

Random weights hide a wrong beginning: any token is as good as another. This small Llama is trained
by transformers on texts that begin with <start> and end with <stop>, so a text without its
beginning has another loss, another continuation and other attention.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.choice import Entmax
from fenchel.cli import main
from fenchel.data import train_tokenizer
from fenchel.hf import attach

SENTENCES = (
    "the people of these states have peace and trade with all nations.",
    "a message of the president to both houses on the state of the union.",
    "our commerce with foreign powers is free, and the treasury is full.",
)
PROMPT = "the people"
CONTEXT = 64


class Trained(NamedTuple):
    """A directory, the same model in transformers, its tokenizer there, and a text."""

    path: Path
    model: Any
    tokenizer: Any
    text: Path


def _tokenizer() -> Tokenizer:
    tokenizer = train_tokenizer(SENTENCES * 4, 320)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:  # the names that fenchel would recognise are gone
        name = {"<|end|>": "<stop>", "<|pad|>": "<fill>"}[token["content"]]
        raw["model"]["vocab"][name] = raw["model"]["vocab"].pop(token["content"])
        token["content"] = name
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_special_tokens(["<start>"])
    return tokenizer


@pytest.fixture(scope="module", params=["<start> $A", "$A"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained for about two seconds; a text begins as the template has it, with a token or none."""
    path = tmp_path_factory.mktemp("trained")
    tokenizer = _tokenizer()
    start = tokenizer.token_to_id("<start>")
    tokenizer.post_processor = TemplateProcessing(
        single=request.param, special_tokens=[("<start>", start)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    rows = [[*tokenizer.encode(s).ids, 0] for s in SENTENCES]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows])
    labels = ids.masked_fill(ids == 1, -100)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=0,
        pad_token_id=1,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(100):
            model(ids, labels=labels).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
    model.eval().save_pretrained(path)
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        bos_token="<start>",
        eos_token="<stop>",
        pad_token="<fill>",
    )
    text = path.parent / f"{path.name}.txt"
    text.write_text(SENTENCES[0])
    return Trained(path, model, theirs, text)


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def begun(trained: Trained, text: str) -> Tensor:
    return torch.tensor([trained.tokenizer(text)["input_ids"]])


@torch.no_grad()
def loss(model: Any, ids: Tensor) -> float:
    return float(cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:]))


def test_a_wrong_beginning_shows(trained: Trained) -> None:
    ids = begun(trained, SENTENCES[0])
    start = trained.model.config.bos_token_id
    wrong = ids.clone() if ids[0, 0] == start else torch.cat([torch.tensor([[start]]), ids], 1)
    wrong[0, 0] = 0 if ids[0, 0] == start else start
    assert loss(trained.model, ids) + 0.1 < loss(trained.model, wrong)


def beginning(trained: Trained) -> str:
    begins = begun(trained, "")[0].tolist() == [trained.model.config.bos_token_id]
    what = "<start>, the model's begin token" if begins else "no control token"
    return f"A text begins with {what}."


def test_eval(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(["eval", str(trained.path), "--text", str(trained.text)], capsys)
    assert found["begin"] == beginning(trained)
    assert found["loss"] == pytest.approx(
        loss(trained.model, begun(trained, SENTENCES[0])), rel=1e-5
    )


@pytest.mark.parametrize("flags", [[], ["--draft", "4"]], ids=str)
def test_generate(trained: Trained, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(trained.path), "--prompt", PROMPT, "--temperature", "0", *flags]
    found = told([*words, "--device", "cpu"], capsys)
    ids = trained.model.generate(begun(trained, PROMPT), max_new_tokens=60, do_sample=False)
    expected = trained.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert found["prompt"] + found["text"] == expected == SENTENCES[0]  # it ends at <stop>
    assert main([*words, "--device", "cpu"]) == 0
    assert beginning(trained) in capsys.readouterr().err


def test_generate_from_nothing(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(["generate", str(trained.path), "--temperature", "0", "--device", "cpu"], capsys)
    ids = begun(trained, "") if "<start>" in beginning(trained) else torch.tensor([[0]])  # <stop>
    drawn = trained.model.generate(ids, max_new_tokens=60, do_sample=False)
    assert found["text"] == trained.tokenizer.decode(drawn[0], skip_special_tokens=True)
    assert found["text"] in (*SENTENCES, "")


@pytest.mark.parametrize("command", [["inspect", "--no-blocks"], ["certify", "--radius", "0.01"]])
def test_inspect_and_certify(
    trained: Trained, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command[0], str(trained.path), "--text", str(trained.text), *command[1:]]
    found = told([*words, "--max-tokens", "6"], capsys)
    expected = trained.tokenizer.convert_ids_to_tokens(begun(trained, SENTENCES[0])[0, :6].tolist())
    assert [token.strip() for token in found["tokens"]] == [t.strip("Ġ") for t in expected]


def test_convert(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    told(["convert", str(trained.path), str(out), "--dtype", "float16"], capsys)
    assert (out / "chat_template.jinja").read_bytes() == b"{{ messages[0]['content'] }}"
    theirs = transformers.LlamaForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.float16
    assert theirs.config.bos_token_id == trained.model.config.bos_token_id
    found = told(["eval", str(out), "--text", str(trained.text), "--dtype", "float32"], capsys)
    assert found["loss"] == pytest.approx(
        loss(trained.model, begun(trained, SENTENCES[0])), abs=1e-2
    )


def test_attach_and_every_command_after_it(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", str(trained.text)
    words = ["attach", str(trained.path), "--map", "entmax", "--alpha", "1.25", "--text", text]
    record = told([*words, "--out", str(out)], capsys)
    ids = begun(trained, SENTENCES[0])
    with attach(trained.model, Entmax(1.25)):
        expected = loss(trained.model, ids)
        drawn = trained.model.generate(begun(trained, PROMPT), max_new_tokens=40, do_sample=False)
        continuation = trained.tokenizer.decode(drawn[0], skip_special_tokens=True)
    plain = loss(trained.model, ids)
    assert abs(expected - plain) > 1e-3
    assert record["text"]["eager"]["loss"] == pytest.approx(plain, rel=1e-4)
    assert record["text"]["entmax"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert told(["eval", str(out), "--text", text], capsys)["loss"] == pytest.approx(
        expected, rel=1e-4
    )
    greedy = ["--prompt", PROMPT, "--temperature", "0", "--device", "cpu", "--max-new-tokens", "40"]
    found = told(["generate", str(out), *greedy], capsys)
    assert found["prompt"] + found["text"] == continuation
    found = told(["inspect", str(out), "--text", text, "--no-blocks"], capsys)
    assert found["subject"]["family"] == "llama, entmax"
    again = told(["attach", str(out)], capsys)
    assert again["map"] == {"map": "entmax", "alpha": 1.25, "beta": 1.0}
    told(["convert", str(out), str(tmp_path / "again")], capsys)
    assert told(["eval", str(tmp_path / "again"), "--text", text], capsys)["loss"] == pytest.approx(
        expected, rel=1e-4
    )


def test_half_precision_on_a_cpu_without_it(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    told(["convert", str(trained.path), str(out), "--dtype", "bfloat16"], capsys)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    words = ["eval", str(out), "--text", str(trained.text), "--device", "cpu", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["dtype"] == "float32"
    assert "are used in float32 (--dtype bfloat16 keeps them)" in shown.err
    assert main([*words, "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["dtype"] == "bfloat16"
    assert "no instructions" not in shown.err
