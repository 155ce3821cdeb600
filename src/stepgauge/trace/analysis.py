"""All that a trace says, as an Analysis."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepgauge.spec.analysis import Analysis, Cell, Idle, OperationRow
from stepgauge.trace import flame, flops
from stepgauge.trace.attribution import PHASES, Resolver, Work
from stepgauge.trace.events import Shapes, Trace, load
from stepgauge.trace.idle import Moment, time_line
from stepgauge.trace.intervals import merged
from stepgauge.trace.overlap import overlap
from stepgauge.trace.read import TraceError

FINEST = 1 / 2000  # of a step: shorter pauses cannot be seen in the drawn timeline
# of the whole: what takes less, together with its like, is left out of the flame graph
SMALLEST = 1e-4


def analyse(path: Path, *later: Path) -> Analysis:
    """Raises TraceError for a file that is no trace, or one in which nothing was profiled; `later`
    as of `load`.
    """
    return analysis(load(path, *later))


def analysis(trace: Trace) -> Analysis:
    resolver = Resolver(trace)
    tally = _Tally(trace)
    works = resolver.work()
    for moment in time_line(trace, works) if trace.on_device else _on_host(works):
        tally.add(moment)
    if not tally.cells:
        raise TraceError(f"{trace.path} has nothing within its profiled steps")
    return Analysis(
        source=str(trace.path),
        rank=trace.rank,
        device=trace.device,
        on_device=trace.on_device,
        steps=len(trace.steps),
        phases_us=tally.phases(),
        cells=tally.rows(),
        operations=tally.operations(),
        idle=[
            Idle(reason=r, phase=p, gaps=int(n), us=us) for (r, p), (n, us) in tally.idle.items()
        ],
        overlap=overlap(trace),
        lanes=tally.lanes(),
        marks=tally.marks(),
        flame=thinned(flame.tree(resolver.paths, tally.paths)),
    )


def _on_host(works: Iterable[Work]) -> Iterable[Moment]:
    return (Moment(work, 0.0, work.us, "") for work in works)


_KEY = ("name", "kind", "rule", "phase", "range")


class _Tally:
    """Sums over the pieces of work as they come, so that they need not all be held."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.cells: dict[tuple[str, ...], dict[str, float]] = {}
        self.idle: dict[tuple[str, str], list[float]] = {}
        self.paths: dict[int, float] = defaultdict(float)
        self._spans: dict[str, list[float]] = {}
        self._operations: dict[tuple[str, Shapes], list[float]] = {}
        self._kinds: dict[tuple[str, Shapes], str] = {}
        self._last: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._marks: dict[str, list[float]] = {}
        self._ranges: dict[str, str] = {}

    def add(self, moment: Moment) -> None:
        work, gap, busy, reason, new = moment
        self._add_cell(work, gap, busy, new)
        if new:
            self.paths[work.path] += work.us
        self._spans.setdefault(work.phase, [0.0] * len(self.trace.steps))[work.step] += gap + busy
        if reason:
            entry = self.idle.setdefault((reason, work.phase), [0, 0.0])
            entry[0] += 1
            entry[1] += gap
        if new and work.step == len(self.trace.steps) - 1:
            self._last[work.kind].append((work.start, work.end))
            mark = self._marks.setdefault(work.phase, [work.start - gap, work.end])
            mark[:] = [min(mark[0], work.start), max(mark[1], work.end)]

    def _add_cell(self, work: Work, gap: float, busy: float, new: bool) -> None:
        part = self._ranges.get(work.range)
        if part is None:
            part = self._ranges[work.range] = repeated(work.range)
        key = (work.name, work.kind, work.rule, work.phase, part)
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
        row = self._operations.setdefault(operation, [0, 0.0])
        row[1] += work.us
        # The longest kernel of an operation says what it is: a matrix product may clear its result
        # first.
        if work.first:
            row[0] += 1
            cost = flops.cost(*operation)
            sums["flops"] += cost.flops or 0.0
            sums["bytes"] += cost.bytes or 0.0
        if work.kind in ("matmul", "attention") or operation not in self._kinds:
            self._kinds[operation] = work.kind

    def rows(self) -> list[Cell]:
        named = ((dict(zip(_KEY, key, strict=True)), sums) for key, sums in self.cells.items())
        return [Cell(**{**names, **sums}) for names, sums in named]  # type: ignore[arg-type]

    def phases(self) -> dict[str, list[float]]:
        order = [
            *(p for p in PHASES if p in self._spans),
            *(p for p in self._spans if p not in PHASES),
        ]
        return {phase: self._spans[phase] for phase in order}

    def operations(self) -> list[OperationRow]:
        rows = []
        for (name, shapes), (calls, us) in self._operations.items():
            cost = flops.cost(name, shapes)
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

    def _origin(self) -> float:
        return min((start for start, _ in self._marks.values()), default=0.0)

    def lanes(self) -> dict[str, list[list[float]]]:
        length = max((end for _, end in self._marks.values()), default=0.0) - self._origin()
        return {
            kind: [
                [round(start - self._origin(), 2), round(end - self._origin(), 2)]
                for start, end in _coarse(merged(times), FINEST * length)
            ]
            for kind, times in self._last.items()
        }

    def marks(self) -> list[list[object]]:
        return [
            [phase, start - self._origin(), end - self._origin()]
            for phase, (start, end) in self._marks.items()
        ]


def _coarse(times: Sequence[tuple[float, float]], pause: float) -> list[list[float]]:
    """Intervals that so short a pause separates become one."""
    result: list[list[float]] = []
    for start, end in times:
        if result and start - result[-1][1] < pause:
            result[-1][1] = end
        else:
            result.append([start, end])
    return result


def repeated(range: str) -> str:
    """The range with the number of a repeated part as *: "blocks.3.norm" and "Linear_7" of modules
    alike.
    """
    return re.sub(r"(?<=[._])\d+(?=\.|$| \()", "*", range)


def thinned(tree: flame.Tree) -> flame.Tree:
    """The tree without parts that no screen shows; their time goes to their parents.

    Equal parts of repeated blocks count together: each alone is small in a model of many blocks.
    """
    together: dict[tuple[str, ...], float] = defaultdict(float)

    def add(node: flame.Tree, path: tuple[str, ...]) -> float:
        us: float = node[1] + sum(add(child, (*path, repeated(child[0]))) for child in node[2])
        together[path] += us
        return us

    def kept(node: flame.Tree, path: tuple[str, ...]) -> flame.Tree:
        us, children = node[1], []
        for child in node[2]:
            place = (*path, repeated(child[0]))
            if together[place] >= least:
                children.append(kept(child, place))
            else:
                us += _size(child)
        return [node[0], round(us, 3), children]

    least = SMALLEST * add(tree, ())
    return kept(tree, ())


def _size(tree: flame.Tree) -> float:
    size: float = tree[1] + sum(map(_size, tree[2]))
    return size
