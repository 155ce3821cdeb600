"""A unit of ZeRO 3: the weights of one module, which are whole only while it computes.

At rest, each weight of the module is a parameter that is a DTensor, sharded along its first dimension
as torch.chunk does. While the module computes, the whole weight is in its place: a plain tensor of
autograd, whose gradient is reduced into the shards.
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
from stepgauge.parallel.sharding import Sharding, local_shard

if TYPE_CHECKING:
    from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
    from stepgauge.parallel.fsdp.prefetcher import Prefetcher

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Types of attributes in which a module may keep tensors that it computed.
KEPT_TYPES = frozenset((Tensor, list, tuple))
Place = tuple[nn.Module, str]  # a module, and the name of its parameter
Storage = tuple[weakref.ref[Tensor], torch.UntypedStorage]  # of a sharded weight: see _storage_of


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the elements of the outermost lists of modules. Each becomes a unit."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from repeated_blocks(child)


class ShardedUnit:
    """The weights of a module that are unsharded together.

    name     of the module
    module   during whose forward the weights are whole
    places   for each weight, where it is a parameter: several places if it is tied
    is_root  True for the unit of the whole module: it stays whole between forward and backward, as the
             unit that is called last does, because its backward comes first

    placed     the UnshardedUnit whose weights are in place of the shards; None if the shards are
    unsharded  the UnshardedUnit whose weights were gathered last, if they are still whole
    shards     the sharded parameters
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
        # For each running call: its whole weights, and the autograd nodes of its inputs. None for a
        # call that found whole weights in place.
        self._calls: list[tuple[UnshardedUnit, Sequence[Any]] | None] = []
        self.unsharded: UnshardedUnit | None = None
        self.placed: UnshardedUnit | None = None
        self.name = name
        # Modules that may keep a loss, which backward may reach before the unit's output. The root's
        # weights are whole then anyway.
        self._modules = [] if is_root else [*module.modules()]
        for of_weight in places:
            whole = of_weight[0][0]._parameters[of_weight[0][1]]
            assert whole is not None, "the parameter is in its place"
            _set_weight(of_weight, sharded_in_place_of(whole, sharding))
        for owner in {owner for of_weight in places for owner, _ in of_weight}:
            owner.register_load_state_dict_pre_hook(functools.partial(_shard_loaded, sharding))
            owner.register_state_dict_post_hook(functools.partial(_put_shards_in_state_dict, self))
        self.shards = self.parameters
        lack_values = any(shard.is_meta for shard in self.shards)
        # The storage of each shard; empty until shards on the meta device have values.
        self._storages = [] if lack_values else [_storage_of(shard) for shard in self.shards]
        reductions.units.append(self)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": [], "_storages": [], "unsharded": None, "placed": None}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the tensors that are in the weights' places now: the shards, unless `placed`."""
        return [owner._parameters.get(name) for (owner, name), *_ in self.places]  # type: ignore[misc]

    def _require_tied(self, parameters: Sequence[nn.Parameter]) -> None:
        for of_weight, parameter in zip(self.places, parameters, strict=True):
            for owner, name in of_weight[1:]:
                if owner._parameters.get(name) is not parameter:
                    raise RuntimeError(
                        f"{name} of a {type(owner).__name__} was tied to another weight when the "
                        f"module was wrapped, and is no longer; tie it again"
                    )

    def require_shards(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError if a weight's place has a tensor that is not sharded, if a weight has no
        values, and after `weight.data = new`: a DTensor ignores it and keeps its shard.
        """
        storages = self._storages or self._storages_of(parameters)
        for index, parameter in enumerate(parameters):
            owner, name = self.places[index][0]
            if not isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__} is not sharded now; ZeRO 3 computes only with "
                    f"weights that it has sharded, not with tensors that were put in their places "
                    f"or passed to torch.func.functional_call"
                )
            if parameter is not self.shards[index]:
                self._accept_other(index, parameter)
            shard, storage = storages[index]
            if parameter.untyped_storage() is not storage:
                if shard() is local_shard(parameter):
                    raise RuntimeError(
                        f"{name}.data of a {type(owner).__name__} was set to another tensor, which has "
                        f"no effect on a sharded weight; write weight.data.copy_(new)"
                    )
                storages[index] = _storage_of(parameter)
        self._storages = storages

    def _accept_other(self, index: int, other: Tensor) -> None:
        """Accepts another sharded tensor in a weight's place: a parameter for good, and a plain tensor
        for one call of torch.func if it needs no gradient.
        """
        owner, name = self.places[index][0]
        if isinstance(other, nn.Parameter):
            self.shards[index] = other
            self.reductions.forget_usage()
        elif other.requires_grad:
            raise RuntimeError(
                f"{name} of a {type(owner).__name__} is not a parameter in this call; only parameters "
                f"can get gradients of sharded weights"
            )

    def _storages_of(self, parameters: Sequence[nn.Parameter]) -> list[Storage]:
        """Returns the storages of the shards. Raises RuntimeError for one on the meta device."""
        for ((owner, name), *_), parameter in zip(self.places, parameters, strict=True):
            if parameter.is_meta:
                raise RuntimeError(
                    f"{name} of a {type(owner).__name__} is on the meta device and has no values: call "
                    f"to_empty(device=...), then reset_parameters or load_state_dict"
                )
        return [_storage_of(each) for each in parameters if isinstance(each, DTensor)]

    def unshard(self) -> UnshardedUnit:
        """Starts to gather the weights for a call of the module; returns them."""
        unsharded = UnshardedUnit(self, self.parameters, self.compute_dtype)
        unsharded.unshard()
        return unsharded

    def place(self, weights: Sequence[Tensor]) -> None:
        """Puts these tensors in the places of the weights."""
        for of_weight, weight in zip(self.places, weights, strict=True):
            _set_weight(of_weight, weight)

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, inputs: Any, named: Any) -> None:
        """Puts whole weights in place of the shards."""
        # Checkpointing calls the module again in backward, where its weights are whole already.
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
        computed_inputs = [x for x in _tensors_of((inputs, named)) if x.grad_fn is not None]
        self._calls.append((unsharded, [x.grad_fn for x in computed_inputs]))
        unsharded.place_for_forward()
        unsharded.expect_consumers(computed_inputs)
        self.prefetcher.prefetch_next(self)

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Puts the shards back and frees the whole weights until backward needs them."""
        # There is no call if a pre-hook, such as before_forward, has raised.
        if not self._calls or (call := self._calls.pop()) is None:
            return
        unsharded, input_nodes = call
        unsharded.place_shards()
        unsharded.require_unwritten()
        if isinstance(output, Iterator):
            raise RuntimeError(
                f"{self.name or 'the module'} returns a {type(output).__name__}, which computes after "
                "its forward, when its weights are sharded again; return a list"
            )
        # An input that is returned as it is was computed elsewhere and has its hook from there.
        computed = [
            x for x in _tensors_of(output) if x.grad_fn is not None and x.grad_fn not in input_nodes
        ]
        hooked = [*computed, *_kept_by(self._modules)] if torch.is_grad_enabled() else computed
        for tensor in hooked:
            tensor.register_hook(functools.partial(_before_backward, unsharded))
        is_recomputed = self.reductions.is_running  # by checkpointing: backward follows at once
        stays = torch.is_grad_enabled() and computed and self._is_first_in_backward()
        if stays and not self.is_root:
            self.reductions.free_after_backward(unsharded)
        elif not (stays or is_recomputed):
            unsharded.reshard()
        if computed:
            self.prefetcher.after_forward(unsharded)

    def _is_first_in_backward(self) -> bool:
        return self.is_root or self.prefetcher.is_at_last_call()


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested containers, and in the attributes of other objects in them."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, type | nn.Module):
            names = (*getattr(leaf, "__dict__", ()), *getattr(leaf, "__slots__", ()))
            held = tree_leaves([getattr(leaf, name, None) for name in names])
            yield from (each for each in held if isinstance(each, Tensor))


def _kept_by(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yields computed tensors that modules keep as attributes, such as an auxiliary loss: backward may
    reach them before the output.
    """
    for module in modules:
        for value in vars(module).values():
            if type(value) in KEPT_TYPES:  # isinstance of a Tensor is ten times slower
                for each in (value,) if isinstance(value, Tensor) else value:
                    if isinstance(each, Tensor) and each.grad_fn is not None:
                        yield each


def _storage_of(sharded: Tensor) -> Storage:
    """Returns a weak reference to the shard inside a DTensor, and the DTensor's own storage, which is
    only a placeholder. `.data = new` replaces the storage but not the shard.
    """
    return weakref.ref(local_shard(sharded)), sharded.untyped_storage()


def _set_weight(of_weight: Sequence[Place], tensor: Tensor) -> None:
    for owner, name in of_weight:
        owner._parameters[name] = tensor  # type: ignore[assignment]
        if isinstance(owner, nn.RNNBase):  # it has a second list of its weights
            names = owner._flat_weights_names
            owner._flat_weights = [getattr(owner, each, None) for each in names]


def _shard_loaded(
    sharding: Sharding, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Shards whole weights that are passed to load_state_dict."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(value, Tensor)
            and not isinstance(value, DTensor)
            and value.shape == parameter.shape
        ):
            device = value.device if parameter.is_meta else parameter.device
            state[prefix + name] = sharding.shard(value.detach().to(device))


def _put_shards_in_state_dict(
    unit: ShardedUnit, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replaces whole weights in a state dict that is read during forward or backward: their memory is
    freed afterwards.
    """
    if unit.placed is None:
        return
    for of_weight, shard in zip(unit.places, unit.placed.parameters, strict=True):
        for key in (prefix + name for owner, name in of_weight if owner is module):
            if key in state:
                state[key] = shard if state[key].requires_grad else shard.detach()


def _before_backward(unsharded: UnshardedUnit, _: Tensor) -> None:
    """Gathers the weights of a call when backward reaches one of its outputs."""
    unit = unsharded.unit
    unit.reductions.begin_backward(unsharded.parameters[0].device)
    unit.prefetcher.prefetch_previous(unsharded)
    unsharded.unshard()
    unsharded.wait()
    unit.reductions.free_at_end(unsharded)  # unshard does this only if it gathers
    unsharded.place_for_backward()
