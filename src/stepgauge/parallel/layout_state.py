"""Puts the state of a layout's model and optimizer together as one process would have it, and takes it
apart again: a checkpoint of one layout can be loaded in another.

The state is gathered axis by axis, first over the data axis. Each axis gathers on its first rank, so
that rank 0 has the whole state on its host.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.data_axis import DataAxis, gathered
from stepgauge.parallel.named_state import plain_name
from stepgauge.parallel.pipeline import Tie
from stepgauge.parallel.replicas import device_of
from stepgauge.parallel.tensor_parallel import TensorParallel
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.pipeline import ScheduleError

State = dict[str, Any]
Groups = list[dict[str, Any]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayoutState:
    """This rank's part of the state of a network, and how the parts make the whole.

    data      the modules of this rank and their optimizer
    place     this rank's index on the data and tensor axes
    tensor    how tensor parallelism has cut each module; empty without a tensor axis
    pipeline  the group of the ranks with the other stages; None without a pipeline
    aliases   for the other names of a tied weight, the name that the whole network's optimizer uses

    Names are those of the network, without the prefix that torch.compile adds.
    """

    data: DataAxis
    place: Mapping[str, int]
    tensor: Mapping[int, TensorParallel] = dataclasses.field(default_factory=dict)
    pipeline: dist.ProcessGroup | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def whole(self) -> State:
        """Returns the whole state on rank 0, and an empty one on the others. All ranks must call it."""
        model = {}
        for name, value in self._model().items():
            part = gathered(value)
            if not self.place.get("data"):
                model[name] = self._whole(name, part)
        optimizer = self.data.optimizer_state(self._names())
        if self.place.get("data"):
            return {}
        optimizer["state"] = self._whole_states(optimizer["state"])
        if self.place.get("tensor"):
            return {}
        return self._of_all_stages({"model": model, "optimizer": optimizer})

    def share(self) -> State:
        """Returns this rank's part of the state. A checkpoint of all parts is whole, and no rank
        gathers it. Weights that tensor parallelism has cut are put together one by one, and each is
        in the part of one rank of the tensor axis. All ranks must call it.
        """
        model = self._model()
        optimizer = self.data.own_optimizer_state(self._names())
        if self.tensor:
            states = optimizer["state"]
            model = self._keep_own(model, lambda name: self._whole(name, gathered(model[name])))
            optimizer["state"] = self._keep_own(
                sorted(states), lambda name: self._gathered_state(name, states[name])
            )
        if self.pipeline is not None:
            stages: list[Groups] = gathered_objects(optimizer["param_groups"], self.pipeline)
            optimizer["param_groups"] = _merged_groups(stages)
        return {"model": model, "optimizer": optimizer}

    def _keep_own(self, names: Iterable[str], whole: Callable[[str], T]) -> dict[str, T]:
        """Calls `whole` with each name, which all ranks of the tensor axis must do, and returns every
        N-th result: those that belong to this one of the N ranks.
        """
        ranks = next(iter(self.tensor.values())).stream.ranks
        kept = {}
        for number, name in enumerate(names):
            value = whole(name)
            if number % ranks == self.place["tensor"]:
                kept[name] = value
        return kept

    def _gathered_state(self, name: str, values: Mapping[str, Any]) -> State:
        """Returns the optimizer state of one parameter, whole."""
        whole = {key: gathered(value) for key, value in values.items()}
        return self._whole_states({name: whole})[name]

    def load(self, state: State) -> None:
        """Loads what `whole` returned, on every rank. It looks up only this rank's names, each once."""
        model, shapes = state["model"], {}
        for module in self.data.plain.values():
            own = {}
            for key in module.state_dict():
                name = plain_name(key)
                whole = model[name if name in model else self.aliases[name]]
                own[key] = self._part(name, whole)
                if isinstance(whole, Tensor):
                    shapes[self.aliases.get(name, name)] = whole.shape
            module.load_state_dict(own)
        names = self._names()
        optimizer = state["optimizer"]
        states = {}
        for name in names.values():
            if name in optimizer["state"]:
                states[name] = {
                    key: self._part(name, value) if has_shape(value, shapes[name]) else _copy(value)
                    for key, value in optimizer["state"][name].items()
                }
        self.data.load_optimizer_state(names, {**optimizer, "state": states})

    @property
    def _device(self) -> torch.device:
        """The device on which the groups communicate."""
        return device_of(next(iter(self.data.plain.values())))

    def _model(self) -> State:
        """Returns this rank's part of the model's state, on its device."""
        return {
            plain_name(name): value.detach() if isinstance(value, Tensor) else value
            for module in self.data.plain.values()
            for name, value in module.state_dict().items()
        }

    def _names(self) -> Mapping[Tensor, str]:
        """Returns the names of this rank's parameters in the whole network's optimizer."""
        names: dict[Tensor, str] = {}
        for module in self.data.plain.values():
            for key, parameter in module.named_parameters():
                name = plain_name(key)
                names[parameter] = self.aliases.get(name, name)
        return names

    def _whole_states(self, states: State) -> State:
        """Returns optimizer states on the host, in the same order on all ranks. Tensors of a parameter's
        shape are put together as the parameter is.
        """
        shapes = {name: parameter.shape for parameter, name in self._names().items()}
        whole: State = {}
        for name, values in sorted(states.items()):
            whole[name] = {}
            for key, value in values.items():
                has_its_shape = has_shape(value, shapes[name])
                whole[name][key] = self._whole(name, value) if has_its_shape else _on_host(value)
        return whole

    def _whole(self, name: str, part: Any) -> Any:
        """Gathers a value of a parameter's shape over the tensor axis, if it is cut; returns it on the
        host.
        """
        cut, own_name = self._cut_of(name)
        return _on_host(cut.whole(own_name, part.to(self._device)) if cut else part)

    def _part(self, name: str, whole: Any) -> Any:
        """Returns this rank's part of a whole value of a parameter's shape, as a copy."""
        cut, own_name = self._cut_of(name)
        return _copy(cut.part(own_name, whole) if cut else whole)

    def _cut_of(self, name: str) -> tuple[TensorParallel | None, str]:
        """Returns the tensor-parallel module that has cut a parameter, and the parameter's name in it;
        None if the parameter is not cut.
        """
        tied = [own for own, first in self.aliases.items() if first == name]
        for cut in self.tensor.values():
            for own in (name, *tied):
                if own in cut.cuts:
                    return cut, own
        return None, name

    def _of_all_stages(self, state: State) -> State:
        """Gathers the states of all stages on the first rank of the pipeline."""
        if self.pipeline is None:
            return state
        is_first = self.pipeline.rank() == 0
        stages: list[Any] | None = [None] * self.pipeline.size() if is_first else None
        dist.gather_object(state, stages, group=self.pipeline, group_dst=0)
        return _merged(stages) if stages else {}


def has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _copy(value: Any) -> Any:
    """Clones a tensor: the places of a tied weight must not share their state."""
    return value.clone() if isinstance(value, Tensor) else value


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _merged(stages: list[State]) -> State:
    """Merges the states of all stages into one."""
    groups = _merged_groups([stage["optimizer"]["param_groups"] for stage in stages])
    return {
        "model": {name: value for stage in stages for name, value in stage["model"].items()},
        "optimizer": {
            # The first stage's state wins for a tied weight.
            "state": {
                name: value
                for stage in reversed(stages)
                for name, value in stage["optimizer"]["state"].items()
            },
            "param_groups": groups,
        },
    }


def _merged_groups(stages: Sequence[Groups]) -> Groups:
    """Merges the groups of all stages; each parameter appears once."""
    groups = [dict(group) for group in stages[0]]
    for number, group in enumerate(groups):
        names = (name for stage in stages for name in stage[number]["params"])
        group["params"] = list(dict.fromkeys(names))
    return groups


def require_distinct_names(
    modules: Mapping[int, nn.Module], tied: Sequence[Tie], pipeline: dist.ProcessGroup | None
) -> None:
    """Raises ScheduleError, on every rank of the pipeline, if two stages have parameters of the same
    name that are not tied: a checkpoint could not distinguish them.
    """
    own = [(stage, name) for stage, each in modules.items() for name, _ in each.named_parameters()]
    of_all_ranks = [own] if pipeline is None else gathered_objects(own, pipeline)
    stage_of: dict[str, int] = {}
    for stage, name in sorted(itertools.chain(*of_all_ranks)):
        other = stage_of.setdefault(name, stage)
        if other != stage and not any({(other, name), (stage, name)} <= set(tie) for tie in tied):
            raise ScheduleError(
                f"stages {other} and {stage} both have a parameter {name}; give each stage's "
                f"parameters the names that they have in the whole network"
            )
