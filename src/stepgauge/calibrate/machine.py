"""Calibrates a whole machine: lists the jobs, and makes a hardware file from their records."""

import dataclasses
from collections.abc import Sequence

import torch

from stepgauge.bench import comm
from stepgauge.bench.sweep import Job
from stepgauge.calibrate import contention, host, run, wrappers
from stepgauge.calibrate.grids import grid_of
from stepgauge.measure.environment import device_name
from stepgauge.parallel.communication.peer_memory import connected_gpu_counts
from stepgauge.report.comm import links
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.calibration import CalibrationSpec, ContentionSpec
from stepgauge.spec.comm import COPIED, COPIED_OPS, COPIES, CommSpec, sizes
from stepgauge.spec.first_names import first_names
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record

LINKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
# For contention: a message with the gradient of a large matrix, and how long both overlap.
CONTENTION_BYTES = {"cuda": 2**27, "cpu": 2**25}
CONTENTION_MS = 20.0
MOST_NAMED = 3  # operations of which few shapes were timed; the others are counted
TIMED_MS = 3.0  # per shape
# Dense where NCCL changes its protocol, which is where the messages of most steps are.
MESSAGE_BYTES = {
    "cuda": [*sizes(2**10, 2**20, 4), *sizes(2**21, 2**30, 2)],
    "cpu": sizes(2**12, 2**26, 4),
}
COPIED_BYTES = sizes(2**16, 2**30, 4)
BESIDE_COPIES = ("matmul", "attention")  # the kernels during which a step copies


def jobs(device: torch.device, ranks: Sequence[int], only: Sequence[str] = ()) -> list[Job]:
    """Returns the jobs of a calibration, or those whose name contains a word of `only`.

    They time all operations on one rank. For each number of ranks, they time collectives, contention,
    and what the ranks do on the CPU that they share: on a CPU the operations in fp32, on GPUs the host's
    launches. Where the GPUs reach each other's memory, they also time collectives by copy engines, and
    what runs beside these.

    Raises ValueError for a word that no name contains, and for more ranks than GPUs.
    """
    gpus = torch.cuda.device_count()
    for number in ranks:
        if device.type == "cuda" and number > gpus:
            raise ValueError(
                f"ranks is {number}; this machine has {gpus} GPUs, and each rank needs its own"
            )
    named = [(name, run.job(_operation(name, device))) for name in run.names(device)]
    copying = run_isolated(connected_gpu_counts, ranks) if ranks and device.type == "cuda" else ()
    for number in ranks:
        named += _jobs_on_ranks(device, number)
        named += _copied_on_ranks(device, number) if number in copying else []
    names = [name for name, _ in named]
    for word in only:
        _require_in(names, word, device)
    return [job for name, job in named if not only or any(word in name for word in only)]


def _require_in(names: Sequence[str], word: str, device: torch.device) -> None:
    """Raises ValueError for a word that no name contains."""
    if any(word in name for name in names):
        return
    on_ranks = _jobs_on_ranks(device, 2)
    if device.type == "cuda":
        on_ranks += _copied_on_ranks(device, 2)
    if any(word in name for name, _ in on_ranks):
        raise ValueError(f"only is {word!r}, which needs several ranks: add --ranks 2")
    family = [name for name in names if name.split()[0] == word.split()[0]]
    if family:
        raise ValueError(f"only is {word!r}; there are {', '.join(dict.fromkeys(family))}")
    families = ", ".join(dict.fromkeys(name.split()[0] for name in names))
    raise ValueError(
        f"only is {word!r}; names begin with {families}. --only 'matmul ?' lists those of matmul"
    )


def _jobs_on_ranks(device: torch.device, ranks: int) -> list[tuple[str, Job]]:
    """Returns the jobs for one number of ranks, with their names."""
    if device.type == "cpu":
        # ranks that share a CPU train in fp32, which takes half a minute per number of ranks
        shared = [name for name in run.names(device) if "bf16" not in name]
    else:
        shared = [*host.names_on(ranks), *wrappers.names()]
    named = [(f"{name} ranks", run.job(_operation(name, device, ranks))) for name in shared]
    for link in _links(device, ranks):
        named.append((f"links {link.op}", Job(comm.ON_RANKS, link)))
    for spec in _contentions(device, ranks):
        name = f"contention {spec.kernels} {spec.collective}"
        named.append((name, contention.job(spec)))
    return named


def _copied_on_ranks(device: torch.device, ranks: int) -> list[tuple[str, Job]]:
    """Returns the jobs that time copies between GPUs, with their names."""
    named = []
    for op in COPIED_OPS:
        for size in COPIED_BYTES:
            link = CommSpec(op=op, backend=COPIES, algorithm="push", size_bytes=size, ranks=ranks,
                            seconds=0.05, device=str(device))  # fmt: skip
            named.append((f"links {COPIES} {op}", Job(comm.ON_RANKS, link)))
    for op in COPIED_OPS:
        for kernels in BESIDE_COPIES:
            spec = _contention(device, ranks, kernels, f"{COPIED}{op}")
            named.append((f"contention {kernels} {COPIED}{op}", contention.job(spec)))
    return named


def _operation(name: str, device: torch.device, ranks: int = 1) -> CalibrationSpec:
    return CalibrationSpec(operation=name, device=str(device), ranks=ranks,
                           seconds=grid_of(device.type).time_limit_s, milliseconds=TIMED_MS)  # fmt: skip


def _links(device: torch.device, ranks: int) -> list[CommSpec]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    return [
        CommSpec(op=op, backend=backend, size_bytes=size, ranks=ranks, seconds=0.1,
                 device=str(device))
        for op in LINKS for size in MESSAGE_BYTES[device.type]
    ]  # fmt: skip


def _contentions(device: torch.device, ranks: int) -> list[ContentionSpec]:
    return [
        _contention(device, ranks, kernels, collective)
        for collective in contention.COLLECTIVES
        for kernels in contention.KERNELS[device.type]
    ]


def _contention(device: torch.device, ranks: int, kernels: str, collective: str) -> ContentionSpec:
    return ContentionSpec(kernels=kernels, collective=collective, ranks=ranks, device=str(device),
                          size_bytes=CONTENTION_BYTES[device.type], milliseconds=CONTENTION_MS)  # fmt: skip


def hardware_file(records: Sequence[Record], before: HardwareFile) -> HardwareFile:
    """Returns the file with its operations, links and contention replaced by those of the records."""
    of_kind = {
        kind: [record for record in records if record.kind == kind and record.status == "ok"]
        for kind in (CalibrationSpec.kind, CommSpec.kind, ContentionSpec.kind)
    }
    return (
        run.with_operations(_named(before, records), of_kind[CalibrationSpec.kind])
        .with_links(links(of_kind[CommSpec.kind]))
        .with_contention([contention.row_of(r) for r in of_kind[ContentionSpec.kind]])
    )


def missing_shapes(records: Sequence[Record]) -> str:
    """Returns a sentence on the shapes without a time, and why they have none; "" if all were timed."""
    timed = [r for r in records if r.kind == CalibrationSpec.kind and r.status == "ok"]
    shapes, left_out, late = (
        sum(int(record.median(f"shapes{which}") or 0) for record in timed)
        for which in ("", "_left_out", "_out_of_time")
    )
    if not left_out:
        return ""
    limit = f"{late:,} because the time limit of their operation was over" if late else ""
    other = f"{left_out - late:,} because they did not fit in memory" if left_out > late else ""
    sentence = (
        f"{left_out:,} of {shapes + left_out:,} shapes were left out: "
        f"{' and '.join(filter(None, [limit, other]))}"
    )
    few = []
    for record in timed:
        table, ranks = run.table_of(record), record.spec["ranks"]
        on = f" on {ranks} ranks" if ranks > 1 else ""
        few += [f"{record.spec['operation']}{on} ({table.timed})"] if table.has_few else []
    if not few:
        return sentence
    return (
        f"{sentence}. Few were timed of {first_names(few, MOST_NAMED)}: calibrate with --fresh on a "
        f"quiet machine"
    )


def this_machine(device: torch.device) -> tuple[str, int]:
    """Returns the device's name and, for a CPU, the number of threads (0 for a GPU)."""
    return device_name(device), torch.get_num_threads() if device.type == "cpu" else 0


def require_same_machine(before: HardwareFile, device: str, threads: int) -> None:
    """Raises ValueError if the file is of another device, or of another number of CPU threads.

    Otherwise, its remaining times would be mistaken for this machine's.
    """
    if before.device and before.device != device:
        raise ValueError(
            f"the hardware file {before.name} is of {before.device}, and this is {device}: choose "
            f"another file"
        )
    if before.threads and before.threads != threads:
        raise ValueError(
            f"the hardware file {before.name} is for {before.threads} threads, and this process has "
            f"{threads}: choose another file"
        )


def _named(before: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """Returns the file with the records' device and, for a CPU, the threads of a single process."""
    done = [record for record in records if record.status == "ok"]
    if not done:
        return before
    environment = done[0].environment
    is_cpu = environment["device"] == environment["cpu"]
    single = [record.environment for record in done if record.spec.get("ranks", 1) == 1]
    threads = single[0]["threads"] if single and is_cpu else before.threads
    return dataclasses.replace(before, device=str(environment["device"]), threads=threads)
