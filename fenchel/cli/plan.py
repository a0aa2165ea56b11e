"""fenchel plan: memory, bytes and time of a run on many GPUs, before there is a run."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fenchel.cli.console import Console, Switch, Whole, settings_from, short_count
from fenchel.cli.reference import read
from fenchel.config import did_you_mean
from fenchel.files import printable

if TYPE_CHECKING:
    from fenchel.distributed.plan import Cluster, Forecast, Plan

_GB = 1e9
_LEGEND = (
    "grads: gradients; gather: weights of other GPUs during a pass; activ: activations; kv: keys "
    "and values of a shared sequence; exch: buffers of an exchange; passes: micro-batches of a "
    "step; inside, between: from the same node and from others; links: seconds of exchange."
)


def run(
    config: Path | None = None,
    /,
    *,
    gpus: Whole,
    memory: float = 80.0,
    per_node: Whole = 8,
    rate: float = 440.0,
    attention_rate: float = 360.0,
    peak: float = 989.0,
    inside: float = 450.0,
    between: float = 50.0,
    set: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    simulate: Switch = False,
    json: Switch = False,
) -> int:
    """Memory per GPU, bytes exchanged, step time and days of a run on many GPUs, by formula.

    Layouts are compared: weights on every GPU (none), divided among all (full) or inside each node
    (node), sequences divided among 1, 2, 4 or 8 GPUs, with and without recomputation of blocks in
    the backward pass: train.shard, train.context_group and train.recompute of fenchel train.

    Parameters
    ----------
    config
        A TOML file of settings as for fenchel train, or a preset, such as gpt2 or
        llama-7b; fenchel list presets shows all.
    gpus
        How many GPUs.
    memory
        GB per GPU.
    per_node
        GPUs per machine.
    rate
        TFLOP/s that a GPU sustains in all products but those of attention.
    attention_rate
        TFLOP/s of attention, forward and backward.
    peak
        TFLOP/s at peak, which the efficiency is a share of.
    inside
        GB/s that a GPU receives inside its node.
    between
        GB/s that a GPU receives from other nodes.
    set
        One setting, such as train.batch=512; repeatable, overrides the file.
    simulate
        Also divide the model by torch's FSDP2 among as many simulated ranks, take one step, and
        compare what rank 0 holds and sends with the formulas.
    json
        Print one JSON object, with bytes and seconds.
    """
    presets = [row["name"] for row in read()["presets"]]
    named = config is not None and str(config) in presets and not config.exists()
    if config is not None and not named and not config.suffix and not config.exists():
        hint = did_you_mean(str(config), presets)
        raise ValueError(f"{config} is neither a file of settings nor a preset; {hint}")
    short = {"preset": str(config) if named else None}
    mapping = settings_from(None if named else config, set, short)
    with Console(quiet=json) as console:
        console.progress("loading torch", 0, 0)

        from fenchel.distributed import plan as planning
        from fenchel.pipeline import settings

        chosen = settings(mapping)
        try:
            cluster = planning.Cluster(
                ranks=gpus,
                per_node=per_node,
                memory=memory,
                rate=rate,
                attention_rate=attention_rate,
                peak=peak,
                inside=inside,
                between=between,
            )
        except ValueError as error:  # named as fields there, as flags here
            flag, equals, rest = str(error).replace("ranks=", "gpus=").partition("=")
            named_flag = f"--{flag.replace('_', '-')}" if equals else flag
            raise ValueError(f"{named_flag}{equals}{rest}") from None
        sections = chosen.model, chosen.train, chosen.optim
        result = planning.plan(*sections, cluster)
        advice, best = None, result.fastest()
        if best is None or best.layout.recompute:
            advice = planning.advice(*sections, cluster, recompute=best is None)
        found: dict[str, planning.Simulation] = {}
        if simulate:
            sizes, optim = planning.Sizes(chosen.model, chosen.optim), chosen.optim
            within = {"full": gpus, **({"node": cluster.S} if cluster.nodes > 1 else {})}
            for shard, parts in within.items():
                console.progress(f"simulating {gpus} ranks, shard={shard}", 0, 0)
                ranks: dict[str, Any] = {"ranks": gpus, "parts": parts}
                ranks["gather_dtype"] = chosen.train.gather_dtype
                found[shard] = planning.simulate(chosen.model, optim, **ranks)
                if wrong := planning.simulated_differs(found[shard], sizes, optim, **ranks):
                    raise ValueError(f"the plan is wrong for this torch: {wrong}")
    if json:
        values = {
            "parameters": result.parameters,
            "tokens_per_step": result.tokens,
            "flops_per_step": result.flops,
            "layouts": [forecast.plain() for forecast in result.forecasts],
            "refused": result.refused,
            "advice": advice,
            "simulated": {shard: result._asdict() for shard, result in found.items()},
        }
        print(json_format.dumps(values, indent=1))
        return 0
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.S}"
    console.message(
        f"{result.parameters:,} parameters on {gpus} GPUs ({nodes}); {result.tokens:,} tokens and "
        f"{result.flops:.3g} FLOP per step."
    )
    for sentence in _sentences(result, cluster, advice):
        console.message(sentence)
    tables = f"\n{_memory_table(result)}\n\n{_time_table(result)}\n"
    console.terminal.print(tables, markup=False, highlight=False, soft_wrap=True)
    console.message(_LEGEND)
    if chosen.train.steps is None:
        console.message("Days need the length of the run: --set train.steps=N.")
    for shard, simulated in found.items():
        console.message(
            f"Simulated shard={shard} in {simulated.seconds:.0f} s, equal to the formulas: rank 0 "
            f"of {gpus} holds {simulated.rows:,} numbers and {_amount(simulated.state)} GB of "
            f"state; one pass receives {_amount(simulated.gather_bytes)} GB in "
            f"{simulated.gathers} gathers and {_amount(simulated.reduce_bytes)} GB in "
            f"{simulated.reductions} reduce-scatters, and the update "
            f"{_amount(simulated.owner_bytes)} GB."
        )
    return 0


def _rows(plan: "Plan") -> list[tuple["Forecast", "Forecast"]]:
    """(without, with) recomputation, by layout."""
    return list(zip(plan.forecasts[::2], plan.forecasts[1::2], strict=True))


def _table(title: str, headings: str, rows: list[list[str]]) -> str:
    """Columns as wide as their entries, aligned to the right, for any terminal.

    >>> print(_table("GB", "shard peak", [["none", "12.5"], ["full", "3"]]))
    GB
    shard peak
     none 12.5
     full    3
    """
    lines = [headings.split(), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (" ".join(map(str.rjust, line, widths)) for line in lines)
    return "\n".join([title, *aligned])


def _memory_table(plan: "Plan") -> str:
    rows = []
    for plain, again in _rows(plan):
        m = plain.memory
        gathered = m["gathered"] + m["casts"]
        sizes = (m["weights"], m["state"], m["gradients"], gathered, m["activations"], m["kv"])
        more = (m["loss"], m["exchange"], plain.peak, again.memory["activations"], again.peak)
        cells = map(_amount, (*sizes, *more))
        rows.append([plain.layout.shard, str(plain.layout.context), *cells])
    return _table(
        "GB per GPU; C GPUs share a sequence; in brackets with recomputation",
        "shard C weights state grads gather activ kv loss exch peak (activ peak)",
        rows,
    )


def _time_table(plan: "Plan") -> str:
    rows = []
    for plain, again in _rows(plan):
        f = again if again.fits and not plain.fits else plain
        fits = "recomputed" if f is again else "yes" if f.fits else "no"
        rows.append(
            [
                f.layout.shard,
                *(str(f.layout.context), str(f.passes), *map(_amount, f.received)),
                *(f"{seconds:.3g}" for seconds in (f.compute, f.communication, f.step)),
                *(f"{100 * f.efficiency:.1f}", short_count(f.tokens_per_second)),
                *("-" if f.days is None else f"{f.days:.3g}", fits),
            ]
        )
    return _table(
        "GB received per GPU and step; seconds per step; % of peak; days of train.steps",
        "shard C passes inside between compute links step %peak tokens/s days fits",
        rows,
    )


def _sentences(plan: "Plan", cluster: "Cluster", advice: str | None) -> list[str]:
    """What fits, what is fastest, and what would help where nothing fits."""
    from fenchel.distributed.plan import USABLE

    limit = f"{USABLE * cluster.memory:g} of {cluster.memory:g} GB"
    sentences = []
    if (best := plan.fastest()) is not None:
        cost = f"{_amount(best.peak)} GB, {best.step:.3g} s per step"
        sentences.append(f"Fastest of fenchel train within {limit}: {best.layout} ({cost}).")
        if best.layout.recompute and advice is not None:
            sentences.append(f"Without recomputation {advice}.")
    else:
        small = plan.smallest
        instead = f"; {advice}" if advice else ", and no change that was tried would make it fit"
        sentences.append(
            f"No layout of fenchel train fits {limit}{instead}. The smallest of all, "
            f"{small.layout}, needs {_amount(small.peak)} GB."
        )
    if plan.refused:
        layout, why = next(iter(plan.refused.items()))
        more = f" and {len(plan.refused) - 1} more are" if len(plan.refused) > 1 else " is"
        sentences.append(f"{layout}{more} left out: {printable(why, 300)}")
    return sentences


def _amount(size: float) -> str:
    """Bytes in GB.

    >>> _amount(13_400_000_000), _amount(120_000_000), _amount(0), _amount(3000)
    ('13.4', '0.12', '0', '0.00')
    """
    gigabytes = size / _GB
    return "0" if not size else f"{gigabytes:.2f}" if gigabytes < 9.995 else f"{gigabytes:.1f}"
