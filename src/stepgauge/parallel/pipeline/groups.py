"""Process groups for the edges of pipelines. Several pipelines may exist side by side, as in data
parallel, and create their groups at the same time.
"""

from collections.abc import Sequence

import torch.distributed as dist

from stepgauge.runtime.world import gathered_objects


def world_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the global ranks of a group's members; None stands for the group of all ranks."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def new_groups(
    rank_lists: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Creates one process group per list of global ranks, for the pipeline whose ranks are `group`.

    On a rank that is not in a list, the returned group cannot be used. All ranks of the world must
    call this at the same time: torch requires that every rank takes part in creating every group,
    also those of the other pipelines.
    """
    own = list(map(list, rank_lists))
    if group is None:
        return [dist.new_group(ranks) for ranks in own]
    first = world_ranks(group)[0]  # identifies the pipeline
    created = {}
    for pipeline, wanted in sorted(dict(gathered_objects((first, own))).items()):
        created[pipeline] = [dist.new_group(ranks) for ranks in wanted]
    return created[first]
