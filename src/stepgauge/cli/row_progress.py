"""Shows how far the rows of a command are while they are measured."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from stepgauge.cli.console import counted, has_bars, info, summary
from stepgauge.cli.pace import Pace
from stepgauge.cli.row_name import telling_places

if TYPE_CHECKING:
    from stepgauge.bench.sweep import Job, JobResult

PACE_EVERY_S = 10.0  # least time between two lines on how many rows are done


class RowProgress:
    """Shows the progress of rows: a line when each is done and, in a terminal, a bar that names the
    current row and has the time left. Without a bar each row also prints a line when it starts, and
    before it, now and then, how many are done and how long the others take.

    probes  identities of jobs that are measured for the row after them, and count with it
    """

    def __init__(
        self,
        names: Mapping[tuple[str, ...], str],
        pace: Pace,
        bar: Progress,
        task: Any,
        probes: Collection[tuple[str, ...]] = (),
    ):
        self.names, self.pace, self.bar, self.task = names, pace, bar, task
        self.places = telling_places(names.values())
        self.probes, self.is_probed = probes, False
        self.is_single = len(names) == 1
        self.has_bar = not self.is_single and has_bars()
        self.name, self.shown_at = "", time.monotonic()
        if not self.is_single and not self.has_bar:
            info(f"{len(names) - len(probes)} rows; each prints a line when it is done")

    def reuse(self, jobs: Sequence["Job"]) -> None:
        """These rows were measured before. They count as done from the beginning, wherever they stand."""
        self.pace.skip(sum(job.pending.identity not in self.probes for job in jobs))
        self.bar.update(self.task, completed=self.pace.done)

    def start(self, job: "Job", again: str) -> None:
        """A row is about to be measured, for the first time, or `again` for the given reason."""
        from stepgauge.bench.sweep import DISTURBED

        if again != DISTURBED:
            if not self.is_probed:
                self.pace.begin()
                self._show_pace()
            self.is_probed = job.pending.identity in self.probes
        self.name = self.names[job.pending.identity]
        self.bar.update(self.task, description=self.name, place=self.places[self.name])
        activity = _activity(job)
        if activity and not self.has_bar:
            reason = f"measured again ({again}): " if again else ""
            info(f"{self.name}: {reason}{activity}")

    def update(self, text: str) -> None:
        """Shows what the current row is doing."""
        self.bar.update(self.task, description=f"{self.name}: {text}")

    def finish(self, outcome: "JobResult") -> None:
        """Prints the row's result, unless it was measured before."""
        if outcome.job.pending.identity not in self.probes:
            self.is_probed = False
            if outcome.is_reused:
                self.pace.drop()
            self.pace.end()
        self.bar.update(self.task, completed=self.pace.done)
        # If the only row failed, require_success prints why.
        if not outcome.is_reused and not (self.is_single and outcome.record.status == "failed"):
            info(summary(outcome.record, self.names[outcome.job.pending.identity]))

    def _show_pace(self) -> None:
        """Moves the bar; without one, prints the pace if the last such line is old enough."""
        self.bar.update(self.task, completed=self.pace.done)
        is_due = time.monotonic() - self.shown_at >= PACE_EVERY_S
        if is_due and not self.is_single and not self.has_bar and (text := self.pace.sentence()):
            info(text)
            self.shown_at = time.monotonic()


def _activity(job: "Job") -> str:
    """Returns what happens before the row has a result; "" if it is not timed in steps."""
    spec = job.spec
    has_steps = hasattr(spec, "warmup") and hasattr(spec, "steps")
    if not has_steps or job.provenance == "modelled":
        return ""
    compiling = "" if getattr(spec, "compile", "off") == "off" else "compiling, "
    seconds = f" and {spec.seconds:g} s" if getattr(spec, "seconds", 0.0) else ""
    return (
        f"{compiling}warming up for {counted(spec.warmup, 'step')}, then timing at least "
        f"{counted(spec.steps, 'step')}{seconds}"
    )
