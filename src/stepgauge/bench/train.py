"""Trains a TrainSpec to its end: `run` returns its record, with the loss curve as series."""

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
from stepgauge.spec.whole_file import write_whole
from stepgauge.train.build import build_step
from stepgauge.train.loop import CURVE_FILE, LossPoint, Trainer, read_curve
from stepgauge.train.rank_share import SINGLE_PROCESS, RankShare
from stepgauge.train.step import TrainingStep
from stepgauge.train.task import Task
from stepgauge.train.text_task import text_task
from stepgauge.train.user_task import user_task

# The peak is predicted only if it could exceed the free memory: activations of a small batch are a
# few times the size of the parameters.
MOST_PEAK_PER_STATE = 8
UNFINISHED = "unfinished.json"  # the record of a run until it is saved, without the curve
KEEP_EVERY_S = 5.0


def run(
    spec: TrainSpec,
    *,
    folder: Path,
    report: Callable[[LossPoint], None] = lambda point: None,
    resumed: Callable[[int], None] = lambda step: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> Record:
    """Trains in the folder, from its newest checkpoint if it has one, and returns the record. A run
    that had already finished has no rate.

    All ranks must call it; each returns a record with its own time and memory.

    The folder has what `unfinished` turns into a record, until the caller has saved this one.

    Raises CorpusError, CheckpointError, DivergedError, and ValueError if a user's model is wrong.
    """
    place = _place(spec)
    task = build_task(spec, place)
    if task.note:
        note(task.note)
    devices.reset_peak_memory(task.step.device)
    results = _Results(spec, task, folder)
    keep = results.keep if place.writes else lambda curve, trained: None
    return results.record(*Trainer(spec, task, folder, place=place).run(report, resumed, keep))


class _Results:
    """The record of a run that begins now. While it runs, the folder has the record without the curve."""

    def __init__(self, spec: TrainSpec, task: Task, folder: Path):
        self.spec, self.task, self.path = spec, task, folder / UNFINISHED
        self.start, self.kept = time.perf_counter(), -KEEP_EVERY_S
        self.environment = {**environment(torch.device(spec.device)), **task.environment}

    def record(self, curve: Sequence[LossPoint], trained: int) -> Record:
        seconds = time.perf_counter() - self.start
        metrics, series = _losses(curve, self.task.loss_unit, self.task.held_out_unit)
        if trained:
            metrics |= _rates(self.task, trained, seconds)
        peaks = devices.peak_memory(self.task.step.device)
        metrics |= {name: Sample.exact(value, "bytes") for name, value in peaks.items()}
        return Record.of(self.spec, metrics=metrics, series=series, environment=self.environment)

    def keep(self, curve: Sequence[LossPoint], trained: int) -> None:
        """Writes the record so far, every few seconds and after each evaluation."""
        seconds = time.perf_counter() - self.start
        if seconds - self.kept >= KEEP_EVERY_S or curve[-1].held_out is not None:
            without_curve = dataclasses.replace(self.record(curve, trained), series={})
            write_whole(self.path, without_curve.to_json())
            self.kept = seconds


def unfinished(folder: Path) -> Record | None:
    """Returns the record of a run in the folder that stopped before it was saved, with its curve up to
    there; None if there is none or it is damaged. The rate may be a few seconds older than the curve.
    """
    curve = read_curve(folder / CURVE_FILE)
    try:
        record = Record.from_json((folder / UNFINISHED).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a power cut may leave an empty file
        return None
    if not curve:
        return None
    units = [
        record.metrics[n].unit if n in record.metrics else "" for n in ("last_loss", "held_out")
    ]
    metrics, series = _losses(curve, *units)
    note = f"stopped at step {len(curve)} of {record.spec['steps']}"
    metrics = {**record.metrics, **metrics}
    return dataclasses.replace(record, metrics=metrics, series=series, note=note)


def require_memory(spec: TrainSpec) -> None:
    """Raises MemoryError if the ranks do not fit in this host's memory.

    It compares their parameters, gradients and optimizer state with the free memory. If these take a
    large part of it, it also predicts the peak of a step.
    """
    if spec.device != "cpu":
        return
    layout = spec.parsed_layout
    num_copies = 1 if WRAPPERS[layout.wrapper].stage else layout.num_replicas
    state_bytes = least_bytes(spec) * num_copies
    devices.require_host_memory(state_bytes)
    free = devices.available_host_bytes()
    if free is None or state_bytes * MOST_PEAK_PER_STATE < free or spec.compile != "off":
        return
    step = as_kind(MemorySpec, as_kind(WorkSpec, spec, batch=spec.batch // layout.data))
    if peak := run_isolated(memory.predicted, step).median("peak_bytes"):
        devices.require_host_memory(int(peak) * num_copies)


def _rates(task: Task, steps: int, seconds: float) -> dict[str, Sample]:
    if task.tokens is None:
        return {"steps_per_s": Sample.exact(steps / seconds, "steps/s")}
    return {"tokens_per_s": Sample.exact(steps * task.tokens / seconds, "tokens/s")}


def _losses(
    curve: Sequence[LossPoint], loss_unit: str, held_out_unit: str
) -> tuple[dict[str, Sample], dict[str, list[float]]]:
    """Returns the first and last loss as metrics, and the whole curve as series."""
    metrics = {
        "first_loss": Sample.exact(curve[0].loss, loss_unit),
        "last_loss": Sample.exact(curve[-1].loss, loss_unit),
    }
    series: dict[str, list[float]] = {
        "step": [point.step for point in curve],
        "loss": [point.loss for point in curve],
    }
    evaluated = {point.step: point.held_out for point in curve if point.held_out is not None}
    if evaluated:
        *_, last = evaluated.values()
        metrics["held_out"] = Sample.exact(last, held_out_unit)
        series["held_out_step"] = [*evaluated]
        name = "held_out_bits_per_byte" if held_out_unit else "held_out_loss"
        series[name] = [*evaluated.values()]
    return metrics, series


def _place(spec: TrainSpec) -> RankShare:
    """Returns this process's share of the run."""
    world = joined_world()
    if spec.ranks == 1 or world is None:
        return SINGLE_PROCESS
    return RankShare.of(spec.parsed_layout, world.rank)


def build_task(spec: TrainSpec, place: RankShare = SINGLE_PROCESS) -> Task:
    """Returns what this process trains. All ranks must call it."""
    if place is SINGLE_PROCESS:
        return _text_task(spec, place, build_step) if spec.is_text else user_task(spec)
    # Imported late because torch's distributed modules take a while to load.
    from stepgauge.train.layout import build_layout_step
    from stepgauge.train.user_layout import over_layout

    device = this_world().device(spec.device)
    here = dataclasses.replace(spec, device=str(device))
    if spec.is_text:
        build = functools.partial(build_layout_step, layout=spec.parsed_layout, device=device)
        return _text_task(here, place, build)
    return user_task(here, place=place, spread=over_layout(here, spec.parsed_layout, device))


def _text_task(spec: TrainSpec, place: RankShare, build: Callable[..., TrainingStep]) -> Task:
    """Returns the task of a text run. A memory budget is solved when the step is built, because the
    tokenizer's vocabulary is known only then; the solution goes into the task's environment.
    """
    solutions = []

    def build_solved(full: TrainSpec, **settings: Any) -> TrainingStep:
        solutions.append(solve(full))
        return build(full, recompute=solutions[-1].plan, **settings)

    task = text_task(spec, place=place, build=build_solved)
    return dataclasses.replace(
        task, environment={**task.environment, **solutions[-1].environment()}
    )
