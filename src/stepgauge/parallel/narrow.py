"""Gradients of linear layers in autocast's type, kept before autograd widens them into `.grad`.

Under autocast the gradient of a linear layer's weight is computed in 16 bits, and widening it is
one pass over memory. A message of 16-bit gradients that were widened already would need a pass to
narrow them and one to widen the mean. Here the only pass is the one that autograd leaves out: from
the mean into `.grad`.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

LONGEST_WAY = 6  # nodes between a linear layer's output and the cast of its weight
KEPT = "stepgauge keeps the gradient"


class NarrowGradients:
    """Of the linear layers of a module, the weights' gradients in `dtype`, from backward until they
    are fetched.

    A layer's output hangs on the node that casts its weight. A hook there keeps the gradient that
    comes and hands on none; the hooks of the weight itself still run once a backward, with None,
    and then all of it is there. Weights with tensor hooks of others are left alone, and so are
    torch.autograd.grad, compiled graphs and what else has no such node: gradients come there as
    they always do.

    own_hooks  how many hooks of the caller's a weight has
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        names: Mapping[nn.Parameter, str],
        *,
        own_hooks: int,
    ):
        self.dtype = dtype
        self._names: Mapping[Any, str] = names  # looked up for weights that need not be parameters
        self._own_hooks = own_hooks
        # by backward: of one that failed some are left
        self._sums: dict[tuple[int, str], _Sum] = {}
        hook = _Hook(self)  # one for all layers, or compiled blocks would be compiled for each
        layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, nn.Linear) and layer.weight in names
        ]
        remove_with(self, [layer.register_forward_hook(hook) for layer in layers])

    def fetch(self, name: str) -> Tensor | None:
        """The sum of what this backward has kept of that weight so far."""
        kept = self._sums.pop((_backward(), name), None)
        return None if kept is None else kept.here().to(self.dtype)

    def forget(self) -> None:
        """What backwards that failed have left."""
        self._sums.clear()

    def _keep(self, name: str, gradient: Tensor) -> None:
        key = _backward(), name
        earlier = self._sums.get(key)
        self._sums[key] = _Sum(
            gradient.detach() if earlier is None else earlier.here().float() + gradient
        )

    def look(self, weight: Tensor, output: Tensor) -> None:
        """Keeps the weight's gradient from this forward, if it is cast there."""
        name = self._names.get(weight)
        kind = output.device.type
        if (
            name is None
            or not torch.is_autocast_enabled(kind)
            or torch.get_autocast_dtype(kind) != self.dtype
        ):
            return
        node = _cast_of(weight, output)
        if node is None or KEPT in node.metadata:
            return
        node.metadata[KEPT] = True  # a second use of the same cast
        this, leaf = weakref.ref(self), node.next_functions[0][0]

        def keep(gradients: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
            (gradient,), narrow = gradients, this()
            if (
                narrow is None
                or gradient is None
                or not narrow._keeps(gradient, weight)
                or not _is_accumulated(leaf)
            ):
                return None
            narrow._keep(name, gradient)
            return (None,)

        node.register_prehook(keep)

    def _keeps(self, gradient: Tensor, weight: Tensor) -> bool:
        hooks = len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks or ())
        return (
            gradient.dtype == self.dtype
            and hooks <= self._own_hooks
            and not torch.is_grad_enabled()
        )


class _Sum:
    """Of a weight's gradients so far, on the stream on which it is computed."""

    def __init__(self, gradient: Tensor):
        self._gradient = gradient
        self._stream = _stream(gradient)

    def here(self) -> Tensor:
        """For the current stream, which need not be that of the forward: autograd has no part in
        this.
        """
        here = _stream(self._gradient)
        if here != self._stream:
            stream = _as_stream(here)
            stream.wait_stream(_as_stream(self._stream))
            self._gradient.record_stream(stream)
        return self._gradient


class _Hook:
    """Of a layer's forward. A copy of the layer, or one from a file, has a hook that does nothing."""

    def __init__(self, narrow: NarrowGradients | None = None):
        self.__name__ = "stepgauge_narrow_gradients"  # torch.jit asks for it
        self._narrow = weakref.ref(narrow) if narrow is not None else lambda: None

    def __call__(self, layer: nn.Linear, _: Any, output: Any) -> None:
        if (
            torch.compiler.is_compiling()
            or (narrow := self._narrow()) is None
            or not isinstance(output, Tensor)
        ):
            return
        narrow.look(layer.weight, output)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _stream(tensor: Tensor) -> Any:
    """What tells the current stream from others; torch.cuda.current_stream takes 20 times as long."""
    return torch._C._cuda_getCurrentStream(tensor.get_device()) if tensor.is_cuda else None


def _as_stream(told: tuple[int, int, int]) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        **dict(zip(("stream_id", "device_index", "device_type"), told, strict=True))
    )


def _backward() -> int:
    return torch._C._current_graph_task_id()


def remove_with(owner: object, handles: Sequence[RemovableHandle]) -> None:
    """Takes hooks out when their owner is gone."""
    weakref.finalize(owner, _remove, handles).atexit = False


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _is_accumulated(leaf: Any) -> bool:
    """Whether this backward adds to the leaf's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad
        return False


def _cast_of(weight: Tensor, output: Tensor) -> Any:
    """The node of autograd that casts the weight for a product: the product's last operand, perhaps
    transposed.
    """
    node: Any = output.grad_fn
    for _ in range(LONGEST_WAY):
        if node is None or not node.next_functions:
            return None
        above = node.next_functions[-1][0]
        if node.name() == "ToCopyBackward0":
            return node if getattr(above, "variable", None) is weight else None
        node = above
    return None
