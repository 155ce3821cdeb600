"""What torch.compile makes of traced operators, near enough to price them: what passes over memory
between two products becomes one pass, which reads what was made before it and writes what is read
after it. inductor fuses less across reductions, and keeps less for backward.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.operations.terms import TRAFFIC, Term


@dataclasses.dataclass(frozen=True)
class Moved:
    """A term with the bytes that it reads and writes, by storage, and the block that runs it."""

    term: Term
    reads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    writes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unit: str = ""

    @property
    def is_pass(self) -> bool:
        term = self.term
        is_apart = term.is_product or term.axis or term.operation.startswith("optimizer")
        return not is_apart and term.count > 0


def fused(phases: Mapping[str, Sequence[Moved]]) -> dict[str, list[Term]]:
    """The terms of each phase, in which neighbours that are no products are one."""
    last = _last_readers(phases)
    found, start = {}, 0
    for name, moved in phases.items():
        found[name] = list(_together(moved, start, last))
        start += len(moved)
    return found


def fused_units(
    phases: Mapping[str, Sequence[Moved]], *, outside: bool
) -> dict[str, list[tuple[str, list[Term]]]]:
    """The same where each block is compiled by itself, as runs of terms with the block's name: ""
    for what is outside of blocks, which is compiled too where `outside` says so.
    """
    last = _last_readers(phases)
    found: dict[str, list[tuple[str, list[Term]]]] = {}
    start = 0
    for name, moved in phases.items():
        found[name] = []
        for unit, group in itertools.groupby(moved, lambda each: each.unit):
            run = list(group)
            if unit or outside:
                terms = list(_together(run, start, last))
            else:
                terms = [each.term for each in run]
            found[name].append((unit, terms))
            start += len(run)
    return found


def _last_readers(phases: Mapping[str, Sequence[Moved]]) -> dict[int, int]:
    """Of each storage the place in the step of what reads it last."""
    whole = itertools.chain.from_iterable(phases.values())
    return {storage: place for place, each in enumerate(whole) for storage in each.reads}


def _together(moved: Sequence[Moved], start: int, last: Mapping[int, int]) -> Iterator[Term]:
    """`start` is the place of the first in the step, `last` that of each storage's last reader."""
    run: list[Moved] = []
    marks: list[Term] = []  # of gradients that are complete with the run
    for place, each in enumerate(moved, start):
        if each.is_pass:
            run.append(each)
        elif not each.term.count:
            marks.append(each.term)
        else:
            yield from _ended(run, place, last)
            yield from marks
            yield each.term
            run, marks = [], []
    yield from _ended(run, start + len(moved), last)
    yield from marks


def _ended(run: Sequence[Moved], end: int, last: Mapping[int, int]) -> Iterator[Term]:
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for each in run:
        for storage, nbytes in each.reads.items():
            if storage not in writes:
                reads[storage] = max(reads.get(storage, 0), nbytes)
        writes.update(each.writes)
    kept = sum(nbytes for storage, nbytes in writes.items() if last.get(storage, -1) >= end)
    if nbytes := sum(reads.values()) + kept:
        yield Term("fused", TRAFFIC, (float(nbytes),))
