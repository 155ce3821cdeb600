"""Data parallel: each rank has the whole network and its own batch. Gradients are averaged over the
ranks one by one, all packed together, or in buckets while backward runs.

The parts, in the order in which to read them: `data_parallel`, `readiness`, `bucket_gradients`,
`usage`.
"""

from stepgauge.parallel.data_parallel.data_parallel import (
    BucketedDataParallel,
    DataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)

__all__ = [
    "BucketedDataParallel",
    "DataParallel",
    "FlatDataParallel",
    "NaiveDataParallel",
    "OverlappedDataParallel",
]
