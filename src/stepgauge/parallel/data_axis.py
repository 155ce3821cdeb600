"""The data axis of a layout: the wrapped modules of a rank, which other ranks train on other batches.

A rank has one module, or its stages of a pipeline, and one optimizer for all of them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
from stepgauge.parallel.sharding import (
    local_shard,
    require_steps_on_shards,
    sharded_from_shard,
    sharded_from_whole,
)
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
    """Settings of the wrappers.

    bucket_mb      size of a bucket in MB (10^6 bytes)
    compute_dtype  in which fully sharded modules compute and communicate
    reduce_dtype   in which the other wrappers average gradients; None means the parameters' dtype
    """

    bucket_mb: float = 25.0
    compute_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def of_reductions(self) -> dict[str, Any]:
        return {"group": self.group, "reduce_dtype": self.reduce_dtype}


def bucketed(
    module: nn.Module, settings: Settings, owners: Mapping[str, int] | None = None
) -> DataParallel:
    """Wraps a module so that its gradients are reduced in buckets: on all ranks, or only at their
    owners if `owners` are given.
    """
    if owners is None:
        return BucketedDataParallel(module, settings.bucket_mb, **settings.of_reductions)
    return OwnerDataParallel(module, settings.bucket_mb, owners=owners, **settings.of_reductions)


# The wrappers that leave weights and optimizer state whole.
REPLICATING: Mapping[str, Callable[[nn.Module, Settings], DataParallel]] = {
    "naive": lambda module, s: NaiveDataParallel(module, **s.of_reductions),
    "flat": lambda module, s: FlatDataParallel(module, **s.of_reductions),
    "overlapped": lambda module, s: OverlappedDataParallel(module, **s.of_reductions),
    "bucketed": bucketed,
}


@dataclasses.dataclass
class DataAxis:
    """The modules of a rank under a wrapper, and their optimizer.

    modules  the wrapped modules, by pipeline stage
    plain    the same modules without the wrapper: their parameters have their original names
    ranks    number of ranks of the axis
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
        """Returns True if the weights are sharded."""
        return any(isinstance(m, FullyShardedDataParallel) for m in self.modules.values())

    def num_copies(self, parameter: Tensor) -> int:
        """Returns how many ranks of the axis have the same values of the parameter's gradient."""
        optimizer = self.optimizer
        is_owned = isinstance(optimizer, ShardedOptimizer) and optimizer.owns_gradient(parameter)
        return 1 if is_owned or isinstance(parameter.grad, DTensor) else self.ranks

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to the gradients of this rank only."""
        before, self.synchronises = self.synchronises, False
        try:
            with self.deferring_reductions():
                yield
        finally:
            self.synchronises = before

    @contextlib.contextmanager
    def deferring_reductions(self) -> Iterator[None]:
        """Inside, backward does not reduce gradients: `begin_reduction` does, after the last backward
        of a stage.
        """
        with contextlib.ExitStack() as stack:
            for replica in self.wrapped:
                stack.enter_context(replica.no_sync())
            yield

    def without_communication(self) -> contextlib.AbstractContextManager[None]:
        """Skips the communication of this axis inside the context, but nothing else."""
        optimizer = [self.optimizer] if isinstance(self.optimizer, ShardedOptimizer) else []
        return without_communication([*self.wrapped, *optimizer])

    def communicate(self) -> None:
        """Repeats the communication of a step, with the gradients that are in `.grad`."""
        for module in self.wrapped:
            module.synchronize_gradients()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.broadcast_parameters()

    def unshard(self, stage: int) -> None:
        """Makes the weights of a stage whole until `reshard`, if they are sharded."""
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.unshard()

    def reduce(self, stage: int) -> None:
        """Reduces the gradients of a stage that `unshard` made whole into its shards."""
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.reduce()

    def reshard(self, stage: int) -> None:
        if isinstance(module := self.modules[stage], FullyShardedDataParallel):
            module.residency.reshard()

    def begin_reduction(self, stage: int) -> None:
        """Starts to reduce a stage's gradients, after its last backward of a step."""
        if self.synchronises and isinstance(module := self.modules[stage], DataParallel):
            module.begin_synchronizing()

    def finish_reductions(self) -> None:
        """Waits for the reductions of all stages that `begin_reduction` has started."""
        for replica in self.wrapped:
            replica.finish_synchronizing()

    def optimizer_state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Returns the optimizer's state by parameter name on the first rank of the axis; on others it
        is the same or empty. All ranks must call it.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return by_name(names, optimizer, optimizer.gathered_state_dict())
        named = by_name(names, optimizer, optimizer.state_dict())
        named["state"] = {
            name: {key: _gathered_on_host(value) for key, value in values.items()}
            for name, values in named["state"].items()
        }
        return named

    def own_optimizer_state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Returns the optimizer state that this rank has, by parameter name."""
        return by_name(names, self.optimizer, self.optimizer.state_dict())

    def load_optimizer_state(self, names: Mapping[Tensor, str], state: dict[str, Any]) -> None:
        """Loads what `optimizer_state` returned, on every rank."""
        parameters = {name: parameter for parameter, name in names.items()}
        state["state"] = {
            name: {key: _sharded_state(parameters[name], value) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        self.optimizer.load_state_dict(by_index(names, self.optimizer, state))


def build_data_axis(
    wrapper: str,
    modules: Modules,
    groups: Groups,
    optimizer: OptimizerClass,
    settings: Settings,
    *,
    tensor: Mapping[int, TensorParallel] | None = None,
) -> DataAxis:
    """Wraps the modules with one of this package's wrappers over the group of the settings; "none"
    leaves them as they are.

    tensor  how tensor parallelism has cut each module; empty without a tensor axis
    """
    first, *others = modules.values()
    everything = nn.ModuleList([first, *others]) if others else first
    zero_stage, cuts = WRAPPERS[wrapper].stage, tensor or {}
    ranks = 1 if wrapper == "none" else dist.get_world_size(settings.group)
    if zero_stage in (1, 2):
        sizes = {p: size for cut in cuts.values() for p, size in cut.whole_sizes()}
        sharded = ShardedOptimizer(
            groups(everything), optimizer, stage=zero_stage, group=settings.group, sizes=sizes
        )
        wrapped: dict[int, nn.Module] = {}
        for stage, module in modules.items():
            owners = sharded.owners_of(module) if zero_stage == 2 else None
            wrapped[stage] = bucketed(module, settings, owners)
        return DataAxis(wrapped, modules, sharded, ranks)
    # Under ZeRO 3 the hooks of the tensor axis move from the whole parameters to the sharded ones.
    sums = {stage: cut.sums for stage, cut in cuts.items()} if zero_stage == 3 else {}
    for stage in sums:
        cuts[stage].hooking.remove()
    wrapped = {stage: _wrapped(wrapper, each, settings) for stage, each in modules.items()}
    for stage, of_stage in sums.items():
        _hook_shards(modules[stage], of_stage)
    built = optimizer(groups(everything))
    if zero_stage == 3:
        require_steps_on_shards(built)
    return DataAxis(wrapped, modules, built, ranks)


def _wrapped(wrapper: str, module: nn.Module, settings: Settings) -> nn.Module:
    if wrapper == "none":
        return module
    if wrapper == "zero3":
        return FullyShardedDataParallel(module, settings.compute_dtype, group=settings.group)
    return REPLICATING[wrapper](module, settings)


def _hook_shards(module: nn.Module, sums: Mapping[str, GradientSum]) -> None:
    """Registers hooks that sum the sharded gradients over the tensor axis."""
    for name, parameter in module.named_parameters():
        if name in sums:
            with requiring_grad(parameter):
                parameter.register_hook(_on_shard(sums[name]))


def _on_shard(sum_: GradientSum) -> Callable[[DTensor], DTensor]:
    def hook(gradient: DTensor) -> DTensor:
        if sum_.cut is None:  # all ranks have the whole parameter: its shards can be summed
            return sharded_from_shard(gradient, sum_(local_shard(gradient)))
        return sharded_from_whole(gradient, sum_(gradient.full_tensor()))

    return hook


def gathered(value: Any) -> Any:
    """Returns a sharded tensor whole, and any other value as it is. All ranks of the tensor's mesh
    must call it.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gathered_on_host(value: Any) -> Any:
    """Returns a sharded tensor whole on the CPU, since a device may lack memory for all of them."""
    return gathered(value).cpu() if isinstance(value, DTensor) else value


def _sharded_state(parameter: Tensor, value: Any) -> Any:
    """Shards a tensor of the parameter's shape like the parameter; returns other values as they are."""
    has_its_shape = isinstance(value, Tensor) and value.shape == parameter.shape
    if isinstance(parameter, DTensor) and has_its_shape:
        return sharded_from_whole(parameter, value.to(parameter.device))
    return value
