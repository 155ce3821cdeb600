"""A TrainSpec run to its end: `run` gives its record, with the loss curve as series."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench import memory
from stepgauge.bench.build import least_bytes
from stepgauge.bench.checkpoint_budget import solve
from stepgauge.measure import devices
from stepgauge.measure.environment import environment
from stepgauge.runtime.workers import run_isolated
from stepgauge.runtime.world import joined_world, this_world
from stepgauge.spec.fields import as_kind
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import build_step
from stepgauge.train.loop import LossPoint, Trainer
from stepgauge.train.rank_share import SINGLE_PROCESS, RankShare
from stepgauge.train.step import TrainingStep
from stepgauge.train.task import Task
from stepgauge.train.text_task import text_task
from stepgauge.train.user_task import user_task

NEAR = 8  # activations of a small batch are a few times the parameters


def run(
    spec: TrainSpec,
    *,
    folder: Path,
    report: Callable[[LossPoint], None] = lambda point: None,
    resumed: Callable[[int], None] = lambda step: None,
) -> Record:
    """Trains in the folder, from its newest checkpoint if it has one. A run that was at its end
    gives no rate.

    Of several ranks, every one must call it, and each gives the record of its own share's time and
    memory.

    Raises CorpusError, CheckpointError, DivergedError; ValueError of a user's model.
    """
    place = _place(spec)
    task = build_task(spec, place)
    devices.reset_peak_memory(task.step.device)
    start = time.perf_counter()
    curve, trained = Trainer(spec, task, folder, place=place).run(report, resumed)
    seconds = time.perf_counter() - start
    metrics, series = _losses(curve, task)
    if trained:
        metrics |= _rates(task, trained, seconds)
    peaks = devices.peak_memory(task.step.device)
    metrics |= {name: Sample.exact(value, "bytes") for name, value in peaks.items()}
    return Record.of(
        spec,
        metrics=metrics,
        series=series,
        environment={**environment(torch.device(spec.device)), **task.environment},
    )


def require_memory(spec: TrainSpec) -> None:
    """Raises MemoryError where the ranks do not fit in this host's memory: their parameters,
    gradients and optimizer state, or where these come near it the predicted peak of a step.
    """
    if spec.device != "cpu" or isinstance(spec.model, UserModel):
        return
    whole = 1 if WRAPPERS[spec.parsed_layout.wrapper].stage else spec.parsed_layout.num_replicas
    least = least_bytes(spec) * whole
    devices.require_host_memory(least)
    free = devices.available_host_bytes()
    if free is None or least * NEAR < free or spec.compile != "off":
        return
    work = as_kind(WorkSpec, spec, batch=spec.batch // spec.parsed_layout.data)
    step = as_kind(MemorySpec, work)
    if peak := run_isolated(memory.predicted, step).median("peak_bytes"):
        devices.require_host_memory(int(peak) * whole)


def _rates(task: Task, steps: int, seconds: float) -> dict[str, Sample]:
    if task.tokens is None:
        return {"steps_per_s": Sample.exact(steps / seconds, "steps/s")}
    return {"tokens_per_s": Sample.exact(steps * task.tokens / seconds, "tokens/s")}


def _losses(
    curve: Sequence[LossPoint], task: Task
) -> tuple[dict[str, Sample], dict[str, list[float]]]:
    """The curve's ends as metrics, and the curve as series."""
    metrics = {
        "first_loss": Sample.exact(curve[0].loss, task.loss_unit),
        "last_loss": Sample.exact(curve[-1].loss, task.loss_unit),
    }
    series: dict[str, list[float]] = {
        "step": [point.step for point in curve],
        "loss": [point.loss for point in curve],
    }
    evaluated = {point.step: point.held_out for point in curve if point.held_out is not None}
    if evaluated:
        *_, last = evaluated.values()
        metrics["held_out"] = Sample.exact(last, task.held_out_unit)
        series["held_out_step"] = [*evaluated]
        of_text = "held_out_bits_per_byte"
        series[of_text if task.held_out_unit else "held_out_loss"] = [*evaluated.values()]
    return metrics, series


def _place(spec: TrainSpec) -> RankShare:
    """This process's share of the run."""
    world = joined_world()
    return (
        SINGLE_PROCESS
        if spec.ranks == 1 or world is None
        else RankShare.of(spec.parsed_layout, world.rank)
    )


def build_task(spec: TrainSpec, place: RankShare = SINGLE_PROCESS) -> Task:
    """What this process, of a run of one or of its rank, trains. All ranks must call it."""
    is_user = isinstance(spec.model, UserModel)
    if place is SINGLE_PROCESS:
        return user_task(spec) if is_user else _text_task(spec, place, build_step)
    # torch's parts of it take a while to load.
    from stepgauge.train.layout import build_layout_step
    from stepgauge.train.user_layout import over_layout

    device = this_world().device(spec.device)
    here = dataclasses.replace(spec, device=str(device))
    if is_user:
        return user_task(here, place=place, spread=over_layout(here, spec.parsed_layout, device))
    build = functools.partial(build_layout_step, layout=spec.parsed_layout, device=device)
    return _text_task(here, place, build)


def _text_task(spec: TrainSpec, place: RankShare, build: Callable[..., TrainingStep]) -> Task:
    """With what backward computes again, where a budget asks for it, solved for the tokenizer's
    vocabulary, and told.
    """
    solutions = []

    def build_solved(full: TrainSpec, **settings: Any) -> TrainingStep:
        solutions.append(solve(full))
        return build(full, recompute=solutions[-1].plan, **settings)

    task = text_task(spec, place=place, build=build_solved)
    return dataclasses.replace(
        task, environment={**task.environment, **solutions[-1].environment()}
    )
