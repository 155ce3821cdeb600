"""Captures work in a CUDA graph and replays it, for calls that run faster than they are launched.

Autograd runs a backward on the stream of its forward, and a capture covers one stream. So captured
work is built, warmed up and captured on the same stream: `capture_stream`.
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
WARM_UPS = 3  # for the set-up of libraries, autotuning, compilation and the first gradients


class CannotRecordError(RuntimeError):
    """The work cannot be captured, for example because it waits for the device.

    The process can continue.
    """


def record(run: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[T, Call]:
    """Captures a call of the function. Returns its result, valid after each replay, and the replay.

    pool  memory that several captures share; they must be replayed in the order of their capture

    Raises CannotRecordError and OutOfMemoryError.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    # thread_local, because NCCL's own threads query events during the capture
    recording = torch.cuda.graph(
        graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"
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


def record_repeated(call: Call, count: int, device: torch.device) -> Call | None:
    """Captures `count` calls in one graph and returns the replay; None if that is not possible.

    Raises OutOfMemoryError.
    """

    def calls() -> None:
        for _ in range(count):
            call()

    try:
        return record(calls, device)[1]
    except CannotRecordError:
        return None


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the device's stream for captures: only one, since cuBLAS has a workspace per stream."""
    return _stream(_index(device))


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextlib.contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Makes the capture stream current while the block runs; no effect on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(capture_stream(device)):
        yield


class Recorder(Protocol):
    """Captures work: CudaGraphs, or in CPU tests a stand-in that runs the function again."""

    def warm_up(self, run: Call) -> None:
        """Runs the function that is captured next, on the capture stream."""

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Call]:
        """Captures a call. Returns its result, valid after each replay, and the replay."""


class CudaGraphs:
    """Captures CUDA graphs. Those with the same slot share a memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[object, Any] = collections.defaultdict(torch.cuda.graph_pool_handle)

    def warm_up(self, run: Call) -> None:
        stream, current = capture_stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Call]:
        return record(run, self._device, self._pools[slot])


def parameter_locations(module: nn.Module) -> list[tuple[int, bool]]:
    """Returns address and requires_grad of each parameter, which a captured graph cannot change."""
    return [(p.data_ptr(), p.requires_grad) for p in module.parameters()]


def _end_failed_capture(pool: tuple[int, int], device: torch.device) -> None:
    """Restores torch's state after a failed capture.

    If CUDA fails to end a capture, torch (2.11 to 2.13) leaves its allocator and its random number
    generator as if the capture were still running: empty_cache and randn raise from then on. A
    successful capture restores the generator; for the allocator there is no public function.
    The way out: a torch.cuda.graph that cleans up if it raises.
    """
    torch.cuda.synchronize(device)
    index = _index(device)
    with contextlib.suppress(RuntimeError):  # the capture did end, and failed later
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=capture_stream(device)):
        torch.zeros(1, device=device)
