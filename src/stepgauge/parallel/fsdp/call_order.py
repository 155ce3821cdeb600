"""Checks that all ranks call the same modules in the same order, before they gather weights for them.

Ranks that take part in one collective with different weights abort or hang. So a rank whose calls
differ from those of the previous forward announces its next call in the group's store, and
continues when all other ranks have announced the same.
"""

import collections
import datetime
from collections.abc import Sequence

import torch.distributed as dist

_num_made: collections.Counter[str] = collections.Counter()  # by the group's name


class CallOrder:
    """The announcements of the ranks of a group. All ranks create it when they first need it."""

    def __init__(self, group: dist.ProcessGroup):
        _num_made[group.group_name] += 1
        store = group.get_group_store()
        # Shorter than the timeout of ranks that already wait for this one in a collective: those
        # could not say why.
        self._limit: datetime.timedelta = store.timeout / 2  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"call_order{_num_made[group.group_name]}", store)
        self._rank, self._ranks = group.rank(), group.size()
        self._round = 0

    def require_same(self, before: Sequence[str], call: str) -> None:
        """Raises RuntimeError unless all ranks announce the same: the calls `before` in this forward
        and the next call.
        """
        self._round += 1
        own = f"calls {call} after [{', '.join(before)}]"
        self._store.set(f"{self._round}/{self._rank}", own)
        for rank, other in enumerate(self._announcements()):
            if other != own:
                raise RuntimeError(
                    f"all ranks must call the same blocks in the same order: rank {self._rank} "
                    f"{own}, rank {rank} {other}"
                )
        # All ranks have read the previous round by now.
        self._store.delete_key(f"{self._round - 1}/{self._rank}")

    def _announcements(self) -> list[str]:
        keys = [f"{self._round}/{rank}" for rank in range(self._ranks)]
        none = f"has kept to the order of the previous forward for {self._limit.seconds} s"
        try:
            self._store.wait(keys, self._limit)
        except dist.DistStoreError:
            return [
                self._store.get(key).decode() if self._store.check([key]) else none for key in keys
            ]
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return [each.decode() for each in self._store.multi_get(keys)]
        return [self._store.get(key).decode() for key in keys]
