"""ZeRO 3 for any module: each rank holds a part of every weight, and whole weights live only while
they are used.

As torch's fully_shard does it: the parameters of the module are DTensors, its repeated blocks
gather their weights before they compute and free them after, and once more in backward. What is
done to a parameter or its `.grad` is done to ordinary sharded tensors. Weights are gathered where
they lie, without a copy into a common buffer where the first dimension divides, and the next
block's come while one computes. A unit's gradients are averaged as one flat message.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.prefetcher import Prefetcher
from stepgauge.parallel.fsdp.residency import Residency
from stepgauge.parallel.fsdp.sharded_unit import Place, ShardedUnit, repeated_blocks
from stepgauge.parallel.replicas import device_of, prepare_replicas, registrations, require_known
from stepgauge.parallel.sharding import Sharding


class FullyShardedDataParallel(nn.Module):
    """Shards the parameters of a module over the ranks.

    Units that are gathered together are the elements of the module's outermost lists of modules
    (its blocks), and the rest. Parameters and optimizer state are in the type that the module was
    built in; with `compute_dtype` weights are gathered, inputs computed and gradients averaged in
    that type. Each backward averages its gradients: they add up without further ado.

    All ranks must call the units in the same order, within them modules as they like. The weights
    of a unit are whole only in its forward. `weight.data = new` raises in the next forward: a DTensor
    takes nothing of it; write weight.data.copy_(new).

    A module on the meta device is sharded there; `to_empty(device=...)` makes the shards, and
    `reset_parameters` or `load_state_dict` fill them.

    Raises DifferentModelsError, on every rank, where the ranks hold different modules; ValueError
    for a parameter without dimensions and for an embedding with max_norm; whoever uses the whole
    weights of before, RuntimeError. Backward raises RuntimeError
    for create_graph=True, and for weights that were written since forward.

    residency  keeps all weights whole over several forwards and backwards
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        prepare_replicas(module, group, may_lack_values=True)
        self.compute_dtype = compute_dtype
        self.module = module
        sharding = Sharding(group, device_of(module).type)
        self._prefetcher, self._reductions = Prefetcher(sharding), GradientReductions(sharding)
        places = _places_of_parameters(module)
        blocks = [block for block in repeated_blocks(module) if block is not module]
        owners = [*dict.fromkeys(blocks), module]
        names = {part: name for name, part in module.named_modules()}
        units = [
            ShardedUnit(
                names[owner],
                owner,
                of_unit,
                sharding,
                compute_dtype,
                self._prefetcher,
                self._reductions,
                is_root=owner is module,
            )
            for owner, of_unit in zip(owners, _by_unit(places, owners), strict=True)
            if of_unit
        ]
        self.residency = Residency(units, self._reductions)
        self._registered = registrations()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._registered != (now := registrations()):
            require_known(self.module, ())
            self._registered = now
        with self._prefetcher.of_one_forward():
            return self.module(
                *map(self._cast, inputs),
                **{name: self._cast(value) for name, value in named.items()},
            )

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype is None or not isinstance(value, Tensor):
            return value
        return value.to(self.compute_dtype) if value.is_floating_point() else value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: a rank has no place to keep whole gradients, so each backward averages
        its own.
        """
        yield

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter in self.parameters():
            parameter.grad = None  # which copies of other parameters have not either

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.
        """
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _places_of_parameters(module: nn.Module) -> dict[str, list[Place]]:
    """Of each whole parameter, under its first name, the modules and attributes where it is:
    several if it is tied. Raises ValueError for one without dimensions.
    """
    whole = {p: name for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    places: dict[str, list[Place]] = {name: [] for name in whole.values()}
    for parameter, name in whole.items():
        if parameter.ndim == 0:
            raise ValueError(f"{name} has no dimensions; ZeRO 3 shards the first one of each")
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in whole:
                places[whole[parameter]].append((owner, attribute))
    return places


def _by_unit(
    places: Mapping[str, list[Place]], owners: Sequence[nn.Module]
) -> list[list[list[Place]]]:
    """The places of the weights of each unit, by the module that it is of. What is in several units
    is the last one's, the whole module's.
    """
    units_of: dict[nn.Module, set[int]] = {}
    for unit, owner in enumerate(owners[:-1]):
        for module in owner.modules():
            units_of.setdefault(module, set()).add(unit)
    found: list[list[list[Place]]] = [[] for _ in owners]
    for of_weight in places.values():
        its_units = {unit for module, _ in of_weight for unit in units_of.get(module, {-1})}
        found[its_units.pop() if len(its_units) == 1 else -1].append(of_weight)
    return found
