"""The engine of ``fenchel serve`` without HTTP, and transformers' compiled static cache, on a GPU.

    python -m benchmarks engine [--rows 1,32,128] [--new 256] [--static 32,128] [--profile]

A Llama of 1.1 thousand million random weights in bfloat16. Ours: as many requests as rows, each
with a prompt of its own, submitted at once to an engine with 128 rows; every token is detokenized
and reported, as it is for HTTP. Theirs: ``generate`` with a static cache on prompts of one length,
which neither detokenizes nor lets a sequence join. Prompts count on both sides.

    check               largest distance of the logits of recorded steps and of the model, relative,
                        while rows join and leave; and how many of 128 draws are those of a CPU
    tokens_per_second   new tokens of all requests over seconds, the median of ``ROUNDS``
    of_copy             weights read per step times tokens per second, over the bytes per second of
                        a copy; for one request
    steps_of_copy       the same from the first token to the last, so without prompt and start
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import threading
import time
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models

from benchmarks.decode import COPY, LARGE, bytes_read
from benchmarks.harness import record
from benchmarks.train_cpu import draw, llama
from fenchel.data import TextTokenizer
from fenchel.generation import Decoder, Request, RowSampling, Sampling, Update
from fenchel.generation import draw as draw_tokens
from fenchel.model import Transformer
from fenchel.server.engine import Engine

PROMPT, ROWS, ROUNDS = 32, 128, 3
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 1": Sampling(),
    "top_p 0.9": Sampling(top_p=0.9),
}


def main(options: list[str] | None = None) -> None:
    """Check, time, and write results/engine_cuda.json after every line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine")
    parser.add_argument("--rows", default="1,32,128", help="numbers of requests, by commas")
    parser.add_argument("--new", type=int, default=256, help="new tokens per request")
    parser.add_argument("--static", default="32,128", help="batches of transformers; or empty")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    given = parser.parse_args(options or [])
    if not torch.cuda.is_available():
        raise SystemExit("engine needs a GPU; serve measures the whole server on a CPU.")
    torch.manual_seed(0)
    lines: list[dict[str, Any]] = []

    def add(**line: Any) -> None:
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        lines.append(line)
        record("engine_cuda", lines, ("transformers",))

    with torch.device("cuda"):
        model = Transformer(LARGE).to(torch.bfloat16).eval()
    for p in model.parameters():  # a new model has matrices of zeros, which would hide mistakes
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    add(**_check(model))
    started = time.perf_counter()
    engine = Engine(model, _tokenizer(), rows=ROWS, queue=ROWS)
    profile = _profiled(engine) if given.profile else None
    engine.start()
    while not engine.ready:
        if engine.failure is not None:
            raise SystemExit(engine.failure)
        time.sleep(0.01)
    add(way="fenchel", start_seconds=round(time.perf_counter() - started, 2))
    for rows in map(int, given.rows.split(",")):
        for name, sampling in SAMPLINGS.items():
            times = [_serve(engine, rows, given.new, sampling) for _ in range(ROUNDS + 1)][1:]
            whole, first = (statistics.median(seconds) for seconds in zip(*times, strict=True))
            line: dict[str, Any] = {"way": "fenchel", "rows": rows, "draw": name}
            line["tokens_per_second"] = round(rows * given.new / whole)
            line["first_token_ms"] = round(1e3 * first, 1)
            if rows == 1:
                share = bytes_read(model) / COPY
                line["of_copy"] = round(share * given.new / whole, 3)
                line["steps_of_copy"] = round(share * (given.new - 1) / (whole - first), 3)
            add(**line)
    engine.close()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    del engine, model
    torch.cuda.empty_cache()
    if given.static:
        with torch.device("cuda"):
            theirs = llama(LARGE).to(torch.bfloat16).eval()
        for rows in map(int, given.static.split(",")):
            add(way="transformers static", rows=rows, **_static(theirs, rows, given.new))


def _tokenizer() -> TextTokenizer:
    """A word per id, so that every token is text."""
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(LARGE.vocabulary)}, unk_token="w0")
    )
    tokenizer.decoder = decoders.WordPiece()
    return TextTokenizer(tokenizer)


def _serve(engine: Engine, rows: int, new: int, sampling: Sampling) -> tuple[float, float]:
    """Seconds of ``rows`` requests that arrive at once, and until their first token."""
    done, failed, reported = threading.Semaphore(0), [], []

    def on_update(update: Update) -> None:
        if not reported:
            reported.append(time.perf_counter())
        if update.finish is not None:
            if update.finish != "length":
                failed.append(update)
            done.release()

    prompts = torch.randint(LARGE.vocabulary, (rows, PROMPT)).tolist()
    started = time.perf_counter()
    for seed, prompt in enumerate(prompts):
        request = Request(prompt=tuple(prompt), max_new_tokens=new, sampling=sampling, seed=seed)
        engine.submit(request, on_update)
    for _ in range(rows):
        done.acquire()
    if failed:
        raise SystemExit(f"a request ended with {failed[0]}")
    return time.perf_counter() - started, reported[0] - started


def _static(model: Any, rows: int, new: int) -> dict[str, Any]:
    """transformers with a static cache, compiled by its first call."""
    ids = draw(LARGE.vocabulary, rows, PROMPT).to("cuda")

    def call() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
        )
        torch.cuda.synchronize()
        return time.perf_counter() - started

    first = call()
    seconds = [call() for _ in range(ROUNDS + 1)][1:]
    return {
        "tokens_per_second": round(rows * new / statistics.median(seconds)),
        "first_call": round(first, 1),
    }


@torch.inference_mode()
def _check(model: Transformer) -> dict[str, Any]:
    """Recorded steps beside the model itself, and the kernel of the draw beside the CPU."""
    decoders = [Decoder(model, rows=6, step=step) for step in ("fused", "model")]
    worst = 0.0
    joined: list[list[Any]] = [[], []]
    prompts = [torch.randint(LARGE.vocabulary, (n,)).tolist() for n in (7, 300, 33, 2, 90, 150)]
    for turn in range(12):
        for decoder, rows in zip(decoders, joined, strict=True):
            if turn % 2 == 0:
                row = decoder.take(prompts[turn // 2], reuse=False)
                decoder.read([row], [prompts[turn // 2]])
                row.token, row.end = 5 + turn, decoder.context
                rows.append(row)
            if turn == 7:
                decoder.leave(rows.pop(0))
        ours, theirs = (decoder.step().float() for decoder in decoders)
        for mine, his in zip(*joined, strict=True):
            x, y = ours[mine.index], theirs[his.index]
            assert bool(y.isfinite().all())
            assert float(y.std()) > 0.1
            worst = max(worst, float((x - y).norm() / y.norm()))
            mine.token = his.token = int(y.argmax())
    if worst > 0.05:  # bfloat16 itself is 0.018 from float32 in this model
        raise SystemExit(f"the logits of recorded steps are {worst:.3f} from those of the model.")
    return {"check": round(worst, 5), "equal_draws": _equal_draws()}


def _equal_draws() -> int:
    """How many of 128 rows of 32,000 logits draw the same by the kernel and on a CPU."""
    from fenchel.kernels.draw_token import draw_token

    z = 3 * torch.randn(128, LARGE.vocabulary, device="cuda").bfloat16()
    kinds = [*SAMPLINGS.values(), Sampling(top_k=50, top_p=0.9), Sampling(min_p=0.1, top_k=40)]
    settings = RowSampling.of([(kinds[i % len(kinds)], 17 * i) for i in range(128)])
    there = RowSampling(*(x.cuda() for x in settings))
    n, left, token, marked = (torch.arange(128, device="cuda") for _ in range(4))
    draw_token(z, there, n, left, token, marked)
    return int((marked.cpu() == draw_tokens(z.cpu(), settings, 2 * torch.arange(128))).sum())


def _profiled(engine: Engine) -> cProfile.Profile:
    """Have the thread of an engine profiled."""
    profile, run = cProfile.Profile(), engine._run

    def profiled() -> None:
        profile.runcall(run)

    engine._thread = threading.Thread(target=profiled, daemon=True)
    return profile


if __name__ == "__main__":
    main(sys.argv[1:])
