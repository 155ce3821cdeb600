"""ZeRO 3 for any module: each rank holds a slice of every weight, and whole weights live only while
they are used.

A sharded weight is no longer a parameter of its module but a property: reading it gathers the whole
weight from the ranks, as an operation of autograd whose backward averages the weight's gradient
into the ranks' slices. What backward needs of the weight is not kept: autograd's saved-tensor hooks
note which weight it was and gather it again. So a whole weight is freed as soon as nobody holds it,
and nothing has to be known about the modules.

The order in which weights were read is noted; in the next step each read starts gathering the next
weights of that order, while this one computes.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stepgauge.parallel.messages import Averager, as_one_message
from stepgauge.parallel.replicas import describe_parameter, prepare_replicas
from stepgauge.parallel.units import Reductions, Unit
from stepgauge.parallel.zero import clip_by_whole_norm

HELD = 3  # whole units that are kept after they were read
# units that are gathered ahead: a block's worth, since small matrices hide little of a large one
PREFETCHED = 4


class FullyShardedDataParallel(nn.Module):
    """Shards the matrices of a module over the ranks; vectors (gains, biases) stay whole on each.

    The weights' slices are parameters in the type that the module was built in, and what an
    optimizer is to be given: `parameters()`. Slices have two dimensions, so that they are told from
    vectors as matrices are. With `compute_dtype` weights are gathered, inputs computed and
    gradients averaged in that type.

    All ranks must use the same weights in the same order; one that is used twice is gathered and
    averaged twice. Backward passes add up without further ado: each gradient is averaged when it is
    there. Modules that look at their own class or keep their weights elsewhere (recurrent ones) are
    not for this wrapper, nor is torch.compile.

    Raises DifferentModelsError, on every rank, where the ranks hold different modules.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        prepare_replicas(module, group)
        self.averager = Averager(group)
        self.compute_dtype = compute_dtype
        self._places = _places_of_parameters(module)
        self._units: list[Unit] = []
        self._unit_of: dict[str, tuple[Unit, int]] = {}
        properties: dict[nn.Module, dict[str, property]] = collections.defaultdict(dict)
        for names in _together(module):
            self._shard(module, names, properties)
        self.shards = nn.ParameterList(unit.shard for unit in self._units)
        self._small = dict(module.named_parameters())
        # vectors that backward has added to since the last synchronisation
        self._changed: set[str] = set()
        # Those that are frozen now, and may be trained later, take no hook.
        self._noted = {name for name, parameter in self._small.items() if parameter.requires_grad}
        for name in self._noted:
            self._small[name].register_post_accumulate_grad_hook(
                functools.partial(_note, self._changed, name)
            )
        if compute_dtype is not None:
            for name in self._small:
                self._cast_on_read(name, properties)
        for owner, of_owner in properties.items():
            owner.__class__ = type(type(owner).__name__, (type(owner),), dict(of_owner))
        self.module = module
        self._held: collections.deque[tuple[Unit, Tensor]] = collections.deque(maxlen=HELD)
        self._coming: dict[Unit, tuple[dist.Work, Tensor]] = {}
        self._reductions = Reductions(self.averager)
        self._reads: list[Unit] = []
        self._expected: list[Unit] = []

    def _shard(
        self, module: nn.Module, names: list[str], properties: dict[nn.Module, dict[str, property]]
    ) -> None:
        parameters = [module.get_parameter(name) for name in names]
        described = [describe_parameter(name, p) for name, p in zip(names, parameters, strict=True)]
        unit = Unit(described, parameters, self.averager, self.compute_dtype)
        self._units.append(unit)
        for index, name in enumerate(names):
            self._unit_of[name] = unit, index
            for owner, attribute in self._places[name]:
                del owner._parameters[attribute]
                properties[owner][attribute] = self._sharded(unit, index)

    def _cast_on_read(self, name: str, properties: dict[nn.Module, dict[str, property]]) -> None:
        """A vector in compute_dtype; the parameter itself moves to the wrapper."""
        parameter = self._small[name]
        for owner, attribute in self._places[name]:
            del owner._parameters[attribute]
            properties[owner][attribute] = property(lambda _: parameter.to(self.compute_dtype))
        self.register_parameter(f"small_{name.replace('.', '_')}", parameter)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._forget()
        self._expected, self._reads = self._reads or self._expected, []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self.module(
                *map(self._cast, inputs),
                **{name: self._cast(value) for name, value in named.items()},
            )

    def _cast(self, value: Any) -> Any:
        floating = (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and self.compute_dtype is not None
        )
        return value.to(self.compute_dtype) if floating else value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Changes nothing: a rank has no place to keep whole gradients, so each backward averages
        its own.
        """
        yield

    def finish_gradient_synchronization(self) -> None:
        """Waits for the averaged gradients (on a GPU its stream does) and averages those of the
        vectors.
        """
        self._reductions.finish()
        self._forget()
        kinds = collections.defaultdict(list)
        for name, parameter in self._small.items():
            if name in self._changed or (name not in self._noted and parameter.grad is not None):
                kinds[parameter.dtype, parameter.device].append(parameter)
        for parameters in kinds.values():
            self.averager.launch(as_one_message(parameters)).wait()
        self._changed.clear()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.
        """
        slices = [shard.grad for shard in self.shards if shard.grad is not None]
        whole = [p.grad for p in self._small.values() if p.grad is not None]
        return clip_by_whole_norm(
            slices, max_norm, self.averager.group, self._device(), replicated=whole
        )

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the module, in the type that it is kept in; on
        every rank.
        """
        whole = {
            name: weight.clone()
            for unit in self._units
            for name, weight in zip(
                unit.names, unit.views(unit.gather(unit.shard.dtype)), strict=True
            )
        }
        return {
            name: whole[name] if name in whole else self._small[name].detach().clone()
            for name in self._places
        }

    @torch.no_grad()
    def full_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer whole, by the parameters' names, as one process alone would have
        them.

        On the host of rank 0; the other ranks, which must call it too, get nothing. A device holds
        the weights that are gathered together, or one value of their state, more at a time.
        """
        model: dict[str, Any] = dict.fromkeys(self._places)
        state: dict[str, dict[str, Any]] = {name: {} for name in self._places}
        for parameter, names, unit in self._kept():
            model.update(
                zip(names, self._whole_on_first(unit, parameter, parameter.detach()), strict=True)
            )
            for key, value in optimizer.state.get(parameter, {}).items():
                for name, part in zip(
                    names, self._whole_on_first(unit, parameter, value), strict=True
                ):
                    state[name][key] = part
        if dist.get_rank(self.averager.group) != 0:
            return {}
        names_of = {parameter: names for parameter, names, _ in self._kept()}
        groups = [
            {
                **group,
                "params": [name for parameter in group["params"] for name in names_of[parameter]],
            }
            for group in optimizer.param_groups
        ]
        kept = self.module.state_dict().items()
        buffers = {name: _copied_to_host(value) for name, value in kept if name not in self._places}
        return {
            "model": model | buffers,
            "optimizer": {
                "state": {n: values for n, values in state.items() if values},
                "param_groups": groups,
            },
        }

    @torch.no_grad()
    def load_full_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes what `full_state` gives, of any number of ranks, or of one process alone."""
        given = state["optimizer"]
        group_of = {name: group for group in given["param_groups"] for name in group["params"]}
        for parameter, names, unit in self._kept():
            parameter.copy_(self._share(unit, parameter, [state["model"][name] for name in names]))
            states = [given["state"].get(name, {}) for name in names]
            optimizer.state[parameter] = {
                key: self._share(unit, parameter, [each[key] for each in states])
                for key in states[0]
            }
        names_of = {parameter: names for parameter, names, _ in self._kept()}
        for group in optimizer.param_groups:
            for name in itertools.islice((n for p in group["params"] for n in names_of[p]), 1):
                group.update(
                    {key: value for key, value in group_of[name].items() if key != "params"}
                )
        # puts each value where the class wants it
        optimizer.load_state_dict(optimizer.state_dict())

    def _kept(self) -> Iterator[tuple[nn.Parameter, list[str], Unit | None]]:
        """What this rank keeps: each parameter, the names of what is in it, and its unit if it is a
        slice.
        """
        for name, parameter in self._small.items():
            yield parameter, [name], None
        for unit in self._units:
            yield unit.shard, unit.names, unit

    def _whole(self, unit: Unit | None, parameter: nn.Parameter, value: Any) -> list[Any]:
        """A value of a parameter's state for each of the weights in it, gathered if it is sliced."""
        if unit is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return [value] * (1 if unit is None else len(unit.names))
        return unit.views(unit.gather_values(value))

    def _whole_on_first(self, unit: Unit | None, parameter: nn.Parameter, value: Any) -> list[Any]:
        """The same on the host of rank 0, and None on the others."""
        keeps = dist.get_rank(self.averager.group) == 0
        return [
            _copied_to_host(part) if keeps else None for part in self._whole(unit, parameter, value)
        ]

    def _share(self, unit: Unit | None, parameter: nn.Parameter, values: list[Any]) -> Any:
        """The inverse: this rank's slice of the weights' values."""
        first = values[0]
        if not isinstance(first, Tensor):
            return first
        if unit is None or first.shape != unit.shapes[0]:
            return first.clone()
        return unit.slice_values([value.to(parameter.device) for value in values])

    def sharded_state_dict(
        self, state: dict[nn.Parameter, dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Weights, and with an optimizer's `state` that too, for torch.distributed.checkpoint.

        Slices are DTensors, so that a checkpoint loads on another number of ranks; loading is in
        place.
        """
        mesh = DeviceMesh.from_group(self.averager.group, self._device().type)
        kept: dict[str, Any] = {name: parameter.detach() for name, parameter in self._small.items()}
        owners: dict[str, tuple[nn.Parameter, Unit | None]] = {
            name: (p, None) for name, p in self._small.items()
        }
        for unit in self._units:
            kept["+".join(unit.names)] = unit.distributed(unit.shard.detach(), mesh)
            owners["+".join(unit.names)] = unit.shard, unit
        for name, (parameter, its_unit) in owners.items():
            for key, value in (state or {}).get(parameter, {}).items():
                sliced = (
                    its_unit is not None
                    and isinstance(value, Tensor)
                    and value.shape == parameter.shape
                )
                kept[f"{name}/{key}"] = (
                    its_unit.distributed(value, mesh) if its_unit and sliced else value
                )
        return kept

    def _sharded(self, unit: Unit, index: int) -> property:
        """An attribute whose value is the unit's whole weight, as autograd knows it."""
        return property(lambda _: _Gather.apply(unit.shard, self, unit)[index])

    def materialise(self, unit: Unit) -> Tensor:
        """The unit's whole storage, ready for the current stream; starts gathering what is expected
        next.
        """
        self._reads.append(unit)
        flat = next((flat for held, flat in self._held if held is unit), None)
        if flat is None:
            coming = (
                self._coming.pop(unit)
                if unit in self._coming
                else unit.start_gather(unit.compute_dtype)
            )
            coming[0].wait()
            flat = coming[1]
            self._held.append((unit, flat))
        self._prefetch()
        return flat

    def _prefetch(self) -> None:
        """Starts gathering the next units, as long as this step has read as the last one did."""
        position = len(self._reads)
        if self._expected[position - 1 : position] != self._reads[-1:]:
            return
        for unit in self._expected[position : position + PREFETCHED]:
            if unit not in self._coming and all(held is not unit for held, _ in self._held):
                self._coming[unit] = unit.start_gather(unit.compute_dtype)

    def _forget(self) -> None:
        """Lets go of whole weights: they are about to change, or have."""
        for work, _ in self._coming.values():
            work.wait()
        self._coming.clear()
        self._held.clear()

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage().data_ptr()
        for unit, flat in self._held:
            # Addresses of what is held cannot be anybody else's.
            if flat.untyped_storage().data_ptr() == storage:
                return unit, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, shape, stride, offset = packed
        with torch.no_grad():
            return self.materialise(unit).as_strided(shape, stride, offset)

    def reduce(self, unit: Unit, gradients: tuple[Tensor | None, ...]) -> None:
        self._reductions.start(unit, gradients)


def _note(changed: set[str], name: str, _: Tensor) -> None:
    changed.add(name)


def _copied_to_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


class _Gather(torch.autograd.Function):
    """Whole weights of a unit from the ranks' slices; backward starts averaging their gradients."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, wrapper: FullyShardedDataParallel, unit: Unit
    ) -> tuple[Tensor, ...]:
        ctx.wrapper, ctx.unit = wrapper, unit
        ctx.set_materialize_grads(False)
        return tuple(unit.views(wrapper.materialise(unit)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.wrapper.reduce(ctx.unit, gradients)
        return None, None, None


def _places_of_parameters(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Of each parameter, under its first name, the modules and attributes where it is: several if
    it is tied.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places[names[parameter]].append((owner, attribute))
    return places


def _together(module: nn.Module) -> list[list[str]]:
    """Names of the matrices that are gathered together: those of one module, one type, trained or
    frozen alike.
    """

    def kind(item: tuple[str, nn.Parameter]) -> tuple[Any, ...]:
        name, parameter = item
        return name.rpartition(".")[0], parameter.dtype, parameter.device, parameter.requires_grad

    matrices = [(name, p) for name, p in module.named_parameters() if p.ndim >= 2]
    return [[name for name, _ in items] for _, items in itertools.groupby(matrices, kind)]
