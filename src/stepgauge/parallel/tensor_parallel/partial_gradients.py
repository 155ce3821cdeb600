"""Finds parameters that get only a part of their gradient on each rank, in the graph of the first
training forward.

The graph is followed from the module's outputs in the order of backward. Behind the sum of a row
layer, a gradient covers only the rank's features, until the input of a column layer or of a gather
sums it over ranks. Behind the gather of a stream that is cut by sequence, a gradient covers only the
rank's piece. A parameter that is reached there must have a rule that sums its gradient.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.autograd.parameter_hooks import tensor_hooks, without_wrapper_hooks
from stepgauge.parallel.autograd.running_backward import is_inside_func_transform
from stepgauge.parallel.fsdp.unsharded_unit import GatherWeights
from stepgauge.parallel.tensor_parallel import overlapped, residual_stream, vocabulary_loss
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.spec.first_names import first_names

FEATURES, PIECE = "features", "piece"  # the part of a gradient that a rank has
STREAM = "the output of a row or embedding layer"
# The part that a rank has of the gradients behind a function's backward; None: all of it.
PART_BEHIND: Mapping[type[torch.autograd.Function], str | None] = {
    residual_stream._Sum: FEATURES,
    residual_stream._ReduceScatter: FEATURES,
    overlapped._Row: FEATURES,
    vocabulary_loss._CrossEntropy: FEATURES,
    vocabulary_loss._FusedCrossEntropy: FEATURES,
    residual_stream._Gather: PIECE,
    residual_stream._Join: PIECE,
    overlapped._Column: PIECE,
    residual_stream._SumOfGradients: None,
    residual_stream._Split: None,
}
SUMS_OF_FEATURES = (residual_stream._Sum, residual_stream._ReduceScatter, overlapped._Row)
ADVICE = {
    FEATURES: "because features between a column and a row layer depend on it; give a module that "
    "works on these features the rule heads, and a module whose input is used by more than its "
    "columns the rule gather",
    PIECE: "because it is used on a piece of the sequence; give its module the rule sequence",
}


class PartialGradientCheck:
    """A forward hook that raises RuntimeError if a parameter would get only a part of its gradient.

    It checks the first forward with gradients that reaches parameters, on the host and without
    communication. It does not see into compiled modules and reentrant checkpoints. Behind
    autograd functions of other packages, and for parameters with a hook of the user, it assumes that
    they sum the gradient.

    ignored  names of parameters that are cut or whose gradients are summed
    """

    def __init__(self, ignored: set[str], stream: ResidualStream):
        self._ignored, self._stream, self._is_done = ignored, stream, False

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._is_done or not torch.is_grad_enabled():
            return
        if not self._stream.communicates or is_inside_func_transform():
            return
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        found: dict[str, set[str]] = {FEATURES: set(), PIECE: set()}
        reaches_parameters = False
        for part, variable in _reached(output):
            if variable is None:
                found[FEATURES].add(STREAM)
                continue
            reaches_parameters |= isinstance(variable, nn.Parameter)  # torch's FSDP has its own
            if (name := names.get(variable)) is not None:
                has_hook = without_wrapper_hooks(tensor_hooks(variable))
                is_ignored = not {name, _before_replacement(name)}.isdisjoint(self._ignored)
                if part is not None and not is_ignored and not has_hook:
                    found[part].add(name)
        for part, partial in found.items():
            if partial:
                raise RuntimeError(
                    f"each rank has only its part of the gradient of {listed(partial)}, "
                    f"{ADVICE[part]} (docs/tensor-parallel.md)"
                )
        self._is_done = reaches_parameters


def _reached(output: Any) -> Iterator[tuple[str | None, Tensor | None]]:
    """Yields the parameters that backward reaches, with the part that a rank has of the gradient.
    Yields None for the sum of a row or embedding layer whose gradient covers only some features.
    """
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    waiting: list[tuple[Any, int, str | None]] = [(x.grad_fn, x.output_nr, None) for x in tensors]
    visited = set()
    while waiting:
        node, number, part = edge = waiting.pop()
        if node is None or edge in visited:
            continue
        visited.add(edge)
        function = getattr(node, "_forward_cls", None)  # None for torch's own functions
        if function is not None and issubclass(function, GatherWeights):
            yield part, node.unsharded.parameters[number]
            continue
        if function in SUMS_OF_FEATURES and part == FEATURES:
            yield part, None
        if hasattr(node, "variable"):
            yield part, node.variable
        if function is not None:
            part = _part_behind(function, part)
        waiting += [(*following, part) for following in node.next_functions]


def _part_behind(function: type, part: str | None) -> str | None:
    if function in PART_BEHIND:
        return PART_BEHIND[function]
    return part if function.__module__.startswith("stepgauge.") else None


def _before_replacement(name: str) -> str:
    """Returns the name of the parameter that weight normalization or pruning replaced by this one."""
    name = re.sub(r"parametrizations\.(\w+)\.original\d?$", r"\1", name)
    return re.sub(r"_(orig|g|v)$", "", name)


def listed(names: set[str]) -> str:
    """Returns the first three names, and the number of the others."""
    return first_names(sorted(names - {STREAM} or names), 3)  # parameters say more than the stream
