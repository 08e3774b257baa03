"""The peak of memory of a piece of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


def reset_peak(device: str) -> bool:
    """Start a new memory peak; False where the system cannot."""
    if device == "cuda":
        torch.cuda.init()  # the reset fails on a context that is not there yet
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_gpu_mb(device: str, run: Callable[[], object]) -> float | None:
    """Peak in MiB of what torch has on the GPU while something runs, beyond what was there before; None on a CPU."""
    if device != "cuda":
        run()
        return None
    reset_peak(device)
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_mb(device: str) -> float | None:
    """Peak memory in MiB of what torch has on the GPU, or of this process; None where the system does not tell."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:")), None)
