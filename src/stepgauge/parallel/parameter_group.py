"""A unit of ZeRO 3: the weights of one module, sharded at rest and whole while it computes.

At rest each weight is a DTensor, cut along its first dimension as torch.chunk cuts, and the module's
own parameter. While the module computes, whole weights stand in its place: plain tensors that
autograd knows, whose gradients are averaged into the shards.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.collectives import all_gather_flat, launch_together
from stepgauge.parallel.reducer import GradientReducer

if TYPE_CHECKING:
    from stepgauge.parallel.traffic import Prefetcher, Reductions

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Place = tuple[nn.Module, str]  # a module, and the name of its parameter


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules: what is worth sharding by itself."""
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from repeated_blocks(child)


class Sharding(GradientReducer):
    """The ranks that weights are sharded over."""

    def __init__(self, group: Any = None, device_type: str = "cpu"):
        super().__init__(group)
        self.mesh = DeviceMesh.from_group(self.group, device_type)

    def __reduce__(self) -> Any:
        return Sharding, (None, self.mesh.device_type)

    def shard(self, whole: Tensor) -> DTensor:
        """This rank's part of a tensor that all ranks have whole."""
        rows = self.rows(whole.shape[0])
        first = min(self.rank * rows, whole.shape[0])
        mine = whole[first : first + rows].contiguous().clone()
        return self.distributed(mine, whole.shape)

    def distributed(self, mine: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            mine, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def rows(self, whole: int) -> int:
        """Rows of a rank's part, padding of the last ranks included."""
        return -(-whole // self.ranks)


class ParameterGroup:
    """The weights of a module that are unsharded together.

    name    the module's
    module  whose forward they are whole in
    places  of each weight, where it is a parameter: several if it is tied
    is_root whether it stays whole between forward and backward, which follows at once
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        places: Sequence[Sequence[Place]],
        sharding: Sharding,
        compute_dtype: torch.dtype | None,
        prefetcher: "Prefetcher",
        reductions: "Reductions",
        *,
        is_root: bool,
    ):
        self.places, self.sharding, self.compute_dtype = places, sharding, compute_dtype
        self.prefetcher, self.reductions, self.is_root = prefetcher, reductions, is_root
        self._calls: list[tuple[UnshardedGroup, bool, list[nn.Parameter]]] = []
        self.unsharded: UnshardedGroup | None = None
        self.stays_whole = False  # its module is whole for longer than a call: residency.py
        self.name = name
        for of_weight in places:
            whole = of_weight[0][0]._parameters[of_weight[0][1]]
            assert whole is not None, "it has a place"
            sharded = nn.Parameter(
                sharding.shard(whole.detach()), requires_grad=whole.requires_grad
            )
            _put(of_weight, sharded)
            reductions.parameters.append(sharded)
            for owner, _ in of_weight:
                owner.register_load_state_dict_pre_hook(functools.partial(_cut, sharding))
        module.register_forward_pre_hook(self.before, prepend=True)
        module.register_forward_hook(self.after, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": [], "unsharded": None}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded weights, outside of forward."""
        return [owner._parameters[name] for (owner, name), *_ in self.places]  # type: ignore[misc]

    def unshard(self) -> "UnshardedGroup":
        unsharded = UnshardedGroup(self, self.parameters, self.compute_dtype)
        unsharded.unshard()
        return unsharded

    def put(self, weights: Sequence[Tensor]) -> None:
        """These in the places of the weights."""
        for of_weight, weight in zip(self.places, weights, strict=True):
            _put(of_weight, weight)

    @torch.compiler.disable
    def before(self, module: nn.Module, inputs: Any) -> Any:
        """Puts whole weights in place of the shards."""
        if self.stays_whole:
            return None
        parameters = self.parameters
        # Checkpointing calls the module again in backward, which has its weights already.
        unsharded = self.unsharded
        reused = self.reductions.is_running and unsharded is not None and unsharded.is_current()
        unsharded = unsharded if reused else self.prefetcher.take(self)
        assert unsharded is not None, "it is reused or taken"
        unsharded.wait()
        self._calls.append((unsharded, reused, parameters))
        self.put(unsharded.use())
        self.prefetcher.entered(self)
        return unsharded.watched(inputs)

    @torch.compiler.disable
    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Puts the shards back; whole weights are freed until backward needs them."""
        if not self._calls:  # what failed was before us
            return
        unsharded, reused, parameters = self._calls.pop()
        unsharded.require_unwritten()
        self.put(parameters)
        reached = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for tensor in reached:
            tensor.register_hook(functools.partial(_before_backward, unsharded))
        recomputed = self.reductions.is_running  # checkpointing's tensors are needed at once
        kept = self.is_root and torch.is_grad_enabled() and reached
        if not reused and not recomputed and not kept:
            unsharded.reshard()
        if reached:
            self.prefetcher.left(unsharded)


def _put(of_weight: Sequence[Place], tensor: Tensor) -> None:
    for owner, name in of_weight:
        owner._parameters[name] = tensor  # type: ignore[assignment]
        if isinstance(owner, nn.RNNBase):  # which keeps its weights a second time
            names = owner._flat_weights_names
            owner._flat_weights = [getattr(owner, each, None) for each in names]


def _cut(
    sharding: Sharding, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """load_state_dict takes whole weights too: this rank's part of each."""
    for name, parameter in module._parameters.items():
        given = state.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(given, Tensor)
            and not isinstance(given, DTensor)
            and given.shape == parameter.shape
        ):
            state[prefix + name] = sharding.shard(given.detach().to(parameter.device))


def _before_backward(unsharded: "UnshardedGroup", _: Tensor) -> None:
    unsharded.unit.reductions.begin(unsharded.parameters[0].device)
    unsharded.unit.prefetcher.entered_backward(unsharded)
    unsharded.unshard()
    unsharded.wait()


class UnshardedGroup:
    """The whole weights of a unit for one call of its module and the backward of that call.

    Their memory comes and goes while the tensors stay: autograd saves tensors that are empty between
    forward and backward.
    """

    def __init__(
        self,
        unit: ParameterGroup,
        parameters: Sequence[nn.Parameter],
        compute_dtype: torch.dtype | None,
    ):
        self.unit, self.parameters, self.compute_dtype = unit, parameters, compute_dtype
        self.buffers: list[Tensor] = []
        self._works: list[Any] = []
        self._copies: list[Tensor] = []  # of parts, in the type or length that is sent
        self._views: list[tuple[Tensor, int]] = []
        self._versions = _versions(parameters)
        self.is_unsharded = False
        # what backward has to come to before nobody needs the weights, and what it has come to
        self._ends, self._ended = 0, 0

    def is_current(self) -> bool:
        """Whether the weights are here, and the shards still what was gathered."""
        return self.is_unsharded and _versions(self.parameters) == self._versions

    @torch.no_grad()
    def unshard(self) -> None:
        """Starts gathering, unless the weights are there. Raises RuntimeError where they were
        written since forward.
        """
        if self.is_unsharded:
            return
        if _versions(self.parameters) != self._versions:
            raise RuntimeError(
                "a weight was modified by an inplace operation after forward had used it"
            )
        self.is_unsharded = True
        self.unit.unsharded = self
        sharding, mine = self.unit.sharding, self._padded()
        self.buffers = self.buffers or [
            part.new_empty(part.shape[0] * sharding.ranks, *part.shape[1:]) for part in mine
        ]
        launches: list[Callable[[], Any]] = []
        for buffer, part in zip(self.buffers, mine, strict=True):
            buffer.untyped_storage().resize_(buffer.nbytes)
            if part.numel():
                flat = functools.partial(all_gather_flat, real(buffer), real(part))
                launches.append(functools.partial(flat, sharding.group, True))
        self._works = launch_together(launches, group=sharding.group, device=self.buffers[0].device)

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
                "weights were not gathered; all ranks must call the same blocks in the same order, "
                f"and backward as often: {error}"
            ) from error
        for copy in self._copies:
            release(copy)
        self._works, self._copies = [], []

    def reshard(self) -> None:
        self.wait()
        self.is_unsharded = False
        if self.unit.unsharded is self:
            self.unit.unsharded = None
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)

    def use(self) -> tuple[Tensor, ...]:
        """The weights, each with its own shape, for a call of the module."""
        trained = any(p.requires_grad for p in self.parameters) and torch.is_grad_enabled()
        self._ends = int(trained)
        anchor = torch.empty(0, requires_grad=trained)
        wholes = _Use.apply(anchor, self)
        if not torch.is_inference_mode_enabled():
            self._views = [(whole, whole._version) for whole in wholes]
        return wholes

    def watched(self, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The inputs of a module with frozen weights such that backward tells when it has their
        gradients; None where that need not be known.
        """
        places = [
            place
            for place, each in enumerate(inputs)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        frozen = any(not parameter.requires_grad for parameter in self.parameters)
        if not (places and frozen and torch.is_grad_enabled()):
            return None
        self._ends += 1
        given = _Inputs.apply(self, *(inputs[place] for place in places))
        by_place = dict(zip(places, given, strict=True))
        return tuple(by_place.get(place, each) for place, each in enumerate(inputs))

    def end(self) -> None:
        """One of those who needed the weights in backward has run."""
        self._ended += 1
        if self._ended >= self._ends:
            self._ended = 0
            self.reshard()

    def require_unwritten(self) -> None:
        """Raises RuntimeError for a weight that forward itself wrote."""
        written = any(whole._version != before for whole, before in self._views)
        self._views = []
        if written:
            raise RuntimeError(
                "a module wrote a weight in its forward; sharded weights are written outside of it"
            )


class _Use(torch.autograd.Function):
    """Whole weights as autograd knows them; backward averages all their gradients together."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unsharded: UnshardedGroup) -> tuple[Tensor, ...]:
        ctx.unsharded = unsharded
        ctx.set_materialize_grads(False)
        wholes = tuple(
            buffer.data[: parameter.shape[0]]
            for buffer, parameter in zip(unsharded.buffers, unsharded.parameters, strict=True)
        )
        frozen = [
            whole
            for whole, parameter in zip(wholes, unsharded.parameters, strict=True)
            if not parameter.requires_grad
        ]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) into sharded weights is not averaged; differentiate "
                "with respect to inputs with torch.autograd.grad"
            )
        unsharded = ctx.unsharded
        unit = unsharded.unit
        unsharded.end()
        unit.reductions.start(unsharded.parameters, gradients, unit.compute_dtype)
        return None, None


class _Inputs(torch.autograd.Function):
    """The inputs of a module with frozen weights, which backward needs until it has the gradients
    of the inputs.
    """

    @staticmethod
    def forward(ctx: Any, unsharded: UnshardedGroup, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unsharded = unsharded
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unsharded.end()
        return None, *gradients


@torch.no_grad()
def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """What changes when a shard is written."""
    return [parameter._version for parameter in parameters]


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    assert isinstance(parameter, DTensor), "it is sharded"
    return parameter.to_local()


def sent_dtype(dtype: torch.dtype, compute_dtype: torch.dtype | None) -> torch.dtype:
    """The type in which weights or gradients of a type travel: integers and complex as they are."""
    return compute_dtype if compute_dtype and dtype.is_floating_point else dtype


def release(tensor: Tensor) -> None:
    """Gives the memory of a tensor of our own back, once what was sent from it or into it has been
    waited for. NCCL's works hold their tensors longer, until its watchdog comes round: 9.7 GiB at
    2.7b on 2 × H200.
    """
    tensor.untyped_storage().resize_(0)


def real(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
