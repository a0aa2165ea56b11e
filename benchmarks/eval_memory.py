"""Peak memory of ``fenchel eval`` with a vocabulary of 262,144, by the number of tokens.

    python -m benchmarks eval_memory [--tokens 500,2000,6000] [--layers 6] [--width 640]

The checkpoint has the shape of Gemma 3 with 270M parameters but for its number of layers, random
weights and bfloat16; a smaller width is quicker and has the same logits. Every evaluation is a
process of its own; its peak is what the kernel counts for its memory (VmHWM; ru_maxrss of a child
is never below the peak of its parent), pages of the weight file included. One row of logits is a
megabyte in float32, so logits of all positions at once would take 6 GB for 6,000 tokens, and their
softmax as much again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from benchmarks.harness import record
from fenchel.checkpoints import save
from fenchel.model import ModelConfig, Transformer

V = 262_144
LIMIT = 1.5e9
"""Bytes above the weights."""
PROGRAM = """
import sys
from pathlib import Path
from fenchel.cli import main
code = main(sys.argv[1:])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0], file=sys.stderr)
sys.exit(code)
"""
WORDS = "the people of these states have peace and trade with all nations in war".split()


def main(options: list[str] | None = None) -> None:
    """Print and record the peaks; fails where one is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks eval_memory")
    parser.add_argument("--tokens", default="500,2000,6000")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-calibration", action="store_true")
    given = parser.parse_args(options or [])
    counts = [int(count) for count in given.tokens.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder) / "model", Path(folder) / "text.txt"
        _checkpoint(path, given.layers, given.width)
        text.write_text(" ".join(random.Random(0).choices(WORDS, k=max(counts))))
        weights = (path / "model.safetensors").stat().st_size
        for flags in ([],) if given.no_calibration else ([], ["--calibration"]):
            for count in counts:
                words = ["eval", str(path), "--text", str(text), "--tokens", str(count), "--json"]
                row = _measure([*words, *flags, "--device", "cpu"], given.threads)
                row = {"vocabulary": V, "tokens": count, "calibration": bool(flags), **row}
                row |= {"width": given.width, "weights": weights}
                row["above_weights"] = row["peak"] - weights
                rows.append(row)
                print(
                    f"{count:6} tokens{' and calibration' if flags else '':<16} "
                    f"{row['above_weights'] / 1e6:6.0f} MB above the {weights / 1e6:.0f} MB of the "
                    f"weights, {row['seconds']:.0f} s"
                )
    record("eval_memory", rows, ("tokenizers",))
    assert all(row["above_weights"] <= LIMIT for row in rows)


def _measure(words: list[str], threads: int) -> dict[str, Any]:
    """Run a command line in a process of its own: its loss, peak memory and time."""
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", PROGRAM, *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {ran.returncode}: {ran.stderr}")
    found = json.loads(ran.stdout)
    seconds = time.perf_counter() - started
    return {
        "loss": found["loss"],
        "dtype": found["dtype"],
        "context": found["context"],
        "peak": int(ran.stderr.split()[-1]) * 1024,
        "seconds": seconds,
    }


def _checkpoint(path: Path, layers: int, width: int) -> None:
    config = ModelConfig(
        vocabulary=V,
        context=32_768,
        width=width,
        layers=layers,
        heads=4,
        kv_heads=1,
        head_size=256,
        hidden=2048,
        windows=(*[512] * 5, 0)[:layers],
        mlp="geglu_tanh",
        norm_place="both",
        norm_plus_one=True,
        qk_norm=True,
        score_scale=1 / 16,
        embedding_scale=width**0.5,
        rotary_base=1e6,
        rotary_local_base=1e4,
        epsilon=1e-6,
    )
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    save(model, _tokenizer(), path, dtype=torch.bfloat16)


def _tokenizer() -> Tokenizer:
    """One token per byte, and names for the rest of the vocabulary."""
    special = ["<pad>", "<eos>", "<bos>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{i}>" for i in range(V - len(names))]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    return tokenizer
