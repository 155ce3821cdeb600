"""A sharded module that is whole over several forwards and backwards: a stage of a pipeline, whose
micro-batches would else gather its weights and average its gradients one by one.

While it is whole, its weights are plain tensors in the parameters' type, whose gradients add up as
those of any module. They become the mean over ranks, in the shards, once.
"""

import torch
from torch import Tensor, nn

from stepgauge.parallel.parameter_group import ParameterGroup
from stepgauge.parallel.traffic import Reductions
from stepgauge.parallel.unsharded_group import UnshardedGroup


class Residency:
    """The groups of a module, from `unshard` to `reshard`. All ranks of the shards must call both."""

    def __init__(self, groups: list[ParameterGroup], reductions: Reductions):
        self._groups, self._reductions = groups, reductions
        self._whole: list[tuple[UnshardedGroup, list[nn.Parameter], list[Tensor]]] = []

    def unshard(self) -> None:
        """Gathers all weights at once, and leaves them in their places."""
        found = [UnshardedGroup(each, each.parameters, None) for each in self._groups]
        for group in found:
            group.unshard()
        for each, group in zip(self._groups, found, strict=True):
            group.wait()
            weights = [
                buffer[: shard.shape[0]].detach().requires_grad_(shard.requires_grad)
                for buffer, shard in zip(group.buffers, group.parameters, strict=True)
            ]
            self._whole.append((group, list(group.parameters), weights))
            each.in_place = group
            each.put(weights)

    def reduce(self) -> None:
        """Averages the whole gradients into the shards' `.grad`."""
        for _, shards, weights in self._whole:
            pairs = zip(shards, weights, strict=True)
            trained = {shard: weight.grad for shard, weight in pairs if shard.requires_grad}
            if trained:
                self._reductions.queue(trained)
            for weight in weights:
                weight.grad = None
        self._reductions.flush()

    @torch.no_grad()
    def reshard(self) -> None:
        """Puts the shards back and frees the whole weights."""
        for group, _, _ in self._whole:
            group.reshard()
        self._whole = []
