"""Weights that occur in several stages: each copy gets the sum of all copies' gradients."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.pipeline.groups import new_groups, world_ranks
from stepgauge.parallel.sharding import local_part
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.pipeline import Schedule

# The copies of one weight: for each, its stage and the parameter's name in the stage's module.
Tie = Sequence[tuple[int, str]]


@dataclasses.dataclass
class _LocalCopies:
    """The copies of one tied weight on this rank.

    parameters      the copies, without duplicates
    group           ranks that have a copy; None if this is the only one
    number          number of the tie, the same on all ranks
    counts_in_norm  the first copy on this rank represents the weight in the norm of all gradients
    earlier         gradients from before the step
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None
    number: int
    counts_in_norm: bool
    earlier: list[Tensor | None] = dataclasses.field(default_factory=list)

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


class TiedWeights:
    """All tied weights of a pipeline.

    All ranks of the world must create one at the same time. The copies of a weight get the value of
    the first one. Raises ValueError for a parameter that does not exist.

    stages  stages with a tied weight; their gradients are complete only after `finish`
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
    ):
        self._copies: list[_LocalCopies] = []
        self._group = group
        self._unused = set(range(len(ties)))  # ties without a gradient in any step so far
        self.stages = {stage for tie in ties for stage, _ in tie}
        global_rank = world_ranks(group)
        owners = [[global_rank[schedule.rank_of[stage]] for stage, _ in tie] for tie in ties]
        groups = new_groups([sorted(set(ranks)) for ranks in owners], group) if ties else []
        for number, (tie, ranks, tie_group) in enumerate(zip(ties, owners, groups, strict=True)):
            local = [_parameter(modules[stage], name) for stage, name in tie if stage in modules]
            if not local:
                continue
            copies = _LocalCopies(
                parameters=list(dict.fromkeys(local)),
                group=tie_group if len(set(ranks)) > 1 else None,
                number=number,
                counts_in_norm=dist.get_rank() == ranks[0],
            )
            self._copies.append(copies)
            _copy_first_value(copies, source=ranks[0])

    def begin(self) -> None:
        """Before a step: sets earlier gradients aside, because they are already summed."""
        for copies in self._copies:
            copies.earlier = [parameter.grad for parameter in copies.parameters]
            for parameter in copies.parameters:
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After a step: sums its gradients over the copies and adds them to the earlier ones. All
        ranks must call it. A weight that no stage has used in any step keeps its earlier gradient.
        """
        self._update_unused()
        for copies in self._copies:
            first = copies.parameters[0]
            if not first.requires_grad:
                continue
            if copies.number in self._unused:
                for parameter, earlier in zip(copies.parameters, copies.earlier, strict=True):
                    parameter.grad = earlier
                continue
            total = torch.zeros_like(first)
            for parameter in copies.parameters:
                if parameter.grad is not None:
                    total += parameter.grad
            if copies.group is not None:
                dist.all_reduce(local_part(total), group=copies.group)
            for parameter, earlier in zip(copies.parameters, copies.earlier, strict=True):
                gradient = total if parameter is first else total.clone()
                parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def _update_unused(self) -> None:
        """Exchanges between ranks which ties have a gradient, until all trainable ones have had
        one.
        """
        if self._unused:
            local = [
                copies.number
                for copies in self._copies
                if copies.has_gradient or not copies.parameters[0].requires_grad
            ]
            self._unused.difference_update(*gathered_objects(local, self._group))

    @property
    def repeated(self) -> set[int]:
        """The ids of parameters that the norm of all gradients must not count, because another copy
        represents them.
        """
        return {
            id(parameter)
            for copies in self._copies
            for number, parameter in enumerate(copies.parameters)
            if number or not copies.counts_in_norm
        }


def with_shared(ties: Sequence[Tie], modules: Sequence[nn.Module]) -> list[Tie]:
    """Returns the ties extended by parameters that several of the modules share, since each rank gets
    its own copy of those. Raises ValueError for a parameter that does not exist.
    """
    places: dict[int, list[tuple[int, str]]] = {}  # id of a parameter -> where it occurs
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            places.setdefault(id(parameter), []).append((stage, name))
    extended: list[Tie] = []
    for tie in ties:
        stages = {stage for stage, _ in tie}
        parameters = {id(_parameter(modules[stage], name)) for stage, name in tie}
        shared = [place for parameter in parameters for place in places.pop(parameter, [])]
        extended.append([*tie, *(place for place in shared if place[0] not in stages)])
    return [*extended, *(copies for copies in places.values() if len(copies) > 1)]


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise ValueError(f"tied weight is {name!r}, which the stage does not have") from None


@torch.no_grad()
def _copy_first_value(copies: _LocalCopies, source: int) -> None:
    """Gives all copies the value of the first one, which is on global rank `source`."""
    first, *others = copies.parameters
    if copies.group is not None:
        dist.broadcast(local_part(first), source, copies.group)
    for parameter in others:
        parameter.copy_(first)
