"""A whole machine calibrated: the jobs, and the hardware file that their records become."""

import dataclasses
from collections.abc import Sequence

import torch

from stepgauge.bench import comm
from stepgauge.bench.sweep import Job
from stepgauge.calibrate import contention, host, run, wrappers
from stepgauge.calibrate.grids import grid_of
from stepgauge.measure.environment import device_name
from stepgauge.report.comm import links
from stepgauge.spec.calibration import KERNEL_CLASSES, CalibrationSpec, ContentionSpec
from stepgauge.spec.comm import CommSpec, sizes
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record

LINKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
BESIDE_BYTES = {"cuda": 2**27, "cpu": 2**25}  # of a message: of a large matrix's gradient
BESIDE_MS = 20.0
TIMED_MS = 3.0  # of each shape: three minutes on an H200 are enough for all
SIZES = {"cuda": sizes(2**10, 2**30, 4), "cpu": sizes(2**12, 2**26, 4)}


def jobs(device: torch.device, ranks: Sequence[int], only: Sequence[str] = ()) -> list[Job]:
    """Operations; for each number of ranks what collectives cost, alone and beside kernels, and on
    a CPU the operations while so many ranks share it; on GPUs for the most ranks what wrappers and
    other ways to spread a network take of the host. Of these the kinds and names with a word of `only`.

    Raises ValueError for a word that none has, and for more ranks than there are GPUs.
    """
    gpus = torch.cuda.device_count()
    for number in ranks:
        if device.type == "cuda" and number > gpus:
            raise ValueError(f"ranks is {number}; this machine has {gpus} GPUs, one a rank")
    found = [(name, run.job(_operation(name, device))) for name in run.names(device)]
    for number in ranks:
        found += _jobs_on_ranks(device, number)
    if ranks and device.type == "cuda":
        for name in (*wrappers.names(), *host.names_on(max(ranks))):
            found.append((name, run.job(_operation(name, device, max(ranks)))))
    names = [name for name, _ in found]
    for word in only:
        _require_in(names, word, device)
    return [job for name, job in found if not only or any(word in name for word in only)]


def _require_in(names: Sequence[str], word: str, device: torch.device) -> None:
    """Raises ValueError for a word that stands in none of the names."""
    if any(word in name for name in names):
        return
    if any(word in name for name, _ in _jobs_on_ranks(device, 2)):
        raise ValueError(f"only is {word!r}, which is timed between ranks: it needs --ranks 2")
    raise ValueError(f"only is {word!r}; there are {', '.join(dict.fromkeys(names))}")


def _jobs_on_ranks(device: torch.device, ranks: int) -> list[tuple[str, Job]]:
    """By name, what is timed for each number of ranks."""
    found = []
    if device.type == "cpu":
        for name in filter(_is_of_cpu_ranks, run.names(device)):
            found.append((f"{name} ranks", run.job(_operation(name, device, ranks))))
    for link in _links(device, ranks):
        found.append((f"links {link.op}", Job(comm.ON_RANKS, link)))
    for beside in _contentions(device, ranks):
        name = f"contention {beside.kernels} {beside.collective}"
        found.append((name, contention.job(beside)))
    return found


def _operation(name: str, device: torch.device, ranks: int = 1) -> CalibrationSpec:
    return CalibrationSpec(operation=name, device=str(device), ranks=ranks,
                           seconds=grid_of(device.type).longest_s, milliseconds=TIMED_MS)  # fmt: skip


def _is_of_cpu_ranks(name: str) -> bool:
    """Ranks that share a CPU train in fp32: half a minute for each number of them."""
    return "bf16" not in name


def _links(device: torch.device, ranks: int) -> list[CommSpec]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    return [
        CommSpec(op=op, backend=backend, size_bytes=size, ranks=ranks, seconds=0.1,
                 device=str(device))
        for op in LINKS for size in SIZES[device.type]
    ]  # fmt: skip


def _contentions(device: torch.device, ranks: int) -> list[ContentionSpec]:
    return [
        ContentionSpec(kernels=kernels, collective=collective, ranks=ranks, device=str(device),
                       size_bytes=BESIDE_BYTES[device.type], milliseconds=BESIDE_MS)
        for collective in contention.COLLECTIVES for kernels in KERNEL_CLASSES
    ]  # fmt: skip


def hardware_file(records: Sequence[Record], before: HardwareFile) -> HardwareFile:
    """The file with what the records say in place of what it said of the same."""
    of_kind = {
        kind: [record for record in records if record.kind == kind and record.status == "ok"]
        for kind in (CalibrationSpec.kind, CommSpec.kind, ContentionSpec.kind)
    }
    return (
        run.with_operations(_named(before, records), of_kind[CalibrationSpec.kind])
        .with_links(links(of_kind[CommSpec.kind]))
        .with_contention([contention.row_of(r) for r in of_kind[ContentionSpec.kind]])
    )


def this_machine(device: torch.device) -> tuple[str, int]:
    """The device's name, and of a CPU the threads that operations run on; 0 of a GPU."""
    return device_name(device), torch.get_num_threads() if device.type == "cpu" else 0


def require_same_machine(before: HardwareFile, device: str, threads: int) -> None:
    """Raises ValueError for a file of another device, or of a CPU on another number of threads:
    times that stay in it would pass for this one's.
    """
    if before.device and before.device != device:
        raise ValueError(
            f"the hardware file {before.name} is of {before.device}; this is {device}: name another"
        )
    if before.threads and before.threads != threads:
        raise ValueError(
            f"the hardware file {before.name} is of {before.threads} threads; here are {threads}: "
            f"name another"
        )


def _named(before: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """The file with the device of the records, and of a CPU the threads of a single process."""
    where = [record.environment for record in records if record.status == "ok"]
    if not where:
        return before
    alone = [r.environment for r in records if r.status == "ok" and r.spec.get("ranks", 1) == 1]
    is_cpu = where[0]["device"] == where[0]["cpu"]
    threads = alone[0]["threads"] if alone and is_cpu else before.threads
    return dataclasses.replace(before, device=str(where[0]["device"]), threads=threads)
