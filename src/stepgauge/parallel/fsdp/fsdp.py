"""ZeRO 3 for any module: each rank holds a shard of every weight, and whole weights exist only while
they are used.

It works like torch's fully_shard: the parameters of the module are DTensors, and each of its repeated
blocks gathers its weights before it computes and frees them afterwards, in forward and again in
backward. Parameters and their `.grad` are ordinary sharded tensors. If the first dimension divides
by the number of ranks, weights are gathered without a copy into a common buffer. The weights of
the next block are gathered while a block computes. The gradients of a unit are reduced as one flat
message.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepgauge.parallel.fsdp.called_alone import require_whole_weights
from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.prefetcher import Prefetcher
from stepgauge.parallel.fsdp.residency import Residency
from stepgauge.parallel.fsdp.sharded_unit import Place, ShardedUnit, repeated_blocks
from stepgauge.parallel.replicas import device_of, prepare_replicas, registrations, require_known
from stepgauge.parallel.sharding import Sharding


class FullyShardedDataParallel(nn.Module):
    """Shards the parameters of a module over the ranks.

    The weights of a unit are gathered together. Units are the elements of the module's outermost
    lists of modules (its blocks), and the rest of the module. Parameters and optimizer state keep
    the dtype in which the module was built. With `compute_dtype`, floating-point inputs are cast to
    that dtype, and weights are gathered and gradients averaged in it. Each backward averages its
    gradients and adds the means to `.grad`.

    All ranks must call the units in the same order; inside a unit they may call different modules.
    The weights of a unit are whole only during its forward, or inside `whole_weights`. After
    `weight.data = new` the next forward raises, because a DTensor ignores it; write
    weight.data.copy_(new).

    A module on the meta device is sharded there. `to_empty(device=...)` then allocates the shards,
    and `reset_parameters` or `load_state_dict` fills them.

    Raises DifferentModelsError, on every rank, if the ranks hold different modules; ValueError for a
    parameter without dimensions and for an embedding with max_norm. Using a weight that was replaced
    by shards raises RuntimeError. Backward raises RuntimeError under create_graph=True, and for
    weights that were written since forward.

    residency  keeps all weights whole over several forward and backward passes
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
        by_unit = _by_unit(places, owners)
        require_whole_weights(itertools.chain(*by_unit[-1]), module)
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
            for owner, of_unit in zip(owners, by_unit, strict=True)
            if of_unit
        ]
        self.residency = Residency(units, self._reductions)
        self._registered = registrations()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._registered != (now := registrations()):
            require_known(self.module, ())
            self._registered = now
        with self._prefetcher.during_forward():
            return self.module(
                *map(self._cast, inputs),
                **{name: self._cast(value) for name, value in named.items()},
            )

    def _cast(self, value: Any) -> Any:
        if self.compute_dtype is None or not isinstance(value, Tensor):
            return value
        return value.to(self.compute_dtype) if value.is_floating_point() else value

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Keeps all weights whole, so that parts of the module can be called without gradients, as
        `generate` of an encoder-decoder network does. All ranks must enter it.
        """
        self.residency.unshard()
        try:
            with torch.no_grad():
                yield
        finally:
            self.residency.reshard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Has no effect: ranks do not keep whole gradients, so every backward averages its own."""
        yield

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter in self.parameters():
            parameter.grad = None  # a deep copy of an ordinary parameter has no gradient either

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their total norm is at most `max_norm`; returns the norm
        before.
        """
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _places_of_parameters(module: nn.Module) -> dict[str, list[Place]]:
    """Returns the places of each parameter that is not sharded yet, by its first name: a tied
    parameter has several. Raises ValueError for a parameter without dimensions.
    """
    whole = {p: name for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    places: dict[str, list[Place]] = {name: [] for name in whole.values()}
    for parameter, name in whole.items():
        if parameter.ndim == 0:
            raise ValueError(
                f"{name} has no dimensions; ZeRO 3 shards the first one of a parameter"
            )
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in whole:
                places[whole[parameter]].append((owner, attribute))
    return places


def _by_unit(
    places: Mapping[str, list[Place]], owners: Sequence[nn.Module]
) -> list[list[list[Place]]]:
    """Returns the places of the weights of each unit; unit i has the weights inside owners[i]. The
    last owner is the whole module: its unit has the weights that are in no other unit or in several.
    """
    units_of: dict[nn.Module, set[int]] = {}
    for unit, owner in enumerate(owners[:-1]):
        for module in owner.modules():
            units_of.setdefault(module, set()).add(unit)
    by_unit: list[list[list[Place]]] = [[] for _ in owners]
    for of_weight in places.values():
        units = {unit for module, _ in of_weight for unit in units_of.get(module, {-1})}
        by_unit[units.pop() if len(units) == 1 else -1].append(of_weight)
    return by_unit
