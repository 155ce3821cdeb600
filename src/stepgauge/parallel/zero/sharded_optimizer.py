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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepgauge.parallel.communication.collectives import broadcast_from, launch_together
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
        self.owners: dict[nn.Parameter, int] = {}
        self.elements = [0] * self._reducer.ranks
        self._part_of: dict[nn.Parameter, int] = {}
        self._num_parts = 1
        # What was trained once is broadcast for good: its owner alone knows whether it moves.
        self._trained: set[nn.Parameter] = set()
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
            self._divide(mine, num_parts)
            self.owners.update(dict.fromkeys(mine, owner))
        self._trained.update(p for p in added["params"] if p.requires_grad)
        if self._inner is not None:
            self._inner.add_param_group(self._own(added))
            inner = self._inner.param_groups[-1]
            added.update({k: v for k, v in inner.items() if k not in added})

    def _divide(self, parameters: list[nn.Parameter], num_parts: int) -> None:
        """Parts of about equal elements, in order, so that all of an owner's parts take as long."""
        whole, before = sum(p.numel() for p in parameters), 0
        for parameter in parameters:
            self._part_of[parameter] = min(num_parts - 1, before * num_parts // max(1, whole))
            before += parameter.numel()

    def _own(self, group: dict[str, Any], part: int | None = None) -> dict[str, Any]:
        """The group with this rank's parameters only, all or those of a part."""
        own = [
            p
            for p in group["params"]
            if self.owners[p] == self._reducer.rank and part in (None, self._part_of[p])
        ]
        return {**group, "params": own}

    def owners_of(self, module: nn.Module) -> Mapping[str, int]:
        """The owner of each of the module's parameters, by name."""
        return {
            name: self.owners[parameter]
            for name, parameter in module.named_parameters()
            if parameter in self.owners
        }

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
        self._trained.update(p for p in self.owners if p.requires_grad)
        trained = [p for p in self.owners if p in self._trained]
        works: list[Any] = []
        after: list[dict[str, Any]] = []  # what each part leaves in the groups, such as a count
        for part in range(self._num_parts):
            found = self._step_part(part)
            if after and not _equal(after, found):
                raise RuntimeError(
                    f"{type(self._inner).__name__} keeps in its groups what depends on all "
                    f"parameters together; a sharded optimizer sees a share of them"
                )
            after = found
            works += self._broadcast([p for p in trained if self._part_of[p] == part])
        for group, fields in zip(self.param_groups, after, strict=True):
            group.update(fields)
        for work in works:
            work.wait()
        others = [p for p in trained if self.owners[p] != self._reducer.rank]
        # So that a backward which needs them as they were raises, as it does at their owners. In
        # stage 2 they alone know which have a gradient.
        stepped = others if self.stage == 2 else [p for p in others if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return loss

    def _step_part(self, part: int) -> list[dict[str, Any]]:
        """Updates this rank's parameters of a part; the groups' fields afterwards."""
        assert self._inner is not None, "it is built"
        self._inner.param_groups = [self._own(group, part) for group in self.param_groups]
        for parameter in (p for group in self._inner.param_groups for p in group["params"]):
            if isinstance(parameter.grad, Share):
                parameter.grad = as_plain(parameter.grad)
        self._inner.step()
        return [
            {name: value for name, value in inner.items() if name != "params"}
            for inner in self._inner.param_groups
        ]

    def broadcast_parameters(self) -> None:
        """Sends every parameter from its owner to all, as a step does."""
        for work in self._broadcast([p for p in self.owners if p.requires_grad]):
            work.wait()

    def _broadcast(self, parameters: Sequence[nn.Parameter]) -> list[Any]:
        """The works of sending each parameter from its owner to all."""
        launches, group = collections.defaultdict(list), self._reducer.group
        for p in parameters if self.communicates else ():
            if p.numel():
                send = functools.partial(broadcast_from, self.owners[p], dense(p), group)
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
        own = [p.grad for p in given if self.owners[p] == self._reducer.rank]
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
