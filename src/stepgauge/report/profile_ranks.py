"""Tables of several ranks' traces: the ranks, their collectives, who made the others wait."""

from collections.abc import Iterable, Sequence

from stepgauge.report.kernel_names import range_name
from stepgauge.report.numbers import number
from stepgauge.report.table import Table
from stepgauge.spec.analysis import AcrossRanks, Analysis, Overlap, total
from stepgauge.trace.ranks import numbers

SHOWN = 20


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
    rows = []
    for rank, one in zip(numbers(found), found, strict=True):
        whole, o, row = total(one.cells, one.steps), one.overlap, waits.get(rank)
        rows.append({
            "rank": rank,
            "step ms": one.step_us / 1e3,
            "busy ms": whole.busy_us / 1e3 if one.on_device else None,
            "idle ms": whole.idle_us / 1e3 if one.on_device else None,
            "communication ms": o.communication_us / 1e3 / o.steps if o else None,
            "overlap": o.ratio if o else None,
            "exposed ms": o.exposed_us / 1e3 / o.steps if o else None,
        })  # fmt: skip
        if waits:
            rows[-1] |= {
                "waited ms": row.waited_us / 1e3 if row else None,
                "made others wait ms": row.made_wait_us / 1e3 if row else None,
                "times last": row.calls_last if row else None,
            }
    caption = "Ranks: means of a step; exposed is communication that no computing hides."
    return Table.from_rows(rows, caption=caption, names=1, formats={"overlap": ".4f"})


def shared_table(across: AcrossRanks, steps: int) -> Table:
    """Each collective split into transfer and waiting, across ranks."""
    rows = []
    for row in across.collectives[:SHOWN]:
        both = row.transfer_us + row.waiting_us
        rows.append([
            row.name, range_name(row.range), row.dtype, row.group_size, row.bytes or None, row.calls / steps,
            row.transfer_us / 1e3 / steps, row.waiting_us / 1e3 / steps, 100 * row.waiting_us / both if both else None,
            row.bus_bytes_per_s / 1e9 or None, f"rank {row.last}", f"{row.last_calls} of {row.calls}",
        ])  # fmt: skip
    head = ["collective", "range", "type", "ranks", "size B", "calls a step", "transfer ms", "waiting ms", "waiting %",
            "busbw GB/s", "waited for", "came last"]  # fmt: skip
    caption = (
        "Collectives across ranks, a step: transfer is the last rank's time in the call, waiting "
        "what the ranks spent beyond it (mean); busbw is of the transfer alone."
    )
    numeric = frozenset(head[3:10])
    return Table(head, rows, numeric=numeric, caption=caption, names=5)


def sentences(across: AcrossRanks, found: Sequence[Analysis]) -> list[str]:
    """Who made the others wait, in which operation, and in what it is slower."""
    result = list(across.notes)
    worst = max(across.stragglers, key=lambda row: row.made_wait_us, default=None)
    step = max(one.step_us for one in found)
    if worst is None or worst.made_wait_us < 0.005 * step:
        return result
    theirs = [row for row in across.collectives if row.last == worst.rank]
    most = max(theirs, key=lambda row: row.waiting_us, default=None)
    where = (
        f", most of it in {most.name.replace('_', '-')}{' of ' if most.range else ''}{most.range}"
        if most
        else ""
    )
    why = (
        f" Against the others' mean it spends {number(worst.excess_us / 1e3)} ms more in "
        f"{worst.most_in}."
        if worst.most_in
        else ""
    )
    result.append(
        f"Rank {worst.rank} made the others wait {number(worst.made_wait_us / 1e3)} ms a step "
        f"({100 * worst.made_wait_us / step:.1f} % of it){where}.{why}"
    )
    return result
