"""Memory on every rank of one machine that all its ranks can write: over NVLink on GPUs, shared
memory on CPUs.
"""

import ctypes
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

SHARED_MEMORY = Path("/dev/shm")
CHANNELS = 4
ROUNDS = 1024  # after which flags take the same values again; even
_WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


def peer_memory(
    bytes: int, device: torch.device, group: dist.ProcessGroup
) -> "SharedMemory | GpuMemory":
    """`bytes` of memory on the device of each rank of the group. To be called by all ranks at the
    same time.

    on_rank[r] of it is rank r's, as bytes that this rank reads and writes; the rank's own is among
    them.

    Raises ValueError, on every rank, where the ranks are not all on one machine or cannot write to
    each other.
    """
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, platform.node(), group=group)
    if len(set(hosts)) > 1:
        raise ValueError(
            f"ranks are on the machines {', '.join(sorted(set(hosts)))}; peer copies stay within one"
        )
    return GpuMemory(bytes, device, group) if device.type == "cuda" else SharedMemory(bytes, group)


class SharedMemory:
    """For ranks on CPUs: files that live in memory, without names once all have mapped them."""

    def __init__(self, bytes: int, group: dist.ProcessGroup):
        self.group = group
        handle, path = tempfile.mkstemp(
            prefix="stepgauge-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        )
        try:
            os.ftruncate(handle, bytes)
            os.close(handle)
            paths: list[str] = [""] * group.size()
            dist.all_gather_object(paths, path, group=group)
            self.on_rank = [
                torch.from_file(there, shared=True, size=bytes, dtype=torch.uint8)
                for there in paths
            ]
            dist.barrier(group)
        finally:
            Path(path).unlink()

    def barrier(self, channel: int) -> None:
        """What any rank wrote before is there for all ranks after."""
        dist.barrier(self.group)


class GpuMemory:
    """For ranks on GPUs: symmetric memory of torch.

    Its own barrier is a kernel that spins on a multiprocessor, and a matrix product that counts on
    all of them then takes up to twice as long. Here a rank's arrival is a copy of four bytes, and
    streams wait for it by themselves.
    """

    def __init__(self, bytes: int, device: torch.device, group: dist.ProcessGroup):
        rank, ranks = dist.get_rank(group), group.size()
        self._device = device
        # The tensor owns the memory; what the handle gives only points into it.
        self._own = symmetric.empty(
            bytes + 4 * CHANNELS * 2 * ranks, dtype=torch.uint8, device=device
        ).zero_()
        try:
            handle = symmetric.rendezvous(self._own, group.group_name)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the ranks' GPUs cannot write to each other: {reason}") from error
        self.on_rank = [handle.get_buffer(rank, (bytes,), torch.uint8) for rank in range(ranks)]
        # A rank has two flags for each channel and sender, for even and odd rounds: a peer that has
        # seen our arrival may be at its next barrier before we have seen its own.
        shape = (CHANNELS, 2, ranks)
        flags_on = [
            handle.get_buffer(rank, shape, torch.int32, bytes // 4) for rank in range(ranks)
        ]
        peers = [peer for peer in range(ranks) if peer != rank]
        self._theirs = [
            [[flags_on[p][channel, odd, rank] for p in peers] for odd in (0, 1)]
            for channel in range(CHANNELS)
        ]
        self._ours = [
            [[flags_on[rank][channel, odd, peer].data_ptr() for peer in peers] for odd in (0, 1)]
            for channel in range(CHANNELS)
        ]
        self._values = torch.arange(ROUNDS, dtype=torch.int32, device=device).unbind()
        self._round = [0] * CHANNELS
        self._wait_value = _stream_wait_value()
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def barrier(self, channel: int) -> None:
        """What any rank wrote before, in its current stream, is there for all ranks after, in
        theirs.

        The host goes on. Channels (0 to 3) are independent; each belongs to one stream.
        """
        self._round[channel] = (self._round[channel] + 1) % ROUNDS
        value = self._round[channel]
        # A flag is copied after the data, in the same stream: where it is seen the data has
        # arrived.
        for flag in self._theirs[channel][value % 2]:
            flag.copy_(self._values[value])
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._ours[channel][value % 2]:
            self._wait_value(stream, address, value)


def _stream_wait_value() -> Callable[[int, int, int], None]:
    """A function (stream, address, value): the stream waits until the 32 bits there are the value."""
    driver = ctypes.CDLL("libcuda.so.1")
    wait = driver.cuStreamWaitValue32_v2
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def wait_value(stream: int, address: int, value: int) -> None:
        if error := wait(stream, address, value, _WAIT_UNTIL_EQUAL):
            raise RuntimeError(
                f"the CUDA driver refuses to wait for a value in memory: error {error}"
            )

    return wait_value
