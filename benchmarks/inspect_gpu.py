"""Seconds of ``fenchel inspect`` on a GPU, for checkpoints of real size.

Hugging Face directories with random weights: GPT-2's 124M in float32 on 1,024 tokens of the
built-in text, and a Llama of 1.1 thousand million in bfloat16 on 2,048. The command runs as its
users run it, in a process of its own, twice per directory: the first run compiles kernels, the
second finds them on the disk.

    seconds     of the whole command, imports, loading and the page included
    reading, heads, blocks, network, precision
                of its stages
    rest        seconds less the stages: imports, loading, tables

    python -m benchmarks inspect_gpu            both
    python -m benchmarks inspect_gpu --quick    GPT-2
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.decode import LARGE
from benchmarks.harness import record
from benchmarks.models_gpu import GPT2
from fenchel.checkpoints.hf_export import save
from fenchel.data import train_tokenizer
from fenchel.data.config import SMALLEST_VOCABULARY
from fenchel.model import ModelConfig, Transformer

ROOT = Path(__file__).parents[1]


class Checkpoint(NamedTuple):
    """A shape, the dtype of its weights, and the tokens that are read."""

    config: ModelConfig
    dtype: torch.dtype
    tokens: int


CHECKPOINTS = {
    "gpt2-124M": Checkpoint(replace(GPT2, initial="normal"), torch.float32, 1024),
    "llama-1.1B": Checkpoint(replace(LARGE, initial="normal"), torch.bfloat16, 2048),
}


def write(checkpoint: Checkpoint, path: Path, device: str = "cuda") -> None:
    """A directory with random weights, and a tokenizer of bytes."""
    with torch.device(device):
        model = Transformer(checkpoint.config)
    tokenizer = train_tokenizer([""], SMALLEST_VOCABULARY)
    save(model.cpu(), tokenizer, path, dtype=checkpoint.dtype)
    del model
    torch.cuda.empty_cache()


def measure(path: Path, tokens: int) -> dict[str, Any]:
    """One run of the command."""
    page = path.with_suffix(".html")
    words = ["inspect", str(path), "--text", "sotu", "--max-tokens", str(tokens)]
    command = [sys.executable, "-m", "fenchel", *words, "--json", "--out", str(page)]
    began = time.perf_counter()
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if run.returncode:
        raise RuntimeError(f"fenchel inspect ended with {run.returncode}: {run.stderr[-2000:]}")
    stages: dict[str, float] = json.loads(run.stdout)["seconds"]
    return {"seconds": seconds, **stages, "rest": seconds - sum(stages.values())}


def main(options: Sequence[str] = ()) -> None:
    """Write the directories, time the command on each, twice."""
    if not torch.cuda.is_available():
        print("inspect_gpu needs a GPU.")
        return
    quick = "--quick" in options
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in list(CHECKPOINTS)[: 1 if quick else None]:
            checkpoint, path = CHECKPOINTS[name], Path(folder) / name
            write(checkpoint, path)
            for run in ("first", "second"):
                row = {"shape": name, "tokens": checkpoint.tokens, "run": run}
                rows.append(row | measure(path, checkpoint.tokens))
                print(
                    "  ".join(
                        f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                        for k, v in rows[-1].items()
                    ),
                    flush=True,
                )
                written = record("inspect_cuda" + "_quick" * quick, rows)
    print(written)
