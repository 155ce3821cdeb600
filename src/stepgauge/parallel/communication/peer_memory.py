"""Memory that all ranks of one machine can read and write: fixed-size buffers, called boxes, and flags
that say when a box is full or free.

On GPUs this is torch's symmetric memory. Its own signals are kernels that spin on a multiprocessor,
as NCCL's receives do: a matrix product that runs at the same time takes a quarter longer. Here a stream
sets a flag with the driver's cuStreamWriteValue32 and waits for one with cuStreamWaitValue32 or
cuStreamBatchMemOp. Neither needs a multiprocessor. The way out: a wait in torch's symmetric memory that
needs none either (`torch.distributed._symmetric_memory` has only `wait_signal`, a kernel). A flag that was a
copy of four bytes took 9 us of the engine that copies to other GPUs.
"""

import ctypes
import itertools
import os
import platform
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.units import round_up

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 512
_WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2  # CU_STREAM_MEM_OP_...
WAIT_S = 120.0  # timeout on a CPU, the same as that of a collective


class PeerMemory(ABC):
    """Boxes of `box_bytes` each, and flags, on every rank.

    A `stream` argument is a CUDA stream's handle; None is the current stream.
    """

    _box_bytes: int
    _boxes: list[Tensor]  # by rank: all boxes of that rank as one tensor of bytes

    def box(self, rank: int, number: int) -> Tensor:
        return self._boxes[rank][number * self._box_bytes : (number + 1) * self._box_bytes]

    def address(self, rank: int, number: int) -> int:
        """Returns the address of `box(rank, number)`."""
        return self._boxes[rank].data_ptr() + number * self._box_bytes

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Copies bytes from the source address to the target address."""

    @abstractmethod
    def set_flag(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        """Sets a flag of a rank once the stream has done its earlier copies."""

    @abstractmethod
    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        """Makes the stream wait until a flag of this rank has the value."""

    @abstractmethod
    def consume(self, flags: tuple[int, ...], stream: int | None = None) -> None:
        """Makes the stream wait until each of these flags of this rank is 1, and sets it to 0."""


def peer_memory(
    boxes: int, box_bytes: int, flags: int, device: torch.device, group: dist.ProcessGroup | None
) -> PeerMemory:
    """Allocates boxes and flags on each rank of the group; all flags start at 0. All ranks must call
    it.
    """
    chosen = group or dist.group.WORLD
    assert chosen is not None, "there is a default process group"
    make = GpuMemory if device.type == "cuda" else SharedMemory
    return make(boxes, box_bytes, flags, device, chosen)


def on_one_machine(group: dist.ProcessGroup | None) -> bool:
    """Returns True if all ranks of the group run on one machine. All ranks must call it."""
    return len(set(gathered_objects(platform.node(), group))) == 1


def copies_reach(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Returns True if all ranks have GPUs, on one machine, that can read each other's memory.

    All ranks of the group must call it, each with its own device, and get the same answer. CPUs do not
    communicate for it, so the devices must be of one type.
    """
    if device.type != "cuda":
        return False
    own = torch.cuda.current_device() if device.index is None else device.index
    ranks = gathered_objects((platform.node(), own), group)
    # A rank that sees only its own GPU cannot ask about the others.
    others = [index for _, index in ranks if index != own and index < torch.cuda.device_count()]
    reaches = all(torch.cuda.can_device_access_peer(own, other) for other in others)
    return len({node for node, _ in ranks}) == 1 and all(gathered_objects(reaches, group))


def connected_gpu_counts(numbers: Sequence[int]) -> list[int]:
    """Returns those numbers n of ranks for which the first n GPUs of this machine reach each other's
    memory. Starts CUDA in this process.
    """
    reach = torch.cuda.can_device_access_peer
    return [
        number
        for number in numbers
        if number <= torch.cuda.device_count()
        and all(reach(*pair) for pair in itertools.permutations(range(number), 2))
    ]


def in_sending_order(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Returns the other ranks as this rank sends to them, and as they send to it: 2, 3, 0 and 0, 3, 2 for
    rank 1 of 4. Each begins with its right neighbour, so that no two send to the same rank at once.
    """
    receivers = [(rank + step) % ranks for step in range(1, ranks)]
    return receivers, receivers[::-1]


class HasBoxes(Protocol):
    """An object of one rank of a group, with boxes of `box_bytes` on a device."""

    device: torch.device
    box_bytes: int


Boxes = TypeVar("Boxes", bound=HasBoxes)


def with_room(
    by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Boxes],
    group: dist.ProcessGroup,
    device: torch.device,
    nbytes: int,
    make: Callable[[dist.ProcessGroup, torch.device, int], Boxes],
) -> Boxes:
    """Returns the group's object with boxes of at least `nbytes`. If it is missing or its boxes are too
    small, all ranks make one with larger boxes; the old one is freed once nothing refers to it.
    """
    boxes = by_group.get(group)
    if boxes is None or boxes.box_bytes < nbytes or boxes.device != device:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # `make` also waits for all ranks
        with torch.inference_mode(False):
            boxes = by_group[group] = make(group, device, round_up(nbytes, ALIGNMENT))
    return boxes


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
        # This tensor owns the memory; the buffers of the handle only point into it.
        self._own = symmetric.empty(size + 4 * flags, dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(self._own, group.group_name)
        ranks = range(group.size())
        self._boxes = [handle.get_buffer(rank, (size,), torch.uint8) for rank in ranks]
        self._flags = [handle.get_buffer(rank, (flags,), torch.int32, size // 4) for rank in ranks]
        self._flag_addresses = [flags.data_ptr() for flags in self._flags]
        self._own_flags = self._flag_addresses[dist.get_rank(group)]
        self._driver = Driver()
        self._consumptions: dict[tuple[int, ...], MemoryOperations] = {}
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._driver.copy(target, source, nbytes, self._handle(stream))

    def set_flag(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        address = self._flag_addresses[rank] + 4 * flag
        self._driver.write(self._handle(stream), address, value)

    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        self._driver.wait(self._handle(stream), self._own_flags + 4 * flag, value)

    def consume(self, flags: tuple[int, ...], stream: int | None = None) -> None:
        if flags not in self._consumptions:
            self._consumptions[flags] = MemoryOperations(
                [
                    (kind, self._own_flags + 4 * flag, value)
                    for flag in flags
                    for kind, value in ((_WAIT_VALUE_32, 1), (_WRITE_VALUE_32, 0))
                ]
            )
        self._driver.run(self._handle(stream), self._consumptions[flags])

    def _handle(self, stream: int | None) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if stream is None else stream


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of the driver: the members that waiting and writing share, and its size."""

    _fields_ = [
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_uint64 * 2),
    ]


class MemoryOperations:
    """Waits for values and writes of values that a stream does one after the other.

    operations  the kind, the address and the value of each
    """

    def __init__(self, operations: Sequence[tuple[int, int, int]]):
        self.count = len(operations)
        self.array = (MemoryOperation * self.count)()
        for target, (kind, address, value) in zip(self.array, operations, strict=True):
            target.kind, target.address, target.value = kind, address, value
            target.flags = _WAIT_UNTIL_EQUAL if kind == _WAIT_VALUE_32 else 0


class Driver:
    """Functions of the CUDA driver: torch has no stream that waits for a value, and its copies cost
    more host time.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._copy = driver.cuStreamWaitValue32_v2, driver.cuMemcpyAsync
        self._write, self._run = driver.cuStreamWriteValue32_v2, driver.cuStreamBatchMemOp_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._write.argtypes = self._wait.argtypes
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]

    def run(self, stream: int, operations: MemoryOperations) -> None:
        if error := self._run(stream, operations.count, operations.array, 0):
            raise RuntimeError(f"cuStreamBatchMemOp failed: CUDA error {error}")

    def wait(self, stream: int, address: int, value: int) -> None:
        """Makes the stream wait until the 32 bits at the address equal the value."""
        if error := self._wait(stream, address, value, _WAIT_UNTIL_EQUAL):
            raise RuntimeError(f"cuStreamWaitValue32 failed: CUDA error {error}")

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes 32 bits to the address once the stream has done its earlier work, which is visible to
        other GPUs before.
        """
        if error := self._write(stream, address, value, 0):
            raise RuntimeError(f"cuStreamWriteValue32 failed: CUDA error {error}")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if error := self._copy(target, source, nbytes, stream):
            raise RuntimeError(f"cuMemcpyAsync of {nbytes} bytes failed: CUDA error {error}")


class SharedMemory(PeerMemory):
    """Peer memory of ranks on CPUs: files in memory, which are unlinked once all ranks have mapped
    them. The host itself copies and waits.
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
            mapped = [
                torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in paths
            ]
            dist.barrier(group)
        finally:
            Path(path).unlink()
        self._boxes = [memory[: boxes * box_bytes] for memory in mapped]
        self._flags = [memory[boxes * box_bytes :].view(torch.int32) for memory in mapped]
        self._own_flags = self._flags[dist.get_rank(group)]

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        ctypes.memmove(target, source, nbytes)

    def set_flag(self, rank: int, flag: int, value: int, stream: int | None = None) -> None:
        self._flags[rank][flag] = value

    def wait(self, flag: int, value: int, stream: int | None = None) -> None:
        deadline = time.monotonic() + WAIT_S
        while int(self._own_flags[flag]) != value:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another rank has sent nothing for {WAIT_S:g} s")
            time.sleep(0)

    def consume(self, flags: tuple[int, ...], stream: int | None = None) -> None:
        for flag in flags:
            self.wait(flag, 1)
            self._own_flags[flag] = 0
