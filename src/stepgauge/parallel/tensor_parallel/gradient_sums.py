"""Sums gradients over the ranks of a tensor axis, where each rank computes only a summand: for whole
parameters that see one piece of the sequence or some of the heads, and for rows that several ranks
have.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stepgauge.parallel.autograd.parameter_hooks import num_hooks, requiring_grad
from stepgauge.parallel.autograd.running_backward import accumulates_into, at_end_of_backward
from stepgauge.parallel.replicas import registrations
from stepgauge.parallel.tensor_parallel.cuts import CutParameter, Cuts
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_parallel.rules import WHOLE_KINDS, Rules, is_inside
from stepgauge.spec.plan.tensor import KINDS, Section


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """Sums a parameter's gradient over ranks.

    cut  for a cut parameter, only the sections that several ranks have are summed; None: every rank
         has the whole parameter
    """

    stream: ResidualStream
    cut: CutParameter | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.cut is None:
            return self.stream.reduce(gradient)
        sections = []
        pieces = self.cut.pieces(gradient)
        for section, (_, copies, piece) in zip(self.cut.cut.sections, pieces, strict=True):
            sections.append(self._sum_section(piece, section) if copies > 1 else piece)
        return torch.cat(sections, self.cut.dim)

    def _sum_section(self, piece: Tensor, section: Section) -> Tensor:
        """Sums a section over the ranks that have the same rows. All ranks take part in one
        collective on the whole section, with zeros in the rows that they do not have.
        """
        assert self.cut is not None, "only cut parameters have sections"
        shape = list(piece.shape)
        shape[self.cut.dim] = section.rows
        whole = piece.new_zeros(shape)
        part = section.part(self.stream.rank, self.stream.ranks)
        rows = self.cut.dim, part.start, part.stop - part.start
        whole.narrow(*rows).copy_(piece)
        return self.stream.reduce(whole).narrow(*rows)


def gradient_sums(
    module: nn.Module, rules: Rules, cuts: Cuts, stream: ResidualStream
) -> dict[str, GradientSum]:
    """Returns, by parameter name, how the gradients that need it are summed."""
    places = module.named_parameters(remove_duplicate=False)
    summed = {parameter for name, parameter in places if _is_summed(name, rules, stream)}
    sums = {}
    for name, parameter in module.named_parameters():
        cut = cuts.get(name)
        needs_sum = parameter in summed if cut is None else max(cut.copies) > 1
        if parameter.is_floating_point() and needs_sum:
            sums[name] = GradientSum(stream, cut)
    return sums


def _is_summed(name: str, rules: Rules, stream: ResidualStream) -> bool:
    """True if each rank computes a summand of the whole parameter's gradient. The rule of the innermost
    module decides, so a row inside a module with the rule heads keeps its bias.
    """
    layer = name.rpartition(".")[0]
    deciding = [
        (part, rule.kind)
        for part, rule in rules
        if is_inside(layer, part) and rule.kind in (*WHOLE_KINDS, "row")
    ]
    innermost = max((part for part, _ in deciding), key=len, default="")
    return any(
        KINDS[kind].sums and (stream.by_sequence or kind == "heads")
        for part, kind in deciding
        if part == innermost
    )


class SumHooks:
    """Registers the hooks that sum gradients, before each forward in which parameters are new.

    A deep copy and `load_state_dict(assign=True)` replace parameters, and the new ones have no
    hooks. All ranks must do the same.
    """

    def __init__(self, module: nn.Module, sums: Mapping[str, GradientSum], stream: ResidualStream):
        self._sums, self._stream = sums, stream
        self._checked = (0, 0)  # id of the module, and the number of registrations then
        self._hooked: dict[str, weakref.ref[nn.Parameter]] = {}
        self._handles = [module.register_forward_pre_hook(self)]
        self(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}

    def remove(self) -> None:
        """Removes the hooks of the module and of its parameters."""
        for handle in self._handles:
            handle.remove()

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._checked == (id(module), registrations()):
            return
        whole_parameters = []
        for name, gradient_sum in self._sums.items():
            parameter = module.get_parameter(name)
            if name in self._hooked and self._hooked[name]() is parameter:
                continue
            self._hooked[name] = weakref.ref(parameter)
            if gradient_sum.cut is None:
                whole_parameters.append(parameter)
                continue
            with requiring_grad(parameter):
                self._handles.append(parameter.register_hook(gradient_sum))
        self._handles += CombinedSum(whole_parameters, self._stream).handles
        self._checked = id(module), registrations()


class CombinedSum:
    """Sums the gradients of whole parameters in one all-reduce at the end of each backward. An
    all-reduce per gradient would stop the computation each time: 33 us of a block's 10 ms on two
    H200.

    A gradient is summed at once if something else reads it before backward ends: another hook of
    the parameter (such as a data axis has), autograd.grad, or a graph of the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stream: ResidualStream):
        self._stream = stream
        # Number of a parameter -> its gradient in this backward and its `.grad` before; None if it
        # had no `.grad`, which then becomes this gradient.
        self._waiting: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.handles: list[RemovableHandle] = []
        for number, parameter in enumerate(parameters):
            with requiring_grad(parameter):
                hook = functools.partial(self._on_gradient, number)
                self.handles.append(parameter.register_hook(hook))

    def _parameter(self, number: int) -> nn.Parameter:
        parameter = self._parameters[number]()
        assert parameter is not None, "its hook was called"
        return parameter

    def _on_gradient(self, number: int, gradient: Tensor) -> Tensor:
        parameter = self._parameter(number)
        if _is_read_during_backward(parameter, gradient):
            return self._stream.reduce(gradient)
        if not self._waiting:
            at_end_of_backward(self._sum_waiting, gradient.device)
        if number not in self._waiting:
            before = parameter.grad
            self._waiting[number] = None if before is None else (gradient, before.clone())
        elif (entry := self._waiting[number]) is not None:  # a nested backward (checkpoint)
            self._waiting[number] = entry[0] + gradient, entry[1]
        return gradient

    @torch.no_grad()
    def _sum_waiting(self, failed: bool) -> None:
        """Called when backward ends. If it raised, the gradients computed so far are summed, so that
        `.grad` has the same meaning as otherwise.
        """
        waiting, self._waiting = self._waiting, {}
        summands = {}
        for number in sorted(waiting):  # the same order on all ranks
            entry, gradient = waiting[number], self._parameter(number).grad
            assert gradient is not None, "backward has accumulated it"
            summands[number] = gradient if entry is None else entry[0]
        for number, total in self._sum_over_ranks(summands):
            parameter, entry = self._parameter(number), waiting[number]
            if entry is None:
                parameter.grad = total
            elif parameter.grad is not None:
                torch.add(entry[1], total, out=parameter.grad)

    def _sum_over_ranks(self, summands: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yields the sum of each tensor over ranks. Sends one message per dtype."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, summand in summands.items():
            by_dtype.setdefault(summand.dtype, []).append(number)
        for numbers in by_dtype.values():
            flat = torch.cat([summands[number].flatten() for number in numbers])
            sizes = [summands[number].numel() for number in numbers]
            totals = self._stream.reduce(flat).split(sizes)
            for number, total in zip(numbers, totals, strict=True):
                yield number, total.view(summands[number].shape)


def _is_read_during_backward(parameter: nn.Parameter, gradient: Tensor) -> bool:
    if num_hooks(parameter) > 1 or torch.is_grad_enabled() or gradient.is_sparse:
        return True
    return not accumulates_into(parameter)
