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
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeGuard, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.bucket_gradients import BucketGradients, is_alone
from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.readiness import Backward, at_end_of_backward
from stepgauge.parallel.reducer import GradientReducer
from stepgauge.parallel.replicas import (
    describe_parameter,
    prepare_replicas,
    registrations,
    require_known,
)
from stepgauge.parallel.shares import Share, as_share
from stepgauge.parallel.usage import Usage
from stepgauge.spec.plan.buckets import FIRST_BUCKET_MB, Bucket, plan_buckets, plan_launches

OF_A_BACKWARD = ("_backward", "_late", "_in_flight", "_local", "_aside", "_remove_hooks")


class Sending(TypedDict, total=False):
    """How the messages of a `DataParallel` travel; the terms are explained there."""

    group: dist.ProcessGroup | None
    reduce_dtype: torch.dtype | None


class DataParallel(nn.Module):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket.

    A gradient that no rank computed stays as it was, None or not; one that only some ranks computed
    is averaged with zeros. All ranks must call backward equally often, and must freeze the same
    parameters. Buffers are broadcast once, at the start.

    cap_mb        MB (10^6 bytes) of gradients at which a bucket is closed; 0: one a gradient; None:
                  no limit
    owners        the rank, by a parameter's name, that alone receives its gradient (ZeRO 2); the
                  others have None of it after backward
    overlaps      buckets are sent while backward goes on
    packs         copies the gradients of a bucket behind each other also where they could be sent
                  at once as they lie
    reduce_dtype  floating type that gradients of wider ones travel and are averaged in

    Raises DifferentModelsError, on every rank, where the ranks hold different modules; ValueError
    for a reduce_dtype that is not floating. Backward raises RuntimeError for create_graph=True, and
    forward where the module has other parameters than when it was wrapped.
    """

    _backward: Backward | None

    def __init__(
        self,
        module: nn.Module,
        *,
        cap_mb: float | None,
        first_mb: float | None = None,
        owners: Mapping[str, int] | None = None,
        overlaps: bool = True,
        packs: bool = False,
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
        self.overlaps, self.packs, self.reduce_dtype = overlaps, packs, reduce_dtype
        self._owners: Mapping[str, int] = owners or {}
        self._how = {"cap_mb": cap_mb, "first_mb": first_mb, "owners": owners}
        # False leaves the collectives out and keeps all else, to time the rest
        self.communicates = True
        self._synchronises = True
        self._names = {p: name for name, p in module.named_parameters() if _takes_gradients(p)}
        self._usage = Usage(self._names, self.reducer)
        self._registered = registrations()
        self._begin()
        self._plan()

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
        self._plan_again()
        self._backward = Backward(self._launches)
        self._local.update(p for p in self._names if p.grad is not None)
        for place in self._backward.remaining():
            self._launch(place, waits=False)

    def finish_synchronizing(self) -> None:
        """Waits for what is on its way, and leaves the means in `.grad`."""
        self._finish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in OF_A_BACKWARD}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._names = {p: name for name, p in self.module.named_parameters() if p in self._names}
        self._usage = Usage(self._names, self.reducer)
        self._begin()
        self._plan()

    def _plan(self) -> None:
        """Buckets of what is trained, and of what no_sync has left."""
        self._planned_for = self._trained()
        described = [
            dataclasses.replace(
                describe_parameter(name, parameter, self.reduce_dtype),
                trainable=is_averaged,
            )
            for (parameter, name), (is_averaged, _) in zip(
                self._names.items(), self._planned_for, strict=True
            )
        ]
        self.buckets: tuple[Bucket, ...] = plan_buckets(described, **self._how)  # type: ignore[arg-type]
        by_name = {name: parameter for parameter, name in self._names.items()}
        self._parameters_of = [[by_name[name] for name in bucket.names] for bucket in self.buckets]
        self._launched_together = plan_launches(self.buckets)
        self._launches = [
            list(itertools.chain(*(self._parameters_of[index] for index in launch)))
            for launch in self._launched_together
        ]

    def _plan_again(self) -> None:
        if self._trained() != self._planned_for:
            self._plan()

    def _trained(self) -> list[Any]:
        """Whether each is averaged, and its type; it may have been frozen since no_sync."""
        return [(p.requires_grad or p in self._local, p.dtype) for p in self._names]

    def _begin(self) -> None:
        """Without a gradient on its way."""
        self._backward = None
        self._late: list[nn.Parameter] = []
        self._in_flight: list[BucketGradients] = []
        # parameters that backward has added to since gradients were averaged
        self._local: set[nn.Parameter] = set()
        # means that an owner has, while backward computes what is to be added to them
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._remove_hooks = weakref.finalize(self, _remove, [*self._hooked()])
        self._remove_hooks.atexit = False

    def _hooked(self) -> Iterator[Any]:
        # Autograd holds hooks where the garbage collector does not look: through them the wrapper,
        # and all weights, would never be freed.
        this = weakref.ref(self)
        for parameter in self._names:
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # what is frozen takes no hook, and may be trained later
            yield parameter.register_post_accumulate_grad_hook(functools.partial(_arrived, this))
            if self._owner(parameter) is not None:
                yield parameter.register_hook(functools.partial(_about_to_arrive, this, parameter))
            parameter.requires_grad_(trained)

    def _arrive(self, parameter: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into `.grad` is not averaged; take the gradients that "
                "are differentiated again with torch.autograd.grad"
            )
        if not parameter.requires_grad:  # frozen since forward: autograd has added nothing
            return
        self._local.add(parameter)
        if not self._synchronises:
            return
        if self._backward is None:
            self._plan_again()
            self._backward = Backward(self._launches)
            at_end_of_backward(self._finish, parameter.device)
        # Hooks of others run after ours, and may write `.grad`: it is sent when the next is there.
        for late in self._late:
            self._backward.arrive(late)
        self._late = [parameter] if len(parameter._post_accumulate_grad_hooks) > 1 else []
        if not self._late:
            self._backward.arrive(parameter)
        while self.overlaps and (place := self._backward.next_complete()) is not None:
            self._launch(place)

    def _set_aside(self, parameter: nn.Parameter) -> None:
        """The mean that an owner has may not be averaged again with what the others have since."""
        if parameter.grad is None or parameter in self._local:
            return
        if self._owner(parameter) != self.reducer.rank:
            raise RuntimeError(
                f"{self._names[parameter]} has a gradient on rank {self.reducer.rank} that backward "
                f"did not put there; rank {self._owner(parameter)} owns it"
            )
        if not self._synchronises:
            raise RuntimeError(
                "gradients that are averaged at their owners take no backward under no_sync(); set "
                "them to None first, or go on without no_sync()"
            )
        self._aside[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _launch(self, place: int, *, waits: bool = True) -> None:
        """Sends a launch's messages. `waits`: for earlier ones to owners, so that they are freed."""
        assert self._backward is not None, "gradients are sent in a backward"
        messages = [self._message(index) for index in self._launched_together[place]]
        if self.communicates:
            launches = [functools.partial(message.send, self.reducer) for message in messages]
            device = messages[0].parameters[0].device
            works = launch_together(launches, group=self.reducer.group, device=device)
            for message, work in zip(messages, works, strict=True):
                message.work = work
        self._in_flight += messages
        if not self.overlaps:
            messages[-1].work.wait()
        latest = len(messages) if waits else len(self._in_flight)
        while self._in_flight and self._is_settled(self._in_flight[0], latest):
            self._unpack(self._in_flight.pop(0), ())

    def _message(self, index: int) -> BucketGradients:
        bucket, parameters = self.buckets[index], self._parameters_of[index]
        narrow = bucket.parameters[0].bytes_per_value < parameters[0].element_size()
        listed = bucket.owner is None and self.reducer.takes_lists(parameters[0].device)
        return BucketGradients(
            parameters,
            {parameter for parameter in parameters if parameter in self._local},
            dtype=self.reduce_dtype if narrow else None,
            packs=len(parameters) > 1 and (self.packs or not listed),
            owner=bucket.owner,
        )

    def _is_settled(self, message: BucketGradients, latest: int) -> bool:
        """Whether it has arrived, or is to be waited for, since it is for an owner and not of the
        `latest` messages; and holds memory that unpacking frees: no rank can lack all of its
        gradients, since this one has them. Memory that backward may read again is written when it
        has ended.
        """
        is_late = message.owner is not None and len(self._in_flight) > latest
        return (
            bool(message.copies or message.owner is not None)
            and all(p.grad is None or is_alone(p.grad) for p in message.copies)
            and len(message.own) == len(message.parameters)
            and (is_late or message.work.is_completed())
        )

    @torch.no_grad()
    def _finish(self, _: bool = False) -> None:
        """Sends what is not yet sent, waits, and leaves the means in `.grad`."""
        backward = self._backward
        if backward is None:
            return
        try:
            # what zero_grad has taken since is not there any more
            self._local -= {p for p in self._local - backward.arrived if p.grad is None}
            for place in backward.remaining():
                self._launch(place)
            asked = [*itertools.chain(*self._launches)]
            unused = self._usage.unused_anywhere(asked, self._local, asks=self.communicates)
            for message in self._in_flight:
                self._unpack(message, unused)
            self._name_shares()
        finally:
            self._restore_set_aside()
            self._backward, self._in_flight, self._late = None, [], []
            self._local.clear()

    def _unpack(
        self, message: BucketGradients, unused: Sequence[nn.Parameter] | set[nn.Parameter]
    ) -> None:
        message.work.wait()
        message.unpack(unused, rank=self.reducer.rank)
        if message.owner is not None:
            self._restore_set_aside(message.parameters)

    def _restore_set_aside(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        for parameter in [*self._aside] if parameters is None else parameters:
            if (earlier := self._aside.pop(parameter, None)) is None:
                continue
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _name_shares(self) -> None:
        for parameter in self._names if self._owners else ():
            if self._owner(parameter) == self.reducer.rank and _is_plain(parameter.grad):
                parameter.grad = as_share(parameter.grad)

    def _owner(self, parameter: nn.Parameter) -> int | None:
        return self._owners.get(self._names[parameter])


def _takes_gradients(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _is_plain(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and not isinstance(gradient, Share)


def _arrived(wrapper: "weakref.ref[DataParallel]", parameter: nn.Parameter) -> None:
    if (this := wrapper()) is not None:
        this._arrive(parameter)


def _about_to_arrive(
    wrapper: "weakref.ref[DataParallel]", parameter: nn.Parameter, _: Tensor
) -> None:
    if (this := wrapper()) is not None:
        this._set_aside(parameter)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


class NaiveDataParallel(DataParallel):
    """All-reduces each gradient at the end of backward, one after the other."""

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(module, cap_mb=0, overlaps=False, **sending)


class FlatDataParallel(DataParallel):
    """Packs all gradients into one message (one a dtype and device) and all-reduces it at the end
    of backward.
    """

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(module, cap_mb=None, overlaps=False, packs=True, **sending)


class OverlappedDataParallel(DataParallel):
    """All-reduces each gradient as soon as backward has it, while backward goes on."""

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(module, cap_mb=0, **sending)


class BucketedDataParallel(DataParallel):
    """All-reduces gradients in buckets of `bucket_mb` (10^6 bytes) to less than twice that, while
    backward goes on.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        *,
        owners: Mapping[str, int] | None = None,
        **sending: Unpack[Sending],
    ):
        super().__init__(
            module, cap_mb=bucket_mb, first_mb=FIRST_BUCKET_MB, owners=owners, **sending
        )
