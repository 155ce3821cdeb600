"""Finds the tensors that compiled code keeps for backward, and the program lines that computed them.

A dispatch mode cannot see inside compiled code. But torch.compile's partitioner, which chooses the
kept tensors, sees the traced program, and autograd's node of the compiled forward holds the tensors.
Both list them in the same order.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from stepgauge.measure.memory.autograd_engine import forward_number, held_tensors
from stepgauge.measure.memory.storage_tracker import is_program_file, short_path

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operator, module and program line that computed a tensor."""

    operator: str
    module: str = ""
    line: str = ""


class KeptByGraphs(CustomPartitionerFn):
    """Partitions like torch.compile, and notes the origins of the tensors that each forward graph
    keeps.
    """

    def __init__(self) -> None:
        self._origins: dict[Signature, list[Origin]] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes the graphs that are compiled inside the context. Autograd's cache is off, because a
        cached graph is not partitioned again.
        """
        functorch, inductor = torch._functorch.config, torch._inductor.config
        with (
            functorch.patch(enable_autograd_cache=False),
            inductor.patch(custom_partitioner_fn=self),
        ):
            yield

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **settings)
        outputs: Any = forward.graph.output_node().args[0]
        kept = [
            node
            for node in outputs[settings["num_fwd_outputs"] :]
            if isinstance(node.meta.get("val"), Tensor)
        ]
        self._origins[_signature([node.meta["val"] for node in kept])] = [
            _origin(node) for node in kept
        ]
        return forward, backward

    def uuid(self) -> str:
        """Returns the key for the compiler's cache. It is the same for all instances, because all
        partition alike.
        """
        return type(self).__name__

    def of(self, loss: Tensor) -> Iterator[tuple[Tensor, Origin]]:
        """Yields every tensor that autograd holds for the loss's backward, including weights and the
        batch, with its origin.

        If a graph runs several times, the modules of its runs start with graph.0, graph.1, ... in
        the order of the forward.
        """
        nodes = [(node, tensors) for node in _nodes(loss) if (tensors := held_tensors(node))]
        signatures = [_signature(tensors) for _, tensors in nodes]
        runs = collections.Counter(signatures)
        number: collections.Counter[Signature] = collections.Counter()
        for (node, tensors), signature in zip(nodes, signatures, strict=True):
            origins = self._origins.get(signature, [Origin(node.name())] * len(tensors))
            is_repeated = runs[signature] > 1 and signature in self._origins
            prefix = f"graph.{number[signature]}." if is_repeated else ""
            number[signature] += 1
            for tensor, origin in zip(tensors, origins, strict=True):
                module = f"{prefix}{origin.module}".rstrip(".")
                yield tensor, dataclasses.replace(origin, module=module)


def _signature(tensors: Sequence[Tensor]) -> Signature:
    """Returns shapes and dtypes. A symbolic size becomes the value with which it was compiled."""
    return tuple((tuple(map(_size, tensor.shape)), tensor.dtype) for tensor in tensors)


def _size(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint


def _nodes(loss: Tensor) -> list[Any]:
    """Returns the autograd nodes of the loss, in the order of the forward."""
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return sorted(nodes, key=forward_number)


def _origin(node: fx.Node) -> Origin:
    """Follows views back to the operator that made the storage. Module and line are those of the first
    node on the way that has them.
    """
    chain = [node]
    while (base := _base_of_view(chain[-1])) is not None:
        chain.append(base)
    modules = [
        list(stack.values())[-1][0] for n in chain if (stack := n.meta.get("nn_module_stack"))
    ]
    lines = [line for n in chain if (line := _line(n.meta.get("stack_trace") or ""))]
    module = modules[0].removeprefix("L['self']").removeprefix(".") if modules else ""
    made_by = chain[-1]
    operator = made_by.meta.get("original_aten") or (
        "input" if made_by.op == "placeholder" else made_by.target
    )
    return Origin(
        str(operator).removeprefix("aten.").removesuffix(".default"),
        module,
        lines[0] if lines else "",
    )


def _base_of_view(node: fx.Node) -> fx.Node | None:
    """Returns the node that this one is a view of, or one of several results of, or else None."""
    base = node.args[0] if node.args else None
    is_view = (
        getattr(node.target, "is_view", False) or getattr(node.target, "__name__", "") == "getitem"
    )
    return base if is_view and isinstance(base, fx.Node) else None


def _line(stack: str) -> str:
    """Returns the innermost line of the stack that is outside of torch and this folder."""
    frames = [match for match in FRAME.finditer(stack) if is_program_file(match["file"])]
    return f"{short_path(frames[-1]['file'])}:{frames[-1]['line']}" if frames else ""
