"""One training step: batch, loss, gradient, clip, optimiser.

Everything in it is a function of (seed, step): the batch, the learning rate and the dropout
noise. The gradient is that of

    (1 / N) sum over the N targets of the step of  their loss,

summed over micro-batches, and of a penalty where fenchel/train/stability.py or a mixture of experts
adds one; its global norm is clipped to ``clip``. When the loss or the norm is not finite the
optimiser is not called and no weight moves. Layers that follow their weights by power iteration
(``PowerIterated``) do so once per step, before its first forward pass, so that a step of several
micro-batches is that of the whole batch.

``Trainable`` lists what a step needs of a model. Any nn.Module with these members can be trained;
fenchel.model.Transformer is one of them.

``first_broken`` names the source of a nan. A nan spreads: one broken layer makes every later
activation and every gradient nan. Its source is, in this order,

    weights that are not finite;
    else the first module, in the order of the forward pass, whose input or output is not finite
    (an input is computed between modules, for example by attention);
    else the loss, which is computed after the last module;
    else the last parameter in that order whose gradient is not finite, since the backward pass
    reaches it first;
    else the sum of squares under the norm of the gradient.

fenchel/distributed/cells.py takes the same step with several processes.
"""

import hashlib
import inspect
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fenchel.data import Batch, BatchSource
from fenchel.optim import CombinedOptimiser, Schedule, ScoreTrust, clip_
from fenchel.optim.cuda_graph import Capturable, Capture, capture_steps
from fenchel.torch_internals import compile_error
from fenchel.train.config import TrainConfig
from fenchel.train.gradient_graph import GradientGraph
from fenchel.train.loss import (
    count_targets,
    lm_head_loss,
    lower_targets,
    named_loss,
    sparse_embedding_gradient,
    total_loss,
)
from fenchel.train.loss_scale import LossScaler
from fenchel.train.stability import Stability

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Penalty = Callable[[], Tensor | float] | None
"""What is added to the loss of a part, computed after it; None for nothing."""
Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called in every layer with its number and its q (B, H, T, D), k and v (B, G, S, D)."""


@runtime_checkable
class Trainable(Protocol):
    """What training needs of a model, which is also an nn.Module.

    The logits of a position are ``logits(hidden)``. Where that is the product with one matrix
    (``lm_head_is_linear``), the loss computes it in parts (fenchel/train/loss.py).
    """

    def forward(
        self,
        ids_BT: Tensor,
        *,
        return_hidden: bool,
        observe: Observer | None = None,
        segments_BT: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Token ids to the input of the LM head: (B, T) -> (B, T, M); training calls it so.

        ``observe`` is passed only with the settings qk_clip and entropy_floor, ``segments_BT`` only
        for rows of several packed documents, and ``recompute`` only with train.recompute, where the
        backward pass computes the blocks again (activation checkpointing).
        """

    def logits(self, x_BTM: Tensor) -> Tensor:
        """The logits of that input: (B, T, M) -> (B, T, V)."""

    @property
    def lm_head_weight(self) -> Tensor:
        """The matrix of the LM head, (V, M)."""

    @property
    def lm_head_is_linear(self) -> bool:
        """Whether the logits are ``x @ lm_head_weight.T``, without a bias or a soft cap."""

    @property
    def tied_embedding(self) -> nn.Embedding | None:
        """The token embedding if ``lm_head_weight`` is its weight, else None."""

    def balance(self) -> Tensor | None:
        """The load-balancing loss of the last forward pass; None without experts."""


@runtime_checkable
class PowerIterated(Protocol):
    """A layer with singular vectors that follow its weight (fenchel/model/sigma_linear.py)."""

    iterations: int
    """Power iterations of a training pass."""

    def power_iterate(self, iterations: int) -> None:
        """Move the vectors towards the top singular vectors of the weight."""


class StepResult(NamedTuple):
    """The outcome of one step."""

    batch: Batch
    loss: float
    gradient_norm: float
    learning_rate: float
    broken: str | None
    """What was not finite; None when the weights moved."""
    metrics: Mapping[str, float] = {}
    """Further numbers of the step: entropy penalty, clipped heads, loss scale."""


class Stepper:
    """Takes steps. From one to the next it keeps weights, optimiser state and loss scale."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        optimiser: CombinedOptimiser,
        schedule: Schedule,
        *,
        config: TrainConfig,
        seed: int,
        beta2: Schedule | None = None,
        project: Callable[[], None] | None = None,
    ) -> None:
        """``model`` is Trainable; ``schedule`` and ``beta2`` map a step to a factor and a beta2.

        ``project`` moves the weights back into a set, after every step; train.lipschitz and
        train.spectral_cap need one.
        """
        for name in ("lipschitz", "spectral_cap"):
            if getattr(config, name) is not None and project is None:
                raise ValueError(
                    f"train.{name} is enforced by what a run gives as project "
                    f"(fenchel/pipeline/lipschitz.py); give it, or leave train.{name} out."
                )
        if not isinstance(model, Trainable):
            members = (name for name in vars(Trainable) if not name.startswith("_"))
            lacks = ", ".join(name for name in members if not hasattr(model, name))
            raise TypeError(
                f"{type(model).__name__} cannot be trained: it lacks {lacks} "
                "(fenchel.train.Trainable lists what a model needs)."
            )
        self.model, self.batches = model, batches
        self.optimiser, self.schedule, self.beta2 = optimiser, schedule, beta2
        self.config, self.seed, self.project = config, seed, project
        self.device = next(model.parameters()).device
        self.autocast = autocast(config.precision, self.device)
        self.loss_map = named_loss(config.loss, alpha=config.loss_alpha)
        half = config.precision == "float16"
        self.scaling = LossScaler(self.device, model.parameters()) if half else None
        observed = config.qk_clip is not None or config.entropy_floor > 0.0
        self.stability = Stability(model, config) if observed else None
        self.power_iterated = [m for m in model.modules() if isinstance(m, PowerIterated)]
        self.forward: Callable[..., Tensor] = compiled(model) if config.compile else model
        self.graph: GradientGraph | None = None
        """Takes the passes of a step of one micro-batch."""
        if config.cuda_graph and self.device.type == "cuda":
            self.capture()
        self._ahead: tuple[int, Batch] | None = None
        self._arguments: dict[str, Any] = {}
        """Further arguments of the forward pass."""
        if self.stability is not None:
            self._arguments["observe"] = self.stability.observe
        if config.recompute != "none":
            if "recompute" not in inspect.signature(model.forward).parameters:
                raise TypeError(
                    f"{type(model).__name__} cannot be trained with "
                    f"train.recompute={config.recompute!r}: its forward takes no recompute."
                )
            self._arguments["recompute"] = True
        for group in optimiser.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def capture(self, capture: Capture | None = None) -> None:
        """Take passes and steps of the optimiser as CUDA graphs from now on, where they can be."""
        capture_steps(self.optimiser.members, capture)
        if self.why_not_captured() is None:
            observers = [m for m in self.optimiser.members if isinstance(m, Capturable)]
            self.graph = GradientGraph(self.model.parameters(), observers, capture)

    def why_not_captured(self) -> str | None:
        """The first reason why the passes of a step cannot be captured, or None."""
        config = self.config
        reasons = {
            "a step has several micro-batches": (config.accumulate or 1) > 1,
            "the loss is scaled by what was finite": self.scaling is not None,
            "its queries and keys are observed": self.stability is not None,
            "its layers follow singular vectors": bool(self.power_iterated),
            "its backward pass computes blocks again": config.recompute != "none",
            "ScoreTrust samples it": any(isinstance(m, ScoreTrust) for m in self.optimiser.members),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def __call__(self, step: int) -> StepResult:
        """Take step number ``step``, counted from 0."""
        batch = self._batch(step)
        self._set_rates(step)
        self.model.train()
        with (
            deterministic(self.device, enabled=self.config.deterministic),
            one_power_iteration(self.power_iterated),
        ):
            mean = self._gradient(batch, step)
        if self.device.type == "cuda":  # it computes meanwhile; the host waits for the norm alone
            self._ahead = step + 1, self.batches.at(step + 1).pinned()
        norm, broken = clip_(self.model.parameters(), self.config.clip), None
        loss = float(mean)
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimiser.step()
            if self.stability is not None:
                self.stability.clip_scores()
            if self.project is not None:
                self.project()
        else:
            broken = first_broken(self.model, lambda: deque(self._hidden(batch, step), 0), loss)
        self.optimiser.zero_grad()
        rate = self.optimiser.param_groups[-1]["lr"]
        return StepResult(batch, loss, norm, rate, broken, self._metrics())

    def _batch(self, step: int) -> Batch:
        """The batch of a step, which may have been read while the step before was computed."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == step else self.batches.at(step)

    def _set_rates(self, step: int) -> None:
        factor = self.schedule(step)
        for group in self.optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
            if self.beta2 is not None and "betas" in group:
                group["betas"] = (group["betas"][0], self.beta2(step))

    def _gradient(self, batch: Batch, step: int) -> Tensor | float:
        """Accumulate the gradient of a step; return the mean loss."""
        if self.scaling is None:
            return self._accumulate(batch, step)
        return self.scaling.gradient(lambda: float(self._accumulate(batch, step)))

    def _accumulate(self, batch: Batch, step: int) -> Tensor:
        parts = self._parts(batch)
        counts = [count_targets(part.targets) for part in parts]
        count, losses = max(1, sum(counts)), []
        if self.stability is not None:
            self.stability.reset()
        for number, (part, own) in enumerate(zip(parts, counts, strict=True)):
            part = part.to(self.device)
            if self.graph is not None:
                losses.append(self._replayed_part(self.graph, part, step, own))
                continue
            hidden = self._hidden_of_part(part, step, number)
            stability = self.stability
            penalty = None if stability is None else partial(stability.penalty, own / count)
            losses.append(self._backward_of_part(hidden, part.targets, own, count, penalty))
        return torch.stack(losses).sum() / count

    def _replayed_part(self, graph: GradientGraph, part: Batch, step: int, own: int) -> Tensor:
        """The gradient of a step of one micro-batch; the sum of its losses."""

        def run(batch: Batch) -> Tensor:
            return self._backward_of_part(
                self._forward(batch), batch.targets, own, max(1, own), None
            )

        with self._noise(step, 0):
            return graph(run, part, own)

    def _backward_of_part(
        self, hidden: Tensor, targets: Tensor, own: int, count: int, penalty: Penalty
    ) -> Tensor:
        """The backward pass of a part with ``own`` of ``count`` targets; the sum of its losses."""
        with self.autocast():
            loss = self._loss(hidden, targets)
        whole = loss / count
        if (balance := self.model.balance()) is not None:
            whole = whole + self.config.balance_weight * balance * (own / count)
        if penalty is not None:
            whole = whole + penalty()
        if self.scaling is None:
            whole.backward()  # type: ignore[no-untyped-call]
        else:
            self.scaling.backward(whole)
        return loss.detach()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets, in parts where the LM head is one matrix."""
        model, smoothing, choice = self.model, self.config.smoothing, self.loss_map
        if radius := self.config.certify_margin:
            assert self.config.lipschitz is not None  # TrainConfig requires it
            logits = lower_targets(
                model.logits(hidden), targets, 2.0 * self.config.lipschitz * radius
            )
            return total_loss(logits, targets, smoothing=smoothing, choice=choice)
        if model.lm_head_is_linear:
            weight = model.lm_head_weight
            return lm_head_loss(hidden, weight, targets, smoothing=smoothing, choice=choice)
        return total_loss(model.logits(hidden), targets, smoothing=smoothing, choice=choice)

    def _metrics(self) -> dict[str, float]:
        metrics = self.stability.metrics() if self.stability is not None else {}
        if self.scaling is not None:
            metrics["loss_scale"] = self.scaling.scale.factor
        return metrics

    def _parts(self, batch: Batch) -> list[Batch]:
        """The micro-batches of a step."""
        count = self.config.accumulate or 1
        rows = len(batch.inputs) // count
        return [batch.rows(part * rows, (part + 1) * rows) for part in range(count)]

    def _hidden(self, batch: Batch, step: int) -> Iterator[Tensor]:
        """The input of the LM head of each micro-batch, each with its own dropout noise."""
        for number, part in enumerate(self._parts(batch)):
            yield self._hidden_of_part(part.to(self.device), step, number)

    def _hidden_of_part(self, batch: Batch, step: int, part: int) -> Tensor:
        """The input of the LM head of micro-batch number ``part`` of a step."""
        if self.stability is not None:
            self.stability.begin_pass(batch)
        with self._noise(step, part):
            return self._forward(batch)

    @contextmanager
    def _noise(self, step: int, part: int) -> Iterator[None]:
        """Context manager: the random numbers of micro-batch number ``part`` of a step."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(mix(self.seed, step, part))
            yield

    def _forward(self, batch: Batch) -> Tensor:
        dense = self.config.compile or self.graph is not None
        embedding = None if dense else self.model.tied_embedding
        packed = {} if batch.segments is None else {"segments_BT": batch.segments}
        with self.autocast(), sparse_embedding_gradient(embedding):
            return self.forward(batch.inputs, return_hidden=True, **self._arguments, **packed)


def first_broken(model: nn.Module, forward: Callable[[], object], loss: Tensor | float) -> str:
    """Name the source of a nan or inf; ``forward`` repeats the forward pass of the step."""
    parameters = list(model.named_parameters())
    for name, p in parameters:
        if not p.isfinite().all():
            return f"the weights {name} are not finite"
    if place := first_place(model, forward):
        return f"the {place} is the first that is not finite"
    if not torch.as_tensor(loss).isfinite():
        return "the loss is the first that is not finite"
    for name, p in reversed(parameters):
        if p.grad is not None and not p.grad.isfinite().all():
            return f"the gradient of {name} is the first that is not finite"
    return "the gradient is finite and too large for its norm to be"


def first_place(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """The first input or output of a module, in the order of ``forward``, that is not finite."""
    places: list[str] = []

    def before(name: str) -> Callable[[nn.Module, Any], None]:
        def check(_module: nn.Module, given: Any) -> None:
            if not places and not _finite(given):
                places.append(f"input of {name}")

        return check

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def check(_module: nn.Module, _given: Any, output: Any) -> None:
            if not places and not _finite(output):
                places.append(f"output of {name}" if name else "output of the model")

        return check

    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):  # the inputs of a container are those of its parts
            handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(after(name)))
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return places[0] if places else None


def _finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_finite(item) for item in value)
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


@contextmanager
def one_power_iteration(layers: Sequence[PowerIterated]) -> Iterator[None]:
    """Context manager: one power iteration per layer at the start, none in the passes inside."""
    before = [layer.iterations for layer in layers]
    for layer in layers:
        layer.power_iterate(1)
        layer.iterations = 0
    try:
        yield
    finally:
        for layer, iterations in zip(layers, before, strict=True):
            layer.iterations = iterations


@contextmanager
def deterministic(device: torch.device, *, enabled: bool) -> Iterator[None]:
    """Use only GPU kernels that add in a fixed order, so that a run repeats bit for bit.

    On a CPU with a fixed number of threads torch always does. On a GPU some kernels do not, among
    them the backward pass of fused attention: two runs of the same settings then differ in the
    last digits, and soon in all of them. An operation without such a kernel raises ValueError. A
    fixed order costs some time (docs/log.md); ``enabled=False`` declines it. torch would also fill
    all memory that it allocates, for code that reads what was not written.
    """
    if device.type != "cuda" or not enabled:
        yield
        return
    # cuBLAS reads this when it first allocates its workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{reason}; allow others with train.deterministic=false.") from error
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """The forward pass by torch.compile, block by block; its errors become one sentence.

    Blocks of one kind share a graph, which takes 3 to 8 s; all of GPT-2 as one takes 17 and is no
    faster. FSDP2 gathers weights between the blocks, in code that is not compiled. Only these
    passes are compiled, not those that evaluate the model or observe its attention. What is
    compiled of a block is its method ``branches``, which ``forward`` calls, once or, with
    ``recompute``, again in the backward pass: the same graph twice. A model without such blocks is
    compiled whole.
    """
    within = getattr(model, "blocks", None)
    parts: list[Any] = list(within.children()) if isinstance(within, nn.Module) else []
    blocks = [block for block in parts if hasattr(block, "branches")]
    forwards = [torch.compile(block.branches) for block in blocks]
    whole: Callable[..., Tensor] = model if blocks else torch.compile(model)
    # Blocks with different settings or hooks have different graphs; beyond 8 of them torch
    # would silently go on without compiling.
    graphs = {"recompile_limit": 8 + 4 * len(blocks), "accumulated_recompile_limit": 2**16}

    def call(*args: Any, **keywords: Any) -> Tensor:
        for block, forward in zip(blocks, forwards, strict=True):
            block.branches = forward
        try:
            with _compile_errors(), torch.compiler.config.patch(graphs):  # type: ignore[attr-defined]
                hidden: Tensor = whole(*args, **keywords)
        finally:
            for block in blocks:
                del block.branches
        return hidden

    return call


@contextmanager
def _compile_errors() -> Iterator[None]:
    """Turn an error of torch.compile into one sentence."""
    try:
        yield
    except compile_error() as error:
        reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
        raise ValueError(
            f"the forward pass cannot be compiled here ({reason}); set train.compile=false."
        ) from error


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """The autocast context of a precision; "auto" is bfloat16 where the hardware has it."""
    if precision == "auto":
        fast = (
            torch.cuda.is_bf16_supported()
            if device.type == "cuda"
            else device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False)
        )
        precision = "bfloat16" if fast else "float32"
    if precision in HALF:
        return lambda: torch.autocast(device.type, dtype=HALF[precision])
    return nullcontext


def mix(*numbers: int) -> int:
    """One seed from several numbers, by a hash."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
