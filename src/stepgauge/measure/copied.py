"""Collectives by copy engines, checked and timed like those of libraries."""

import torch
import torch.distributed as dist

from stepgauge.measure.devices import synchronize
from stepgauge.measure.known_values import differing, pattern, tile
from stepgauge.parallel.communication.copied_collectives import BOXES, CopiedCollective
from stepgauge.parallel.communication.peer_memory import copies_reach, on_one_machine
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.comm import CommSpec


class CheckedCopies:
    """The copied collective of a spec on this rank. `run` runs it.

    Raises ValueError, on all ranks, if they cannot copy into each other's memory.
    """

    sent_bytes = 0  # our own ring sends nothing

    def __init__(self, spec: CommSpec, device: torch.device):
        self.spec, self.device = spec, device
        self._rank = dist.get_rank()
        reach = on_one_machine(None) if device.type == "cpu" else copies_reach(None, device)
        if not reach:
            raise ValueError(
                "backend is 'copies', which needs ranks on one machine whose GPUs can reach each "
                "other's memory (peer access; nvidia-smi topo -p2p rw lists it)"
            )
        assert dist.group.WORLD is not None, "there is a default process group"
        self._copies = CopiedCollective(
            spec.op,
            spec.count,
            getattr(torch, spec.dtype),
            device,
            dist.group.WORLD,
            pulls=spec.algorithm == "pull",
        )
        self.run = self._copies.run

    def wrong(self) -> int:
        """Runs the collective on known values and returns the number of wrong elements on all ranks.

        Runs before it replace what earlier ones left in the boxes.
        """
        for _ in range(BOXES):
            self._copies.input().fill_(-1)
            self.run()
        wrong = max(self._wrong_in_run() for _ in range(BOXES))  # each box is used
        synchronize(self.device)
        return sum(gathered_objects(wrong))

    def _wrong_in_run(self) -> int:
        """Sends known values once, and returns the number of wrong elements that this rank gets."""
        whole, op = self._copies.input(), self.spec.op
        first = self._rank * whole.numel() if op == "all_gather" else 0
        tile(whole, pattern(self._rank, self.device), first)
        wrong = 0
        for sender, part in self.run().items():
            begin = {"all_gather": sender, "all_to_all": self._rank, "send_recv": 0}[op]
            wrong += differing(part, pattern(sender, self.device), begin * part.numel())
        return wrong
