"""Ways of data parallel training as works on the data axis's communicator, from the plans that the
wrappers execute: buckets and launches (spec/plan/buckets.py), owners and units
(spec/plan/shards.py).
"""

from collections.abc import Mapping

from stepgauge.cost.data_axis.buckets import Bucketed, Owned, Sending
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.data_axis.torch_wrappers import TorchDdp, TorchFullyShard, TorchZero1
from stepgauge.cost.streams.program import DataParallelCost, RankStep
from stepgauge.spec.layout import WRAPPERS

TORCH_DDP: Mapping[str, type[TorchDdp]] = {
    "torch-ddp": TorchDdp,
    "torch-ddp-views": TorchDdp,
    "torch-zero1": TorchZero1,
}
FULLY_SHARDED: Mapping[str, type[FullySharded]] = {
    "zero3": FullySharded,
    "torch-fsdp": TorchFullyShard,
}


def data_axis(sending: Sending, step: RankStep) -> DataParallelCost:
    """Raises ValueError for what is not modelled."""
    wrapper = sending.wrapper
    if wrapper == "none" or sending.ranks == 1:
        return DataParallelCost()
    if wrapper in FULLY_SHARDED:
        return FULLY_SHARDED[wrapper](sending, step)
    if wrapper in TORCH_DDP:
        if sending.reduce_dtype != "own":
            raise ValueError(
                f"reduce_dtype is {sending.reduce_dtype!r}; of {wrapper} only own is predicted"
            )
        return TORCH_DDP[wrapper](sending, step)
    return Owned(sending, step) if WRAPPERS[wrapper].stage else Bucketed(sending, step)
