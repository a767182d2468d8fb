"""Clocks, memory and the machine: what a benchmark needs around the code that it measures."""

import gc
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from cwlib.cells import release_memory

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs: their median and quartiles."""

    seconds: float
    low: float
    high: float
    repeats: int

    def times(self, factor: float) -> "Timing":
        """The same for ``factor`` times the work."""
        return Timing(self.seconds * factor, self.low * factor, self.high * factor, self.repeats)


def synchronise(device: str) -> None:
    """Wait until a CUDA device has done what it was given; the CPU never lags behind."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    ways: Mapping[str, Callable[[], object]], repeats: int | Mapping[str, int], device: str = "cpu"
) -> dict[str, Timing]:
    """Time several ways in turns, so that whatever else the machine does falls on all alike.

    Parameters
    ----------
    ways : mapping of str to callable
        Each is run once before, which is not counted.
    repeats : int, or mapping of str to int
        Runs that are counted.
    device : str
        Where the work is done.
    """
    counts = {name: repeats if isinstance(repeats, int) else repeats[name] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + max(counts.values())):
        for name, way in ways.items():
            if turn > counts[name]:
                continue
            gc.collect()
            synchronise(device)
            start = time.perf_counter()
            way()
            synchronise(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    quartiles = {name: np.percentile(runs, [50, 25, 75]).tolist() for name, runs in seconds.items()}
    return {name: Timing(*quartiles[name], counts[name]) for name in ways}


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """The most memory that ``work`` took at a time, over what was there before.

    On the CPU the growth of the process's resident set, as Linux counts it; on CUDA that of torch's allocations.

    Raises
    ------
    RuntimeError
        On the CPU of a system that is not Linux.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _STATUS.exists():
        raise RuntimeError(f"peak_bytes: expected Linux, which counts memory in {_STATUS}, got {platform.system()}")
    release_memory()  # what is free, but was used before, would hide what the work takes
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def gemm_rate(device: str = "cpu", size: int = 2048, dtype: torch.dtype = torch.float64) -> float:
    """Floating-point operations per second of a large square matrix product, the best of a few runs."""
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    best = np.inf
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        matrix @ matrix
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def machine(device: str = "cpu") -> dict[str, object]:
    """Processor, memory, threads and versions, as a benchmark's provenance."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, object] = {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(models) or torch.get_num_threads(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    return found
