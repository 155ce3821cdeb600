"""Gradients that are reduced to their owners and freed elsewhere: stage 2 of ZeRO (Rajbhandari et al.
2020), of which parallel/zero.py has the optimizer.
"""

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.bucket_gradients import BucketGradients, is_alone
from stepgauge.parallel.collectives import is_only_group, launch_together
from stepgauge.parallel.data_parallel import BucketedDataParallel, weakly
from stepgauge.parallel.readiness import Readiness
from stepgauge.parallel.replicas import reduced_dtype
from stepgauge.parallel.shares import as_plain, as_share
from stepgauge.spec.plan.shards import plan_launches


class OwnerDataParallel(BucketedDataParallel):
    """Bucketed data parallel in which a gradient is averaged at its owner alone; the other ranks have
    None of it after backward.

    owners  ranks by parameters' names, as ShardedOptimizer.owners_of gives them; the gradient of a
            parameter without one is for all ranks
    """

    owners: Mapping[str, int]

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        *,
        owners: Mapping[str, int],
        **settings: Any,
    ):
        self.owners = owners
        super().__init__(module, bucket_mb, **settings)

    def _plan(self) -> None:
        super()._plan()
        parts = zip(self.buckets, self._launches, strict=True)
        self._parts = [[next(parts) for _ in launch] for launch in plan_launches(self.buckets)]
        self._launches = [[p for _, part in launch for p in part] for launch in self._parts]

    def _gradients_of(self, number: int) -> "OwnedLaunch":
        return OwnedLaunch(
            [
                OwnedGradients(
                    parameters,
                    self._local,
                    self.reducer,
                    dtype=reduced_dtype(parameters[0], self.reduce_dtype),
                    packs=len(parameters) > 1,
                    owner=bucket.owner,
                )
                for bucket, parameters in self._parts[number]
            ]
        )

    def _hooks_of(self, parameter: nn.Parameter) -> list[Any]:
        hooks = super()._hooks_of(parameter)
        if self._names[parameter] in self.owners:
            expect, parameter_of = weakly(self._expect), weakref.ref(parameter)
            hooks.append(parameter.register_hook(lambda _: expect(parameter_of())))
        return hooks

    def _begin(self, device: torch.device | None = None) -> Readiness:
        """Raises RuntimeError for a gradient that none but its owner can have, before anything is
        sent: on all ranks at once, if each lacks some. A rank that owns all would wait for the others.
        """
        if device is not None and self._readiness is None:
            rank = self.reducer.rank
            for parameter, name in self._names.items():
                is_ours = parameter in self._local or self.owners.get(name, rank) == rank
                if parameter.grad is not None and not is_ours:
                    raise RuntimeError(
                        f"{name} has a gradient on rank {rank} that backward did not put there; rank "
                        f"{self.owners[name]} owns it"
                    )
        return super()._begin(device)

    def _expect(self, parameter: nn.Parameter) -> None:
        """Before backward adds to a mean that its owner alone has: it counts for all ranks then."""
        if parameter.grad is None or parameter in self._local or not parameter.requires_grad:
            return
        if not self._synchronises:
            raise RuntimeError(
                "gradients that are averaged at their owners take no backward under no_sync(); set "
                "them to None first, or go on without no_sync()"
            )
        self._begin(parameter.device)
        self._local.add(parameter)
        parameter.grad = as_plain(parameter.grad).mul_(self.reducer.ranks)

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Frees others' gradients while backward goes on, but the latest."""
        super()._arrive(parameter)
        while len(self._in_flight) > 1 and self._can_be_freed(self._in_flight[0]):
            self._in_flight.pop(0).unpack()

    def _can_be_freed(self, launch: "OwnedLaunch") -> bool:
        device = launch.parts[0].parameters[0].device
        return launch.can_be_unpacked_early() and (
            launch.has_arrived() or self.device_may_wait(device)
        )

    def device_may_wait(self, device: torch.device) -> bool:
        """Whether a device may wait for a message in backward, whose host runs ahead.

        Not where backward can have collectives of another group: a rank that uses other parameters
        sends its part later, and meets us in that group's collective first, or never.
        """
        return self.reducer.is_nccl(device) and is_only_group(self.reducer.group, device)


class OwnedGradients(BucketGradients):
    """A bucket whose mean its owner alone gets, or all ranks where it has none."""

    def __init__(self, *given: Any, owner: int | None, **how: Any):
        self.owner = owner
        super().__init__(*given, **how)

    def launch(self) -> dist.Work:
        if self.owner is None:
            return self.reducer.launch(self.tensors)
        return self.reducer.launch_to(self.owner, self.tensors[0])

    def give_mean(self, parameter: nn.Parameter) -> None:
        if self.owner not in (None, self.reducer.rank):
            parameter.grad = None
            return
        super().give_mean(parameter)
        if self.owner is not None:
            parameter.grad = as_share(parameter.grad)  # type: ignore[arg-type]

    def fill(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """A mean that the owner alone has is not alike on all ranks: it counts for all of them."""
        part = super().fill(part, parameter)
        counts_for_all = self.owner is not None and parameter not in self.own
        return part.mul_(self.reducer.ranks) if counts_for_all else part


class OwnedLaunch:
    """Buckets that are sent at once, towards different owners."""

    def __init__(self, parts: Sequence[OwnedGradients]):
        self.parts = parts

    def send(self) -> None:
        group, device = self.parts[0].reducer.group, self.parts[0].parameters[0].device
        launches = [part.launch for part in self.parts]
        for part, work in zip(
            self.parts, launch_together(launches, group=group, device=device), strict=True
        ):
            part.work = work

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def has_arrived(self) -> bool:
        return all(part.work is None or part.work.is_completed() for part in self.parts)

    def can_be_unpacked_early(self) -> bool:
        """Whether backward, which goes on, reads nothing that is written, and some rank, this one,
        has a gradient of each.
        """
        return all(
            parameter in part.own
            and (parameter not in part.copies or parameter.grad is None or is_alone(parameter.grad))
            for part in self.parts
            for parameter in part.parameters
        )

    def unpack(self, unused: Container[nn.Parameter] = ()) -> None:
        for part in self.parts:
            part.unpack(unused)
