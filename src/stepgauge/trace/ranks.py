"""Combines the traces of several ranks: splits each collective into waiting and transfer."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from stepgauge.spec.analysis import (
    AcrossRanks,
    Analysis,
    CollectiveRow,
    SharedCollective,
    Straggler,
)
from stepgauge.trace.collectives import bus_bytes_per_s

# Calls between two ranks of a group. Other ranks of the group have other calls.
PAIRWISE = ("send_recv",)


class _Call(NamedTuple):
    """One collective call of a group: rank -> (row, duration), for the ranks that have a trace."""

    group: str
    ranks: Mapping[int, tuple[CollectiveRow, float]]

    @property
    def last(self) -> int:
        """The rank that arrived last, which is the one that spent the shortest time in the call."""
        return min(self.ranks, key=lambda rank: self.ranks[rank][1])

    @property
    def transfer(self) -> float:
        return self.ranks[self.last][1]

    @property
    def waiting(self) -> float:
        """The time in the call beyond the transfer, as the mean over ranks."""
        return sum(us for _, us in self.ranks.values()) / len(self.ranks) - self.transfer


def rank_numbers(analyses: Sequence[Analysis]) -> list[int]:
    """Returns each trace's rank, or its position if a trace has no rank or two have the same."""
    ranks = [place if each.rank is None else each.rank for place, each in enumerate(analyses)]
    return ranks if len(set(ranks)) == len(ranks) else list(range(len(ranks)))


def across(analyses: Sequence[Analysis]) -> AcrossRanks:
    """Combines the analyses of at least two ranks."""
    by_rank = dict(zip(rank_numbers(analyses), analyses, strict=True))
    notes: list[str] = []
    calls = list(_matched(by_rank, notes))
    return AcrossRanks(
        collectives=_shared(calls), stragglers=_stragglers(by_rank, calls), notes=notes
    )


def _matched(by_rank: Mapping[int, Analysis], notes: list[str]) -> Iterator[_Call]:
    """Yields each call with its ranks. Calls are matched by their order within a group, which NCCL
    requires to be the same on all ranks.
    """
    groups: dict[tuple[str, str], dict[int, list[tuple[float, float, CollectiveRow]]]]
    groups = defaultdict(lambda: defaultdict(list))
    for rank, analysis in by_rank.items():
        for row in analysis.collectives:
            if row.name not in PAIRWISE or not row.ranks:
                calls = groups[row.name, row.ranks][rank]
                calls += [(start, us, row) for start, us in row.calls_us]
    for (name, ranks), members in groups.items():
        if len(members) < 2:
            continue
        counts = {rank: len(calls) for rank, calls in members.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"rank {rank}: {n}" for rank, n in sorted(counts.items()))
            notes.append(
                f"{name} of the group {ranks or 'of all ranks'} cannot be matched across ranks, because "
                f"the traces have different numbers of calls ({listed})."
            )
            continue
        in_group = sorted(members)
        ordered = [sorted(members[rank], key=lambda call: call[0]) for rank in in_group]
        for matched in zip(*ordered, strict=True):
            of_rank = zip(in_group, matched, strict=True)
            yield _Call(ranks, {rank: (row, us) for rank, (_, us, row) in of_rank})


def _shared(calls: Sequence[_Call]) -> list[SharedCollective]:
    """Returns a row for all calls with the same arguments, the longest first."""
    groups: dict[tuple[str, str, str, str, int], list[_Call]] = defaultdict(list)
    for call in calls:
        row, _ = call.ranks[min(call.ranks)]
        groups[row.name, row.range, call.group, row.dtype, row.bytes].append(call)
    rows = []
    for (name, range_, _, dtype, num_bytes), group in groups.items():
        row, _ = group[0].ranks[min(group[0].ranks)]
        caused: dict[int, float] = defaultdict(float)  # rank -> waiting that it caused
        for call in group:
            caused[call.last] += call.waiting
        last = max(caused, key=lambda rank: caused[rank])
        transfer = sum(call.transfer for call in group)
        rows.append(
            SharedCollective(
                name=name,
                range=range_,
                group_size=row.group_size or len(group[0].ranks),
                dtype=dtype,
                bytes=num_bytes,
                calls=len(group),
                transfer_us=transfer,
                waiting_us=sum(call.waiting for call in group),
                bus_bytes_per_s=bus_bytes_per_s(row, transfer / len(group)),
                last=last,
                last_calls=sum(call.last == last for call in group),
            )
        )
    return sorted(rows, key=lambda row: -(row.transfer_us + row.waiting_us))


def _stragglers(by_rank: Mapping[int, Analysis], calls: Sequence[_Call]) -> list[Straggler]:
    if not calls:
        return []
    waited: dict[int, float] = defaultdict(float)
    caused: dict[int, float] = defaultdict(float)
    times_last: dict[int, int] = defaultdict(int)
    for call in calls:
        times_last[call.last] += 1
        others = [us - call.transfer for rank, (_, us) in call.ranks.items() if rank != call.last]
        caused[call.last] += sum(others) / len(others)
        for rank, (_, us) in call.ranks.items():
            waited[rank] += us - call.transfer
    work = {rank: _us_by_work(analysis) for rank, analysis in by_rank.items()}
    rows = []
    for rank, analysis in by_rank.items():
        most_in, excess_us = _largest_excess(rank, work)
        rows.append(
            Straggler(
                rank=rank,
                waited_us=waited[rank] / analysis.steps,
                made_wait_us=caused[rank] / analysis.steps,
                calls_last=times_last[rank],
                most_in=most_in,
                excess_us=excess_us,
            )
        )
    return rows


def _us_by_work(analysis: Analysis) -> dict[str, float]:
    """Returns µs per step by kind of work and range, and idle time by reason, without communication."""
    sums: dict[str, float] = defaultdict(float)
    for cell in analysis.cells:
        if cell.kind != "communication":
            name = f"{cell.kind} in {cell.range}" if cell.range else cell.kind
            sums[name] += cell.us / analysis.steps
    for row in analysis.idle:
        reason, _, _ = row.reason.partition(":")
        sums[f"idle, {reason}"] += row.us / analysis.steps
    return sums


def _largest_excess(rank: int, work: Mapping[int, Mapping[str, float]]) -> tuple[str, float]:
    """Returns the work in which the rank exceeds the others' mean the most, and by how many µs."""
    others = [sums for other, sums in work.items() if other != rank]
    largest, largest_us = "", 0.0
    for name, us in work[rank].items():
        excess_us = us - statistics.fmean(sums.get(name, 0.0) for sums in others)
        if excess_us > largest_us:
            largest, largest_us = name, excess_us
    return largest, largest_us
