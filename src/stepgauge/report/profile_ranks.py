"""Tables of several ranks' traces: the ranks, their collectives, who made the others wait."""

from collections.abc import Iterable, Sequence

from stepgauge.report.kernel_names import range_name
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.analysis import AcrossRanks, Analysis, Overlap, total
from stepgauge.trace.ranks import numbers

SHOWN = 20
OF_A_RANK = ("rank", "step ms", "busy ms", "idle ms", "communication ms", "overlap", "exposed ms")
OF_WAITING = ("waited ms", "made others wait ms", "times last")
SHARED_FIGURES = frozenset(
    ("ranks", "size B", "calls a step", "transfer ms", "waiting ms", "waiting %", "busbw GB/s")
)


def overlap_table(found: Iterable[Overlap]) -> Table:
    """Communication hidden behind computing, a row a rank."""
    rows = [
        {
            "rank": o.rank,
            "communication ms": o.communication_us / 1e3 / o.steps,
            "computation ms": o.computation_us / 1e3 / o.steps,
            "hidden ms": o.hidden_us / 1e3 / o.steps,
            "exposed ms": o.exposed_us / 1e3 / o.steps,
            "overlap": o.ratio,
        }
        for o in found
    ]
    caption = (
        "Overlap a step: time in which a rank both communicates and computes, over its time "
        "communicating."
    )
    return Table.from_rows(rows, caption=caption, names=1, formats={"overlap": ".4f"})


def ranks_table(found: Sequence[Analysis], across: AcrossRanks | None = None) -> Table:
    """One line a rank: its step, how long its device worked and stood still, what communication cost
    it, and how long it waited for others and made them wait.
    """
    waits = {row.rank: row for row in across.stragglers} if across else {}
    columns = [*OF_A_RANK, *(OF_WAITING if waits else ())]
    rows = []
    for rank, one in zip(numbers(found), found, strict=True):
        cells: dict[str, float] = {"rank": rank, "step ms": one.step_us / 1e3}
        if one.on_device:
            whole = total(one.cells, one.steps)
            cells |= {"busy ms": whole.busy_us / 1e3, "idle ms": whole.idle_us / 1e3}
        if (overlap := one.overlap) is not None:
            cells["communication ms"] = overlap.communication_us / 1e3 / overlap.steps
            cells["overlap"] = overlap.ratio
            cells["exposed ms"] = overlap.exposed_us / 1e3 / overlap.steps
        if (waiting := waits.get(rank)) is not None:
            cells["waited ms"] = waiting.waited_us / 1e3
            cells["made others wait ms"] = waiting.made_wait_us / 1e3
            cells["times last"] = waiting.calls_last
        rows.append([cells.get(column) for column in columns])
    caption = "Ranks: means of a step; exposed is communication that no computing hides."
    return Table(columns, rows, caption=caption, names=1, formats={"overlap": ".4f"})


def shared_table(across: AcrossRanks, steps: int) -> Table:
    """Each collective split into transfer and waiting, across ranks."""
    rows = []
    for row in across.collectives[:SHOWN]:
        both_us = row.transfer_us + row.waiting_us
        rows.append({
            "collective": row.name,
            "range": range_name(row.range),
            "type": row.dtype,
            "ranks": row.group_size,
            "size B": row.bytes or None,
            "calls a step": row.calls / steps,
            "transfer ms": row.transfer_us / 1e3 / steps,
            "waiting ms": row.waiting_us / 1e3 / steps,
            "waiting %": 100 * row.waiting_us / both_us if both_us else None,
            "busbw GB/s": row.bus_bytes_per_s / 1e9 or None,
            "waited for": f"rank {row.last}",
            "came last": f"{row.last_calls} of {row.calls}",
        })  # fmt: skip
    caption = (
        "Collectives across ranks, a step: transfer is the last rank's time in the call, waiting "
        "what the ranks spent beyond it (mean); busbw is of the transfer alone."
    )
    return Table.from_rows(rows, numeric=SHARED_FIGURES, caption=caption, names=5)


def sentences(across: AcrossRanks, found: Sequence[Analysis]) -> list[str]:
    """Who made the others wait, in which operation, and in what it is slower."""
    result = list(across.notes)
    worst = max(across.stragglers, key=lambda row: row.made_wait_us, default=None)
    step = max(one.step_us for one in found)
    if worst is None or worst.made_wait_us < 0.005 * step:
        return result
    theirs = [row for row in across.collectives if row.last == worst.rank]
    most = max(theirs, key=lambda row: row.waiting_us, default=None)
    said = (
        f"Rank {worst.rank} made the others wait {number(worst.made_wait_us / 1e3)} ms a step "
        f"({100 * worst.made_wait_us / step:.1f} % of it)"
    )
    if most:
        said += f", most of it in {most.name.replace('_', '-')}"
        said += f" of {most.range}" if most.range else ""
    said += "."
    if worst.most_in:
        more = number(worst.excess_us / 1e3)
        said += f" Against the others' mean it spends {more} ms more in {worst.most_in}."
    return [*result, said]
