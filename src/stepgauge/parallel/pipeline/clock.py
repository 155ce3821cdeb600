"""Records when each action of a step ran, by the host's clock or by events on a GPU's stream."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgauge.spec.plan.pipeline import Action


class Clock:
    """Keeps the start and end of each action of the last step.

    level   if set, called at the start and the end of each action, for example to read the memory
            in use
    levels  the values that `level` returned in the last step, two per action
    """

    def __init__(self, device: torch.device):
        self.level: Callable[[], float] | None = None
        self.levels: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._begin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        """Starts a step and forgets the last one."""
        self.levels = []
        self._marks, self._begin = [], self._now()

    @contextlib.contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Records the action that runs inside the context."""
        start = self._now()
        self._record_level()
        yield
        self._record_level()
        self._marks.append((action, start, self._now()))

    def spans(self) -> list[tuple[Action, float, float]]:
        """Returns each action with its start and end, in ms from the beginning of the step."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(action, self._ms(start), self._ms(end)) for action, start, end in self._marks]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _record_level(self) -> None:
        if self.level is not None:
            self.levels.append(self.level())

    def _ms(self, mark: Any) -> float:
        return self._begin.elapsed_time(mark) if self._on_gpu else (mark - self._begin) * 1e3
