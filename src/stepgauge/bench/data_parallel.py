"""A DataParallelSpec run on ranks and timed: `JOB` makes its record of what all ranks gave."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgauge.bench.ranks import OnRanks, slowest
from stepgauge.bench.traced import STEPS, Traced, trace_steps
from stepgauge.measure import devices, footprint
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import time_phases
from stepgauge.parallel.graphed_gradients import recorded
from stepgauge.parallel.recording import CudaGraphs
from stepgauge.parallel.training import Parallelise
from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.runtime.world import joined_world
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, sent_bytes
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.precision import PRECISIONS, REDUCE_DTYPES, unavailable
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_model import build_user_step

LEARNING_RATE = 1e-4  # as bench step


def check(spec: DataParallelSpec) -> None:
    """Raises ValueError for what the spec asks but the machine has not, before ranks are started."""
    reason = unavailable(spec.precision, torch.device(spec.device))
    if reason:
        raise ValueError(reason)
    gpus = torch.cuda.device_count()
    if spec.device.startswith("cuda") and joined_world() is None and spec.ranks > gpus:
        raise ValueError(f"ranks is {spec.ranks}; this machine has {gpus} GPUs, one a rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank measured. Times in ms, one value a step; bytes by name; parameters of the whole
    network; the optimizer's name.
    """

    phases: dict[str, list[float]]
    without_communication: list[float]
    communication: list[float]
    bytes: dict[str, int]
    plan: dict[str, int]
    traced: Traced | None
    parameters: int
    optimizer: str


def measure(spec: DataParallelSpec) -> RankFigures:
    """Runs on every rank. Raises what torch raises: out of memory, mostly."""
    try:
        return _measure(spec)
    finally:
        devices.free_unused_memory(torch.device(spec.device))


def _measure(spec: DataParallelSpec) -> RankFigures:
    world = joined_world()
    assert world is not None, "ranks run in a world"
    device = world.device(spec.device)
    step, batch, parameters = build(spec, device, world.rank)
    initial = devices.allocated_memory(device)
    phases = step.phases(batch, synchronize=True)
    with step.precision.matmul_mode():
        run_once(phases)  # optimizer state, communicators and libraries come into being
        devices.reset_peak_memory(device)
        times = time_phases(phases, device, warmup=spec.warmup - 1, steps=spec.steps)
        kept = kept_bytes(step, phases, device, initial, has_graphs=spec.cuda_graphs)
        traced = trace_steps(phases, device) if spec.trace else None
        without, communication = _without_and_alone(step, phases, device, spec.steps)
    return RankFigures(
        phases=times,
        without_communication=without,
        communication=communication,
        bytes=kept,
        plan=_plan(step),
        traced=traced,
        parameters=parameters,
        optimizer=step.optimizer_name,
    )


def build(
    spec: DataParallelSpec, device: torch.device, rank: int
) -> tuple[TrainingStep, Sequence[Any], int]:
    """The step of this rank, its batch, and the number of parameters. All ranks must call it."""
    autocast = PRECISIONS[spec.precision].autocast
    settings = Settings(
        bucket_mb=spec.bucket_mb,
        compute_dtype=autocast if WRAPPERS[spec.wrapper].shards("weights") else None,
        reduce_dtype=REDUCE_DTYPES[spec.reduce_dtype],
    )
    spread: Parallelise = functools.partial(parallelise, spec.wrapper, settings=settings)
    if isinstance(spec.model, UserModel):
        built = build_user_step(spec, device, parallelise=spread, lr=LEARNING_RATE)
        return built.step, built.arguments(rank), built.num_parameters
    on_device = dataclasses.replace(spec, device=str(device))
    if spec.cuda_graphs:
        context = functools.partial(PRECISIONS[spec.precision].autocasting, device)
        spread = recorded(spread, CudaGraphs(device), context)
    step = build_step(on_device, parallelise=spread, lr=LEARNING_RATE)
    batch = batch_for(spec.model, spec.batch, spec.seed + 1 + rank)
    return step, [part.to(device) for part in batch], spec.model.num_parameters


def run_once(phases: dict[str, Callable[[], None]]) -> None:
    for phase in phases.values():
        phase()


def _plan(step: TrainingStep) -> dict[str, int]:
    """Number of buckets and bytes of the last one, where there is a plan that we know."""
    buckets = getattr(step.parallel.module, "buckets", ())
    return {"buckets": len(buckets), "tail_bytes": buckets[-1].bytes} if buckets else {}


def kept_bytes(
    step: TrainingStep,
    phases: dict[str, Callable[[], None]],
    device: torch.device,
    initial: int | None,
    *,
    has_graphs: bool = False,
) -> dict[str, int]:
    """Metrics in bytes: after building, before and after the update, at the peak; and what the step
    keeps. Runs a step. What CUDA graphs keep counts in the peak, and in the rest of it.
    """
    module = step.parallel.module
    for name, phase in phases.items():
        if name != "optimizer":
            phase()
    kept = {"gradient_bytes": footprint.gradient_bytes(module)}
    before_update = devices.allocated_memory(device)
    phases["optimizer"]()
    kept["parameter_bytes"] = footprint.parameter_bytes(module)
    kept["optimizer_bytes"] = footprint.state_bytes(step.optimizer)
    after, found = devices.allocated_memory(device), devices.peak_memory(device)
    if initial is not None and before_update is not None and after is not None:
        found |= {
            "initial_bytes": initial,
            "before_update_bytes": before_update,
            "after_update_bytes": after,
        }
    if "peak_bytes" in found:
        found["peak_bytes"] += devices.kept_by_graphs(device) if has_graphs else 0
        found["rest_bytes"] = found["peak_bytes"] - sum(kept.values())
    return kept | found


def _without_and_alone(
    step: TrainingStep, phases: dict[str, Callable[[], None]], device: torch.device, steps: int
) -> tuple[list[float], list[float]]:
    """ms of the same step with communication off, and of its communication alone; empty where that
    cannot be had.
    """
    without: list[float] = []
    alone: list[float] = []
    parallel = step.parallel
    if parallel.communicate is not None:
        for name in ("forward", "backward", "synchronize"):
            phases[name]()
        alone = time_phases({"communication": parallel.communicate}, device, warmup=2, steps=steps)[
            "step"
        ]
        phases["optimizer"]()
    # Last: ranks that do not talk have different weights afterwards.
    if parallel.without_communication is not None:
        with parallel.without_communication():
            without = time_phases(phases, device, warmup=2, steps=steps)["step"]
    return without, alone


def record(spec: DataParallelSpec, ranks: list[RankFigures]) -> Record:
    """One record of all ranks' figures: of each step the slowest rank, of bytes the most."""
    phases = {name: slowest([rank.phases[name] for rank in ranks]) for name in ranks[0].phases}
    metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in phases.items()}
    if not isinstance(spec.model, UserModel):  # of which tokens are not known
        tokens = spec.batch * spec.model.context_length * spec.ranks
        rates = (tokens / ms * 1e3 for ms in phases["step"])
        metrics["tokens_per_s"] = Sample.of(rates, "tokens/s")
    medians = [statistics.median(rank.phases["step"]) for rank in ranks]
    metrics["rank_spread_ms"] = Sample.exact(max(medians) - min(medians), "ms")
    metrics |= _communication(spec, ranks, metrics["step_ms"].median)
    for name in ranks[0].bytes:
        metrics[name] = Sample.exact(max(rank.bytes[name] for rank in ranks), "bytes")
    traced = [rank.traced for rank in ranks if rank.traced]
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        series={
            "rank_step_ms": medians,
            **{
                f"rank_{name}": [float(rank.bytes[name]) for rank in ranks]
                for name in ranks[0].bytes
            },
            **(traced[0].tracks if traced else {}),
        },
        environment={**environment(torch.device(spec.device)), "optimizer": ranks[0].optimizer},
    )


def _communication(
    spec: DataParallelSpec, ranks: list[RankFigures], step_ms: float
) -> dict[str, Sample]:
    metrics: dict[str, Sample] = {}
    if ranks[0].communication:
        metrics["communication_ms"] = Sample.of(
            slowest([rank.communication for rank in ranks]), "ms"
        )
    if ranks[0].without_communication:
        metrics["without_communication_ms"] = Sample.of(
            slowest([rank.without_communication for rank in ranks]), "ms"
        )
        metrics["exposed_ms"] = Sample.exact(
            step_ms - metrics["without_communication_ms"].median, "ms"
        )
    if traced := [rank.traced for rank in ranks if rank.traced]:
        metrics |= _overlap(traced)
    sent = _sent_bytes(spec, ranks[0].parameters)
    plan = {
        n: Sample.exact(value, "bytes" if n == "tail_bytes" else "")
        for n, value in ranks[0].plan.items()
    }
    return {**metrics, **plan, "sent_bytes": Sample.exact(sent, "bytes")}


def _overlap(ranks: list[Traced]) -> dict[str, Sample]:
    found = [rank.overlap for rank in ranks]
    return {
        "overlap_ratio": Sample.of((o.ratio for o in found), "of communication"),
        "traced_exposed_us": Sample.of((o.exposed_us / STEPS for o in found), "us"),
        "traced_communication_us": Sample.of((o.communication_us / STEPS for o in found), "us"),
        "profiled_step_ms": Sample.of(slowest([rank.step_ms for rank in ranks]), "ms"),
    }


def _sent_bytes(spec: DataParallelSpec, values: int) -> float:
    precision = PRECISIONS[spec.precision]
    kept = precision.parameters.itemsize
    travelling = (
        precision.autocast.itemsize
        if precision.autocast and WRAPPERS[spec.wrapper].shards("weights")
        else kept
    )
    narrowed = REDUCE_DTYPES[spec.reduce_dtype]
    return sent_bytes(
        spec.wrapper,
        gradient_bytes=values * (min(narrowed.itemsize, travelling) if narrowed else travelling),
        weight_bytes=values * travelling,
        ranks=spec.ranks,
    )


JOB = OnRanks(measure=measure, record=record, shared=True)
