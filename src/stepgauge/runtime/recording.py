"""Work that is recorded once as a CUDA graph and replayed: short calls are else launched slower than
they run.

Autograd runs a backward on the stream that its forward ran on, and a capture takes one stream: what
is recorded is made, warmed up and captured on the same one, `stream_of`.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")
Call = Callable[[], object]
WARM_UPS = 3  # libraries set themselves up, autotuners and compilers run, gradients come into being


class CannotRecordError(RuntimeError):
    """The work cannot be captured, as what waits for the device. The process can go on."""


def record(run: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[T, Call]:
    """What the function gives, to be read after a replay; and the replay.

    pool  memory that several recordings share, if they run one after the other as they were recorded

    Raises CannotRecordError, OutOfMemoryError.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    # thread_local: NCCL's own threads ask for events meanwhile
    recording = torch.cuda.graph(
        graph, pool=pool, stream=stream_of(device), capture_error_mode="thread_local"
    )
    try:
        with recording:
            outputs = run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _end_failed_capture(pool, device)
        reason = str(error).partition("\n")[0]
        raise CannotRecordError(
            f"it cannot be recorded as CUDA graphs: {reason}; run it without"
        ) from error
    return outputs, graph.replay


def repeated(call: Call, count: int, device: torch.device) -> Call | None:
    """So many calls as one recording; None where they cannot be recorded. Raises OutOfMemoryError."""

    def calls() -> None:
        for _ in range(count):
            call()

    try:
        return record(calls, device)[1]
    except CannotRecordError:
        return None


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one that records; one a device, since cuBLAS keeps a workspace a stream."""
    return _stream(_index(device))


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextlib.contextmanager
def on_its_stream(device: torch.device) -> Iterator[None]:
    """Of a GPU that stream; elsewhere nothing changes."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(stream_of(device)):
        yield


class Recorder(Protocol):
    """What records: CudaGraphs, or in tests on a CPU something that runs the function again."""

    def warm_up(self, run: Call) -> None:
        """Runs what is recorded next, where it is recorded."""

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Call]:
        """What the function gives, to be read after a replay; and the replay."""


class CudaGraphs:
    """Recordings of a slot share a memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[object, Any] = collections.defaultdict(torch.cuda.graph_pool_handle)

    def warm_up(self, run: Call) -> None:
        stream, current = stream_of(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Call]:
        return record(run, self._device, self._pools[slot])


def places(module: nn.Module) -> list[tuple[int, bool]]:
    """Where each parameter lies, and whether it is trained: what a recording holds for good."""
    return [(p.data_ptr(), p.requires_grad) for p in module.parameters()]


def _end_failed_capture(pool: tuple[int, int], device: torch.device) -> None:
    """Where CUDA refuses the end of a capture, torch (2.11 to 2.13) leaves its allocator and its
    generator of random numbers as if it still ran: empty_cache and randn raise from then on. The
    end of a capture that succeeds brings back the generator; for the allocator nothing is public.
    The way out: a torch.cuda.graph that ends what it began also where it raises.
    """
    torch.cuda.synchronize(device)
    index = _index(device)
    with contextlib.suppress(RuntimeError):  # this capture has ended, and failed after that
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream_of(device)):
        torch.zeros(1, device=device)
