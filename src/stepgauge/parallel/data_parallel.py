"""Data parallel training: each rank computes the gradients of its own batch, and their mean is what
all step with.

One mechanism, four settings of it. Gradients travel in the buckets of a plan (spec/buckets.py), and
a bucket is sent either when its last gradient is there, while backward goes on, or when backward
has ended:

    NaiveDataParallel        a bucket a gradient, after backward, one after the other
    FlatDataParallel         one bucket for all gradients, after backward
    OverlappedDataParallel   a bucket a gradient, during backward
    BucketedDataParallel     buckets of about `bucket_mb`, during backward
"""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.messages import (
    Averager,
    Done,
    Launched,
    as_one_message,
    flattened,
    narrow_gradients,
    widen,
)
from stepgauge.parallel.narrow import NarrowGradients, remove_with
from stepgauge.parallel.replicas import describe_parameters, prepare_replicas
from stepgauge.spec.plan.buckets import Bucket, plan_buckets, plan_launches

HOOKS = 2  # of this module's on a parameter
# as torch's DistributedDataParallel: communication starts with the first layers of backward
FIRST_BUCKET_MB = 1.0


class Sending(TypedDict, total=False):
    """How the messages of a `DataParallel` travel; the terms are explained there."""

    group: dist.ProcessGroup | None
    reduce_dtype: torch.dtype | None


@dataclasses.dataclass
class Cycle:
    """One synchronisation of all buckets: what has arrived, what was sent, what is not yet waited
    for.
    """

    missing: list[int]  # gradients that a launch still waits for
    arrived: set[str] = dataclasses.field(default_factory=set)
    launched: int = 0  # launches, always the first ones of the plan
    in_flight: list[tuple[Launched, int, list[Tensor]]] = dataclasses.field(default_factory=list)


class DataParallel(nn.Module):
    """Averages the gradients of a module over the ranks of a group, bucket by bucket.

    All ranks send the buckets in the plan's order, whatever the order in which gradients arrive: a
    bucket that is complete early waits for those before it, so that ranks can never wait for each
    other's different messages.

    A gradient that no rank computed stays None; one that only some ranks computed is averaged with
    zeros. Buffers are broadcast once, at the start.

    reduce_dtype  floating type that gradients of wider ones travel and are averaged in. `.grad`
                  holds the widened mean once gradients are synchronised, and until then may be
                  None: zero_grad before that discards nothing, also not after an exception
    packs         copies the gradients of a bucket behind each other also where they could be sent
                  at once as they lie

    Raises DifferentModelsError, on every rank, where the ranks hold different modules; ValueError
    for a reduce_dtype that is not floating.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        buckets: Sequence[Bucket],
        overlaps: bool,
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        packs: bool = False,
    ):
        super().__init__()
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(
                f"reduce_dtype is {reduce_dtype}; gradients are averaged in floating types"
            )
        prepare_replicas(module, group)
        self.module = module
        self.reduce_dtype, self.packs = reduce_dtype, packs
        self.buckets = tuple(buckets)
        self.launches = plan_launches(self.buckets)
        self.overlaps = overlaps
        self.averager = Averager(group)
        # False leaves the collectives out and keeps all else, to time the rest
        self.communicates = True
        self._synchronises = True
        self._begun = False
        self._some_go_unused: bool | None = None  # known after the first synchronisation
        self._by_name: Mapping[str, nn.Parameter] = dict(module.named_parameters())
        self._parameters_of = [
            [self._by_name[name] for name in bucket.names] for bucket in self.buckets
        ]
        self._frees = any(bucket.owner is not None for bucket in self.buckets)
        self._owned_means: set[str] = set()
        self._earlier: dict[str, Tensor] = {}
        self._cycle = self._new_cycle()
        self._launch_of = {
            name: launch
            for launch, indices in enumerate(self.launches)
            for name in itertools.chain(*(self.buckets[index].names for index in indices))
        }
        for name, launch in self._launch_of.items():
            remove_with(self, self._watch(name, launch))
        self._narrow: dict[str, Tensor] = {}  # gradients in reduce_dtype that are not yet sent
        self._kept = self._narrow_gradients() if reduce_dtype is not None else None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._begun |= self._synchronises and torch.is_grad_enabled()
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone; the next one outside
        sends the sum.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def finish_gradient_synchronization(self) -> None:
        """Sends what is not yet sent and waits for all: on a GPU its stream does, and the host goes
        on.

        To be called on every rank after the backward passes and before gradients are used.
        """
        if self._kept is not None:
            self._kept.forget()
        if self._begun or self._cycle.arrived:
            self.synchronize_gradients()

    def synchronize_gradients(self) -> None:
        """Sends the buckets that are not yet sent, with the gradients that are there now, and
        waits.
        """
        asks, arrived = self._some_go_unused is not False, self._cycle.arrived
        present = [
            name in arrived or self._by_name[name].grad is not None
            for name in self._launch_of
            if asks
        ]
        while self._cycle.launched < len(self.launches):
            self._launch_next()
            if not self.overlaps:
                self._wait_all()
        self._wait_all()
        for parameter in self._unused_everywhere(present) if present else ():
            parameter.grad = None
        self._cycle = self._new_cycle()
        self._begun = False

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the averaged gradients so that the norm of all of them is at most `max_norm`; the
        norm before.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def _narrow_gradients(self) -> NarrowGradients:
        assert self.reduce_dtype is not None, "there is one"
        narrowed = [index for index in range(len(self.buckets)) if self._is_narrow(index)]
        names = {
            self._by_name[name]: name for index in narrowed for name in self.buckets[index].names
        }
        return NarrowGradients(self.module, self.reduce_dtype, names, own_hooks=HOOKS)

    def _new_cycle(self) -> Cycle:
        return Cycle(
            missing=[
                sum(len(self._parameters_of[index]) for index in launch) for launch in self.launches
            ]
        )

    def _watch(self, name: str, launch: int) -> list[RemovableHandle]:
        # Autograd holds the hooks where the garbage collector does not look: through them the
        # wrapper, and all weights, would never be freed.
        this = weakref.ref(self)

        def before_accumulation(gradient: Tensor | None) -> None:
            if (wrapper := this()) is None:
                return
            if name in wrapper._cycle.arrived or name in wrapper._owned_means:
                wrapper._make_way(name)
            elif wrapper._earlier and wrapper._by_name[name].grad is None:
                # whoever threw away what came since gives that up too
                wrapper._earlier.pop(name, None)
            if wrapper._kept is not None and (narrow := wrapper._kept.fetch(name)) is not None:
                wrapper._take(name, narrow, more_comes=gradient is not None)

        def after_accumulation(_: Tensor) -> None:
            # A gradient that was taken in reduce_dtype has arrived already.
            if (
                (wrapper := this()) is not None
                and wrapper._synchronises
                and name not in wrapper._cycle.arrived
            ):
                wrapper._arrive(name, launch)

        parameter = self._by_name[name]
        return [
            parameter.register_hook(before_accumulation),
            parameter.register_post_accumulate_grad_hook(after_accumulation),
        ]

    def _make_way(self, name: str) -> None:
        """What autograd is about to add must not meet a gradient that is on its way or is a mean."""
        if name in self._cycle.arrived:
            self.synchronize_gradients()
            self._begun = self._synchronises
        # A mean that its owner alone has may not be averaged again with what the others have since.
        if name in self._owned_means:
            self._owned_means.discard(name)
            parameter = self._by_name[name]
            if parameter.grad is not None:
                self._earlier[name], parameter.grad = parameter.grad, None

    def _arrive(self, name: str, launch: int) -> None:
        cycle = self._cycle
        cycle.arrived.add(name)
        cycle.missing[launch] -= 1
        if self.overlaps and not cycle.missing[launch]:
            while cycle.launched < len(self.launches) and not cycle.missing[cycle.launched]:
                self._launch_next()

    def _take(self, name: str, gradient: Tensor, *, more_comes: bool) -> None:
        """A gradient in reduce_dtype that autograd did not add to `.grad`. more_comes: it is about
        to add another.
        """
        parameter = self._by_name[name]
        if parameter.grad is None and self._synchronises and not more_comes:
            self._narrow[name] = gradient
        else:
            wide = gradient.to(parameter.dtype)
            parameter.grad = wide if parameter.grad is None else parameter.grad + wide
        if self._synchronises and not more_comes:
            self._arrive(name, self._launch_of[name])

    def _launch_next(self) -> None:
        cycle = self._cycle
        indices = self.launches[cycle.launched]
        messages = [self._message(index) for index in indices]
        works = self._send(messages, indices) if self.communicates else [Done()] * len(messages)
        cycle.in_flight += zip(works, indices, messages, strict=True)
        cycle.launched += 1
        while self._frees and cycle.in_flight and cycle.in_flight[0][0].is_completed():
            self._wait_first()

    def _message(self, index: int) -> list[Tensor]:
        """The bucket's gradients, packed or one by one."""
        parameters = self._parameters_of[index]
        packs = len(parameters) > 1 and self._packs(index)
        if self.reduce_dtype is not None and self._is_narrow(index):
            taken = [self._narrow.pop(name, None) for name in self.buckets[index].names]
            narrow = narrow_gradients(parameters, taken, self.reduce_dtype)
            return [flattened(narrow)] if packs else narrow
        return (
            [as_one_message(parameters)]
            if packs
            else [as_one_message([parameter]) for parameter in parameters]
        )

    def _packs(self, index: int) -> bool:
        bucket, device = self.buckets[index], self._parameters_of[index][0].device
        return self.packs or bucket.owner is not None or not self.averager.takes_lists(device)

    def _is_narrow(self, index: int) -> bool:
        return (
            self.buckets[index].parameters[0].bytes_per_value
            < self._parameters_of[index][0].element_size()
        )

    def _send(self, messages: list[list[Tensor]], indices: Sequence[int]) -> list[Launched]:
        if len(messages) == 1:  # nearly always, and a small model's step is the host's
            return [self._send_one(messages[0], indices[0])]
        launches = [
            functools.partial(self._send_one, message, index)
            for message, index in zip(messages, indices, strict=True)
        ]
        return launch_together(launches, group=self.averager.group, device=messages[0][0].device)

    def _send_one(self, message: list[Tensor], index: int) -> Launched:
        if len(message) > 1:
            return self.averager.launch_list(message)
        return self.averager.launch(message[0], owner=self.buckets[index].owner)

    def _wait_all(self) -> None:
        while self._cycle.in_flight:
            self._wait_first()

    def _wait_first(self) -> None:
        work, index, message = self._cycle.in_flight.pop(0)
        work.wait()
        bucket = self.buckets[index]
        if self._is_narrow(index) and bucket.owner in (None, dist.get_rank(self.averager.group)):
            widen(message, self._parameters_of[index])
        if bucket.owner is not None:
            self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        """Keeps the means where this rank owns them, and frees its share where another does."""
        owns = bucket.owner == dist.get_rank(self.averager.group)
        for name in bucket.names:
            parameter = self._by_name[name]
            if not owns:
                parameter.grad = None
                continue
            if name in self._earlier and parameter.grad is not None:
                parameter.grad.add_(self._earlier.pop(name))
            self._owned_means.add(name)

    def _planned(self) -> list[nn.Parameter]:
        return list(itertools.chain(*self._parameters_of))

    @torch.no_grad()
    def _unused_everywhere(self, present: list[bool]) -> list[nn.Parameter]:
        """The parameters that no rank has a gradient of, `present` saying which this rank had of
        the planned.

        The first call asks all ranks whether any parameter goes unused; where none does it need not
        be called again, and a gradient that is missing then counts as zero. Asking makes the host
        wait.
        """
        parameters = self._planned()
        used = torch.tensor(present, dtype=torch.int32, device=parameters[0].device)
        if self._some_go_unused is None:
            everywhere = used.min().reshape(1)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self.averager.group)
            self._some_go_unused = not everywhere.item()
            if not self._some_go_unused:
                return []
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.averager.group)
        return [
            parameter
            for parameter, anywhere in zip(parameters, used.tolist(), strict=True)
            if not anywhere
        ]


class NaiveDataParallel(DataParallel):
    """All-reduces each gradient after backward, one after the other."""

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(
            module, buckets=_plan(module, sending, cap_mb=0), overlaps=False, **sending
        )


class FlatDataParallel(DataParallel):
    """Packs all gradients into one message (one a dtype and device) and all-reduces it after
    backward.
    """

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(
            module,
            buckets=_plan(module, sending, cap_mb=None),
            overlaps=False,
            packs=True,
            **sending,
        )


class OverlappedDataParallel(DataParallel):
    """All-reduces each gradient as soon as backward has it, while backward goes on."""

    def __init__(self, module: nn.Module, **sending: Unpack[Sending]):
        super().__init__(module, buckets=_plan(module, sending, cap_mb=0), overlaps=True, **sending)


class BucketedDataParallel(DataParallel):
    """All-reduces gradients in buckets of `bucket_mb` (10^6 bytes) to less than twice that, during
    backward.

    `owners` gives the rank, by a parameter's name, that alone receives its gradient: ZeRO 2. On the
    other ranks the gradient is freed.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        *,
        owners: Mapping[str, int] | None = None,
        **sending: Unpack[Sending],
    ):
        plan = _plan(module, sending, cap_mb=bucket_mb, first_mb=FIRST_BUCKET_MB, owners=owners)
        super().__init__(module, buckets=plan, overlaps=True, **sending)


def _plan(module: nn.Module, sending: Sending, **how: Any) -> tuple[Bucket, ...]:
    return plan_buckets(describe_parameters(module, sending.get("reduce_dtype")), **how)
