"""Shards in place of a whole weight."""

from typing import Any

from torch import nn

from stepgauge.parallel.autograd.parameter_hooks import share_hooks
from stepgauge.parallel.sharding import Sharding


class ReplacedWeight(nn.Parameter):
    """A whole weight in whose place its shards were put: whoever still has it and uses it is told."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            "this weight is no parameter any more, zero3 has put shards in place of it: build "
            "optimizers and lists from the parameters of the wrapped module, and wrap modules that "
            "share the weight as one module"
        )


def sharded_in_place_of(whole: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    """The weight, sharded, with its attributes, hooks and gradient; the whole says from now on that it
    is none.
    """
    part, is_trained = sharding.shard(whole.detach()), whole.requires_grad
    sharded = nn.Parameter(part, requires_grad=is_trained)
    vars(sharded).update(vars(whole))
    if whole.grad is not None:
        sharded.grad = sharding.shard(whole.grad)
    share_hooks(whole, sharded)
    if type(whole) is nn.Parameter:
        whole.__class__ = ReplacedWeight
    return sharded
