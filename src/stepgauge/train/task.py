"""What a run trains: a step, its batches, and how the held-out loss comes about."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepgauge.train.step import TrainingStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One rank's share of a training run.

    micro_batches  of step 0, 1, ...: each the arguments of step.forward; a pure function of the
                   number, so that a run that goes on sees the batches that it would have seen
    evaluate       the held-out loss, in `held_out_unit`; None where nothing is held out
    decides        what the curve depends on beside the spec: a checkpoint goes on under the same
    environment    what the record says of it
    tokens         of a step on all ranks; None where they are not known
    """

    step: TrainingStep
    micro_batches: Callable[[int], Iterable[Sequence[Any]]]
    evaluate: Callable[[], float] | None
    decides: Mapping[str, Any]
    environment: Mapping[str, Any]
    loss_unit: str = ""
    held_out_unit: str = ""
    tokens: int | None = None
