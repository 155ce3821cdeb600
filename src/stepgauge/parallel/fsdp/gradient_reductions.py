"""The whole gradients of a sharded module's units, on their way to the shards."""

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
    """Averages whole gradients into the shards while backward goes on; `.grad` has the means when
    backward returns.
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
        self.is_running = False
        self._in_flight: list[list[FlatGradients]] = []  # of each unit
        self._used: set[nn.Parameter] = set()
        self._unused_here: list[tuple[nn.Parameter, DTensor]] = []
        self._usage: Usage | None = None
        # gradients, by their versions, when a backward failed
        self._incomplete: list[tuple[Tensor, int]] = []
        # what this backward used, and frees at its end where it has not come to the weights
        self._unsharded: dict[UnshardedUnit, None] = {}  # each once, in order
        self._keeps_unsharded = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard for unit in self.units for shard in unit.shards]

    def forget_usage(self) -> None:
        """Of parameters that others have taken the places of."""
        self._usage = None

    def begin_backward(self, device: torch.device) -> None:
        """To be called in a backward, before anything of it."""
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
            # the graph that create_graph makes reads them
            self._keeps_unsharded = torch.is_grad_enabled()
            at_end_of_backward(self._end_backward, device)

    def free_at_end(self, unsharded: UnshardedUnit) -> None:
        """In a backward: frees whole weights when it ends, where it has not come to them."""
        if self.is_running:
            self._unsharded[unsharded] = None

    def _require_zeroed(self) -> None:
        """Raises RuntimeError for gradients of a backward that failed: those of the unit in which
        it failed are lost.
        """
        incomplete, self._incomplete = self._incomplete, []
        for gradient, version in incomplete:
            for parameter in self.parameters:
                if parameter.grad is gradient and gradient._version == version:
                    raise RuntimeError(
                        "a backward has failed, and the gradients of sharded weights are "
                        "incomplete: zero them before the next"
                    )

    def reduce_outside_backward(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """As `reduce`, outside of a backward, in the parameters' own type; until `wait`."""
        if not self.is_running:
            self._require_zeroed()
            self.is_running = True
        self.reduce(gradients, None)

    def wait(self) -> None:
        """Waits for all that was sent; the shards then have their gradients."""
        self._end_backward(failed=False)

    def reduce(
        self,
        gradients: Mapping[nn.Parameter, Tensor | None],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Sends the whole gradients of a unit's weights; None counts as zero."""
        device = next(iter(gradients)).device
        self.begin_backward(device)
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._receive_oldest()
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
    def _receive_oldest(self) -> None:
        for flat in self._in_flight.pop(0):
            for parameter, part, used in flat.receive():
                if used:
                    self._used.add(parameter)
                    self._accumulate(parameter, part)
                else:
                    self._unused_here.append((parameter, part))

    def _accumulate(self, parameter: nn.Parameter, part: Tensor) -> None:
        """As autograd does, which forgets hooks of a DTensor that was converted."""
        for hook in tensor_hooks(parameter):
            changed = hook(part)
            part = part if changed is None else changed
        if parameter.grad is None:
            parameter.grad = part
        else:
            parameter.grad.add_(part)
        for hook in post_accumulate_hooks(parameter):
            hook(parameter)

    def _accumulate_used_elsewhere(self) -> None:
        """The gradients of weights that this rank did not use and another did."""
        parameters = self.parameters
        self._usage = self._usage or Usage(parameters, self.sharding)
        here = {p for p, _ in self._unused_here} - self._used
        numbers = [number for number, p in enumerate(parameters) if p in here] if here else []
        unused = {parameters[number] for number in self._usage.unused_on_all_ranks(numbers)}
        for parameter, part in self._unused_here:
            if parameter not in unused:
                self._accumulate(parameter, part)

    @torch.no_grad()
    def _end_backward(self, failed: bool) -> None:
        try:
            while self._in_flight:
                self._receive_oldest()
            for unsharded in self._unsharded:
                unsharded.place_shards()
                if unsharded.is_unsharded and not self._keeps_unsharded:
                    unsharded.reshard()
            if failed:  # elsewhere it may not have: ranks cannot ask each other
                given = [p.grad for p in self.parameters if p.grad is not None]
                self._incomplete = [(gradient, gradient._version) for gradient in given]
                return
            for unsharded in self._unsharded:
                unsharded.require_unwritten()
            if not self._used and not self._unused_here:
                return
            self._accumulate_used_elsewhere()
        finally:
            kept = self._usage, self._incomplete
            self._reset()
            self._usage, self._incomplete = kept
