"""Memory on every rank of one machine that all its ranks can write: over NVLink on GPUs, shared memory on CPUs."""

import ctypes
import itertools
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

SHARED_MEMORY = Path("/dev/shm")
CHANNELS = 4
ROUNDS = 1024  # after which flags take the same values again; even
_WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


def peer_memory(bytes: int, device: torch.device, group: dist.ProcessGroup) -> "SharedMemory | GpuMemory":
    """`bytes` of memory on the device of each rank of the group. To be called by all ranks at the same time.

    on_rank[r] of it is rank r's, as bytes that this rank reads and writes; the rank's own is among them.

    Raises ValueError, on every rank, where the ranks are not all on one machine or cannot write to each other.
    """
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, platform.node(), group=group)
    if len(set(hosts)) > 1:
        raise ValueError(f"ranks are on the machines {', '.join(sorted(set(hosts)))}; peer copies stay within one")
    return GpuMemory(bytes, device, group) if device.type == "cuda" else SharedMemory(bytes, group)


class SharedMemory:
    """For ranks on CPUs: files that live in memory, without names once all have mapped them.

    What is asked for on a channel is done when the call returns.
    """

    def __init__(self, bytes: int, group: dist.ProcessGroup):
        self.group = group
        handle, path = tempfile.mkstemp(prefix="stepgauge-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        try:
            os.ftruncate(handle, bytes)
            os.close(handle)
            paths: list[str] = [""] * group.size()
            dist.all_gather_object(paths, path, group=group)
            self.on_rank = [torch.from_file(there, shared=True, size=bytes, dtype=torch.uint8) for there in paths]
            dist.barrier(group)
        finally:
            Path(path).unlink()

    def begin(self, channel: int) -> None: ...

    def end(self, channel: int) -> None: ...

    def copy(self, channel: int, target: int, source: int, bytes: int) -> None:
        ctypes.memmove(target, source, bytes)

    def barrier(self, channel: int) -> None:
        """What any rank wrote before is there for all ranks after."""
        dist.barrier(self.group)

    def stream(self, channel: int) -> None: ...


class GpuMemory:
    """For ranks on GPUs: symmetric memory of torch, and a stream for each channel. The host waits for nothing.

    Its own barrier is a kernel that spins on a multiprocessor, and a matrix product that counts on all of them then
    takes up to twice as long. Here a rank's arrival is a copy of four bytes, and streams wait for it by themselves.
    The driver is called directly: torch takes several times as long to launch a copy.
    """

    def __init__(self, bytes: int, device: torch.device, group: dist.ProcessGroup):
        rank, ranks = dist.get_rank(group), group.size()
        self._device = device
        # The tensor owns the memory; what the handle gives only points into it.
        self._own = symmetric.empty(bytes + 4 * CHANNELS * 2 * ranks, dtype=torch.uint8, device=device).zero_()
        try:
            handle = symmetric.rendezvous(self._own, group.group_name)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the ranks' GPUs cannot write to each other: {reason}") from error
        self.on_rank = [handle.get_buffer(rank, (bytes,), torch.uint8) for rank in range(ranks)]
        # A rank has two flags for each channel and sender, for even and odd rounds: a peer that has seen our arrival
        # may be at its next barrier before we have seen its own.
        shape = (CHANNELS, 2, ranks)
        flags_on = [handle.get_buffer(rank, shape, torch.int32, bytes // 4) for rank in range(ranks)]
        peers = [peer for peer in range(ranks) if peer != rank]
        channels_and_odds = list(itertools.product(range(CHANNELS), (0, 1)))
        self._theirs = {at: [flags_on[peer][*at, rank].data_ptr() for peer in peers] for at in channels_and_odds}
        self._ours = {at: [flags_on[rank][*at, peer].data_ptr() for peer in peers] for at in channels_and_odds}
        self._values = torch.arange(ROUNDS, dtype=torch.int32, device=device)
        self._round = [0] * CHANNELS
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(CHANNELS)]
        self._handles = [stream.cuda_stream for stream in self._streams]
        address, number = ctypes.c_uint64, ctypes.c_uint
        self._copy = _driver("cuMemcpyDtoDAsync_v2", address, address, ctypes.c_size_t, ctypes.c_void_p)
        self._wait_value = _driver("cuStreamWaitValue32_v2", ctypes.c_void_p, address, number, number)
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def begin(self, channel: int) -> None:
        """What is asked for on the channel from now on comes after what the current stream has been given."""
        self._streams[channel].wait_event(torch.cuda.current_stream(self._device).record_event())

    def end(self, channel: int) -> torch.cuda.Event:
        """The event of all that has been asked for on the channel."""
        return self._streams[channel].record_event()

    def copy(self, channel: int, target: int, source: int, bytes: int) -> None:
        """Between addresses of this process, a peer's memory among them."""
        if bytes:
            self._copy(target, source, bytes, self._handles[channel])

    def barrier(self, channel: int) -> None:
        """What any rank wrote before, on its channel, is there for all ranks after, on theirs.

        Channels (0 to 3) are independent.
        """
        value = self._round[channel] = (self._round[channel] + 1) % ROUNDS
        stream, at = self._handles[channel], (channel, value % 2)
        # A flag is copied after the data, in the same stream: where it is seen the data has arrived.
        source = self._values.data_ptr() + 4 * value
        for flag in self._theirs[at]:
            self._copy(flag, source, 4, stream)
        for flag in self._ours[at]:
            self._wait_value(stream, flag, value, _WAIT_UNTIL_EQUAL)

    def stream(self, channel: int) -> int:
        """The address of the channel's stream, for kernels."""
        return self._handles[channel]


def _driver(name: str, *types: Any) -> Callable[..., None]:
    """That function of the CUDA driver. Raises RuntimeError where it gives an error."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = types

    def refused(error: int, *_: Any) -> None:
        if error:
            raise RuntimeError(f"the CUDA driver's {name} ends with error {error}")

    function.errcheck = refused
    return function
