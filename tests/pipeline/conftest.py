"""Tiny checkpoints for tuning, made by transformers, and a callback that remembers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"vocab_size": 261, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Remembering:
    """A ``RunCallback`` that records, and raises at a chosen step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.messages: list[str] = []
        self.lines: list[Mapping[str, Any]] = []

    def progress(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, steps: int) -> None:
        assert step <= steps
        if step == self.stop_at:
            raise RuntimeError("killed")

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)

    def message(self, text: str) -> None:
        self.messages.append(text)


def write_tokenizer(path: Path, *, begins: bool, template: str | None) -> None:
    """Bytes and special tokens; ``begins`` puts <s> before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: n for n, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = template
    fast.save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": begins}))


def write_checkpoint(path: Path, kind: str, *, template: str | None = TEMPLATE) -> Path:
    """A "llama" whose texts begin with <s>, or a "gpt2" whose texts begin with nothing."""
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=96,
            **SIZES,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=96,
            **{f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")},
            **SIZES,
        )
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(path)
    write_tokenizer(path, begins=kind == "llama", template=template)
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("llama")`` or ``checkpoint("gpt2")``, each made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_checkpoint(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations of two answers each, always in the same manner."""
    path = tmp_path_factory.mktemp("text") / "chats.jsonl"
    names = ("Ann", "Bob", "Cid", "Dan")
    with path.open("w") as file:
        for n in range(12):
            a, b = names[n % 4], names[(n // 3) % 4]
            turns = [("user", f"{a}?"), ("assistant", f"Yea, {a}.")]
            turns += [("user", f"{b}!"), ("assistant", f"Nay, {b}.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents as JSON lines."""
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    with path.open("w") as file:
        for n in range(40):
            text = f"{n} shells on the sea shore; " * (1 + n % 3)
            file.write(json.dumps({"text": text.strip()}) + "\n")
    return path
