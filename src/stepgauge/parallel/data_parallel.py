"""Data parallel training: each rank computes the gradients of its own batch, and their mean is what
all step with.

When backward returns, `.grad` is the mean over the ranks, and nothing is kept elsewhere: what is
done to it then means what it means in one process. Gradients travel in the buckets of a plan
(spec/plan/buckets.py), and a bucket is sent either when its last gradient is there, while backward
goes on, or at the end of backward:

    NaiveDataParallel        a bucket a gradient, at the end, one after the other
    FlatDataParallel         one bucket for all gradients, at the end
    OverlappedDataParallel   a bucket a gradient, while backward goes on
    BucketedDataParallel     buckets of about `bucket_mb`, while backward goes on
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.bucket_gradients import BucketGradients
from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.readiness import Readiness, at_end_of_backward
from stepgauge.parallel.reducer import GradientReducer
from stepgauge.parallel.replicas import (
    describe_parameter,
    prepare_replicas,
    registrations,
    require_known,
)
from stepgauge.parallel.shares import as_plain
from stepgauge.parallel.usage import Usage
from stepgauge.spec.plan.buckets import FIRST_BUCKET_MB, Bucket, plan_buckets, plan_launches


class Sending(TypedDict, total=False):
    """How the gradients of a `DataParallel` travel; the terms are explained there."""

    group: dist.ProcessGroup | None
    reduce_dtype: torch.dtype | None


class DataParallel(nn.Module):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket.

    A gradient that no rank computed stays as it was, None or not; one that only some ranks computed
    is averaged with zeros. All ranks must call backward equally often, and must freeze the same
    parameters. Buffers are broadcast once, at the start.

    owners        the rank, by a parameter's name, that alone receives its gradient (ZeRO 2); the
                  others have None of it after backward
    reduce_dtype  floating type that gradients of wider ones travel and are averaged in

    Raises DifferentModelsError, on every rank, where the ranks hold different modules; ValueError
    for a reduce_dtype that is not floating. Backward raises RuntimeError for create_graph=True, and
    forward where the module has other parameters than when it was wrapped.
    """

    _readiness: Readiness | None
    _in_flight: list[BucketGradients]

    # MB (10^6 bytes) at which a bucket is closed; 0: one a gradient; None: no limit
    cap_mb: float | None = 25.0
    first_mb: float | None = None
    overlaps = True  # buckets are sent while backward goes on
    packs = False  # gradients are copied behind each other where they could be sent as they lie

    def __init__(
        self,
        module: nn.Module,
        *,
        owners: Mapping[str, int] | None = None,
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(
                f"reduce_dtype is {reduce_dtype}; gradients are averaged in floating types"
            )
        prepare_replicas(module, group)
        self.module, self.reducer = module, GradientReducer(group)
        self.reduce_dtype, self._owners = reduce_dtype, owners or {}
        # False leaves the collectives out and keeps all else, to time the rest
        self.communicates = True
        self._synchronises = True
        self._registered = registrations()
        of_module = module.named_parameters()
        self._attach({p: n for n, p in of_module if p.is_floating_point() or p.is_complex()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._registered != (now := registrations()):
            require_known(self.module, self._names)
            self._registered = now
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone; the next one outside
        averages the sum.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def synchronize_gradients(self) -> None:
        """Averages every `.grad` as it is now, outside of backward. To be called on every rank."""
        self.begin_synchronizing()
        self.finish_synchronizing()

    def begin_synchronizing(self) -> None:
        """Sends every `.grad` as it is now, which may not be touched until `finish_synchronizing`."""
        self._begin()
        self._local.update(p for p in self._names if p.grad is not None)
        self._send(complete=False, unpacks=False)

    def finish_synchronizing(self, failed: bool = False) -> None:
        """Sends what is not yet sent, waits, and leaves the means in `.grad`."""
        if self._readiness is None:
            return
        try:
            # what zero_grad has taken since is not there any more
            self._local -= {p for p in self._local - self._readiness.arrived if p.grad is None}
            self._send(complete=False)
            sent = [parameter for launch in self._launches for parameter in self._of(launch)]
            unused = self._usage.unused_anywhere(sent, self._local, asks=self.communicates)
            for gradients in self._in_flight:
                gradients.unpack(unused)
        finally:
            self._readiness, self._in_flight = None, []
            self._local.clear()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_remove_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach({p: name for name, p in self.module.named_parameters() if p in self._names})

    def _attach(self, names: Mapping[nn.Parameter, str]) -> None:
        """Takes the parameters by name, without a gradient on its way."""
        self._names, self._usage = names, Usage(names, self.reducer)
        self._readiness, self._in_flight = None, []
        # parameters that backward has added to since gradients were averaged
        self._local: set[nn.Parameter] = set()
        self._plan()
        self._remove_hooks = weakref.finalize(self, _remove, [*self._hooked()])
        self._remove_hooks.atexit = False

    def _hooked(self) -> Iterator[Any]:
        for parameter, name in self._names.items():
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # what is frozen takes no hook, and may be trained later
            arrive = _weakly(self._arrive, parameter)
            yield parameter.register_post_accumulate_grad_hook(arrive)
            if name in self._owners:
                yield parameter.register_hook(_weakly(self._expect, parameter))
            parameter.requires_grad_(trained)

    def _plan(self) -> None:
        """Buckets of what is trained, and of what no_sync has left."""
        self._planned_for = self._averaged()
        described = [
            describe_parameter(self._names[p], p, self.reduce_dtype) for p, _ in self._planned_for
        ]
        self.buckets = plan_buckets(
            described, cap_mb=self.cap_mb, first_mb=self.first_mb, owners=self._owners
        )
        self._launches = plan_launches(self.buckets)
        self._by_name = {self._names[p]: p for p, _ in self._planned_for}

    def _averaged(self) -> list[tuple[nn.Parameter, torch.dtype]]:
        """With their types; one may have been frozen since no_sync."""
        return [(p, p.dtype) for p in self._names if p.requires_grad or p in self._local]

    def _of(self, buckets: Sequence[Bucket]) -> list[nn.Parameter]:
        return [self._by_name[name] for bucket in buckets for name in bucket.names]

    def _begin(self) -> Readiness:
        if self._averaged() != self._planned_for:
            self._plan()
        self._readiness = Readiness([self._of(launch) for launch in self._launches])
        return self._readiness

    def _begin_backward(self, device: torch.device) -> Readiness:
        """Of the backward that goes on, whose end averages what it has not."""
        if self._readiness is None:
            self._begin()
            at_end_of_backward(self.finish_synchronizing, device)
        assert self._readiness is not None, "it has begun"
        return self._readiness

    def _expect(self, parameter: nn.Parameter) -> None:
        """Before backward adds to a mean that its owner alone has: it counts for all ranks then."""
        if parameter.grad is None or parameter in self._local or not parameter.requires_grad:
            return
        rank, owner = self.reducer.rank, self._owners[self._names[parameter]]
        if owner != rank:
            raise RuntimeError(
                f"{self._names[parameter]} has a gradient on rank {rank} that backward did not put "
                f"there; rank {owner} owns it"
            )
        if not self._synchronises:
            raise RuntimeError(
                "gradients that are averaged at their owners take no backward under no_sync(); set "
                "them to None first, or go on without no_sync()"
            )
        self._begin_backward(parameter.device)
        self._local.add(parameter)
        parameter.grad = as_plain(parameter.grad).mul_(self.reducer.ranks)

    def _arrive(self, parameter: nn.Parameter) -> None:
        """After backward has added to a gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into `.grad` is not averaged; take the gradients that "
                "are differentiated again with torch.autograd.grad"
            )
        if not parameter.requires_grad:  # frozen since forward: autograd has added nothing
            return
        self._local.add(parameter)
        if self._synchronises:
            self._begin_backward(parameter.device).arrive(parameter)
            if self.overlaps:
                self._send()

    @torch.no_grad()
    def _send(self, *, complete: bool = True, unpacks: bool = True) -> None:
        """Sends the next launches, and unpacks what has arrived."""
        assert self._readiness is not None, "gradients are sent in a backward"
        for number in self._readiness.next_launches(complete=complete):
            launch = [self._gradients_of(bucket) for bucket in self._launches[number]]
            if self.communicates:
                device = launch[0].parameters[0].device
                sends = [gradients.send for gradients in launch]
                works = launch_together(sends, group=self.reducer.group, device=device)
                for gradients, work in zip(launch, works, strict=True):
                    gradients.work = work
            if not self.overlaps:
                launch[-1].work.wait()
            self._in_flight += launch
            while unpacks and self._in_flight and self._can_be_unpacked(self._in_flight[0], launch):
                self._in_flight.pop(0).unpack()

    def _gradients_of(self, bucket: Bucket) -> BucketGradients:
        parameters = self._of([bucket])
        narrow = bucket.parameters[0].bytes_per_value < parameters[0].element_size()
        listed = bucket.owner is None and self.reducer.takes_lists(parameters[0].device)
        return BucketGradients(
            parameters,
            self._local,
            self.reducer,
            dtype=self.reduce_dtype if narrow else None,
            packs=len(parameters) > 1 and (self.packs or not listed),
            owner=bucket.owner,
        )

    def _can_be_unpacked(self, first: BucketGradients, latest: Sequence[BucketGradients]) -> bool:
        """Whether it has arrived; or is for an owner and not of the latest, so that its memory is
        wanted back. A host does not wait for those: ranks that use other parameters may be waiting
        for it, in a collective of their own.
        """
        return first.can_be_unpacked_early() and (
            first.work.is_completed()
            or (
                first.owner is not None
                and first not in latest
                and self.reducer.waits_on_device(first.parameters[0].device)
            )
        )


def _weakly(method: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> Callable[..., None]:
    """A hook that calls the method as long as its wrapper is there.

    Autograd holds hooks where the garbage collector does not look: through them the wrapper, and
    all weights, would never be freed.
    """
    method_of, parameter_of = weakref.WeakMethod(method), weakref.ref(parameter)

    def hook(_: Tensor) -> None:
        if (call := method_of()) is not None and (this := parameter_of()) is not None:
            call(this)

    return hook


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


class NaiveDataParallel(DataParallel):
    """All-reduces each gradient at the end of backward, one after the other."""

    cap_mb, overlaps = 0.0, False


class FlatDataParallel(DataParallel):
    """Packs all gradients into one message (one a dtype and device) and all-reduces it at the end
    of backward.
    """

    cap_mb, overlaps, packs = None, False, True


class OverlappedDataParallel(DataParallel):
    """All-reduces each gradient as soon as backward has it, while backward goes on."""

    cap_mb = 0.0


class BucketedDataParallel(DataParallel):
    """All-reduces gradients in buckets of `bucket_mb` (10^6 bytes) to less than twice that, while
    backward goes on.
    """

    first_mb = FIRST_BUCKET_MB

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        *,
        owners: Mapping[str, int] | None = None,
        **sending: Unpack[Sending],
    ):
        self.cap_mb = bucket_mb
        super().__init__(module, owners=owners, **sending)
