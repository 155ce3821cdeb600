"""What ran when, as few numbers as a page can hold: the last steps' kernels stream by stream."""

from collections import defaultdict
from collections.abc import Sequence

from stepgauge.spec.analysis import Timeline
from stepgauge.trace.attribution import PHASES, Work
from stepgauge.trace.events import Trace

MOST_PIECES = 6000  # of a rank: eight ranks make a page of under 3 MB
UNIT = 10  # a µs


def timeline(trace: Trace, works: Sequence[Work]) -> Timeline | None:
    """Of as many of the last steps as fit; of less than one, neighbours of a kind become one piece.
    None where nothing ran.
    """
    shown = _last_steps([work for work in works if work.kind != "host"])
    if not shown:
        return None
    origin = min(work.start for work in shown)
    by_track: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for work in sorted(shown, key=lambda work: work.start):
        by_track[work.stream].append(work)
    names: dict[tuple[str, str], int] = {}
    pieces = {stream: _pieces(mine, names, origin) for stream, mine in by_track.items()}
    length = UNIT * (max(work.end for work in shown) - origin)
    for mixed in (False, True):  # kinds that take turns do not join by kind, however long the pause
        pause = UNIT
        while sum(map(len, pieces.values())) > MOST_PIECES and pause < 2 * length:
            pieces = {stream: _joined(mine, pause, names, mixed) for stream, mine in pieces.items()}
            pause *= 2
    several = len({device for device, _ in pieces}) > 1
    return Timeline(
        names=[list(name) for name in names],
        tracks=[
            [_title(trace, stream, several), _numbers(mine)]
            for stream, mine in sorted(pieces.items())
        ],
        marks=_marks(shown, origin),
        origin_us=origin,
    )


def _last_steps(works: Sequence[Work]) -> list[Work]:
    by_step: dict[int, list[Work]] = defaultdict(list)
    for work in works:
        by_step[work.step].append(work)
    taken: list[Work] = []
    for step in sorted(by_step, reverse=True):
        if taken and len(taken) + len(by_step[step]) > MOST_PIECES:
            break
        taken += by_step[step]
    return taken


_Piece = tuple[int, int, int, int]  # start, end, name, how many


def _pieces(
    works: Sequence[Work], names: dict[tuple[str, str], int], origin: float
) -> list[_Piece]:
    return [
        (
            round((work.start - origin) * UNIT),
            round((work.end - origin) * UNIT),
            names.setdefault((work.name, work.kind), len(names)),
            1,
        )
        for work in works
    ]


def _joined(
    pieces: Sequence[_Piece], pause: int, names: dict[tuple[str, str], int], mixed: bool
) -> list[_Piece]:
    """Neighbours of one kind that so short a pause separates become one piece; `mixed`: of any
    kind, and the longer one gives it.
    """
    kinds = [kind for _, kind in names]
    result: list[_Piece] = []
    for start, end, name, number in pieces:
        before = result[-1] if result else None
        alike = before and (mixed or kinds[before[2]] == kinds[name])
        if not before or not alike or start - before[1] >= pause:
            result.append((start, end, name, number))
            continue
        if before[2] != name:
            kind = kinds[name if end - start > before[1] - before[0] else before[2]]
            title = f"several kernels{', mostly' if mixed else ':'} {kind}"
            name = names.setdefault((title, kind), len(names))
            kinds += [kind for _, kind in list(names)[len(kinds) :]]
        result[-1] = (before[0], max(end, before[1]), name, before[3] + number)
    return result


def _numbers(pieces: Sequence[_Piece]) -> list[int]:
    result, now = [], 0
    for start, end, name, number in pieces:
        result += [start - now, end - start, name, number]
        now = end
    return result


def _title(trace: Trace, stream: tuple[int, int], several: bool) -> str:
    if not trace.on_device:
        return "operations"
    return f"device {stream[0]}, stream {stream[1]}" if several else f"stream {stream[1]}"


def _marks(works: Sequence[Work], origin: float) -> list[list[object]]:
    """Each step and each phase of it, from its first work's begin to its last one's end."""
    spans: dict[tuple[int, str], list[float]] = {}
    for work in works:
        for phase in ("step", work.phase):
            span = spans.setdefault((work.step, phase), [work.start, work.end])
            span[:] = [min(span[0], work.start), max(span[1], work.end)]
    order = ("step", *PHASES)
    return [
        [phase if phase != "step" else f"step {step}", *(round((t - origin) * UNIT) for t in span)]
        for (step, phase), span in sorted(spans.items())
        if phase in order
    ]
