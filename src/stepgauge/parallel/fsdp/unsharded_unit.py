"""The whole weights of a module, for one call of it and the backward of that call."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import num_hooks
from stepgauge.parallel.autograd.running_backward import will_execute
from stepgauge.parallel.communication.collectives import launch_all_gather_list
from stepgauge.parallel.sharding import flat_real, free_memory, local_shard, sent_dtype

if TYPE_CHECKING:
    from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit


class UnshardedUnit:
    """The whole weights of a unit, for one call of its module and the backward of that call.

    Their memory is freed and allocated again, while the tensors stay: between forward and backward
    autograd's saved tensors are empty. While they are empty, their version differs from the one that
    autograd saved, so a backward that needs them too early raises instead of reading garbage.

    buffers       the gathered weights, with padding
    is_unsharded  the weights are whole, or on their way
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
        self.is_unsharded = False
        self._works: list[Any] = []
        self._copies: list[Tensor] = []  # of shards, in the dtype or length that is sent
        self._gathered_versions = _versions(parameters)
        # Tensors that share the version counters of the weights that autograd knows.
        self._version_holders: list[Tensor] = []
        self._has_raised_versions = False
        self._placed_views: list[tuple[Tensor, int]] = []  # with their versions when placed
        self._was_written = False
        # Nodes that need the weights in backward, and how many of them have run.
        self._num_consumers, self._num_done = 1, 0

    def is_current(self) -> bool:
        """Returns True if the weights are whole and no shard was written since they were gathered."""
        return self.is_unsharded and _versions(self.parameters) == self._gathered_versions

    def unshard(self) -> None:
        """Starts to gather the weights, unless they are whole. Raises RuntimeError if a shard was
        written since forward.
        """
        if _versions(self.parameters) != self._gathered_versions:
            raise RuntimeError(
                "a weight was modified by an inplace operation after forward had used it"
            )
        if self.is_unsharded:
            return
        self.is_unsharded = True
        self.unit.unsharded = self
        self.unit.reductions.free_at_end(self)
        sharding, shards = self.unit.sharding, self._padded_shards()
        self.buffers = self.buffers or [
            shard.new_empty(shard.shape[0] * sharding.ranks, *shard.shape[1:]) for shard in shards
        ]
        for buffer in self.buffers:
            if not buffer.untyped_storage().nbytes():  # resizing to the same size would copy
                buffer.untyped_storage().resize_(buffer.nbytes)
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, shard in zip(self.buffers, shards, strict=True):
            if shard.numel():
                outputs, inputs = by_dtype.setdefault(shard.dtype, ([], []))
                outputs.append(flat_real(buffer))
                inputs.append(flat_real(shard))
        self._works = [
            work
            for of_dtype in by_dtype.values()
            for work in launch_all_gather_list(*of_dtype, sharding.group)
        ]

    def _padded_shards(self) -> list[Tensor]:
        """Returns this rank's shards in the dtype that is sent. The shards of a weight are padded to
        equal length on all ranks.
        """
        padded, copied, copies = [], [], []
        for parameter in self.parameters:
            shard = local_shard(parameter)
            rows = self.unit.sharding.rows_per_rank(parameter.shape[0])
            dtype = sent_dtype(shard.dtype, self.compute_dtype)
            if shard.dtype != dtype or shard.shape[0] != rows:
                copied.append(shard)
                shard = shard.new_empty(rows, *shard.shape[1:], dtype=dtype)
                copies.append(shard[: copied[-1].shape[0]])
            padded.append(shard)
        if copies:
            torch._foreach_copy_(copies, copied)
            self._copies = copies
        return padded

    def wait(self) -> None:
        """Waits until the weights are whole."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"weights of {self.unit.name or 'the module'} were not gathered; all ranks must call "
                f"the same blocks in the same order, and backward equally often: {error}"
            ) from error
        for copy in self._copies:
            free_memory(copy)
        self._works, self._copies = [], []
        self._raise_versions(False)

    def reshard(self) -> None:
        """Puts the shards back in their places and frees the memory of the whole weights."""
        self.place_shards()
        self.wait()
        self.is_unsharded, self._num_done = False, 0
        if self.unit.unsharded is self:
            self.unit.unsharded = None
        self._raise_versions(True)
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)

    def _raise_versions(self, raised: bool) -> None:
        """Raises the versions of the weights by one while they are not whole, or sets them back."""
        if raised != self._has_raised_versions:
            self._has_raised_versions, change = raised, 1 if raised else -1
            versions = tuple(each._version + change for each in self._version_holders)
            # torch's fully_shard does the same. The way out: a public name of this function.
            torch._C._autograd._unsafe_set_version_counter(tuple(self._version_holders), versions)

    def views(self) -> tuple[Tensor, ...]:
        """Returns the whole weights, without padding, as new tensors."""
        wholes = [buffer.data for buffer in self.buffers]
        if not torch.is_inference_mode_enabled():
            self._version_holders += wholes
        return tuple(
            whole[: parameter.shape[0]]
            for whole, parameter in zip(wholes, self.parameters, strict=True)
        )

    def place_for_forward(self) -> None:
        """Puts the whole weights in place of the shards for a call of the module."""
        trained = any(p.requires_grad for p in self.parameters) and torch.is_grad_enabled()
        # GatherWeights returns no gradients of its inputs, so autograd would call a weight's hooks
        # without a gradient. Weights with hooks are therefore no inputs of it.
        unhooked = [p for p in self.parameters if not num_hooks(p)]
        anchor = torch.empty(0, requires_grad=trained)
        self._place(GatherWeights.apply(self, unhooked, anchor, *unhooked))

    @torch.enable_grad()
    def place_for_backward(self) -> None:
        """Puts the whole weights in place of the shards in backward, where checkpointing computes
        parts of the module again.
        """
        if self.unit.placed is not self:
            anchor = torch.empty(0, requires_grad=True)
            self._place(WeightsInBackward.apply(self, (), anchor))

    def _place(self, weights: Sequence[Tensor]) -> None:
        if not torch.is_inference_mode_enabled():
            self._placed_views = [(whole, whole._version) for whole in weights]
        self.unit.placed = self
        self.unit.place(weights)

    def place_shards(self) -> None:
        """Puts the shards back in their places, unless the weights of another call are there."""
        if self.unit.placed is self:
            self.unit.placed = None
            self.unit.place(self.parameters)
            views, self._placed_views = self._placed_views, []
            self._was_written |= any(whole._version != version for whole, version in views)

    def expect_consumers(self, inputs: Sequence[Tensor]) -> None:
        """If all weights are frozen: keeps them whole until backward has computed the gradients of
        all these inputs of the module.
        """
        if not any(parameter.requires_grad for parameter in self.parameters):
            self._num_consumers = len(inputs)
            for each in inputs:
                each.register_hook(self.count_consumer)

    def count_consumer(self, _: Any = None) -> None:
        """Counts a node that needed the weights in backward and has run. After the last the weights
        are freed.
        """
        self._num_done += 1
        if self._num_done >= self._num_consumers:
            self.reshard()
            self.require_unwritten()

    def require_unwritten(self) -> None:
        """Raises RuntimeError if whole weights were written while they were in their places."""
        written, self._was_written = self._was_written, False
        if written:
            raise RuntimeError(
                f"a weight of {self.unit.name or 'the module'} was written during its forward or "
                f"backward; write sharded weights outside of both"
            )


class GatherWeights(torch.autograd.Function):
    """Makes the whole weights tensors of autograd. Its backward reduces all their gradients together.

    Its inputs are the weights, so that `backward(inputs=weights)` reaches this node, and an anchor
    that stands for the weights that are not inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, unsharded: UnshardedUnit, inputs: Sequence[nn.Parameter], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unsharded, ctx.weights = unsharded, inputs
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
        if any(map(num_hooks, ctx.weights)):  # autograd would call the hooks without a gradient
            raise RuntimeError(
                "a hook was registered on a sharded weight after forward had used it; register it "
                "before forward"
            )
        unsharded = ctx.unsharded
        unsharded.count_consumer()
        (anchor, _), *nodes = ctx.next_functions
        node_of = {p: node for p, (node, _) in zip(ctx.weights, nodes, strict=True)}
        wanted = {
            parameter: gradient
            for parameter, gradient in zip(unsharded.parameters, gradients, strict=True)
            if parameter.requires_grad and _is_wanted(node_of.get(parameter, anchor))
        }
        if wanted:
            unsharded.unit.reductions.reduce(wanted, unsharded.unit.compute_dtype)
        return None, None, None, *(None for _ in nodes)


def _is_wanted(node: Any) -> bool:
    """Returns True if backward reaches a weight; `backward(inputs=...)` does not reach all."""
    try:
        return node is not None and will_execute(node)
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded weights; call "
            "backward(inputs=...) and read `.grad`"
        ) from error


class WeightsInBackward(GatherWeights):
    """Whole weights for a forward inside backward, through which nothing is differentiated."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "a part of a module with sharded weights was checkpointed with use_reentrant=True; "
            "checkpoint the whole module, or with use_reentrant=False"
        )


def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Returns the parameters' version counters, which change when a shard is written."""
    return [parameter._version for parameter in parameters]
