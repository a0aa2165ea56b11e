"""The gradient of a step as a CUDA graph.

A forward and a backward pass of a small model are a thousand kernels, and launching them takes
longer than running them: 45 ms of the host for 14 ms of an H200 at 25M parameters and 16,384
tokens. A CUDA graph launches all of them at once, with the memory that they read and write; the
optimiser's step is another one (fenchel/optim/cuda_graph.py).

**What is captured** is a function of a batch that leaves a gradient in every parameter and returns
the loss. A replay copies its batch to where the captured one was, runs the kernels, and leaves
their results in the parameters again. Random numbers are those of the seed that the generator has
at the replay, as they are without a graph. What the pass records on the host, for the samples of an
optimiser, is restored (``Capturable.replayed``). The kernels are the same ones in the same order,
so gradients have the same bits.

**When.** A pass is captured when the one before it was like it: the same shapes and number of
targets, the same parameters at the same addresses, the same rules of arithmetic. The passes before
have compiled and loaded every kernel. Where one of these changes, the graph is dropped and the pass
is run until two are alike again. ``reason`` says why there is no graph.

**Memory.** What a graph reads must stay where it is: masks, tables of angles and other tensors that
were made before, wherever they are kept, are referred to by the graph as well. Activations have
memory of their own, which an evaluation between two steps cannot use.
"""

import gc
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn

from fenchel.data import Batch
from fenchel.optim.cuda_graph import Capturable, Capture, capture_graph

Pass = Callable[[Batch], Tensor]
"""Leaves gradients in the parameters, which have none, and returns the loss."""


class GradientGraph:
    """Takes the passes of one model, as a CUDA graph where that is possible."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        observers: Iterable[Capturable] = (),
        capture: Capture | None = None,
    ) -> None:
        """``observers`` are the optimisers that sample the pass."""
        self.parameters, self.observers = list(parameters), list(observers)
        self.capture = capture or capture_graph
        self.reason: str | None = "no two passes were alike yet"
        """Why the last pass was no graph; None where it was one."""
        self._key: Hashable = None
        self._graph: _Graph | None = None
        self._failed = False

    def __call__(self, run: Pass, batch: Batch, kind: Hashable) -> Tensor:
        """Run a pass on a batch; ``kind`` is what else passes must share to be alike."""
        if self._failed:
            return run(batch)
        key = kind, *self._alike(batch)
        if key != self._key:
            self.reason, self._key, self._graph = "no two passes were alike yet", key, None
            return run(batch)
        if self._graph is None:
            try:
                self._graph = _Graph(run, batch, self)
            except RuntimeError as error:  # the pass waits for the device, or memory is short
                self.reason, self._failed = str(error).strip().partition("\n")[0], True
                self._clear()
                return run(batch)
        self.reason = None
        return self._graph.replay(batch)

    def _alike(self, batch: Batch) -> tuple[Hashable, ...]:
        return (
            *((x.shape, x.dtype) for x in batch if x is not None),
            tuple((p.data_ptr(), p.requires_grad) for p in self.parameters),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None


class _Graph:
    """A captured pass, and the memory of its batch, its loss and its gradients."""

    def __init__(self, run: Pass, batch: Batch, owner: GradientGraph) -> None:
        device = batch.inputs.device
        self._held = _tensors_on(device)
        self.batch = Batch(*(None if x is None else x.clone() for x in batch))  # type: ignore[arg-type]
        results: list[Tensor] = []
        self._replay = owner.capture(lambda: results.append(run(self.batch)), device)
        (self.loss,) = results
        self.gradients = [(p, p.grad) for p in owner.parameters]
        self.restore = [observer.replayed() for observer in owner.observers]

    def replay(self, batch: Batch) -> Tensor:
        """Run the pass on a batch like the captured one."""
        for to, x in zip(self.batch, batch, strict=True):
            if to is not None and x is not None:
                to.copy_(x, non_blocking=True)
        self._replay()
        for p, gradient in self.gradients:
            p.grad = gradient
        for restore in self.restore:
            restore()
        return self.loss


def _tensors_on(device: torch.device) -> list[Tensor]:
    """All tensors on a device that something refers to, without their derivatives."""
    kinds = (Tensor, nn.Parameter, nn.Buffer)
    found = [x for x in gc.get_objects() if type(x) in kinds and x.layout == torch.strided]
    return [x.detach() for x in found if x.device == device]
