"""A BroadcastSpec measured: `run` gives its record."""

import dataclasses

import torch

from stepgauge.bench.comm import WrongResultError
from stepgauge.bench.sweep import Job
from stepgauge.measure.devices import require_host_memory
from stepgauge.measure.environment import environment
from stepgauge.measure.transfer import Engine, rates, time_schedule
from stepgauge.spec.broadcast import BLOCKLESS, BroadcastSpec, Rates
from stepgauge.spec.record import Record, Sample

NOISE = 1.05  # of the time: a bound that is this much longer is none
NO_BOUND = (
    "the links were slower alone than in the schedule: other work slowed them, no bound holds"
)


def job(spec: BroadcastSpec) -> Job:
    """What the sweep runs. Schedules without blocks are asked for with the default size of a block,
    whatever it was.
    """
    if spec.schedule in BLOCKLESS:
        spec = dataclasses.replace(spec, block_bytes=BroadcastSpec().block_bytes)
    return Job(run, spec)


def run(spec: BroadcastSpec) -> Record:
    """Checks, times, checks again. Raises ValueError for more GPUs than there are, and
    WrongResultError.
    """
    engine = Engine(spec.size_bytes, _devices(spec), spec.block_bytes)
    alone = rates(engine, spec.size_bytes, spec.gpus)
    _require_right(spec, engine)
    times = time_schedule(engine, spec.plan(), warmup=spec.warmup, repeats=spec.repeats)
    # once more: a machine that was busy before must not make the bound too long
    alone = alone.best(rates(engine, spec.size_bytes, spec.gpus))
    _require_right(spec, engine)
    where = environment(torch.device(spec.device))
    return dataclasses.replace(record(spec, times, alone), environment=where)


def _devices(spec: BroadcastSpec) -> list[torch.device]:
    """Of a CPU as often as there are devices to stand for."""
    if spec.device == "cpu":
        require_host_memory((2 + spec.gpus) * spec.size_bytes)
        return [torch.device("cpu")] * spec.gpus
    there = torch.cuda.device_count()
    if spec.gpus > there:
        raise ValueError(f"gpus is {spec.gpus}; this machine has {there}")
    require_host_memory(2 * spec.size_bytes + 2 * spec.block_bytes)
    return [torch.device("cuda", number) for number in range(spec.gpus)]


def _require_right(spec: BroadcastSpec, engine: Engine) -> None:
    engine.clear()
    engine.run(spec.plan())
    if wrong := engine.wrong():
        raise WrongResultError(
            f"{wrong:,} bytes of {spec.schedule} are wrong on the {spec.gpus} devices"
        )


def record(spec: BroadcastSpec, times_ms: list[float], alone: Rates) -> Record:
    time = Sample.of(times_ms, "ms")
    delivered = spec.size_bytes / time.median / 1e6
    bound_ms = alone.bound_s(spec.plan()) * 1e3
    metrics = {
        "time_ms": time,
        "gb_per_s": Sample.exact(delivered, "GB/s"),
        "of_host_link": Sample.exact(
            delivered * 1e9 / alone.host_link, "fraction of one host link"
        ),
        "bound_ms": Sample.exact(bound_ms, "ms"),
        "of_bound": Sample.exact(bound_ms / time.median, "fraction of the bound"),
        "host_link_gb_per_s": Sample.exact(alone.host_link / 1e9, "GB/s"),
        "host_links_gb_per_s": Sample.exact(alone.host_links / 1e9, "GB/s"),
        "peer_link_gb_per_s": Sample.exact(alone.peer_link / 1e9, "GB/s"),
        "host_copy_gb_per_s": Sample.exact(alone.host_copy / 1e9, "GB/s"),
        "wrong": Sample.exact(0, "elements"),
    }
    note = NO_BOUND if bound_ms > NOISE * time.median else ""
    return Record.of(spec, metrics=metrics, series={"time_ms": times_ms}, note=note)
