"""Reduces the whole gradients of a sharded module's units into the shards."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.autograd.parameter_hooks import post_accumulate_hooks, tensor_hooks
from stepgauge.parallel.autograd.running_backward import at_end_of_backward
from stepgauge.parallel.communication.collectives import launch_together
from stepgauge.parallel.data_parallel.usage import Usage
from stepgauge.parallel.fsdp.flat_gradients import FlatGradients
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit
from stepgauge.parallel.sharding import Sharding, sent_dtype
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT

if TYPE_CHECKING:
    from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit


class GradientReductions:
    """Starts to reduce the gradients of each unit while backward runs. When backward returns, the
    shards have their means in `.grad`.
    """

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.units: list[ShardedUnit] = []
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"sharding": self.sharding, "units": self.units}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._usage: Usage | None = None
        # The gradients that a failed backward left, with their versions.
        self._incomplete: list[tuple[Tensor, int]] = []
        self._kept: weakref.WeakSet[UnshardedUnit] = weakref.WeakSet()
        self._reset_backward()

    def _reset_backward(self) -> None:
        """Forgets the state of a backward."""
        self.is_running = False
        self._in_flight: list[list[FlatGradients]] = []  # one list per unit
        self._used: set[nn.Parameter] = set()
        # Means of weights that a part of this backward did not use on this rank.
        self._unused_here: list[tuple[nn.Parameter, DTensor]] = []
        # Weights that this backward gathered or found whole, each once, in order. Those that are still
        # whole at its end are freed.
        self._unsharded: dict[UnshardedUnit, None] = {}
        self._keeps_unsharded = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard for unit in self.units for shard in unit.shards]

    def forget_usage(self) -> None:
        """Must be called when a parameter was replaced by another one."""
        self._usage = None

    def begin_backward(self, device: torch.device) -> None:
        """Must be called in every backward, before anything else here. Only the first call acts."""
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
            # The graph that create_graph=True builds needs the whole weights.
            self._keeps_unsharded = torch.is_grad_enabled()
            self._unsharded = dict.fromkeys(self._kept)
            self._kept.clear()
            at_end_of_backward(self._end_backward, device)

    def free_after_backward(self, unsharded: UnshardedUnit) -> None:
        """Makes the next backward free these whole weights at its end, even if it does not use them."""
        self._kept.add(unsharded)

    def free_at_end(self, unsharded: UnshardedUnit) -> None:
        """Makes the running backward free these whole weights at its end, if they still are whole
        then. Does nothing outside of a backward.
        """
        if self.is_running:
            self._unsharded[unsharded] = None

    def _require_zeroed(self) -> None:
        """Raises RuntimeError if gradients of a failed backward are still there. The gradients of the
        unit in which it failed are lost.
        """
        incomplete, self._incomplete = self._incomplete, []
        for gradient, version in incomplete:
            for parameter in self.parameters:
                if parameter.grad is gradient and gradient._version == version:
                    raise RuntimeError(
                        "a backward failed, so the gradients of sharded weights are incomplete: "
                        "zero them before the next backward"
                    )

    def reduce_outside_backward(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Does the same as `reduce` outside of a backward, in the parameters' dtype. Must be followed
        by `wait`.
        """
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
        self.reduce(gradients, None)

    def wait(self) -> None:
        """Waits for all reductions; the shards then have their gradients."""
        self._end_backward(failed=False)

    def reduce(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Starts to reduce the whole gradients of a unit's weights; None counts as zero."""
        device = next(iter(gradients)).device
        self.begin_backward(device)
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._receive_oldest()
        by_dtype: dict[torch.dtype, dict[nn.Parameter, Tensor | None]] = {}
        for parameter, gradient in gradients.items():
            by_dtype.setdefault(parameter.dtype, {})[parameter] = gradient
        flats = [
            FlatGradients(of_dtype, sent_dtype(dtype, compute_dtype), self.sharding)
            for dtype, of_dtype in by_dtype.items()
        ]
        launches = [flat.send for flat in flats]
        works = launch_together(launches, group=self.sharding.group, device=device)
        for flat, work in zip(flats, works, strict=True):
            flat.work = work
        self._in_flight.append(flats)

    @torch.no_grad()
    def _receive_oldest(self) -> None:
        for flat in self._in_flight.pop(0):
            for parameter, mean, used in flat.receive():
                if used:
                    self._used.add(parameter)
                    self._accumulate(parameter, mean)
                else:
                    self._unused_here.append((parameter, mean))

    def _accumulate(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """Adds a mean to `.grad` and calls the parameter's hooks. Autograd could do that, but it loses
        the hooks of a DTensor that was converted.
        """
        for hook in tensor_hooks(parameter):
            changed = hook(mean)
            mean = mean if changed is None else changed
        if parameter.grad is None:
            parameter.grad = mean
        else:
            parameter.grad.add_(mean)
        for hook in post_accumulate_hooks(parameter):
            hook(parameter)

    def _accumulate_used_elsewhere(self) -> None:
        """Accumulates the means of weights that another rank used and this rank did not."""
        parameters = self.parameters
        self._usage = self._usage or Usage(parameters, self.sharding)
        here = {p for p, _ in self._unused_here} - self._used
        numbers = [number for number, p in enumerate(parameters) if p in here] if here else []
        unused = {parameters[number] for number in self._usage.unused_on_all_ranks(numbers)}
        for parameter, mean in self._unused_here:
            if parameter not in unused:
                self._accumulate(parameter, mean)

    @torch.no_grad()
    def _end_backward(self, failed: bool) -> None:
        """Receives what is in flight, and frees weights that are still whole."""
        try:
            while self._in_flight:
                self._receive_oldest()
            for unsharded in self._unsharded:
                unsharded.place_shards()
                if unsharded.is_unsharded and not self._keeps_unsharded:
                    unsharded.reshard()
            if failed:
                # Other ranks may not have failed, so ranks cannot compare which weights they used.
                gradients = [p.grad for p in self.parameters if p.grad is not None]
                self._incomplete = [(gradient, gradient._version) for gradient in gradients]
                return
            for unsharded in self._unsharded:
                unsharded.require_unwritten()
            if self._used or self._unused_here:
                self._accumulate_used_elsewhere()
        finally:
            self._reset_backward()
