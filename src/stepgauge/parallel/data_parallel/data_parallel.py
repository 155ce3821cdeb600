"""Data parallel training: each rank computes the gradients of its own batch, and their mean is what
all step with.

When backward returns, `.grad` is the mean over the ranks, and nothing is kept elsewhere: what is
done to it then means what it means in one process. Gradients travel in the buckets of a plan
(spec/plan/buckets.py). A bucket is sent when its last gradient is there, while backward goes on, or
at the end of backward: what the classes at the end of this file differ in, each by its row of
WRAPPERS in spec/layout.py.
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
from stepgauge.parallel.data_parallel.readiness import Averaged, Readiness
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

# What a copy makes anew: hooks, and what they have seen.
OF_THIS_PROCESS = ("_members", "_usage", "_readiness", "_in_flight", "_launches", "_remove_hooks")


class DataParallel(nn.Module):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket.

    A gradient that no rank computed stays as it was, None or not; one that only some ranks computed
    is averaged with zeros. All ranks must call backward equally often, and must freeze the same
    parameters. Buffers are broadcast once, at the start.

    reduce_dtype  floating type that gradients of wider ones travel and are averaged in

    Raises DifferentModelsError, on every rank, where the ranks hold different modules; ValueError
    for a reduce_dtype that is not floating and for sharded parameters. Backward raises RuntimeError
    for create_graph=True, and forward where the module has other parameters than when it was wrapped.
    """

    _readiness: Readiness | None
    _in_flight: list[Any]  # what `_gradients_of` gives
    policy: Wrapper  # what is sent when
    bucket_mb = 25.0
    owners: Mapping[str, int] | None = None  # ranks, by names, that alone get a mean: ZeRO 2

    def __init__(
        self, module: nn.Module, *, group: Group = None, reduce_dtype: torch.dtype | None = None
    ):
        super().__init__()
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype is {reduce_dtype}; it must be a floating type")
        require_whole(module)
        prepare_replicas(module, group)
        self.module, self.reducer = module, GradientReducer(group)
        self.reduce_dtype = reduce_dtype
        self.communicates = True  # False leaves the collectives out, to time the rest
        self._synchronises = True
        self._registered = registrations()
        named = module.named_parameters()
        self._attach({p: n for n, p in named if p.is_floating_point() or p.is_complex()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._registered != (now := registrations()):
            require_known(self.module, {member.parameter for member in self._members})
            self._registered = now
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward inside adds to this rank's gradients; the next outside averages the sum."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def expect_backward(self) -> None:
        """Before backward passes under no_sync that add to gradients which may be means already: a
        pipeline's, of which layers that are split add without autograd.
        """
        return

    def synchronize_gradients(self) -> None:
        """Averages every `.grad` as it is now, outside of backward. To be called on every rank."""
        self.begin_synchronizing()
        self.finish_synchronizing()

    @torch.no_grad()
    def begin_synchronizing(self) -> None:
        """Sends every `.grad` as it is now, which may not be touched until `finish_synchronizing`."""
        readiness = self._begin()
        for member in self._members:
            member.is_local = member.is_local or member.parameter.grad is not None
        self._send(readiness.next_launches(rest=True))

    @torch.no_grad()
    def finish_synchronizing(self, failed: bool = False) -> None:
        """Sends what is not yet sent, waits, and leaves the means in `.grad`."""
        if self._readiness is None:
            return
        try:
            for member in self._members:
                # what zero_grad has taken since is not there any more
                if member.is_local and not member.is_counted and member.parameter.grad is None:
                    member.is_local = False
            self._send(self._readiness.next_launches(rest=True))
            here = [m.number for launch in self._launches for m in launch if not m.is_local]
            unused = self._usage.unused_anywhere(here, asks=self.communicates)
            for gradients in self._in_flight:
                gradients.unpack(unused)
        finally:
            self._readiness, self._in_flight = None, []
            for member in self._members:
                member.is_local = member.is_counted = False

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of all of at most `max_norm`; the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def __getstate__(self) -> dict[str, Any]:
        names = {member.name for member in self._members}
        left = {n: v for n, v in self.__dict__.items() if n not in OF_THIS_PROCESS}
        return {**left, "_names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("_names")
        super().__setstate__(state)
        self._attach({p: name for name, p in self.module.named_parameters() if name in names})

    def _attach(self, names: Mapping[nn.Parameter, str]) -> None:
        """Takes the parameters by name, without a gradient on its way."""
        self._members = [Averaged(n, name, p) for n, (p, name) in enumerate(names.items())]
        self._usage = Usage(names, self.reducer)
        self._readiness, self._in_flight = None, []
        handles: list[Any] = []
        for member in self._members:
            with requiring_grad(member.parameter):
                handles += self._hooks_of(member)
        self._plan()
        self._remove_hooks = weakref.finalize(self, lambda: [each.remove() for each in handles])
        self._remove_hooks.atexit = False

    def _hooks_of(self, member: Averaged) -> list[Any]:
        member.hook = WrapperHook(self._arrive, member.number)
        return [member.parameter.register_post_accumulate_grad_hook(member.hook)]

    def _averages(self, member: Averaged) -> bool:
        """Whether this wrapper averages it: of several with the same parameter, the one made last."""
        hooks = post_accumulate_hooks(member.parameter)
        return len(hooks) < 2 or [h for h in hooks if isinstance(h, WrapperHook)][-1] is member.hook

    def _plan(self) -> None:
        """Buckets of what is trained, and of what no_sync has left."""
        self._planned_for = self._averaged()
        planned = {
            member.name: member
            for member, dtype in zip(self._members, self._planned_for, strict=True)
            if dtype is not None
        }
        self.buckets = self.policy.plan_buckets(
            [describe_parameter(n, m.parameter, self.reduce_dtype) for n, m in planned.items()],
            bucket_mb=self.bucket_mb,
            owners=self.owners,
        )
        self._planned = plan_launches(self.buckets)
        self._launches = [
            [planned[name] for bucket in launch for name in bucket.names]
            for launch in self._planned
        ]
        for member in self._members:
            member.launch = None
        for number, launch in enumerate(self._launches):
            for member in launch:
                member.launch = number

    def _averaged(self) -> list[torch.dtype | None]:
        """The type of each parameter, None for one that is not averaged. One may have been frozen
        since no_sync.
        """
        return [
            m.parameter.dtype
            if (m.parameter.requires_grad or m.is_local) and self._averages(m)
            else None
            for m in self._members
        ]

    def _begin(self, device: torch.device | None = None) -> Readiness:
        """Of the backward that goes on, on a device, whose end averages what it has not."""
        if self._readiness is not None:
            return self._readiness
        if device is not None:
            at_end_of_backward(self.finish_synchronizing, device)
        if self._averaged() != self._planned_for:
            self._plan()
        self._readiness = begun = Readiness(self._launches)
        return begun

    def _arrive(self, number: int) -> None:
        """After backward has added to a gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into `.grad` is not averaged; take the gradients that "
                "are differentiated again with torch.autograd.grad"
            )
        member = self._members[number]
        is_alone = len(post_accumulate_hooks(member.parameter)) < 2
        # frozen since forward (autograd has added nothing), or another wrapper's to average
        if not member.parameter.requires_grad or not (is_alone or self._averages(member)):
            return
        member.is_local = True
        if self._synchronises:
            readiness = self._readiness or self._begin(member.parameter.device)
            # Hooks of others run after ours, and may write `.grad`.
            readiness.arrive(member, counts=is_alone)
            if self.policy.overlaps and readiness.is_next_complete:
                self._send(readiness.next_launches())

    def _send(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            gradients = self._gradients_of(number)
            if self.communicates:
                gradients.send()
            if not self.policy.overlaps:
                gradients.wait()
            self._in_flight.append(gradients)

    def _gradients_of(self, number: int) -> Any:
        members = self._launches[number]
        dtype = reduced_dtype(members[0].parameter, self.reduce_dtype)
        return BucketGradients(members, self.reducer, dtype=dtype, packs=self.policy.packs)


class NaiveDataParallel(DataParallel):
    """A bucket a gradient, all-reduced at the end of backward, one after the other."""

    policy = WRAPPERS["naive"]


class FlatDataParallel(DataParallel):
    """All gradients of a type and device packed into one bucket, at the end of backward."""

    policy = WRAPPERS["flat"]


class OverlappedDataParallel(DataParallel):
    """A bucket a gradient, while backward goes on."""

    policy = WRAPPERS["overlapped"]


class BucketedDataParallel(DataParallel):
    """Buckets of `bucket_mb` (10^6 bytes) to less than twice that, while backward goes on."""

    policy = WRAPPERS["bucketed"]

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, **settings: Any):
        self.bucket_mb = bucket_mb
        super().__init__(module, **settings)
