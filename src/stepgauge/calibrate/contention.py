"""Measures how much kernels and collectives slow each other down: each is timed alone, and while the
other runs all the time.

On GPUs, collectives run on their own stream, as in a wrapper. Kernels alternate with other work as in a
step, because a GPU at its power limit that gives multiprocessors to a collective raises the clock of the
others. On a CPU, collectives run in another thread.
"""

import concurrent.futures
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from stepgauge.bench.ranks import OnRanks
from stepgauge.bench.sweep import Job
from stepgauge.calibrate.grids import grid_of
from stepgauge.calibrate.operations import PASSES, PRODUCTS, Call, operations, other_work
from stepgauge.calibrate.timing import METRICS, Turn, clock_and_power, loop
from stepgauge.measure.collectives import collective_of
from stepgauge.measure.environment import environment
from stepgauge.runtime.world import gathered_objects, this_world
from stepgauge.spec.calibration import Contention, ContentionSpec
from stepgauge.spec.comm import COPIED, COPIES, CommSpec
from stepgauge.spec.record import Record, Sample

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
# Operation and sizes of a typical call of each class.
KERNELS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "cuda": {
        "matmul": ("matmul nt bf16", (4096, 4096, 4096)),
        "short-matmul": ("matmul tn bf16", (2560, 2560, 4096)),
        "attention": ("attention sdpa forward bf16", (32, 2048, 128)),
        "update": ("optimizer fused fp32", (2**26,)),
        "traffic": ("gate backward bf16", (4096, 8192)),
    },
    "cpu": {
        "matmul": ("matmul nt fp32", (512, 256, 1024)),
        "short-matmul": ("matmul nt fp32", (64, 256, 256)),
        "attention": ("attention sdpa forward fp32", (16, 256, 64)),
        "traffic": ("traffic", (2**22,)),
    },
}
# The other work that kernels of a class alternate with.
OTHERS = {kernels: PRODUCTS if kernels == "traffic" else PASSES for kernels in KERNELS["cuda"]}
LONGER = 3  # the work that is not timed is queued for this many times as long
ROUNDS = 3  # alternately alone and overlapped, so that other work on the machine disturbs both


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one kernel and of one collective: alone, and `beside` the other."""

    kernel: float
    collective: float
    kernel_beside: float
    collective_beside: float


def job(spec: ContentionSpec) -> Job:
    """Returns the job. Raises ValueError for kernels that the device does not distinguish."""
    device = torch.device(spec.device).type
    if spec.kernels not in KERNELS[device]:
        raise ValueError(
            f"kernels is {spec.kernels!r}; on a {device} it is one of {', '.join(KERNELS[device])}"
        )
    return Job(RUN, spec)


def measure(spec: ContentionSpec) -> list[Times]:
    """Returns the times of each round. Runs on every rank."""
    device = this_world().device(spec.device)
    name, sizes = KERNELS[device.type][spec.kernels]
    kernel = operations(grid_of(device.type))[name].make(*sizes, device)
    collective = collective_of(_comm_spec(spec, device), device)
    calls = kernel, collective.run
    counts = [_count(call, device, spec.milliseconds) for call in calls]
    if other := other_work(OTHERS[spec.kernels], device):
        turn = Turn(kernel, 1, other, loop(kernel, device, 2))
        return _rounds_on_gpu(turn, collective.run, device, counts)
    rounds = []
    for _ in range(ROUNDS):
        dist.barrier()
        kernel_us = loop(kernel, device, counts[0])
        collective_us = loop(collective.run, device, counts[1])
        rounds.append(Times(kernel_us, collective_us, *_beside_on_cpu(*calls, device, counts)))
    return rounds


def _comm_spec(spec: ContentionSpec, device: torch.device) -> CommSpec:
    backend = "nccl" if device.type == "cuda" else "gloo"
    return CommSpec(
        op=spec.collective.removeprefix(COPIED),
        backend=COPIES if spec.collective.startswith(COPIED) else backend,
        size_bytes=spec.size_bytes,
        ranks=spec.ranks,
        device=spec.device,
    ).canonical()


def _count(call: Call, device: torch.device, milliseconds: float) -> int:
    """Returns how many calls take this long; the smallest number over ranks, to be used by all."""
    loop(call, device, 2)
    count = max(2, math.ceil(milliseconds * 1e3 / loop(call, device, 2)))
    return min(gathered_objects(count))


def _rounds_on_gpu(
    turn: Turn, collective: Call, device: torch.device, counts: Sequence[int]
) -> list[Times]:
    """Times each alone, and then while enough of the other is queued that it does not end before."""
    rounds, (turns, sends) = [], counts
    sending = torch.cuda.Stream(device)
    for _ in range(ROUNDS):
        dist.barrier()
        kernel_us = statistics.median(turn.times(device, turns))
        collective_us = loop(collective, device, sends)
        dist.barrier()
        with torch.cuda.stream(sending):
            running = _queued(collective, LONGER * sends)
        torch.cuda.current_stream(device).wait_event(running)
        beside_us = statistics.median(turn.times(device, turns))
        dist.barrier()
        running = _queued(turn, LONGER * turns)
        with torch.cuda.stream(sending):
            sending.wait_event(running)
            sent_us = loop(collective, device, sends)
        rounds.append(Times(kernel_us, collective_us, beside_us, sent_us))
    return rounds


def _queued(call: Call, count: int) -> torch.cuda.Event:
    """Queues the call and `count` more on this stream. Returns an event after the first one."""
    call()
    running = torch.cuda.Event()
    running.record()
    for _ in range(count):
        call()
    return running


def _beside_on_cpu(
    kernel: Call, collective: Call, device: torch.device, counts: Sequence[int]
) -> tuple[float, float]:
    """Times kernel and collective while another thread runs the collective."""
    dist.barrier()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        start, done = time.perf_counter(), 0
        sending = pool.submit(loop, collective, device, counts[1])
        while not (done and sending.done()):
            kernel()
            done += 1
        computed_us = (time.perf_counter() - start) * 1e6 / done
        return computed_us, sending.result()


def record(spec: ContentionSpec, ranks: list[list[Times]]) -> Record:
    """Returns the record of the slowdowns over all rounds and ranks, and of their times."""
    device, rounds = torch.device(spec.device), [times for own in ranks for times in own]
    kernel = [times.kernel_beside / times.kernel for times in rounds]
    collective = [times.collective_beside / times.collective for times in rounds]
    metrics = {
        "kernel_slowdown": Sample.of(kernel, ""),
        "collective_slowdown": Sample.of(collective, ""),
    }
    for field in dataclasses.fields(Times):
        us = [getattr(times, field.name) for times in rounds]
        metrics[f"{field.name}_us"] = Sample.of(us, "us")
    for unit, value in clock_and_power(device).items():
        metrics[METRICS[unit]] = Sample.exact(value, unit)
    return Record.of(spec, metrics=metrics, environment=environment(device))


RUN = OnRanks(measure, record)


def row_of(record: Record) -> Contention:
    """Returns the record as a row of a hardware file. Slowdowns below 1 are noise and become 1."""
    kernel, collective = (
        max(1.0, record.metrics[name].median) for name in ("kernel_slowdown", "collective_slowdown")
    )
    spec = record.spec
    return Contention(spec["kernels"], spec["collective"], kernel, collective, spec["ranks"])
