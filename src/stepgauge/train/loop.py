"""The training loop, which resumes where a killed run stopped."""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from stepgauge.spec.kinds import completed
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.train.checkpoint import CheckpointError, Checkpoints, require_same
from stepgauge.train.rank_share import SINGLE_PROCESS, RankShare
from stepgauge.train.task import Task

CURVE_FILE = "curve.jsonl"
# Fields that may change when a run is resumed, because the loss curve does not depend on them.
FREE_FIELDS = (
    "model", "size", "corpus", "device", "keep", "checkpoint_every", "compile", "checkpointing",
    "checkpoint_blocks", "memory_gib", "data_parallel", "ranks", "layout", "balance", "bucket_mb",
)  # fmt: skip
DRAIN_EVERY = 10  # steps; reading the loss waits for the device


@dataclasses.dataclass(frozen=True)
class LossPoint:
    """One step of the loss curve. `held_out` is the held-out loss if it was evaluated."""

    step: int
    loss: float
    held_out: float | None = None


class DivergedError(Exception):
    """The loss is no longer a number."""


def checkpoints_in(folder: Path) -> Checkpoints:
    """Returns the checkpoints of the training run in the folder."""
    return Checkpoints(folder / "checkpoints")


class Trainer:
    """A training run in a folder: its task, its loss curve on disk and its checkpoints.

    Each of several ranks has a Trainer. All see the same folder, and only rank 0 writes the curve.
    """

    def __init__(
        self, spec: TrainSpec, task: Task, folder: Path, *, place: RankShare = SINGLE_PROCESS
    ):
        self.spec, self.task, self.step, self.place = spec, task, task.step, place
        self.checkpoints = checkpoints_in(folder)
        self.curve_path = folder / CURVE_FILE
        # The peak learning rates of the schedule; None for an optimizer without a learning rate.
        self.peak_rates = [group.get("lr") for group in self.step.optimizer.param_groups]

    def run(
        self,
        report: Callable[[LossPoint], None],
        resumed: Callable[[int], None] = lambda step: None,
        keep: Callable[[list[LossPoint], int], None] = lambda curve, trained: None,
    ) -> tuple[list[LossPoint], int]:
        """Trains from the newest complete checkpoint to the last step. Returns the whole curve, and
        the number of steps done in this call.

        resumed  called with the step of the checkpoint
        keep     called with what `run` would return if it ended now, whenever new points are on disk
        report   called afterwards with each new point

        Raises CheckpointError and DivergedError.
        """
        self.curve_path.parent.mkdir(parents=True, exist_ok=True)
        start = self._resume()
        self.place.wait()  # all ranks must have read the curve before rank 0 truncates it
        curve = self._truncate_curve(start) if self.place.writes else self._curve_until(start)
        if start:
            resumed(start)
        pending: list[tuple[int, Tensor]] = []
        path = self.curve_path if self.place.writes else Path(os.devnull)
        with path.open("a") as file, self.step.precision.matmul_mode():
            for done in range(start + 1, self.spec.steps + 1):
                pending.append((done, self._train_step(done - 1)))
                is_last = done == self.spec.steps
                evaluates = is_last or done % self.spec.evaluate_every == 0
                saves = is_last or done % self.spec.checkpoint_every == 0
                if evaluates or saves or done == start + 1 or done % DRAIN_EVERY == 0:
                    points = self._drain(pending, self._held_out() if evaluates else None)
                    file.writelines(map(_line, points))
                    file.flush()
                    curve += points
                    keep(curve, done - start)
                    for point in points:
                        report(point)
                if saves:
                    self._save(done, file)
        return curve, self.spec.steps - start

    def _train_step(self, number: int) -> Tensor:
        """Makes one optimizer step over this rank's share of `accumulation` micro-batches. Returns
        their mean loss, on the device.
        """
        groups = self.step.optimizer.param_groups
        for group, peak in zip(groups, self.peak_rates, strict=True):
            if peak is not None:
                group["lr"] = self.spec.learning_rate_at(number, highest=peak)
        micro_batches = self.task.micro_batches(number)
        loss = self.step.accumulate(micro_batches, count=self.spec.accumulation)
        self.step.update()
        return loss

    def _held_out(self) -> float | None:
        return self.task.evaluate() if self.task.evaluate else None

    def _drain(self, pending: list[tuple[int, Tensor]], held_out: float | None) -> list[LossPoint]:
        """Reads the pending losses from the device and returns their points, the last of them with
        the held-out loss. Raises DivergedError for a loss that is not finite.
        """
        losses = self.place.mean(torch.stack([loss for _, loss in pending])).tolist()
        points = [LossPoint(step, loss) for (step, _), loss in zip(pending, losses, strict=True)]
        pending.clear()
        for point in points:
            if not math.isfinite(point.loss):
                problem = f"the loss at step {point.step} is {point.loss}"
                if point.step == 1:
                    raise DivergedError(
                        f"{problem} before any update, so the data or the initial weights cause it; "
                        f"a mean over a micro-batch without targets, for example, is nan"
                    )
                raise DivergedError(f"{problem}; lower --learning-rate")
        if held_out is not None and not math.isfinite(held_out):
            raise DivergedError(
                f"the held-out loss at step {points[-1].step} is {held_out}; lower --learning-rate"
            )
        points[-1] = dataclasses.replace(points[-1], held_out=held_out)
        return points

    def _about(self) -> dict[str, Any]:
        """Returns the fields that determine the loss curve; a checkpoint can be resumed only with
        the same values.
        """
        spec = dataclasses.asdict(self.spec)
        for free in FREE_FIELDS:
            del spec[free]
        return {**spec, **self.task.curve_fields}

    def _save(self, step: int, curve_file: IO[str]) -> None:
        """Saves a checkpoint, after the curve up to its step."""
        if self.place.writes:
            os.fsync(curve_file.fileno())
        parallel = self.step.parallel
        assert parallel.state is not None, "every wrapper that can be trained with has a state"
        about, keep, scaler = self._about(), self.spec.keep, self.step.scaler.state_dict()
        if parallel.shares is not None:
            share = {**parallel.shares(), "scaler": scaler}
            self.checkpoints.save_shares(step, share, about, keep=keep)
        else:
            state = {**parallel.state(), "scaler": scaler}
            if self.place.writes:
                self.checkpoints.save(step, state, about, keep=keep)
        self.place.wait()

    def _resume(self) -> int:
        """Loads the newest complete checkpoint and returns its step, or 0 if there is none.

        A checkpoint whose steps are not all in the curve file is skipped, because the curve would
        have a gap.
        """
        curve_end = len(read_curve(self.curve_path))
        for step, folder, about in self.checkpoints.newest():
            self._require_same_run(step, about, folder)
            if step <= curve_end:
                self._load(folder)
                return step
            warnings.warn(
                f"checkpoint {folder} is skipped, because the loss curve ends at step {curve_end}",
                stacklevel=2,
            )
        return 0

    def _load(self, folder: Path) -> None:
        """Restores the state of a checkpoint."""
        parallel = self.step.parallel
        read = self.checkpoints.open if parallel.loads_by_name else self.checkpoints.load
        state = read(folder)
        state["optimizer"].setdefault("state", {})  # empty mappings are not stored
        assert parallel.load is not None, "every wrapper that can be trained with loads a state"
        parallel.load(state)
        self.step.scaler.load_state_dict(state.get("scaler", {}))

    def _require_same_run(self, done: int, about: Mapping[str, Any], folder: Path) -> None:
        """Raises CheckpointError if the checkpoint belongs to another run than this one."""
        wanted = self._about()
        # Fields that did not exist when the checkpoint was written had their default's meaning.
        before = ModelSpec().architecture() | completed(self.spec.kind, about)
        before = {name: before[name] for name in before.keys() & (about.keys() | wanted.keys())}
        require_same({**before, "steps": self.spec.steps}, wanted, folder)
        self._require_same_rates(done, before["steps"], folder)

    def _require_same_rates(self, done: int, steps: int, folder: Path) -> None:
        """Raises CheckpointError if a run that was planned for `steps` steps, of which `done` are
        done, cannot be resumed with the number of steps requested now.
        """
        if steps == self.spec.steps:
            return
        if self.spec.steps < done:
            raise CheckpointError(
                f"checkpoint {folder} is at step {done}, but --steps is {self.spec.steps}; increase "
                f"--steps, or choose another --out"
            )
        if self.spec.rates_depend_on_steps(done):
            raise CheckpointError(
                f"checkpoint {folder} is of a run of {steps} steps, over which the learning rate "
                f"decays, so {self.spec.steps} steps have another loss curve; use --steps {steps}, "
                f"or choose another --out (a run with --final-learning-rate 1 can be extended)"
            )

    def _curve_until(self, step: int) -> list[LossPoint]:
        return [point for point in read_curve(self.curve_path) if point.step <= step]

    def _truncate_curve(self, step: int) -> list[LossPoint]:
        """Removes the points after the step from the file, since these steps are trained again, and
        returns the others.
        """
        points = self._curve_until(step)
        partial = self.curve_path.with_suffix(".partial")
        with partial.open("w") as file:
            file.writelines(map(_line, points))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.curve_path)
        return points


def _line(point: LossPoint) -> str:
    """Returns the point's line in a curve file."""
    return json.dumps(dataclasses.asdict(point)) + "\n"


def read_curve(path: Path) -> list[LossPoint]:
    """Returns the points of a curve file, step 1, 2, ..., up to the first missing or damaged one."""
    if not path.exists():
        return []
    points: list[LossPoint] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields = json.loads(line)
            if "bits_per_byte" in fields:  # the field's name in older files
                fields["held_out"] = fields.pop("bits_per_byte")
            point = LossPoint(**fields)
        except (ValueError, TypeError):
            break
        if point.step != len(points) + 1:
            break
        points.append(point)
    return points
