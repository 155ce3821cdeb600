"""A training task: the step, its batches, and how the held-out loss is computed."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepgauge.train.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One rank's share of a training run.

    micro_batches  step number 0, 1, ... -> the step's micro-batches, each the arguments of
                   step.forward. A pure function of the number, so that a resumed run sees the same
                   batches as one that was not interrupted
    evaluate       computes the held-out loss in `held_out_unit`; None if nothing is held out
    curve_fields   values that determine the loss curve in addition to the spec; a checkpoint can be
                   resumed only with the same values
    environment    entries of the record's environment
    tokens         per step on all ranks; None if unknown
    note           a sentence for the user, given before training; "" if there is none
    """

    step: TrainingStep
    micro_batches: Callable[[int], Iterable[Sequence[Any]]]
    evaluate: Callable[[], float] | None
    curve_fields: Mapping[str, Any]
    environment: Mapping[str, Any]
    loss_unit: str = ""
    held_out_unit: str = ""
    tokens: int | None = None
    note: str = ""
