"""Several processes: Muon by owners against torch's on DTensors, and what FSDP2 costs alone.

    python -m benchmarks processes [--part muon|fsdp] [--shapes 64 256 512 1024]
                                   [--rounds N] [--seconds S] [--tiny]

**muon.** Two processes (gloo, one thread each) whose weights FSDP2 divides take optimiser steps
with gradients that FSDP2 has reduced, in turn by

    owners              every gradient to its owner, its whole step there, new weights back
    repeated            every process gathers every gradient and takes the whole step of the same
                        optimiser
    dtensor             torch.optim.Muon for the matrices of blocks, AdamW for the rest, on the
                        DTensors as they are
    dtensor, float32    the same without its cast to bfloat16

A round lasts as long as its slower process; the CPU time is that of the process that has more of
it, and does not depend on what else a machine does. Newton-Schulz is computed once among owners and
W times by the others, so owners should be W times as fast as ``repeated`` where products take the
time.
torch's Muon iterates in bfloat16 on every device. A CPU without instructions for it ("bfloat16" in
the row) is ten times slower there than in float32, which owners have no part in: float32 is the
comparison that counts, and widths above 256 leave bfloat16 out. A shape takes about ``--seconds``:
a first round, which does not count, decides how many follow, two at least. Rows are written as soon
as they are measured.

**fsdp.** One process: the training step of replicated weights against that of weights that FSDP2
divides among one process, where nothing is sent: hooks, DTensors, the copies of owners. 1.1B
parameters on a GPU; ``--tiny`` on any machine.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from benchmarks.harness import RESULTS, record, time_interleaved
from fenchel.data import Batches
from fenchel.distributed.cells import CellStepper, Pass, Sharding
from fenchel.distributed.owners import Owners
from fenchel.distributed.processes import World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.transformer import meta_model
from fenchel.optim import OptimConfig, build_optimiser, constant
from fenchel.train import TrainConfig

PROCESSES = 2
SHAPES = {
    "64": ModelConfig(vocabulary=512, width=64, heads=2, layers=4, context=64),
    "256": ModelConfig(vocabulary=512, width=256, heads=4, layers=4, context=64),
    "512": ModelConfig(vocabulary=512, width=512, heads=8, layers=4, context=64),
    "1024": ModelConfig(vocabulary=512, width=1024, heads=16, layers=1, context=64),
    "124M": ModelConfig(vocabulary=50257, width=768, heads=12, layers=12, context=64),
}
LARGE = ModelConfig(
    vocabulary=32000,
    context=2048,
    width=2048,
    layers=22,
    heads=32,
    kv_heads=4,
    hidden=5632,
    tied=False,
)


def fresh(config: ModelConfig, device: str) -> Transformer:
    """A model with normal weights of 0.02, drawn on the device."""
    model = meta_model(config).to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.02) if p.ndim > 1 else p.fill_(1.0)
    return model


def divided(config: ModelConfig, world: World) -> Owners:
    """A model that FSDP2 divides, with gradients, and the owners of its weights."""
    torch.manual_seed(0)
    shard = Sharding(world, gather_dtype="float32", position=None, parts=world.size)
    owners = Owners(
        fresh(config, "cpu"), meta_model(config), OptimConfig(), world, exact=False, shard=shard
    )
    for p in owners.parameters.values():
        p.grad = torch.zeros_like(p)
        p.grad.to_local().normal_()
    return owners


def peers(owners: Owners, config: ModelConfig) -> dict[str, Callable[[], None]]:
    """Steps without owners, as the module says."""
    names = [n for n, p in owners.parameters.items() if n.startswith("blocks.") and p.ndim == 2]
    muon = torch.optim.Muon([owners.parameters[n] for n in names])
    adamw = torch.optim.AdamW([p for n, p in owners.parameters.items() if n not in names])
    model = fresh(config, "cpu")
    optimiser = build_optimiser(model, OptimConfig())
    whole = dict(model.named_parameters())

    def repeated() -> None:
        for n, p in owners.parameters.items():
            whole[n].grad = p.grad.full_tensor()
        optimiser.step()

    def on_dtensors() -> None:
        muon.step()
        adamw.step()

    def in_float32() -> None:
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x):
            on_dtensors()

    steps = {"repeated": repeated, "dtensor, float32": in_float32}
    if native_bfloat16() or config.width <= 256:
        steps["dtensor"] = on_dtensors
    return steps


def native_bfloat16() -> bool:
    """Whether this CPU has instructions for products in bfloat16."""
    there = torch.cpu.get_capabilities()
    return bool(there.get("avx512_bf16") or there.get("amx_bf16"))


def muon_worker(rank: int, port: int, name: str, rounds: int, seconds: float, answers: Any) -> None:
    """Time all contenders in one of the processes; rank 0 answers."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, PROCESSES, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    world = World(rank, PROCESSES, rank, PROCESSES, store)
    owners = divided(SHAPES[name], world)

    def by_owners() -> None:
        received = owners.to_owners(owners.local_gradients(), 1)
        owners.optimiser.move({owners.owned[n]: x for n, (x,) in received.items()})
        owners.spread()

    contenders = {"owners": by_owners, **peers(divided(SHAPES[name], world), SHAPES[name])}
    together, work = {}, {key: list[float]() for key in contenders}
    for key, step in contenders.items():

        def aligned(key: str = key, step: Callable[[], None] = step) -> None:
            dist.barrier()
            before = time.process_time()
            step()
            work[key].append(time.process_time() - before)
            dist.barrier()

        together[key] = aligned
    first = time_interleaved(together, rounds=1, warmup=0).seconds
    left = seconds / sum(one for (one,) in first.values()) - 1
    rounds = world.share(max(2, min(rounds, int(left))))
    times = time_interleaved(together, rounds=rounds, warmup=0)
    medians = [statistics.median(seconds[1:]) for seconds in work.values()]
    slower = map(max, zip(*world.gather(medians), strict=True))
    cpu = dict(zip(contenders, slower, strict=True))
    if rank == 0:
        count = sum(p.numel() for p in owners.parameters.values())
        row: dict[str, Any] = {"part": "muon", "shape": name, "parameters": count}
        row |= {f"{key}, ms": 1e3 * times.median(key) for key in contenders}
        row |= {f"{key}, CPU ms": 1e3 * cpu[key] for key in contenders}
        for key in list(contenders)[1:]:
            row[f"{key} / owners"] = times.ratio("owners", key)
            row[f"{key} / owners, CPU"] = cpu[key] / cpu["owners"]
        row |= {"bfloat16": native_bfloat16(), "rounds": rounds}
        answers.put(row)
    dist.barrier()
    dist.destroy_process_group()


def muon(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of a shape."""
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    port = 29500 + os.getpid() % 1000
    spawn(muon_worker, args=(port, name, rounds, seconds, answers), nprocs=PROCESSES)
    row: dict[str, Any] = answers.get()
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    return row


def fsdp_steppers(
    config: ModelConfig, batch: int, device: str, **settings: Any
) -> dict[str, CellStepper]:
    """The steps of one process by weights replicated, and divided by FSDP2."""
    world = World(device=device)
    ids = np.random.default_rng(0).integers(0, config.vocabulary, size=4 * batch * config.context)
    batches = Batches(ids, batch=batch, context=config.context, seed=0)
    train = TrainConfig(batch=batch, precision="bfloat16", deterministic=False, **settings)
    steppers = {}
    for name in ("none", "full", "full, bfloat16"):
        torch.manual_seed(0)
        position, shard = Pass(), None
        if name != "none":
            gather_dtype = "bfloat16" if "bfloat16" in name else "float32"
            shard = Sharding(world, gather_dtype=gather_dtype, position=None, parts=1)
        optim = OptimConfig(optimiser="adamw", learning_rate=1e-4)
        owners = Owners(
            fresh(config, device), meta_model(config), optim, world, exact=False, shard=shard
        )
        kinds = {"config": train, "seed": 0, "position": position}
        steppers[name] = CellStepper(owners, batches, constant(), **kinds)
    return steppers


def fsdp(*, tiny: bool, rounds: int, batch: int, compiled: bool) -> list[dict[str, Any]]:
    """Rows of the replicated step and of those of FSDP2 at world 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    config = SHAPES["64"] if tiny else LARGE
    steppers = fsdp_steppers(config, batch, device, compile=compiled)
    losses = {name: [stepper(step).loss for step in range(2)] for name, stepper in steppers.items()}
    calls = {name: (lambda s=s: s(2)) for name, s in steppers.items()}
    times = time_interleaved(calls, rounds=rounds, warmup=1)
    rows = []
    for name in steppers:
        share = [b / a - 1 for a, b in zip(times.seconds["none"], times.seconds[name], strict=True)]
        rows.append(
            {
                "part": "fsdp",
                "shard": name,
                "parameters": sum(p.numel() for p in meta_model(config).parameters()),
                "tokens": batch * config.context,
                "compiled": compiled,
                "ms": 1e3 * times.median(name),
                "cost": statistics.median(share),
                "rounds": rounds,
                "losses": losses[name],
            }
        )
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    if device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    dist.destroy_process_group()
    del steppers, calls
    gc.collect()
    return rows


def main(words: list[str] | None = None) -> None:
    """Run one part or both, and record the rows."""
    parser = argparse.ArgumentParser("benchmarks processes")
    parser.add_argument("--part", choices=("muon", "fsdp"))
    widths = ["64", "256", "512", "1024"]
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=widths)
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="per shape of muon, about")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step of fsdp")
    parser.add_argument("--compile", action="store_true", help="blocks compiled, for fsdp")
    parser.add_argument("--tiny", action="store_true", help="fsdp with a small model")
    parser.add_argument("--print", action="store_true", help="print the rows, record nothing")
    given = parser.parse_args(words or [])

    def keep(rows: list[dict[str, Any]]) -> None:
        if given.print:
            return
        name = "processes_cuda" if torch.cuda.is_available() else "processes_cpu"
        if (before := RESULTS / f"{name}.json").exists():  # shapes that were not measured again
            now = {(row["part"], row.get("shape")) for row in rows}
            kept = json.loads(before.read_text())["rows"]
            rows = [row for row in kept if (row["part"], row.get("shape")) not in now] + rows
        print(f"written to {record(name, rows)}")

    if given.part != "fsdp":
        for shape in given.shapes:
            keep([muon(shape, given.rounds, given.seconds)])
    if given.part != "muon" and (given.tiny or torch.cuda.is_available()):
        sizes = {"tiny": given.tiny, "rounds": given.rounds, "batch": given.batch}
        keep(fsdp(**sizes, compiled=given.compile))


if __name__ == "__main__":
    main(sys.argv[1:])
