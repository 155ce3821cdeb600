"""Data parallel training by the name of a wrapper: this package's wrappers and torch's.

Each wraps a module, builds its optimizer, and returns both as a `Parallel`, which a training step uses.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepgauge.parallel.data_axis import REPLICATING, Settings, build_data_axis
from stepgauge.parallel.fsdp.sharded_unit import repeated_blocks
from stepgauge.parallel.layout_state import LayoutState
from stepgauge.parallel.named_state import load_state, state_of
from stepgauge.parallel.replicas import device_of, prepare_replicas
from stepgauge.parallel.sharding import Sharding
from stepgauge.parallel.training import (
    Groups,
    OptimizerClass,
    Parallel,
    single_process,
)
from stepgauge.spec import layout

READ_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD_WHOLE = StateDictOptions(full_state_dict=True)


def _own_wrapper(name: str) -> Callable[..., Parallel]:
    wrapper = layout.WRAPPERS[name]

    def build(
        module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
    ) -> Parallel:
        data = build_data_axis(name, {0: module}, groups, optimizer, settings)
        state = LayoutState(data=data, place={"data": dist.get_rank(settings.group)})
        wrapped: Any = data.modules[0]
        return Parallel(
            module=wrapped,
            optimizer=data.optimizer,
            no_sync=data.no_sync,
            clip=wrapped.clip_gradients,
            without_axis={} if data.is_sharded else {"data": data.without_communication},
            # Gradients that other ranks have freed cannot be sent again.
            communicate=None if wrapper.shards("gradients") else data.communicate,
            state=state.whole,
            shares=state.share if wrapper.stage else None,
            load=state.load,
            loads_by_name=True,
        )

    return build


COMPRESS = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}


def _torch_ddp(*, views: bool, zero: bool = False) -> Callable[..., Parallel]:
    """Returns a function that wraps a module with torch's DistributedDataParallel.

    views  sets gradient_as_bucket_view
    zero   uses torch's ZeroRedundancyOptimizer
    """

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
                    f"reduce_dtype is {settings.reduce_dtype}; torch's DDP supports bfloat16 and "
                    f"float16"
                )
            wrapped.register_comm_hook(settings.group, COMPRESS[settings.reduce_dtype])
        built: torch.optim.Optimizer = (
            _zero_redundancy_optimizer(groups(module), optimizer, settings.group)
            if zero
            else optimizer(groups(module))
        )
        return Parallel(
            module=wrapped,
            optimizer=built,
            no_sync=wrapped.no_sync,
            # no_sync skips all of DDP's communication.
            without_axis={} if zero else {"data": wrapped.no_sync},
            state=lambda: state_of(module, built),
            load=lambda state: load_state(module, built, state),
        )

    return build


def _zero_redundancy_optimizer(
    groups: Iterable[Any], optimizer: OptimizerClass, process_group: dist.ProcessGroup | None
) -> ZeroRedundancyOptimizer:
    first, *others = groups
    options = {name: value for name, value in first.items() if name != "params"}
    optimizer_class = cast(type[torch.optim.Optimizer], optimizer)
    built = ZeroRedundancyOptimizer(
        first["params"], optimizer_class, process_group=process_group, **options
    )
    for group in others:
        built.add_param_group(group)
    return built


def _torch_fsdp(
    module: nn.Module, groups: Groups, optimizer: OptimizerClass, settings: Settings
) -> Parallel:
    """Wraps a module as fully_shard is usually used: one unit for each repeated block, and one for the
    rest.
    """
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

    built = optimizer(groups(module))
    return Parallel(
        module=module,
        optimizer=built,
        no_sync=no_sync,
        state=lambda: state_of(module, built, READ_WHOLE),
        shares=lambda: state_of(module, built),
        load=lambda state: load_state(module, built, state, LOAD_WHOLE),
    )


WRAPPERS: Mapping[str, Callable[[nn.Module, Groups, OptimizerClass, Settings], Parallel]] = {
    "none": lambda module, groups, optimizer, _: single_process(module, groups, optimizer),
    **{name: _own_wrapper(name) for name in (*REPLICATING, "zero1", "zero2", "zero3")},
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
    settings: Settings | None = None,
) -> Parallel:
    """Wraps a module with the wrapper of that name, one of spec.layout's WRAPPERS, and builds its
    optimizer.
    """
    return WRAPPERS[name](module, groups, optimizer, settings or Settings())
