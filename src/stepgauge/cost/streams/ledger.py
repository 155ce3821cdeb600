"""The rows whose sum is a predicted step.

They are the rank's terms, each axis's exposed communication, and the remaining time, in which the rank
waits for the host or for other stages.
"""

from collections.abc import Sequence

from stepgauge.cost.operations.terms import TRAFFIC
from stepgauge.cost.rates.estimate import ASSUMED
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.step import term_rows
from stepgauge.cost.streams.outcome import Outcome
from stepgauge.cost.streams.program import DATA, Operations

Rows = list[list[object]]
LEAST_US = 1.0  # a smaller rest is rounding


def step_rows(operations: Operations, prices: Prices, step: Outcome, *, passes: int = 1) -> Rows:
    """Returns the rows of a rank without a pipeline that runs forward and backward `passes` times."""
    phases = {
        name: [term for term in terms if not term.axis]
        for name, terms in (("forward", operations.forward()), ("backward", operations.backward()))
    }
    rows = term_rows(phases, prices, times=passes)
    rows.append(_update_row(operations, prices, step.update_ms))
    copies_us = step.device_ms * 1e3 - total_us(rows)
    rows += _row("backward", "casts and copies for communication", TRAFFIC, copies_us)
    for axis, ms in step.exposed.items():
        rows += _row("exposed", f"{axis} axis", "communication", ms * 1e3)
    slowdown = f"× {prices.contention.of('matmul', 'all_reduce', DATA).kernel:g}"
    rows += _row("backward", "slowed by collectives", "contention", step.slowed_ms * 1e3,
                 sizes=slowdown)  # fmt: skip
    left_us = step.step_ms * 1e3 - total_us(rows)
    return rows + _row("step", "waits", "host launches", left_us)


def pipeline_rows(
    stages: Sequence[Operations],
    prices: Prices,
    *,
    passes: int,
    exposed_ms: float,
    optimizer_ms: float,
    step_ms: float,
) -> Rows:
    """Returns the rows of the pipeline rank that ends last.

    Each of its stages runs forward and backward `passes` times. The last gradients arrive `exposed_ms`
    after its last backward, and then its optimizer runs.
    """
    terms = {
        "forward": [term for stage in stages for term in stage.forward()],
        "backward": [term for stage in stages for term in stage.backward()],
    }
    rows = term_rows(terms, prices, times=passes)
    rows.append(_update_row(stages[0], prices, optimizer_ms))
    rows += _row("exposed", "data axis", "communication", exposed_ms * 1e3)
    left_us = step_ms * 1e3 - total_us(rows)
    return rows + _row("step", "waits", "other stages and host launches", left_us)


def total_us(rows: Sequence[Sequence[object]]) -> float:
    """Returns the sum of the rows' microseconds."""
    return sum(float(str(row[5])) for row in rows)


def _update_row(operations: Operations, prices: Prices, ms: float) -> list[object]:
    term = operations.optimizer(operations.num_parameters)
    source = prices.estimate(term).source
    return ["optimizer", "update", term.operation, "", 1, ms * 1e3, source]


def _row(phase: str, term: str, operation: str, us: float, *, sizes: str = "") -> Rows:
    """Returns one row of an assumed time, or none if the time is next to nothing."""
    return [[phase, term, operation, sizes, 1, us, ASSUMED]] if abs(us) > LEAST_US else []
