"""What the numbers of a run depend on besides its settings."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import fenchel


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads, commit and time, as plain values."""
    return {
        "fenchel": fenchel.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def device_name(device: torch.device) -> str:
    """The name a person would buy it under, as far as the machine tells."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The commit of this source tree, or "unknown" when it was installed as a package."""
    root = Path(fenchel.__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"
