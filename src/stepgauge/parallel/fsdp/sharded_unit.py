"""A unit of ZeRO 3: the weights of one module, sharded at rest and whole while it computes.

At rest each weight is a DTensor, cut along its first dimension as torch.chunk cuts, and the module's
own parameter. While the module computes, whole weights stand in its place: plain tensors that
autograd knows, whose gradients are averaged into the shards.
"""

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.fsdp.replaced_weight import sharded_in_place_of
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit
from stepgauge.parallel.sharding import Sharding, local

if TYPE_CHECKING:
    from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
    from stepgauge.parallel.fsdp.prefetcher import Prefetcher

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
KEPT = frozenset((Tensor, list, tuple))  # attributes in which a module may keep what it computed
Place = tuple[nn.Module, str]  # a module, and the name of its parameter
Seen = tuple[weakref.ref[Tensor], torch.UntypedStorage]  # of a sharded weight


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules: what is worth sharding by itself."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from repeated_blocks(child)


class ShardedUnit:
    """The weights of a module that are unsharded together.

    name    the module's
    module  whose forward they are whole in
    places  of each weight, where it is a parameter: several if it is tied
    is_root whether it stays whole between forward and backward, which follows at once
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        places: Sequence[Sequence[Place]],
        sharding: Sharding,
        compute_dtype: torch.dtype | None,
        prefetcher: "Prefetcher",
        reductions: "GradientReductions",
        *,
        is_root: bool,
    ):
        self.places, self.sharding, self.compute_dtype = places, sharding, compute_dtype
        self.prefetcher, self.reductions, self.is_root = prefetcher, reductions, is_root
        # Weights of each call that goes on, and what computed its inputs; None where they were whole.
        self._calls: list[tuple[UnshardedUnit, Sequence[Any]] | None] = []
        self.unsharded: UnshardedUnit | None = None
        self.placed: UnshardedUnit | None = None  # whose weights stand in place of the shards
        self.name = name
        # Where a loss may be kept to which backward comes first; the root's weights are whole then.
        self._parts = [] if is_root else [*module.modules()]
        for of_weight in places:
            whole = of_weight[0][0]._parameters[of_weight[0][1]]
            assert whole is not None, "it has a place"
            _set_weight(of_weight, sharded_in_place_of(whole, sharding))
        for owner in {owner for of_weight in places for owner, _ in of_weight}:
            owner.register_load_state_dict_pre_hook(functools.partial(_cut, sharding))
            owner.register_state_dict_post_hook(functools.partial(_give_shards, self))
        self.shards = self.parameters
        lack_values = any(shard.is_meta for shard in self.shards)
        self._seen = [] if lack_values else [_insides(shard) for shard in self.shards]
        reductions.units.append(self)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": [], "_seen": [], "unsharded": None, "placed": None}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded weights, where they are in their places."""
        return [owner._parameters.get(name) for (owner, name), *_ in self.places]  # type: ignore[misc]

    def _require_tied(self, parameters: Sequence[nn.Parameter]) -> None:
        for of_weight, parameter in zip(self.places, parameters, strict=True):
            for owner, name in of_weight[1:]:
                if owner._parameters.get(name) is not parameter:
                    raise RuntimeError(
                        f"{name} of a {type(owner).__name__} was tied to another weight when the "
                        f"module was wrapped, and is not now; tie it again"
                    )

    def require_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError where a whole tensor stands in place of a shard, or `weight.data = new`
        was written, of which a DTensor takes nothing: it keeps its part; and where weights have no
        values.
        """
        seen = self._seen or self._seen_first(parameters)
        for index, parameter in enumerate(parameters):
            owner, name = self.places[index][0]
            if not isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__} is not sharded now; ZeRO 3 computes with the "
                    f"weights that it has sharded, not with others that are put there or that "
                    f"torch.func.functional_call is given"
                )
            if parameter is not self.shards[index]:
                self._take(index, parameter)
            part, storage = seen[index]
            if parameter.untyped_storage() is not storage:
                if part() is local(parameter):
                    raise RuntimeError(
                        f"{name}.data of a {type(owner).__name__} was set to another tensor, which a "
                        f"sharded weight does not take; write weight.data.copy_(new)"
                    )
                seen[index] = _insides(parameter)
        self._seen = seen

    def _take(self, index: int, other: Tensor) -> None:
        """In place of a shard: another parameter for good, a plain tensor for a call by torch.func."""
        owner, name = self.places[index][0]
        if isinstance(other, nn.Parameter):
            self.shards[index] = other
            self.reductions.forget_usage()
        elif other.requires_grad:
            raise RuntimeError(
                f"{name} of a {type(owner).__name__} is no parameter in this call; gradients of "
                f"sharded weights go to parameters alone"
            )

    def _seen_first(self, parameters: Sequence[nn.Parameter]) -> list[Seen]:
        for ((owner, name), *_), parameter in zip(self.places, parameters, strict=True):
            if parameter.is_meta:
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__} is on the meta device and has no values: call "
                    f"to_empty(device=...), then reset_parameters or load_state_dict"
                )
        return [_insides(parameter) for parameter in parameters if isinstance(parameter, DTensor)]

    def unshard(self) -> UnshardedUnit:
        unsharded = UnshardedUnit(self, self.parameters, self.compute_dtype)
        unsharded.unshard()
        return unsharded

    def place(self, weights: Sequence[Tensor]) -> None:
        """These in the places of the weights."""
        for of_weight, weight in zip(self.places, weights, strict=True):
            _set_weight(of_weight, weight)

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, inputs: Any, named: Any) -> None:
        """Puts whole weights in place of the shards."""
        # Checkpointing calls the module again in backward, which has its weights already.
        current = self.unsharded
        if self.reductions.is_running and current is not None and current.is_current():
            current.wait()
            current.place_for_backward()
        if self.placed is not None:
            self._calls.append(None)
            return
        self._require_tied(self.parameters)
        unsharded = self.prefetcher.unshard_for_forward(self)
        unsharded.wait()
        given = [x for x in _tensors_of((inputs, named)) if x.grad_fn is not None]
        self._calls.append((unsharded, [x.grad_fn for x in given]))
        unsharded.place_for_forward()
        unsharded.expect_consumers(given)
        self.prefetcher.prefetch_next(self)

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Puts the shards back; whole weights are freed until backward needs them."""
        if not self._calls or (call := self._calls.pop()) is None:  # what failed was before us
            return
        unsharded, given = call
        unsharded.place_shards()
        unsharded.require_unwritten()
        if isinstance(output, Iterator):
            raise RuntimeError(
                f"{self.name or 'the module'} returns a {type(output).__name__}, which computes after "
                "its forward, when its weights are sharded again; return a list"
            )
        # What is given back as it came was computed, and is hooked, elsewhere.
        reached = [
            x for x in _tensors_of(output) if x.grad_fn is not None and x.grad_fn not in given
        ]
        for tensor in [*reached, *_kept_by(self._parts)] if torch.is_grad_enabled() else reached:
            tensor.register_hook(functools.partial(_before_backward, unsharded))
        recomputed = self.reductions.is_running  # checkpointing's tensors are needed at once
        if not recomputed and not (self.is_root and torch.is_grad_enabled() and reached):
            unsharded.reshard()
        if reached:
            self.prefetcher.after_forward(unsharded)


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """Those in containers, and in objects of no known kind as far as their attributes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, type | nn.Module):
            names = (*getattr(leaf, "__dict__", ()), *getattr(leaf, "__slots__", ()))
            held = tree_leaves([getattr(leaf, name, None) for name in names])
            yield from (each for each in held if isinstance(each, Tensor))


def _kept_by(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    """What modules computed and have as attributes, as a loss of their own: backward may come to it
    before it comes to the output.
    """
    for part in parts:
        for value in vars(part).values():
            if type(value) in KEPT:  # isinstance of a Tensor is ten times slower
                for each in (value,) if isinstance(value, Tensor) else value:
                    if isinstance(each, Tensor) and each.grad_fn is not None:
                        yield each


def _insides(sharded: Tensor) -> Seen:
    """A sharded weight's part, not kept alive, and what stands for the whole's memory: `.data = new`
    replaces the second alone.
    """
    return weakref.ref(local(sharded)), sharded.untyped_storage()


def _set_weight(of_weight: Sequence[Place], tensor: Tensor) -> None:
    for owner, name in of_weight:
        owner._parameters[name] = tensor  # type: ignore[assignment]
        if isinstance(owner, nn.RNNBase):  # which keeps its weights a second time
            names = owner._flat_weights_names
            owner._flat_weights = [getattr(owner, each, None) for each in names]


def _cut(
    sharding: Sharding, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """load_state_dict takes whole weights too: this rank's part of each."""
    for name, parameter in module._parameters.items():
        given = state.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(given, Tensor)
            and not isinstance(given, DTensor)
            and given.shape == parameter.shape
        ):
            device = given.device if parameter.is_meta else parameter.device
            state[prefix + name] = sharding.shard(given.detach().to(device))


def _give_shards(
    unit: ShardedUnit, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """A state dict of a forward or backward has shards too: whole weights are freed after it."""
    if unit.placed is None:
        return
    for of_weight, shard in zip(unit.places, unit.placed.parameters, strict=True):
        for key in (prefix + name for owner, name in of_weight if owner is module):
            if key in state:
                state[key] = shard if state[key].requires_grad else shard.detach()


def _before_backward(unsharded: UnshardedUnit, _: Tensor) -> None:
    unit = unsharded.unit
    unit.reductions.begin_backward(unsharded.parameters[0].device)
    unit.prefetcher.prefetch_previous(unsharded)
    unsharded.unshard()
    unsharded.wait()
    unit.reductions.free_at_end(unsharded)  # unshard does not where weights are whole already
    unsharded.place_for_backward()
