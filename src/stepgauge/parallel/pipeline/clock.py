"""When each action of a step ran: by the host's clock, or by events on a GPU's stream."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgauge.spec.plan.pipeline import Action


class Clock:
    """Marks of one step after another; those of the last one are kept.

    level   where it is given, also called at the start and the end of each action: what is held
    levels  what it gave in the last step, two values an action
    """

    def __init__(self, device: torch.device):
        self.level: Callable[[], float] | None = None
        self.levels: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._begin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self.levels = []
        self._marks, self._begin = [], self._now()

    @contextlib.contextmanager
    def of(self, action: Action) -> Iterator[None]:
        start = self._now()
        self._look()
        yield
        self._look()
        self._marks.append((action, start, self._now()))

    def _look(self) -> None:
        if self.level is not None:
            self.levels.append(self.level())

    def spans(self) -> list[tuple[Action, float, float]]:
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(action, self._ms(start), self._ms(end)) for action, start, end in self._marks]

    def _ms(self, mark: Any) -> float:
        return self._begin.elapsed_time(mark) if self._on_gpu else (mark - self._begin) * 1e3
