"""Where a figure was measured: machine, versions, commit."""

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
    """What a reader needs to judge or repeat a figure that was measured on this device.

    A sweep adds "native": what launched this package's kernels, and what ran in place of those that
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
    """Bytes of a GPU for programs; of another device those of the machine."""
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
    """The commit of the source tree this package runs from, with + when files differ from it; None
    if installed.

    A copy without its repository is told by the environment variable STEPGAUGE_COMMIT.
    """
    if told := os.environ.get("STEPGAUGE_COMMIT"):
        return told
    root = Path(stepgauge.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
