"""An optimizer whose state is spread over the ranks: ZeRO stages 1 and 2 (Rajbhandari et al. 2020).

Each parameter has an owner (spec/plan/shards.py): the rank that keeps its optimizer state, updates
it and broadcasts it. Parameters are not split, so an optimizer that looks at whole tensors works.
Stage 2 is the same optimizer with gradients that only the owner has:
OwnerDataParallel(module, owners=optimizer.owners_of(module)).
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepgauge.parallel.communication.collectives import launch_broadcast, launch_together
from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.parallel.replicas import (
    dense,
    describe_parameter,
    require_same,
    require_values,
)
from stepgauge.parallel.shares import Share
from stepgauge.parallel.zero.separate_updates import require_separate_updates, step_part
from stepgauge.spec.plan.shards import num_update_parts, plan_owners

# Attributes that a deep copy has, besides those of every optimizer.
OWN = ("stage", "_sizes", "_reducer", "communicates", "_owned", "elements", "_num_parts", "_inner")


@dataclasses.dataclass(eq=False, slots=True)
class OwnedParameter:
    """A parameter, the rank that updates it, and the part of a step in which it does.

    was_trained  the parameter required grad at some step. It is broadcast from then on, because only
                 its owner knows whether it changes
    """

    parameter: nn.Parameter
    owner: int
    part: int
    was_trained: bool


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates the parameters that this rank owns with `optimizer_cls(groups, **kwargs)`, and
    broadcasts them.

    It is a torch.optim.Optimizer: `param_groups` have all parameters and may be changed between
    steps; `state` has those of this rank. All ranks must pass the same parameters in the same order
    and call `step` together. A parameter without a gradient stays as it is. So does one that
    `optimizer_cls` leaves out of its groups: the groups are those that `optimizer_cls` makes of all
    parameters, as in one process. Before, it is called for a trial with small copies of them.

    stage  2 if this rank has only the gradients of its own parameters
    sizes  elements by which parameters are weighed when owners are chosen, if not their own: parts
           of a weight can be unequal on the ranks of a tensor axis, and must get the same owners

    Raises DifferentModelsError, on every rank, if the ranks' parameters differ; ValueError for a
    parameter on the meta device, and for an optimizer that needs all parameters together, as far as
    `require_separate_updates` finds out. `step` raises RuntimeError for an optimizer that keeps
    values in its groups which depend on all parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        stage: int = 1,
        group: dist.ProcessGroup | None = None,
        sizes: Mapping[nn.Parameter, int] | None = None,
        **kwargs: Any,
    ):
        self.stage, self._sizes = stage, sizes or {}
        self._reducer = GradientReducer(group)  # holds the group, which a deep copy shares
        self.communicates = True  # False skips the broadcasts, to time everything else
        self._owned: dict[nn.Parameter, OwnedParameter] = {}
        self.elements = [0] * self._reducer.ranks  # of the parameters of each owner
        self._num_parts = 1
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, kwargs)
        build = functools.partial(optimizer_cls, **kwargs)
        require_separate_updates(build, self.param_groups)
        inner = build([dict(group) for group in self.param_groups])
        if len(inner.param_groups) != len(self.param_groups):
            raise ValueError(
                f"{type(inner).__name__} changed {len(self.param_groups)} parameter groups into "
                f"{len(inner.param_groups)}; a sharded optimizer needs one that keeps its groups"
            )
        closure = inspect.signature(inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(inner).__name__} needs all parameters together; under a sharded "
                f"optimizer it has only those of one rank"
            )
        self._inner = inner
        self.state = inner.state
        self.defaults = dict(inner.defaults)
        self.param_groups = [dict(group) for group in inner.param_groups]
        for added in self.param_groups:
            self._assign_owners(added["params"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True makes torch.amp.GradScaler call `step` even if gradients are infinite; `step` raises."""
        return self.stage == 2

    def __getstate__(self) -> dict[str, Any]:
        # Not `step`: that of a scheduled optimizer always steps the original.
        return {**super().__getstate__(), **{name: vars(self)[name] for name in OWN}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, at any time. Their owners become the ranks that own least so far."""
        super().add_param_group(param_group)
        if self._inner is not None:
            # The parameters may come from groups that the user has shortened.
            self._inner.param_groups = [dict(group) for group in self.param_groups[:-1]]
            self._inner.add_param_group(dict(self.param_groups[-1]))
            self.param_groups[-1] = dict(self._inner.param_groups[-1])
            self._assign_owners(self.param_groups[-1]["params"])

    def _assign_owners(self, parameters: Sequence[nn.Parameter]) -> None:
        """Chooses the owner of each parameter that has none. Raises as the constructor does."""
        given, parameters = parameters, [p for p in parameters if p not in self._owned]
        described_parameters = [
            describe_parameter(str(index), parameter) for index, parameter in enumerate(parameters)
        ]
        require_same(
            {p.name: f"{p.dtype} of {p.numel:,} values" for p in described_parameters},
            self._reducer.group,
            noun="parameter",
            where="optimizer",
        )
        require_values((f"parameter {n}", p) for n, p in enumerate(parameters))
        weighed = [
            dataclasses.replace(described, numel=self._sizes.get(parameter, described.numel))
            for described, parameter in zip(described_parameters, parameters, strict=True)
        ]
        num_parts = num_update_parts(sum(p.nbytes for p in parameters))
        self._num_parts = max(self._num_parts, num_parts)
        plan = plan_owners(weighed, ranks=self._reducer.ranks, held=self.elements)
        self.elements = list(plan.elements)
        for owner in range(self._reducer.ranks):
            owned = [p for n, p in enumerate(parameters) if plan.owners[str(n)] == owner]
            for p, part in zip(owned, _parts(owned, num_parts), strict=True):
                self._owned[p] = OwnedParameter(p, owner, part, was_trained=p.requires_grad)
        for p in given:
            if self._owned[p].owner != self._reducer.rank:
                # Some optimizers make it as soon as they get a parameter.
                self.state.pop(p, None)

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group with only the parameters that this rank owns."""
        own = [p for p in group["params"] if self._owned[p].owner == self._reducer.rank]
        return {**group, "params": own}

    def _own_by_part(self) -> list[list[list[nn.Parameter]]]:
        """Returns the parameters that this rank owns, by part of a step and group. It makes one pass
        over all parameters, because hashing a parameter is a call of Python.
        """
        parts: list[list[list[nn.Parameter]]] = [
            [[] for _ in self.param_groups] for _ in range(self._num_parts)
        ]
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                owned = self._owned[p]
                if owned.owner == self._reducer.rank:
                    parts[owned.part][number].append(p)
        return parts

    @property
    def owners(self) -> Mapping[nn.Parameter, int]:
        """Returns the rank that updates each parameter."""
        return {parameter: owned.owner for parameter, owned in self._owned.items()}

    def owners_of(self, module: nn.Module) -> Mapping[str, int]:
        """Returns the owner of each parameter of the module, by name."""
        owners = self.owners
        named = module.named_parameters()
        return {name: owners[parameter] for name, parameter in named if parameter in owners}

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Returns True if only the parameter's owner has its reduced gradient."""
        return self.stage == 2 and parameter in self._owned

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that this rank owns, and waits for those that other ranks update.
        On a GPU the stream waits, and the host does not.
        """
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "GradScaler sees only this rank's gradients under ZeRO stage 2; train in bf16, or "
                "with stage 1"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None, "it is built"
        self._inner.state = self.state  # a user may have replaced it
        for owned in self._owned.values():
            owned.was_trained |= owned.parameter.requires_grad
        trained = [owned for owned in self._owned.values() if owned.was_trained]
        works: list[Any] = []
        group_fields: list[dict[str, Any]] = []  # after a part, such as a count of steps
        for part, own in enumerate(self._own_by_part()):
            fields_after = step_part(self._inner, self.param_groups, own)
            if group_fields and not _equal(group_fields, fields_after):
                raise RuntimeError(
                    f"{type(self._inner).__name__} keeps values in its groups that depend on all "
                    f"parameters together; under a sharded optimizer it has only those of one rank"
                )
            group_fields = fields_after
            works += self._broadcast(owned for owned in trained if owned.part == part)
        for group, fields in zip(self.param_groups, group_fields, strict=True):
            group.update(fields)
        for work in works:
            work.wait()
        others = [each.parameter for each in trained if each.owner != self._reducer.rank]
        # A backward that needs the old values must raise, as it does at the owner. In stage 2 only
        # the owner knows whether a parameter has a gradient.
        stepped = others if self.stage == 2 else [p for p in others if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return loss

    def broadcast_parameters(self) -> None:
        """Broadcasts every trainable parameter from its owner, as a step does."""
        for work in self._broadcast(o for o in self._owned.values() if o.parameter.requires_grad):
            work.wait()

    def _broadcast(self, parameters: Iterable[OwnedParameter]) -> list[Any]:
        """Starts to broadcast each parameter from its owner; returns the works to wait for."""
        launches, group = collections.defaultdict(list), self._reducer.group
        for owned in parameters if self.communicates else ():
            p = owned.parameter
            if p.numel():
                send = functools.partial(launch_broadcast, owned.owner, dense(p), group)
                launches[p.device].append(send)
        works = [
            work
            for device, on_device in launches.items()
            for work in launch_together(on_device, group=group, device=device)
        ]
        return list(dict.fromkeys(works))  # broadcasts launched together share one work

    def state_dict(self) -> dict[str, Any]:
        """Returns a state dict with the state of the parameters that this rank owns."""
        for parameter, owner in self.owners.items():
            if owner != self._reducer.rank:
                self.state.pop(parameter, None)  # reading state[parameter] has made an empty one
        return super().state_dict()

    def gathered_state_dict(self) -> dict[str, Any] | None:
        """Returns the whole state dict on rank 0, on the CPU, and None on the others. All ranks must
        call it.

        `load_state_dict` accepts it on any number of ranks, and so does the wrapped optimizer class
        in one process.
        """
        own = _on_host(self.state_dict())
        states: list[Any] | None = [None] * self._reducer.ranks if self._reducer.rank == 0 else None
        dist.gather_object(own, states, group=self._reducer.group, group_dst=0)
        if states is None:
            return None
        return {
            **own,
            "state": {
                index: values
                for of_rank in states
                for index, values in sorted(of_rank["state"].items())
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a state dict: a whole one, or the one that this rank saved."""
        loaded: list[dict[str, Any]] = []

        def keep_state(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            loaded.append(state_dict)
            return {**state_dict, "state": {}}

        # Other hooks run before the first of these, and after the second: they see the state.
        hooks = [
            self.register_load_state_dict_pre_hook(keep_state),
            self.register_load_state_dict_post_hook(
                lambda _: self._load_own_state(loaded[0]), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _load_own_state(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the parameters that this rank owns; the groups are loaded already."""
        inner = self._inner
        assert inner is not None, "it is built"
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        index_of = dict(zip(parameters, indices, strict=True))
        inner.param_groups = [self._own_part(group) for group in self.param_groups]
        inner.state.clear()
        own = [index_of[p] for group in inner.param_groups for p in group["params"]]
        state = state_dict["state"]
        # The inner optimizer loads it: it knows which of its state is wider than the weights.
        inner.load_state_dict(
            {
                "state": {number: state[i] for number, i in enumerate(own) if i in state},
                "param_groups": inner.state_dict()["param_groups"],
            }
        )
        self.state = inner.state


def _parts(parameters: Sequence[nn.Parameter], num_parts: int) -> list[int]:
    """Returns the part of each parameter. Parts follow the order of the parameters and have about
    equally many elements, so that all owners take equally long for a part.
    """
    sizes = [p.numel() for p in parameters]
    *before, whole = itertools.accumulate(sizes, initial=0)
    return [min(num_parts - 1, first * num_parts // max(1, whole)) for first in before]


def _refuse_shares(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises RuntimeError before a plain optimizer steps with gradients of ZeRO stage 2: it would
    update only this rank's copies of the parameters that this rank owns.

    Only the first gradient is examined: to examine 300 takes 36 us of host time per step.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    if isinstance(next((g for g in gradients if g is not None), None), Share):
        raise RuntimeError(
            f"this rank has gradients only of the parameters that it owns, and "
            f"{type(optimizer).__name__} would update them on this rank only: step with the "
            f"ShardedOptimizer"
        )


register_optimizer_step_pre_hook(_refuse_shares)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    return bool(first == second)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value
