"""All-reduce, reduce-scatter and all-gather as rings: each rank sends to the next rank and receives
from the previous one.

The tensor is split into N chunks of nearly equal size. In the N - 1 steps of the reduce-scatter,
chunk c travels once around the ring and every rank adds its values, until rank c has the sum. In the
N - 1 steps of the all-gather, the sums travel once around. For K bytes a rank sends 2(N - 1) chunks,
which are 2(N - 1)·K/N bytes (Patarasuk and Yuan 2009).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Called after each step with the step's name and the current chunks.
Watch = Callable[[str, list[Tensor]], None]


class Ring:
    """A ring of the group's ranks. `sent_bytes` counts the bytes that this rank has sent."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent_bytes = 0

    def all_reduce(self, tensor: Tensor, *, watch: Watch = lambda step, chunks: None) -> None:
        """Sums over ranks, in place. The tensor must be contiguous and have the same shape on all
        ranks.
        """
        chunks = self._chunks(tensor)
        self._reduce_chunks(chunks, watch)
        self._gather_chunks(chunks, watch)

    def reduce_scatter(self, input: Tensor) -> Tensor:
        """Returns this rank's chunk of the sum over ranks. Does not change the input."""
        chunks = self._chunks(input.clone())
        self._reduce_chunks(chunks)
        return chunks[self.rank]

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Writes every rank's input into its chunk of the output. Raises ValueError if the input does
        not have the size of its chunk.
        """
        chunks = self._chunks(output)
        own = chunks[self.rank]
        if input.numel() != own.numel():
            raise ValueError(
                f"input has {input.numel()} elements; rank {self.rank}'s chunk of the output has "
                f"{own.numel()}"
            )
        own.copy_(input.view(-1))
        self._gather_chunks(chunks)

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        """Returns N views. If N does not divide the count, the first ones have one element more."""
        return list(tensor.view(-1).tensor_split(self.size))

    def _reduce_chunks(
        self, chunks: list[Tensor], watch: Watch = lambda step, chunks: None
    ) -> None:
        buffer = torch.empty_like(chunks[0])  # the first chunk is the longest
        for step in range(self.size - 1):
            target = chunks[(self.rank - step - 2) % self.size]
            received = buffer[: target.numel()]
            self._exchange(chunks[(self.rank - step - 1) % self.size], received)
            target += received
            watch(f"reduce-scatter {step + 1}", chunks)

    def _gather_chunks(
        self, chunks: list[Tensor], watch: Watch = lambda step, chunks: None
    ) -> None:
        for step in range(self.size - 1):
            self._exchange(
                chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size]
            )
            watch(f"all-gather {step + 1}", chunks)

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        """Sends to the next rank and receives from the previous one, both at once: if all ranks sent
        first, they would deadlock.
        """
        transfers = [
            dist.P2POp(call, tensor, group=self.group, group_peer=(self.rank + offset) % self.size)
            for call, tensor, offset in ((dist.isend, sent, 1), (dist.irecv, received, -1))
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        self.sent_bytes += sent.numel() * sent.element_size()
