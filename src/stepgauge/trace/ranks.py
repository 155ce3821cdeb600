"""The traces of several ranks together: each collective split into waiting and transfer."""

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

PAIRWISE = ("send_recv",)  # between two ranks of a group: the others' calls are not its own


class _Call(NamedTuple):
    """One collective call of all ranks of a group that have a trace: rank -> (row, duration)."""

    group: str
    ranks: Mapping[int, tuple[CollectiveRow, float]]

    @property
    def last(self) -> int:
        """The rank that came last: it was in the call for the shortest time."""
        return min(self.ranks, key=lambda rank: self.ranks[rank][1])

    @property
    def transfer(self) -> float:
        return self.ranks[self.last][1]

    @property
    def waiting(self) -> float:
        """Mean over all ranks of the time beyond the transfer."""
        return sum(us for _, us in self.ranks.values()) / len(self.ranks) - self.transfer


def numbers(found: Sequence[Analysis]) -> list[int]:
    """Each trace's rank; its place where it does not say one, or two say the same."""
    ranks = [place if one.rank is None else one.rank for place, one in enumerate(found)]
    return ranks if len(set(ranks)) == len(ranks) else list(range(len(ranks)))


def across(found: Sequence[Analysis]) -> AcrossRanks:
    """Of at least two ranks' analyses."""
    by_rank = dict(zip(numbers(found), found, strict=True))
    notes: list[str] = []
    calls = list(_matched(by_rank, notes))
    return AcrossRanks(
        collectives=_shared(calls), stragglers=_stragglers(by_rank, calls), notes=notes
    )


def _matched(by_rank: Mapping[int, Analysis], notes: list[str]) -> Iterator[_Call]:
    """Calls by their place in their group's order, which NCCL makes the same on every rank."""
    groups: dict[tuple[str, str], dict[int, list[tuple[float, float, CollectiveRow]]]]
    groups = defaultdict(lambda: defaultdict(list))
    for rank, one in by_rank.items():
        for row in one.collectives:
            if row.name not in PAIRWISE or not row.ranks:
                mine = groups[row.name, row.ranks][rank]
                mine += [(start, us, row) for start, us in row.calls_us]
    for (name, ranks), members in groups.items():
        if len(members) < 2:
            continue
        counts = {rank: len(calls) for rank, calls in members.items()}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"rank {rank}: {n}" for rank, n in sorted(counts.items()))
            notes.append(
                f"{name} of the group {ranks or 'of all ranks'} cannot be matched across ranks: their "
                f"traces hold different numbers of calls ({said})."
            )
            continue
        in_group = sorted(members)
        ordered = [sorted(members[rank], key=lambda call: call[0]) for rank in in_group]
        for same in zip(*ordered, strict=True):
            of_rank = zip(in_group, same, strict=True)
            yield _Call(ranks, {rank: (row, us) for rank, (_, us, row) in of_rank})


def _shared(calls: Sequence[_Call]) -> list[SharedCollective]:
    alike: dict[tuple[str, str, str, str, int], list[_Call]] = defaultdict(list)
    for call in calls:
        row, _ = call.ranks[min(call.ranks)]
        alike[row.name, row.range, call.group, row.dtype, row.bytes].append(call)
    rows = []
    for (name, part, _, dtype, num_bytes), same in alike.items():
        row, _ = same[0].ranks[min(same[0].ranks)]
        made: dict[int, float] = defaultdict(float)
        for call in same:
            made[call.last] += call.waiting
        last = max(made, key=lambda rank: made[rank])
        transfer = sum(call.transfer for call in same)
        rows.append(
            SharedCollective(
                name=name,
                range=part,
                group_size=row.group_size or len(same[0].ranks),
                dtype=dtype,
                bytes=num_bytes,
                calls=len(same),
                transfer_us=transfer,
                waiting_us=sum(call.waiting for call in same),
                bus_bytes_per_s=bus_bytes_per_s(row, transfer / len(same)),
                last=last,
                last_calls=sum(call.last == last for call in same),
            )
        )
    return sorted(rows, key=lambda row: -(row.transfer_us + row.waiting_us))


def _stragglers(by_rank: Mapping[int, Analysis], calls: Sequence[_Call]) -> list[Straggler]:
    if not calls:
        return []
    waited: dict[int, float] = defaultdict(float)
    made: dict[int, float] = defaultdict(float)
    last: dict[int, int] = defaultdict(int)
    for call in calls:
        last[call.last] += 1
        others = [us - call.transfer for rank, (_, us) in call.ranks.items() if rank != call.last]
        made[call.last] += sum(others) / len(others)
        for rank, (_, us) in call.ranks.items():
            waited[rank] += us - call.transfer
    spent = {rank: _spent(one) for rank, one in by_rank.items()}
    rows = []
    for rank, one in by_rank.items():
        what, us = _excess(rank, spent)
        rows.append(
            Straggler(
                rank=rank,
                waited_us=waited[rank] / one.steps,
                made_wait_us=made[rank] / one.steps,
                calls_last=last[rank],
                most_in=what,
                excess_us=us,
            )
        )
    return rows


def _spent(one: Analysis) -> dict[str, float]:
    """µs a step by kind of work and range, and of idle time by its cause, without communication."""
    sums: dict[str, float] = defaultdict(float)
    for cell in one.cells:
        if cell.kind != "communication":
            what = f"{cell.kind} in {cell.range}" if cell.range else cell.kind
            sums[what] += cell.us / one.steps
    for row in one.idle:
        cause, _, _ = row.reason.partition(":")
        sums[f"idle, {cause}"] += row.us / one.steps
    return sums


def _excess(rank: int, spent: Mapping[int, Mapping[str, float]]) -> tuple[str, float]:
    """In what this rank spends most beyond the mean of the others."""
    others = [sums for other, sums in spent.items() if other != rank]
    most, most_us = "", 0.0
    for what, us in spent[rank].items():
        beyond_us = us - statistics.fmean(sums.get(what, 0.0) for sums in others)
        if beyond_us > most_us:
            most, most_us = what, beyond_us
    return most, most_us
