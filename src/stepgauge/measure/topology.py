"""Reads the machine's topology: GPUs from NVIDIA's management library, the rest from the kernel."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from stepgauge.runtime.host import available_cores, cpu_name
from stepgauge.spec.topology import Gpu, Interface, NumaNode, Topology
from stepgauge.spec.units import ceil_div

SYS = Path("/sys")
# Levels of nvmlDeviceGetTopologyCommonAncestor, with the names of nvidia-smi topo -m.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# bytes/s of one NVLink in one direction, by generation. Source: NVIDIA's whitepapers (P100, V100,
# A100, H100, GB200).
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9, 6: 25e9, 7: 25e9, 8: 50e9}


def topology(sys: Path = SYS) -> Topology:
    """Returns the topology of this machine. Without NVIDIA's driver it has no GPUs, and says why."""
    nodes = numa_nodes(sys)
    gpus: list[Gpu] = []
    links: dict[tuple[int, int], str] = {}
    reason = ""
    try:
        with _library() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [_gpu(nvml, index, handle, sys) for index, handle in enumerate(handles)]
            pairs = [(i, j) for i in range(len(handles)) for j in range(i + 1, len(handles))]
            links = {(i, j): _link(nvml, handles[i], handles[j], gpus[i].nvlinks) for i, j in pairs}
    except NoDriverError as error:
        reason = str(error)
    if not gpus and not reason:
        reason = "the driver lists no GPU"
    return Topology(
        host=platform.node(),
        cpu=cpu_name(),
        cores=available_cores(),
        numa_nodes=nodes,
        interfaces=interfaces(sys),
        gpus=gpus,
        links=links,
        without_gpus=reason,
    )


class NoDriverError(Exception):
    """There is no NVIDIA driver, or no library to query it. The message is one sentence."""


@contextlib.contextmanager
def _library() -> Iterator[ModuleType]:
    try:
        import pynvml
    except ModuleNotFoundError:
        raise NoDriverError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriverError(f"no NVIDIA driver answers ({error})") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: ModuleType, index: int, handle: Any, sys: Path) -> Gpu:
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    now, most = (
        (_query(nvml, getattr(nvml, f"nvmlDeviceGet{kind}PcieLinkGeneration"), handle),
         _query(nvml, getattr(nvml, f"nvmlDeviceGet{kind}PcieLinkWidth"), handle))
        for kind in ("Curr", "Max")
    )  # fmt: skip
    active, rate = _nvlinks(nvml, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_address=bus,
        pcie=f"gen {now[0]} × {now[1]} (can gen {most[0]} × {most[1]})",
        numa_node=_number(sys / f"bus/pci/devices/{bus}/numa_node"),
        affinity=_affinity(nvml, handle),
        nvlinks=active,
        nvlink_bytes_per_s=rate,
    )


def _query(nvml: ModuleType, function: Any, *arguments: Any) -> Any:
    """Returns the driver's answer, or None if this GPU does not support the query."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _nvlinks(nvml: ModuleType, handle: Any) -> tuple[int, float | None]:
    """Returns the number of active links, and their total bytes/s in one direction if the generation
    is known.
    """
    active = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if _query(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
    ]
    if not active:
        return 0, None
    version = _query(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, active[0])
    each = _NVLINK_BYTES_PER_S.get(version)
    return len(active), each * len(active) if each else None


def _link(nvml: ModuleType, first: Any, second: Any, nvlinks: int) -> str:
    """Returns NVLink if it connects the two GPUs, or else the PCIe level at which their paths meet."""
    status = _query(
        nvml, nvml.nvmlDeviceGetP2PStatus, first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK
    )
    if status == nvml.NVML_P2P_STATUS_OK and nvlinks:
        return f"NV{nvlinks}"
    level = _query(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    return _LEVELS.get(level, "unknown")


def _affinity(nvml: ModuleType, handle: Any) -> str:
    words = _query(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, ceil_div(os.cpu_count() or 1, 64))
    if words is None:
        return ""
    return _ranges(
        [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    )


def _ranges(cores: list[int]) -> str:
    """Formats numbers as ranges: [0, 1, 2, 5] -> "0-2,5"."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def numa_nodes(sys: Path = SYS) -> list[NumaNode]:
    nodes = []
    for folder in sorted(sys.glob("devices/system/node/node[0-9]*"), key=lambda f: int(f.name[4:])):
        totals = [line for line in _read(folder / "meminfo").splitlines() if "MemTotal" in line]
        kib = int(totals[0].split()[-2]) if totals else 0
        nodes.append(NumaNode(int(folder.name[4:]), _read(folder / "cpulist"), kib * 1024))
    return nodes


def interfaces(sys: Path = SYS) -> list[Interface]:
    """Returns the network interfaces except the loopback. Drivers of virtual ones often have no speed."""
    result = []
    for folder in sorted(sys.glob("class/net/*")):
        if folder.name == "lo" or not folder.is_dir():
            continue
        megabits = _number(folder / "speed")
        rate = megabits * 1e6 / 8 if megabits and megabits > 0 else None
        up = _read(folder / "operstate") == "up"
        result.append(Interface(folder.name, up, rate, _number(folder / "device/numa_node")))
    return result


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Reads a number of the kernel, which writes -1 for none. Returns None for that."""
    try:
        value = int(_read(path))
    except ValueError:
        return None
    return None if value < 0 else value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
