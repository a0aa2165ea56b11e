"""Hostile directories: each is refused in one sentence, soon, and reading nothing outside.

A mutation changes one thing in a copy of a sound directory so that it is no longer one; which
thing is drawn from a generator of its own.
"""

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fenchel.checkpoints import load

pytestmark = pytest.mark.filterwarnings("ignore:.*no setting of:UserWarning")
Mutation = tuple[str, Callable[[Path], None]]
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
SECONDS = 5.0
BAD: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**12, 2**63, math.nan, math.inf, "5", "", [], {}, "x" * 10_000),
    json.loads("[" * 200 + "]" * 200),
]
"""Values for a setting that takes a whole number."""

opened: list[str] | None = None


def listen(event: str, args: tuple[Any, ...]) -> None:
    watched = event in ("open", "subprocess.Popen", "socket.connect", "exec")
    if opened is not None and watched and not isinstance(args[0], int):  # a descriptor has a path
        opened.append(f"{event} {args[0]!s}")


sys.addaudithook(listen)


# what is changed


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same data under another header; ``change`` may give back the text of one."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = json.dumps(header).encode() if text is None else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def replace_header(path: Path, text: bytes) -> None:
    rewrite_header(path / WEIGHTS, lambda _: text)


def put_text(path: Path, name: str, text: str) -> None:
    (path / name).write_text(text)


def bytes_of_weights(rng: random.Random) -> Iterator[Mutation]:
    """Lengths: cut, longer, and a header of another length."""

    def cut(path: Path, share: float) -> None:
        data = (path / WEIGHTS).read_bytes()
        (path / WEIGHTS).write_bytes(data[: int(share * len(data))])

    def append(path: Path, tail: bytes) -> None:
        (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes() + tail)

    for _ in range(40):
        yield "cut", partial(cut, share=rng.random())
    for _ in range(10):
        tail = rng.randbytes(rng.randint(1, 999))
        yield "tail", partial(append, tail=tail)

    def claim(path: Path, length: int) -> None:
        data = (path / WEIGHTS).read_bytes()
        (path / WEIGHTS).write_bytes((length % 2**64).to_bytes(8, "little") + data[8:])

    for length in (0, 1, 2, 7, 2**20, 8 * 2**20, 100 * 2**20, 2**31, 2**40, 2**62, 2**63, -1):
        yield "length", partial(claim, length=length)
    for _ in range(18):
        yield "length", partial(claim, length=rng.randint(3, 2**16))


def header_of_weights(rng: random.Random) -> Iterator[Mutation]:
    """One entry of the header, made wrong."""

    def swap_offsets(header: dict[str, Any], name: str, by: int) -> None:
        header[name]["data_offsets"] = [x + by for x in header[name]["data_offsets"]]

    def change(header: dict[str, Any], name: str, key: str, value: Any) -> None:
        header[name][key] = value

    def drop(header: dict[str, Any], name: str, key: str) -> None:
        del header[name][key]

    def rename(header: dict[str, Any], name: str, new: str) -> None:
        header[new] = header.pop(name)

    def twice(header: dict[str, Any], name: str) -> bytes:
        text = json.dumps(header)
        return (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()

    def edit(what: Callable[..., Any], *args: Any) -> Callable[[Path], None]:
        def mutate(path: Path) -> None:
            def at_random(header: dict[str, Any]) -> Any:
                names = sorted(name for name in header if name != "__metadata__")
                return what(header, names[args[0] % len(names)], *args[1:])

            rewrite_header(path / WEIGHTS, at_random)

        return mutate

    for _ in range(30):
        by = rng.choice([-4, 4, 1, -1, 96, 2**40, -(2**40)])
        yield "offsets", edit(swap_offsets, rng.randrange(99), by)
    for value in (
        *("F33", "F64", "I32", "U8", "BOOL", "BF16", "F8_E4M3", "", None, 5, ["F32"], {}),
        "f32",
    ):
        yield "dtype", edit(change, rng.randrange(99), "dtype", value)
    for value in (
        *([], [0], [1] * 99, [2**62], [2**40] * 3, [-1], ["5"], [1.5], [True], None, "x", {}),
        *([24, 25], [10**30], [[24]]),
    ):
        yield "shape", edit(change, rng.randrange(99), "shape", value)
    for value in ([], [0], [0, 0, 0], [5, 2], [-1, 9], ["0", "9"], None, {}, 7, [0, 2**63], [0.0]):
        yield "offsets", edit(change, rng.randrange(99), "data_offsets", value)
    for key in ("dtype", "shape", "data_offsets"):
        yield "lacks", edit(drop, rng.randrange(99), key)
    for new in ("", "\n", "a\x00b", "../up", "x" * 600, "__metadata__", "lm_head", "é\u202e"):
        yield "name", edit(rename, rng.randrange(99), new)
    for _ in range(5):
        yield "twice", edit(twice, rng.randrange(99))
    for text in (
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{" * 5000,
        b'{"a":' * 5000,
        b"\xff\xfe{}",
        b"{\x00}",
    ):
        yield "header", partial(replace_header, text=text)


def numbers_of_weights(rng: random.Random) -> Iterator[Mutation]:
    """A number that is none, somewhere."""

    def spoil(path: Path, seed: int, value: float) -> None:
        weights, draw = load_file(path / WEIGHTS), random.Random(seed)
        tensor = weights[draw.choice(sorted(weights))]
        tensor.view(-1)[draw.randrange(tensor.numel())] = value
        save_file(weights, path / WEIGHTS)

    for seed in range(30):
        value = rng.choice([math.nan, math.inf, -math.inf])
        yield "number", partial(spoil, seed=seed, value=value)


def index_of_weights(rng: random.Random) -> Iterator[Mutation]:
    """An index that leads astray."""

    def point(path: Path, name: Any, which: int) -> None:
        index = json.loads((path / INDEX).read_text())
        tensors = sorted(index["weight_map"])
        index["weight_map"][tensors[which % len(tensors)]] = name
        (path / INDEX).write_text(json.dumps(index))

    names = (
        *("../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "~/x", "C:\\x"),
        *("..\\secret.safetensors", "x\x00.safetensors", "x\n.safetensors", "x" * 5000, "nope"),
        *("file:///x.safetensors", "model.safetensors.index.json", "config.json", "x.bin"),
        *(None, 5, [], {}, True, "model-00001-of-00009.safetensors", "/dev/zero", "/proc/self/mem"),
    )
    for name in names:
        yield "index", partial(point, name=name, which=rng.randrange(99))
    for text in ("", "{}", "[]", "null", '{"weight_map": {}}', '{"weight_map": 1}', "{" * 10**5):
        yield "index", partial(put_text, name=INDEX, text=text)
    for value in (0, -1, 10**18, "9", None, [], 1.5):
        text = {"total_size": value}

        def claim(path: Path, text: dict[str, Any] = text) -> None:
            index = json.loads((path / INDEX).read_text())
            (path / INDEX).write_text(json.dumps({**index, "metadata": text}))

        yield "total", claim


SIZES = {
    "llama": (
        *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    ),
    "gpt2": ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
}


def settings_of(family: str) -> Callable[[random.Random], Iterator[Mutation]]:
    """A setting that is not what it should be."""

    def put(path: Path, **changes: Any) -> None:
        settings = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**settings, **changes}))

    def mutations(rng: random.Random) -> Iterator[Mutation]:
        for key in SIZES[family]:
            wrong = [*BAD, rng.randint(1, 11), rng.randint(301, 2**20)]
            if key in ("max_position_embeddings", "n_head"):  # others change no tensor's shape
                wrong = BAD
            for value in wrong:
                yield key, partial(put, **{key: value})
        numbers = {"llama": "rms_norm_eps", "gpt2": "layer_norm_epsilon"}
        for value in (*BAD, -1e-5, 10**400):
            yield "epsilon", partial(put, **{numbers[family]: value})
        for value in BAD:
            if value is not True or family == "llama":  # where it is not so already
                yield "tied", partial(put, tie_word_embeddings=value)
            yield "type", partial(put, model_type=value)
        for value in ("gpt5", "llama ", "LLAMA", "../llama", "bert", "t5", "gpt_neox"):
            yield "type", partial(put, model_type=value)
        act = {"llama": "hidden_act", "gpt2": "activation_function"}[family]
        for value in (*BAD, "tanh", "os.system"):
            yield "word", partial(put, **{act: value})
        for text in (
            "",
            "null",
            "[]",
            "5",
            "\ufeff{}",
            "{",
            '{"a":1,}',
            "{" * 10**5,
            "NaN",
            "\x00",
        ):
            yield "text", partial(put_text, name=CONFIG, text=text)
        yield (
            "twice",
            lambda path: (path / CONFIG).write_text(
                (path / CONFIG).read_text().rstrip()[:-1] + ', "model_type": "llama"}'
            ),
        )
        yield "quantised", partial(put, quantization_config={"bits": 4})
        if family == "llama":
            for value in (*(b for b in BAD if b is not None and b != {}), {"rope_type": "dynamic"}):
                yield "rope", partial(put, rope_parameters=value)
            for value in (-1.0, 0, 1.0, math.nan, math.inf, "1e4", True, [1e4]):
                yield (
                    "rope",
                    partial(put, rope_parameters={"rope_theta": value}),
                )
            for value in (0, -1.0, math.nan, "2", None):
                scaling = {"rope_type": "linear", "factor": value}
                yield "rope", partial(put, rope_parameters=scaling)

    return mutations


def tokenizers(rng: random.Random) -> Iterator[Mutation]:
    """A tokenizer.json that is none, or not this model's."""

    def put(path: Path, **changes: Any) -> None:
        raw = json.loads((path / TOKENIZER).read_text())
        (path / TOKENIZER).write_text(json.dumps({**raw, **changes}))

    def put_ids(path: Path, **ids: int) -> None:
        model = json.loads((path / TOKENIZER).read_text())["model"]
        put(path, model={**model, "vocab": {**model["vocab"], **ids}})

    def cut(path: Path, share: float) -> None:
        text = (path / TOKENIZER).read_text()
        (path / TOKENIZER).write_text(text[: int(share * len(text))])

    for text in ("", "{}", "[]", "null", "{" * 10**5, "\xff", "5"):
        yield "text", partial(put_text, name=TOKENIZER, text=text)
    for _ in range(20):
        yield "cut", partial(cut, share=rng.random())
    for value in (
        None,
        5,
        "BPE",
        [],
        {},
        {"type": "Evil"},
        {"type": "BPE", "vocab": 3, "merges": []},
    ):
        yield "model", partial(put, model=value)
    for value in (5, {}, [5], [{}], [{"content": ""}], [{"content": "x" * 10**5}], "x"):
        yield "added", partial(put, added_tokens=value)
    bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    for count in (1, 2, 3):
        parts = {"type": "Sequence", "normalizers": [bomb] * count}
        yield "bomb", partial(put, normalizer=parts)
    for number in (-1, 5, 299, 300, 5000, 10**6, 2**32 - 1, 2**32, 2**40, 2**63):
        yield "ids", partial(put_ids, **{rng.choice("abcdefgh"): number})
    yield "larger", partial(put_ids, **{f"more{i}": 300 + i for i in range(300)})
    yield "missing", lambda path: (path / TOKENIZER).unlink()


KINDS: dict[str, tuple[str, Callable[[random.Random], Iterator[Mutation]], int]] = {
    "bytes of weights": ("llama", bytes_of_weights, 80),
    "header of weights": ("llama", header_of_weights, 90),
    "numbers of weights": ("llama", numbers_of_weights, 30),
    "index": ("sharded", index_of_weights, 35),
    "settings of llama": ("llama", settings_of("llama"), 200),
    "settings of gpt2": ("gpt2", settings_of("gpt2"), 150),
    "tokenizer": ("llama", tokenizers, 50),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_mutation_is_refused_in_one_sentence(
    kind: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    base, mutations, least = KINDS[kind]
    wrong, count = [], 0
    for count, (what, mutate) in enumerate(mutations(random.Random(kind)), 1):
        path = tmp_path / f"case{count}"
        shutil.copytree(sound[base], path)
        mutate(path)
        if found := outcome(path):
            wrong.append(f"{count} {what}: {found}")
        shutil.rmtree(path)
    assert not wrong, "\n".join(wrong)
    assert count >= least


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "bloom", "albert", "t5"])
def test_any_value_of_any_setting_is_refused_or_makes_a_model(
    family: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    settings = json.loads((sound[family] / CONFIG).read_text())
    draw = random.Random(family)
    path = tmp_path / family
    shutil.copytree(sound[family], path)
    wrong = []
    for key, value in draw.sample([(k, v) for k in sorted(settings) for v in BAD], 60):
        (path / CONFIG).write_text(json.dumps({**settings, key: value}))
        if (found := outcome(path)) not in (None, "was loaded"):
            wrong.append(f"{key}={value!r:.40}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER])
def test_any_flipped_bytes_are_refused_or_harmless(
    name: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    path, draw = tmp_path / "flipped", random.Random(name)
    shutil.copytree(sound["llama"], path)
    before, wrong = (path / name).read_bytes(), []
    for case in range(80):
        data = bytearray(before)
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(min(len(data), 4000))] = draw.randrange(256)
        (path / name).write_bytes(data)
        if (found := outcome(path)) not in (None, "was loaded"):
            wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join(wrong)


def outcome(path: Path) -> str | None:
    """None if the directory is refused as it should be; otherwise what happened."""
    global opened
    opened, begun = [], time.process_time()
    try:
        load(path)
        return "was loaded"
    except ValueError as error:
        sentence = str(error)
    except BaseException as error:  # a crash of any kind is what is looked for
        return f"{type(error).__name__}: {error}"
    finally:
        seen, opened = opened, None
    if time.process_time() - begun > SECONDS:
        return "took too long"
    if strays := [one for one in seen if not one.startswith(f"open {path}")]:
        return f"touched {strays[0]}"
    if not sentence.isprintable() or len(sentence) > 700 or not sentence.endswith("."):
        return f"said {sentence[:200]!r}"
    return None


def test_together_they_are_more_than_five_hundred() -> None:
    assert sum(least for _, _, least in KINDS.values()) >= 500
