"""Collectives explained: what each rank had and has, who sends what, as tables and pictures."""

from collections.abc import Sequence

from stepgauge.report.network import Edge, circle, network
from stepgauge.report.page import Block, Plot, Section, Text, page
from stepgauge.report.table import Table
from stepgauge.spec.explain import Arrow, Explained, RingStep

MOST_LABELS = 8


def rank_table(explained: Explained) -> Table:
    """Each rank's values before and after; a point where it has none, or none that are defined."""
    rows = [
        [
            f"rank {r}",
            " ".join(seen.before) or "·",
            " ".join(seen.after) or "·",
            seen.wait_ms,
        ]
        for r, seen in enumerate(explained.ranks)
    ]
    return Table(
        ["", "before", "after", "ms inside"],
        rows,
        numeric=frozenset(["ms inside"]),
        caption=explained.summary,
    )


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
    return Table(
        ["step", "", "sends", *(f"chunk {c}" for c in range(n))],
        rows,
        caption="Chunks after each step.",
    )


def picture(arrows: Sequence[Arrow], n: int) -> str:
    """The ranks in a circle and an arrow for each thing that is sent."""
    label = len(arrows) <= MOST_LABELS
    edges = [
        Edge(f"rank {a.source}", f"rank {a.target}", a.what if label else "", directed=True)
        for a in arrows
    ]
    return network(circle([f"rank {r}" for r in range(n)]), edges)


def explained_page(found: Sequence[Explained]) -> str:
    """The whole HTML document."""
    sections = [Section(e.op.replace("_", "-"), e.summary, _blocks(e)) for e in found]
    facts = {"Shown": f"{len(found[0].ranks)} processes over Gloo; rank r gives 10r, 10r + 1, ..."}
    return page("stepgauge comm explain", sections, facts=facts)


def _blocks(explained: Explained) -> list[Block]:
    n = len(explained.ranks)
    shown: list[Block] = [
        Plot(picture(explained.arrows, n), f"{explained.op}: who sends what."),
        rank_table(explained),
    ]
    if explained.steps:
        shown += [_step_picture(step, n) for step in (explained.steps[0], explained.steps[n - 1])]
        shown.append(step_table(explained))
    else:
        shown.append(traffic_table(explained))
    return [*shown, Text(explained.remark)] if explained.remark else shown


def _step_picture(step: RingStep, n: int) -> Plot:
    return Plot(picture(step.arrows, n), f"{step.name}: each rank sends one chunk to the next.")
