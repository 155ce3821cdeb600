"""Spreads the training of any nn.Module over ranks. Uses torch.distributed and the plans in spec, and
knows no model.

Each way to spread it has a folder: `data_parallel`, `zero` (stages 1 and 2), `fsdp` (stage 3),
`tensor_parallel`, `context_parallel` and `pipeline`. `wrappers` has the data-parallel wrappers by
name. `layout` applies several ways to one network, and `data_axis` wraps the modules that each rank
then has. The code that they share is in `communication`, in `autograd` and in the files next to this
one.
"""

import importlib
from typing import Any

# Public names with their subpackages, which are imported when a name is first used.
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
