"""The step of an optimiser as a CUDA graph.

A step of Muon or ScoreDescent is some hundred small operations, and launching them takes longer
than running them. A CUDA graph launches all of them at once: the operations of one step, recorded
with the memory that they read and write, and replayed in it.

**Two parts.** Such an optimiser divides its step. ``PreparedStep`` is what the host has done: which
parameters move, the samples, the rates of this step. Its ``run`` launches the rest, reads no
number of the device, and depends on the step by nothing but its two arguments,

    rates     numbers that change from step to step: floats, or scalars in device memory
    inputs    tensors that are at another place in every step: gradients, samples

``run_step`` runs it as it is. ``StepGraph`` captures it, with rates and inputs in memory of its
own, and from then on copies both there and replays. The operations are the same ones, in the same
order, so the weights have the same bits.

**When.** A step is captured when the one before it was like it: the same parameters, state,
settings, shapes and rules of arithmetic. The steps before have created the state and loaded every
kernel. Where one of these changes (``load_state_dict``, another batch), the graph is dropped, and
steps are run until two are alike again. ``reason`` says why there is no graph.

AdamW and the other rules of torch are not captured: their fused kernels are one launch or two.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fenchel.torch_internals import foreach_copy_

Rate = float | Tensor
"""A number that changes from step to step; on a GPU a scalar in float64."""
LARGEST = 2**28
"""Numbers in all gradients beyond which kernels take longer than their launches."""
FULL = 0.9
"""Share of the device memory that training and a graph may take together."""


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A step of an optimiser of which the part of the host is done."""

    run: Callable[[Sequence[Rate], Sequence[Tensor]], None]
    """Launches the step for the rates and the inputs."""
    rates: list[float]
    inputs: list[Tensor]
    memory: list[Tensor] = field(default_factory=list)
    """Parameters and state, which the step reads and writes where they are."""
    settings: Hashable = ()
    """Every other value that ``run`` depends on."""
    refusal: str | None = None
    """Why the step cannot be captured."""


def run_step(step: PreparedStep) -> None:
    """Run a prepared step; its rates are in device memory where that is a GPU's."""
    if any(x.is_cuda for x in step.inputs):
        run_with_scalars(step)
    else:
        step.run(step.rates, step.inputs)


def run_with_scalars(step: PreparedStep) -> None:
    """Run a prepared step with its rates in device memory, as a graph does."""
    device = step.inputs[0].device if step.inputs else None
    rates = torch.empty(len(step.rates), dtype=torch.float64, device=device)
    _copy_rates(step.rates, rates)
    step.run(rates.unbind(), step.inputs)


Capture = Callable[[Callable[[], None], torch.device], Callable[[], None]]
"""Records the operations of a function, which are not run, and returns what runs them."""


class StepGraph:
    """Runs the steps of one optimiser, as a CUDA graph where that is possible."""

    def __init__(self, capture: "Capture | None" = None) -> None:
        self.capture = capture or capture_graph
        self.reason: str | None = "no two steps were alike yet"
        """Why the last step was no graph; None where it was one."""
        self._key: Hashable = None
        self._graph: _Graph | None = None
        self._failed = False

    def __call__(self, step: PreparedStep) -> None:
        """Take a prepared step."""
        reason = self.reason if self._failed else why_not_captured(step)
        if reason is not None:
            self.reason, self._key, self._graph = reason, None, None
            run_with_scalars(step)
            return
        key = _key(step)
        if key != self._key:
            self.reason, self._key, self._graph = "no two steps were alike yet", key, None
            run_with_scalars(step)
            return
        if self._graph is None:
            try:
                self._graph = _Graph(step, self.capture)
            except RuntimeError as error:  # of the driver, or out of memory
                self.reason, self._failed = str(error).strip().partition("\n")[0], True
                run_with_scalars(step)
                return
        self.reason = None
        self._graph.replay(step)


class _Graph:
    """A captured step and the memory of its rates and inputs."""

    def __init__(self, step: PreparedStep, capture: Capture) -> None:
        device = step.inputs[0].device
        self.inputs = [torch.empty_like(x) for x in step.inputs]
        self.rates = torch.empty(len(step.rates), dtype=torch.float64, device=device)
        self.copies = _by_dtype(self.inputs)
        self._replay = capture(lambda: step.run(self.rates.unbind(), self.inputs), device)

    def replay(self, step: PreparedStep) -> None:
        """Take a step like the captured one."""
        for indices in self.copies:
            foreach_copy_([self.inputs[n] for n in indices], [step.inputs[n] for n in indices])
        _copy_rates(step.rates, self.rates)
        self._replay()


def why_not_captured(step: PreparedStep) -> str | None:
    """The first reason why a step cannot be captured, or None."""
    if step.refusal is not None:
        return step.refusal
    if not step.inputs:
        return "no parameter has a gradient"
    devices = {x.device for x in (*step.inputs, *step.memory)}
    if len(devices) > 1:
        return "its parameters are on several devices"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "several processes take it together"
    if sum(x.numel() for x in step.inputs) > LARGEST:
        return f"it has more than {LARGEST} numbers, whose kernels take longer than their launches"
    return None


def _key(step: PreparedStep) -> Hashable:
    """What equal steps have in common."""
    return (
        step.settings,
        len(step.rates),
        tuple((x.shape, x.stride(), x.dtype) for x in step.inputs),
        tuple((x.data_ptr(), x.shape) for x in step.memory),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the tensors of each dtype, which are copied by one launch."""
    alike: dict[torch.dtype, list[int]] = defaultdict(list)
    for n, x in enumerate(tensors):
        alike[x.dtype].append(n)
    return list(alike.values())


def _copy_rates(rates: Sequence[float], to: Tensor) -> None:
    """Copy rates to the device without waiting for it."""
    on_host = torch.tensor(rates, dtype=torch.float64, pin_memory=to.is_cuda)
    to.copy_(on_host, non_blocking=True)


def capture_graph(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The operations of ``run`` as a CUDA graph; its errors are those of the driver."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
        # other threads, such as the one that writes checkpoints, go on meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        held = torch.cuda.memory_reserved() - before
        room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        if torch.cuda.max_memory_allocated() + held > FULL * room:
            raise RuntimeError(f"a graph would hold {held >> 20} MiB, which training needs")

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


class Capturable(torch.optim.Optimizer):
    """An optimiser that prepares its steps and hands them to its ``runner``."""

    runner: Callable[[PreparedStep], None] = staticmethod(run_step)
    """Takes prepared steps; ``capture_steps`` replaces it."""

    def prepare(self) -> PreparedStep:
        """What the host does for a step of all parameters that have a gradient."""
        raise NotImplementedError

    def replayed(self) -> Callable[[], None]:
        """After a captured pass: a function that restores its record on the host after a replay.

        For an optimiser that samples the pass (fenchel/train/gradient_graph.py).
        """
        return lambda: None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runner(self.prepare())
        return loss


def capture_steps(
    members: Iterable[torch.optim.Optimizer], capture: Capture | None = None
) -> dict[str, StepGraph]:
    """Take the steps of these optimisers as graphs from now on; the graphs by name and number."""
    graphs: dict[str, StepGraph] = {}
    for n, member in enumerate(members):
        if isinstance(member, Capturable):
            member.runner = graphs[f"{n} {type(member).__name__}"] = StepGraph(capture)
    return graphs
