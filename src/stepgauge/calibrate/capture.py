"""Calls as one CUDA graph: short ones would else be timed at the pace of the host.

Autograd runs a backward on the stream that its forward ran on, so that the operands are made on the
stream that captures. A backward on another stream ends the capture.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

Call = Callable[[], object]


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one on which operands are made, timed and captured; cuBLAS keeps a workspace a stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_its_stream(device: torch.device) -> Iterator[None]:
    """Of a GPU that stream; elsewhere nothing changes."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(stream_of(device)):
        yield


def captured(call: Call, count: int, device: torch.device) -> Call | None:
    """So many calls as one; None where they cannot be captured, as those that wait for the device.

    Raises OutOfMemoryError.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream_of(device)):
            for _ in range(count):
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _end_failed_capture(pool, device)
        return None
    return graph.replay


def _end_failed_capture(pool: tuple[int, int], device: torch.device) -> None:
    """Where CUDA refuses the end of a capture, torch (2.11 to 2.13) leaves its allocator and its
    generator of random numbers as if it still ran: empty_cache and randn raise from then on. The
    end of a capture that succeeds brings back the generator; for the allocator nothing is public.
    The way out: a torch.cuda.graph that ends what it began also where it raises.
    """
    torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # this capture has ended, and failed after that
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream_of(device)):
        torch.zeros(1, device=device)
