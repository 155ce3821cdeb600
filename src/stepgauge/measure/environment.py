"""Describes where a figure was measured: machine, versions, commit."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import stepgauge
from stepgauge.runtime.host import available_cores, cpu_name


def environment(device: torch.device) -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat a figure that was measured on this device.

    A sweep adds "native": the launchers of this package's kernels, and the fallbacks of kernels that
    could not run.
    """
    return {
        "device": device_name(device),
        "device_bytes": device_memory(device),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "stepgauge": stepgauge.__version__,
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else device.type


def device_memory(device: torch.device) -> int:
    """Returns the memory of a GPU in bytes, or that of the machine for other devices."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> str | None:
    """Returns the commit of the source tree that this package runs from, followed by + if files differ
    from it, or None for an installed package.

    The environment variable STEPGAUGE_COMMIT sets the commit for a copy without a repository.
    """
    if commit := os.environ.get("STEPGAUGE_COMMIT"):
        return commit
    root = Path(stepgauge.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *describe],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
