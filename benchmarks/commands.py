"""The commands as people type them, beside transformers doing the same job. Whole processes.

Every job is two command lines, each in a process of its own from its start to its end, in turn:
imports, reading, compiling, evaluation and saving count. Ours is ``fenchel ...`` without flags of
speed; theirs is ``python -m benchmarks.commands --peer JOB FOLDER``, written as one would write it
with transformers: torch.compile and fused AdamW in bfloat16 on a GPU, ``from_pretrained``,
``generate``.

    train      a fresh model of one shape on one text: the same tokens per step, as many steps, as
               many evaluations and checkpoints (weights and optimiser). Ours trains its tokenizer
               too, and measures baselines; theirs reads ours
    generate   greedy tokens after a prompt, from a checkpoint on disk
    tune       further steps of that checkpoint on a text
    inspect    per head the entropy of attention on a text. Ours also bounds sensitivity

    python -m benchmarks commands                 the jobs for this device, and the table
    python -m benchmarks commands --only train    some of them
    python -m benchmarks commands --steps 60,600 --preset gpt2 --rounds 1

``seconds`` is the median over rounds, ``ratio`` the median of theirs over ours within a round.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import record
from benchmarks.train_cpu import gpt2, llama
from fenchel.data import open_text
from fenchel.pipeline import settings

ROOT = Path(__file__).parents[1]
PROMPT, NEW, TUNED, INSPECTED = "The Congress of the United States", 64, 20, 1024
JOBS = ("train", "generate", "tune", "inspect")
EVALUATIONS, ROWS = 10, 32
"""Evaluations of a run, and rows of their micro-batches, of one shape for the compiler."""
TOKENS_PER_CHECKPOINT = 4_000_000
"""As fenchel spaces checkpoints on a GPU."""


def main(options: Sequence[str] = ()) -> None:
    """Run the jobs, print the table and write results/commands_DEVICE.json."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks commands")
    parser.add_argument("--only", default=",".join(JOBS), help="jobs, by commas")
    parser.add_argument("--preset", default="gpt2" if gpu else "demo", help="shapes, by commas")
    parser.add_argument("--steps", default="60,600" if gpu else "100", help="by commas")
    parser.add_argument("--rounds", type=int, default=1 if gpu else 3)
    parser.add_argument("--set", action="append", default=[], help="settings of our training")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(list(options))
    if given.peer:
        job, folder = given.peer
        PEERS[job](Path(folder))
        return
    rows: list[dict[str, Any]] = []
    for preset in given.preset.split(","):
        with tempfile.TemporaryDirectory() as name:
            for row in measure(Path(name), preset, given):
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                record(f"commands_{'cuda' if gpu else 'cpu'}", rows, ("transformers",))


def measure(folder: Path, preset: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per job; the first trained model is the checkpoint of the others."""
    jobs, text = given.only.split(","), folder / "text.txt"
    text.write_text("\n\n".join(d.text for d in open_text("sotu").documents()))
    whole, more = [*map(int, given.steps.split(","))], [f"--set={one}" for one in given.set]
    for steps in whole if "train" in jobs else whole[:1]:
        out = folder / f"ours-{steps}"
        ours = ["train", "--text", str(text), "--preset", preset, "--steps", str(steps)]
        ours += [*more, "--out", str(out)]
        config = {"preset": preset, "steps": steps, "tokenizer": str(out / "tokenizer.json")}
        if "train" not in jobs:
            _run([sys.executable, "-m", "fenchel", *ours], folder)
            continue
        yield {
            **_compare("train", folder, config, ours, given.rounds, again=out),
            "preset": preset,
            "steps": steps,
            **_losses(out, folder),
        }
    run, model = folder / f"ours-{whole[0]}", folder / "model"
    _run([sys.executable, "-m", "fenchel", "convert", str(run), str(model)], folder)
    part = folder / "part.txt"
    part.write_text(text.read_text()[:200_000])
    read, tuned = ["--text", str(part)], str(folder / "tuned")
    prompt = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", str(NEW)]
    commands = {
        "generate": ["generate", str(model), *prompt],
        "tune": ["tune", str(model), *read, "--steps", str(TUNED), "--out", tuned],
        "inspect": ["inspect", str(model), *read],
    }
    for job, ours in commands.items():
        if job in jobs:
            again = folder / "tuned" if job == "tune" else None
            yield {
                **_compare(job, folder, {"model": str(model)}, ours, given.rounds, again=again),
                "preset": preset,
            }


def _compare(
    job: str,
    folder: Path,
    config: dict[str, Any],
    ours: list[str],
    rounds: int,
    *,
    again: Path | None,
) -> dict[str, Any]:
    """Both commands in turn; ours first, whose tokenizer theirs may read."""
    (folder / "job.json").write_text(json.dumps(config))
    seconds: dict[str, list[float]] = {"fenchel": [], "transformers": []}
    for _ in range(rounds):
        if again is not None:
            shutil.rmtree(again, ignore_errors=True)
        seconds["fenchel"].append(_run([sys.executable, "-m", "fenchel", *ours], folder))
        peer = [sys.executable, "-m", "benchmarks.commands", "--peer", job, str(folder)]
        seconds["transformers"].append(_run(peer, folder))
    pairs = zip(seconds["transformers"], seconds["fenchel"], strict=True)
    return {
        "job": job,
        "seconds": round(statistics.median(seconds["fenchel"]), 2),
        "transformers_seconds": round(statistics.median(seconds["transformers"]), 2),
        "ratio": round(statistics.median(theirs / mine for theirs, mine in pairs), 3),
    }


def _run(command: list[str], folder: Path) -> float:
    """Seconds of a command in a folder, where it may leave pages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return time.perf_counter() - began


def _losses(run: Path, folder: Path) -> dict[str, float]:
    """The validation loss per token that both ended at, on as many tokens, and their pace."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [line["validation/loss"] for line in lines if "validation/loss" in line]
    paces = [line["time/tokens_per_second"] for line in lines if "time/tokens_per_second" in line]
    theirs = json.loads((folder / "theirs.json").read_text())
    return {
        "tokens_per_second": round(statistics.median(paces)),
        "transformers_tokens_per_second": round(theirs["tokens_per_second"]),
        "loss": round(ours[-1], 4),
        "transformers_loss": round(theirs["loss"], 4),
    }


# --- the jobs by transformers


def train(folder: Path) -> None:
    """A training loop with the features of a trainer: schedule, clipping, evaluation, saving."""
    from tokenizers import Tokenizer

    job = json.loads((folder / "job.json").read_text())
    chosen = settings({"preset": job["preset"]})
    tokenizer = Tokenizer.from_file(job["tokenizer"])
    size = chosen.model.vocabulary if job["preset"] == "gpt2" else tokenizer.get_vocab_size()
    shape = settings({"preset": job["preset"], "model": {"vocabulary": size}}).model
    train, device = chosen.train, "cuda" if torch.cuda.is_available() else "cpu"
    documents = tokenizer.encode_batch((folder / "text.txt").read_text().split("\n\n"))
    ids = torch.tensor([i for document in documents for i in document.ids])
    held_out, ids = ids[: len(ids) // 10], ids[len(ids) // 10 :]
    model = (gpt2 if shape.norm == "layer" else llama)(shape).to(device)
    losses, pace = _train(model, ids, held_out, shape.context, train.batch, job["steps"], folder)
    (folder / "theirs.json").write_text(json.dumps({"loss": losses, "tokens_per_second": pace}))


def _train(
    model: Any, ids: Tensor, held_out: Tensor, context: int, batch: int, steps: int, folder: Path
) -> tuple[float, float]:
    from transformers import get_cosine_schedule_with_warmup

    device = next(model.parameters()).device
    gpu = device.type == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimiser, max(1, steps // 20), steps)
    every, saving = max(1, steps // EVALUATIONS), max(1, steps // EVALUATIONS)
    if gpu:
        saving = max(saving, -(-TOKENS_PER_CHECKPOINT // (batch * context)))
    order, paces, loss = torch.Generator().manual_seed(0), [], float("nan")
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=gpu)

    def forward(rows: Tensor) -> Tensor:
        logits = model(rows[:, :-1], use_cache=False).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:].flatten())

    compiled: Callable[[Tensor], Tensor] = torch.compile(forward) if gpu else forward

    def loss_of(rows: Tensor) -> Tensor:
        with narrow:
            return compiled(rows.to(device))

    begun = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - context - 1, (batch,), generator=order)
        parts = torch.stack([ids[s : s + context + 1] for s in starts.tolist()]).split(ROWS)
        for rows in parts:
            (loss_of(rows) / len(parts)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 10 == 0:
            if gpu:
                torch.cuda.synchronize()
            paces.append(10 * batch * context / (time.perf_counter() - begun))
            begun = time.perf_counter()
        if step % every == 0 or step == steps:
            rows = held_out[: ROWS * context + 1].unfold(0, context + 1, context)
            with torch.no_grad():
                loss = loss_of(rows).item()
        if step % saving == 0 or step == steps:
            model.save_pretrained(folder / f"theirs-{step}")
            torch.save(optimiser.state_dict(), folder / f"theirs-{step}" / "optimizer.pt")
    return loss, statistics.median(paces)


def generate(folder: Path) -> None:
    """Greedy tokens after the prompt."""
    model, tokenizer = _read(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    out = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
    print(tokenizer.decode(out[0]))


def tune(folder: Path) -> None:
    """Further steps on the rows of a text."""
    model, tokenizer = _read(folder)
    ids = torch.tensor(tokenizer((folder / "part.txt").read_text())["input_ids"])
    context = min(1024, model.config.max_position_embeddings)
    _train(model.float(), ids, ids, context, 8, TUNED, folder)


def inspect(folder: Path) -> None:
    """The entropy of every head, from weights that attention returns."""
    model, tokenizer = _read(folder, attn_implementation="eager")
    ids = torch.tensor(tokenizer((folder / "part.txt").read_text())["input_ids"])
    row = ids[: min(INSPECTED, model.config.max_position_embeddings)].to(model.device)
    with torch.no_grad():
        maps = model(row[None], output_attentions=True).attentions
    for p in maps:
        print(torch.special.entr(p.float()).sum(-1).mean((0, 2)).tolist())


def _read(folder: Path, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = json.loads((folder / "job.json").read_text())["model"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, **options).to(device)
    return model, AutoTokenizer.from_pretrained(path)


PEERS = {"train": train, "generate": generate, "tune": tune, "inspect": inspect}


if __name__ == "__main__":
    main(sys.argv[1:])
