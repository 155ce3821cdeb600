"""Imitates cuDNN's LSTM and GRU on fake tensors: their outputs and the memory that they keep.

torch has no rules for the size of cuDNN's reserve space, which is kept for backward, or for the shapes
of its backward. Without cuDNN torch decomposes the layers, which keeps other tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Values in the reserve space per value of a layer's hidden states, in addition to the outputs between
# layers. Derived from the 736 and 864 MB that cuDNN requests in pytorch issue 2895: four layers of
# width 320, 123 input features, 25,000 time steps in total.
RESERVED = {"lstm": 5, "gru": 6}
# The workspace was 20 % of the peak of one LSTM on an H100
# (benchmarks/results/2026-11-23-h100-memory-of-models.jsonl).
WITHOUT_WORKSPACE = (
    "too low: without the workspace of aten._cudnn_rnn.default, {kind}, whose size only cuDNN knows"
)


@contextlib.contextmanager
def cudnn_recurrent_layers(left_out: list[str]) -> Iterator[None]:
    """Makes nn.LSTM and nn.GRU on CUDA hold the same memory as with cuDNN, except its workspace.

    left_out  gets a sentence about the missing workspace when a layer is called
    """
    with contextlib.ExitStack() as stack:
        for kind in RESERVED:
            plain = getattr(torch._VF, kind)
            layers = _layers(kind, plain, left_out)
            stack.enter_context(mock.patch.object(torch._VF, kind, layers, create=True))
        yield


@contextlib.contextmanager
def layers_that_raise(error: Exception, kinds: Sequence[str]) -> Iterator[None]:
    """Makes recurrent layers of these kinds (names in torch._VF) raise the error."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            raises = mock.Mock(side_effect=error)
            stack.enter_context(mock.patch.object(torch._VF, kind, raises, create=True))
        yield


def _layers(kind: str, plain: Callable[..., Any], left_out: list[str]) -> Callable[..., Any]:
    sentence = WITHOUT_WORKSPACE.format(kind=kind.upper())

    def run(x: Tensor, second: Any, third: Any, *rest: Any) -> Any:
        if not x.is_cuda or not torch.backends.cudnn.enabled:
            return plain(x, second, third, *rest)
        if sentence not in left_out:
            left_out.append(sentence)
        # Arguments of a packed sequence: data, batch sizes, states, weights, options...
        # Otherwise: data, states, weights, options...
        packed = isinstance(third, Tensor | tuple | list) and isinstance(rest[0], tuple | list)
        states, weights, options = (third, rest[0], rest[1:]) if packed else (second, third, rest)
        states = list(states) if isinstance(states, tuple | list) else [states]
        inputs = [_autocast(each) for each in (x, *states, *weights)]
        _, num_layers, _, training, bidirectional, *_ = options
        return _Recurrent.apply(
            kind, num_layers, 2 if bidirectional else 1, training, len(states), *inputs
        )

    return run


def _autocast(tensor: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


class _Recurrent(torch.autograd.Function):
    """Runs all layers in one call, like cuDNN: x_BTD or x_TBD, states_LBH, weights. The gradients of
    the weights are parts of one buffer, as with cuDNN.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        num_layers: int,
        directions: int,
        training: bool,
        num_states: int,
        x: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        states, weights = rest[:num_states], rest[num_states:]
        width, hidden = states[0].shape[-1], states[-1].shape[-1]
        output = x.new_empty((*x.shape[:-1], width * directions))
        rows = output.numel() // output.shape[-1]
        reserved_width = num_layers * RESERVED[kind] * hidden + (num_layers - 1) * width
        has_reserve = training or any(ctx.needs_input_grad)  # in training also without gradients
        reserve = [x.new_empty(rows * directions * reserved_width)] if has_reserve else []
        ctx.num_states = num_states
        ctx.save_for_backward(x, output, *states, *weights, *reserve)
        return (output, *(torch.empty_like(state) for state in states))

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Any, ...]:
        x, _, *rest = ctx.saved_tensors
        states, weights = rest[: ctx.num_states], rest[ctx.num_states : -1]
        sizes = [weight.numel() for weight in weights]
        parts = x.new_empty(sum(sizes)).split(sizes)
        gradients = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        return (*[None] * 5, torch.empty_like(x), *map(torch.empty_like, states), *gradients)
