"""Boxes on every rank of one machine that all its ranks can read and write, and flags that say what
is there.

On GPUs this is torch's symmetric memory. Its own signals are kernels that spin on a multiprocessor,
and so do NCCL's receives: a matrix product beside one takes a quarter longer. Here a flag is a copy
of four bytes, and a stream waits for it by the driver's cuStreamWaitValue32: no multiprocessor has
to do with either. The way out is a wait in torch's own symmetric memory that holds none
(`torch.distributed._symmetric_memory` has only `wait_signal`, a kernel).
"""

import ctypes
import os
import platform
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.runtime.world import gathered_objects

SHARED_MEMORY = Path("/dev/shm")
VALUES = 1024  # a flag takes the same value again after so many messages; more than there are boxes
ALIGNMENT = 512
_WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
WAIT_S = 120.0  # on a CPU, as a collective's


class PeerMemory(ABC):
    """Boxes of `box_bytes`, and flags, on every rank. A stream is a handle, None the current one."""

    _box_bytes: int
    _boxes: list[Tensor]  # of each rank, all of them as bytes

    def box(self, rank: int, number: int) -> Tensor:
        return self._boxes[rank][number * self._box_bytes : (number + 1) * self._box_bytes]

    def address(self, rank: int, number: int) -> int:
        """Of the same box."""
        return self._boxes[rank].data_ptr() + number * self._box_bytes

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Bytes between addresses."""

    @abstractmethod
    def tell(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        """Sets a flag of a rank, after what the stream has copied before."""

    @abstractmethod
    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        """Makes the stream wait until a flag of this rank has the value."""


def peer_memory(
    boxes: int, box_bytes: int, flags: int, device: torch.device, group: dist.ProcessGroup | None
) -> PeerMemory:
    """So many boxes and flags on each rank of the group, all flags 0. All ranks must call it."""
    chosen = group or dist.group.WORLD
    assert chosen is not None, "ranks are in a process group"
    make = GpuMemory if device.type == "cuda" else SharedMemory
    return make(boxes, box_bytes, flags, device, chosen)


def on_one_machine(group: dist.ProcessGroup | None) -> bool:
    """All ranks must call it."""
    return len(set(gathered_objects(platform.node(), group))) == 1


class GpuMemory(PeerMemory):
    def __init__(
        self,
        boxes: int,
        box_bytes: int,
        flags: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ):
        import torch.distributed._symmetric_memory as symmetric

        self._device, self._box_bytes = device, box_bytes
        size = boxes * box_bytes
        # The tensor owns the memory; what the handle gives only points into it.
        self._own = symmetric.empty(size + 4 * flags, dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(self._own, group.group_name)
        ranks = range(group.size())
        self._boxes = [handle.get_buffer(rank, (size,), torch.uint8) for rank in ranks]
        self._flags = [handle.get_buffer(rank, (flags,), torch.int32, size // 4) for rank in ranks]
        self._flag_addresses = [flags.data_ptr() for flags in self._flags]
        self._own_flags = self._flag_addresses[dist.get_rank(group)]
        self._values = torch.arange(VALUES, dtype=torch.int32, device=device)
        self._first_value = self._values.data_ptr()
        self._driver = Driver()
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._driver.copy(target, source, nbytes, self._handle(stream))

    def tell(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        source = self._first_value + 4 * (value % VALUES)
        self._driver.copy(self._flag_addresses[rank] + 4 * flag, source, 4, self._handle(stream))

    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        self._driver.wait(self._handle(stream), self._own_flags + 4 * flag, value % VALUES)

    def _handle(self, stream: int | None) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if stream is None else stream


class Driver:
    """Two functions of the CUDA driver, which torch has not or at more host time: a stream that
    waits for a value, and a copy between addresses.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._copy = driver.cuStreamWaitValue32_v2, driver.cuMemcpyAsync
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def wait(self, stream: int, address: int, value: int) -> None:
        """The stream waits until the 32 bits there are the value."""
        if error := self._wait(stream, address, value, _WAIT_UNTIL_EQUAL):
            raise RuntimeError(f"the CUDA driver refuses to wait for a value: error {error}")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if error := self._copy(target, source, nbytes, stream):
            raise RuntimeError(f"the CUDA driver refuses to copy {nbytes} bytes: error {error}")


class SharedMemory(PeerMemory):
    """For ranks on CPUs: files that live in memory, without names once all have mapped them. The
    host waits itself.
    """

    def __init__(
        self,
        boxes: int,
        box_bytes: int,
        flags: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ):
        self._box_bytes = box_bytes
        size = boxes * box_bytes + 4 * flags
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        handle, path = tempfile.mkstemp(prefix="stepgauge-", dir=folder)
        try:
            os.ftruncate(handle, size)
            os.close(handle)
            paths = gathered_objects(path, group)
            whole = [
                torch.from_file(there, shared=True, size=size, dtype=torch.uint8) for there in paths
            ]
            dist.barrier(group)
        finally:
            Path(path).unlink()
        self._boxes = [memory[: boxes * box_bytes] for memory in whole]
        self._flags = [memory[boxes * box_bytes :].view(torch.int32) for memory in whole]
        self._mine = self._flags[dist.get_rank(group)]

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        ctypes.memmove(target, source, nbytes)

    def tell(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        self._flags[rank][flag] = value % VALUES

    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        end = time.monotonic() + WAIT_S
        while int(self._mine[flag]) != value % VALUES:
            if time.monotonic() > end:
                raise RuntimeError(f"a peer has sent nothing for {WAIT_S:g} s")
            time.sleep(0)
