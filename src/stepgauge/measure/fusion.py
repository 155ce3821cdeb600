"""Approximates how torch.compile fuses traced operators: all passes over memory between two products
become one pass, which reads what was computed before it and writes what is read after it. Inductor
itself fuses less across reductions, and keeps less for backward.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.operations.terms import TRAFFIC, Term, padded


@dataclasses.dataclass(frozen=True)
class TracedTerm:
    """A term with the bytes that it reads and writes.

    reads, writes  bytes by storage
    unit           name of the block that runs it; "" outside of blocks
    """

    term: Term
    reads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    writes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unit: str = ""

    @property
    def is_pass(self) -> bool:
        """True for work that can be fused: passes over memory."""
        term = self.term
        is_separate = term.is_product or term.axis or term.operation.startswith("optimizer")
        return not is_separate and term.count > 0


def fuse(phases: Mapping[str, Sequence[TracedTerm]]) -> dict[str, list[Term]]:
    """Returns the terms of each phase, with passes between two products fused into one."""
    last = _last_readers(phases)
    fused, start = {}, 0
    for name, traced in phases.items():
        fused[name] = list(_fused(traced, start, last))
        start += len(traced)
    return fused


def fuse_units(
    phases: Mapping[str, Sequence[TracedTerm]], *, outside: bool
) -> dict[str, list[tuple[str, list[Term]]]]:
    """Returns the terms of each phase if every block is compiled separately, as runs of terms with
    the block's name, or "" outside of blocks.

    outside  also fuse the terms outside of blocks
    """
    last = _last_readers(phases)
    fused: dict[str, list[tuple[str, list[Term]]]] = {}
    start = 0
    for name, traced in phases.items():
        fused[name] = []
        for unit, group in itertools.groupby(traced, lambda each: each.unit):
            run = list(group)
            if unit or outside:
                terms = list(_fused(run, start, last))
            else:
                terms = [each.term for each in run]
            fused[name].append((unit, terms))
            start += len(run)
    return fused


def _last_readers(phases: Mapping[str, Sequence[TracedTerm]]) -> dict[int, int]:
    """Returns, for each storage, the position in the step of the term that reads it last."""
    step = itertools.chain.from_iterable(phases.values())
    return {storage: position for position, each in enumerate(step) for storage in each.reads}


def _fused(traced: Sequence[TracedTerm], start: int, last: Mapping[int, int]) -> Iterator[Term]:
    """Fuses the passes of a run of terms.

    start  position of its first term in the step
    last   position of each storage's last reader
    """
    passes: list[TracedTerm] = []
    gradients: list[Term] = []  # terms without work, which mark gradients as complete
    for position, each in enumerate(traced, start):
        if each.is_pass:
            passes.append(each)
        elif not each.term.count:
            gradients.append(each.term)
        else:
            yield from _one_pass(passes, position, last)
            yield from gradients
            yield padded(each.term)
            passes, gradients = [], []
    yield from _one_pass(passes, start + len(traced), last)
    yield from gradients


def _one_pass(passes: Sequence[TracedTerm], end: int, last: Mapping[int, int]) -> Iterator[Term]:
    """Yields one term for the passes. It writes only storages that are read at or after `end`."""
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for each in passes:
        for storage, nbytes in each.reads.items():
            if storage not in writes:
                reads[storage] = max(reads.get(storage, 0), nbytes)
        writes.update(each.writes)
    kept = sum(nbytes for storage, nbytes in writes.items() if last.get(storage, -1) >= end)
    if nbytes := sum(reads.values()) + kept:
        yield Term("fused", TRAFFIC, (float(nbytes),))
