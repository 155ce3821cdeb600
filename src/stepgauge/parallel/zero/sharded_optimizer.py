"""An optimizer whose state is spread over the ranks: ZeRO stage 1, and with gradients for the owner
alone stage 2.

Rajbhandari et al. 2020, ZeRO. Each parameter has an owner (spec/plan/shards.py) that keeps its
state, updates it and broadcasts it; optimizers that look at whole tensors see whole tensors. Stage
2 is the same optimizer with gradients that are reduced to the owner and freed elsewhere:
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
from stepgauge.parallel.shares import Share, as_plain
from stepgauge.parallel.whole_norm import clip_whole_norm
from stepgauge.spec.plan.shards import num_update_parts, plan_owners


@dataclasses.dataclass(eq=False, slots=True)
class Owned:
    """A parameter, the rank that steps it, and in which part of a step.

    was_trained  it is broadcast from then on: its owner alone knows whether it moves
    """

    parameter: nn.Parameter
    owner: int
    part: int
    was_trained: bool


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps a rank's share of the parameters with `optimizer_cls(groups, **kwargs)` and broadcasts
    what it updated.

    A torch.optim.Optimizer: `param_groups` are of all parameters and may be changed between steps,
    `state` is of this rank's share. All ranks must give the same parameters in the same order, and
    call `step` together. A parameter without a gradient is left as it is.

    stage  2: a rank has the gradients of its own parameters only
    sizes  elements that a parameter counts for in the sharing out, where not its own: of parts of
           weights, whose owners are to be alike on ranks that have unequal parts

    Raises DifferentModelsError, on every rank, where the ranks' parameters differ; ValueError for
    one on the meta device; `step` raises RuntimeError for an optimizer whose groups keep what depends
    on all parameters.
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
        self._reducer = GradientReducer(group)  # for its group, which a copy shares
        self.communicates = True  # False leaves the broadcasts out, to time the rest
        self._owned: dict[nn.Parameter, Owned] = {}
        self.elements = [0] * self._reducer.ranks
        self._num_parts = 1
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, kwargs)
        self._inner = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        if len(self._inner.param_groups) != len(self.param_groups):
            raise ValueError(
                f"{type(self._inner).__name__} made {len(self._inner.param_groups)} groups of "
                f"{len(self.param_groups)}; a sharded optimizer keeps the groups that it is given"
            )
        closure = inspect.signature(self._inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(self._inner).__name__} looks at all parameters together; a sharded optimizer "
                f"sees a share of them"
            )
        self._inner.state = self.state
        self.defaults = dict(self._inner.defaults)
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update({name: value for name, value in inner.items() if name not in ours})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler then leaves it to `step` what to do about infinite gradients."""
        return self.stage == 2

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self.__dict__}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters at any time; they go to the ranks that hold least so far."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        plan = [
            describe_parameter(str(index), parameter)
            for index, parameter in enumerate(added["params"])
        ]
        require_same(
            {p.name: f"{p.dtype} of {p.numel:,} values" for p in plan},
            self._reducer.group,
            noun="parameter",
            where="optimizer",
        )
        require_values(
            (f"parameter {p.name}", t) for p, t in zip(plan, added["params"], strict=True)
        )
        counted = [
            dataclasses.replace(described, numel=self._sizes.get(parameter, described.numel))
            for described, parameter in zip(plan, added["params"], strict=True)
        ]
        num_parts = num_update_parts(sum(p.nbytes for p in added["params"]))
        self._num_parts = max(self._num_parts, num_parts)
        owned = plan_owners(counted, ranks=self._reducer.ranks, held=self.elements)
        self.elements = list(owned.elements)
        for owner in range(self._reducer.ranks):
            mine = [
                p for index, p in enumerate(added["params"]) if owned.owners[str(index)] == owner
            ]
            for p, part in zip(mine, _parts(mine, num_parts), strict=True):
                self._owned[p] = Owned(p, owner, part, was_trained=p.requires_grad)
        if self._inner is not None:
            self._inner.add_param_group(self._own(added))
            inner = self._inner.param_groups[-1]
            added.update({k: v for k, v in inner.items() if k not in added})

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parameters only."""
        own = [p for p in group["params"] if self._owned[p].owner == self._reducer.rank]
        return {**group, "params": own}

    def _own_by_part(self) -> list[list[list[nn.Parameter]]]:
        """This rank's parameters of each part, by their groups. In one pass: a look into a dict
        costs a call of Python for each parameter.
        """
        parts: list[list[list[nn.Parameter]]] = [
            [[] for _ in self.param_groups] for _ in range(self._num_parts)
        ]
        for place, group in enumerate(self.param_groups):
            for p in group["params"]:
                owned = self._owned[p]
                if owned.owner == self._reducer.rank:
                    parts[owned.part][place].append(p)
        return parts

    @property
    def owners(self) -> Mapping[nn.Parameter, int]:
        """The rank that steps each parameter."""
        return {parameter: owned.owner for parameter, owned in self._owned.items()}

    def owners_of(self, module: nn.Module) -> Mapping[str, int]:
        """The owner of each of the module's parameters, by name."""
        owners = self.owners
        named = module.named_parameters()
        return {name: owners[parameter] for name, parameter in named if parameter in owners}

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's share and waits (on a GPU its stream does) for the other ranks'
        shares.
        """
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "GradScaler looks at this rank's share of the gradients; train in bf16, or with "
                "ZeRO stage 1"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None, "it is built"
        for owned in self._owned.values():
            owned.was_trained |= owned.parameter.requires_grad
        trained = [owned for owned in self._owned.values() if owned.was_trained]
        works: list[Any] = []
        after: list[dict[str, Any]] = []  # what each part leaves in the groups, such as a count
        for part, own in enumerate(self._own_by_part()):
            found = self._step_part(own)
            if after and not _equal(after, found):
                raise RuntimeError(
                    f"{type(self._inner).__name__} keeps in its groups what depends on all "
                    f"parameters together; a sharded optimizer sees a share of them"
                )
            after = found
            works += self._broadcast(owned for owned in trained if owned.part == part)
        for group, fields in zip(self.param_groups, after, strict=True):
            group.update(fields)
        for work in works:
            work.wait()
        others = [each.parameter for each in trained if each.owner != self._reducer.rank]
        # So that a backward which needs them as they were raises, as it does at their owners. In
        # stage 2 they alone know which have a gradient.
        stepped = others if self.stage == 2 else [p for p in others if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return loss

    def _step_part(self, by_group: Sequence[list[nn.Parameter]]) -> list[dict[str, Any]]:
        """Updates parameters of each group; the groups' fields afterwards."""
        assert self._inner is not None, "it is built"
        groups = zip(self.param_groups, by_group, strict=True)
        self._inner.param_groups = [{**group, "params": own} for group, own in groups]
        for parameter in itertools.chain.from_iterable(by_group):
            if isinstance(parameter.grad, Share):
                parameter.grad = as_plain(parameter.grad)
        self._inner.step()
        fields = [dict(group) for group in self._inner.param_groups]
        for of_group in fields:
            del of_group["params"]
        return fields

    def broadcast_parameters(self) -> None:
        """Sends every parameter from its owner to all, as a step does."""
        for work in self._broadcast(o for o in self._owned.values() if o.parameter.requires_grad):
            work.wait()

    def _broadcast(self, parameters: Iterable[Owned]) -> list[Any]:
        """The works of sending each parameter from its owner to all."""
        launches, group = collections.defaultdict(list), self._reducer.group
        for owned in parameters if self.communicates else ():
            p = owned.parameter
            if p.numel():
                send = functools.partial(launch_broadcast, owned.owner, dense(p), group)
                launches[p.device].append(send)
        works = [
            work
            for device, of_device in launches.items()
            for work in launch_together(of_device, group=group, device=device)
        ]
        return list(dict.fromkeys(works))  # those that were launched together have one

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.stage < 2:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        given = [p for p in parameters if p.grad is not None]
        own = [p.grad for p in given if self._owned[p].owner == self._reducer.rank]
        return clip_whole_norm(
            [p.grad for p in given],
            [(1, gradient) for gradient in own],
            max_norm,
            group=self._reducer.group,
            device=parameters[0].device,
        )

    def state_bytes(self) -> int:
        """Bytes of the state that this rank keeps."""
        return sum(
            t.nbytes
            for values in self.state.values()
            for t in values.values()
            if isinstance(t, Tensor)
        )

    def gathered_state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """The whole state on rank `to` (on the CPU), None on the others; all ranks must call it.

        `load_state_dict` takes it on any number of ranks, and so does the optimizer class that is
        wrapped.
        """
        ours = _on_host(super().state_dict())
        everyones: list[Any] | None = (
            [None] * self._reducer.ranks if self._reducer.rank == to else None
        )
        dist.gather_object(ours, everyones, group=self._reducer.group, group_dst=to)
        if everyones is None:
            return None
        return {
            **ours,
            "state": {
                index: values
                for their in everyones
                for index, values in sorted(their["state"].items())
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's share of a state dict: the whole of another world size, or one rank's
        own.
        """
        inner = self._inner
        assert inner is not None, "it is built"
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        index_of = dict(zip(parameters, indices, strict=True))
        inner.param_groups = [self._own(group) for group in self.param_groups]
        own = [index_of[p] for group in inner.param_groups for p in group["params"]]
        given = state_dict["state"]
        # By its own function: optimizers know which of their state is wider than the weights.
        inner.load_state_dict(
            {
                "state": {place: given[i] for place, i in enumerate(own) if i in given},
                "param_groups": inner.state_dict()["param_groups"],
            }
        )
        self.state = inner.state


def _parts(parameters: Sequence[nn.Parameter], num_parts: int) -> list[int]:
    """The part of each: of about equal elements, in order, so that those of all owners take as long."""
    sizes = [p.numel() for p in parameters]
    *before, whole = itertools.accumulate(sizes, initial=0)
    return [min(num_parts - 1, first * num_parts // max(1, whole)) for first in before]


def _refuse_shares(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before the step of any optimizer: a plain one would write this rank's copies alone of the
    weights that it owns. The first gradient tells: looking at 300 takes 36 us of host a step.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    if isinstance(next((g for g in gradients if g is not None), None), Share):
        raise RuntimeError(
            f"this rank has its share of the gradients only, and {type(optimizer).__name__} would "
            "step its own copy of those weights: step with the ShardedOptimizer"
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
