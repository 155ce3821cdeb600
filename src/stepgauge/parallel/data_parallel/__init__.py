"""Each rank has the whole network and its own batch; gradients are averaged, one by one, packed, or
in buckets while backward runs.
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
