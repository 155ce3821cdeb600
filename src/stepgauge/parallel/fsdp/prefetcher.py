"""Starts to gather the weights of a sharded module before they are needed."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from stepgauge.parallel.fsdp.call_order import CallOrder
from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit
from stepgauge.parallel.sharding import Sharding
from stepgauge.spec.plan.shards import PREFETCHED


class Prefetcher:
    """Gathers the next unit's weights ahead, for as long as a forward calls the units in the order of
    the previous forward.
    """

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._order: CallOrder | None = None
        self._is_active = False  # inside a forward
        self._expected: list[ShardedUnit] = []  # calls of the previous forward
        self._calls: list[ShardedUnit] = []  # calls of this forward so far
        self._prefetched: dict[ShardedUnit, UnshardedUnit] = {}
        # The calls of the last forward that need a backward, which runs in reverse order.
        self._forward: list[weakref.ref[UnshardedUnit]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"sharding": self._sharding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sharding"])  # type: ignore[misc]

    @contextlib.contextmanager
    def during_forward(self) -> Iterator[None]:
        """Wraps a forward of the whole module."""
        if self._is_active:  # the module calls itself
            yield
            return
        self._is_active, self._calls, self._forward = True, [], []
        try:
            yield
            self._require_order(None)
        finally:
            self._is_active, self._expected = False, self._calls
            for unsharded in self._prefetched.values():
                unsharded.reshard()
            self._prefetched = {}

    def _require_order(self, unit: ShardedUnit | None) -> None:
        """Raises RuntimeError if ranks are about to gather the weights of different units, or (unit
        is None) end the forward after different calls. Ranks communicate only if this rank's calls
        differ from those of the previous forward.
        """
        position = len(self._calls)
        if unit is None:
            is_expected = position == len(self._expected)
        else:
            is_expected = self._expected[position : position + 1] == [unit]
        if is_expected:
            return
        self._order = self._order or CallOrder(self._sharding.group)
        called = [each.name or "the module" for each in self._calls]
        next_call = (unit.name or "the module") if unit else "nothing"
        self._order.require_same(called, next_call)

    def unshard_for_forward(self, unit: ShardedUnit) -> UnshardedUnit:
        """Starts to gather the unit's weights, unless they were prefetched; returns them."""
        if self._is_active:
            self._require_order(unit)
        unsharded = self._prefetched.pop(unit, None)
        if unsharded is None or not unsharded.is_current():
            unsharded = unit.unshard()
        return unsharded

    def prefetch_next(self, unit: ShardedUnit) -> None:
        """Called before a unit computes: starts to gather the weights of the next units."""
        if not self._is_active:
            return
        position = len(self._calls)
        self._calls.append(unit)
        if self._expected[position : position + 1] != [unit]:
            return
        for following in self._expected[position + 1 : position + 1 + PREFETCHED]:
            if following not in self._prefetched and following.unsharded is None:
                self._prefetched[following] = following.unshard()

    def is_at_last_call(self) -> bool:
        """Returns True in a forward that has called as many units as the previous one."""
        return self._is_active and len(self._calls) == len(self._expected)

    def after_forward(self, unsharded: UnshardedUnit) -> None:
        """Records a call that needs a backward."""
        if self._is_active:
            self._forward.append(weakref.ref(unsharded))

    def prefetch_previous(self, unsharded: UnshardedUnit) -> None:
        """Called before the backward of a call: starts to gather the weights of the calls before."""
        calls = [call() for call in self._forward]
        if unsharded in calls:
            position = calls.index(unsharded)
            for before in calls[max(0, position - PREFETCHED) : position]:
                if before is not None:
                    before.unshard()
