"""Times how much later a kernel starts if the host launches it than in a CUDA graph of equal kernels.

Short operations are timed in such graphs (calibrate/timing.py). Launched one by one, they leave a gap
between each other, even if the host is far ahead.
"""

import statistics

import torch

from stepgauge.calibrate import calls
from stepgauge.runtime.recording import Call, on_capture_stream, record_repeated
from stepgauge.spec.calibration import OperationTable

CALLS, ROUNDS = 200, 9
NUMEL = 2560 * 2560  # a cast of 10 us on an H200, about as long as the host needs to launch it
LEAST_US = 0.01  # a hardware file has no time of zero
AHEAD, WIDTH = 6, 8192  # products that keep the GPU busy while the host launches; 10 ms on an H200


def measure(device: torch.device) -> OperationTable:
    """Returns the microseconds of the gap, as the only row.

    Raises RuntimeError if the host launches so slowly that the gap would be the host's time.
    """
    with on_capture_stream(device):
        call = calls.cast(torch.float32, torch.bfloat16, NUMEL, device)
        product = calls.matmul("nt", torch.bfloat16, WIDTH, WIDTH, WIDTH, device)
        call()
        replay = record_repeated(call, CALLS, device)
        if replay is None:
            raise RuntimeError("a cast cannot be recorded as a CUDA graph, so the gap is not known")
        launched, replayed = (
            statistics.median(_behind_products(timed, count, product) for _ in range(ROUNDS))
            for timed, count in ((call, CALLS), (replay, 1))
        )
    return OperationTable(("kernels",), ((1, max(LEAST_US, launched - replayed)),))


def _behind_products(call: Call, count: int, product: Call) -> float:
    """Returns the microseconds of `count` calls, divided by CALLS, that are launched while products run."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(AHEAD):
        product()
    before.record()
    for _ in range(count):
        call()
    if before.query():
        raise RuntimeError("the host launches too slowly to time the gap between kernels")
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3 / CALLS
