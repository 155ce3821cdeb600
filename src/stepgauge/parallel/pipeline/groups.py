"""Process groups of some ranks, made at the same time by several pipelines beside each other."""

from collections.abc import Sequence

import torch.distributed as dist

from stepgauge.runtime.world import gathered_objects


def members(group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of a group in the world's numbers; None: all."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def new_groups(
    wanted: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """A new group for each list of ranks (in the world's numbers) that the pipeline of `group`
    wants; on a rank that is not in it, one that nothing can be sent through.

    All ranks of the world must call it at the same time: torch numbers groups as they are made, so
    that each rank takes part in making the groups of the other pipelines too.
    """
    own = list(map(list, wanted))
    asked = [own] * dist.get_world_size() if group is None else gathered_objects(own)
    first = members(group)[0]
    leaders = _leaders(group)
    made = {}
    for leader in sorted(set(leaders)):
        made[leader] = [dist.new_group(ranks) for ranks in asked[leader]]
    return made[first]


def _leaders(group: dist.ProcessGroup | None) -> list[int]:
    """Of each rank of the world, the first rank of its pipeline."""
    return [0] * dist.get_world_size() if group is None else gathered_objects(members(group)[0])
