"""Memory on every rank of one machine that all its ranks can write: over NVLink on GPUs, shared memory on CPUs."""

import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


class PeerMemory:
    """`bytes` of memory on the device of each rank of the group. To be made by all ranks at the same time.

    on_rank[r] is rank r's, as bytes that this rank reads and writes; the rank's own is among them.

    Raises ValueError, on every rank, where the ranks are not all on one machine or cannot write to each other.
    """

    def __init__(self, bytes: int, device: torch.device, group: dist.ProcessGroup):
        self.group = group
        hosts: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(hosts, platform.node(), group=group)
        if len(set(hosts)) > 1:
            raise ValueError(f"ranks are on the machines {', '.join(sorted(set(hosts)))}; peer copies stay within one")
        self._handle: Any = None  # on GPUs
        self.on_rank = self._on_gpus(bytes, device) if device.type == "cuda" else self._on_cpus(bytes)

    def barrier(self, channel: int) -> None:
        """What any rank wrote before is there for all ranks after. On a GPU its stream waits, and the host goes on.

        Barriers of different channels (0 to 7) may be under way at the same time, each in a stream of its own.
        """
        if self._handle is not None:
            self._handle.barrier(channel=channel)
        else:
            dist.barrier(self.group)

    def _on_gpus(self, bytes: int, device: torch.device) -> list[Tensor]:
        # The tensor owns the memory; the buffers only point into it.
        self._own = symmetric.empty(bytes, dtype=torch.uint8, device=device)
        try:
            self._handle = symmetric.rendezvous(self._own, self.group.group_name)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the ranks' GPUs cannot write to each other: {reason}") from error
        return [self._handle.get_buffer(rank, (bytes,), torch.uint8) for rank in range(self.group.size())]

    def _on_cpus(self, bytes: int) -> list[Tensor]:
        handle, path = tempfile.mkstemp(prefix="stepgauge-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        try:
            os.ftruncate(handle, bytes)
            os.close(handle)
            paths: list[str] = [""] * self.group.size()
            dist.all_gather_object(paths, path, group=self.group)
            mapped = [torch.from_file(there, shared=True, size=bytes, dtype=torch.uint8) for there in paths]
            dist.barrier(self.group)
        finally:
            Path(path).unlink()
        return mapped
