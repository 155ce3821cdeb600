"""ZeRO stage 3, fully sharded data parallel: each rank has a shard of every weight.

The parts, in the order in which to read them: `fsdp`, `sharded_unit`, `replaced_weight`,
`unsharded_unit`, `gradient_reductions`, `flat_gradients`, `prefetcher`, `call_order`, `residency`.
"""

from stepgauge.parallel.fsdp.fsdp import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
