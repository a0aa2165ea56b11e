"""Directories that claim sizes no machine has, in a child process held to memory and time."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
SECONDS, BYTES = 5.0, 500 * 2**20


def giants(sound: dict[str, Path], home: Path) -> Iterator[Path]:
    """Directories whose sizes are what is wrong with them."""

    def copy(name: str, base: str = "llama") -> Path:
        shutil.copytree(sound[base], home / name)
        return home / name

    def said(name: str, base: str = "llama", **changes: Any) -> Path:
        path = copy(name, base)
        settings = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**settings, **changes}))
        return path

    def headed(name: str, text: bytes) -> Path:
        path = copy(name)
        data = (path / WEIGHTS).read_bytes()
        old = int.from_bytes(data[:8], "little")
        (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + old :])
        return path

    def spelt(name: str, text: str) -> Path:
        path = copy(name)
        (path / TOKENIZER).write_text(text)
        return path

    yield headed("lists", b'{"a": [' + b"[]," * 2_700_000 + b"[]]}")
    yield headed("names", b"{" + b",".join(b'"%d": 1' % i for i in range(600_000)) + b"}")
    empty = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    yield headed("many", b"{" + b",".join(b'"%d":%s' % (i, empty) for i in range(100_001)) + b"}")
    path = copy("terabyte")
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(2**40)  # a hole: it takes no disk
    yield path
    path = copy("claims")
    (path / WEIGHTS).write_bytes((2**63).to_bytes(8, "little") + b"{" * 100)
    yield path
    for number, layers in enumerate((300, 20_000, 2**24)):
        yield said(f"layers{number}", num_hidden_layers=layers)
    yield said("shared", "albert", num_hidden_layers=2**24)
    yield said("groups", "albert", num_hidden_layers=2**24, num_hidden_groups=2**24)
    yield said("wide", hidden_size=2**24, head_dim=2**24, num_attention_heads=2**24)
    yield said("heads", num_attention_heads=2**24, num_key_value_heads=2**24, head_dim=2**24)
    yield said("words", vocab_size=2**24)
    yield said("places", "gpt2", n_positions=2**24)
    yield said("buckets", "t5", relative_attention_num_buckets=2**24)
    yield said("types", "gemma3_text", num_hidden_layers=2**20, layer_types=["full_attention"] * 40)
    yield said("settings", **{f"x{i}": i for i in range(200_000)})
    path = copy("shards", "sharded")
    (path / INDEX).write_text(
        json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(100_000)}})
    )
    yield path
    yield spelt("long", json.dumps({"model": "x" * 45_000_000}))
    yield spelt("values", "[" + "0," * 3_000_000 + "0]")
    yield spelt("deep", "[" * 10**6 + "]" * 10**6)
    vocabulary = {f"token {i}": i for i in range(600_000)}
    yield spelt("spellings", json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))


CHILD = """
import json, resource, signal, sys, time
from fenchel.checkpoints import load
load(sys.argv[2])  # all that is loaded once
pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else None
if pages is not None:
    most = pages * resource.getpagesize() + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
for path in sys.argv[3:]:
    signal.alarm(60)  # ends the process, should it ever come to that
    begun = time.process_time()
    try:
        load(path)
        said = "was loaded"
    except ValueError as error:
        said = "" if len(str(error)) < 700 and str(error).isprintable() else "said too much"
    except BaseException as error:
        said = type(error).__name__
    print(json.dumps([path, said, time.process_time() - begun]), flush=True)
"""


def test_giants_are_refused_within_five_seconds_and_500_megabytes(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    paths = [str(path) for path in giants(sound, tmp_path)]
    words = [sys.executable, "-W", "ignore", "-c", CHILD, str(BYTES), str(sound["llama"]), *paths]
    told = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    outcomes = [json.loads(line) for line in told.stdout.splitlines()]
    assert [path for path, _, _ in outcomes] == paths
    assert not [one for one in outcomes if one[1] or one[2] > SECONDS]
    assert len(paths) > 20
