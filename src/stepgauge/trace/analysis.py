"""Turns a trace into an Analysis."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from stepgauge.spec.analysis import Analysis, Cell, Idle, OperationRow
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.trace import flame, flops
from stepgauge.trace.attribution import Resolver, Work
from stepgauge.trace.collectives import collectives
from stepgauge.trace.collector import without_collector
from stepgauge.trace.events import Shapes, Trace, load
from stepgauge.trace.idle import Edges, Moment, time_line
from stepgauge.trace.kinds import Kinds
from stepgauge.trace.names import repeated
from stepgauge.trace.notes import notes
from stepgauge.trace.overlap import overlap
from stepgauge.trace.read import TraceError


def analyse(path: Path, *later: Path, kinds: Kinds | None = None) -> Analysis:
    """Analyses a trace file; `later` files as in `load`. Raises TraceError if a file is not a trace, or
    if nothing was profiled.
    """
    return analysis(load(path, *later), kinds)


@without_collector()
def analysis(trace: Trace, kinds: Kinds | None = None) -> Analysis:
    resolver = Resolver(trace, kinds)
    works = list(resolver.work())
    if not works:
        raise TraceError(f"{trace.path} has no work within its profiled steps")
    tally, edges = _Tally(), Edges()
    for moment in time_line(trace, works, edges) if trace.on_device else _on_host(works):
        tally.add(moment)
    return Analysis(
        source=str(trace.path),
        rank=trace.rank,
        device=trace.device,
        on_device=trace.on_device,
        steps=len(tally.steps),
        phases_us=tally.phases(),
        lead_in_us=edges.lead_in,
        tail_us=edges.tail,
        cells=tally.rows(),
        operations=tally.operations(),
        idle=[
            Idle(reason=r, phase=p, gaps=int(n), us=us) for (r, p), (n, us) in tally.idle.items()
        ],
        overlap=overlap(trace, works),
        collectives=collectives(works) if trace.on_device else [],
        flame=flame.thinned(flame.tree(resolver.paths, tally.paths)),
        notes=notes(trace, works),
    )


def _on_host(works: Iterable[Work]) -> Iterable[Moment]:
    return (Moment(work, 0.0, work.us, "") for work in works)


_KEY = ("name", "kind", "rule", "phase", "range")


class _Tally:
    """Running sums over the pieces of work."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.cells: dict[tuple[str, ...], dict[str, float]] = {}
        self.idle: dict[tuple[str, str], list[float]] = {}
        self.paths: dict[int, float] = defaultdict(float)
        self._spans: dict[str, dict[int, float]] = {}
        self._operations: dict[tuple[str, Shapes], list[float]] = {}
        self._costs: dict[tuple[str, Shapes], flops.Cost] = {}
        self._kinds: dict[tuple[str, Shapes], str] = {}

    def add(self, moment: Moment) -> None:
        work, gap, busy, reason, new = moment
        self._add_cell(work, gap, busy, new)
        if new:
            self.steps.add(work.step)
            self.paths[work.path] += work.us
        span = self._spans.setdefault(work.phase, defaultdict(float))
        span[work.step] += gap + busy
        if reason:
            entry = self.idle.setdefault((reason, work.phase), [0, 0.0])
            entry[0] += 1
            entry[1] += gap

    def _add_cell(self, work: Work, gap: float, busy: float, new: bool) -> None:
        key = (work.name, work.kind, work.rule, work.phase, repeated(work.range))
        sums = self.cells.get(key)
        if sums is None:
            sums = self.cells[key] = dict.fromkeys(
                ("calls", "us", "busy_us", "idle_us", "flops", "bytes"), 0
            )
        sums["busy_us"] += busy
        sums["idle_us"] += gap
        if not new:
            return
        sums["calls"] += work.calls
        sums["us"] += work.us
        if work.shapes is None or work.kind == "host":
            return
        operation = (work.operation, work.shapes)
        row = self._operations.get(operation)
        if row is None:
            row = self._operations[operation] = [0, 0.0]
            self._costs[operation] = flops.cost(*operation)
        row[1] += work.us
        if work.first:
            row[0] += 1
            cost = self._costs[operation]
            sums["flops"] += cost.flops or 0.0
            sums["bytes"] += cost.bytes or 0.0
        # An operation has the kind of its main kernel: a matrix product may first clear its result.
        if work.kind in ("matmul", "attention") or operation not in self._kinds:
            self._kinds[operation] = work.kind

    def rows(self) -> list[Cell]:
        rows = []
        for key, sums in self.cells.items():
            names = dict(zip(_KEY, key, strict=True))
            rows.append(Cell(**names, **sums))  # type: ignore[arg-type]
        return rows

    def phases(self) -> dict[str, list[float]]:
        """Returns the time of each phase in each step, the phases of training first."""
        first = [phase for phase in TRAINING_PHASES if phase in self._spans]
        order = dict.fromkeys([*first, *self._spans])
        steps = sorted(self.steps)
        return {phase: [self._spans[phase][step] for step in steps] for phase in order}

    def operations(self) -> list[OperationRow]:
        rows = []
        for (name, shapes), (calls, us) in self._operations.items():
            cost = self._costs[name, shapes]
            if cost.bytes:
                dims = " ".join("×".join(map(str, d)) for d in shapes.dims if d)
                rows.append(
                    OperationRow(
                        operation=name,
                        kind=self._kinds[name, shapes],
                        shapes=dims if len(dims) < 120 else f"{dims[:117]}...",
                        dtype=flops.dtype(shapes),
                        calls=int(calls),
                        us=us,
                        flops=cost.flops or 0.0,
                        bytes=cost.bytes,
                    )
                )
        return sorted(rows, key=lambda row: -row.us)
