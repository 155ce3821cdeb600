"""Collectives explained: what each rank had and has, and who sends what, as tables."""

from stepgauge.report.table import Table
from stepgauge.spec.explain import Explained


def rank_table(explained: Explained) -> Table:
    """Each rank's values before and after; a point where it has none, or none that are defined."""
    rows = [
        [f"rank {r}", " ".join(seen.before) or "·", " ".join(seen.after) or "·", seen.wait_ms]
        for r, seen in enumerate(explained.ranks)
    ]
    return Table(["", "before", "after", "ms inside"], rows, caption=explained.summary)


def traffic_table(explained: Explained) -> Table:
    """What a rank (row) sends to each other (column)."""
    n = len(explained.ranks)
    sent = {(arrow.source, arrow.target): arrow.what for arrow in explained.arrows}
    rows = [[f"rank {i}", *(sent.get((i, j), "") for j in range(n))] for i in range(n)]
    return Table(["from", *(f"to rank {j}" for j in range(n))], rows, caption="Who sends what.")


def step_table(explained: Explained) -> Table:
    """Each rank's chunks after each step of a ring."""
    n = len(explained.ranks)
    rows = []
    for step in explained.steps:
        sent = {arrow.source: arrow for arrow in step.arrows}
        for rank, chunks in enumerate(step.chunks):
            moved = f"{sent[rank].what} → rank {sent[rank].target}"
            rows.append([step.name if rank == 0 else "", f"rank {rank}", moved, *chunks])
    columns = ["step", "", "sends", *(f"chunk {c}" for c in range(n))]
    return Table(columns, rows, caption="Chunks after each step.")
