"""Data parallel training by name: ours and torch's own, behind the few calls that a training step
makes.

A wrapper takes a module and how its optimizer is built, and gives both as they are to be used.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepgauge.parallel.data_parallel import (
    BucketedDataParallel,
    DataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.parallel.fsdp.sharded_unit import repeated_blocks
from stepgauge.parallel.replicas import device_of, prepare_replicas
from stepgauge.parallel.sharding import Sharding, require_steps_by_parts
from stepgauge.parallel.training import (
    Groups,
    OptimizerClass,
    Parallel,
    by_index,
    by_name,
    copy_shared,
    load_state,
    names_of,
    single_process,
    state_of,
)
from stepgauge.parallel.zero import ShardedOptimizer
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOADED_WHOLE = StateDictOptions(full_state_dict=True)


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


def _ours(wrap: Callable[..., DataParallel]) -> Callable[..., Parallel]:
    def build(
        module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
    ) -> Parallel:
        return _parallel(wrap(module, settings), optimizer(groups(module)))

    return build


def _parallel(wrapped: DataParallel, optimizer: torch.optim.Optimizer, **changes: Any) -> Parallel:
    return Parallel(
        **{
            "module": wrapped,
            "optimizer": optimizer,
            "no_sync": wrapped.no_sync,
            "clip": wrapped.clip_gradients,
            "without_communication": lambda: _without_communication(wrapped, optimizer),
            "communicate": lambda: _communicate(wrapped, optimizer),
            "state": lambda: state_of(wrapped.module, optimizer),
            "load": lambda state: load_state(wrapped.module, optimizer, state),
            **changes,
        }
    )


def _communicate(wrapped: DataParallel, optimizer: torch.optim.Optimizer) -> None:
    wrapped.synchronize_gradients()
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.broadcast_parameters()


def _state_by_name(
    module: nn.Module, optimizer: ShardedOptimizer, found: dict[str, Any] | None
) -> dict[str, Any]:
    named = by_name(names_of(module), optimizer, found)
    return {"model": module.state_dict(), "optimizer": named}


def _load_by_name(module: nn.Module, optimizer: ShardedOptimizer, state: dict[str, Any]) -> None:
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(by_index(names_of(module), optimizer, state["optimizer"]))
    copy_shared(optimizer, state["optimizer"])


@contextlib.contextmanager
def _without_communication(*communicating: Any) -> Any:
    talking = [part for part in communicating if hasattr(part, "communicates")]
    for part in talking:
        part.communicates = False
    try:
        yield
    finally:
        for part in talking:
            part.communicates = True


def _zero(stage: int) -> Callable[..., Parallel]:
    def build(
        module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
    ) -> Parallel:
        sharded = ShardedOptimizer(groups(module), optimizer, stage=stage, group=settings.group)
        wrapped = bucketed(module, settings, sharded.owners_of(module) if stage == 2 else None)
        state = {
            "state": lambda: _state_by_name(module, sharded, sharded.gathered_state_dict()),
            "shares": lambda: _state_by_name(module, sharded, sharded.state_dict()),
            "load": lambda state: _load_by_name(module, sharded, state),
        }
        # Gradients that were freed elsewhere cannot be sent once more.
        others = {"communicate": None} if stage == 2 else {}
        return _parallel(wrapped, sharded, **state, **others)

    return build


def _zero_3(
    module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
) -> Parallel:
    wrapped = FullyShardedDataParallel(module, settings.compute_dtype, group=settings.group)
    stepping = optimizer(groups(module))
    require_steps_by_parts(stepping)
    return Parallel(
        module=wrapped,
        optimizer=stepping,
        no_sync=wrapped.no_sync,
        clip=wrapped.clip_gradients,
        state=lambda: state_of(module, stepping, WHOLE),
        shares=lambda: state_of(module, stepping),
        load=lambda state: load_state(module, stepping, state, LOADED_WHOLE),
    )


COMPRESS = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}


def _torch_ddp(*, views: bool, zero: bool = False) -> Callable[..., Parallel]:
    """views: gradient_as_bucket_view. The defaults of torch are without."""

    def build(
        module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
    ) -> Parallel:
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=settings.bucket_mb * 1e6 / 2**20,
            gradient_as_bucket_view=views,
            process_group=settings.group,
        )
        if settings.reduce_dtype is not None:
            if settings.reduce_dtype not in COMPRESS:
                raise ValueError(
                    f"reduce_dtype is {settings.reduce_dtype}; torch's DDP compresses to bfloat16 and float16"
                )
            wrapped.register_comm_hook(settings.group, COMPRESS[settings.reduce_dtype])
        if not zero:
            stepping: torch.optim.Optimizer = optimizer(groups(module))
        else:
            first, *others = list(groups(module))
            others_of_first = {name: value for name, value in first.items() if name != "params"}
            any_callable = cast(type[torch.optim.Optimizer], optimizer)
            stepping = ZeroRedundancyOptimizer(
                first["params"], any_callable, process_group=settings.group, **others_of_first
            )
            for group in others:
                stepping.add_param_group(group)
        return Parallel(
            module=wrapped,
            optimizer=stepping,
            no_sync=wrapped.no_sync,
            # What no_sync leaves out is all that is communicated.
            without_communication=None if zero else wrapped.no_sync,
            state=lambda: state_of(module, stepping),
            load=lambda state: load_state(module, stepping, state),
        )

    return build


def _torch_fsdp(
    module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
) -> Parallel:
    """A unit a repeated block, and one for the rest: the usual use of fully_shard."""
    prepare_replicas(module, settings.group, may_lack_values=True)
    dtype = settings.compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    mesh = Sharding(settings.group, device_of(module).type).mesh
    for block in repeated_blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def no_sync() -> Any:
        module.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)  # type: ignore[operator]

    stepping = optimizer(groups(module))
    return Parallel(
        module=module,
        optimizer=stepping,
        no_sync=no_sync,
        state=lambda: state_of(module, stepping, WHOLE),
        shares=lambda: state_of(module, stepping),
        load=lambda state: load_state(module, stepping, state, LOADED_WHOLE),
    )


WRAPPERS: Mapping[str, Callable[[nn.Module, Groups, OptimizerClass, Settings], Parallel]] = {
    "none": lambda module, groups, optimizer, _: single_process(module, groups, optimizer),
    **{name: _ours(wrap) for name, wrap in REPLICATING.items()},
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero_3,
    "torch-ddp": _torch_ddp(views=False),
    "torch-ddp-views": _torch_ddp(views=True),
    "torch-zero1": _torch_ddp(views=False, zero=True),
    "torch-fsdp": _torch_fsdp,
}


def parallelise(
    name: str,
    module: nn.Module,
    groups: Groups,
    optimizer: OptimizerClass,
    *,
    settings: Settings = Settings(),
) -> Parallel:
    """The module under the wrapper of that name, with its optimizer: one of spec.data_parallel's
    WRAPPERS.
    """
    return WRAPPERS[name](module, groups, optimizer, settings)
