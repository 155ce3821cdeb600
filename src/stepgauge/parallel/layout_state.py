"""A layout's model and optimizer as one process would have them, and back: what a checkpoint holds,
so that another layout can go on from it.

The state is put together axis by axis, data first: each axis hands what it has gathered to its
first rank, so that the first rank of all has the whole on its host.
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
Change = Callable[[str, Tensor], Tensor]
Groups = list[dict[str, Any]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayoutState:
    """What a rank has of a network, and how it is put together.

    data      the modules of this rank and their optimizer
    place     of this rank on the data and tensor axes
    tensor    how each module is cut; none where there is no such axis
    pipeline  the group of the ranks with the other stages; None without a pipeline
    aliases   of tied weights, the name under which the whole network's optimizer has them

    Names are those of the network, without what torch.compile puts before them.
    """

    data: DataAxis
    place: Mapping[str, int]
    tensor: Mapping[int, TensorParallel] = dataclasses.field(default_factory=dict)
    pipeline: dist.ProcessGroup | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def whole(self) -> State:
        """On the first rank, and nothing on others. All ranks must call it."""
        model = {}
        for name, value in self._model().items():
            part = gathered(value)
            if not self.place.get("data"):
                model[name] = self._whole(name, part)
        optimizer = self.data.optimizer_state(self._names())
        if self.place.get("data"):
            return {}
        optimizer["state"] = self._changed(optimizer["state"], self._whole)
        if self.place.get("tensor"):
            return {}
        return self._of_all_stages({"model": model, "optimizer": optimizer})

    def share(self) -> State:
        """What this rank has of the whole, to be written with what the others have: no rank gathers
        it. Parts of layers are put together one by one, each for one rank of the tensor axis. All
        ranks must call it.
        """
        model = self._model()
        optimizer = self.data.own_optimizer_state(self._names())
        if self.tensor:
            states = optimizer["state"]
            model = self._dealt(model, lambda name: self._whole(name, gathered(model[name])))
            optimizer["state"] = self._dealt(
                sorted(states), lambda name: self._whole_state(name, states[name])
            )
        if self.pipeline is not None:
            stages: list[Groups] = gathered_objects(optimizer["param_groups"], self.pipeline)
            optimizer["param_groups"] = _merged_groups(stages)
        return {"model": model, "optimizer": optimizer}

    def _dealt(self, names: Iterable[str], whole: Callable[[str], T]) -> dict[str, T]:
        """Of what the ranks of the tensor axis put together, name by name, this rank's portion."""
        ranks = next(iter(self.tensor.values())).stream.ranks
        kept = {}
        for number, name in enumerate(names):
            found = whole(name)
            if number % ranks == self.place["tensor"]:
                kept[name] = found
        return kept

    def _whole_state(self, name: str, values: Mapping[str, Any]) -> State:
        whole = {key: gathered(value) for key, value in values.items()}
        return self._changed({name: whole}, self._whole)[name]

    def load(self, state: State) -> None:
        """Takes what `whole` gives, on every rank. Asks for this rank's names alone, each once."""
        model, shapes = state["model"], {}
        for module in self.data.plain.values():
            own = {}
            for key in module.state_dict():
                name = plain_name(key)
                given = model[name if name in model else self.aliases[name]]
                own[key] = self._part(name, given)
                if isinstance(given, Tensor):
                    shapes[self.aliases.get(name, name)] = given.shape
            module.load_state_dict(own)
        names = self._names()
        found = state["optimizer"]
        states = {}
        for name in names.values():
            if name in found["state"]:
                states[name] = {
                    key: self._part(name, value) if is_alike(value, shapes[name]) else _own(value)
                    for key, value in found["state"][name].items()
                }
        self.data.load_optimizer_state(names, {**found, "state": states})

    @property
    def _device(self) -> torch.device:
        """Where the groups communicate."""
        return device_of(next(iter(self.data.plain.values())))

    def _model(self) -> State:
        """What this rank has of the modules' state, as it lies."""
        return {
            plain_name(name): value.detach() if isinstance(value, Tensor) else value
            for module in self.data.plain.values()
            for name, value in module.state_dict().items()
        }

    def _names(self) -> Mapping[Tensor, str]:
        """The parameters of this rank by the names of the whole network's."""
        names: dict[Tensor, str] = {}
        for module in self.data.plain.values():
            for key, parameter in module.named_parameters():
                name = plain_name(key)
                names[parameter] = self.aliases.get(name, name)
        return names

    def _changed(self, states: State, change: Change) -> State:
        """Optimizer state, its tensors of a parameter's shape changed as the parameter is, in the
        same order on all ranks.
        """
        shapes = {name: parameter.shape for parameter, name in self._names().items()}
        changed: State = {}
        for name, values in sorted(states.items()):
            changed[name] = {}
            for key, value in values.items():
                is_like_it = is_alike(value, shapes[name])
                changed[name][key] = change(name, value) if is_like_it else _on_host(value)
        return changed

    def _whole(self, name: str, part: Any) -> Any:
        cut, own = self._cut_of(name)
        return _on_host(cut.whole(own, part.to(self._device)) if cut else part)

    def _part(self, name: str, whole: Any) -> Any:
        cut, own = self._cut_of(name)
        return _own(cut.part(own, whole) if cut else whole)

    def _cut_of(self, name: str) -> tuple[TensorParallel | None, str]:
        """The module that is cut at the name, and the parameter's name there."""
        tied = [own for own, first in self.aliases.items() if first == name]
        for cut in self.tensor.values():
            for own in (name, *tied):
                if own in cut.cuts:
                    return cut, own
        return None, name

    def _of_all_stages(self, state: State) -> State:
        if self.pipeline is None:
            return state
        is_first = self.pipeline.rank() == 0
        stages: list[Any] | None = [None] * self.pipeline.size() if is_first else None
        dist.gather_object(state, stages, group=self.pipeline, group_dst=0)
        return _merged(stages) if stages else {}


def is_alike(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _own(value: Any) -> Any:
    """A tensor of its own: two copies of a tied weight may not share their state."""
    return value.clone() if isinstance(value, Tensor) else value


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _merged(stages: list[State]) -> State:
    """One state of the stages'."""
    groups = _merged_groups([stage["optimizer"]["param_groups"] for stage in stages])
    return {
        "model": {name: value for stage in stages for name, value in stage["model"].items()},
        "optimizer": {
            # the first stage's, of a weight that several have
            "state": {
                name: value
                for stage in reversed(stages)
                for name, value in stage["optimizer"]["state"].items()
            },
            "param_groups": groups,
        },
    }


def _merged_groups(stages: Sequence[Groups]) -> Groups:
    """Groups of the parameters of all stages, each once."""
    groups = [dict(group) for group in stages[0]]
    for place, group in enumerate(groups):
        every = (name for stage in stages for name in stage[place]["params"])
        group["params"] = list(dict.fromkeys(every))
    return groups


def require_own_names(
    modules: Mapping[int, nn.Module], tied: Sequence[Tie], pipeline: dist.ProcessGroup | None
) -> None:
    """Raises ScheduleError, on every rank of the pipeline, where two stages have parameters of one
    name that are not tied: they would not be told apart in a checkpoint.
    """
    mine = [(stage, name) for stage, each in modules.items() for name, _ in each.named_parameters()]
    every = [mine] if pipeline is None else gathered_objects(mine, pipeline)
    seen: dict[str, int] = {}
    for stage, name in sorted(itertools.chain(*every)):
        other = seen.setdefault(name, stage)
        if other != stage and not any({(other, name), (stage, name)} <= set(tie) for tie in tied):
            raise ScheduleError(
                f"stages {other} and {stage} both have a parameter {name}; give each stage's "
                f"parameters the names that they have in the whole network"
            )
