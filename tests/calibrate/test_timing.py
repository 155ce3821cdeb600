"""Timing of calls; on a GPU also their capture, and the state after a failed capture."""

import math

import pytest
import torch

from stepgauge.calibrate import launch_gap, timing
from stepgauge.calibrate.grids import GPU
from stepgauge.calibrate.operations import operations
from stepgauge.calibrate.run import names
from stepgauge.calibrate.timing import time_of
from stepgauge.runtime.recording import on_capture_stream, record_repeated
from stepgauge.spec.calibration import LAUNCH_GAP, CalibrationSpec
from stepgauge.spec.fallbacks import requested_kernels
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record

NAMES = list(operations(GPU))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_cpu_is_timed_without_a_stream_or_a_graph():
    calls = []
    timing = time_of(lambda: lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert timing.us > 0 and not timing.at_host_pace
    assert len(calls) == 1 + 2 + 3 * 2  # once, to see how many, and three loops of two


class Event:
    """A torch.Event of a simulated clock."""

    clock = 0.0

    def __init__(self, device, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e3


def test_turns_time_the_operation_without_the_other_work(monkeypatch):
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


def test_a_gpu_is_warmed_up_before_it_is_timed():
    calls, gpu = [], torch.device("cuda")
    timing.warm_up(lambda: calls.append(1), 2e3, timing.warm_up_ms_for(20, gpu))
    assert len(calls) == 50, "100 ms of calls of 2 ms"
    assert timing.warm_up_ms_for(1000, gpu) == 3.0, "many shapes keep it warm for each other"
    assert timing.warm_up_ms_for(20, torch.device("cpu")) == 0.0, "it holds its clock"


@pytest.mark.parametrize(
    ("operation", "ours"),
    [
        ("attention triton backward bf16", ["attention triton"]),
        ("optimizer fused fp32", ["optimizer fused"]),
        ("attention sdpa forward bf16", []),
        ("matmul nt bf16", []),
    ],
)
def test_compiled_launches_are_built_for_our_kernels_only(operation, ours):
    spec = {"operation": operation, "device": "cuda"}
    assert requested_kernels(Record(kind=CalibrationSpec.kind, spec=spec)) == ours


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_each_operation_is_captured_and_timed(name):
    """Uses the smallest shapes, whose launches take longer than the device."""
    operation, device = operations(GPU)[name], torch.device("cuda")
    sizes = min(operation.grid, key=math.prod)
    timing = time_of(lambda: operation.make(*sizes, device), device, 1.0)
    assert timing.us > 0 and not timing.at_host_pace


@pytest.mark.gpu
@pytest.mark.alone  # only calls that take less than timing.SHORT_US are at the host's pace
@needs_gpu
def test_a_failed_capture_leaves_no_trace():
    device = torch.device("cuda")

    def waits():
        x = torch.ones(64, device=device)
        return lambda: (x + 1).sum().item()

    for _ in range(2):  # the second starts in the state that the first left
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


def test_the_gap_before_a_launched_kernel_is_timed_on_gpus_only():
    with_gap = [name for name in ("cuda", "mps", "cpu") if LAUNCH_GAP in names(torch.device(name))]
    assert with_gap == ["cuda"]


def test_a_gap_that_cannot_be_measured_is_still_a_time_that_a_file_may_have(monkeypatch, tmp_path):
    """A graph that is slower than the launches, by noise."""
    monkeypatch.setattr(launch_gap, "record_repeated", lambda call, count, device: "replay")
    monkeypatch.setattr(
        launch_gap,
        "_behind_products",
        lambda call, count, product: 9.0 if call == "replay" else 8.0,
    )
    monkeypatch.setattr(launch_gap, "NUMEL", 16)
    monkeypatch.setattr(launch_gap, "WIDTH", 4)
    table = launch_gap.measure(torch.device("cpu"))
    HardwareFile(name="made", operations={LAUNCH_GAP: table}).write(tmp_path / "made.json")
    assert HardwareFile.read(tmp_path / "made.json").operations[LAUNCH_GAP] == table


@pytest.mark.gpu
@needs_gpu
def test_a_launched_kernel_starts_later_than_in_a_graph():
    """1.1 to 1.6 us on H200s."""
    ((_, us),) = launch_gap.measure(torch.device("cuda")).rows
    assert 0.2 < us < 10.0
