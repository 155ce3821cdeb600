"""That all ranks call the same modules, in the same order, before they gather weights for them.

Ranks that gather different weights together abort, or hang. So a rank that leaves the order of the
forward before says so beside the collectives, and goes on when all others have said the same.
"""

import collections
import datetime
from collections.abc import Sequence

import torch.distributed as dist

_made: collections.Counter[str] = collections.Counter()  # of a group, by its name


class CallOrder:
    """What the ranks of a group call, by name. Made by all of them when they first ask."""

    def __init__(self, group: dist.ProcessGroup):
        _made[group.group_name] += 1
        store = group.get_group_store()
        # Sooner than those who wait in a collective for this rank, and cannot say what for.
        self._limit: datetime.timedelta = store.timeout / 2  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"call_order{_made[group.group_name]}", store)
        self._rank, self._ranks = group.rank(), group.size()
        self._asked = 0

    def require_same(self, before: Sequence[str], call: str) -> None:
        """Raises RuntimeError unless all ranks ask for the same: what was called `before` in this
        forward, and the call that is next.
        """
        self._asked += 1
        ours = f"{call} after [{', '.join(before)}]"
        self._store.set(f"{self._asked}/{self._rank}", ours)
        for rank, theirs in enumerate(self._everyones()):
            if theirs != ours:
                raise RuntimeError(
                    f"all ranks must call the same blocks in the same order: rank {self._rank} calls "
                    f"{ours}, rank {rank} {theirs}"
                )
        # All have read what was said the time before.
        self._store.delete_key(f"{self._asked - 1}/{self._rank}")

    def _everyones(self) -> list[str]:
        keys = [f"{self._asked}/{rank}" for rank in range(self._ranks)]
        silent = f"has not left the order of the forward before within {self._limit.seconds} s"
        try:
            self._store.wait(keys, self._limit)
        except dist.DistStoreError:
            return [
                self._store.get(key).decode() if self._store.check([key]) else silent
                for key in keys
            ]
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return [each.decode() for each in self._store.multi_get(keys)]
        return [self._store.get(key).decode() for key in keys]
