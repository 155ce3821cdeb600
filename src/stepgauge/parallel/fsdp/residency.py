"""Keeps a sharded module whole over several forward and backward passes. A stage of a pipeline would
otherwise gather its weights and reduce its gradients once for every micro-batch.

While the module is whole, its weights are plain tensors in the parameters' dtype, whose gradients
accumulate as those of any module. They are reduced into the shards once.
"""

import torch
from torch import Tensor, nn

from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit


class Residency:
    """Makes the units of a module whole, from `unshard` to `reshard`. All ranks must call both."""

    def __init__(self, units: list[ShardedUnit], reductions: GradientReductions):
        self._units, self._reductions = units, reductions
        # of each unit, with its shards and whole weights
        self._resident: list[tuple[UnshardedUnit, list[nn.Parameter], list[Tensor]]] = []

    def unshard(self) -> None:
        """Gathers all weights at once and puts them in place of the shards."""
        gathered = [UnshardedUnit(unit, unit.parameters, None) for unit in self._units]
        for unsharded in gathered:
            unsharded.unshard()
        for unit, unsharded in zip(self._units, gathered, strict=True):
            unsharded.wait()
            weights = [
                buffer[: shard.shape[0]].detach().requires_grad_(shard.requires_grad)
                for buffer, shard in zip(unsharded.buffers, unsharded.parameters, strict=True)
            ]
            self._resident.append((unsharded, list(unsharded.parameters), weights))
            unit.placed = unsharded
            unit.place(weights)

    def reduce(self) -> None:
        """Averages the whole gradients into the shards' `.grad`."""
        for _, shards, weights in self._resident:
            pairs = zip(shards, weights, strict=True)
            gradients = {shard: weight.grad for shard, weight in pairs if shard.requires_grad}
            if gradients:
                self._reductions.reduce_outside_backward(gradients)
            for weight in weights:
                weight.grad = None
        self._reductions.wait()

    @torch.no_grad()
    def reshard(self) -> None:
        """Puts the shards back and frees the whole weights."""
        for unsharded, _, _ in self._resident:
            unsharded.reshard()
        self._resident = []
