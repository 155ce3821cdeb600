"""Process groups that a check leaves behind."""

import gc

import torch.distributed as dist

from stepgauge.parallel.communication import collectives
from stepgauge.runtime import world


def in_turn(checks):
    """Returns {name: function()} of {name: function}, and ends each function's groups after it."""
    results = {}
    for name, check in checks.items():
        results[name] = check()
        end_groups()
    return results


def end_groups():
    """Ends all groups but the default one. All ranks must call it, when none of them is in a collective.

    Each group of Gloo has a thread that wakes up a hundred times a second. After dozens of checks in one
    process, these threads would take most of its time.
    """
    gc.collect()  # what a check has built may still hold its groups
    dist.barrier()
    collectives._groups.clear()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    world._free_groups()
