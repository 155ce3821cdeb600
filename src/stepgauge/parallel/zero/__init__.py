"""ZeRO stages 1 and 2: an optimizer's state, and gradients, with their owners. Stage 3, whose
weights are shards too, is parallel/fsdp.
"""

from stepgauge.parallel.zero.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
