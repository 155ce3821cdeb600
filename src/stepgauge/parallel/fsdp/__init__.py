"""ZeRO stage 3, fully sharded data parallel: each rank has a shard of every weight.

A weight's way through a step:

1. When the module is wrapped, `ShardedUnit` puts a sharded parameter in place of the weight
   (`sharded_in_place_of`). Optimizer, checkpoints and users see only this parameter.
2. Before the forward of the weight's unit, `ShardedUnit.before_forward` gathers the whole weight
   (`UnshardedUnit.unshard`), unless the `Prefetcher` has started that already. `place_for_forward`
   makes it a tensor of autograd (`GatherWeights`) and puts it in place of the shard.
3. After that forward, `ShardedUnit.after_forward` puts the shard back and frees the memory of the
   whole weight, except in the unit that is called last. It also registers a hook on the unit's
   outputs.
4. In backward, that hook (`_before_backward`) gathers the whole weight again, into the tensor that
   autograd has saved.
5. `GatherWeights.backward` gets the whole gradients of the unit. It frees the whole weights and calls
   `GradientReductions.reduce`, which packs the gradients (`FlatGradients`) and starts a
   reduce-scatter.
6. When later units need the room, or at the end of backward, this rank's part of the mean is added
   to the `.grad` of the shard.

The parts, in the order in which to read them: `fsdp`, `sharded_unit`, `replaced_weight`,
`unsharded_unit`, `gradient_reductions`, `flat_gradients`, `prefetcher`, `call_order`, `residency`,
`called_alone`.
"""

from stepgauge.parallel.fsdp.fsdp import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
