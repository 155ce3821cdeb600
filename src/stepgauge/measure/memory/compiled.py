"""What backward of compiled code keeps, and where in the program each of it was made.

No dispatch mode sees into compiled code. But torch.compile's partitioner, which chooses what is
kept, has the traced program before it, and autograd's node of the compiled forward holds the
tensors: two lists in the same order.
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
from stepgauge.measure.memory.storage_tracker import is_own, short_path

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclasses.dataclass(frozen=True)
class Origin:
    operator: str
    module: str = ""
    line: str = ""


class KeptByGraphs(CustomPartitionerFn):
    """Partitions as torch.compile does, and notes where what each forward graph keeps is made."""

    def __init__(self) -> None:
        self._origins: dict[Signature, list[Origin]] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Graphs compiled within are known; one from autograd's cache has no partitioner."""
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
        """Of the code that the compiler keeps: it is torch's own partition, whoever notes it."""
        return type(self).__name__

    def of(self, loss: Tensor) -> Iterator[tuple[Tensor, Origin]]:
        """Every tensor that autograd holds for the backward of the loss, weights and batch among
        them.

        A graph that runs several times is a part a time: graph.0, graph.1, ... in the order of the
        forward pass.
        """
        nodes = [(node, tensors) for node in _nodes(loss) if (tensors := held_tensors(node))]
        signatures = [_signature(tensors) for _, tensors in nodes]
        runs = collections.Counter(signatures)
        number: collections.Counter[Signature] = collections.Counter()
        for (node, tensors), signature in zip(nodes, signatures, strict=True):
            origins = self._origins.get(signature, [Origin(node.name())] * len(tensors))
            part = (
                f"graph.{number[signature]}."
                if runs[signature] > 1 and signature in self._origins
                else ""
            )
            number[signature] += 1
            for tensor, origin in zip(tensors, origins, strict=True):
                yield (
                    tensor,
                    dataclasses.replace(origin, module=f"{part}{origin.module}".rstrip(".")),
                )


def _signature(tensors: Sequence[Tensor]) -> Signature:
    """Shapes and types; of a symbolic size the value that it was compiled with."""
    return tuple((tuple(map(_size, tensor.shape)), tensor.dtype) for tensor in tensors)


def _size(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else size.node.hint


def _nodes(loss: Tensor) -> list[Any]:
    """Autograd's nodes behind the loss, in the order in which forward made them."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return sorted(found, key=forward_number)


def _origin(node: fx.Node) -> Origin:
    """Operator that made the storage, through views; module and line of the first that has any."""
    chain = [node]
    while (before := _viewed(chain[-1])) is not None:
        chain.append(before)
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


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a view is a view of; of one of several results, the operator that gave them."""
    before = node.args[0] if node.args else None
    is_view = (
        getattr(node.target, "is_view", False) or getattr(node.target, "__name__", "") == "getitem"
    )
    return before if is_view and isinstance(before, fx.Node) else None


def _line(stack: str) -> str:
    """The innermost line of the program that is neither torch's nor of this folder."""
    frames = [match for match in FRAME.finditer(stack) if is_own(match["file"])]
    return f"{short_path(frames[-1]['file'])}:{frames[-1]['line']}" if frames else ""
