"""Gradients of which each rank of a tensor axis finds a part: which, and the hooks that sum them."""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.gradient_sums import SumsTogether
from stepgauge.parallel.parameter_hooks import taking_hooks
from stepgauge.parallel.replicas import registrations
from stepgauge.parallel.residual_stream import ResidualStream
from stepgauge.parallel.tensor_cuts import CutParameter, Cuts, Rules
from stepgauge.spec.plan.tensor import KINDS


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """A gradient of which each rank has found a part, or of a cut some rows of it.

    cut  of a parameter with rows that several ranks have; None: all ranks have all of it
    """

    stream: ResidualStream
    cut: CutParameter | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.cut is None:
            return self.stream.reduced(gradient)
        found = []
        pieces = self.cut.pieces(gradient)
        for section, (_, copies, piece) in zip(self.cut.cut.sections, pieces, strict=True):
            if copies > 1:
                # Zeros where other ranks have other heads: one collective of the whole group.
                whole = gradient.new_zeros(section.rows, *gradient.shape[1:])
                rows = section.part(self.stream.rank, self.stream.ranks)
                whole[rows] = piece
                piece = self.stream.reduced(whole)[rows]
            found.append(piece)
        return torch.cat(found)


def gradient_sums(
    module: nn.Module, rules: Rules, cuts: Cuts, stream: ResidualStream
) -> dict[str, GradientSum]:
    """By name: of whole parameters of which each rank sees some tokens or heads, and of rows that
    several ranks have.
    """
    summed = set()
    for name, rule in rules:
        kind = KINDS[rule.kind]
        if kind.sums and (stream.by_sequence or rule.kind == "heads"):
            own = module.get_submodule(name).named_parameters()
            summed |= {parameter for key, parameter in own if key not in kind.cuts}
    sums = {}
    for name, parameter in module.named_parameters():
        cut = cuts.get(name)
        has_copies = cut is not None and max(cut.copies) > 1
        if parameter.is_floating_point() and (has_copies or parameter in summed):
            sums[name] = GradientSum(stream, cut)
    return sums


class Hooking:
    """Hooks that sum gradients, of the parameters that a module has when it is called: a deep copy
    and `load_state_dict(assign=True)` leave others in their place. Before forward; all ranks alike.
    """

    def __init__(self, sums: Mapping[str, GradientSum], stream: ResidualStream):
        self._sums, self._stream = sums, stream
        self._looked = (0, 0)  # at which module, after how many registrations
        self._hooked: dict[str, weakref.ref[nn.Parameter]] = {}

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._looked == (id(module), registrations()):
            return
        together = []
        for name, each in self._sums.items():
            parameter = module.get_parameter(name)
            if name in self._hooked and self._hooked[name]() is parameter:
                continue
            self._hooked[name] = weakref.ref(parameter)
            if each.cut is None:
                together.append(parameter)
                continue
            with taking_hooks(parameter):
                parameter.register_hook(each)
        SumsTogether(together, self._stream)
        self._looked = id(module), registrations()
