"""Kernels compiled for a Hopper GPU (sm_90) on a machine without one: what the compiler says.

``compiled(code)`` runs Python code in a process in which Triton compiles instead of interpreting.
The code calls functions that launch kernels, with tensors of device "meta"; every launch is
compiled for its arguments and not run. No driver and no GPU is needed: Triton has an assembler.

    (report,) = compiled("f(torch.empty(128, 64, dtype=torch.bfloat16, device='meta'))")
    assert report["wgmma"] and not report["spilled"]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use."""


def compiled(code: str) -> list[dict[str, Any]]:
    """One report per launch: kernel, registers, spilled bytes, shared bytes, wgmma, cp_async."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, __file__], input=code, capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    reports: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return reports


def _main() -> None:
    import torch
    from triton.runtime.jit import JITFunction

    reports = []

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        reports.append(_compile(self, args, kwargs))

    JITFunction.run = compile_launch
    exec(sys.stdin.read(), {"torch": torch})
    print(json.dumps(reports))


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {
        name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs
    }
    options |= {name: kwargs.pop(name) for name in ("launch_pdl",) if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64"}
    names |= {"int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1"}
    signature, constants, attrs = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specialised = type(value) is int and not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + names[str(value.dtype).removeprefix("torch.")]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and specialised):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(kernel, signature, constants, attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = binary.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    return {
        "kernel": kernel.__name__,
        "registers": registers,
        "spilled": stack,
        "shared": binary.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "cp_async": ptx.count("cp.async."),
    }


if __name__ == "__main__":
    _main()
