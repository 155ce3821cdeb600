"""Work that is recorded once as a CUDA graph and replayed: few launches for the host."""

import collections
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")
WARM_UPS = 3  # libraries set themselves up, autotuners and compilers run, gradients come into being


class Recorder(Protocol):
    """What records: CudaGraphs, or in tests on a CPU something that runs the function again."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs what is recorded next, where it is recorded."""

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Callable[[], None]]:
        """What the function gives, to be read after a replay; and the replay."""


class CudaGraphs:
    """Records on a stream of its own: autograd runs a backward where its forward ran, and both must
    be recorded on one stream.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pools: dict[object, Any] = collections.defaultdict(torch.cuda.graph_pool_handle)

    def warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], T], slot: object) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's own threads ask for events meanwhile
        recording = torch.cuda.graph(
            graph, pool=self._pools[slot], stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with recording:
                outputs = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(
                f"it cannot be recorded as CUDA graphs: {reason}; run it without"
            ) from error
        return outputs, graph.replay


def places(module: nn.Module) -> list[tuple[int, bool]]:
    """Where each parameter lies, and whether it is trained: what a recording holds for good."""
    return [(p.data_ptr(), p.requires_grad) for p in module.parameters()]
