"""What is known of this machine without loading torch, which takes seconds."""

import ctypes
import functools
import importlib.util
import os
import platform
import runpy
import sys
from pathlib import Path

# What the libraries that run a CPU's threads read of how many there shall be.
THREADING = ("OMP_", "MKL_", "KMP_", "GOMP_")


@functools.cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_a_rank(ranks: int) -> int:
    """Of each of so many that share this machine: as many as OMP_NUM_THREADS says, else an equal part
    of the cores.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the rest is of nested regions
    return int(given) if given.isdecimal() and int(given) else max(1, available_cores() // ranks)


def thread_settings() -> str:
    """The environment's settings of threads: of one CPU with as many cores, equal ones give torch as
    many threads.
    """
    given = sorted(item for item in os.environ.items() if item[0].startswith(THREADING))
    return " ".join(f"{name}={value}" for name, value in given)


@functools.cache
def installed_torch() -> dict[str, str | None]:
    """What torch's version.py says: `__version__`, and `cuda` and `hip`, None in a build without."""
    found = importlib.util.find_spec("torch")
    assert found and found.origin, "torch is a dependency of this package"
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))


def has_only_cpu() -> bool:
    """Whether torch surely finds no accelerator: its build has none, or the machine no driver. False
    where only torch can say.
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
