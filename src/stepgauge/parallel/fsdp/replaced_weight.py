"""Replaces a weight by its shards."""

from typing import Any

from torch import nn

from stepgauge.parallel.autograd.parameter_hooks import share_hooks
from stepgauge.parallel.sharding import Sharding


class ReplacedWeight(nn.Parameter):
    """A weight that was replaced by shards. Every use of it raises RuntimeError."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            "zero3 has replaced this weight by a sharded parameter: build optimizers and lists from "
            "the parameters of the wrapped module, and wrap modules that share a weight as one "
            "module"
        )


def sharded_in_place_of(whole: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    """Returns the weight as a sharded parameter with its attributes, hooks and gradient. The whole
    weight becomes a ReplacedWeight.
    """
    shard, requires_grad = sharding.shard(whole.detach()), whole.requires_grad
    sharded = nn.Parameter(shard, requires_grad=requires_grad)
    vars(sharded).update(vars(whole))
    if whole.grad is not None:
        sharded.grad = sharding.shard(whole.grad)
    share_hooks(whole, sharded)
    if type(whole) is nn.Parameter:
        whole.__class__ = ReplacedWeight
    return sharded
