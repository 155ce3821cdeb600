"""The data axis of a layout: the modules of a rank, which other ranks train on other batches.

A rank has one module, or the stages of a pipeline that are its own, and one optimizer for all.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stepgauge.parallel.autograd.parameter_hooks import requiring_grad
from stepgauge.parallel.data_parallel import (
    BucketedDataParallel,
    DataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.parallel.named_state import by_index, by_name
from stepgauge.parallel.sharding import require_steps_on_shards
from stepgauge.parallel.tensor_parallel import TensorParallel
from stepgauge.parallel.tensor_parallel.gradient_sums import GradientSum
from stepgauge.parallel.training import (
    Groups,
    OptimizerClass,
    without_communication,
)
from stepgauge.parallel.zero import ShardedOptimizer
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.spec.layout import WRAPPERS

Modules = Mapping[int, nn.Module]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What wrappers can be told.

    compute_dtype  what fully sharded modules compute and communicate in
    reduce_dtype   what the others average gradients in; None: the parameters' type
    """

    bucket_mb: float = 25.0
    compute_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def of_messages(self) -> dict[str, Any]:
        return {"group": self.group, "reduce_dtype": self.reduce_dtype}


# Those that leave weights and optimizer whole.
REPLICATING: Mapping[str, Callable[[nn.Module, Settings], DataParallel]] = {
    "naive": lambda module, s: NaiveDataParallel(module, **s.of_messages),
    "flat": lambda module, s: FlatDataParallel(module, **s.of_messages),
    "overlapped": lambda module, s: OverlappedDataParallel(module, **s.of_messages),
    "bucketed": lambda module, s: bucketed(module, s),
}


def bucketed(
    module: nn.Module, settings: Settings, owners: Mapping[str, int] | None = None
) -> DataParallel:
    """Gradients in buckets, averaged on all ranks, or at their owners alone."""
    if owners is None:
        return BucketedDataParallel(module, settings.bucket_mb, **settings.of_messages)
    return OwnerDataParallel(
        module,
        settings.bucket_mb,
        owners=owners,
        group=settings.group,
        reduce_dtype=settings.reduce_dtype,
    )


@dataclasses.dataclass
class DataAxis:
    """Modules under a wrapper, and their optimizer.

    modules  to call, by the stage
    plain    the same without the wrapper: parameters by the names that they were built with
    ranks    of the axis
    """

    modules: Modules
    plain: Modules
    optimizer: torch.optim.Optimizer
    ranks: int
    synchronises: bool = True

    @property
    def wrapped(self) -> list[DataParallel]:
        return [module for module in self.modules.values() if isinstance(module, DataParallel)]

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have parts of the weights."""
        return any(isinstance(m, FullyShardedDataParallel) for m in self.modules.values())

    def copies(self, gradient: Tensor) -> int:
        """Ranks of the axis that have the same values of a gradient."""
        is_share = isinstance(gradient, DTensor) or self._stage == 2
        return 1 if is_share else self.ranks

    @property
    def _stage(self) -> int:
        """Of ZeRO, where the optimizer knows it."""
        return self.optimizer.stage if isinstance(self.optimizer, ShardedOptimizer) else 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone."""
        before, self.synchronises = self.synchronises, False
        try:
            with self.quiet():
                yield
        finally:
            self.synchronises = before

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, a backward sends nothing by itself: `begin` does, when a stage has had its last."""
        with contextlib.ExitStack() as stack:
            for replica in self.wrapped:
                stack.enter_context(replica.no_sync())
            yield

    def without_communication(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is communicated inside, but all else is done."""
        optimizer = [self.optimizer] if isinstance(self.optimizer, ShardedOptimizer) else []
        return without_communication([*self.wrapped, *optimizer])

    def communicate(self) -> None:
        """Communicates once more what a step does, of gradients that are there."""
        for module in self.wrapped:
            module.synchronize_gradients()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.broadcast_parameters()

    def unshard(self, stage: int) -> None:
        """Makes the weights of a stage whole until `reshard`, where they are sharded."""
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.unshard()

    def reduce(self, stage: int) -> None:
        """Averages the gradients of a stage that is whole."""
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.reduce()

    def reshard(self, stage: int) -> None:
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.reshard()

    def begin(self, stage: int) -> None:
        """Sends a stage's gradients, which no backward of this step adds to any more."""
        if self.synchronises and isinstance(module := self.modules[stage], DataParallel):
            module.begin_synchronizing()

    def finish(self) -> None:
        """Waits for the gradients of all stages that `begin` has sent."""
        for replica in self.wrapped:
            replica.finish_synchronizing()

    def optimizer_state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """The optimizer's state by names, of the whole axis; on its other ranks nothing or the
        same. All ranks must call it.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return by_name(names, optimizer, optimizer.gathered_state_dict())
        found = by_name(names, optimizer, optimizer.state_dict())
        found["state"] = {
            name: {key: _gathered_on_host(value) for key, value in values.items()}
            for name, values in found["state"].items()
        }
        return found

    def own_optimizer_state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """What this rank has of it."""
        return by_name(names, self.optimizer, self.optimizer.state_dict())

    def load_optimizer_state(self, names: Mapping[Tensor, str], state: dict[str, Any]) -> None:
        """Takes what `optimizer_state` gives, on every rank."""
        parameters = {name: parameter for parameter, name in names.items()}
        state["state"] = {
            name: {key: _like(parameters[name], value) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        self.optimizer.load_state_dict(by_index(names, self.optimizer, state))


def over_data(
    wrapper: str,
    modules: Modules,
    groups: Groups,
    optimizer: OptimizerClass,
    settings: Settings,
    *,
    tensor: Mapping[int, TensorParallel] | None = None,
) -> DataAxis:
    """The modules under one of our wrappers over the group of the settings; under "none" as they
    are.

    tensor  how each module is cut; none where there is no such axis
    """
    first, *others = modules.values()
    everything = nn.ModuleList([first, *others]) if others else first
    number, cuts = WRAPPERS[wrapper].stage, tensor or {}
    ranks = 1 if wrapper == "none" else dist.get_world_size(settings.group)
    if number in (1, 2):
        sizes = {p: size for cut in cuts.values() for p, size in cut.whole_sizes()}
        sharded = ShardedOptimizer(
            groups(everything), optimizer, stage=number, group=settings.group, sizes=sizes
        )
        wrapped: dict[int, nn.Module] = {
            stage: bucketed(module, settings, sharded.owners_of(module) if number == 2 else None)
            for stage, module in modules.items()
        }
        return DataAxis(wrapped, modules, sharded, ranks)
    sums = {stage: cut.sums for stage, cut in cuts.items()} if number == 3 else {}
    for stage in sums:
        cuts[stage].hooking.remove()
    wrapped = {stage: _wrapped(wrapper, each, settings) for stage, each in modules.items()}
    for stage, of_stage in sums.items():
        _hook_shards(modules[stage], of_stage)
    stepping = optimizer(groups(everything))
    if number == 3:
        require_steps_on_shards(stepping)
    return DataAxis(wrapped, modules, stepping, ranks)


def _wrapped(wrapper: str, module: nn.Module, settings: Settings) -> nn.Module:
    if wrapper == "none":
        return module
    if wrapper == "zero3":
        return FullyShardedDataParallel(module, settings.compute_dtype, group=settings.group)
    return REPLICATING[wrapper](module, settings)


def _hook_shards(module: nn.Module, sums: Mapping[str, GradientSum]) -> None:
    """Gives the hooks of the parameters that were whole to those that are sharded now."""
    for name, parameter in module.named_parameters():
        if name in sums:
            with requiring_grad(parameter):
                parameter.register_hook(_on_shard(sums[name]))


def _on_shard(sum_: GradientSum) -> Callable[[DTensor], DTensor]:
    def hook(gradient: DTensor) -> DTensor:
        if sum_.cut is None:  # each value for itself
            summed = sum_(gradient.to_local())
            return DTensor.from_local(
                summed,
                gradient.device_mesh,
                gradient.placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )
        return _shard_like(gradient, sum_(gradient.full_tensor()))

    return hook


def gathered(value: Any) -> Any:
    """Whole, where it is a sharded tensor. All ranks of its mesh must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gathered_on_host(value: Any) -> Any:
    """One whole tensor after the other: a device has no room for all of them."""
    return gathered(value).cpu() if isinstance(value, DTensor) else value


def _like(parameter: Tensor, value: Any) -> Any:
    """A whole tensor as it lies beside the parameter; any other value as it is."""
    is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
    if isinstance(parameter, DTensor) and is_alike:
        return _shard_like(parameter, value.to(parameter.device))
    return value


def _shard_like(sharded: DTensor, whole: Tensor) -> DTensor:
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
