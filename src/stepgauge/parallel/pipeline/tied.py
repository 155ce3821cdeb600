"""Weights that stand in two stages: each copy gets the sum of all copies' gradients."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.pipeline.groups import members, new_groups
from stepgauge.parallel.sharding import local_part
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.pipeline import Schedule

# The copies of one weight: stage and name of the parameter in its module.
Tie = Sequence[tuple[int, str]]


@dataclasses.dataclass
class _Tied:
    """The copies that this rank has of one weight, and the group of the ranks that have one.

    number  of the tie, the same on all ranks
    counts  whether this rank's first copy stands for the weight in the norm of the whole gradient
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None
    number: int
    counts: bool
    earlier: list[Tensor | None] = dataclasses.field(default_factory=list)

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


class TiedWeights:
    """All ties of a pipeline. All ranks of the world must make one at the same time; copies then
    have the first one's value.

    Raises ValueError for a parameter that is not there.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
    ):
        self._ties: list[_Tied] = []
        self._group = group
        self._unused = set(range(len(ties)))  # the numbers of ties that have had no gradient yet
        # those whose gradients are not there before `finish`
        self.stages = {stage for tie in ties for stage, _ in tie}
        world = members(group)
        owners = [[world[schedule.rank_of[stage]] for stage, _ in tie] for tie in ties]
        made = new_groups([sorted(set(ranks)) for ranks in owners], group) if ties else []
        for number, (tie, ranks, own) in enumerate(zip(ties, owners, made, strict=True)):
            mine = [_parameter(modules[stage], name) for stage, name in tie if stage in modules]
            if not mine:
                continue
            distinct = list({id(parameter): parameter for parameter in mine}.values())
            among = own if len(set(ranks)) > 1 else None
            is_first = dist.get_rank() == ranks[0]
            self._ties.append(_Tied(distinct, among, number, counts=is_first))
            _same_value(distinct, among, ranks[0])

    def begin(self) -> None:
        """Sets gradients of earlier steps aside: they are sums already."""
        for tied in self._ties:
            tied.earlier = [parameter.grad for parameter in tied.parameters]
            for parameter in tied.parameters:
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sums the gradients of this step over the copies. All ranks must call it. A weight that no
        stage has used yet has none.
        """
        self._ask_for_unused()
        for tied in self._ties:
            first = tied.parameters[0]
            if not first.requires_grad:
                continue
            if tied.number in self._unused:
                for parameter, earlier in zip(tied.parameters, tied.earlier, strict=True):
                    parameter.grad = earlier
                continue
            total = torch.zeros_like(first)
            for parameter in tied.parameters:
                if parameter.grad is not None:
                    total += parameter.grad
            if tied.group is not None:
                dist.all_reduce(local_part(total), group=tied.group)
            for parameter, earlier in zip(tied.parameters, tied.earlier, strict=True):
                sum_ = total if parameter is first else total.clone()
                parameter.grad = sum_ if earlier is None else earlier.add_(sum_)

    def _ask_for_unused(self) -> None:
        """All ranks tell each other which weights have a gradient, until all that are trained have
        had one.
        """
        if self._unused:
            own = [
                tied.number
                for tied in self._ties
                if tied.has_gradient or not tied.parameters[0].requires_grad
            ]
            self._unused.difference_update(*gathered_objects(own, self._group))

    @property
    def repeated(self) -> set[int]:
        """The ids of parameters that another one stands for in the norm of the whole gradient."""
        return {
            id(parameter)
            for tied in self._ties
            for number, parameter in enumerate(tied.parameters)
            if number or not tied.counts
        }


def with_shared(ties: Sequence[Tie], modules: Sequence[nn.Module]) -> list[Tie]:
    """The ties, and those of parameters that several of the modules share: each rank has a copy of
    them. Raises ValueError for a parameter that is not there.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            places.setdefault(id(parameter), []).append((stage, name))
    found: list[Tie] = []
    for tie in ties:
        stages = {stage for stage, _ in tie}
        copies = {id(_parameter(modules[stage], name)) for stage, name in tie}
        shared = [place for copy in copies for place in places.pop(copy, [])]
        found.append([*tie, *(place for place in shared if place[0] not in stages)])
    return [*found, *(copies for copies in places.values() if len(copies) > 1)]


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise ValueError(f"tied weight is {name!r}, which the stage does not have") from None


@torch.no_grad()
def _same_value(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, source: int
) -> None:
    if group is not None:
        dist.broadcast(local_part(parameters[0]), source, group)
    for parameter in parameters[1:]:
        parameter.copy_(parameters[0])
