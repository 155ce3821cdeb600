"""What the units of one sharded module have in common: which weights come next, and gradients on
their way to the shards.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.call_order import CallOrder
from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.flat_gradients import FlatGradients
from stepgauge.parallel.parameter_group import ParameterGroup
from stepgauge.parallel.parameter_hooks import hooks_after, hooks_before
from stepgauge.parallel.present_backward import at_end_of_backward
from stepgauge.parallel.sharding import Sharding, sent_dtype
from stepgauge.parallel.unsharded_group import UnshardedGroup
from stepgauge.parallel.usage import Usage
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED


class Prefetcher:
    """Starts gathering the next unit's weights, as long as a step uses units as the last one did."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._order: CallOrder | None = None
        self._is_active = False
        self._expected: list[ParameterGroup] = []
        self._calls: list[ParameterGroup] = []
        self._coming: dict[ParameterGroup, UnshardedGroup] = {}
        # calls of the last forward, which backward takes in reverse
        self._forward: list[weakref.ref[UnshardedGroup]] = []

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
            for unsharded in self._coming.values():
                unsharded.reshard()
            self._coming = {}

    def _require_order(self, unit: ParameterGroup | None) -> None:
        """Raises RuntimeError where ranks would gather different weights together, or (None) where
        they have not called as many.
        """
        place = len(self._calls)
        expected = self._expected[place : place + 1] == [unit]
        if not (expected if unit else place == len(self._expected)):
            self._order = self._order or CallOrder(self._sharding.group)
            called = [each.name or "the module" for each in self._calls]
            self._order.require_same(called, (unit.name or "the module") if unit else "nothing")

    def take(self, unit: ParameterGroup) -> UnshardedGroup:
        if self._is_active:
            self._require_order(unit)
        unsharded = self._coming.pop(unit, None)
        if unsharded is None or not unsharded.is_current():
            unsharded = unit.unshard()
        return unsharded

    def entered(self, unit: ParameterGroup) -> None:
        if not self._is_active:
            return
        place = len(self._calls)
        self._calls.append(unit)
        if self._expected[place : place + 1] != [unit]:
            return
        for following in self._expected[place + 1 : place + 1 + PREFETCHED]:
            if following not in self._coming and following.unsharded is None:
                self._coming[following] = following.unshard()

    def left(self, unsharded: UnshardedGroup) -> None:
        if self._is_active:
            self._forward.append(weakref.ref(unsharded))

    def entered_backward(self, unsharded: UnshardedGroup) -> None:
        calls = [call() for call in self._forward]
        if unsharded in calls:
            place = calls.index(unsharded)
            for before in calls[max(0, place - PREFETCHED) : place]:
                if before is not None:
                    before.unshard()


class Reductions:
    """Averages whole gradients into the shards while backward goes on; `.grad` has the means when
    backward returns.
    """

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.parameters: list[nn.Parameter] = []
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"sharding": self.sharding, "parameters": self.parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self.is_running = False
        self._in_flight: list[list[FlatGradients]] = []  # of each unit
        self._used: set[nn.Parameter] = set()
        self._unused_here: list[tuple[nn.Parameter, DTensor]] = []
        self._usage: Usage | None = None
        # gradients, by their versions, when a backward failed
        self._incomplete: list[tuple[Tensor, int]] = []
        # what this backward used, and frees at its end where it has not come to the weights
        self._whole: list[UnshardedGroup] = []
        self._keeps_whole = False

    def begin(self, device: torch.device) -> None:
        """To be called in a backward, before anything of it."""
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
            # the graph that create_graph makes reads them
            self._keeps_whole = torch.is_grad_enabled()
            at_end_of_backward(self._finish, device)

    def uses(self, unsharded: UnshardedGroup) -> None:
        if self.is_running:
            self._whole.append(unsharded)

    def _require_zeroed(self) -> None:
        """Raises RuntimeError for gradients of a backward that failed: those of the unit in which
        it failed are lost.
        """
        incomplete, self._incomplete = self._incomplete, []
        for parameter in self.parameters:
            for gradient, version in incomplete:
                if parameter.grad is gradient and gradient._version == version:
                    raise RuntimeError(
                        "a backward has failed, and the gradients of sharded weights are "
                        "incomplete: zero them before the next"
                    )

    def queue(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """As `start`, outside of a backward, in the parameters' own type; until `flush`."""
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
        self.start(gradients, None)

    def flush(self) -> None:
        """Waits for all that was queued; the shards then have their gradients."""
        self._finish(failed=False)

    def start(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Sends the whole gradients of a unit's weights; None counts as zero."""
        device = next(iter(gradients)).device
        self.begin(device)
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._collect()
        alike: dict[torch.dtype, dict[nn.Parameter, Tensor | None]] = {}
        for parameter, gradient in gradients.items():
            alike.setdefault(parameter.dtype, {})[parameter] = gradient
        flats = [
            FlatGradients(of_type, sent_dtype(dtype, compute_dtype), self.sharding)
            for dtype, of_type in alike.items()
        ]
        launches = [flat.send for flat in flats]
        works = launch_together(launches, group=self.sharding.group, device=device)
        for flat, work in zip(flats, works, strict=True):
            flat.work = work
        self._in_flight.append(flats)

    @torch.no_grad()
    def _collect(self) -> None:
        for flat in self._in_flight.pop(0):
            for parameter, part, used in flat.receive():
                if used:
                    self._used.add(parameter)
                    self._accumulate(parameter, part)
                else:
                    self._unused_here.append((parameter, part))

    def _accumulate(self, parameter: nn.Parameter, part: Tensor) -> None:
        """As autograd does, which forgets hooks of a DTensor that was converted."""
        for hook in hooks_before(parameter):
            changed = hook(part)
            part = part if changed is None else changed
        if parameter.grad is None:
            parameter.grad = part
        else:
            parameter.grad.add_(part)
        for hook in hooks_after(parameter):
            hook(parameter)

    @torch.no_grad()
    def _finish(self, failed: bool) -> None:
        try:
            while self._in_flight:
                self._collect()
            for unsharded in self._whole:
                unsharded.put_back()
                if unsharded.is_unsharded and not self._keeps_whole:
                    unsharded.reshard()
            if failed:  # elsewhere it may not have: ranks cannot ask each other
                given = [p.grad for p in self.parameters if p.grad is not None]
                self._incomplete = [(gradient, gradient._version) for gradient in given]
                return
            if not self._used and not self._unused_here:
                return
            asked = [parameter for parameter, _ in self._unused_here]
            self._usage = self._usage or Usage(self.parameters, self.sharding)
            unused = self._usage.unused_anywhere(asked, self._used)
            for parameter, part in self._unused_here:
                if parameter not in unused:
                    self._accumulate(parameter, part)
        finally:
            kept = self._usage, self._incomplete
            self._reset()
            self._usage, self._incomplete = kept
