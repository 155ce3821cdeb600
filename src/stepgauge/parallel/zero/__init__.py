"""ZeRO stages 1 and 2: each parameter has an owner, which keeps its optimizer state (stage 1) and its
gradient (stage 2). Stage 3, which shards the weights too, is parallel/fsdp.
"""

from stepgauge.parallel.zero.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
