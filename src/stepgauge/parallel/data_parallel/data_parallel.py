"""Data parallel training: each rank computes the gradients of its own batch, and every rank steps
with their mean.

When backward returns, `.grad` is the mean over the ranks, and gradients are kept nowhere else: what
a user does to `.grad` then means the same as in one process. Gradients travel in the buckets of a
plan (spec/plan/buckets.py). The classes at the end of this file differ in their plan, and in whether
a bucket is sent as soon as its last gradient arrives or at the end of backward; each takes both from
its row of WRAPPERS in spec/layout.py.

A gradient's way: autograd adds it to `.grad` and calls the hook `_on_gradient`. The first gradient of
a backward calls `_backward_state`, which starts a `Readiness` and registers `finish_synchronizing`
for the end of that backward. When `Readiness` has counted all gradients of the next launch, `_send`
packs its buckets into a `BucketGradients` and starts their all-reduce. At the end of backward,
`finish_synchronizing` sends the launches that remain, waits for all, and stores the means in `.grad`.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import (
    WrapperHook,
    post_accumulate_hooks,
    requiring_grad,
)
from stepgauge.parallel.autograd.running_backward import at_end_of_backward
from stepgauge.parallel.communication.collectives import Group
from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.parallel.data_parallel.bucket_gradients import BucketGradients
from stepgauge.parallel.data_parallel.readiness import Readiness, TrackedParameter
from stepgauge.parallel.data_parallel.usage import Usage
from stepgauge.parallel.replicas import (
    describe_parameter,
    prepare_replicas,
    reduced_dtype,
    registrations,
    require_known,
    require_whole,
)
from stepgauge.spec.layout import WRAPPERS, Wrapper
from stepgauge.spec.plan.shards import plan_launches

# Attributes that a deep copy rebuilds instead of copying: hooks and their state.
NOT_COPIED = ("_tracked", "_usage", "_readiness", "_in_flight", "_launches", "_remove_hooks")


class DataParallel(nn.Module):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket.

    A gradient that no rank computed stays as it was, None or not; one that only some ranks computed
    is averaged with zeros for the others. All ranks must call backward equally often and freeze the
    same parameters. Buffers are broadcast once, at the start.

    reduce_dtype  floating-point dtype in which wider gradients are sent and averaged

    Raises DifferentModelsError, on every rank, if the ranks hold different modules; ValueError for a
    reduce_dtype that is not floating-point and for sharded parameters. Backward raises RuntimeError
    under create_graph=True, and forward if the module got other parameters after it was wrapped.
    """

    _readiness: Readiness | None  # of the running backward; None outside of one
    _in_flight: list[Any]  # launches that were sent: the results of `_pack`
    policy: Wrapper  # which gradients are sent together, and when
    bucket_mb = 25.0
    owners: Mapping[str, int] | None = None  # under ZeRO 2, the one rank that gets a mean, by name

    def __init__(
        self, module: nn.Module, *, group: Group = None, reduce_dtype: torch.dtype | None = None
    ):
        super().__init__()
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype is {reduce_dtype}; it must be a floating-point dtype")
        require_whole(module)
        prepare_replicas(module, group)
        self.module, self.reducer = module, GradientReducer(group)
        self.reduce_dtype = reduce_dtype
        self.communicates = True  # False skips the collectives, to time everything else
        self._synchronises = True  # False under no_sync
        self._registrations = registrations()
        named = module.named_parameters()
        self._attach({p: n for n, p in named if p.is_floating_point() or p.is_complex()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._registrations != (now := registrations()):
            require_known(self.module, {tracked.parameter for tracked in self._tracked})
            self._registrations = now
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to this rank's own gradients. The next backward outside averages the
        sum.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def prepare_local_backward(self) -> None:
        """Must be called before a backward under no_sync that adds to gradients which may already be
        means, if it adds some of them without autograd: the split layers of a pipeline do.
        """
        return

    def synchronize_gradients(self) -> None:
        """Averages every `.grad` as it is now, outside of backward. All ranks must call it."""
        self.begin_synchronizing()
        self.finish_synchronizing()

    @torch.no_grad()
    def begin_synchronizing(self) -> None:
        """Sends every `.grad` as it is now; none may be used before `finish_synchronizing`."""
        readiness = self._backward_state()
        for tracked in self._tracked:
            if tracked.parameter.grad is not None:
                tracked.is_unreduced = True
        self._send(readiness.remaining_launches())

    @torch.no_grad()
    def finish_synchronizing(self, failed: bool = False) -> None:
        """Sends the launches that remain, waits for all, and stores the means in `.grad`.

        failed  backward raised; the gradients so far are averaged all the same
        """
        if self._readiness is None:
            return
        try:
            for tracked in self._tracked:
                # zero_grad may have removed a gradient that no_sync had left
                if not tracked.is_ready and tracked.parameter.grad is None:
                    tracked.is_unreduced = False
            self._send(self._readiness.remaining_launches())
            unused_here = [
                tracked.number
                for launch in self._launches
                for tracked in launch
                if not tracked.is_unreduced
            ]
            unused = self._usage.unused_on_all_ranks(unused_here, communicates=self.communicates)
            for gradients in self._in_flight:
                gradients.unpack(unused)
        finally:
            self._readiness, self._in_flight = None, []
            for tracked in self._tracked:
                tracked.is_unreduced = tracked.is_ready = False

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their total norm is at most `max_norm`; returns the norm
        before.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def __getstate__(self) -> dict[str, Any]:
        names = {tracked.name for tracked in self._tracked}
        copied = {n: v for n, v in self.__dict__.items() if n not in NOT_COPIED}
        return {**copied, "_names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("_names")
        super().__setstate__(state)
        self._attach({p: name for name, p in self.module.named_parameters() if name in names})

    def _attach(self, names: Mapping[nn.Parameter, str]) -> None:
        """Starts to track parameters, given with their names: registers hooks and plans buckets."""
        self._tracked = [TrackedParameter(n, name, p) for n, (p, name) in enumerate(names.items())]
        self._usage = Usage(names, self.reducer)
        self._readiness, self._in_flight = None, []
        handles: list[Any] = []
        for tracked in self._tracked:
            with requiring_grad(tracked.parameter):
                handles += self._register_hooks(tracked)
        self._plan()
        self._remove_hooks = weakref.finalize(self, lambda: [each.remove() for each in handles])
        self._remove_hooks.atexit = False

    def _register_hooks(self, tracked: TrackedParameter) -> list[Any]:
        """Registers the wrapper's hooks of a parameter; returns their handles."""
        tracked.hook = WrapperHook(self._on_gradient, tracked.number)
        return [tracked.parameter.register_post_accumulate_grad_hook(tracked.hook)]

    def _reduces(self, tracked: TrackedParameter) -> bool:
        """Returns True if this wrapper reduces the parameter's gradient. If several wrappers share a
        parameter, only the newest does.
        """
        hooks = post_accumulate_hooks(tracked.parameter)
        if len(hooks) < 2:
            return True
        return [h for h in hooks if isinstance(h, WrapperHook)][-1] is tracked.hook

    def _plan(self) -> None:
        """Plans the buckets of the gradients to reduce, and which buckets are launched together."""
        self._planned_dtypes = self._reduced_dtypes()
        reduced = {
            tracked.name: tracked
            for tracked, dtype in zip(self._tracked, self._planned_dtypes, strict=True)
            if dtype is not None
        }
        self.buckets = self.policy.plan_buckets(
            [describe_parameter(n, t.parameter, self.reduce_dtype) for n, t in reduced.items()],
            bucket_mb=self.bucket_mb,
            owners=self.owners,
        )
        self._planned_launches = plan_launches(self.buckets)
        self._launches = [
            [reduced[name] for bucket in launch for name in bucket.names]
            for launch in self._planned_launches
        ]
        for tracked in self._tracked:
            tracked.launch = None
        for number, launch in enumerate(self._launches):
            for tracked in launch:
                tracked.launch = number

    def _reduced_dtypes(self) -> list[torch.dtype | None]:
        """Returns the dtype of each parameter, or None if its gradient is not reduced: the parameter
        is frozen and no_sync has left no gradient of it, or another wrapper reduces it.
        """
        return [
            tracked.parameter.dtype
            if (tracked.parameter.requires_grad or tracked.is_unreduced) and self._reduces(tracked)
            else None
            for tracked in self._tracked
        ]

    def _backward_state(self, device: torch.device | None = None) -> Readiness:
        """Returns the state of the running backward, creating it at the first gradient.

        device  of that gradient: when backward ends, the remaining launches are sent and all means
                stored. None outside of a backward
        """
        if self._readiness is None:
            if device is not None:
                at_end_of_backward(self.finish_synchronizing, device)
            if self._reduced_dtypes() != self._planned_dtypes:
                self._plan()
            self._readiness = Readiness(self._launches)
        return self._readiness

    def _on_gradient(self, number: int) -> None:
        """The hook that autograd calls when it has added to the `.grad` of a parameter."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into `.grad` is not averaged; compute gradients that "
                "are differentiated again with torch.autograd.grad"
            )
        tracked = self._tracked[number]
        is_only_hook = len(post_accumulate_hooks(tracked.parameter)) < 2
        # A parameter frozen since forward gets no gradient, but autograd calls its hooks.
        if not tracked.parameter.requires_grad or not (is_only_hook or self._reduces(tracked)):
            return
        tracked.is_unreduced = True
        if self._synchronises:
            readiness = self._readiness or self._backward_state(tracked.parameter.device)
            # Other hooks of the parameter run after this one and may write `.grad`.
            readiness.arrive(tracked, defers=not is_only_hook)
            if self.policy.overlaps and readiness.is_next_complete:
                self._send(readiness.complete_launches())

    def _send(self, numbers: Iterable[int]) -> None:
        """Packs launches, given by number, and starts their collectives."""
        for number in numbers:
            gradients = self._pack(number)
            if self.communicates:
                gradients.send()
            if not self.policy.overlaps:
                gradients.wait()
            self._in_flight.append(gradients)

    def _pack(self, number: int) -> Any:
        """Returns the gradients of a launch, ready to be sent."""
        members = self._launches[number]
        dtype = reduced_dtype(members[0].parameter, self.reduce_dtype)
        return BucketGradients(members, self.reducer, dtype=dtype, packs=self.policy.packs)


class NaiveDataParallel(DataParallel):
    """Sends one gradient per bucket, one after another, at the end of backward."""

    policy = WRAPPERS["naive"]


class FlatDataParallel(DataParallel):
    """Packs all gradients of a dtype and device into one bucket, sent at the end of backward."""

    policy = WRAPPERS["flat"]


class OverlappedDataParallel(DataParallel):
    """Sends one gradient per bucket, while backward runs."""

    policy = WRAPPERS["overlapped"]


class BucketedDataParallel(DataParallel):
    """Sends buckets of `bucket_mb` (10^6 bytes) to less than twice that, while backward runs."""

    policy = WRAPPERS["bucketed"]

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, **settings: Any):
        self.bucket_mb = bucket_mb
        super().__init__(module, **settings)
