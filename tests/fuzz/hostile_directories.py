"""Hostile checkpoint directories, over all commands that read one.

    python -m tests.fuzz.hostile_directories --directories 2000 --seed 0

Each directory is a copy of a sound one (families of ours and of transformers alone, in one file and
in several, a run) after one to three random changes: to its settings, headers, weights, index,
tokenizer, other JSON files, or to the file system (links, pipes, sockets, folders, sparse files).
A command runs on it in a fork of this process, which has imported everything, and must

    end        with a documented exit code, within 10 s of processor time (of its children too) and
               1 GiB of memory above the parent's (a child of a command limits itself)
    speak      on standard error in printable lines of bounded length, one sentence at the end
    stay in    reads and writes nothing outside: an audit hook, inotify on planted files that
               changes point to, and a comparison of the directory before and after
    commit     --out is absent, or sealed by a manifest that verifies

Figures go to results/hostile_directories.json. A violation is printed with its number, and
``--seed SEED --start NUMBER --directories 1 --dry`` makes the same directory again.
"""

import argparse
import base64
import ctypes
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import record
from fenchel.cli import main as fenchel
from fenchel.files import MANIFEST, verify
from fenchel.model import ModelConfig, Transformer

RESULTS = Path(__file__).parent / "results"
SECONDS, BYTES, LONGEST = 10.0, 2**30, 1000
TEXT = "the people of these States have peace and trade with every nation. "
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
OTHERS = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "adapter_config.json", "adapter_model.safetensors", "vocab.json"),
    *("merges.txt", "vocab.txt", "chat_template.jinja", "pytorch_model.bin", MANIFEST),
)
Mutation = Callable[[random.Random, Path, Path], str]
"""Changes a directory, given a folder of planted files; returns what it did."""


# sound directories


def sound_directories(home: Path, text: Path) -> dict[str, Path]:
    """One directory for each kind, by name."""
    from fenchel.checkpoints import save
    from fenchel.data import train_tokenizer

    tokenizer = train_tokenizer([TEXT * 4], 300)
    size = tokenizer.vocabulary_size
    shape: dict[str, Any] = {
        "vocabulary": size,
        "context": 64,
        "width": 16,
        "layers": 2,
        "heads": 2,
    }
    layer: dict[str, Any] = {**shape, "norm": "layer", "mlp": "gelu_tanh", "bias": True}
    ours = {
        "llama": ModelConfig(**{**shape, "heads": 4}, kv_heads=2, hidden=20, tied=False),
        "gpt2": ModelConfig(**layer, positions="learned"),
        "gpt_neox": ModelConfig(**{**layer, "mlp": "gelu"}, rotary_fraction=0.5, parallel=True),
        "bloom": ModelConfig(**layer, positions="alibi", embedding_norm=True),
        "t5": ModelConfig(
            **shape,
            kind="encoder-decoder",
            positions="buckets",
            buckets=8,
            mlp="relu",
            score_scale=1.0,
            logit_scale=16**-0.5,
        ),
    }
    paths = {}
    for name, config in ours.items():
        model = _sharpened(Transformer(config, generator=torch.Generator().manual_seed(1)))
        for kind, shard in ((name, 10**9), (f"{name} in shards", 4000)):
            if shard == 10**9 or name == "llama":
                paths[kind] = home / kind.replace(" ", "_")
                save(model, tokenizer, paths[kind], shard=shard)
    paths |= _foreign_directories(home, tokenizer, size)
    paths["attached"] = home / "attached"
    _quietly(["attach", str(paths["llama"]), "--map", "entmax", "--out", str(paths["attached"])])
    paths["run"] = home / "run"
    sets = ("text.vocabulary=300", "model.context=16", "model.width=16", "model.layers=1")
    words = ["train", "--text", str(text), "--steps", "4", "--out", str(paths["run"])]
    sets = (*sets, "train.batch=2", "train.threads=1", "train.save_every=2")
    _quietly([*words, *(word for one in sets for word in ("--set", one))])
    return paths


def _sharpened(model: Any) -> Any:
    """The model with larger matrices, so that another choice map changes its output."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.4, generator=generator)
    return model


def _foreign_directories(home: Path, tokenizer: Any, size: int) -> dict[str, Path]:
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    common = {"vocab_size": size, "num_hidden_layers": 2, "num_attention_heads": 2}
    narrow = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    opt = {"hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16}
    models = {
        "opt": hf.OPTForCausalLM(hf.OPTConfig(**common, **opt, max_position_embeddings=64)),
        "phi": hf.PhiForCausalLM(hf.PhiConfig(**common, **narrow)),
        "biogpt": hf.BioGptForCausalLM(hf.BioGptConfig(**common, **narrow)),
        "distilbert": hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(vocab_size=size, dim=16, hidden_dim=24, n_layers=2, n_heads=2)
        ),
        "bert": hf.BertForMaskedLM(hf.BertConfig(**common, **narrow)),
    }
    paths = {}
    for name, model in models.items():
        for kind, shard in ((name, "1GB"), (f"{name} in shards", "6KB")):
            if shard == "1GB" or name == "opt":
                paths[kind] = home / kind.replace(" ", "_")
                _sharpened(model).save_pretrained(paths[kind], max_shard_size=shard)
                tokenizer.save(str(paths[kind] / TOKENIZER))
    return paths


def _quietly(words: list[str]) -> None:
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert fenchel(words) == 0, words
    finally:
        sys.stdout = stdout


def commands(text: Path, directory: Path, out: Path) -> dict[str, list[str]]:
    """Each command on a directory, with a place for what it writes."""
    where, page = str(directory), ["--out", str(out)]
    reading = ["--text", str(text), "--max-tokens", "12"]
    return {
        "generate": ["generate", where, "--prompt", "the people", "--max-new-tokens", "4"],
        "eval": ["eval", where, "--text", str(text), "--tokens", "40"],
        "inspect": ["inspect", where, *reading, "--no-blocks", *page],
        "certify": ["certify", where, *reading, "--radius", "0.1", "--steps", "2", *page],
        "convert": ["convert", where, str(out)],
        "attach": [
            "attach",
            where,
            "--map",
            "entmax",
            "--text",
            str(text),
            "--tokens",
            "20",
            *page,
        ],
        "doctor": ["doctor", where, "--json"],
        "report": ["report", where],
    }


# changes

NASTY = (
    *("", "\x1b[2J\x1b]0;x\x07", "\u202egnp", "\ud800", "\x00", "a\nb", "x" * 5000, "é" * 300),
    *("../outside/x.safetensors", "/etc/passwd", "~/x", "file:///etc/passwd", "a/b", "auto"),
    *("http://127.0.0.1:9/x", "model.safetensors", "__class__", "{{7*7}}", "%s%n", "$(id)"),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 63, 64, 65, 2**15, 2**20, 2**24, 2**24 + 1, 2**31, 2**32, 2**53, 2**63),
    *(-(2**31), 10**18, 10**40, 0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e300, math.nan, math.inf),
)
KEYS = (
    *("transformers_weights", "auto_map", "quantization_config", "attn_implementation", "adapters"),
    *("fusion_config", "backbone", "use_timm_backbone", "custom_pipelines", "trust_remote_code"),
    *("text_config", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "dtype"),
    *("torch_dtype", "is_encoder_decoder", "is_decoder", "add_cross_attention", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "tie_word_embeddings", "fenchel", "_name_or_path"),
    *("chunk_size_feed_forward", "pruned_heads", "num_experts", "layerdrop", "id2label"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, often one that is out of place."""
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(NASTY)
    if kind < 8:
        return rng.choice((None, True, False, rng.randrange(300), rng.random()))
    if kind < 10:
        return [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5, 40)))]
    keys = (*KEYS, *NASTY, "type", "map", "alpha", "factor")
    return {rng.choice(keys): value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}


def _is_plain(path: Path) -> bool:
    """Whether a file was not replaced by an earlier change."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 2**24


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text()) if _is_plain(path) else {}
    except (ValueError, RecursionError):
        return {}


def _write(path: Path, content: Any) -> None:
    if not _is_plain(path) and os.path.lexists(path):
        return
    path.write_text(
        json.dumps(content) if not isinstance(content, str) else content, "utf-8", "surrogatepass"
    )


def change_json(rng: random.Random, path: Path) -> str:
    """A few entries of a JSON file, anywhere in it, or its text."""
    document = _json(path)
    if rng.random() < 0.15 or not isinstance(document, dict):
        return change_text(rng, path)
    what = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        inner: Any = document
        while isinstance(inner, dict) and inner:
            key = rng.choice(sorted(inner))
            if isinstance(inner[key], dict) and inner[key] and rng.random() < 0.7:
                inner = inner[key]
                continue
            action = rng.randrange(6)
            if action == 0:
                del inner[key]
            elif action == 1:
                inner[rng.choice((*KEYS, *NASTY))] = value(rng)
            elif action == 2 and isinstance(inner[key], int):
                inner[key] = rng.choice(
                    (
                        inner[key] * 2,
                        inner[key] + 1,
                        inner[key] - 1,
                        -inner[key],
                        inner[key] * 2**12,
                    )
                )
            else:
                inner[key] = value(rng)
            what.append(str(key)[:30])
            break
    _write(path, document)
    return f"{path.name}: {', '.join(what)}"


def change_text(rng: random.Random, path: Path) -> str:
    """The bytes of a file: cut, flipped, repeated, or of another kind altogether."""
    if not _is_plain(path):
        return f"{path.name}: none"
    data = bytearray(path.read_bytes())
    action = rng.randrange(7)
    if action == 0:
        data = data[: rng.randrange(len(data) + 1)]
    elif action == 1:
        for _ in range(rng.choice((1, 3, 30))):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif action == 2:
        data = data + data[rng.randrange(len(data) + 1) :]
    elif action == 3:
        data = bytearray(b"\xef\xbb\xbf" + data)
    elif action == 4:
        data = bytearray(rng.randbytes(rng.choice((0, 1, 9, 4096))))
    elif action == 5:
        data = bytearray(b'{"a":' * rng.choice((10, 1000, 100_000)))
    else:
        data = bytearray(b'{"x": ' + b"9" * rng.choice((400, 5000, 200_000)) + b"}")
    path.write_bytes(data)
    return f"{path.name}: bytes, {action}"


def settings(rng: random.Random, path: Path, _: Path) -> str:
    return change_json(rng, path / CONFIG)


def sizes(rng: random.Random, path: Path, _: Path) -> str:
    """Settings that are whole numbers, made larger."""
    document = _json(path / CONFIG)
    keys = [k for k, v in document.items() if type(v) is int] if isinstance(document, dict) else []
    for key in rng.sample(keys, min(len(keys), rng.choice((1, 2, 3)))):
        document[key] = rng.choice((2**10, 2**14, 2**18, 2**22, 2**24, 2**28, 10**5, 10**9))
    _write(path / CONFIG, document)
    return f"sizes: {', '.join(keys)[:80]}"


def family(rng: random.Random, path: Path, _: Path) -> str:
    """Another model_type or another class, of those that transformers has."""
    import transformers

    document = _json(path / CONFIG)
    if not isinstance(document, dict):
        return "family: none"
    if rng.random() < 0.7:
        document["model_type"] = rng.choice(sorted(transformers.CONFIG_MAPPING))
    else:
        names = [n for n in dir(transformers) if n.endswith(("Model", "CausalLM", "LMHeadModel"))]
        document["architectures"] = [rng.choice(names)]
    _write(path / CONFIG, document)
    return f"family: {document.get('model_type')} {document.get('architectures')}"


def _weight_file(rng: random.Random, path: Path) -> Path:
    files = [file for file in sorted(path.rglob("*.safetensors")) if _is_plain(file)]
    return rng.choice(files) if files else path / WEIGHTS


def header(rng: random.Random, path: Path, _: Path) -> str:
    """Entries of the header of a safetensors file."""
    file = _weight_file(rng, path)
    if not _is_plain(file):
        return "header: none"
    try:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        name = rng.choice([key for key in head if key != "__metadata__"])
    except (ValueError, IndexError, RecursionError):
        return "header: none"
    action = rng.randrange(9)
    entry = head[name]
    if action == 0:
        entry["shape"] = entry["shape"][::-1] if rng.random() < 0.5 else [math.prod(entry["shape"])]
    elif action == 1:
        entry["dtype"] = rng.choice(("F16", "BF16", "I32", "F64", "F8_E4M3", "U8", "C64", "F4", 7))
    elif action == 2:
        begin, end = entry["data_offsets"]
        by = rng.choice((1, -1, 4, -4, 2**33))
        entry["data_offsets"] = [begin + by, end + by]
    elif action == 3:
        head[rng.choice((*NASTY, "lm_head.weight", name + ".x"))] = head.pop(name)
    elif action == 4:
        head["planted"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif action == 5:
        head["__metadata__"] = value(rng)
    elif action == 6:
        entry[rng.choice(("dtype", "shape", "data_offsets", "extra"))] = value(rng)
    elif action == 7:
        del head[name]
    else:
        length = rng.choice((0, 1, 2**20, 2**31, 2**63, length + 1, length - 1))
        file.write_bytes(struct.pack("<Q", length % 2**64) + data[8:])
        return "header: length"
    text = json.dumps(head).encode("utf-8", "surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"header: {action}"


def numbers(rng: random.Random, path: Path, _: Path) -> str:
    """Numbers of the weights: nan, infinities, the largest and the smallest, and flipped bits."""
    file = _weight_file(rng, path)
    if not _is_plain(file):
        return "numbers: none"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little") % (len(data) + 1)
    for _ in range(rng.choice((1, 10, 300))):
        if start + 4 < len(data):
            at = start + (rng.randrange(len(data) - start - 4) & ~3)
            new = rng.choice((math.nan, math.inf, 3e38, -3e38, 1e-45, 0.0))
            data[at : at + 4] = struct.pack("<f", new)
    file.write_bytes(data)
    return "numbers"


def index(rng: random.Random, path: Path, outside: Path) -> str:
    """The index of a directory in shards, or a planted one."""
    document = _json(path / INDEX)
    if not isinstance(document, dict) or "weight_map" not in document:
        document = {"weight_map": {"a": WEIGHTS}, "metadata": {}}
        if rng.random() < 0.5 and (path / WEIGHTS).is_file():
            (path / WEIGHTS).rename(path / "model-00001-of-00001.safetensors")
    names = sorted(document["weight_map"])
    planted = [str(p) for p in outside.iterdir()]
    targets = [
        *(planted + [os.path.relpath(p, path) for p in planted]),
        *(".", "..", "", "x.safetensors", "C:\\x.safetensors", "model-00001-of-00001.safetensors"),
        *NASTY,
        5,
        None,
        [],
    ]
    some = rng.sample(names, max(1, len(names) // 2)) if rng.random() < 0.5 else names
    for name in some:
        document["weight_map"][name] = rng.choice(targets) if rng.random() < 0.3 else targets[0]
    if rng.random() < 0.3:
        document["metadata"] = {"total_size": value(rng)}
    _write(path / INDEX, document)
    return "index"


def _pattern(rng: random.Random, depth: int = 0) -> str:
    """A regular expression, some of them slow, some of them none."""
    atoms = (
        r"\w",
        r"\s",
        ".",
        "a",
        "[^q]",
        r"\p{L}",
        r"\d",
        "(?!)",
        "^",
        "$",
        r"\b",
        "é",
        "[[:a:]]",
    )
    if depth > 2 or rng.random() < 0.4:
        atom = rng.choice(atoms)
    else:
        inner = "|".join(_pattern(rng, depth + 1) for _ in range(rng.choice((1, 2, 4))))
        atom = rng.choice(("(?:{})", "({})", "(?={})", "(?<={})", "(?>{})", "[{}]")).format(inner)
    times = rng.choice(("", "", "*", "+", "?", "{2,}", "{11}", "{1,1000}", "{99999}", "*?"))
    return atom + times + (_pattern(rng, depth + 1) if rng.random() < 0.4 else "")


def _part(rng: random.Random, kind: str) -> Any:
    """A normalizer, pre-tokenizer, post-processor or decoder with settings drawn at random."""
    pattern: Any = {rng.choice(("Regex", "Regex", "String")): _pattern(rng)}
    pattern = rng.choice(NASTY) if rng.random() < 0.05 else pattern
    text = rng.choice(("▁", "", "aa", "x" * 100, "x" * 10**6, "\x1b[2J"))
    template = rng.choice((1, 3, 1000)) * [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}]
    special = {"id": "<|end|>", "ids": [0] * rng.choice((1, 1, 2000)), "tokens": ["<|end|>"]}
    blob = rng.randbytes(rng.choice((0, 4, 100, 5000)))
    if rng.random() < 0.5:  # a table of its own size, whose steps lead anywhere
        steps = [rng.choice((0, 1 << 31, rng.getrandbits(18), i & 255)) for i in range(1024)]
        blob = struct.pack("<1025I", 4096, *steps) + b"fi\0\xc3\xa9\0"
    charsmap = base64.b64encode(blob).decode()
    parts: dict[str, list[Any]] = {
        "normalizer": [
            {"type": "Replace", "pattern": pattern, "content": text},
            {"type": "Replace", "pattern": {"String": "e"}, "content": text},
            {"type": "Prepend", "prepend": text},
            {"type": "Precompiled", "precompiled_charsmap": charsmap},
            {"type": rng.choice(("NFKD", "Lowercase", "Nmt", "StripAccents", "ByteLevel"))},
            {"type": "Strip", "strip_left": True, "strip_right": value(rng)},
            {"type": "Sequence", "normalizers": value(rng)},
        ],
        "pre_tokenizer": [
            {
                "type": "Split",
                "pattern": pattern,
                "behavior": rng.choice(("Removed", "Isolated", "MergedWithNext", "Contiguous")),
                "invert": rng.random() < 0.3,
            },
            {"type": rng.choice(("Whitespace", "BertPreTokenizer", "UnicodeScripts"))},
            {"type": "Metaspace", "replacement": text[:3], "prepend_scheme": "always"},
            {"type": "FixedLength", "length": rng.choice(NUMBERS)},
            {"type": "CharDelimiterSplit", "delimiter": text[:2]},
            {"type": "Digits", "individual_digits": value(rng)},
        ],
        "post_processor": [
            {
                "type": "TemplateProcessing",
                "single": [*template, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": template,
                "special_tokens": {"<|end|>": special},
            },
            {"type": "BertProcessing", "sep": ["a", rng.choice(NUMBERS)], "cls": ["b", 5]},
            {"type": "RobertaProcessing", "sep": ["a", 3], "cls": ["b", 900], "trim_offsets": True},
        ],
        "decoder": [
            {"type": "Replace", "pattern": pattern, "content": text},
            {"type": "Strip", "content": text[:1], "start": rng.choice(NUMBERS), "stop": 2**40},
            {"type": "CTC", "pad_token": text, "word_delimiter_token": "|", "cleanup": True},
            {"type": "WordPiece", "prefix": text, "cleanup": True},
            {"type": rng.choice(("Fuse", "ByteFallback", "BPEDecoder", "Unheard"))},
        ],
    }
    one = rng.choice(parts[kind])
    if rng.random() < 0.3:
        one = _disguised(rng, one)
    if rng.random() < 0.3:
        lists = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
        inner = lists.get(kind, "processors" if kind == "post_processor" else "decoders")
        count = rng.choice((2, 8, 60, 500)) if len(str(one)) < 10**5 else 2
        return {"type": "Sequence", inner: [one] * count}
    return one


def _disguised(rng: random.Random, part: dict[str, Any]) -> Any:
    """A part that the library may accept by its fields, as if it were of its former type."""
    fields = {key: field for key, field in part.items() if key != "type"}
    action = rng.randrange(4)
    if action == 0:
        return fields
    if action == 1:
        return list(fields.values())
    names = ("BertNormalizer", "ByteLevel", "Lowercase", "Fuse", "WordPiece", "RobertaProcessing")
    return {"type": rng.choice((*names, "Unheard") if action == 2 else NUMBERS), **fields}


def tokenizer_parts(rng: random.Random, path: Path, _: Path) -> str:
    """The parts around the model of tokenizer.json."""
    document = _json(path / TOKENIZER)
    if not isinstance(document, dict):
        return "tokenizer: none"
    kinds = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    for kind in rng.sample(kinds, rng.choice((1, 1, 2))):
        document[kind] = _part(rng, kind)
    _write(path / TOKENIZER, document)
    return f"tokenizer parts: {json.dumps({k: document.get(k) for k in kinds})[:200]}"


def tokenizer_model(rng: random.Random, path: Path, _: Path) -> str:
    """The model, the vocabulary and the added tokens of tokenizer.json."""
    document = _json(path / TOKENIZER)
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        return "tokenizer: none"
    action = rng.randrange(8)
    names = sorted(model["vocab"])
    if action == 0:
        names += ["x" * rng.choice((1000, 2000, 10**6))] if rng.random() < 0.2 else []
        document["model"] = {
            "type": rng.choice(("WordLevel", "WordPiece", "Unigram", "BPE")),
            "vocab": model["vocab"] if rng.random() < 0.5 else [[n, -1.0] for n in names],
            "unk_token": rng.choice((names[0], "absent", None)),
            "unk_id": rng.choice(NUMBERS),
            "max_input_chars_per_word": rng.choice((0, 100, 10**9, -1)),
            "continuing_subword_prefix": "##",
        }
    elif action == 1:
        for name in rng.sample(names, 5):
            model["vocab"][name] = rng.choice((0, 1, 299, 300, 2**31, 2**33, -1, 1.5))
    elif action == 2:
        model["merges"] = [rng.choice((["a", "b"], "a b", [names[3]], 5)) for _ in range(9)]
    elif action == 3:
        model["vocab"]["x" * rng.choice((2000, 10**6))] = len(names)
    elif action == 4:
        prefix = rng.choice((*NASTY, "x" * 10**6))
        model[rng.choice(("continuing_subword_prefix", "end_of_word_suffix"))] = prefix
    elif action == 5:
        added = document["added_tokens"]
        for _ in range(rng.choice((1, 200, 20_000))):
            text = rng.choice(("e", "the", "\x1b[31m", " ", "\u202e", "<x>", f"<{rng.random()}>"))
            flags = {k: rng.random() < 0.3 for k in ("lstrip", "rstrip", "single_word", "special")}
            added.append(
                {"id": len(names) + len(added), "content": text, "normalized": True, **flags}
            )
    elif action == 6:
        model[rng.choice(sorted(model))] = value(rng)
    else:
        document[rng.choice(sorted(document))] = value(rng)
    _write(path / TOKENIZER, document)
    return f"tokenizer model: {action}"


def tokenizer_text(rng: random.Random, path: Path, _: Path) -> str:
    return change_text(rng, path / TOKENIZER)


def other_json(rng: random.Random, path: Path, _: Path) -> str:
    """A file beside the model, changed or planted."""
    name = rng.choice(OTHERS)
    if name.endswith(".json") and rng.random() < 0.8:
        document = _json(path / name)
        base = {"temperature": 0.5, "do_sample": True, "eos_token_id": 0, "add_bos_token": True}
        document = base | (document if isinstance(document, dict) else {})
        for key in rng.sample(sorted(document), min(len(document), 2)):
            document[key] = value(rng)
        _write(path / name, document)
    else:
        _write(path / name, rng.choice(("{{ ''.__class__ }}", "", "a b\n" * 9, "\x1b[2J")))
    return f"other: {name}"


def file_system(rng: random.Random, path: Path, outside: Path) -> str:
    """A file that is a link, a pipe, a socket, a folder, a hole, empty or gone."""
    names = [f.name for f in path.iterdir()]
    name = rng.choice((*names, *OTHERS, CONFIG, WEIGHTS, INDEX, TOKENIZER))
    file = path / name
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    planted = rng.choice(sorted(outside.iterdir()))
    action = rng.randrange(11)
    if action < 3:
        file.symlink_to(planted if action else os.path.relpath(planted, path))
    elif action == 3:
        file.symlink_to(rng.choice(("/etc/passwd", "/proc/self/mem", "/dev/zero", "/dev/stdin")))
    elif action == 4:
        file.symlink_to(name)
    elif action == 5:
        os.mkfifo(file)
    elif action == 6:
        server = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path)  # the path of a socket is short
        server.bind(name)
        os.chdir(here)
        server.close()
    elif action == 7:
        file.mkdir()
    elif action == 8:
        with file.open("wb") as hole:
            hole.truncate(rng.choice((2**21, 2**30, 2**38)))
    elif action == 9:
        file.touch()
    return f"file system: {name}, {action}"


def run_files(rng: random.Random, path: Path, outside: Path) -> str:
    """A file anywhere in a run directory."""
    file = rng.choice([file for file in sorted(path.rglob("*")) if _is_plain(file)])
    action = rng.randrange(4)
    if action == 0:
        return change_text(rng, file)
    if action == 1 and file.suffix == ".json":
        return change_json(rng, file)
    if action == 2:
        file.unlink()
        file.symlink_to(rng.choice(sorted(outside.iterdir())))
        return f"run: {file.name} is a link"
    return change_text(rng, file)


MUTATIONS: dict[str, tuple[int, Mutation]] = {
    "settings": (5, settings),
    "sizes": (3, sizes),
    "family": (2, family),
    "header": (3, header),
    "numbers": (1, numbers),
    "index": (3, index),
    "tokenizer parts": (5, tokenizer_parts),
    "tokenizer model": (4, tokenizer_model),
    "tokenizer text": (1, tokenizer_text),
    "other files": (3, other_json),
    "file system": (4, file_system),
}


# one case


class Planted(NamedTuple):
    """Files outside that changes point to, watched by inotify."""

    folder: Path
    watch: int

    def touched(self) -> bool:
        """Whether anything was opened or changed since the last call."""
        try:
            return bool(os.read(self.watch, 2**16))
        except BlockingIOError:
            return False


def plant(home: Path, sound: Path) -> Planted:
    """Files that a directory might lead to: weights, settings, a text."""
    folder = home / "outside"
    folder.mkdir()
    shutil.copyfile(sound / WEIGHTS, folder / "x.safetensors")
    for name in (CONFIG, TOKENIZER):
        shutil.copyfile(sound / name, folder / name)
    (folder / "secret.txt").write_text("planted 4711")
    library = ctypes.CDLL(None, use_errno=True)
    watch = library.inotify_init1(os.O_NONBLOCK)
    opened, accessed, written, made, gone = 0x20, 0x1, 0x2 | 0x4 | 0x8, 0x100 | 0x80, 0x200 | 0x40
    mask = opened | accessed | written | made | gone
    assert library.inotify_add_watch(watch, str(folder).encode(), mask) > 0
    return Planted(folder, watch)


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    seconds: float
    bytes: int
    stderr: str
    events: list[str]


def run(words: list[str], home: Path, directory: Path, out: Path) -> Outcome:
    """A command in a fork of this process, with limits and an audit hook."""
    err, log = home / "stderr", home / "events"
    log.write_text("")
    pid = os.fork()
    if pid == 0:
        _child(words, err, log, (directory, out, home / "null"))
    started, late = time.monotonic(), 90.0
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - started > late:
            os.kill(pid, signal.SIGKILL)
            late = math.inf
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    events = log.read_text().splitlines()
    size = sum(int(line.split()[1]) for line in events if line.startswith("memory "))
    events = [line for line in events if not line.startswith("memory ")]
    text = err.read_text("utf-8", "replace") if err.exists() else ""
    return Outcome(code, seconds, size, text, events)


def _child(words: list[str], err: Path, log: Path, inside: tuple[Path, ...]) -> None:
    """Never returns."""
    code, base = 70, 0
    events = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        for number, path in ((1, inside[-1]), (2, err)):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        base = _peak()
        sys.addaudithook(_hook(events, inside))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 2 * BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        code = fenchel(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.write(events, f"memory {_peak() - base}\n".encode())
        os._exit(code & 0xFF)


def _peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


_WRITES = {
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"),
    *("os.chmod", "os.chown", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_LEAVES = {"socket.connect", "socket.getaddrinfo", "os.system", "os.exec", "os.posix_spawn"}


def _hook(events: int, inside: tuple[Path, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """Reports writes outside, connections and programs; planted files are watched by inotify."""
    roots = tuple(str(path) for path in inside)

    def is_inside(path: object) -> bool:
        if isinstance(path, int):
            return True
        text = (
            os.path.abspath(os.fsdecode(path))
            if isinstance(path, str | bytes | os.PathLike)
            else ""
        )
        return text.startswith((*roots, "/dev/null", "/proc/self"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = (*args, None, None)[:3]
            writes = bool(flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            said = writes and not is_inside(path)
            said = said or path in ("/etc/passwd", "/proc/self/mem", "/dev/zero", "/dev/stdin")
        elif event in _WRITES:
            exists = event == "os.mkdir" and os.path.isdir(args[0])
            said = not exists and not is_inside(args[0])
        elif event == "subprocess.Popen":
            said = not any("data/sandbox.py" in str(word) for word in args[1])
        else:
            said = event in _LEAVES
        if said:
            os.write(events, f"{event} {args!r}\n"[:300].encode("utf-8", "replace"))

    return hook


def violations(
    outcome: Outcome, command: str, out: Path, unchanged: bool, planted: Planted
) -> Iterator[str]:
    """What a case did that it may not."""
    allowed = {0, 2, 1} if command == "doctor" else {0, 2}
    if outcome.code not in allowed:
        yield f"exit code {outcome.code}"
    if outcome.seconds > SECONDS:
        yield f"{outcome.seconds:.1f} s"
    if outcome.bytes > BYTES:
        yield f"{outcome.bytes >> 20} MiB"
    lines = outcome.stderr.splitlines()
    if any("Traceback" in line or "panicked" in line for line in lines):
        yield "a traceback"
    if not all(line.isprintable() for line in outcome.stderr.split("\n")):
        yield "control characters"
    if any(len(line) > LONGEST for line in lines) or len(lines) > 12:
        yield "too many words"
    if outcome.code == 2 and not (lines and lines[-1].startswith("fenchel: ")):
        yield "no sentence"
    if outcome.code == 2 and sum(line.startswith("fenchel: ") for line in lines) > 6:
        yield "more than a sentence"
    for event in outcome.events[:3]:
        yield f"outside: {event}"
    if planted.touched():
        yield "planted files were opened"
    if not unchanged:
        yield "the directory changed"
    left = list(out.parent.glob(f"{out.name}*"))
    if outcome.code and left:
        yield f"{left[0].name} was left"
    if not outcome.code and command in ("convert", "attach"):
        try:
            verify(out)
        except (ValueError, OSError) as error:
            yield f"--out is not whole: {error}"


def fingerprint(path: Path) -> str:
    """Names, kinds, sizes and times of everything in a directory."""
    rows = []
    for file in sorted(path.rglob("*")):
        s = file.lstat()
        rows.append((str(file), s.st_mode, s.st_size, s.st_mtime_ns))
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def mutate(rng: random.Random, kind: str, path: Path, outside: Path) -> list[str]:
    """One to three changes to a copy of a sound directory."""
    if kind == "run":
        return [run_files(rng, path, outside) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.9:
        (path / MANIFEST).unlink(missing_ok=True)  # or it would find every change
    names = [name for name, (weight, _) in MUTATIONS.items() for _ in range(weight)]
    return [
        MUTATIONS[rng.choice(names)][1](rng, path, outside)
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]


def attempt(count: int, seed: int, start: int = 0, minutes: float = math.inf) -> dict[str, Any]:
    """Run ``count`` directories, or as many as ``minutes`` allow; figures and violations."""
    until = time.monotonic() + 60 * minutes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    from fenchel.cli import doctor

    doctor.machine = dict  # type: ignore[assignment]  # times the machine and reads no directory
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        text = home / "text.txt"
        text.write_text(TEXT * 30)
        sounds = sound_directories(home / "sound", text)
        planted = plant(home, sounds["opt"])
        for kind in ("llama", "opt", "bert", "run"):  # all that is imported once
            for name, words in commands(text, sounds[kind], home / "warm").items():
                if name not in ("convert", "attach") or kind == "llama":
                    _warm(words)
                shutil.rmtree(home / "warm", ignore_errors=True)
                (home / "warm").unlink(missing_ok=True)
        for kind, sound in sounds.items():  # sound ones pass, or the harness proves nothing
            case = _case(random.Random(0), kind, sound, home, text, planted, changed=False)
            assert not case["violations"], case
        return _attempts(range(start, start + count), seed, home, text, sounds, planted, until)


def _warm(words: list[str]) -> None:
    streams, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), io.StringIO(), io.StringIO()
    try:
        fenchel(words)
    finally:
        sys.stdout, sys.stderr = streams


def _attempts(
    numbers: range,
    seed: int,
    home: Path,
    text: Path,
    sounds: dict[str, Path],
    planted: Planted,
    until: float,
) -> dict[str, Any]:
    codes: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    slowest, largest = (0.0, 0), (0, 0)
    kinds = sorted(sounds)
    for number in numbers:
        if time.monotonic() > until:
            break
        rng = random.Random(f"{seed} {number}")
        kind = rng.choice(kinds)
        case = _case(rng, kind, sounds[kind], home, text, planted)
        codes[f"{case['command']} {case['code']}"] += 1
        slowest = max(slowest, (round(case["seconds"], 2), number))
        largest = max(largest, (case["bytes"], number))
        if case["violations"]:
            bad.append({"number": number, **case})
        if case["violations"] or len(numbers) == 1:
            print(f"{seed} {number}: {case}", flush=True)
        if number % 200 == 199:
            print(f"{number + 1} directories, {len(bad)} violations", flush=True)
    accepted = sum(n for name, n in codes.items() if name.endswith(" 0"))
    return {
        "start": numbers.start,
        "directories": codes.total(),
        "seed": seed,
        "accepted": accepted,
        "codes": dict(sorted(codes.items())),
        "slowest": dict(zip(("seconds", "number"), slowest, strict=True)),
        "largest": dict(zip(("bytes", "number"), largest, strict=True)),
        "violations": bad,
    }


def _case(
    rng: random.Random,
    kind: str,
    sound: Path,
    home: Path,
    text: Path,
    planted: Planted,
    *,
    changed: bool = True,
) -> dict[str, Any]:
    case = home / "case"
    shutil.rmtree(case, ignore_errors=True)
    (case / "parent").mkdir(parents=True)
    path, out = case / "parent" / "model", case / "out"
    shutil.copytree(sound, path)
    changes = mutate(rng, kind, path, planted.folder) if changed else []
    planted.touched()
    choices = commands(text, path, out)
    of_a_run = ("generate", "eval", "inspect", "certify", "convert", "doctor", "report")
    of_both = tuple(name for name in choices if name != "report")
    command = rng.choice(of_a_run if kind == "run" else of_both)
    if not changed:
        command = "doctor"
    before = fingerprint(path)
    outcome = run(choices[command], case, path, out)
    same = command == "report" or fingerprint(path) == before
    return {
        "kind": kind,
        "command": command,
        "changes": changes,
        "code": outcome.code,
        "seconds": outcome.seconds,
        "bytes": outcome.bytes,
        "stderr": outcome.stderr[-600:],
        "violations": list(violations(outcome, command, out, same, planted)),
    }


def main(options: list[str] | None = None) -> None:
    """Run the directories, print the violations and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.hostile_directories")
    parser.add_argument("--directories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many")
    parser.add_argument("--dry", action="store_true", help="write no results")
    chosen = parser.parse_args(options)
    figures = attempt(chosen.directories, chosen.seed, chosen.start, chosen.minutes)
    print(json.dumps({k: v for k, v in figures.items() if k != "violations"}, indent=1))
    print(f"{len(figures['violations'])} violations")
    if not chosen.dry:
        packages = ("transformers", "tokenizers", "safetensors")
        record("hostile_directories", [figures], packages, folder=RESULTS)
    if figures["violations"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
