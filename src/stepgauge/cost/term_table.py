"""The table of a predicted step's terms, and notes on what slows it down or is known least."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepgauge.cost.operations.terms import BF16_PRODUCTS, TRAFFIC, Term
from stepgauge.cost.rates.alignment import with_alignment
from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED, NEAR, TIMED_WHOLE, UNTIMED, Estimate
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.outcome import Outcome
from stepgauge.spec.calibration import ALIGNED, LAUNCH_GAP

HEADINGS = [
    "phase", "term", "operation", "sizes", "count", "us", "source", "times_away", "spread",
]  # fmt: skip
TERM, OPERATION, SIZES, US, SOURCE, TIMES_AWAY = map(
    HEADINGS.index, ("term", "operation", "sizes", "us", "source", "times_away")
)
BY = " × "  # between sizes
GAPS = "gaps"  # the term of the gaps between kernels
LEAST_NOTED_SHARE = 0.02  # of a step; a note on less would not help
LONG = 4096  # tokens: attention of shorter sequences rarely runs in another package
Row = Sequence[Any]


def row_of(
    phase: str, term: str, operation: str, estimate: Estimate, *, sizes: str = "", count: int = 1
) -> list[object]:
    """Returns a row of the table. The estimate is that of all `count` runs."""
    source, away, off = estimate.source, estimate.times_away, estimate.spread
    return [phase, term, operation, sizes, count, estimate.us, source, away, off]


def term_rows(
    phases: Mapping[str, Iterable[Term]], prices: Prices, *, times: int = 1
) -> list[list[object]]:
    """Returns a row per term, and one for the gaps before the kernels of each phase. Each phase runs
    `times` times.
    """
    rows: list[list[object]] = []
    for phase, terms in phases.items():
        gaps_us = 0.0
        for term in terms:
            operation, sizes = term.operation, BY.join(f"{size:g}" for size in term.sizes)
            if prices.is_plain_pass(term):
                operation, sizes = TRAFFIC, f"{term.nbytes:g}"
            gaps_us += prices.gaps_us(term) * times
            us, count = (prices.us(term) - prices.gaps_us(term)) * times, term.count * times
            estimate = Estimate(us, TIMED_WHOLE)
            if term.pace == 1.0:
                estimate = dataclasses.replace(prices.estimate(term), us=us)
            rows.append(row_of(phase, term.name, operation, estimate, sizes=sizes, count=count))
        if gaps_us:
            rows.append(row_of(phase, GAPS, LAUNCH_GAP, Estimate(gaps_us, CALIBRATED)))
    return rows


def host_rows(
    phases: Mapping[str, Iterable[Term]], prices: Prices, simulated: Outcome
) -> list[list[object]]:
    """Returns rows for the time of each phase in which the device waits for the host."""
    waits_us = {
        phase: simulated.phases[phase] * 1e3 - prices.total_us(terms)
        for phase, terms in phases.items()
    }
    return [
        row_of(phase, "host", "launches", Estimate(us, ASSUMED))
        for phase, us in waits_us.items()
        if us > 1.0
    ]


def notes_on(rows: Sequence[Row], machine: CalibratedMachine) -> list[str]:
    """Returns notes on products with unaligned rows, and on the terms that are known least; none on a small
    part of the step.
    """
    notes = _unaligned(rows, machine)
    ms, longest = _longest(rows, lambda row: row[SOURCE] == UNTIMED)
    if longest:
        notes.append(
            f"untimed: {ms:.2g} ms of the step are estimated from the bytes or FLOPs of "
            f"{', '.join(longest)} (stepgauge validate --now times these calls)"
        )
    ms, longest = _longest(rows, lambda row: row[TIMES_AWAY] > NEAR)
    if longest:
        most = max(row[TIMES_AWAY] for row in rows)
        notes.append(
            f"far from what was timed: {ms:,.2f} ms of the step ({', '.join(longest)}) are "
            f"extrapolated, to sizes up to {most:,.0f} times as large or small"
        )
    return [*notes, *_few_shapes(rows, machine), *_libraries(rows, machine)]


def _unaligned(rows: Sequence[Row], machine: CalibratedMachine) -> list[str]:
    """Returns a note on a GPU's bf16 products that are slow because a width is no multiple of ALIGNED."""

    def timed_as(row: Row) -> str:
        name: str = row[OPERATION]
        if name not in BF16_PRODUCTS:
            return name
        return with_alignment(name, [float(size) for size in row[SIZES].split(BY)])

    def is_slow(row: Row) -> bool:
        return timed_as(row) != row[OPERATION]

    ms, longest = _longest(rows, is_slow)
    if not longest or machine.hardware.threads:
        return []
    speed = "a third to a seventh of the usual speed"
    if any(machine.table(timed_as(row)) is None for row in filter(is_slow, rows)):
        speed += ", which this hardware file does not know (stepgauge calibrate times them)"
    head = any(name.startswith("head") for name in longest)
    loss = " (50,257 words to 50,304), or take --loss fused"
    advice = f"pad them{loss if head else ''}"
    return [
        f"slow products: {ms:,.2f} ms of the step ({', '.join(longest)}) have widths that {ALIGNED} does not "
        f"divide, for which cuBLAS has kernels of {speed}: {advice}"
    ]


def _few_shapes(rows: Sequence[Row], machine: CalibratedMachine) -> list[str]:
    """Returns a note that names the operations most of whose shapes have no time, the longest first."""
    tables = {row[OPERATION]: machine.table(row[OPERATION]) for row in rows}
    few = {name: table for name, table in tables.items() if table is not None and table.has_few}
    _, longest = _longest(rows, lambda row: row[OPERATION] in few, by=OPERATION)
    if not longest:
        return []
    counts = [f"{name} ({few[name].timed})" for name in longest]
    return [
        f"few shapes were timed of {', '.join(counts)}: calibrate them again on a quiet machine"
    ]


def _libraries(rows: Sequence[Row], machine: CalibratedMachine) -> list[str]:
    """Returns a note for each operation on long sequences of which other packages ran long shapes."""
    tables = {row[OPERATION]: machine.table(row[OPERATION]) for row in rows}
    ran_in = {name: table.libraries for name, table in tables.items() if table and table.libraries}

    def is_long(row: Row) -> bool:
        return (
            row[OPERATION] in ran_in and float(row[SIZES].split(BY)[1]) >= LONG
        )  # heads × length × width

    _, longest = _longest(rows, is_long, by=OPERATION)
    return [
        f"long shapes of {name} were timed in {ran_in[name]} (slower where that is missing)"
        for name in longest
    ]


def _longest(
    rows: Sequence[Row], which: Callable[[Row], bool], *, by: int = TERM
) -> tuple[float, list[str]]:
    """Returns the milliseconds of these rows, and the names of the three longest; none if the rows
    are a small part of the step.
    """
    us_by_name: dict[str, float] = {}
    for row in filter(which, rows):
        us_by_name[row[by]] = us_by_name.get(row[by], 0.0) + row[US]
    us = sum(us_by_name.values())
    if us <= LEAST_NOTED_SHARE * sum(row[US] for row in rows):
        return us / 1e3, []
    return us / 1e3, sorted(us_by_name, key=lambda name: -us_by_name[name])[:3]
