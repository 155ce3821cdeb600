"""How the keys of each rank of a sequence get to the others' queries, and their gradients home.

    with context.travel(k, v) as travel:
        for kv in travel.keys(): ...       # of the other ranks, in the order of plan_ring
        travel.give(source, (dk, dv), columns)
        travel.home()                      # what the others say about this rank's keys

kv is (2, B, K, T, D).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Travel(Protocol):
    def keys(self) -> Iterator[Tensor]:
        """Those of the other ranks, on their way from the start on."""

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        """Gradients of some of the keys of `source`, once for each rank in the order of `keys`."""

    def home(self) -> list[Tensor]:
        """What the others gave this rank, to be added up; after the last `give`."""


class Staying:
    """Nothing is sent: the own keys stand for all others."""

    def __init__(self, kv: Tensor, ranks: int):
        self._kv, self._ranks = kv, ranks

    def keys(self) -> Iterator[Tensor]:
        yield from [self._kv] * (self._ranks - 1)

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None: ...

    def home(self) -> list[Tensor]:
        return []


class Messages:
    """Around a ring. Sums of gradients travel behind the keys, and in fp32 or wider once they are of
    two parts.
    """

    def __init__(self, kv: Tensor, group: dist.ProcessGroup):
        self._kv, self._group = kv, group
        self._arriving = _Arriving(kv, group)
        self._returning: _Arriving | None = None

    def keys(self) -> Iterator[Tensor]:
        for step in range(1, self._group.size()):
            kv = self._arriving.wait()
            if step < self._group.size() - 1:
                self._arriving = _Arriving(kv, self._group)
            yield kv

    def give(self, source: int, parts: Sequence[Tensor], columns: slice) -> None:
        if self._returning is None:
            sums = torch.zeros_like(self._kv)
        else:
            wide = torch.promote_types(self._kv.dtype, torch.float32)
            sums = self._returning.wait().to(wide)
        for total, part in zip(sums, parts, strict=True):
            total[..., columns, :] += part
        self._returning = _Arriving(sums, self._group)

    def home(self) -> list[Tensor]:
        assert self._returning is not None, "gradients were given"
        return [self._returning.wait()]

    def finish(self) -> None:
        """Waits for what is on its way, which the next message would else be taken for."""
        for each in (self._arriving, self._returning):
            if each is not None:
                each.wait()


class _Arriving:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

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
        while self._works:
            self._works.pop().wait()
        return self._received
