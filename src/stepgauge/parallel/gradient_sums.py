"""Gradients of which each rank of a tensor axis has found a part, summed when backward ends."""

import functools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stepgauge.parallel.parameter_hooks import num_hooks, taking_hooks
from stepgauge.parallel.present_backward import adds_to, at_end_of_backward
from stepgauge.parallel.residual_stream import ResidualStream


class SumsTogether:
    """Sums the gradients of parameters that every rank has in one all-reduce a backward: one a
    gradient stops the computation each time, 33 us of a block's 10 ms on two H200.

    A gradient that others would see before backward ends is summed at once: another hook of its
    parameter (a data axis has such), autograd.grad, a graph of the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stream: ResidualStream):
        self._stream = stream
        # By the parameter's number: its gradient and what `.grad` was, or None where `.grad` is
        # the gradient.
        self._waiting: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        for number, parameter in enumerate(parameters):
            with taking_hooks(parameter):
                parameter.register_hook(functools.partial(self._arrive, number))

    def _parameter(self, number: int) -> nn.Parameter:
        parameter = self._parameters[number]()
        assert parameter is not None, "its hook was called"
        return parameter

    def _arrive(self, number: int, gradient: Tensor) -> Tensor:
        parameter = self._parameter(number)
        if _is_seen_by_others(parameter, gradient):
            return self._stream.reduced(gradient)
        if not self._waiting:
            at_end_of_backward(self._sum, gradient.device)
        if number not in self._waiting:
            before = parameter.grad
            self._waiting[number] = None if before is None else (gradient, before.clone())
        elif (entry := self._waiting[number]) is not None:  # of a checkpoint's own backward
            self._waiting[number] = entry[0] + gradient, entry[1]
        return gradient

    @torch.no_grad()
    def _sum(self, failed: bool) -> None:
        """Of a backward that raised, what had arrived: `.grad` means the same then."""
        waiting, self._waiting = self._waiting, {}
        parts = {}
        for number in sorted(waiting):  # alike on all ranks
            entry, own = waiting[number], self._parameter(number).grad
            assert own is not None, "no hook but this one saw it"
            parts[number] = own if entry is None else entry[0]
        for number, whole in self._summed(parts):
            parameter, entry = self._parameter(number), waiting[number]
            if entry is None:
                parameter.grad = whole
            elif parameter.grad is not None:
                torch.add(entry[1], whole, out=parameter.grad)

    def _summed(self, parts: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        for dtype in dict.fromkeys(part.dtype for part in parts.values()):
            own = {number: part for number, part in parts.items() if part.dtype == dtype}
            flat = self._stream.reduced(torch.cat([part.flatten() for part in own.values()]))
            pieces = flat.split([part.numel() for part in own.values()])
            for (number, part), piece in zip(own.items(), pieces, strict=True):
                yield number, piece.view(part.shape)


def _is_seen_by_others(parameter: nn.Parameter, gradient: Tensor) -> bool:
    if num_hooks(parameter) > 1 or torch.is_grad_enabled() or gradient.is_sparse:
        return True
    return not adds_to(parameter)
