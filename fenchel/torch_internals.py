"""The private names of torch that fenchel uses, and what differs between versions and devices.

torch 2.11 to 2.15 have all of these names, and no other file of the package uses one
(tests/test_torch_internals.py). A name that is missing in another version is an ImportError in one
sentence: when fenchel is imported or, for names of the compiler, which takes a second to load, when
they are used.

torch._foreach_add_, _foreach_copy_, _foreach_lerp, _foreach_lerp_, _foreach_mul_
    One call for all weights of an optimiser, as in torch.optim. There is no public name.
torch._softmax_backward_data
    The derivative of softmax from its result, p (g - sum of p g), in one pass; public operations
    take three. Arguments: the gradient, the result, the axis, the dtype of the input.
torch.ops.mkldnn._reorder_linear_weight, _linear_pointwise, _is_mkldnn_bf16_supported
    Products with a matrix in the layout that oneDNN prefers, and what is done with each result
    while it is in a register, as compiled models use. ``torch.utils.mkldnn`` converts inputs and
    results too. Absent without oneDNN.
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, _scaled_dot_product_flash_attention
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
torch.ops.aten._scaled_dot_product_flash_attention_backward
torch.ops.aten._scaled_dot_product_cudnn_attention, _scaled_dot_product_cudnn_attention_backward
torch._fused_sdp_choice
    torch's fused attention with the logarithm of the normaliser of every row, and its derivative.
    The public ``scaled_dot_product_attention`` keeps the normaliser to itself, and does not
    tell which kernel it takes.
torch.autograd.forward_ad._current_level
    Whether dual numbers are in use, so that a back end without forward derivatives is left out.
    The public ``unpack_dual`` answers for one tensor only.
torch._C._functorch.peek_interpreter_stack, get_interpreter_stack, TransformType
    Whether a call is inside a transform of torch.func, and in how many reverse and forward ones.
    There is no public name.
torch._C._functorch.is_functorch_wrapped_tensor
    Whether a tensor is a placeholder of torch.func, on whose numbers Python cannot branch. There is
    no public name.
torch.nn.Module._forward_hooks, _forward_pre_hooks
torch.nn.modules.module._global_forward_hooks, _global_forward_pre_hooks
    Whether a module may be bypassed while decoding: its own hooks, and those of all modules. Hooks
    can be added and removed by public names, not listed.
torch._C.DisableTorchFunctionSubclass
    Functions of a tensor of a subclass as if it were plain, for its shape and dtype. There is no
    public name.
torch._C._nn
    Where functions such as gelu come from, whatever torch.nn.functional has been patched with.
torch._C._current_graph_task_id
    Whether a backward pass is under way, in which a forward pass is a recomputation of one that
    hooks have seen. There is no public name.
torch._dynamo.config.skip_nnmodule_hook_guards
    Modules are compiled again when hooks are added. ``torch.compiler.config`` does not have it.
_dynamo_marked_constant, on a function
    Its result is a constant of the compiled graph; a torch that ignored it would be slower, not
    wrong. The public ``torch.compiler.assume_constant_result`` sets it, and loads the compiler.
torch._dynamo.exc.TorchDynamoException
    The errors of torch.compile, those of its back ends included. There is no public name.
torch._dynamo.exc.ObservedException, TorchRuntimeError
    What the compiled function itself raises while it is traced. There are no public names.
torch._inductor.exc.CppCompileError, InvalidCxxCompiler
    A C++ compiler that fails or is missing. There are no public names.
torch.testing._internal.distributed.fake_pg.FakeStore, torch._subclasses.fake_tensor.FakeTensorMode
torch.utils._python_dispatch.TorchDispatchMode
    A process group that sends nothing, tensors without memory, and a record of the collectives: a
    model divided among any number of ranks is tried in one process. There are no public names.
torch._subclasses.fake_tensor.FakeTensor
    Whether a tensor is one of those without memory, so that no solver reads its numbers.

What differs between versions, and what fenchel does about it:

- FlexAttention on a CPU (2.11, 2.12) refuses queries, keys and values that are one tensor:
  attention/flex.py passes views.
- torch.compile with ``fullgraph=True`` (2.11) takes no objects as defaults in a dataclass and no
  slices as defaults of a function, no ``vars`` of a frozen dataclass, and ``**`` only of a dict:
  what a model runs has none of these.
- torch.compile with ``fullgraph=True`` (2.14, 2.15) refuses inputs that carry tangents. Without it
  such a call runs uncompiled, with the right tangent.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

VERSIONS = ">=2.11,<2.16"
"""The versions of torch that the tests run on; the range of pyproject.toml."""

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    foreach_add_ = torch._foreach_add_
    foreach_copy_ = torch._foreach_copy_
    foreach_lerp = torch._foreach_lerp
    foreach_lerp_ = torch._foreach_lerp_
    foreach_mul_ = torch._foreach_mul_
    _softmax_backward = torch._softmax_backward_data
    is_func_placeholder: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    _innermost_transform = torch._C._functorch.peek_interpreter_stack
    _all_transforms = torch._C._functorch.get_interpreter_stack
    _REVERSE = torch._C._functorch.TransformType.Grad
    _FORWARD = torch._C._functorch.TransformType.Jvp
    _flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    _flash_gpu = torch.ops.aten._scaled_dot_product_flash_attention
    _flash_gpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    _cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    _cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    _fused_choice = torch._fused_sdp_choice
    without_subclasses = torch._C.DisableTorchFunctionSubclass
    _backward_pass = torch._C._current_graph_task_id
    nn_functions = torch._C._nn
    _ = forward_ad._current_level, nn.Module()._forward_hooks, nn.Module()._forward_pre_hooks
    _of_all_modules = module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks
except AttributeError as error:
    raise ImportError(
        f"fenchel needs torch{VERSIONS}, got torch {torch.__version__}: {error}."
    ) from error

_CUDNN = 3
"""What torch._fused_sdp_choice returns for cuDNN's kernel, SDPBackend.CUDNN_ATTENTION."""
F = TypeVar("F", bound=Callable[..., object])


def has_no_values(t: Tensor) -> bool:
    """Whether t is a shape alone: on the device "meta", or of FakeTensorMode."""
    return t.is_meta or isinstance(t, FakeTensor)


def autocast_enabled(device: str) -> bool:
    """Whether torch.autocast is on for a type of device; "meta" has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def off_mps(x: Tensor) -> Tensor:
    """``x`` on its device or, from MPS, which has no float64, on the CPU.

    >>> off_mps(torch.ones(2)).device
    device(type='cpu')
    """
    return x.cpu() if x.device.type == "mps" else x


def to_float64(x: Tensor) -> Tensor:
    """``x`` in float64, on its device or, where that has no float64 (MPS), on the CPU.

    >>> to_float64(torch.ones(2)).dtype
    torch.float64
    """
    return off_mps(x).double()


def softmax_backward(g: Tensor, p: Tensor) -> Tensor:
    """The gradient of the input of p = softmax over the last axis, from that of p.

    >>> p = torch.tensor([0.25, 0.75])
    >>> softmax_backward(torch.tensor([1.0, 0.0]), p)
    tensor([ 0.1875, -0.1875])
    """
    return _softmax_backward(g, p, -1, p.dtype)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float
) -> tuple[Any, ...]:
    """(o, lse, ...): outputs, log sum exp of every row (B, H, T), and what the derivative needs.

    On a GPU by the kernel that ``scaled_dot_product_attention`` takes, cuDNN's or FLASH. A ``mask``
    is added to the scores, on a CPU only; a row that it closes has lse = 0. Heads are grouped by
    the shapes.
    """
    found: tuple[Any, ...]
    if not q.is_cuda:
        found = _flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return found
    if not torch.compiler.is_compiling():  # which cannot trace the choice
        grouped = k.shape[1] != q.shape[1]
        kind = _fused_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
        if kind == _CUDNN:
            o, lse, *rest = _cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)[:8]
            return o, lse.squeeze(-1), _CUDNN, *rest
    o, lse, *rest = _flash_gpu(q, k, v, 0.0, causal, False, scale=scale)[:8]
    return o, lse, None, *rest


def fused_attention_backward(
    go: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    found: tuple[Any, ...],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of <go, o> in q, k and v, where ``found`` is what ``fused_attention`` gave."""
    gradients: tuple[Tensor, Tensor, Tensor]
    if not go.is_cuda:
        gradients = _flash_cpu_backward(go, *qkv, *found, 0.0, causal, attn_mask=mask, scale=scale)
        return gradients
    o, lse, kind, *sizes, seed, offset = found
    if kind == _CUDNN:
        lse = lse.unsqueeze(-1)
        gradients = _cudnn_backward(
            go, *qkv, o, lse, seed, offset, None, *sizes, 0.0, causal, scale=scale
        )
    else:
        gradients = _flash_gpu_backward(
            go, *qkv, o, lse, *sizes, 0.0, causal, seed, offset, scale=scale
        )
    return gradients


def packs_linear_weights(dtype: torch.dtype) -> bool:
    """Whether ``packed_linear_weight`` takes matrices of this dtype here."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    bfloat16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or bool(bfloat16)


def packed_linear_weight(W_NK: Tensor, rows: int) -> Tensor:
    """A copy of a matrix in the layout of oneDNN for products of about ``rows`` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(W_NK, rows)
    return packed


def packed_linear(
    x_BK: Tensor, packed: Tensor, bias_N: Tensor | None, activation: tuple[str, str] = ("none", "")
) -> Tensor:
    """f(x W^T + b) by a packed W; f is named as oneDNN does, with its algorithm."""
    name, algorithm = activation
    product = torch.ops.mkldnn._linear_pointwise.default  # named, or each call looks for it
    y_BN: Tensor = product(x_BK, packed, bias_N, name, [], algorithm)
    return y_BN


def packed_linear_with(
    x_BK: Tensor, packed: Tensor, bias_N: Tensor | None, other_BN: Tensor, operation: str
) -> Tensor:
    """x W^T + b by a packed W, and the "add" or "mul" of another tensor to it."""
    y_BN: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        x_BK, other_BN, packed, bias_N, operation
    )
    return y_BN


def carries_tangents() -> bool:
    """Whether forward-mode derivatives are in use."""
    return forward_ad._current_level >= 0


def in_func_transform() -> bool:
    """Whether a transform of torch.func is active; not for a function that is compiled."""
    return _innermost_transform() is not None


def reverse_transforms() -> int:
    """How many reverse derivatives torch.func takes of the function that is running."""
    return [transform.key() for transform in _all_transforms() or ()].count(_REVERSE)


def forward_transforms() -> int:
    """How many forward derivatives torch.func takes of the function that is running."""
    return [transform.key() for transform in _all_transforms() or ()].count(_FORWARD)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module, its own or those of all modules."""
    return any((module._forward_hooks, module._forward_pre_hooks, *_of_all_modules))


def in_backward_pass() -> bool:
    """Whether a backward pass is under way in this thread.

    >>> in_backward_pass()
    False
    """
    return _backward_pass() != -1


def guard_on_hooks() -> None:
    """Compile modules again when hooks are added, which torch.compile does not by default."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch.compiler.reset()


def constant_when_compiled(function: F) -> F:
    """The function with a result that torch.compile takes as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_error() -> type[Exception]:
    """The class of the errors of torch.compile; loads the compiler."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


_TRITON_COMPILER = ("triton.compiler.", "triton.runtime.build", "triton.backends.nvidia.compiler")


def is_compiler_failure(error: Exception) -> bool:
    """Whether torch.compile or Triton made no kernel; loads the compiler.

    False for what the compiled function itself raises, also while it is traced.
    """
    from torch._dynamo.exc import ObservedException, TorchRuntimeError
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ObservedException, TorchRuntimeError)):
            return False
        cause = cause.__cause__
    if isinstance(error, (compile_error(), CppCompileError, InvalidCxxCompiler)):
        return True
    # Triton raises errors of many classes, RuntimeError and those of subprocess among them.
    frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith(_TRITON_COMPILER) for name in frames)


@contextmanager
def simulated_ranks(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` in which this process is rank 0 and nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process belongs to a group already; simulate ranks in another one.")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def tensors_without_values() -> AbstractContextManager[object]:
    """Context manager: tensors have shape, dtype and device, and neither values nor memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Collective(NamedTuple):
    """One collective call."""

    name: str
    """"gather", "reduce-scatter", "all-to-all", or torch's name for any other."""
    output: int
    """Bytes of the tensor that is written."""
    input: int
    """Bytes of the tensor that is sent."""


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Context manager: a list of the collectives that are called inside, in order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {
        "_allgather_base_": "gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "alltoall_base_": "all-to-all",
    }
    calls: list[Collective] = []

    class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                name = func.__name__.partition(".")[0]
                sizes = [x.numel() * x.itemsize for x in args if isinstance(x, Tensor)]
                output, sent = (*sizes, 0, 0)[:2]
                calls.append(Collective(names.get(name, name), output, sent))
            return func(*args, **(kwargs or {}))

    with Record():  # type: ignore[no-untyped-call]
        yield calls
