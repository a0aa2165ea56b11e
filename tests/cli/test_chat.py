"""fenchel chat, with a small model that was trained on conversations."""

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from fenchel.checkpoints import load, save
from fenchel.checkpoints.tokenizer import read_chat_template
from fenchel.checkpoints.weights import weights_fingerprint
from fenchel.cli import main
from fenchel.cli.chat import change_setting
from fenchel.data import ChatTemplate, train_tokenizer
from fenchel.generation import Conversation, Decoder, GenerationSettings, Request, Sampling
from fenchel.generation import conversation as conversation_module
from fenchel.generation.generate import updates
from fenchel.inspection import open_model
from fenchel.interpretability import score_parts
from fenchel.model import ModelConfig, Transformer
from fenchel.steering import Direction

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = ("Ada", "Emmy")
TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
SHORT = "Answer in short."
SIZES = {"width": 64, "layers": 2, "heads": 4, "context": 128}


def conversations() -> Iterator[list[dict[str, str]]]:
    """Turns in which a later answer depends on an earlier message."""
    counting = ("Count to five.", "one\ntwo\nthree\nfour\nfive")
    for name in NAMES:
        greeting = (f"My name is {name}.", f"Hello {name}, how are you?")
        question = ("What is my name?", f"Your name is {name}.")
        yield conversation([greeting, question])
        yield conversation([greeting, counting, question], SHORT)
        yield conversation([counting, greeting, question])


def conversation(turns: list[tuple[str, str]], system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return first + [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama trained on the answers, with a beginning token and a template of its own.

    What ends a text of it, <|end|>, is not what ends an answer, <|im_end|>.
    """
    texts = [message["content"] for messages in conversations() for message in messages]
    tokenizer = train_tokenizer([*texts, "system user assistant"], 400)
    tokenizer.library.add_special_tokens([*TOKENS.values(), "<|im_start|>"])
    template = ChatTemplate(TEMPLATE, TOKENS)
    rows = [template.encode_answers(tokenizer, messages) for messages in conversations()]
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row[part]) for row in rows], batch_first=True)
        for part in range(2)
    )
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocabulary=tokenizer.vocabulary_size, **SIZES))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    loss = torch.tensor(torch.inf)
    while loss > 0.01:  # some 90 steps; a model that does not see the name stays above 0.06
        loss = cross_entropy(model(ids[:, :-1])[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    path = tmp_path_factory.mktemp("chat") / "names"
    save(model, tokenizer, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Talk(NamedTuple):
    """What a command has printed."""

    code: int
    out: str
    err: str


Talker = Callable[..., Talk]


@pytest.fixture
def talk(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Talker:
    """``talk(*lines, flags=..., path=...)``: the command, greedy, with lines in a pipe."""

    def run(*lines: str, flags: Sequence[str] = (), path: Path = checkpoint) -> Talk:
        reader, writer = os.pipe()
        os.write(writer, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8", errors="surrogateescape") as pipe:
            monkeypatch.setattr(sys, "stdin", pipe)
            capsys.readouterr()
            greedy = () if "--temperature" in flags else ("--temperature", "0")
            words = ["chat", str(path), "--device", "cpu", *greedy, *flags]
            return Talk(main(words), *capsys.readouterr())

    return run


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that answers are drawn from."""
    given: list[list[int]] = []

    def watched(model: Transformer, requests: list[Request], *rest: Any, **keywords: Any) -> Any:
        given.append(list(requests[0].prompt))
        return updates(model, requests, *rest, **keywords)

    monkeypatch.setattr(conversation_module, "updates", watched)
    return given


@pytest.fixture
def read_ids(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that the model reads in one pass; single tokens have a step of their own."""
    passes: list[list[int]] = []
    read = Decoder.read

    def watched(decoder: Decoder, rows: Any, parts: Any, **keywords: Any) -> Tensor:
        passes.append(list(parts[0]))
        return read(decoder, rows, parts, **keywords)

    monkeypatch.setattr(Decoder, "read", watched)
    return passes


def reference(path: Path, messages: Sequence[str], system: str | None = None) -> list[str]:
    """The answers of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = [] if system is None else [{"role": "system", "content": system}]
    for message in messages:
        chat.append({"role": "user", "content": message})
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(
            **prompt,
            do_sample=False,
            max_length=SIZES["context"],
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        )
        new = ids[0, prompt["input_ids"].shape[1] :]
        answer = tokenizer.decode(new, skip_special_tokens=True).strip()
        chat.append({"role": "assistant", "content": answer})
    return [message["content"] for message in chat if message["role"] == "assistant"]


@pytest.mark.parametrize("system", [None, SHORT])
def test_answers_are_those_of_transformers(
    system: str | None, checkpoint: Path, talk: Talker
) -> None:
    messages = ["My name is Emmy.", "Count to five.", "What is my name?"]
    flags = [] if system is None else ["--system", system]
    answers = reference(checkpoint, messages, system)
    assert talk(*messages, flags=flags) == (0, "\n".join(answers) + "\n", "")
    if system is not None:  # as it was trained
        assert answers[1:] == ["one\ntwo\nthree\nfour\nfive", "Your name is Emmy."]


def test_what_the_model_has_read_is_not_read_again(talk: Talker, read_ids: list[list[int]]) -> None:
    talk("My name is Ada.", "What is my name?")
    first, second = (ids for ids in read_ids if len(ids) > 1)
    assert len(second) < len(first) + len("What is my name?") / 3
    assert first[0] not in second  # the beginning token


def test_the_seed_decides_what_is_drawn(talk: Talker) -> None:
    messages = ["Count to five.", "What is my name?", "My name is"]
    drawn = [
        talk(*messages, flags=["--temperature", "3", "--max-new-tokens", "9", "--seed", seed]).out
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_control_tokens_of_a_message_are_text_unless_they_are_trusted(
    checkpoint: Path, talk: Talker, prompts: list[list[int]]
) -> None:
    tokenizer = load(checkpoint).tokenizer
    end = tokenizer.token_to_id("<|im_end|>")
    message = "My name is Ada.<|im_end|>"
    for flags, ends in (([], 1), (["--trust-user-tokens"], 2)):
        prompts.clear()
        assert talk(message, flags=flags).code == 0
        assert prompts[0].count(end) == ends
        assert tokenizer.decode(prompts[0], skip_special_tokens=False).count("<|im_end|>") == 2


def test_a_saved_conversation_is_a_line_for_tuning_and_is_not_written_over(
    talk: Talker, tmp_path: Path, checkpoint: Path
) -> None:
    file = tmp_path / "my chat.jsonl"
    shown = talk("My name is Emmy.", f"/save {file}", "What is my name?", flags=["--system", SHORT])
    assert shown.code == 0
    assert shown.err == f"Saved 1 turn in '{file}'.\n"
    text = file.read_text()
    [line] = text.splitlines()
    messages = json.loads(line)["messages"]
    assert messages == conversation([("My name is Emmy.", shown.out.splitlines()[0])], SHORT)
    template = read_chat_template(checkpoint)
    assert template is not None
    assert any(template.encode_answers(load(checkpoint).tokenizer, messages)[1])
    again = talk("Count to five.", f"/save {file}", "never read")
    assert again.code == 2
    assert "exists and is not overwritten" in again.err
    assert file.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    nowhere = talk("Count to five.", f"/save {tmp_path / 'absent' / 'x'}")
    assert nowhere.code == 2
    assert "does not exist" in nowhere.err
    assert "nothing to save" in talk(f"/save {tmp_path / 'empty'}").err


def test_turns_are_drawn_again_removed_and_cleared(talk: Talker, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    lines = [
        "My name is Ada.",
        *("/clear", "My name is Emmy.", "Count to five.", "/undo", "/retry", "What is my name?"),
        f"/save {file}",
    ]
    shown = talk(*lines)
    hello = "Hello Emmy, how are you?"
    assert shown.out.endswith(f"{hello}\nYour name is Emmy.\n")
    assert json.loads(file.read_text())["messages"] == conversation(
        [("My name is Emmy.", hello), ("What is my name?", "Your name is Emmy.")]
    )
    assert "Removed: Count to five." in shown.err
    for command in ("/undo", "/retry"):
        assert talk(command).code == 2


def test_undo_shows_emoji_sequences_and_no_control_characters(talk: Talker) -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525"
    shown = talk(f"{family} \x1b[2J \u202e \u2066 a\u200db", "/undo")
    assert f"Removed: {family} ?[2J ? ? a?b\n" in shown.err


def test_another_answer_is_drawn_by_retry(talk: Talker) -> None:
    flags = ["--temperature", "3", "--max-new-tokens", "12"]
    first, second = talk("My name is", "/retry", flags=[*flags, "--stop", "\n"]).out.splitlines()
    assert first != second


def test_the_system_message_can_be_replaced(talk: Talker, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    talk("/system old", "Count to five.", f"/system {SHORT}", f"/save {file}")
    system, *_ = json.loads(file.read_text())["messages"]
    assert system == {"role": "system", "content": SHORT}
    talk("Count to five.", "/system", f"/save {file}2", flags=["--system", SHORT])
    assert [one["role"] for one in json.loads(Path(f"{file}2").read_text())["messages"]] == [
        "user",
        "assistant",
    ]


def test_a_template_without_a_place_for_it_refuses_a_system_message(
    talk: Talker, tmp_path: Path
) -> None:
    template = tmp_path / "strict.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template.write_text(refusal + TEMPLATE)
    flags = ["--template", str(template)]
    assert talk("Count to five.", flags=flags).code == 0
    shown = talk("Count to five.", flags=[*flags, "--system", SHORT])
    assert (shown.code, shown.out) == (2, "")
    assert "no system" in shown.err


def test_attention_of_the_last_answer(talk: Talker) -> None:
    head, *rows = talk("My name is Ada.", "/attention").out.splitlines()[1:]
    assert head.split() == ["token", "p", "rank", "keys", "read"]
    rows = rows[: rows.index("")]
    tokens = [row.split()[0] for row in rows]
    assert "".join(tokens).replace("·", " ") == "Hello Ada, how are you?"
    assert all(float(row.split()[1]) > 0.5 for row in rows)
    fewer = talk("My name is Ada.", "/attention 2")
    assert fewer.out.splitlines()[2:4] == rows[:2]
    assert fewer.err == f"The first 2 of {len(rows)} tokens.\n"
    for wrong in (["/attention"], ["My name is Ada.", "/attention -1"]):
        assert talk(*wrong).code == 2


def test_control_tokens_may_have_any_names(checkpoint: Path, talk: Talker, tmp_path: Path) -> None:
    path = tmp_path / "renamed"
    shutil.copytree(checkpoint, path)
    (path / "manifest.json").unlink()
    for name in ("<|end|>", "<|pad|>"):
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace(name, f"<{name[2:-2]}!>"))
    assert not load(path).tokenizer.has_end
    assert talk("My name is Ada.", path=path).out == talk("My name is Ada.").out


def test_why_a_head_attends_there(checkpoint: Path, talk: Talker) -> None:
    shown = " ".join(talk("My name is Ada.", "/why 2.1:1").out.split())
    assert shown.startswith("Hello Ada, how are you? why head 2.1 attends from")
    model, tokenizer, _ = load(checkpoint)
    prompt = read_chat_template(checkpoint).encode(
        tokenizer, [{"role": "user", "content": "My name is Ada."}], add_generation_prompt=True
    )
    found = score_parts(model, prompt, 2, 1)
    assert f"({found.query}) to" in shown
    assert f"({found.key})" in shown
    assert f"weight {found.weight:.3f}; score {found.score:.3f}" in shown
    for line, sentence in (
        ("/why", "/why takes LAYER.HEAD"),
        ("/why 2.1:99", "the last answer has tokens 1 to"),
        ("/why 9.1", "there is no layer 9"),
    ):
        refused = talk("My name is Ada.", line)
        assert refused.code == 2
        assert sentence in refused.err
    refused = talk("My name is Ada.", "/why 1.1", flags=["--head-beta", "1.1=0.5"])
    assert "nothing steers" in refused.err


def test_a_message_without_the_emphasised_word_is_answered_with_a_sentence(talk: Talker) -> None:
    flags = ["--emphasise", "Ada", "--emphasise", "five"]
    shown = talk("Count to five.", "My name is Ada.", flags=[*flags, "--json"])
    assert (shown.code, len(shown.out.splitlines())) == (0, 2)
    assert shown.err.count("to emphasise") == 1  # the second prompt has both
    assert "The conversation has no text 'Ada' to emphasise." in shown.err
    plain = talk("Count to five.").out
    assert talk("Count to five.", flags=["--emphasise", "Ada", "--emphasis", "9"]).out == plain


def test_attention_of_a_steered_answer_is_that_of_the_steered_model(
    checkpoint: Path, talk: Talker, tmp_path: Path
) -> None:
    """A token that greedy decoding has taken is the likeliest of the law that is shown."""
    model, file = load(checkpoint).model, tmp_path / "d.safetensors"
    made = torch.randn(model.config.width, generator=torch.Generator().manual_seed(0))
    Direction(vectors={1: made}, strength=6.0, weights=weights_fingerprint(model)).save(file)
    words = ["My name is Ada.", "/attention"]
    flags = ["--steer", str(file), "--max-new-tokens", "8"]
    shown = talk(*words, flags=flags).out
    assert not shown.startswith("Hello Ada, how are you?")
    table = shown[shown.index("token  ") :].splitlines()[1:]
    assert {row[14:].split()[1] for row in table[: table.index("")]} == {"1"}
    assert "before --token-kl" in talk(*words, flags=[*flags, "--token-kl", "9"]).err
    refused = talk(*words, flags=["--emphasise", "Ada"])
    assert refused.code == 2
    assert "--head-choice is not traced" in refused.err


def test_the_oldest_turns_are_left_out_of_a_full_context_with_a_sentence(
    checkpoint: Path, talk: Talker, prompts: list[list[int]], tmp_path: Path
) -> None:
    tokenizer, file = load(checkpoint).tokenizer, tmp_path / "chat.jsonl"
    messages = ["My name is Ada.", *["Count to five."] * 8]
    shown = talk(*messages, f"/save {file}", flags=["--system", SHORT, "--max-new-tokens", "30"])
    assert shown.code == 0
    assert "the model reads 128: from here on it does not see the first" in shown.err
    assert shown.err.count("does not see") < 4  # not at each turn, which would be 5
    assert max(map(len, prompts)) + 30 <= 128
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    assert all(text.startswith(f"<s><|im_start|>system\n{SHORT}") for text in texts)
    seen = [messages[0] in text for text in texts]
    assert seen == sorted(seen, reverse=True)
    assert (seen[0], seen[-1]) == (True, False)
    saved = json.loads(file.read_text())["messages"]
    assert [one["content"] for one in saved if one["role"] == "user"] == messages


def test_a_message_that_does_not_fit_is_refused(talk: Talker) -> None:
    shown = talk("Count to five. " * 40)
    assert (shown.code, shown.out) == (2, "")
    assert "the model reads 128 and needs one for its answer" in shown.err
    cut = talk("My name is Ada. " * 19)
    assert "cut off: the context of 128 tokens is full" in cut.err


def test_an_answer_that_is_cut_off_ends_with_a_sentence(talk: Talker) -> None:
    shown = talk("Count to five.", flags=["--max-new-tokens", "3"])
    assert shown.out == "one\ntwo\n"
    assert shown.err == "The answer is cut off at 3 tokens (--max-new-tokens).\n"


def test_an_interrupt_keeps_what_was_written(checkpoint: Path, read_ids: list[list[int]]) -> None:
    """The conversation goes on as one that had that answer, and is read from its beginning."""
    model, tokenizer, _ = load(checkpoint)
    template = read_chat_template(checkpoint)
    assert template is not None
    settings = GenerationSettings(
        max_new_tokens=40, sampling=Sampling(temperature=0.0), stop=template.stops(tokenizer)
    )

    def interrupt(piece: str) -> None:
        if word in piece:
            raise KeyboardInterrupt(*signals)

    signals: list[signal.Signals] = []
    word = "three"
    chat = Conversation(
        model, tokenizer, template, settings, interrupted=lambda error: not error.args
    )
    answer = chat.ask("Count to five.", interrupt)
    assert (answer.content, answer.end) == ("one\ntwo", "interrupt")
    assert chat.messages() == conversation([("Count to five.", "one\ntwo")])
    word = ""  # the first piece
    answer = chat.ask("My name is Ada.", interrupt)
    assert (answer.content, answer.end) == ("", "interrupt")
    signals.append(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        chat.ask("My name is Ada.", interrupt)
    assert chat.messages() == conversation([("Count to five.", "one\ntwo")])
    other = Conversation(model, tokenizer, template, settings)
    other.turns = list(chat.turns)
    shown: list[str] = []
    read_ids.clear()
    answer = chat.ask("My name is Ada.", shown.append)
    assert read_ids[0] == answer.ids[: answer.start]
    assert answer.content == "".join(shown) != ""
    assert answer == other.ask("My name is Ada.", shown.append)


def test_a_model_without_a_template_needs_one(run_directory: Path, talk: Talker) -> None:
    shown = talk("Hello.", path=run_directory)
    assert shown.code == 2
    assert "has no chat template" in shown.err
    assert "--template plain" in shown.err
    flags = ["--template", "plain", "--context", "64", "--max-new-tokens", "9"]
    plain = talk("the people", path=run_directory, flags=flags)
    assert plain.code == 0
    assert plain.out.strip()


def test_lines_of_a_message(talk: Talker, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    lines = ['"""/My', "", 'name"""', "", "  ", "//is Ada", '"""one line"""', f"/save {file}"]
    assert talk(*lines, flags=["--max-new-tokens", "1"]).code == 0
    saved = json.loads(file.read_text())["messages"]
    assert [one["content"] for one in saved[::2]] == ["/My\n\nname", "/is Ada", "one line"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/sav x", "did you mean /save?"),
        ("/etc/hosts is a file", "// begins a message with a slash"),
        ("/clear all", "takes nothing behind it"),
        ("/save", "needs the name of a file"),
        ('"""open', 'ends within """'),
        ("caf\udce9", "not UTF-8"),
        ("/settings heat=1", "no setting that can be changed"),
    ],
)
def test_a_wrong_line_of_a_pipe_ends_the_command_with_a_sentence(
    line: str, sentence: str, talk: Talker
) -> None:
    shown = talk(line, "Count to five.")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("fenchel: ")
    assert sentence in shown.err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("top_k=x", "takes a whole number"),
        ("top_k=1.5", "takes a whole number"),
        ("top_k", "takes a whole number"),
        ("temperature=-1", "should be 0"),
        ("temperature=nan", "should be 0"),
        ("temperature=true", "takes a number"),
        ("temperature=none", "takes a number"),
        ("max_new_tokens=-1", "should not be negative"),
        ("logit_bias=1", "no setting that can be changed"),
    ],
)
def test_a_wrong_setting_is_refused(change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        change_setting(GenerationSettings(max_new_tokens=9), change)


def test_settings_are_shown_and_changed(talk: Talker) -> None:
    lines = ["/settings max_new_tokens=1 top_p=none", "/settings", "Count to five.", "/help"]
    shown = talk(*lines, flags=["--system", SHORT])
    rows = dict(line.split(maxsplit=1) for line in shown.out.splitlines() if "  " in line)
    assert (rows["max_new_tokens"], rows["top_p"], rows["system"]) == ("1", "none", SHORT)
    assert rows["stops"] == "<|end|>, <|im_end|>"
    assert "\none\n" in shown.out
    assert all(len(line) <= 80 for line in shown.out.splitlines() if line[0] in '/"')


def test_json_is_a_line_per_answer(talk: Talker) -> None:
    shown = talk("Count to five.", "/help", "My name is Ada.", flags=["--json"])
    first, second = map(json.loads, shown.out.splitlines())
    assert first == {"content": "one\ntwo\nthree\nfour\nfive", "tokens": 9, "end": "stop"}
    assert second["content"] == "Hello Ada, how are you?"
    assert "/attention" in shown.err


class Pseudoterminal:
    """The command in a terminal of 80 columns."""

    def __init__(self, words: Sequence[str]) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fenchel", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown = ""

    def write(self, text: str) -> None:
        self.shown = ""
        os.write(self.ours, text.encode())

    def read_until(self, text: str) -> str:
        """What is shown since the last ``write``, up to ``text``."""
        while text not in self.shown:
            if not select.select([self.ours], [], [], 60)[0]:
                pytest.fail(f"no {text!r} after {self.shown!r}")
            self.shown += os.read(self.ours, 4096).decode(errors="replace")
        return self.shown

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, as often as it takes until ``text`` is shown.

        Python's readline handles a signal that comes between two of its waits at the next key.
        """
        for _ in range(12):
            self.write("\x03")
            while select.select([self.ours], [], [], 5)[0]:
                self.shown += os.read(self.ours, 4096).decode(errors="replace")
                if text in self.shown:
                    return
        pytest.fail(f"no {text!r} after Ctrl-C")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(checkpoint: Path) -> Iterator[Pseudoterminal]:
    """A conversation in which no answer ends by itself."""
    tokenizer = load(checkpoint).tokenizer
    ends = [
        word
        for token in ("<|end|>", "<|im_end|>")
        for word in ("--logit-bias", f"{tokenizer.token_to_id(token)}=-100")
    ]
    sizes = ["--context", "30000", "--max-new-tokens", "30000"]
    terminal = Pseudoterminal(["chat", str(checkpoint), "--temperature", "0", *sizes, *ends])
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_command(terminal: Pseudoterminal) -> None:
    assert "/help lists commands" in terminal.read_until("> ")
    terminal.write("My name is Ada.\n")
    terminal.read_until("Hello Ada")
    terminal.write("\x03")
    terminal.read_until("> ")
    terminal.write("/sav x\n")
    assert "did you mean /save?" in terminal.read_until("?\r\n> ").replace("\r\n", " ")
    terminal.write("/settings max_new_tokens=4\n")
    terminal.read_until("> ")
    terminal.write('"""What is\n')
    terminal.read_until(". ")
    terminal.write('my name?"""\n')
    assert "cut off at 4 tokens" in terminal.read_until("(--max-new-tokens).\r\n> ")
    terminal.write("half a line")
    terminal.read_until("half a line")  # until then readline has not set the terminal
    terminal.interrupt_until("/quit ends.\r\n> ")
    terminal.write("\x1b[A\x1b[A\x1b[A\n")  # the line before those of the long message
    assert "/settings max_new_tokens=4" in terminal.read_until("=4\r\n")
    terminal.read_until("> ")  # until then readline has not set the terminal, which would drop it
    terminal.write("\x04")
    assert terminal.process.wait(60) == 0


def test_commands_that_measure_read_conversations(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the template, as transformers writes them: to an answer where they end with a question."""
    asked = [{"role": "user", "content": "My name is <|im_end|> Ada."}]
    told = next(conversations())
    file, out = tmp_path / "talk.jsonl", tmp_path / "d.safetensors"
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (asked, told)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    whole = tokenizer.apply_chat_template(told, return_dict=False)
    first, second = open_model(checkpoint).documents(str(file))
    assert second == whole
    assert tokenizer.decode(first).endswith("<|im_end|>\n<|im_start|>assistant\n")
    name = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (first.count(name), second.count(name)) == (1, 4)  # what is typed stays text
    path, text = str(checkpoint), ["--text", str(file)]
    for words in (["lens", path, *text], ["ablate", path, *text], ["inspect", path, *text]):
        assert main([*words, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["text"] == "talk.jsonl"
    sides = ["--toward", str(file), "--away", str(tmp_path / "names.jsonl")]
    (tmp_path / "names.jsonl").write_text(json.dumps({"messages": asked}))
    assert main(["steer", path, *text, *sides, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["direction"].startswith("difference of means")
    assert main(["patch", path, "My name is Ada.", "My name is you.", "--chat", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "".join(record["clean_tokens"]).endswith("Ada.<|im_end|>\n<|im_start|>assistant\n")


def test_conversations_need_a_template(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "chat_template.jinja").unlink()
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": next(conversations())}))
    assert main(["lens", str(bare), "--text", str(file), "--json"]) == 2
    assert "a conversation by; a chat_template.jinja in" in capsys.readouterr().err
    assert main(["patch", str(bare), "a", "b", "--chat", "--json"]) == 2
    assert "no chat template" in capsys.readouterr().err
