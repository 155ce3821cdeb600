"""Figures that each rank measures of a training step, and the record made from all ranks' figures."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepgauge.bench.ranks import slowest
from stepgauge.measure import cpu_contention, devices, footprint
from stepgauge.measure.cpu_contention import Span, missed_metric, span_since
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.runtime.progress import report_progress
from stepgauge.spec.record import Record, Sample
from stepgauge.train.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The figures of one rank: ms of each phase, one value per step; bytes by metric name; the
    optimizer's name; the samples of its batches, if its network is a user's; readings of the CPU's load
    before and after the timed steps.
    """

    phases: dict[str, list[float]]
    bytes: dict[str, int]
    optimizer: str
    samples: int = 0
    span: Span | None = None


def time_steps(
    spec: Any,
    phases: Phases,
    device: torch.device,
    *,
    after_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[float]], Span | None]:
    """Returns ms of each phase, one value per step, after the spec's warm-up, and readings of the CPU's
    load before and after. Calls `after_step` after each timed step.

    Peak memory is counted over the timed steps. The first step allocates optimizer state, communicators and
    library workspaces. In the second, DDP divides its gradients into new buckets, while NCCL may hold
    the old ones for some time.
    """
    report_progress("first step" if spec.compile == "off" else "compiles in its first step")
    time_phases(phases, device, warmup=spec.warmup, steps=0)
    devices.reset_peak_memory(device)
    before = cpu_contention.reading()
    times = time_phases(phases, device, warmup=0, steps=spec.steps, after_step=after_step)
    return times, span_since(before)


def kept_bytes(
    step: TrainingStep,
    phases: Phases,
    device: torch.device,
    initial: int | None,
    *,
    has_graphs: bool = False,
) -> dict[str, int]:
    """Runs a step and returns its memory metrics in bytes: parameters, gradients and optimizer state,
    allocated memory after building and around the update, and the peak with the rest of it.

    initial     allocated memory after building
    has_graphs  True if the step replays CUDA graphs: their memory counts in the peak and the rest
    """
    module = step.parallel.module
    for name, phase in phases.items():
        if name != "optimizer":
            phase()
    gradients = (p.grad for p in module.parameters() if p.grad is not None)
    kept = {"gradient_bytes": footprint.bytes_of(gradients)}
    before_update = devices.allocated_memory(device)
    phases["optimizer"]()
    kept["parameter_bytes"] = footprint.bytes_of(module.parameters())
    kept["optimizer_bytes"] = footprint.state_bytes(step.optimizer)
    after_update, metrics = devices.allocated_memory(device), devices.peak_memory(device)
    if initial is not None and before_update is not None and after_update is not None:
        metrics |= {
            "initial_bytes": initial,
            "before_update_bytes": before_update,
            "after_update_bytes": after_update,
        }
    if "peak_bytes" in metrics:
        metrics["peak_bytes"] += devices.kept_by_graphs(device) if has_graphs else 0
        metrics["rest_bytes"] = metrics["peak_bytes"] - sum(kept.values())
    return kept | metrics


def slowest_step(ranks: Sequence[RankFigures], phase: str = "step") -> list[float]:
    """Returns ms of each step, or of one of its phases, on the slowest rank."""
    return slowest([rank.phases[phase] for rank in ranks])


def spans_table(ranks: Sequence[Sequence[tuple[str, float, float]]]) -> dict[str, list[list[Any]]]:
    """Returns the record's table of when each rank's actions ran, from (action, start, end)."""
    rows = [[number, *span] for number, spans in enumerate(ranks) for span in spans]
    return {"spans": [["rank", "action", "start ms", "end ms"], *rows]} if rows else {}


def held_table(ranks: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[list[Any]]]:
    """Returns the record's table of each rank's memory over time, from (ms, bytes from then on)."""
    rows = [[number, *point] for number, points in enumerate(ranks) for point in points]
    return {"held": [["rank", "ms", "bytes"], *rows]} if rows else {}


def record_of_ranks(
    spec: Any,
    ranks: Sequence[RankFigures],
    *,
    rates: Mapping[str, Sample],
    figures: Mapping[str, Sample],
    series: Mapping[str, list[float]],
    **fields: Any,
) -> Record:
    """Returns one record for all ranks, with the slowest rank's times and the largest bytes.

    rates, figures  further metrics
    series          further series
    fields          further fields of the record
    """
    first, on_cpu, threads = ranks[0], spec.device == "cpu", torch.get_num_threads()
    medians = [statistics.median(rank.phases["step"]) for rank in ranks]
    by_rank = {name: [float(rank.bytes[name]) for rank in ranks] for name in first.bytes}
    phases = {f"{name}_ms": Sample.of(slowest_step(ranks, name), "ms") for name in first.phases}
    return Record.of(
        spec,
        metrics={
            **phases,
            **rates,
            "rank_spread_ms": Sample.exact(max(medians) - min(medians), "ms"),
            **figures,
            **{name: Sample.exact(max(values), "bytes") for name, values in by_rank.items()},
            **(missed_metric((rank.span for rank in ranks), threads) if on_cpu else {}),
        },
        series={
            "rank_step_ms": medians,
            **{f"rank_{name}": values for name, values in by_rank.items()},
            **series,
        },
        environment={**environment(torch.device(spec.device)), "optimizer": first.optimizer},
        **fields,
    )
