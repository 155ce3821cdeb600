"""All-reduce, reduce-scatter and all-gather as rings: each rank sends to the next and receives from
the one before.

The tensor is cut into N chunks, as equal as its count allows. In N - 1 steps of the reduce-scatter
chunk c travels once around and is added to on its way, until rank c has its sum; in N - 1 steps of
the all-gather the sums travel once around. A rank sends 2(N - 1) chunks: 2(N - 1)·K/N bytes for K
bytes (Patarasuk and Yuan 2009), whatever N.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Called after each step with its name and the chunks as they are then.
Watch = Callable[[str, list[Tensor]], None]


class Ring:
    """The ranks of a group in a circle. `sent_bytes` counts what this rank has sent through it."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent_bytes = 0

    def all_reduce(self, tensor: Tensor, *, watch: Watch = lambda step, chunks: None) -> None:
        """The sum over ranks, in place. The tensor is contiguous and of the same shape on all
        ranks.
        """
        chunks = self.chunks(tensor)
        self._reduce(chunks, watch)
        self._spread(chunks, watch)

    def reduce_scatter(self, input: Tensor) -> Tensor:
        """This rank's chunk of the sum over ranks. The input is left as it is."""
        chunks = self.chunks(input.clone())
        self._reduce(chunks)
        return chunks[self.rank]

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Every rank's input as its chunk of the output, whose count the inputs' counts add up to."""
        chunks = self.chunks(output)
        if input.numel() != chunks[self.rank].numel():
            raise ValueError(f"input has {input.numel()} elements; rank {self.rank}'s chunk of the output has "
                             f"{chunks[self.rank].numel()}")  # fmt: skip
        chunks[self.rank].copy_(input.view(-1))
        self._spread(chunks)

    def chunks(self, tensor: Tensor) -> list[Tensor]:
        """N views; the first ones are an element longer where the count is no multiple of N."""
        return list(tensor.view(-1).tensor_split(self.size))

    def _reduce(self, chunks: list[Tensor], watch: Watch = lambda step, chunks: None) -> None:
        received = torch.empty_like(chunks[0])  # the longest
        for step in range(self.size - 1):
            target = chunks[(self.rank - step - 2) % self.size]
            arriving = received[: target.numel()]
            self._exchange(chunks[(self.rank - step - 1) % self.size], arriving)
            target += arriving
            watch(f"reduce-scatter {step + 1}", chunks)

    def _spread(self, chunks: list[Tensor], watch: Watch = lambda step, chunks: None) -> None:
        for step in range(self.size - 1):
            self._exchange(
                chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size]
            )
            watch(f"all-gather {step + 1}", chunks)

    def _exchange(self, leaving: Tensor, arriving: Tensor) -> None:
        """Both at once: all ranks sending first would wait for each other."""
        transfers = [
            dist.P2POp(call, tensor, group=self.group, group_peer=(self.rank + way) % self.size)
            for call, tensor, way in ((dist.isend, leaving, 1), (dist.irecv, arriving, -1))
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        self.sent_bytes += leaving.numel() * leaving.element_size()
