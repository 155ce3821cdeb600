"""The memory of a rank that torch does not count."""

from collections.abc import Iterable, Iterator

from stepgauge.cost.memory.parts import ASSUMED, Item
from stepgauge.cost.operations.terms import TRANSFER, Term
from stepgauge.cost.streams.program import Operations
from stepgauge.spec.hardware import CUDA_CONTEXT
from stepgauge.spec.layout import Layout
from stepgauge.spec.units import MIB

# Buffers of an NCCL communicator (assumed: 16 channels of 4 MiB for each of three protocols are less than
# 200 MiB). Each axis has its own.
COMMUNICATOR = 200 * MIB


def outside(layout: Layout, *stages: Operations) -> list[Item]:
    """Returns the parts for a rank that runs these stages."""
    items = [Item("CUDA context", CUDA_CONTEXT, ASSUMED)]
    if buffers := max(sum(_peer_buffers(stage)) for stage in stages):
        items.append(Item("buffers for other ranks", buffers))
    if layout.sizes:
        items.append(Item("communicators", COMMUNICATOR * len(layout.sizes), ASSUMED))
    return items


def _peer_buffers(stage: Operations) -> Iterator[float]:
    """Yields the bytes of memory that other ranks can reach, which the caching allocator does not have.

    With overlap, tensor parallelism has four boxes (tensor_parallel/exchange.py).
    Exchanged heads have two outboxes (communication/copied_all_to_all.py), counted as if all ranks were
    GPUs of one machine.
    """
    if stage.share.overlap:
        yield 4 * _largest(m for m in stage.forward() if m.axis == "tensor" and m.hidden_by)
    if stage.share.ulysses:
        yield 2 * _largest(m for m in stage.forward() if m.operation == TRANSFER)


def _largest(messages: Iterable[Term]) -> float:
    return max((float(message.sizes[0]) for message in messages), default=0.0)
