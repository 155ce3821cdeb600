"""Takes any nn.Module and spreads its training over ranks. Knows torch.distributed and the plans in
spec, no model.

A folder a way to spread it: `data_parallel`, `zero` (stages 1 and 2), `fsdp` (stage 3),
`tensor_parallel`, `context_parallel`, `pipeline`. `wrappers` has the data-parallel ones by name,
`layout` applies several to one network, `data_axis` wraps what each rank then has. What they share
is beside them, in `communication` and in `autograd`.
"""

import importlib
from typing import Any

# Public names, loaded when they are first asked for.
_HOMES = {
    "NaiveDataParallel": "data_parallel",
    "FlatDataParallel": "data_parallel",
    "OverlappedDataParallel": "data_parallel",
    "BucketedDataParallel": "data_parallel",
    "ShardedOptimizer": "zero",
    "FullyShardedDataParallel": "fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES]
