"""Which weights of a sharded module are gathered next, before they are asked for."""

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
    """Starts gathering the next unit's weights, as long as a step uses units as the last one did."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._order: CallOrder | None = None
        self._is_active = False
        self._expected: list[ShardedUnit] = []
        self._calls: list[ShardedUnit] = []
        self._prefetched: dict[ShardedUnit, UnshardedUnit] = {}
        # calls of the last forward, which backward takes in reverse
        self._forward: list[weakref.ref[UnshardedUnit]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"sharding": self._sharding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sharding"])  # type: ignore[misc]

    @contextlib.contextmanager
    def of_one_forward(self) -> Iterator[None]:
        if self._is_active:  # a module that is called within itself
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
        """Raises RuntimeError where ranks would gather different weights together, or (None) where
        they have not called as many.
        """
        place = len(self._calls)
        if unit is None:
            is_expected = place == len(self._expected)
        else:
            is_expected = self._expected[place : place + 1] == [unit]
        if is_expected:
            return
        self._order = self._order or CallOrder(self._sharding.group)
        called = [each.name or "the module" for each in self._calls]
        now = (unit.name or "the module") if unit else "nothing"
        self._order.require_same(called, now)

    def unshard_for_forward(self, unit: ShardedUnit) -> UnshardedUnit:
        """The unit's whole weights, on their way already where they were prefetched."""
        if self._is_active:
            self._require_order(unit)
        unsharded = self._prefetched.pop(unit, None)
        if unsharded is None or not unsharded.is_current():
            unsharded = unit.unshard()
        return unsharded

    def prefetch_next(self, unit: ShardedUnit) -> None:
        """Before a unit computes: starts gathering the weights of those that follow."""
        if not self._is_active:
            return
        place = len(self._calls)
        self._calls.append(unit)
        if self._expected[place : place + 1] != [unit]:
            return
        for following in self._expected[place + 1 : place + 1 + PREFETCHED]:
            if following not in self._prefetched and following.unsharded is None:
                self._prefetched[following] = following.unshard()

    def after_forward(self, unsharded: UnshardedUnit) -> None:
        """Notes a call that backward comes to."""
        if self._is_active:
            self._forward.append(weakref.ref(unsharded))

    def prefetch_previous(self, unsharded: UnshardedUnit) -> None:
        """Before a call's backward: starts gathering the weights of the calls before it."""
        calls = [call() for call in self._forward]
        if unsharded in calls:
            place = calls.index(unsharded)
            for before in calls[max(0, place - PREFETCHED) : place]:
                if before is not None:
                    before.unshard()
