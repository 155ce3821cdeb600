"""ZeRO stage 2 (Rajbhandari et al. 2020): a gradient is reduced to the owner of its parameter and
freed on the other ranks. sharded_optimizer.py has the optimizer.
"""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import WrapperHook
from stepgauge.parallel.autograd.running_backward import accumulates_into
from stepgauge.parallel.communication.collectives import is_only_group, launch_together
from stepgauge.parallel.data_parallel import BucketedDataParallel
from stepgauge.parallel.data_parallel.bucket_gradients import BucketGradients, owns_memory
from stepgauge.parallel.data_parallel.readiness import TrackedParameter
from stepgauge.parallel.replicas import device_of, reduced_dtype
from stepgauge.parallel.shares import as_plain, as_share
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.spec.layout import WRAPPERS


class OwnerDataParallel(BucketedDataParallel):
    """Bucketed data parallel in which only the owner of a parameter gets the mean of its gradient.
    After backward, `.grad` is None on the other ranks.

    A `.grad` that is there before backward is taken to be the mean of earlier backward passes: the
    owner's value counts, and those of the other ranks are dropped.

    owners  rank by parameter name, as ShardedOptimizer.owners_of returns them; all ranks get the
            gradient of a parameter without an owner

    Backward raises RuntimeError at its end if the `.grad` of another rank's parameter was part of
    larger memory: whoever reads that memory would expect the mean there.
    """

    policy = WRAPPERS["zero2"]
    owners: Mapping[str, int]

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        *,
        owners: Mapping[str, int],
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        self.owners = owners
        self._dropped_views: list[str] = []  # parameters whose `.grad` was part of larger memory
        super().__init__(module, bucket_mb, group=group, reduce_dtype=reduce_dtype)

    def finish_synchronizing(self, failed: bool = False) -> None:
        views, self._dropped_views = self._dropped_views, []
        super().finish_synchronizing(failed)
        if views:
            raise RuntimeError(
                f"the gradient of {views[0]} is part of larger memory on rank {self.reducer.rank}, "
                f"which does not get its mean: rank {self.owners[views[0]]} owns it"
            )

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of those of all ranks is at most `max_norm`; returns
        the norm before.
        """
        owner_of = {t.parameter: self.owners.get(t.name) for t in self._tracked}
        gradients = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        rank, ranks = self.reducer.rank, self.reducer.ranks
        own = [(1, gradient) for p, gradient in gradients.items() if owner_of.get(p) == rank]
        of_all = [(ranks, gradient) for p, gradient in gradients.items() if owner_of.get(p) is None]
        return clip_whole_norm(
            gradients.values(),
            own + of_all,
            max_norm,
            group=self.reducer.group,
            device=device_of(self.module),
        )

    def _register_hooks(self, tracked: TrackedParameter) -> list[Any]:
        handles = super()._register_hooks(tracked)
        if tracked.name in self.owners:
            hook = WrapperHook(self._before_accumulation, tracked.number)
            handles.append(tracked.parameter.register_hook(hook))
        return handles

    def prepare_local_backward(self) -> None:
        for tracked in self._tracked:
            if tracked.parameter.requires_grad and self._reduces(tracked):
                self._undo_mean(tracked)
                tracked.is_unreduced = True

    def _before_accumulation(self, number: int) -> None:
        """The hook that autograd calls before it adds to the `.grad` of a parameter."""
        tracked = self._tracked[number]
        if (
            tracked.parameter.grad is None
            or tracked.is_unreduced
            or not self._reduces(tracked)
            or not accumulates_into(tracked.parameter)
        ):
            return
        if not self._synchronises:
            raise RuntimeError(
                "only the owner of a parameter has its mean gradient: a backward under no_sync() "
                "cannot add to it; set gradients to None first, or call backward outside of no_sync()"
            )
        self._backward_state(tracked.parameter.device)
        self._undo_mean(tracked)

    def _undo_mean(self, tracked: TrackedParameter) -> None:
        """Replaces a mean by gradients whose mean it is: the owner's times the number of ranks, and
        None on the others.
        """
        parameter, name = tracked.parameter, tracked.name
        gradient = parameter.grad
        if gradient is None or tracked.is_unreduced or name not in self.owners:
            return
        if self.owners[name] == self.reducer.rank:
            tracked.is_unreduced = True
            parameter.grad = as_plain(gradient).mul_(self.reducer.ranks)
            return
        # The error is raised when backward ends: raised here, it would leave the owner waiting.
        if gradient.untyped_storage().nbytes() > gradient.nbytes:
            self._dropped_views.append(name)
        parameter.grad = None

    def _pack(self, number: int) -> "BucketLaunch":
        members = iter(self._launches[number])
        buckets: list[BucketGradients] = []
        for bucket in self._planned_launches[number]:
            own = [*itertools.islice(members, len(bucket.names))]
            dtype = reduced_dtype(own[0].parameter, self.reduce_dtype)
            if bucket.owner is None:
                buckets.append(BucketGradients(own, self.reducer, dtype=dtype))
            else:
                buckets.append(OwnedGradients(own, self.reducer, dtype=dtype, owner=bucket.owner))
        return BucketLaunch(buckets)

    def _on_gradient(self, number: int) -> None:
        """Frees the gradients of other ranks' parameters while backward runs, except for the launch
        sent last.
        """
        super()._on_gradient(number)
        while len(self._in_flight) > 1 and self._can_be_freed(self._in_flight[0]):
            self._in_flight.pop(0).unpack()

    def _can_be_freed(self, launch: "BucketLaunch") -> bool:
        return launch.can_be_unpacked_early() and (
            launch.has_arrived() or self.device_may_wait(launch.device)
        )

    def device_may_wait(self, device: torch.device) -> bool:
        """Returns True if the device may wait for a launch during backward: the host does not wait.

        It may not if backward can contain collectives of another group. A rank that uses other
        parameters sends its part of the launch later, and would first wait for this rank in the
        collective of that group: a deadlock.
        """
        return self.reducer.is_nccl(device) and is_only_group(self.reducer.group, device)


class OwnedGradients(BucketGradients):
    """The gradients of a bucket of one owner, sent as one message. Only the owner gets the mean."""

    def __init__(self, members: Sequence[TrackedParameter], *given: Any, owner: int, **named: Any):
        self.owner = owner
        super().__init__(members, *given, packs=len(members) > 1, **named)

    def launch(self) -> dist.Work:
        return self.reducer.launch_to(self.owner, self.tensors[0])

    def store_mean(self, member: TrackedParameter, mean: Tensor | None) -> None:
        parameter = member.parameter
        if self.owner != self.reducer.rank:
            parameter.grad = None
            return
        super().store_mean(member, mean)
        assert parameter.grad is not None, "the owner has the mean"
        parameter.grad = as_share(parameter.grad)

    def fill(self, part: Tensor, member: TrackedParameter) -> Tensor:
        """Writes this rank's contribution. A `.grad` that backward has not added to is a mean, so the
        owner contributes it for all ranks.
        """
        if member.is_unreduced:
            return super().fill(part, member)
        if self.owner != self.reducer.rank:
            return part.zero_()
        return super().fill(part, member).mul_(self.reducer.ranks)


class BucketLaunch:
    """Buckets that are sent together: several of different owners, or one for all ranks."""

    def __init__(self, buckets: Sequence[BucketGradients]):
        self._buckets, self._reducer = buckets, buckets[0].reducer
        self.device = buckets[0].members[0].parameter.device

    def send(self) -> None:
        works = launch_together(
            [bucket.launch for bucket in self._buckets],
            group=self._reducer.group,
            device=self.device,
        )
        for bucket, work in zip(self._buckets, works, strict=True):
            bucket.work = work

    def unpack(self, unused: Container[int] = ()) -> None:
        for bucket in self._buckets:
            bucket.unpack(unused)

    def has_arrived(self) -> bool:
        works = [bucket.work for bucket in self._buckets]
        return all(work is None or work.is_completed() for work in works)

    def can_be_unpacked_early(self) -> bool:
        """Returns True if unpacking during backward is safe: this rank has a gradient of every
        parameter, so none can turn out unused, and autograd does not read memory that unpacking
        writes.
        """
        for bucket in self._buckets:
            for member, copy in zip(bucket.members, bucket.copies, strict=True):
                gradient = member.parameter.grad
                is_read = copy is not None and gradient is not None and not owns_memory(gradient)
                if is_read or not member.is_unreduced:
                    return False
        return True
