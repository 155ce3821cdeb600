"""A sharded module that is whole over several forwards and backwards: a stage of a pipeline, whose
micro-batches would else gather its weights and average its gradients one by one.

While it is whole, its weights are plain tensors in the parameters' type, whose gradients add up as
those of any module. They become the mean over ranks, in the shards, once.
"""

import torch
from torch import Tensor, nn

from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit


class Residency:
    """The units of a module, from `unshard` to `reshard`. All ranks of the shards must call both."""

    def __init__(self, units: list[ShardedUnit], reductions: GradientReductions):
        self._units, self._reductions = units, reductions
        self._whole: list[tuple[UnshardedUnit, list[nn.Parameter], list[Tensor]]] = []

    def unshard(self) -> None:
        """Gathers all weights at once, and leaves them in their places."""
        found = [UnshardedUnit(unit, unit.parameters, None) for unit in self._units]
        for unsharded in found:
            unsharded.unshard()
        for unit, unsharded in zip(self._units, found, strict=True):
            unsharded.wait()
            weights = [
                buffer[: shard.shape[0]].detach().requires_grad_(shard.requires_grad)
                for buffer, shard in zip(unsharded.buffers, unsharded.parameters, strict=True)
            ]
            self._whole.append((unsharded, list(unsharded.parameters), weights))
            unit.placed = unsharded
            unit.place(weights)

    def reduce(self) -> None:
        """Averages the whole gradients into the shards' `.grad`."""
        for _, shards, weights in self._whole:
            pairs = zip(shards, weights, strict=True)
            trained = {shard: weight.grad for shard, weight in pairs if shard.requires_grad}
            if trained:
                self._reductions.reduce_outside_backward(trained)
            for weight in weights:
                weight.grad = None
        self._reductions.wait()

    @torch.no_grad()
    def reshard(self) -> None:
        """Puts the shards back and frees the whole weights."""
        for unsharded, _, _ in self._whole:
            unsharded.reshard()
        self._whole = []
