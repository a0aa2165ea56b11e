"""What a run needs on many GPUs: memory per rank, bytes exchanged, step time, days. All by formula.

W ranks in nodes of S ranks, R = W / S nodes. A *layout* is how they divide the work:

    none    every rank has all weights; owners have the optimiser's state (owners.py)     D = 1
    full    weights are divided among all ranks (FSDP2)                                   D = W
    node    divided inside each node, repeated between nodes (HSDP)                       D = S
    context C consecutive ranks share each sequence: T / C positions per rank, keys and values
            gathered from the C ranks layer by layer, dealt so that causal work is even

each with and without recomputation of blocks in the backward pass (model/block.py). ``fenchel
train`` has them all: ``train.shard``, ``train.context_group``, ``train.recompute``.

A step of B sequences of T positions is P cells (cells.py); W / C groups of ranks read them in

    m = ceil(P / (W / C))  passes of  t = (B / P) T / C  positions per rank.

**Memory**, bytes per rank. n_D = sum over parameters of ceil(rows / D) columns is what FSDP2 leaves
to rank 0, o the numbers that the owner with most bytes has (``deal``), a the bytes of a factor of a
product (2 under autocast, else 4), g those of a gathered weight (``train.gather_dtype``).

    weights       4 n_D, and 4 o for the owner's whole copies if D > 1
    state         per number: AdamW and Adam 8; Muon, ScoreDescent, ScoreTrust and the SGD rules 4
    gradients     4 n_D
    gathered      D > 1: g (root + two largest blocks), one block being gathered ahead; and (g + 4)
                  of the largest block, its gradient and the message of its reduce-scatter
    casts         a per number of the matrices in blocks where a < g: autocast keeps its copy of
                  every weight, whole, from the forward pass to the backward pass. Recomputed, of
                  one block, unless blocks serve several layers. Under D > 1 with
                  train.gather_dtype="bfloat16" there is none
    activations   t (L A + 8 M) + temporaries;      recomputed   t (4 M L + A + 8 M) + temporaries
    kv            C > 1: keys and values of the whole sequences, 2 a G D_h C t per layer (one layer
                  if recomputed)
    loss          logits of r rows at a time, r V a; dense gradient of the LM head 4 V M, its cast
                  a V M where a < g, gradient of the hidden states 4 t M  (train/loss.py)
    exchange      of the update: W / D gradients of o numbers at their owner, the messages, and 12
                  bytes per number that Muon moves at once, those of one shape

    A = 8 M + 8 + a (x M + (H + 2 G) D_h + [rotary] (H + G) D_h + H D_h + f F) + 4 H
        x = 2, or 3 for a gated MLP if a < 4, whose input is cast twice;  f = 4 if gated, else 2
        qk_norm adds 4 (H + G) + a H D_h (8 where one norm is over all heads), and 8 (H + G) D_h if
        a < 4; norms on both sides add 8 M + 8, norms after a branch 8 M if a < 4; dropout adds
        2 a M; an output gate of w factors adds a (H D_h + w), once more a w for softplus, and a M
        if a < 4; every layer counts as rotary where one is
        temporaries  t (3 a F + 8 M), gradients inside one block

    peak = weights + state + gradients
           + max(gathered + casts + activations + kv + loss - min(loss, r),   exchange)

        r = t A + temporaries + casts + kv of one block if recomputed, else 0: a block runs again
            when what the loss needs has been freed

A is what autograd saves per position and layer in softmax attention without dropout of its weights;
the test counts the saved storages of the real model on a CPU, and they are A to the byte. With
weights gathered in bfloat16 norms save up to a fifth of A more there. Mixtures of experts save f F
per expert of a token. What other choice maps save is not counted.

**Bytes** received per rank. A ring over D ranks moves z = (D - 1) / D of the whole to every rank.
If it spans nodes, one of S connections leaves the node, and all S links of a node carry such rings:
z / S between nodes and z (1 - 1 / S) inside. An exchange that is sent directly (owners) goes to
other nodes for (W - S) / (W - 1) of its bytes. Sums over a step:

    full, node    m ring_D (g (2 k blocks + root) + 4 all)    weights, the root once; gradients
                  k layers per block: 1 unless distinct_layers
    owners        none    2 x 4 o (W - 1), directly           gradients in, weights out
                  full    2 x 4 o (W - 1) / W, directly
                  node    2 x 4 o (R - 1) between, 2 x 4 o (S - 1) / S inside: from every node the
                          sum of its ranks
    context       m 2 L ring_C (2 a G D_h C t)                forward, and as gradients backward

With ``train.cells`` the gradients under none and node are sent m times.

**Time.** F_s operations of scores and F_p of all other products of a forward pass
(model/flops.py); causal kernels do half of F_s.

    compute   (3 F_p / rate + 3 F_s / 2 / attention_rate) per rank;   recomputed: 4 for 3 in blocks
    ring      max(inside / inside_rate, between / between_rate)
    pass      max(compute, gathers and reduce-scatters) + context
    step      m pass + owners + 5 (4 p^2 q + 2 p^3) / rate, Muon's products for matrices p <= q
    efficiency = 3 B F / (W peak step),     F = F_p + F_s, the dense count

Overlap is ideal where there is any, and owners' exchange has none. Not in it: the first gather, the
launch of kernels in small models, stragglers, evaluation, checkpoints, and the work of ScoreDescent
and ScoreTrust on scores.

**Measured and assumed.** ``rate`` and ``attention_rate`` are measured on one H200, the other rates
are vendors' numbers, and bytes are checked against torch's own collectives in a simulation
(``simulate``): docs/distributed.md has the evidence for every number. Times are a model.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, isqrt, prod
from typing import Any, NamedTuple

import torch

from fenchel.distributed.cells import Sharding, cell_count
from fenchel.distributed.owners import BUCKET, BY_SCORES, Owners, deal, units_of
from fenchel.distributed.processes import World
from fenchel.model import ModelConfig, Transformer
from fenchel.model.flops import forward_flops
from fenchel.model.transformer import meta_model
from fenchel.optim import OptimConfig
from fenchel.optim.config import split_matrices
from fenchel.torch_internals import recorded_collectives, simulated_ranks, tensors_without_values
from fenchel.train import TrainConfig
from fenchel.train.loss import LOGITS, ROWS

CONTEXTS = (1, 2, 4, 8)
"""Sizes of context groups that are compared."""
USABLE = 0.9
"""The share of a GPU's memory that a plan fills: the rest is the driver's and lost to fragments."""
GIGA, TERA = 1e9, 1e12
_STATE = {"muon": (4, 8), "score": (4, 8), "trust": (4, 8), "adamw": (8, 8), "adam_l2": (8, 8)}
"""Bytes of state per number, of matrices in blocks and of all else; 4 for the SGD rules."""
_BY_MUON = ("muon", "score", "trust")
_MOVED = 12
"""Bytes per number that Muon moves at once: the momentum ahead, X and its successor."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The GPUs of a plan, and how fast they are."""

    ranks: int
    """W, one GPU each."""
    per_node: int = 8
    """S, GPUs of one machine."""
    memory: float = 80.0
    """GB (10^9 bytes) per GPU."""
    rate: float = 440.0
    """TFLOP/s of all products but those of attention, as sustained in training."""
    attention_rate: float = 360.0
    """TFLOP/s of attention, forward and backward; what a causal mask leaves out is not counted."""
    peak: float = 989.0
    """TFLOP/s of which the efficiency is the share."""
    inside: float = 450.0
    """GB/s that a GPU receives from its own node."""
    between: float = 50.0
    """GB/s that a GPU receives from other nodes."""
    device: str = "cuda"
    """"cpu" counts the logits that are computed at a time on a CPU."""

    def __post_init__(self) -> None:
        for name in ("ranks", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be at least 1.")
        for name in ("memory", "rate", "attention_rate", "peak", "inside", "between"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} should be above 0 and finite.")
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise ValueError(
                f"{self.ranks} GPUs do not fill nodes of {self.per_node}; "
                f"give a multiple of {self.per_node}."
            )

    @property
    def S(self) -> int:
        """GPUs per node that are used."""
        return min(self.ranks, self.per_node)

    @property
    def nodes(self) -> int:
        """R."""
        return self.ranks // self.S


class Bytes(NamedTuple):
    """Bytes that a rank receives."""

    inside: float = 0.0
    """From its own node."""
    between: float = 0.0
    """From other nodes."""

    def times(self, factor: float) -> "Bytes":
        """Several such exchanges."""
        return Bytes(factor * self.inside, factor * self.between)

    def seconds(self, cluster: Cluster) -> float:
        """The time of an exchange in which both links work at once."""
        return max(self.inside / (cluster.inside * GIGA), self.between / (cluster.between * GIGA))


def ring(size: float, ranks: int, S: int) -> Bytes:
    """Per rank, for a gather or a reduce-scatter of ``size`` bytes over consecutive ranks.

    >>> ring(800.0, ranks=8, S=8), ring(1600.0, ranks=16, S=8)
    (Bytes(inside=700.0, between=0.0), Bytes(inside=1312.5, between=187.5))
    """
    received = size * (ranks - 1) / ranks
    return Bytes(received * (1 - 1 / S), received / S) if ranks > S else Bytes(received)


def direct(size: float, cluster: Cluster) -> Bytes:
    """``size`` bytes that come in equal parts from all other ranks.

    >>> direct(150.0, Cluster(ranks=16))
    Bytes(inside=70.0, between=80.0)
    """
    if cluster.ranks == 1:
        return Bytes()
    share = (cluster.S - 1) / (cluster.ranks - 1)
    return Bytes(size * share, size * (1 - share))


class Sizes:
    """The parameters of a model by the units in which FSDP2 gathers them, without their values."""

    def __init__(self, config: ModelConfig, optim: OptimConfig) -> None:
        model = meta_model(config)
        inside = {id(p) for block in model.blocks for p in block.parameters()}
        self.blocks = [[tuple(p.shape) for p in block.parameters()] for block in model.blocks]
        self.repeats = config.layers // len(self.blocks)
        """k, the layers that one block serves."""
        self.root = [tuple(p.shape) for p in model.parameters() if id(p) not in inside]
        self.linear_lm_head: bool = model.lm_head_is_linear
        matrices = {id(p) for p in split_matrices(model)[0]}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.matrices = {n for n, p in model.named_parameters() if id(p) in matrices}
        self.units = units_of(model, optim)
        self.rules = _STATE.get(optim.optimiser, (4, 4))
        self.by_muon = optim.optimiser in _BY_MUON

    @property
    def total(self) -> int:
        """N, the number of parameters."""
        return sum(map(prod, self.shapes.values()))

    def rows(self, ranks: int) -> int:
        """n_D: the numbers that are left to rank 0 of ``ranks``."""
        return sum(padded(shape, ranks) for shape in self.shapes.values())

    def owned(self, ranks: int) -> "Owned":
        """What the owner with most bytes has, and the most work of any."""
        of = self.owned_by_rank(ranks)
        heaviest = max(of, key=lambda owned: 4 * owned.numbers + owned.state)
        return heaviest._replace(flops=max(owned.flops for owned in of))

    def owned_by_rank(self, ranks: int) -> "list[Owned]":
        """What every owner has."""
        sizes = [sum(prod(self.shapes[n]) for n in unit) for unit in self.units]
        of = [Owned(Counter()) for _ in range(ranks)]
        for unit, rank in zip(self.units, deal(sizes, ranks), strict=True):
            for name in unit:
                matrix = name in self.matrices
                state = self.rules[not matrix]
                of[rank] = of[rank].with_parameter(
                    self.shapes[name], state, matrix and self.by_muon
                )
        return of


class Owned(NamedTuple):
    """The parameters of one owner."""

    matrices: Counter[tuple[int, ...]]
    """Numbers that Muon moves, by shape."""
    numbers: int = 0
    """o."""
    state: int = 0
    """Bytes of optimiser state."""
    flops: int = 0
    """Operations of Muon per step, of the owner that has most."""

    def with_parameter(self, shape: tuple[int, ...], state: int, matrix: bool) -> "Owned":
        """One more."""
        size, flops, matrices = prod(shape), self.flops, self.matrices
        if matrix:
            p, q = sorted(shape[-2:])
            flops += 5 * (4 * p * p * q + 2 * p**3) * prod(shape[:-2])
            matrices = matrices + Counter({shape: size})
        return Owned(matrices, self.numbers + size, self.state + state * size, flops)


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """The numbers of rank 0 of a parameter that is divided by rows, those of padding included.

    >>> padded((5, 3), ranks=4)  # rows 2, 2, 1 and none
    6
    """
    if not shape:
        return 1
    return -(-shape[0] // ranks) * prod(shape[1:])


def saved_per_position(config: ModelConfig, a: int) -> int:
    """A: the bytes that autograd saves per position and layer, ``a`` per factor of a product.

    >>> saved_per_position(ModelConfig(vocabulary=96, width=64, heads=4), a=4)
    5656
    """
    if config.has_delta:
        raise ValueError("there is no formula of memory for layers of gated DeltaNet; set none.")
    M, H, G, D = config.width, config.heads, config.groups, config.head_width
    half = a < 4
    inputs = 1 + (2 if config.gated and half else 1)
    wide = (4 if config.gated else 2) * config.mlp_width
    if config.experts:
        wide *= config.experts_per_token
        wide += (4 if config.gated else 2) * (config.shared_expert or 0)
        wide += (M + 1) * config.shared_expert_gate
    factors = inputs * M + (H + 2 * G) * D + H * D + wide
    if any(map(config.rotates, range(config.layers))) or config.qk_norm:
        factors += (H + G) * D
    saved = 8 * M + 8 + a * factors + 4 * H
    if config.qk_norm:
        saved += 8 if config.qk_norm_width == "all" else 4 * (H + G) + a * H * D
        saved += 8 * (H + G) * D if half else 0
    if config.norm_place == "both":
        saved += 8 * M + 8
    if config.expert_norms:  # two more than a block without them
        saved += 16 * M + 16
    if config.norm_place in ("both", "after") and half:
        saved += 8 * M
    if config.dropout:
        saved += 2 * a * M
    if config.value_norm:
        saved += 4 * G if half else a * G * D + 4 * G
    if P := config.per_layer_width:  # a norm behind a gated map of P entries
        saved += 8 * M + 8 + 5 * a * P + (a * (M + 4 * P) if half else 0)
    if config.gate_width:
        kept = config.gate_width * (2 if config.gate_activation == "softplus" else 1)
        saved += a * (H * D + kept + (M if half else 0))
    return saved


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks divide the work."""

    shard: str
    context: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        """In words."""
        words = [f"shard={self.shard}"]
        words += [f"context_group={self.context}"] if self.context > 1 else []
        words += ["recompute=block"] if self.recompute else []
        return " with ".join([words[0], " and ".join(words[1:])]) if words[1:] else words[0]


@dataclass(frozen=True)
class Forecast:
    """What a layout needs, and how fast it is."""

    layout: ParallelLayout
    passes: int
    """m."""
    memory: dict[str, float]
    """Bytes per rank by category; their peak is less than their sum.

    "recomputed" is r, a part of activations, casts and kv.
    """
    exchanged: dict[str, Bytes]
    """Bytes that a rank receives per step, by exchange."""
    compute: float
    """Seconds per step, all passes."""
    communication: float
    """Seconds per step, of which some are hidden behind ``compute``."""
    step: float
    """Seconds per step."""
    efficiency: float
    """Share of the peak of all GPUs."""
    tokens_per_second: float
    days: float | None
    """For ``train.steps``; None without them."""
    fits: bool

    @property
    def peak(self) -> float:
        """Bytes per rank at the fullest moment."""
        m = self.memory
        passes = m["gathered"] + m["casts"] + m["activations"] + m["kv"] + m["loss"]
        passes -= min(m["loss"], m["recomputed"])
        return m["weights"] + m["state"] + m["gradients"] + max(passes, m["exchange"])

    @property
    def received(self) -> Bytes:
        """Bytes that a rank receives per step."""
        return Bytes(*map(sum, zip(*self.exchanged.values(), strict=True)))

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        values = asdict(self) | {"peak": self.peak}
        values["exchanged"] = {name: b._asdict() for name, b in self.exchanged.items()}
        return values


@dataclass(frozen=True)
class Plan:
    """The forecasts of one run on one cluster."""

    parameters: int
    tokens: int
    """Per step."""
    flops: int
    """Per step, with attention counted as dense."""
    cluster: Cluster
    forecasts: tuple[Forecast, ...]
    refused: dict[str, str]
    """Layouts that the batch does not allow, and why."""

    def fastest(self, *, recompute: bool = True) -> Forecast | None:
        """The fastest layout that fits; ``recompute=False`` among those without it."""
        fitting = [f for f in self.forecasts if f.fits and (recompute or not f.layout.recompute)]
        return min(fitting, key=lambda f: (f.step, f.peak), default=None)

    @property
    def smallest(self) -> Forecast:
        """The layout that needs least memory."""
        return min(self.forecasts, key=lambda f: f.peak)


def plan(
    model: ModelConfig,
    train: TrainConfig,
    optim: OptimConfig,
    cluster: Cluster,
    sizes: Sizes | None = None,
) -> Plan:
    """All layouts of a run; ``sizes`` where they are known already.

    >>> config = ModelConfig(vocabulary=1000, width=256, layers=2, heads=4)
    >>> four = plan(config, TrainConfig(batch=8), OptimConfig(), Cluster(ranks=4))
    >>> [str(f.layout) for f in four.forecasts][:3]
    ['shard=none', 'shard=none with recompute=block', 'shard=none with context_group=2']
    """
    if model.kind != "decoder":
        raise ValueError(f'a run trains model.kind="decoder", not {model.kind!r}.')
    forecasts, refused = [], dict[str, str]()
    sizes = sizes or Sizes(model, optim)
    owned = sizes.owned(cluster.ranks)
    for layout in layouts(cluster):
        try:
            forecasts.append(_divided(layout, sizes, owned, model, train, cluster))
        except ValueError as error:
            refused[str(layout)] = str(error)
    if not forecasts:
        raise ValueError(next(iter(refused.values())))
    flops = 3 * train.batch * forward_flops(model, model.context).total
    tokens = train.batch * model.context
    return Plan(sizes.total, tokens, flops, cluster, tuple(forecasts), refused)


def layouts(cluster: Cluster) -> Iterator[ParallelLayout]:
    """The layouts that the number of ranks allows."""
    shards = ["none", *["full"] * (cluster.ranks > 1), *["node"] * (cluster.nodes > 1)]
    for shard in shards:
        for C in CONTEXTS:
            if cluster.ranks % C == 0:
                yield from (ParallelLayout(shard, C, recompute) for recompute in (False, True))


def micro_batches(train: TrainConfig, ranks: int) -> Iterator[TrainConfig]:
    """The settings with every ``train.accumulate`` that they leave open, the fewest first.

    >>> [one.accumulate for one in micro_batches(TrainConfig(batch=12), ranks=2)]
    [1, 3, 6, 12]
    >>> [one.accumulate for one in micro_batches(TrainConfig(batch=6), ranks=2)]
    [1, 6]
    """
    if train.accumulate is not None or train.cells is not None:
        yield train
        return
    small = [n for n in range(1, isqrt(train.batch) + 1) if train.batch % n == 0]
    seen = set[int]()
    for parts in sorted({*small, *(train.batch // n for n in small)}):
        one = replace(train, accumulate=parts)
        with suppress(ValueError):  # a number of cells that does not divide the batch
            if (cells := cell_count(one, ranks)) not in seen:
                seen.add(cells)
                yield one


def _divided(
    layout: ParallelLayout,
    sizes: Sizes,
    owned: Owned,
    model: ModelConfig,
    train: TrainConfig,
    cluster: Cluster,
) -> Forecast:
    """The forecast with the fewest micro-batches that fit or, where none does, with the most."""
    grouped = replace(train, context_group=layout.context)
    for one in list(micro_batches(grouped, cluster.ranks)) or [train]:
        forecast = _forecast(layout, sizes, owned, model, one, cluster)
        if forecast.fits:
            break
    return forecast


def _forecast(
    layout: ParallelLayout,
    sizes: Sizes,
    owned: Owned,
    model: ModelConfig,
    train: TrainConfig,
    cluster: Cluster,
) -> Forecast:
    W, S, C, L = cluster.ranks, cluster.S, layout.context, model.layers
    if C > 1 and model.context % (2 * C):
        raise ValueError(f"model.context={model.context} does not split into {2 * C} chunks.")
    groups = W // C
    P = cell_count(replace(train, context_group=C), W)
    m, sequences = ceil(P / groups), train.batch // P
    t = sequences * model.context // C
    a = 4 if train.precision == "float32" else 2
    D = {"none": 1, "full": W, "node": S}[layout.shard]
    g = 2 if train.gather_dtype == "bfloat16" and D > 1 else 4
    memory = _memory(layout, sizes, owned, model, D=D, W=W, C=C, t=t, a=a, g=g, train=train)
    memory["loss"] = _loss_bytes(sizes, model, train, t=t, a=a, g=g, device=cluster.device)
    exchanged = {}
    if D > 1:
        weights = g * D * (2 * sizes.repeats * _padded(sizes.blocks, D) + _padded([sizes.root], D))
        exchanged["gather"] = ring(weights, D, S).times(m)
        exchanged["reduce-scatter"] = ring(4 * D * sizes.rows(D), D, S).times(m)
    exchanged["owners"] = _owners_bytes(layout, owned, cluster, m if train.cells else 1)
    if C > 1:
        kv = 2 * a * model.groups * model.head_width * C * t
        exchanged["context"] = ring(kv, C, S).times(m * L * (3 if layout.recompute else 2))
    # Time.
    flops = forward_flops(model, model.context)
    blocks = flops.projections + flops.mlp
    times = 4 if layout.recompute else 3
    rate, share = cluster.rate * TERA, sequences / C
    compute = (times * blocks + 3 * flops.lm_head) / rate
    compute = m * share * (compute + times * flops.scores / 2 / (cluster.attention_rate * TERA))
    seconds = {name: b.seconds(cluster) for name, b in exchanged.items()}
    hidden = seconds.get("gather", 0.0) + seconds.get("reduce-scatter", 0.0)
    step = max(compute, hidden) + seconds["owners"] + seconds.get("context", 0.0)
    step += owned.flops / rate
    total = 3 * train.batch * flops.total
    result = Forecast(
        layout,
        m,
        memory,
        exchanged,
        compute,
        sum(seconds.values()),
        step,
        total / (W * cluster.peak * TERA * step),
        train.batch * model.context / step,
        None if train.steps is None else train.steps * step / 86400,
        fits=False,
    )
    return replace(result, fits=result.peak <= USABLE * cluster.memory * GIGA)


def _padded(units: Iterable[Iterable[tuple[int, ...]]], ranks: int) -> int:
    return sum(padded(shape, ranks) for unit in units for shape in unit)


def _memory(
    layout: ParallelLayout,
    sizes: Sizes,
    owned: Owned,
    model: ModelConfig,
    *,
    D: int,
    W: int,
    C: int,
    t: int,
    a: int,
    g: int,
    train: TrainConfig,
) -> dict[str, float]:
    """Bytes per rank by category, without the loss."""
    M, L, once = model.width, model.layers, layout.recompute
    model = max(map(model.at_layer, range(L)), key=lambda layer: saved_per_position(layer, a))
    A = saved_per_position(model, a)  # where layers differ, that of the widest
    temporaries = 3 * a * model.mlp_width + 8 * M
    largest = max(_padded([block], D) for block in sizes.blocks) * D
    matrices = sum(prod(sizes.shapes[name]) for name in sizes.matrices)
    kept = largest if once and sizes.repeats == 1 else matrices
    kv = 2 * a * model.groups * model.head_width * C * t
    bucket = min(sizes.total, BUCKET + max(map(prod, sizes.shapes.values())))
    several = W > 1 or train.cells is not None
    casts, kv = a * kept if a < g else 0, kv * (1 if once else L) if C > 1 else 0
    block = t * (A + temporaries)
    return {
        "weights": 4 * sizes.rows(D) + (4 * owned.numbers if D > 1 else 0),
        "state": owned.state,
        "gradients": 4 * sizes.rows(D),
        "gathered": g * (D * _padded([sizes.root], D) + 2 * largest) + (g + 4) * largest
        if D > 1
        else 0,
        "casts": casts,
        "activations": t * (4 * M * L if once else (L - 1) * A) + block + t * 8 * M,
        "kv": kv,
        "recomputed": block + casts + kv if once else 0,
        "exchange": (4 * owned.numbers * (W // D) + 8 * ceil(bucket / D)) * several
        + _MOVED * max(owned.matrices.values(), default=0),
    }


def _loss_bytes(
    sizes: Sizes, model: ModelConfig, train: TrainConfig, *, t: int, a: int, g: int, device: str
) -> int:
    """Logits and gradients of the loss."""
    V, M = model.vocabulary, model.width
    if not sizes.linear_lm_head:
        return t * V * (a + 8)
    fused = device == "cuda" and train.loss == "cross_entropy"
    rows = min(t, max(ROWS, LOGITS[device] // V))
    logits = rows * V * (a if fused else 4 + (a if a < 4 else 0))
    return logits + 4 * V * M + (a * V * M if a < g else 0) + 4 * t * M


def _owners_bytes(layout: ParallelLayout, owned: Owned, cluster: Cluster, times: int) -> Bytes:
    """Gradients to their owners, ``times`` per step from several replicas, and weights back."""
    W, S, o = cluster.ranks, cluster.S, 4 * owned.numbers
    if layout.shard == "none":
        return direct(o * (W - 1), cluster).times(times + 1)
    if layout.shard == "full":
        return direct(o * (W - 1) / W, cluster).times(2)
    return Bytes(o * (S - 1) / S, o * (cluster.nodes - 1)).times(times + 1)


def advice(
    model: ModelConfig,
    train: TrainConfig,
    optim: OptimConfig,
    cluster: Cluster,
    *,
    recompute: bool = True,
) -> str | None:
    """The first change that makes a layout fit; None where none does.

    ``recompute=False`` for layouts without recomputation.
    """
    changes: list[tuple[str, TrainConfig, Cluster]] = []
    words, best = "", train
    if train.shard != "none" and train.gather_dtype != "bfloat16":
        words, best = " and train.gather_dtype=bfloat16", replace(train, gather_dtype="bfloat16")
        changes.append((words.removeprefix(" and "), best, cluster))
    W, parts = cluster.ranks, 2 * max(train.accumulate or train.batch, cluster.ranks)
    while train.cells is None and train.batch % parts == 0 and parts % W == 0:
        fewer = replace(best, accumulate=parts)
        changes.append((f"train.accumulate={parts}{words}", fewer, cluster))
        parts *= 2
    for ranks in (factor * W for factor in (2, 4, 8, 16, 32, 64)):
        batch = ceil(train.batch / ranks) * ranks
        more = replace(best, batch=batch, accumulate=batch, cells=None)  # one sequence per pass
        parts_too = f" and train.accumulate={batch}" if batch > ranks else ""
        name = f"{ranks} GPUs with train.batch={batch}{parts_too}{words}"
        changes.append((name, more, replace(cluster, ranks=ranks)))
    sizes = Sizes(model, optim)
    for name, settings, machines in changes:
        found = plan(model, settings, optim, machines, sizes).fastest(recompute=recompute)
        if found is not None:
            cost = f"{found.peak / GIGA:.3g} GB, {found.step:.3g} s per step"
            return f"{found.layout} fits with {name} ({cost})"
    return None


class Simulation(NamedTuple):
    """What torch itself holds and sends in one step of rank 0, one pass long."""

    parameters: int
    rows: int
    """Numbers of the parameters that rank 0 holds."""
    gathers: int
    """All-gathers of a forward and a backward pass."""
    gather_bytes: int
    """Received from the other ranks by all of them."""
    reductions: int
    """Reduce-scatters."""
    reduce_bytes: int
    owner_bytes: int
    """Gradients of all replicas that arrive at this owner, rows of new weights that come back."""
    state: int
    """Bytes of the optimiser's state."""
    seconds: float


def simulate(
    model: ModelConfig,
    optim: OptimConfig,
    *,
    ranks: int,
    gather_dtype: str,
    parts: int | None = None,
    sequences: int = 1,
    recompute: bool = False,
) -> Simulation:
    """Divide a model as training does, and take one step of rank 0, without values.

    ``parts`` of the ranks divide one copy of the weights: those of a node, or None for all.

    Tensors have shapes and no memory, and nothing is sent: one CPU does for any model and any
    number of ranks. The loss is the sum of the logits, whose gradient reaches all weights. Softmax
    stands for every choice map, on which no size depends. Score optimisers, which need the scores
    of a real batch, exchange and do not move.
    """
    if model.experts:
        raise ValueError("experts are chosen by values, which a simulation does not have.")
    if model.entmax_alpha_learned:
        raise ValueError("learned exponents of entmax need values, which a simulation has not.")
    alpha = ModelConfig.entmax_alpha
    model = replace(model, choice="softmax", layer_choices=(), entmax_alpha=alpha)
    began = time.perf_counter()
    with simulated_ranks(ranks):
        world, D = World(size=ranks, local_size=parts or ranks), parts or ranks
        shard = Sharding(world, gather_dtype=gather_dtype, position=None, parts=D)
        with tensors_without_values():
            network, meta = Transformer(model), meta_model(model)
            N = sum(p.numel() for p in network.parameters())
            owners = Owners(network, meta, optim, world, steps=1, exact=False, shard=shard)
            local = [p.to_local() for p in network.parameters()]  # type: ignore[attr-defined]
            ids = torch.zeros(sequences, model.context, dtype=torch.int64)
            with recorded_collectives() as calls:
                with torch.autocast("cpu", torch.bfloat16, enabled=gather_dtype == "bfloat16"):
                    loss = network(ids, recompute=recompute).sum()
                loss.backward()
                received = owners.to_owners(owners.local_gradients(), ranks // D)
                if optim.optimiser not in BY_SCORES:
                    owners.optimiser.move({owners.owned[n]: g[0] for n, g in received.items()})
                owners.spread()
    by_name = {
        name: [call for call in calls if call.name == name]
        for name in ("gather", "reduce-scatter", "all-to-all")
    }
    states = [state for member in owners.optimiser.members for state in member.state.values()]
    tensors = [x for state in states for x in state.values() if torch.is_tensor(x) and x.ndim]
    return Simulation(
        N,
        sum(x.numel() for x in local),
        len(by_name["gather"]),
        sum(call.output - call.input for call in by_name["gather"]),
        len(by_name["reduce-scatter"]),
        sum(call.input - call.output for call in by_name["reduce-scatter"]),
        sum(call.output for call in by_name["all-to-all"]),
        sum(x.numel() * x.itemsize for x in tensors),
        time.perf_counter() - began,
    )


def simulated_differs(
    found: Simulation,
    sizes: Sizes,
    optim: OptimConfig,
    *,
    ranks: int,
    gather_dtype: str,
    parts: int | None = None,
) -> str | None:
    """A sentence where the simulation and the formulas disagree; None where they are equal."""
    g, D = 2 if gather_dtype == "bfloat16" else 4, parts or ranks
    blocks, root = _padded(sizes.blocks, D), _padded([sizes.root], D)
    owned = sizes.owned_by_rank(ranks)[0]
    expected = Simulation(
        sizes.total,
        sizes.rows(D),
        2 * sizes.repeats * len(sizes.blocks) + 1,
        (D - 1) * g * (2 * sizes.repeats * blocks + root),
        len(sizes.blocks) + 1,
        (D - 1) * 4 * (blocks + root),
        4 * (ranks // D * owned.numbers + blocks + root),
        0 if optim.optimiser in BY_SCORES else owned.state,
        found.seconds,
    )
    for name, ours, torchs in zip(Simulation._fields, expected, found, strict=True):
        if ours != torchs:
            return f"{name} should be {ours:,} by the formula and is {torchs:,} in torch."
    return None
