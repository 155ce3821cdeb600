"""Gradients that are reduced to their owners and freed elsewhere: stage 2 of ZeRO (Rajbhandari et al.
2020), of which sharded_optimizer.py has the optimizer.
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
from stepgauge.parallel.data_parallel.bucket_gradients import BucketGradients, is_alone
from stepgauge.parallel.data_parallel.readiness import Averaged
from stepgauge.parallel.replicas import device_of, reduced_dtype
from stepgauge.parallel.shares import as_plain, as_share
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.spec.layout import WRAPPERS


class OwnerDataParallel(BucketedDataParallel):
    """Bucketed data parallel in which a gradient is averaged at its owner alone; the other ranks have
    None of it after backward. What they had before it, which backward has not put there, is taken
    to be the owner's.

    owners  ranks by parameters' names, as ShardedOptimizer.owners_of gives them; the gradient of a
            parameter without one is for all ranks

    Backward raises RuntimeError, when it ends, where a gradient of another rank's parameter lies in
    larger memory, which would not get the mean.
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
        self._views: list[str] = []  # names of parameters, for what is raised when backward ends
        super().__init__(module, bucket_mb, group=group, reduce_dtype=reduce_dtype)

    def finish_synchronizing(self, failed: bool = False) -> None:
        views, self._views = self._views, []
        super().finish_synchronizing(failed)
        if views:
            raise RuntimeError(
                f"the gradient of {views[0]} is part of other memory on rank {self.reducer.rank}, "
                f"which does not get its mean: rank {self.owners[views[0]]} owns it"
            )

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of all of at most `max_norm`; the norm before."""
        owned = {m.parameter: self.owners.get(m.name) for m in self._members}
        given = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        rank, ranks = self.reducer.rank, self.reducer.ranks
        own = [(1, gradient) for p, gradient in given.items() if owned.get(p) == rank]
        of_all = [(ranks, gradient) for p, gradient in given.items() if owned.get(p) is None]
        return clip_whole_norm(
            given.values(),
            own + of_all,
            max_norm,
            group=self.reducer.group,
            device=device_of(self.module),
        )

    def _hooks_of(self, member: Averaged) -> list[Any]:
        hooks = super()._hooks_of(member)
        if member.name in self.owners:
            hooks.append(member.parameter.register_hook(WrapperHook(self._expect, member.number)))
        return hooks

    def expect_backward(self) -> None:
        for member in self._members:
            if member.parameter.requires_grad and self._averages(member):
                self._count_for_all(member)
                member.is_local = True

    def _expect(self, number: int) -> None:
        """Before backward adds to a mean: the owner's counts for all ranks then."""
        member = self._members[number]
        if member.parameter.grad is None or member.is_local or not self._averages(member):
            return
        if not accumulates_into(member.parameter):
            return
        if not self._synchronises:
            raise RuntimeError(
                "gradients that are averaged at their owners take no backward under no_sync(); set "
                "them to None first, or go on without no_sync()"
            )
        self._begin(member.parameter.device)
        self._count_for_all(member)

    def _count_for_all(self, member: Averaged) -> None:
        """Makes a mean what adds up to it: the owner's counts for all ranks, others have none."""
        parameter, name = member.parameter, member.name
        gradient = parameter.grad
        if gradient is None or member.is_local or name not in self.owners:
            return
        if self.owners[name] == self.reducer.rank:
            member.is_local = True
            parameter.grad = as_plain(gradient).mul_(self.reducer.ranks)
            return
        # Raised here, it would leave the owner waiting, who sees nothing of it.
        if gradient.untyped_storage().nbytes() > gradient.nbytes:
            self._views.append(name)
        parameter.grad = None

    def _gradients_of(self, number: int) -> "BucketLaunch":
        members = iter(self._launches[number])
        found: list[BucketGradients] = []
        for bucket in self._planned[number]:
            own = [*itertools.islice(members, len(bucket.names))]
            dtype = reduced_dtype(own[0].parameter, self.reduce_dtype)
            if bucket.owner is None:
                found.append(BucketGradients(own, self.reducer, dtype=dtype))
            else:
                found.append(OwnedGradients(own, self.reducer, dtype=dtype, owner=bucket.owner))
        return BucketLaunch(found)

    def _arrive(self, number: int) -> None:
        """Frees others' gradients while backward goes on, but the latest."""
        super()._arrive(number)
        while len(self._in_flight) > 1 and self._can_be_freed(self._in_flight[0]):
            self._in_flight.pop(0).unpack()

    def _can_be_freed(self, launch: "BucketLaunch") -> bool:
        return launch.can_be_unpacked_early() and (
            launch.has_arrived() or self.device_may_wait(launch.device)
        )

    def device_may_wait(self, device: torch.device) -> bool:
        """Whether a device may wait for a message in backward, whose host runs ahead.

        Not where backward can have collectives of another group: a rank that uses other parameters
        sends its part later, and meets us in that group's collective first, or never.
        """
        return self.reducer.is_nccl(device) and is_only_group(self.reducer.group, device)


class OwnedGradients(BucketGradients):
    """Those of a bucket whose mean its owner alone gets, in one message."""

    def __init__(self, members: Sequence[Averaged], *given: Any, owner: int, **how: Any):
        self.owner = owner
        super().__init__(members, *given, packs=len(members) > 1, **how)

    def launch(self) -> dist.Work:
        return self.reducer.launch_to(self.owner, self.tensors[0])

    def give_mean(self, member: Averaged, mean: Tensor | None) -> None:
        parameter = member.parameter
        if self.owner != self.reducer.rank:
            parameter.grad = None
            return
        super().give_mean(member, mean)
        assert parameter.grad is not None, "it has its mean"
        parameter.grad = as_share(parameter.grad)

    def fill(self, part: Tensor, member: Averaged) -> Tensor:
        """What backward has not added to is the owner's: it counts for all ranks."""
        if member.is_local:
            return super().fill(part, member)
        if self.owner != self.reducer.rank:
            return part.zero_()
        return super().fill(part, member).mul_(self.reducer.ranks)


class BucketLaunch:
    """Buckets that are sent at once: of different owners, or one for all ranks."""

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
        """Whether backward, which goes on, reads nothing that is written, and some rank, this one,
        has a gradient of each.
        """
        return all(
            member.is_local and (copy is None or _may_be_written(member.parameter.grad))
            for bucket in self._buckets
            for member, copy in zip(bucket.members, bucket.copies, strict=True)
        )


def _may_be_written(gradient: Tensor | None) -> bool:
    return gradient is None or is_alone(gradient)
