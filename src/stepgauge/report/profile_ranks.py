"""Tables of several ranks' traces: the ranks, their collectives, and which rank others waited for."""

from collections.abc import Iterable, Sequence

from stepgauge.report.kernel_names import range_name
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.analysis import AcrossRanks, Analysis, Overlap, total
from stepgauge.trace.ranks import rank_numbers

MAX_COLLECTIVES = 20
OF_A_RANK = ("rank", "step ms", "busy ms", "idle ms", "communication ms", "overlap", "exposed ms")
OF_WAITING = ("waited ms", "made others wait ms", "times last")
SHARED_FIGURES = frozenset(
    ("ranks", "size B", "calls per step", "transfer ms", "waiting ms", "waiting %", "busbw GB/s")
)


def overlap_table(overlaps: Iterable[Overlap]) -> Table:
    """Returns how much communication computation hides, one row per rank."""
    rows = [
        {
            "rank": o.rank,
            "communication ms": o.communication_us / 1e3 / o.steps,
            "computation ms": o.computation_us / 1e3 / o.steps,
            "hidden ms": o.hidden_us / 1e3 / o.steps,
            "exposed ms": o.exposed_us / 1e3 / o.steps,
            "overlap": o.ratio,
        }
        for o in overlaps
    ]
    caption = (
        "Overlap: the time in a step in which a rank communicates and computes at once, divided by "
        "the time in which it communicates."
    )
    return Table.from_rows(rows, caption=caption, names=1, formats={"overlap": ".4f"})


def ranks_table(analyses: Sequence[Analysis], across: AcrossRanks | None = None) -> Table:
    """Returns one row per rank: its step, the device's busy and idle time, communication, and how long
    it waited for others and made them wait.
    """
    waits = {row.rank: row for row in across.stragglers} if across else {}
    columns = [*OF_A_RANK, *(OF_WAITING if waits else ())]
    rows = []
    for rank, one in zip(rank_numbers(analyses), analyses, strict=True):
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
    caption = "Ranks: means per step. Exposed time is communication that no computation hides."
    return Table(columns, rows, caption=caption, names=1, formats={"overlap": ".4f"})


def shared_table(across: AcrossRanks, steps: int) -> Table:
    """Returns the collectives of all ranks, their time split into transfer and waiting."""
    rows = []
    for row in across.collectives[:MAX_COLLECTIVES]:
        both_us = row.transfer_us + row.waiting_us
        rows.append({
            "collective": row.name,
            "range": range_name(row.range),
            "type": row.dtype,
            "ranks": row.group_size,
            "size B": row.bytes or None,
            "calls per step": row.calls / steps,
            "transfer ms": row.transfer_us / 1e3 / steps,
            "waiting ms": row.waiting_us / 1e3 / steps,
            "waiting %": 100 * row.waiting_us / both_us if both_us else None,
            "busbw GB/s": row.bus_bytes_per_s / 1e9 or None,
            "waited for": f"rank {row.last}",
            "came last": f"{row.last_calls} of {row.calls}",
        })  # fmt: skip
    caption = (
        "Collectives across ranks, per step. Transfer is the time that the last rank to arrive spends "
        "in the call; waiting is what the ranks spend beyond that (mean). busbw counts only the "
        "transfer."
    )
    return Table.from_rows(rows, numeric=SHARED_FIGURES, caption=caption, names=5)


def sentences(across: AcrossRanks, analyses: Sequence[Analysis]) -> list[str]:
    """Returns the notes, and which rank made the others wait: in which operation, and where that rank
    is slower.
    """
    notes = list(across.notes)
    worst = max(across.stragglers, key=lambda row: row.made_wait_us, default=None)
    step = max(analysis.step_us for analysis in analyses)
    if worst is None or worst.made_wait_us < 0.005 * step:
        return notes
    waited_for = [row for row in across.collectives if row.last == worst.rank]
    longest = max(waited_for, key=lambda row: row.waiting_us, default=None)
    text = (
        f"Rank {worst.rank} made the others wait {number(worst.made_wait_us / 1e3)} ms per step "
        f"({100 * worst.made_wait_us / step:.1f} % of it)"
    )
    if longest:
        text += f", most of it in {longest.name.replace('_', '-')}"
        text += f" of {longest.range}" if longest.range else ""
    text += "."
    if worst.most_in:
        excess = number(worst.excess_us / 1e3)
        text += f" It spends {excess} ms more in {worst.most_in} than the mean of the other ranks."
    return [*notes, text]
