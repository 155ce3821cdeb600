"""How calls are timed; on a GPU also that they are captured, and what a failed capture leaves."""

import math

import pytest
import torch

from stepgauge.calibrate import timing
from stepgauge.calibrate.grids import GPU
from stepgauge.calibrate.operations import operations
from stepgauge.calibrate.timing import time_of
from stepgauge.runtime.recording import on_capture_stream, record_repeated
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.fallbacks import requested_kernels
from stepgauge.spec.record import Record

NAMES = list(operations(GPU))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_cpu_is_timed_without_a_stream_or_a_graph():
    calls = []
    timing = time_of(lambda: lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert timing.us > 0 and not timing.at_host_pace
    assert len(calls) == 1 + 2 + 3 * 2  # once, to see how many, and three loops of two


class Event:
    """Reads a clock that calls move on."""

    clock = 0.0

    def __init__(self, device, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e3


def test_turns_time_the_operation_and_not_what_runs_between(monkeypatch):
    monkeypatch.setattr(timing.torch, "Event", Event)
    ran = []

    def taking(name, us):
        def call():
            ran.append(name)
            Event.clock += us

        return call

    turn = timing.Turn(
        taking("product", 40.0), 3, timing.OtherWork(taking("pass", 50.0), 50.0), 120.0
    )
    assert turn.times(torch.device("cpu"), 2) == pytest.approx([120.0, 120.0])
    assert ran == ["pass", "pass", "product", "product", "product"] * 2


def test_a_gpu_works_for_a_while_before_the_clock_runs():
    calls, gpu = [], torch.device("cuda")
    timing.heat(lambda: calls.append(1), 2e3, timing.heat_of(20, gpu))
    assert len(calls) == 50, "100 ms of calls of 2 ms"
    assert timing.heat_of(1000, gpu) == 3.0, "of many shapes each is warm from the one before"
    assert timing.heat_of(20, torch.device("cpu")) == 0.0, "it holds its clock"


@pytest.mark.parametrize(
    ("operation", "ours"),
    [
        ("attention triton backward bf16", ["attention triton"]),
        ("optimizer fused fp32", ["optimizer fused"]),
        ("attention sdpa forward bf16", []),
        ("matmul nt bf16", []),
    ],
)
def test_launches_in_cpp_are_built_for_a_kernel_of_ours(operation, ours):
    spec = {"operation": operation, "device": "cuda"}
    assert requested_kernels(Record(kind=CalibrationSpec.kind, spec=spec)) == ours


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_each_operation_is_captured_and_its_device_time_told(name):
    """The smallest shape of each: what the host needs for it is longer than it takes."""
    operation, device = operations(GPU)[name], torch.device("cuda")
    sizes = min(operation.grid, key=math.prod)
    timing = time_of(lambda: operation.make(*sizes, device), device, 1.0)
    assert timing.us > 0 and not timing.at_host_pace


@pytest.mark.gpu
@needs_gpu
def test_after_a_capture_that_failed_all_goes_on_as_before():
    device = torch.device("cuda")

    def waits():
        x = torch.ones(64, device=device)
        return lambda: (x + 1).sum().item()

    for _ in range(2):  # the second begins with what the first left
        timing = time_of(waits, device, 0.1)
        assert timing.us > 0 and timing.at_host_pace
        torch.cuda.empty_cache()
        assert torch.randn(1000, device=device).std() > 0.5
    with on_capture_stream(device):
        x, count = torch.zeros(1, device=device), 3
        replay = record_repeated(lambda: x.add_(1), count, device)
        assert replay is not None
        replay()
        assert x.item() == count
