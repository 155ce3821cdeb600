"""Adds up the passes of a step that accumulates gradients.

At the end of a pass the device waits for the pass's messages, so the next pass depends on it only
through the host's lead: how long before the device it began the next one. A pass shortens as the lead
grows, until the device never waits for the host. Once two passes in a row take the same time, either
the host limits them and the lead stays as it is, or the device does and a longer lead changes nothing.
All further passes then take that time, too, and are not simulated.
"""

from stepgauge.cost.streams.events import HOST
from stepgauge.cost.streams.outcome import Outcome, run_program
from stepgauge.cost.streams.program import DataParallelCost, RankStep

ROUNDING = 1e-9  # of a pass


def run_passes(step: RankStep, axis: DataParallelCost, *, count: int) -> Outcome:
    """Simulates a step of `count` passes, of which the last is followed by the optimizer."""
    contention = step.prices.contention
    if count == 1:
        return run_program(step.program(axis), contention)
    earlier, last = step.earlier_pass(axis), step.program(axis)
    host_ms = sum(work.us for work in earlier.works if work.stream == HOST) / 1e3
    lead_ms, before_ms, left = 0.0, 0.0, count - 1
    simulated: list[tuple[Outcome, int]] = []
    while left:
        outcome = run_program(earlier, contention, lead_us=lead_ms * 1e3)
        is_steady = abs(outcome.step_ms - before_ms) <= ROUNDING * outcome.step_ms
        times = left if is_steady else 1
        simulated.append((outcome, times))
        lead_ms = max(0.0, lead_ms + times * (outcome.step_ms - host_ms))
        before_ms, left = outcome.step_ms, left - times
    whole = run_program(last, contention, lead_us=lead_ms * 1e3)
    for outcome, times in simulated:
        whole = whole.after(outcome, times)
    return whole
