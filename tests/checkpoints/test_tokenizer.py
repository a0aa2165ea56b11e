"""checkpoints/tokenizer.py: one rule for how a text begins, whatever a directory has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import AutoTokenizer

from fenchel.checkpoints.tokenizer import (
    describe_beginning,
    document_end,
    end_ids,
    read_chat_template,
    read_tokenizer,
)
from fenchel.data import train_tokenizer
from fenchel.generation import prompt_ids
from fenchel.model import ModelConfig

START, STOP = "<start>", "<stop>"
Write = Callable[..., Path]


def tokenizer_with(template: str | None = None, *, byte_level: bool = False) -> Tokenizer:
    tokenizer = train_tokenizer(["the people of these States"], 270).library
    tokenizer.add_special_tokens([STOP, START])
    steps: list[Any] = [ByteLevel(trim_offsets=False)] if byte_level else []
    if template is not None:
        special = [(name, tokenizer.token_to_id(name)) for name in (START, STOP)]
        steps.append(TemplateProcessing(single=template, special_tokens=special))
    if steps:
        tokenizer.post_processor = Sequence(steps)
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A directory without weights; ``ids`` are those of START and STOP unless given."""

    def write(
        tokenizer: Tokenizer,
        config: dict[str, Any] | None = None,
        tokenizer_config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        files = {
            "config.json": {"model_type": "llama"} | (config or {}),
            "tokenizer_config.json": tokenizer_config,
            "generation_config.json": generation,
        }
        for name, content in files.items():
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return write


BOS = {"bos_token_id": 271, "eos_token_id": 270}


@pytest.mark.parametrize("template", [None, "$A", f"{START} $A", f"{START} $A {STOP}"])
@pytest.mark.parametrize("byte_level", [False, True])
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("llama", "LlamaTokenizerFast"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", None),
        ("mistral", "LlamaTokenizer"),
        ("qwen2", "Qwen2Tokenizer"),
        ("gpt2", "GPT2Tokenizer"),
        ("gpt2", None),
        ("gemma", "GemmaTokenizerFast"),
        ("gpt_neox", "GPTNeoXTokenizerFast"),
        ("gpt_neox", "PreTrainedTokenizerFast"),
        ("gpt_neox", None),
        ("bloom", "BloomTokenizerFast"),
    ],
)
def test_a_text_begins_as_in_transformers(
    template: str | None,
    byte_level: bool,
    model_type: str,
    tokenizer_class: str | None,
    write: Write,
    tmp_path: Path,
) -> None:
    """Whatever the other files have: the id of a first token, a switch, or neither."""
    config = {**BOS, "model_type": model_type}
    for switch in ({"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}, {}):
        settings = {**switch, "tokenizer_class": tokenizer_class, "bos_token": START}
        settings = {key: value for key, value in settings.items() if value is not None}
        settings["eos_token"] = STOP
        path = write(tokenizer_with(template, byte_level=byte_level), config, settings, BOS)
        ours, theirs = read_tokenizer(path), AutoTokenizer.from_pretrained(path)
        text, special = theirs("people")["input_ids"], (270, 271)
        first = next(number for number, id in enumerate(text) if id not in special)
        assert ours.begin_ids == text[:first]
        whole = ours.encode_whole("people")
        assert [id for id in whole if id in special] == [id for id in text if id in special]
        assert ours.encode("people") == tokenizer_with().encode("people").ids
        ours.save(tmp_path / "tokenizer.json")
        assert AutoTokenizer.from_pretrained(path)("people")["input_ids"] == text


def test_a_class_with_a_template_of_its_own_gives_it_to_a_file_without(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "people": 3, "</s>": 4}
    bert = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    t5 = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0))
    for tokenizer, model_type, marks in ((bert, "bert", (1, 2)), (t5, "t5", (4,))):
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.add_special_tokens(["[CLS]", "[SEP]", "</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        ours, theirs = read_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        whole = ours.encode_whole("people")
        assert (whole[0] in marks, whole[-1] in marks) == (model_type == "bert", True)
        for texts in (["people"], ["people", "people"]):
            expected = [id for id in theirs(*texts)["input_ids"] if id in marks]
            assert [id for id in ours.library.encode(*texts).ids if id in marks] == expected


@pytest.mark.parametrize(
    ("model_type", "marks"),
    [("distilbert", (4, 5)), ("roberta", (1, 2)), ("xlm-roberta", (1, 2)), ("mpnet", (1, 2))],
)
def test_relatives_of_bert_have_the_template_of_their_class(
    model_type: str, marks: tuple[int, int], tmp_path: Path
) -> None:
    words = ["<unk>", "<s>", "</s>", "people", "[CLS]", "[SEP]", "[UNK]", "<pad>", "<mask>"]
    ids = {word: id for id, word in enumerate(words)}
    model: Any = models.WordPiece(ids, unk_token="[UNK]")
    if model_type == "roberta":
        model = models.BPE(ids, [], unk_token="<unk>")
    if model_type == "xlm-roberta":
        model = models.Unigram([(word, -1.0) for word in words], 0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "[CLS]", "[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = read_tokenizer(tmp_path).encode_whole("people")
    theirs = AutoTokenizer.from_pretrained(tmp_path)("people")["input_ids"]
    assert (ours[0], ours[-1]) == (theirs[0], theirs[-1]) == marks


def test_a_run_begins_with_its_end_token(write: Write) -> None:
    path = write(tokenizer_with(), BOS)
    (path / "checkpoints").mkdir()  # which makes it a run
    tokenizer = read_tokenizer(path)
    assert describe_beginning(tokenizer) == "A text begins with <|end|>, the model's begin token."
    assert end_ids(path, tokenizer) == (0,)


def test_a_text_ends_where_the_checkpoint_has_it(write: Write) -> None:
    path = write(tokenizer_with(), BOS)
    assert end_ids(path, read_tokenizer(path)) == (270,)
    path = write(tokenizer_with(), {}, None, {})
    assert end_ids(path, read_tokenizer(path)) == (0,)  # by its name


@pytest.mark.parametrize("eos", [50256, [50256, 65_000, 272]])
def test_an_end_that_no_token_has_does_not_count(eos: Any, write: Write) -> None:
    path = write(tokenizer_with(), BOS, None, {"eos_token_id": eos})
    tokenizer = read_tokenizer(path)
    assert end_ids(path, tokenizer) == (0,)
    assert document_end(path, tokenizer) == 0
    path = write(tokenizer_with(), BOS, None, {"eos_token_id": [50256, 270]})
    assert end_ids(path, tokenizer) == (270,)


def test_a_document_ends_with_the_token_for_documents_and_not_for_turns(write: Write) -> None:
    tokenizer = tokenizer_with()  # of which <|end|> has the id 0
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = write(tokenizer, {}, None, {"eos_token_id": [0, 270, 272]})
    assert document_end(path, read_tokenizer(path)) == 272


def test_an_empty_prompt_follows_the_end_of_a_document_and_not_of_a_turn(write: Write) -> None:
    """As in Qwen, whose texts begin with no token and whose first end is that of turns."""
    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = write(tokenizer, {}, {"add_bos_token": False}, {"eos_token_id": [270, 272, 0]})
    tokenizer = read_tokenizer(path)
    ends = end_ids(path, tokenizer)
    assert ends == (272, 270, 0)
    config = ModelConfig(vocabulary=273, width=8, layers=1, heads=2)
    assert prompt_ids("", tokenizer, config, ends) == ([272], None)


def test_an_end_token_of_any_name_is_read(write: Write) -> None:
    tokenizer = tokenizer_with()
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != "<|end|>"]
    path = write(Tokenizer.from_str(json.dumps(raw)), BOS)
    assert end_ids(path, read_tokenizer(path)) == (270,)
    (path / "config.json").write_text("{}")
    assert end_ids(path, read_tokenizer(path)) == ()


def test_a_large_tokenizer_config_is_read(write: Write) -> None:
    many = {str(i): {"content": f"<unused{i}>", "special": False} for i in range(20_000)}
    settings = {"added_tokens_decoder": many, "add_bos_token": False}
    assert len(json.dumps(settings)) > 2**20
    assert read_tokenizer(write(tokenizer_with(), BOS, settings)).begin_ids == []


HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "{{ bos_token }}A"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "{{ bos_token }}A", "bos_token": "B"}}, "BA"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ eos_token }}",
                    "eos_token": {"content": "E"},
                }
            },
            "E",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use"}, 3]}}, None),
        ({"tokenizer_config.json": {"chat_template": 3}}, None),
        (
            {
                "chat_template.json": {"chat_template": "J"},
                "tokenizer_config.json": {"chat_template": "C"},
            },
            "J",
        ),
        (
            {
                "chat_template.jinja": "{{ bos_token }}F",
                "chat_template.json": {"chat_template": "J"},
                "tokenizer_config.json": {"chat_template": "C", "bos_token": "B"},
            },
            "BF",
        ),
    ],
)
def test_where_a_chat_template_comes_from(
    files: dict[str, Any], text: str | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = read_chat_template(tmp_path)
    assert (
        None if template is None else template.render(HELLO, add_generation_prompt=True)
    ) == text


@pytest.mark.parametrize(
    ("tokenizer_config", "special_tokens_map", "text"),
    [
        ({"eos_token": STOP}, None, f"-{STOP}"),
        ({}, {"bos_token": START, "eos_token": {"content": STOP}}, f"{START}-{STOP}"),
        ({"eos_token": "old"}, {"eos_token": STOP}, f"-{STOP}"),
        ({"eos_token": STOP, "added_tokens_decoder": {}}, {"eos_token": "x"}, f"-{STOP}"),
        ({"bos_token": None, "eos_token": STOP}, None, f"-{STOP}"),
        ({}, None, f"{START}-{STOP}"),  # by bos_token_id and eos_token_id
    ],
)
def test_a_chat_template_names_the_tokens_of_the_directory(
    tokenizer_config: dict[str, Any],
    special_tokens_map: dict[str, Any] | None,
    text: str,
    write: Write,
) -> None:
    path = write(tokenizer_with(), BOS, tokenizer_config)
    (path / "chat_template.jinja").write_text("{{ bos_token }}-{{ eos_token }}")
    if special_tokens_map is not None:
        (path / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    template = read_chat_template(path)
    assert template is not None
    assert template.render(HELLO, add_generation_prompt=True) == text


def test_a_chat_template_of_the_command_line_replaces_that_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "B"}))
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}{{ messages[0].content }}")
    for source, text in (("plain", "Buser: Hello.\nassistant:"), (str(other), "BHello.")):
        template = read_chat_template(tmp_path, source)
        assert template is not None
        assert template.render(HELLO, add_generation_prompt=True) == text


def test_files_that_cannot_be_a_chat_template_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_chat_template(tmp_path)
    file.write_bytes(b"x" * (2**16 + 1))
    with pytest.raises(ValueError, match="has 65537 bytes; more than 65536"):
        read_chat_template(tmp_path)
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="is a symbolic link"):
        read_chat_template(tmp_path)
    with pytest.raises(ValueError, match=r"missing\.jinja is missing"):
        read_chat_template(tmp_path, str(tmp_path / "missing.jinja"))
