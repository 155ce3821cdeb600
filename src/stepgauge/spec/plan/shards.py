"""Which rank holds what under ZeRO 1 and 2: whole parameters by owner."""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from stepgauge.spec.plan.buckets import Bucket, Parameter

# Of parameters that are updated and then broadcast under ZeRO 1 and 2, while the next are updated.
PART_BYTES, LEAST_PARTS, MOST_PARTS = 2**28, 2, 8
MOST_FOR_AN_OWNER = 4  # buckets of a launch in ZeRO 2, so that none waits for long
# Of ZeRO 3, units whose gradients are on their way, as flat messages: more only takes memory.
MOST_IN_FLIGHT = 2
PREFETCHED = 1  # units whose weights are gathered ahead, in forward and in backward


@dataclasses.dataclass(frozen=True)
class OwnerPlan:
    """The rank that keeps the optimizer state of each parameter, by name, and the elements of each
    rank.
    """

    owners: Mapping[str, int]
    elements: tuple[int, ...]


def plan_owners(
    parameters: Iterable[Parameter], *, ranks: int, held: Sequence[int] | None = None
) -> OwnerPlan:
    """Largest parameter first, each to the rank that holds least (Graham 1969: within 4/3 of the
    best balance).

    Which of several equally large ones goes to whom is free then: as gradients arrive, in reverse
    order of the parameters, each goes to the rank that has received least, so that neighbours have
    different owners.

    `held` is what the ranks hold already, in elements: a later group fills up the emptiest. Raises
    ValueError for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    by_name = {parameter.name: parameter for parameter in parameters}
    elements, of_size = dealt([p.numel for p in by_name.values()], held or [0] * ranks)
    owners = _in_turns(list(reversed(by_name.values())), of_size, ranks)
    return OwnerPlan({name: owners[name] for name in by_name}, elements)


def num_update_parts(nbytes: float) -> int:
    """In how many parts an optimizer step under ZeRO 1 and 2 updates parameters of so many bytes.
    The last part's broadcast is waited for; each costs the host a call of the optimizer. Two show
    an optimizer that keeps what depends on all parameters.
    """
    return max(LEAST_PARTS, min(MOST_PARTS, round(nbytes / PART_BYTES)))


def dealt(
    sizes: Iterable[int], held: Sequence[int]
) -> tuple[tuple[int, ...], Counter[tuple[int, int]]]:
    """Elements of each rank when parameters of these sizes are dealt out, the largest first, and
    how many of a size each rank has.
    """
    fill = [(elements, rank) for rank, elements in enumerate(held)]
    heapq.heapify(fill)
    of_size: Counter[tuple[int, int]] = Counter()  # parameters by elements and rank
    for size in sorted(sizes, reverse=True):
        elements, rank = heapq.heappop(fill)
        of_size[size, rank] += 1
        heapq.heappush(fill, (elements + size, rank))
    by_rank = {rank: elements for elements, rank in fill}
    return tuple(by_rank[rank] for rank in range(len(held))), of_size


def _in_turns(
    arriving: Sequence[Parameter], of_size: Counter[tuple[int, int]], ranks: int
) -> dict[str, int]:
    owners, received = {}, [0] * ranks
    for parameter in arriving:
        takers = [rank for rank in range(ranks) if of_size[parameter.numel, rank]]
        owner = owners[parameter.name] = min(takers, key=lambda rank: received[rank])
        of_size[parameter.numel, owner] -= 1
        received[owner] += parameter.numel
    return owners


def plan_launches(buckets: Sequence[Bucket]) -> list[Sequence[Bucket]]:
    """The buckets that are sent at once: those for all ranks one by one.

    A bucket for an owner travels towards that rank only. Sent with buckets for the others it leaves
    no direction of the links idle: a launch goes on until it has a bucket for every owner that the
    rest of the plan has one for, or MOST_FOR_AN_OWNER times as many buckets as there are owners. It
    is of one device.
    """
    launches: list[Sequence[Bucket]] = []
    num_owners, start = len({bucket.owner for bucket in buckets}), 0
    for end in range(1, len(buckets) + 1):
        launch, rest = buckets[start:end], buckets[end:]
        devices = {bucket.parameters[0].device for bucket in [*launch, *rest[:1]]}
        if (
            launch[0].owner is None
            or len(devices) > 1
            or len(launch) == MOST_FOR_AN_OWNER * num_owners
            or {bucket.owner for bucket in rest} <= {bucket.owner for bucket in launch}
        ):
            launches.append(launch)
            start = end
    return launches
