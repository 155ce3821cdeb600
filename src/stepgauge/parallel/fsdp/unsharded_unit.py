"""Whole weights of a module for one call of it and the backward of that call, as autograd knows
them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import num_hooks
from stepgauge.parallel.autograd.running_backward import will_execute
from stepgauge.parallel.communication.collectives import launch_all_gather_list
from stepgauge.parallel.sharding import local, real, release, sent_dtype

if TYPE_CHECKING:
    from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit


class UnshardedUnit:
    """The whole weights of a unit for one call of its module and the backward of that call.

    Their memory comes and goes while the tensors stay: autograd saves tensors that are empty between
    forward and backward. Until they are there again they have another version than autograd saved,
    so that a backward which comes to them too early raises, and does not read what is half gathered.
    """

    def __init__(
        self,
        unit: "ShardedUnit",
        parameters: Sequence[nn.Parameter],
        compute_dtype: torch.dtype | None,
    ):
        unit.require_shards(parameters)
        self.unit, self.parameters, self.compute_dtype = unit, parameters, compute_dtype
        self.buffers: list[Tensor] = []
        self._works: list[Any] = []
        self._copies: list[Tensor] = []  # of parts, in the type or length that is sent
        self._placed_views: list[tuple[Tensor, int]] = []
        self._was_written = False
        self._versioned: list[Tensor] = []  # of each weight and call, one with its version
        self._are_away = False
        self._versions = _versions(parameters)
        self.is_unsharded = False
        # what needs the weights in backward, and how many of it have run
        self._num_consumers, self._num_done = 1, 0

    def is_current(self) -> bool:
        """Whether the weights are here, and the shards still what was gathered."""
        return self.is_unsharded and _versions(self.parameters) == self._versions

    def unshard(self) -> None:
        """Starts gathering, unless the weights are there. Raises RuntimeError where they were
        written since forward.
        """
        if _versions(self.parameters) != self._versions:
            raise RuntimeError(
                "a weight was modified by an inplace operation after forward had used it"
            )
        if self.is_unsharded:
            return
        self.is_unsharded = True
        self.unit.unsharded = self
        self.unit.reductions.free_at_end(self)
        sharding, mine = self.unit.sharding, self._padded()
        self.buffers = self.buffers or [
            part.new_empty(part.shape[0] * sharding.ranks, *part.shape[1:]) for part in mine
        ]
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
        alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, part in zip(self.buffers, mine, strict=True):
            if part.numel():
                outputs, inputs = alike.setdefault(part.dtype, ([], []))
                outputs.append(real(buffer))
                inputs.append(real(part))
        self._works = [
            work
            for of_type in alike.values()
            for work in launch_all_gather_list(*of_type, sharding.group)
        ]

    def _padded(self) -> list[Tensor]:
        """This rank's parts in the type that is sent, all ranks' of a weight equally long."""
        padded, copied, copies = [], [], []
        for parameter in self.parameters:
            part, rows = local(parameter), self.unit.sharding.rows(parameter.shape[0])
            dtype = sent_dtype(part.dtype, self.compute_dtype)
            if part.dtype != dtype or part.shape[0] != rows:
                copied.append(part)
                part = part.new_empty(rows, *part.shape[1:], dtype=dtype)
                copies.append(part[: copied[-1].shape[0]])
            padded.append(part)
        if copies:
            torch._foreach_copy_(copies, copied)
            self._copies = copies
        return padded

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"weights of {self.unit.name or 'the module'} were not gathered; all ranks must call "
                f"the same blocks in the same order, and backward as often: {error}"
            ) from error
        for copy in self._copies:
            release(copy)
        self._works, self._copies = [], []
        self._mark(away=False)

    def reshard(self) -> None:
        self.place_shards()
        self.wait()
        self.is_unsharded, self._num_done = False, 0
        if self.unit.unsharded is self:
            self.unit.unsharded = None
        self._mark(away=True)
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)

    def _mark(self, *, away: bool) -> None:
        """Raises the versions of weights that are not there, and sets them back."""
        if away != self._are_away:
            self._are_away, change = away, 1 if away else -1
            versions = tuple(each._version + change for each in self._versioned)
            # As torch's fully_shard does; the way out: a public name of it.
            torch._C._autograd._unsafe_set_version_counter(tuple(self._versioned), versions)

    def views(self) -> tuple[Tensor, ...]:
        """New tensors of the whole weights, each with its own shape."""
        wholes = [buffer.data for buffer in self.buffers]
        if not torch.is_inference_mode_enabled():
            self._versioned += wholes
        return tuple(
            whole[: parameter.shape[0]]
            for whole, parameter in zip(wholes, self.parameters, strict=True)
        )

    def place_for_forward(self) -> None:
        """Puts the whole weights in place of the shards for a call of the module."""
        trained = any(p.requires_grad for p in self.parameters) and torch.is_grad_enabled()
        # Autograd calls hooks of a weight, with nothing, where its gradient is not ours to return.
        unhooked = [p for p in self.parameters if not num_hooks(p)]
        anchor = torch.empty(0, requires_grad=trained)
        self._place(GatherWeights.apply(self, unhooked, anchor, *unhooked))

    @torch.enable_grad()
    def place_for_backward(self) -> None:
        """Puts them there in backward, for what checkpointing computes again of the module's inside."""
        if self.unit.placed is not self:
            anchor = torch.empty(0, requires_grad=True)
            self._place(WeightsInBackward.apply(self, (), anchor))

    def _place(self, weights: Sequence[Tensor]) -> None:
        if not torch.is_inference_mode_enabled():
            self._placed_views = [(whole, whole._version) for whole in weights]
        self.unit.placed = self
        self.unit.place(weights)

    def place_shards(self) -> None:
        """Puts the shards back, unless the weights of another call stand there."""
        if self.unit.placed is self:
            self.unit.placed = None
            self.unit.place(self.parameters)
            views, self._placed_views = self._placed_views, []
            self._was_written |= any(whole._version != version for whole, version in views)

    def expect_consumers(self, inputs: Sequence[Tensor]) -> None:
        """Of a module whose weights are all frozen: they are needed until backward has the gradients
        of its inputs.
        """
        if not any(parameter.requires_grad for parameter in self.parameters):
            self._num_consumers = len(inputs)
            for each in inputs:
                each.register_hook(self.count_consumer)

    def count_consumer(self, _: Any = None) -> None:
        """What needed the weights in backward has run: after the last they are freed."""
        self._num_done += 1
        if self._num_done >= self._num_consumers:
            self.reshard()
            self.require_unwritten()

    def require_unwritten(self) -> None:
        """Raises RuntimeError for whole weights that were written while they were in their places."""
        written, self._was_written = self._was_written, False
        if written:
            raise RuntimeError(
                f"a weight of {self.unit.name or 'the module'} was written in its forward or backward; "
                f"sharded weights are written outside of them"
            )


class GatherWeights(torch.autograd.Function):
    """Whole weights as autograd knows them, and names them in its errors; backward averages all
    their gradients together.

    Its inputs are the weights, so that `backward(inputs=weights)` comes here, and an anchor for
    those that are not given.
    """

    @staticmethod
    def forward(
        ctx: Any, unsharded: UnshardedUnit, given: Sequence[nn.Parameter], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unsharded, ctx.given = unsharded, given
        ctx.set_materialize_grads(False)
        wholes = unsharded.views()
        frozen = [
            whole
            for whole, parameter in zip(wholes, unsharded.parameters, strict=True)
            if not parameter.requires_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into sharded weights is not averaged; differentiate "
                "with respect to inputs with torch.autograd.grad"
            )
        if any(map(num_hooks, ctx.given)):  # which autograd would call, with nothing
            raise RuntimeError(
                "a hook was registered on a sharded weight after forward had used it; register it "
                "before forward"
            )
        unsharded = ctx.unsharded
        unsharded.count_consumer()
        (anchor, _), *nodes = ctx.next_functions
        node_of = {p: node for p, (node, _) in zip(ctx.given, nodes, strict=True)}
        wanted = {
            parameter: gradient
            for parameter, gradient in zip(unsharded.parameters, gradients, strict=True)
            if parameter.requires_grad and _is_wanted(node_of.get(parameter, anchor))
        }
        if wanted:
            unsharded.unit.reductions.reduce(wanted, unsharded.unit.compute_dtype)
        return None, None, None, *(None for _ in nodes)


def _is_wanted(node: Any) -> bool:
    """Whether backward goes on to a weight: not to all where it was given `inputs`."""
    try:
        return node is not None and will_execute(node)
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad gives no gradients of sharded weights; take them from `.grad` after "
            "backward(inputs=...)"
        ) from error


class WeightsInBackward(GatherWeights):
    """Weights of a forward in backward, whose graph nobody needs."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "a part of a module with sharded weights was checkpointed with use_reentrant=True; "
            "checkpoint the whole module, or with use_reentrant=False"
        )


def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """What changes when a shard is written."""
    return [parameter._version for parameter in parameters]
