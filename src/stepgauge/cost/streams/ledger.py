"""The rows whose sum is a predicted step.

They are the rank's terms, the time in which it waits for each axis's messages, and the remaining time, in
which it waits for the host or for other stages. Without an axis a step would be shorter by more than the
wait for it: its messages also slow kernels down, and need copies.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.operations.terms import TRAFFIC
from stepgauge.cost.rates.estimate import ASSUMED, Estimate
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.outcome import Outcome
from stepgauge.cost.streams.program import DATA, Operations
from stepgauge.cost.term_table import US, row_of, term_rows

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
        rows += _row("step", f"waits for the {axis} axis", "communication", ms * 1e3)
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
    rows += _row("step", "waits for the data axis", "communication", exposed_ms * 1e3)
    left_us = step_ms * 1e3 - total_us(rows)
    return rows + _row("step", "waits", "other stages and host launches", left_us)


def total_us(rows: Sequence[Sequence[object]]) -> float:
    """Returns the sum of the rows' microseconds."""
    return sum(float(str(row[US])) for row in rows)


def _update_row(operations: Operations, prices: Prices, ms: float) -> list[object]:
    term = operations.optimizer(operations.num_parameters)
    estimate = dataclasses.replace(prices.estimate(term), us=ms * 1e3)
    return row_of("optimizer", "update", term.operation, estimate)


def _row(phase: str, term: str, operation: str, us: float, *, sizes: str = "") -> Rows:
    """Returns one row of an assumed time, or none if the time is next to nothing."""
    if abs(us) <= LEAST_US:
        return []
    return [row_of(phase, term, operation, Estimate(us, ASSUMED), sizes=sizes)]
