"""Moves the keys of each rank around a ring to the queries of the others, and gradients back.

    with context.transport(k, v) as transport:
        for kv in transport.keys(): ...                    # of the other ranks, in order of plan_ring
        transport.add_gradients(source, (dk, dv), columns) # backward: once per step
        transport.own_gradients()                          # what the other ranks have added

kv is (2, B, K, T, D).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    def keys(self) -> Iterator[Tensor]:
        """Yields the keys and values of the other ranks, which have been in flight from the start."""

    def add_gradients(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        """Adds gradients of some of the keys of rank `source`, once per rank in the order of `keys`."""

    def own_gradients(self) -> list[Tensor]:
        """Returns what the other ranks have added for this rank's keys, to be summed by the caller.
        Must be called after the last `add_gradients`.
        """


class NoTransport:
    """Sends nothing, and uses the rank's own keys in place of the others'."""

    def __init__(self, kv: Tensor, ranks: int):
        self._kv, self._ranks = kv, ranks

    def keys(self) -> Iterator[Tensor]:
        yield from [self._kv] * (self._ranks - 1)

    def add_gradients(self, source: int, parts: Sequence[Tensor], columns: slice) -> None: ...

    def own_gradients(self) -> list[Tensor]:
        return []


class RingMessages:
    """Sends keys from each rank to the next. Gradients follow the keys of their rank around the ring
    and grow by each rank's part; sums of several parts travel in fp32 or wider.
    """

    def __init__(self, kv: Tensor, group: dist.ProcessGroup):
        self._kv, self._group = kv, group
        self._keys = _Shift(kv, group)
        self._gradients: _Shift | None = None

    def keys(self) -> Iterator[Tensor]:
        for step in range(1, self._group.size()):
            kv = self._keys.wait()
            if step < self._group.size() - 1:
                self._keys = _Shift(kv, self._group)
            yield kv

    def add_gradients(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        if self._gradients is None:
            sums = torch.zeros_like(self._kv)
        else:
            wide = torch.promote_types(self._kv.dtype, torch.float32)
            sums = self._gradients.wait().to(wide)
        for total, part in zip(sums, parts, strict=True):
            total[..., columns, :] += part
        self._gradients = _Shift(sums, self._group)

    def own_gradients(self) -> list[Tensor]:
        assert self._gradients is not None, "add_gradients has been called"
        return [self._gradients.wait()]

    def finish(self) -> None:
        """Waits for messages in flight, which a later receive would otherwise take for its own."""
        for shift in (self._keys, self._gradients):
            if shift is not None:
                shift.wait()


class _Shift:
    """Sends a tensor to the next rank while it receives one from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup):
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        following, previous = (
            dist.get_global_rank(group, (group.rank() + step) % group.size()) for step in (1, -1)
        )
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        """Returns the received tensor."""
        while self._works:
            self._works.pop().wait()
        return self._received
