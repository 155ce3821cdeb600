"""cuDNN's LSTM and GRU on tensors without memory: what they give, keep and take.

torch's own rules know neither the size of what cuDNN keeps for backward, its reserve space, nor the
shapes of its backward; without cuDNN torch takes the layers apart, which keeps other tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Values that the reserve space holds for each value of a layer's hidden states, besides the outputs
# between layers. They follow from the 736 and 864 MB that cuDNN asks for in pytorch issue 2895: four
# layers of 320 fed with 123 features, 25,000 time steps in all.
RESERVED = {"lstm": 5, "gru": 6}
# 20 % of the peak of one LSTM on an H100 (benchmarks/results/2026-11-23-h100-memory-of-models.jsonl).
WITHOUT_WORKSPACE = (
    "too low: without the workspace of aten._cudnn_rnn.default, {kind}, whose size only cuDNN knows"
)


@contextlib.contextmanager
def cudnn_recurrent_layers(left_out: list[str]) -> Iterator[None]:
    """Within, nn.LSTM and nn.GRU on CUDA hold what they hold with cuDNN, but for its workspace:
    `left_out` says so as soon as one is called.
    """
    with contextlib.ExitStack() as stack:
        for kind in RESERVED:
            plain = getattr(torch._VF, kind)
            layers = _layers(kind, plain, left_out)
            stack.enter_context(mock.patch.object(torch._VF, kind, layers, create=True))
        yield


@contextlib.contextmanager
def layers_that_raise(error: Exception, kinds: Sequence[str]) -> Iterator[None]:
    """Within, recurrent layers of the kinds (names of torch._VF) raise it."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            raises = mock.Mock(side_effect=error)
            stack.enter_context(mock.patch.object(torch._VF, kind, raises, create=True))
        yield


def _layers(kind: str, plain: Callable[..., Any], left_out: list[str]) -> Callable[..., Any]:
    told = WITHOUT_WORKSPACE.format(kind=kind.upper())

    def run(x: Tensor, second: Any, third: Any, *rest: Any) -> Any:
        if not x.is_cuda or not torch.backends.cudnn.enabled:
            return plain(x, second, third, *rest)
        packed = isinstance(third, Tensor | tuple | list) and isinstance(rest[0], tuple | list)
        if told not in left_out:
            left_out.append(told)
        # packed: data, batch sizes, states, weights, ...; else: data, states, weights, ...
        states, weights, options = (third, rest[0], rest[1:]) if packed else (second, third, rest)
        states = list(states) if isinstance(states, tuple | list) else [states]
        inputs = [_autocast(each) for each in (x, *states, *weights)]
        given = kind, options[1], 2 if options[4] else 1, options[3], len(states)
        return _Recurrent.apply(*given, *inputs)

    return run


def _autocast(tensor: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


class _Recurrent(torch.autograd.Function):
    """All layers in one call, as cuDNN does it: x_BTD or x_TBD, states_LBH, weights.

    Gradients of the weights are parts of one buffer, as cuDNN writes them.
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
        inside = num_layers * RESERVED[kind] * hidden + (num_layers - 1) * width
        reserves = training or any(ctx.needs_input_grad)  # in training without gradients too
        kept = [x.new_empty(rows * directions * inside)] if reserves else []
        ctx.num_states = num_states
        ctx.save_for_backward(x, output, *states, *weights, *kept)
        return (output, *(torch.empty_like(state) for state in states))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, _, *rest = ctx.saved_tensors
        states, weights = rest[: ctx.num_states], rest[ctx.num_states : -1]
        parts = x.new_empty(sum(weight.numel() for weight in weights)).split(
            [weight.numel() for weight in weights]
        )
        found = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        return (*[None] * 5, torch.empty_like(x), *map(torch.empty_like, states), *found)
