"""Times how much later a kernel starts if the host launches it than in a CUDA graph.

Short operations are timed in CUDA graphs (calibrate/timing.py). Launched one by one, they leave a gap
between each other, even if the host is far ahead.
"""

import statistics

import torch

from stepgauge.calibrate import calls
from stepgauge.calibrate.timing import loop
from stepgauge.runtime.recording import Call, on_capture_stream, record_repeated
from stepgauge.spec.calibration import OperationTable

CALLS, ROUNDS = 200, 9
NUMEL = 2560 * 2560  # a cast of 10 us on an H200, about as long as the host needs to launch it
AHEAD, WIDTH = 6, 8192  # products that keep the GPU busy while the host launches; 10 ms on an H200


def measure(device: torch.device) -> OperationTable:
    """Returns the microseconds of the gap, as the only row."""
    with on_capture_stream(device):
        call = calls.cast(torch.float32, torch.bfloat16, NUMEL, device)
        product = calls.matmul("nt", torch.bfloat16, WIDTH, WIDTH, WIDTH, device)
        call()
        replay = record_repeated(call, CALLS, device)
        assert replay is not None, "a cast can be recorded"

        def us(timed: Call, count: int) -> float:
            for _ in range(AHEAD):
                product()
            return loop(timed, device, count) * count / CALLS

        pairs = [(us(call, CALLS), us(replay, 1)) for _ in range(ROUNDS)]
    launched, replayed = (statistics.median(times) for times in zip(*pairs, strict=True))
    return OperationTable(("kernels",), ((1, max(0.0, launched - replayed)),))
