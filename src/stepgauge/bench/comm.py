"""Times a collective on several ranks: `ON_RANKS` measures a CommSpec."""

import dataclasses

import torch

from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.measure.collectives import Runnable, collective_of, time_collective
from stepgauge.measure.devices import require_host_memory
from stepgauge.runtime.world import this_world
from stepgauge.spec.comm import COPIES, CommSpec
from stepgauge.spec.record import Record, Sample


class WrongResultError(Exception):
    """A collective or broadcast gave wrong values, so its times are worthless."""


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """The figures of one rank.

    times_ms    ms per operation, one value per batch
    operations  number of operations in a batch
    sent_bytes  bytes that our own ring sent in one operation
    library     the communication library with its version
    """

    times_ms: list[float]
    operations: int
    sent_bytes: int
    library: str


def measure(spec: CommSpec) -> RankTimes:
    """Checks the collective's result, times it, and checks again. Raises WrongResultError."""
    world = this_world()
    device = world.device(spec.device)
    if device.type == "cpu":
        require_host_memory(spec.tensor_bytes * world.local_size)
    collective = collective_of(spec, device)
    _check_result(collective)
    before = collective.sent_bytes
    collective.run()
    sent = collective.sent_bytes - before
    times, operations = time_collective(collective)
    _check_result(collective)
    return RankTimes(times, operations, sent, _library(spec))


def _check_result(collective: Runnable) -> None:
    if collective.spec.check and (wrong := collective.wrong()):
        raise WrongResultError(
            f"{wrong:,} elements of {collective.spec.op} are wrong, counted over all ranks"
        )


def _library(spec: CommSpec) -> str:
    if spec.backend == "nccl":
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    if spec.backend == COPIES:
        return f"copies, CUDA {torch.version.cuda}" if spec.device != "cpu" else "shared memory"
    return f"Gloo of torch {torch.__version__}"


def record(spec: CommSpec, ranks: list[RankTimes]) -> Record:
    """Returns the record of all ranks' figures. A batch takes as long as on its slowest rank."""
    times = [rank.times_ms for rank in ranks]
    slowest_times = slowest(times)
    sample = Sample.of(slowest_times, "ms")
    spread = [max(batch) - min(batch) for batch in zip(*times, strict=True)]
    metrics = {
        "time_ms": sample,
        "p99_ms": Sample.exact(_p99(slowest_times), "ms"),
        "rank_spread_ms": Sample.of(spread, "ms"),
    }
    if spec.bytes:
        algbw = spec.bytes / sample.median / 1e6
        metrics["algbw_gb_per_s"] = Sample.exact(algbw, "GB/s")
        metrics["busbw_gb_per_s"] = Sample.exact(algbw * spec.factor, "GB/s")
        metrics["factor"] = Sample.exact(spec.factor, "busbw / algbw")
    if spec.check:
        metrics["wrong"] = Sample.exact(0, "elements")
    if spec.algorithm == "ring":
        metrics["sent_bytes"] = Sample.of([rank.sent_bytes for rank in ranks], "bytes")
    metrics["batch"] = Sample.exact(ranks[0].operations, "operations")
    medians = [Sample.of(rank, "ms").median for rank in times]
    return Record.of(
        spec,
        metrics=metrics,
        series={"time_ms": slowest_times, "rank_median_ms": medians},
        environment={"library": ranks[0].library},
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


ON_RANKS = OnRanks(measure, record)
