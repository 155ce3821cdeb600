"""The rows that a predicted step is the sum of: what a rank computes, what is exposed of each axis,
and what is left, in which it waits for the host or for other stages.
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


def step_rows(operations: Operations, prices: Prices, found: Outcome, *, passes: int = 1) -> Rows:
    """Of a rank without a pipeline that goes forward and backward `passes` times."""
    phases = {
        name: [term for term in terms if not term.axis]
        for name, terms in (("forward", operations.forward()), ("backward", operations.backward()))
    }
    rows = term_rows(phases, prices, times=passes)
    rows.append(_update_row(operations, prices, found.update_ms))
    casts = found.device_ms * 1e3 - total_us(rows)
    rows += _row("backward", "casts of what is sent", TRAFFIC, casts)
    for axis, ms in found.exposed.items():
        rows += _row("exposed", f"{axis} axis", "communication", ms * 1e3)
    slowed = f"× {prices.contention.of('matmul', 'all_reduce', DATA).kernel:g}"
    rows += _row("backward", "slower beside collectives", "contention", found.slowed_ms * 1e3,
                 sizes=slowed)  # fmt: skip
    return rows + _row("step", "waits", "the host's launches", found.step_ms * 1e3 - total_us(rows))


def pipeline_rows(
    stages: Sequence[Operations],
    prices: Prices,
    *,
    passes: int,
    exposed_ms: float,
    optimizer_ms: float,
    step_ms: float,
) -> Rows:
    """Of the rank that ends last, which has these stages; each goes forward and backward `passes`
    times. Gradients arrive `exposed_ms` after its last backward; the optimizer follows.
    """
    terms = {
        "forward": [term for stage in stages for term in stage.forward()],
        "backward": [term for stage in stages for term in stage.backward()],
    }
    rows = term_rows(terms, prices, times=passes)
    rows.append(_update_row(stages[0], prices, optimizer_ms))
    rows += _row("exposed", "data axis", "communication", exposed_ms * 1e3)
    left = step_ms * 1e3 - total_us(rows)
    return rows + _row("step", "waits", "other stages and the host's launches", left)


def total_us(rows: Sequence[Sequence[object]]) -> float:
    """The sum of the rows' microseconds."""
    return sum(float(str(row[5])) for row in rows)


def _update_row(operations: Operations, prices: Prices, ms: float) -> list[object]:
    term = operations.optimizer(operations.num_parameters)
    return ["optimizer", "update", term.operation, "", 1, ms * 1e3, prices.of(term).source]


def _row(phase: str, term: str, operation: str, us: float, *, sizes: str = "") -> Rows:
    """One row of an assumed time, or none of next to nothing."""
    return [[phase, term, operation, sizes, 1, us, ASSUMED]] if abs(us) > LEAST_US else []
