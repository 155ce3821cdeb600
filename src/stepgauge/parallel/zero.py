"""An optimizer whose state is spread over the ranks: ZeRO stage 1, and with gradients for the owner
alone stage 2.

Rajbhandari et al. 2020, ZeRO. Each parameter has an owner (spec/shards.py) that keeps its state,
updates it and broadcasts it. Stage 2 is the same optimizer with gradients that are reduced to the
owner and freed elsewhere: BucketedDataParallel(module, owners=optimizer.owners_of(module)).
"""

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.collectives import launch_together
from stepgauge.parallel.replicas import describe_parameter, require_same
from stepgauge.spec.plan.shards import plan_owners

# Parts of a step: while one is broadcast, the next is updated.
NUM_PARTS = 4


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps a rank's share of the parameters with `optimizer_cls(groups, **kwargs)` and broadcasts
    what it updated.

    A torch.optim.Optimizer: `param_groups` are of all parameters and may be changed between steps,
    `state` is of this rank's share. All ranks must give the same parameters in the same order, and
    call `step` together. A parameter without a gradient is left as it is.

    Raises DifferentModelsError, on every rank, where the ranks' parameters differ.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ):
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.communicates = True  # False leaves the broadcasts out, to time the rest
        self.owners: dict[nn.Parameter, int] = {}
        self.elements = [0] * self.ranks
        self._part_of: dict[nn.Parameter, int] = {}
        self._build = lambda groups: optimizer_cls(groups, **kwargs)
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(params, kwargs)
        self._parts = [self._build(self._groups_of_part(part)) for part in range(NUM_PARTS)]
        self._share_state()
        for ours, theirs in zip(self.param_groups, self._parts[0].param_groups, strict=True):
            ours.update({name: value for name, value in theirs.items() if name not in ours})

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
            self.group,
            noun="parameter",
            where="optimizer",
        )
        owned = plan_owners(plan, ranks=self.ranks, held=self.elements)
        self.elements = list(owned.elements)
        for owner in range(self.ranks):
            mine = [
                p for index, p in enumerate(added["params"]) if owned.owners[str(index)] == owner
            ]
            self._divide(mine)
            self.owners.update(dict.fromkeys(mine, owner))
        for part, optimizer in enumerate(self._parts):
            optimizer.add_param_group(self._groups_of_part(part)[-1])
            added.update({k: v for k, v in optimizer.param_groups[-1].items() if k not in added})

    def _divide(self, parameters: list[nn.Parameter]) -> None:
        """Parts of about equal elements, in order, so that all of an owner's parts take as long."""
        whole, before = sum(p.numel() for p in parameters), 0
        for parameter in parameters:
            self._part_of[parameter] = min(NUM_PARTS - 1, before * NUM_PARTS // max(1, whole))
            before += parameter.numel()

    def _groups_of_part(self, part: int) -> list[dict[str, Any]]:
        return [
            {**group, "params": self._own(group["params"], part)} for group in self.param_groups
        ]

    def _own(self, parameters: Iterable[nn.Parameter], part: int) -> list[nn.Parameter]:
        return [p for p in parameters if self.owners[p] == self.rank and self._part_of[p] == part]

    def _share_state(self) -> None:
        for optimizer in self._parts:
            optimizer.state = self.state

    def owners_of(self, module: nn.Module) -> Mapping[str, int]:
        """The owner of each of the module's parameters, by name."""
        return {
            name: self.owners[parameter]
            for name, parameter in module.named_parameters()
            if parameter in self.owners
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's share and waits (on a GPU its stream does) for the other ranks'
        shares.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works: list[Any] = []
        for part, optimizer in enumerate(self._parts):
            for ours, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
                theirs.update({name: value for name, value in ours.items() if name != "params"})
            optimizer.step()
            works += self._broadcast(
                [p for p, its_part in self._part_of.items() if its_part == part]
            )
        for work in works:
            work.wait()
        return loss

    def broadcast_parameters(self) -> None:
        """Sends every parameter from its owner to all, as a step does."""
        for work in self._broadcast(list(self.owners)):
            work.wait()

    def _broadcast(self, parameters: list[nn.Parameter]) -> list[Any]:
        """The works of sending each trained parameter from its owner to all."""
        if not self.communicates:
            return []
        launches = collections.defaultdict(list)
        for p in parameters:
            if p.requires_grad:
                send = functools.partial(
                    dist.broadcast, group=self.group, group_src=self.owners[p], async_op=True
                )
                launches[p.device].append(functools.partial(send, p.data))
        return [
            work
            for device, of_device in launches.items()
            for work in launch_together(of_device, group=self.group, device=device)
        ]

    def clip_gradients(self, max_norm: float, *, sharded: bool) -> Tensor:
        """Scales the gradients so that the norm of all of them is at most `max_norm`; the norm
        before.

        sharded  each rank has the gradients of its own parameters only (stage 2)
        """
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        return clip_by_whole_norm(
            gradients, max_norm, self.group if sharded else None, self._device()
        )

    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

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
        everyones: list[Any] | None = [None] * self.ranks if self.rank == to else None
        dist.gather_object(ours, everyones, group=self.group, group_dst=to)
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
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = {
            index
            for index, p in zip(indices, parameters, strict=False)
            if self.owners[p] == self.rank
        }
        state = {index: values for index, values in state_dict["state"].items() if index in own}
        super().load_state_dict({**state_dict, "state": state})
        self._share_state()


@torch.no_grad()
def clip_by_whole_norm(
    own: list[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    replicated: Sequence[Tensor] = (),
) -> Tensor:
    """Scales gradients in place so that the norm of all of them is at most `max_norm`; the norm
    before.

    own         gradients that this rank alone has
    group       the ranks that have others; None if there are no others
    replicated  gradients that every rank has
    """
    square = _square_of_norm(own, device)
    if group is not None:
        dist.all_reduce(square, group=group)
    norm = (square + _square_of_norm(replicated, device)).sqrt()
    if gradients := [*own, *replicated]:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _square_of_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    # In fp32 on every rank, whatever the gradients' type: the ranks' squares are added up.
    return (
        nn.utils.get_total_norm(list(gradients))
        .to(device=device, dtype=_norm_dtype(gradients))
        .square()
    )


def _norm_dtype(gradients: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if gradients[0].dtype == torch.float64 else torch.float32


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value
