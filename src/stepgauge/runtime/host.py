"""Facts about this machine that can be found without importing torch, which takes seconds."""

import ctypes
import functools
import importlib.util
import os
import platform
import runpy
import sys
from pathlib import Path

# Prefixes of the environment variables that set the number of CPU threads.
THREADING = ("OMP_", "MKL_", "KMP_", "GOMP_")


@functools.cache
def cpu_name() -> str:
    """Returns the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Returns OMP_NUM_THREADS if it is set, else an equal share of the cores."""
    # "4,2" sets 4 threads, and 2 in nested parallel regions.
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if setting.isdecimal() and int(setting):
        return int(setting)
    return max(1, available_cores() // ranks)


def thread_settings() -> str:
    """Returns the environment variables that set the number of threads, as "NAME=value ...".

    On the same CPU and number of cores, equal settings give torch the same number of threads.
    """
    settings = sorted(item for item in os.environ.items() if item[0].startswith(THREADING))
    return " ".join(f"{name}={value}" for name, value in settings)


@functools.cache
def installed_torch() -> dict[str, str | None]:
    """Returns the content of torch/version.py: `__version__`, and `cuda` and `hip`, which may be None."""
    torch = importlib.util.find_spec("torch")
    assert torch and torch.origin, "torch is a dependency of this package"
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))


def has_only_cpu() -> bool:
    """Returns True if torch certainly finds no accelerator: no support in its build, or no driver.

    Returns False if only torch itself can tell.
    """
    torch = installed_torch()
    if sys.platform != "linux" or torch.get("hip") or torch.get("xpu"):
        return False
    if torch["cuda"] is None:
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False
