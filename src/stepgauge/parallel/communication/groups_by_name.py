"""Process groups by name, for operators of a compiled graph, which only has the name."""

import weakref

import torch.distributed as dist

_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()


def register(group: dist.ProcessGroup) -> None:
    """Lets `group_named` find the group, as long as it exists."""
    _groups[group.group_name] = group


def group_named(name: str) -> dist.ProcessGroup:
    return _groups[name]
