"""Plans for ZeRO: which rank owns which parameter in ZeRO 1 and 2, and what is in flight in ZeRO 3."""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.spec.plan.buckets import Bucket, Parameter

# ZeRO 1 and 2 update parameters in parts, and broadcast one part while the next is updated.
UPDATE_PART_BYTES, MIN_UPDATE_PARTS, MAX_UPDATE_PARTS = 2**28, 2, 8
MAX_BUCKETS_PER_OWNER = 4  # in one launch of ZeRO 2, so that no bucket waits for long
# ZeRO 3: units whose gradients are in flight at once. More would only take memory.
MOST_IN_FLIGHT = 2
PREFETCHED = 1  # ZeRO 3: units whose weights are gathered ahead, in forward and in backward


@dataclasses.dataclass(frozen=True)
class OwnerPlan:
    """The owner of each parameter, which keeps its optimizer state.

    owners    parameter name -> rank
    elements  number of elements that each rank owns
    """

    owners: Mapping[str, int]
    elements: tuple[int, ...]


def plan_owners(
    parameters: Iterable[Parameter], *, ranks: int, held: Sequence[int] | None = None
) -> OwnerPlan:
    """Assigns parameters to ranks, the largest first, each to the rank that owns least so far.
    (Graham 1969: the result is within 4/3 of the best balance.)

    That fixes how many parameters of each size a rank owns, but not which. Gradients arrive in
    reverse order of the parameters, and each goes to the rank that has received least so far, so
    that neighbours have different owners.

    held  elements that each rank owns already, from earlier parameter groups

    Raises ValueError for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    by_name = {parameter.name: parameter for parameter in parameters}
    elements, counts = deal_out([p.numel for p in by_name.values()], held or [0] * ranks)
    owners = _alternate(list(reversed(by_name.values())), counts, ranks)
    return OwnerPlan({name: owners[name] for name in by_name}, elements)


def num_update_parts(nbytes: float) -> int:
    """Returns the number of parts in which an optimizer step of ZeRO 1 or 2 updates its parameters.

    Only the last part's broadcast is exposed, but every part costs the host one call of the
    optimizer. There are at least two parts because that reveals an optimizer whose state depends
    on all parameters together.
    """
    return max(MIN_UPDATE_PARTS, min(MAX_UPDATE_PARTS, round(nbytes / UPDATE_PART_BYTES)))


def deal_out(
    sizes: Iterable[int], held: Sequence[int]
) -> tuple[tuple[int, ...], Counter[tuple[int, int]]]:
    """Gives each size to the rank with the fewest elements, the largest size first. Returns each
    rank's elements and, by (size, rank), how many parameters of that size the rank gets.
    """
    load = [(elements, rank) for rank, elements in enumerate(held)]
    heapq.heapify(load)
    counts: Counter[tuple[int, int]] = Counter()
    for size in sorted(sizes, reverse=True):
        elements, rank = heapq.heappop(load)
        counts[size, rank] += 1
        heapq.heappush(load, (elements + size, rank))
    by_rank = {rank: elements for elements, rank in load}
    return tuple(by_rank[rank] for rank in range(len(held))), counts


def _alternate(
    arriving: Sequence[Parameter], counts: Counter[tuple[int, int]], ranks: int
) -> dict[str, int]:
    """Gives each arriving parameter to the rank that has received least, among the ranks that may
    still take one of its size. Uses `counts` up.
    """
    takers: dict[int, list[int]] = {}  # by size: the ranks that may still take one, in order
    for size, rank in sorted(counts):
        takers.setdefault(size, []).append(rank)
    owners, received = {}, [0] * ranks
    for parameter in arriving:
        size = parameter.numel
        owner = owners[parameter.name] = min(takers[size], key=received.__getitem__)
        received[owner] += size
        counts[size, owner] -= 1
        if not counts[size, owner]:
            takers[size].remove(owner)
    return owners


def plan_launches(buckets: Sequence[Bucket]) -> list[Sequence[Bucket]]:
    """Groups buckets that are sent at the same time. Buckets for all ranks are sent one by one.

    A bucket with an owner uses only the links towards that rank, so it is sent together with
    buckets for other owners. A launch grows until it has a bucket for every owner that occurs in
    the rest of the plan, or MAX_BUCKETS_PER_OWNER times as many buckets as there are owners. All
    buckets of a launch are on one device.
    """
    launches: list[Sequence[Bucket]] = []
    num_owners, start = len({bucket.owner for bucket in buckets}), 0
    for end in range(1, len(buckets) + 1):
        launch, rest = buckets[start:end], buckets[end:]
        devices = {bucket.parameters[0].device for bucket in [*launch, *rest[:1]]}
        if (
            launch[0].owner is None
            or len(devices) > 1
            or len(launch) == MAX_BUCKETS_PER_OWNER * num_owners
            or {bucket.owner for bucket in rest} <= {bucket.owner for bucket in launch}
        ):
            launches.append(launch)
            start = end
    return launches
