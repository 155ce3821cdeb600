"""A LayoutSpec run on ranks and timed: `JOB` makes its record of what all ranks gave.

Exposed communication is told by axis. Of data, context and tensor it is the step less the same step without
that axis' collectives. A pipeline cannot be run without its transfers: its part is forward and
backward less what the busiest rank computes, so transfers and bubbles together.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.bench.data_parallel import LEARNING_RATE, kept_bytes, run_once
from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.measure import devices
from stepgauge.measure.environment import device_name, environment
from stepgauge.measure.timing import time_phases
from stepgauge.runtime.world import joined_world
from stepgauge.spec.hardware import peaks
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.stages import said
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for
from stepgauge.train.layout import build_layout_step, build_user_layout_step, stages_of
from stepgauge.train.precision import unavailable
from stepgauge.train.rank_share import RankShare
from stepgauge.train.step import TrainingStep

Phases = dict[str, Callable[[], None]]
Spans = list[tuple[str, float, float]]


def check(spec: LayoutSpec) -> None:
    """Raises ValueError for what the spec asks but the machine has not, before ranks are started."""
    if reason := unavailable(spec.precision, torch.device(spec.device)):
        raise ValueError(reason)
    gpus = torch.cuda.device_count()
    if spec.device.startswith("cuda") and joined_world() is None and spec.ranks > gpus:
        raise ValueError(
            f"layout {spec.layout!r} has {spec.ranks} ranks; this machine has {gpus} GPUs, one a rank"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank measured: ms of each phase, one value a step; ms of steps without an axis'
    communication, by the axis; bytes by name; when the actions of a pipeline ran; the optimizer's
    name; the blocks of each stage.
    """

    phases: dict[str, list[float]]
    without_axis: dict[str, list[float]]
    bytes: dict[str, int]
    spans: Spans
    optimizer: str
    stages: Sequence[range]

    @property
    def busy_ms(self) -> float:
        return sum(end - start for _, start, end in self.spans)


def measure(spec: LayoutSpec) -> RankFigures:
    """Runs on every rank. Raises what torch raises: out of memory, mostly."""
    try:
        return _measure(spec)
    finally:
        devices.free_unused_memory(torch.device(spec.device))


def _measure(spec: LayoutSpec) -> RankFigures:
    world = joined_world()
    assert world is not None, "ranks run in a world"
    device = world.device(spec.device)
    is_ours = not isinstance(spec.model, UserModel)
    stages = stages_of(spec, spec.axes, device) if is_ours else []
    step, batches = _build(spec, RankShare.of(spec.axes, world.rank), device, stages)
    phases = phases_of(step, batches)
    initial = devices.allocated_memory(device)
    with step.precision.matmul_mode():
        run_once(phases)  # optimizer state, communicators and libraries come into being
        devices.reset_peak_memory(device)
        times = time_phases(phases, device, warmup=spec.warmup - 1, steps=spec.steps)
        spans = step.parallel.spans() if step.parallel.spans else []
        kept = kept_bytes(step, phases, device, initial, has_graphs=spec.cuda_graphs)
        # Last: ranks that do not talk have different weights afterwards.
        without_axis = _without_axes(step, phases, device, spec.steps)
    named = [(str(action), start, end) for action, start, end in spans]
    return RankFigures(
        phases=times,
        without_axis=without_axis,
        bytes=kept,
        spans=named,
        optimizer=step.optimizer_name,
        stages=stages,
    )


def _build(
    spec: LayoutSpec, place: RankShare, device: torch.device, stages: Sequence[range]
) -> tuple[TrainingStep, list[Sequence[Any]]]:
    """This rank's step, and its batches, whose gradients add up. All ranks must call it."""
    if isinstance(spec.model, UserModel):
        built = build_user_layout_step(spec, layout=spec.axes, device=device, lr=LEARNING_RATE)
        every = range(spec.accumulation)
        return built.step, [built.arguments(n * place.ranks + place.rank) for n in every]
    step = build_layout_step(
        spec, layout=spec.axes, device=device, recording=True, stages=stages, lr=LEARNING_RATE
    )
    return step, _batches(spec, place, device)


def _batches(spec: LayoutSpec, place: RankShare, device: torch.device) -> list[Sequence[Tensor]]:
    """This rank's rows of each batch whose gradients add up."""
    seeds = (spec.seed + 1 + number for number in range(spec.accumulation))
    batches = (batch_for(spec.network, spec.batch, seed) for seed in seeds)
    return [[part.to(device) for part in place.shares(batch)] for batch in batches]


def phases_of(step: TrainingStep, batches: Sequence[Sequence[Any]]) -> Phases:
    """The phases of a step. Forward and backward are one where a schedule mixes them, and where
    several batches follow each other.
    """
    if len(batches) == 1:
        return step.phases(batches[0], synchronize=True)

    def forward_and_backward() -> None:
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else step.parallel.no_sync():
                step.gradients(batch, batches=len(batches))

    return {
        "forward_and_backward": forward_and_backward,
        "synchronize": step.synchronize,
        "optimizer": step.update,
    }


def _without_axes(
    step: TrainingStep, phases: Phases, device: torch.device, steps: int
) -> dict[str, list[float]]:
    """ms of the step without the communication of an axis, of those that can be left out."""
    parallel = step.parallel
    contexts = dict(parallel.without_axis)
    if parallel.without_communication is not None:
        contexts["data"] = parallel.without_communication
    found = {}
    for axis in sorted(contexts, reverse=True):
        with contexts[axis]():
            found[axis] = time_phases(phases, device, warmup=2, steps=steps)["step"]
    return found


def record(spec: LayoutSpec, ranks: list[RankFigures]) -> Record:
    """One record of all ranks' figures: of each step the slowest rank, of bytes the most."""
    phases = {name: slowest([rank.phases[name] for rank in ranks]) for name in ranks[0].phases}
    metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in phases.items()}
    if not isinstance(spec.model, UserModel):  # of which tokens are not known
        metrics |= _rates(spec, phases["step"])
    medians = [statistics.median(rank.phases["step"]) for rank in ranks]
    metrics["rank_spread_ms"] = Sample.exact(max(medians) - min(medians), "ms")
    exposed = _exposed(spec, ranks, metrics["step_ms"].median)
    metrics |= {f"{name}_ms": Sample.exact(ms, "ms") for name, ms in exposed.items()}
    names = ranks[0].bytes
    for name in names:
        metrics[name] = Sample.exact(max(rank.bytes[name] for rank in ranks), "bytes")
    by_rank = {f"rank_{n}": [float(rank.bytes[n]) for rank in ranks] for n in names}
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        series={"rank_step_ms": medians, **by_rank},
        tables=_spans(ranks),
        environment={**environment(torch.device(spec.device)), "optimizer": ranks[0].optimizer},
        note="; ".join(filter(None, (_cut(spec, ranks[0]), _left_out(spec, ranks[0])))),
    )


def _exposed(spec: LayoutSpec, ranks: list[RankFigures], step_ms: float) -> dict[str, float]:
    """ms by name: what each axis costs the step beside computing. Of a pipeline, in the last step."""
    found = {}
    for axis in ranks[0].without_axis if spec.ranks > 1 else ():
        without = statistics.median(slowest([rank.without_axis[axis] for rank in ranks]))
        found[f"without_{axis}"], found[f"{axis}_exposed"] = without, step_ms - without
    if ranks[0].spans:
        last = max(rank.phases["forward_and_backward"][-1] for rank in ranks)
        busiest = max(rank.busy_ms for rank in ranks) * spec.accumulation
        found["busiest_rank"], found["pipeline_exposed"] = busiest, last - busiest
    return found


def _rates(spec: LayoutSpec, step_ms: list[float]) -> dict[str, Sample]:
    """Tokens of all ranks, and FLOPs of each, by the second."""
    model = spec.network
    flops = spec.accumulation * model.step_flops(batch=spec.batch, sequence=model.context_length)
    rates = {
        "tokens_per_s": Sample.of((spec.tokens_per_step / ms * 1e3 for ms in step_ms), "tokens/s"),
        "tflop_per_s": Sample.of((flops / spec.ranks / ms / 1e9 for ms in step_ms), "TFLOP/s"),
    }
    known = peaks(device_name(torch.device(spec.device)))
    if peak := known.of(spec.precision) if known else None:
        of_peak = (flops / spec.ranks / (ms / 1e3) / peak for ms in step_ms)
        rates["mfu"] = Sample.of(of_peak, "fraction of dense peak")
    return rates


def _cut(spec: LayoutSpec, rank: RankFigures) -> str:
    """How the network is cut, where that was found out by measuring."""
    return f"{said(rank.stages, 'blocks')}, by measured time" if spec.needs_times else ""


def _left_out(spec: LayoutSpec, rank: RankFigures) -> str:
    """Why an axis has no exposed time."""
    if spec.axes.replicas == 1 or "data" in rank.without_axis:
        return ""
    return f"data exposed is not measured: {spec.axes.wrapper} cannot compute without its communication"


def _spans(ranks: list[RankFigures]) -> dict[str, list[list[Any]]]:
    rows = [[number, *span] for number, rank in enumerate(ranks) for span in rank.spans]
    return {"spans": [["rank", "action", "start ms", "end ms"], *rows]} if rows else {}


JOB = OnRanks(measure=measure, record=record, shared=True)
