"""Devices by name, and the operations that differ between kinds of device."""

import gc
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from stepgauge.spec.units import GIB

CONTROL_GROUP = Path("/sys/fs/cgroup")


def resolve(name: str) -> torch.device:
    """Returns the torch device of a name; "auto" prefers an accelerator. Raises ValueError if the
    machine does not have it.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; choose cpu, cuda, cuda:N, mps or auto") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device is {name!r}; choose cpu, cuda, cuda:N, mps or auto")
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= count[device.type]:
        raise ValueError(
            f"device {name!r} is not available: this machine has {count[device.type]} {device.type} "
            "devices"
        )
    return device


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work. On a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_unused_memory(device: torch.device) -> None:
    """Collects garbage and frees cached memory. Modules, hooks and wrappers refer to each other, so
    without a collection the next row would start with the tensors of the last.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    free_unused_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Returns `peak_bytes`, the most that tensors held since the reset (CUDA), or
    `resident_peak_bytes` of the process (CPU). Returns nothing on other devices.
    """
    if device.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(device)}
    return {"resident_peak_bytes": peak_host_memory()} if device.type == "cpu" else {}


def peak_host_memory() -> int:
    """Returns the largest resident set of the process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def allocated_memory(device: torch.device) -> int | None:
    """Returns the bytes that tensors hold now (CUDA), or None on other devices."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def kept_by_graphs(device: torch.device) -> int:
    """Returns the bytes that CUDA graphs reserve for the tensors inside their replays. torch counts
    only the graphs' tensors that exist between replays.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def available_host_bytes() -> int | None:
    """Returns the memory that the machine and the control group leave to this process, or None if it
    is unknown.
    """
    limits = []
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            limits += [
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
            ]
        limits += _left_by_group(CONTROL_GROUP)
    except OSError:
        pass
    return min(limits, default=None)


def _left_by_group(folder: Path) -> list[int]:
    """Returns the bytes that the control group leaves, if it has a limit. Files that it has read count as
    used, but the kernel drops them before memory runs out.

    Raises OSError if there is no control group.
    """
    limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
    if limit == "max":
        return []
    used = int((folder / "memory.current").read_text(encoding="utf-8"))
    lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    statistics = {name: int(value) for name, value in map(str.split, lines)}
    cached = sum(statistics.get(name, 0) for name in ("active_file", "inactive_file"))
    return [int(limit) - max(0, used - cached)]


def limit_host_memory() -> None:
    """Limits this process to the free memory, so that a larger allocation raises an error and the
    kernel does not kill a process.
    """
    free = available_host_bytes()
    if free is None:
        return
    with open("/proc/self/statm", encoding="utf-8") as sizes:
        data = int(sizes.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(0.95 * free), hard))


def require_host_memory(
    least_bytes: int, *, advise: Callable[[int], str] = lambda free_bytes: ""
) -> None:
    """Raises MemoryError if fewer bytes are free. Without the check, the process might page for hours.

    advise  returns, for the free bytes, what the message says on how to need less
    """
    free = available_host_bytes()
    if free is None or least_bytes <= free:
        return
    needs = f"needs at least {least_bytes / GIB:.1f} GiB of memory, {free / GIB:.1f} GiB are free"
    raise MemoryError("; ".join(filter(None, (needs, advise(free)))))


# Messages of libraries whose out-of-memory errors are not torch.OutOfMemoryError.
_MEMORY_PHRASES = (
    "out of memory",  # CUDA's own error, Triton's, MPS's
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # torch's CPU allocator
    "std::bad_alloc",
)


def out_of_memory_reason(error: BaseException | None) -> str | None:
    """Returns a sentence if the error or its cause is an out-of-memory error, or else None."""
    while error is not None:
        message = str(error)
        if isinstance(error, MemoryError):
            return message or "the host's memory ran out"
        if isinstance(error, RuntimeError) and any(phrase in message for phrase in _MEMORY_PHRASES):
            return f"memory ran out{_requested(message)}"
        error = error.__cause__ or error.__context__
    return None


def _requested(message: str) -> str:
    """Returns the size of the failed allocation after a blank, or "" if the message has no size."""
    requested = re.search(r"[Tt]ried to allocate ([\d.]+) ?(\w+)", message)
    if requested is None:
        return ""
    if requested[2] == "bytes":
        return f" at {int(requested[1]) / GIB:.2f} GiB more"
    return f" at {requested[1]} {requested[2]} more"
