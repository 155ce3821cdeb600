"""How far a list of measurements is, and how long the rest takes."""

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.progress import Task, TimeRemainingColumn
from rich.text import Text

from stepgauge.report.numbers import duration


class Pace:
    """Counts measurements and estimates how long the others take: each as long as the mean of those
    that are done. Rows that an earlier run measured count as done, but not in the mean.
    """

    def __init__(self, total: int, noun: str, clock: Callable[[], float] = time.monotonic):
        self.total, self.noun, self.done = total, noun, 0
        self._clock = clock
        self._began: float | None = None  # the running measurement
        self._num_timed, self._seconds = 0, 0.0

    def begin(self) -> None:
        """A measurement begins, and the one before it is done."""
        self.end()
        self._began = self._clock()

    def end(self) -> None:
        """The running measurement is done."""
        if self._began is not None:
            self._seconds += self._clock() - self._began
            self._num_timed += 1
            self.done += 1
            self._began = None

    def drop(self) -> None:
        """The running measurement does not count."""
        self._began = None

    def skip(self, count: int) -> None:
        """So many rows need no measurement."""
        self.done += count

    def seconds_left(self) -> float | None:
        """Returns the time that the others take, or None before the first is done."""
        if not self._num_timed:
            return None
        mean = self._seconds / self._num_timed
        spent = 0.0 if self._began is None else self._clock() - self._began
        return (self.total - self.done) * mean - min(spent, mean)

    def sentence(self) -> str:
        """Returns how many are done and how long the others take; "" before the first is done."""
        seconds = self.seconds_left()
        if seconds is None:
            return ""
        left = f"about {duration(seconds)} left for the rest"
        return f"{self.done} of {self.total} {self.noun} done; {left}"


class TimeLeft(TimeRemainingColumn):
    """The time left of a bar: that of the task's field `pace` if it has one. Otherwise rich's estimate
    from the last half minute, which is none for rows that take longer.
    """

    def render(self, task: Task) -> Text:
        pace: Pace | None = task.fields.get("pace")
        if pace is None:
            return super().render(task)
        seconds = pace.seconds_left()
        text = "-:--:--" if seconds is None else str(timedelta(seconds=math.ceil(seconds)))
        return Text(text, style="progress.remaining")
