"""Times a broadcast from the host to several GPUs: `run` measures a BroadcastSpec."""

import dataclasses

import torch

from stepgauge.bench.comm import WrongResultError
from stepgauge.bench.sweep import Job
from stepgauge.measure.devices import require_host_memory
from stepgauge.measure.environment import environment
from stepgauge.measure.transfer import Engine, rates, time_schedule
from stepgauge.spec.broadcast import BLOCKLESS, BroadcastSpec, Rates
from stepgauge.spec.record import Record, Sample

NOISE = 1.05  # a lower bound of more than this times the measured time is not valid
NO_BOUND = (
    "the links were slower when measured separately than in the schedule, because of other work: "
    "there is no valid bound"
)


def job(spec: BroadcastSpec) -> Job:
    """Returns the job of the spec. Schedules without blocks get the default block size, so that their
    records are the same for every size.
    """
    if spec.schedule in BLOCKLESS:
        spec = dataclasses.replace(spec, block_bytes=BroadcastSpec().block_bytes)
    return Job(run, spec)


def run(spec: BroadcastSpec) -> Record:
    """Checks the result, times the broadcast, checks again, and returns the record.

    Raises ValueError if the spec has more GPUs than the machine, and WrongResultError.
    """
    engine = Engine(spec.size_bytes, _devices(spec), spec.block_bytes)
    link_rates = rates(engine, spec.size_bytes, spec.gpus)
    _check_result(spec, engine)
    times = time_schedule(engine, spec.plan(), warmup=spec.warmup, repeats=spec.repeats)
    # Measured again: if the machine was busy before, the bound would be too long.
    link_rates = link_rates.best(rates(engine, spec.size_bytes, spec.gpus))
    _check_result(spec, engine)
    where = environment(torch.device(spec.device))
    return dataclasses.replace(record(spec, times, link_rates), environment=where)


def _devices(spec: BroadcastSpec) -> list[torch.device]:
    """Returns the GPUs, or the CPU in place of each."""
    if spec.device == "cpu":
        require_host_memory((2 + spec.gpus) * spec.size_bytes)
        return [torch.device("cpu")] * spec.gpus
    available = torch.cuda.device_count()
    if spec.gpus > available:
        raise ValueError(f"gpus is {spec.gpus}; this machine has {available}")
    require_host_memory(2 * spec.size_bytes + 2 * spec.block_bytes)
    return [torch.device("cuda", number) for number in range(spec.gpus)]


def _check_result(spec: BroadcastSpec, engine: Engine) -> None:
    engine.clear()
    engine.run(spec.plan())
    if wrong := engine.wrong():
        raise WrongResultError(
            f"{wrong:,} bytes of {spec.schedule} are wrong on the {spec.gpus} devices"
        )


def record(spec: BroadcastSpec, times_ms: list[float], link_rates: Rates) -> Record:
    """Returns the record of the times, with the lower bound that follows from the links' rates."""
    time = Sample.of(times_ms, "ms")
    gb_per_s = spec.size_bytes / time.median / 1e6
    bound_ms = link_rates.bound_s(spec.plan()) * 1e3
    metrics = {
        "time_ms": time,
        "gb_per_s": Sample.exact(gb_per_s, "GB/s"),
        "of_host_link": Sample.exact(
            gb_per_s * 1e9 / link_rates.host_link, "fraction of one host link"
        ),
        "bound_ms": Sample.exact(bound_ms, "ms"),
        "of_bound": Sample.exact(bound_ms / time.median, "fraction of the bound"),
        "host_link_gb_per_s": Sample.exact(link_rates.host_link / 1e9, "GB/s"),
        "host_links_gb_per_s": Sample.exact(link_rates.host_links / 1e9, "GB/s"),
        "peer_link_gb_per_s": Sample.exact(link_rates.peer_link / 1e9, "GB/s"),
        "host_copy_gb_per_s": Sample.exact(link_rates.host_copy / 1e9, "GB/s"),
        "wrong": Sample.exact(0, "elements"),
    }
    note = NO_BOUND if bound_ms > NOISE * time.median else ""
    return Record.of(spec, metrics=metrics, series={"time_ms": times_ms}, note=note)
