"""The overlap of profiled steps, from traces that contain only kernels, as on a GPU."""

import gzip
import json

import pytest
import torch

from stepgauge.bench import traced
from stepgauge.bench.traced import STEPS, trace_steps
from stepgauge.measure.profiler import ProfilerSchedule, profile_phases

PHASES = {"forward": lambda: None, "backward": lambda: None}


@pytest.fixture
def profiled(monkeypatch, gpu_trace):
    """Replaces the profiler: traces have a product of 100 µs, and 150 µs of NCCL that start in the
    middle of it.
    """

    def profile(phases, device, folder, *, schedule, kernels_only):
        assert kernels_only
        paths = []
        for number in range(schedule.repeat):
            trace = gpu_trace()
            trace.now += 1e6 * number
            trace.launch("void gemm()", 100)
            trace.free[20] = trace.free[7] - 50
            trace.launch("ncclDevKernel_AllReduce(x)", 150, stream=20)
            paths.append(trace.write(folder / f"{number}.json"))
        return paths, {"forward": [1.0, 2.0], "backward": [3.0, 5.0]}

    monkeypatch.setattr(traced, "profile_phases", profile)


def test_overlap_and_tracks_of_traces_with_kernels_only(profiled):
    figures = trace_steps(PHASES, torch.device("cpu"))
    overlap = figures.overlap
    assert (overlap.communication_us, overlap.hidden_us) == (STEPS * 150, STEPS * 50)
    assert figures.step_ms == [4.0, 7.0]
    assert figures.tracks == {
        "computation_start_ms": [0.0], "computation_end_ms": [pytest.approx(0.1)],
        "communication_start_ms": [pytest.approx(0.05)], "communication_end_ms": [pytest.approx(0.2)],
    }  # fmt: skip


def test_steps_without_communication_have_no_overlap():
    phases = {"forward": lambda: torch.ones(8) @ torch.ones(8)}
    assert trace_steps(phases, torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_only_records_kernels_and_launches_without_operators(tmp_path):
    a = torch.ones(256, 256, device="cuda")
    (path,), times = profile_phases(
        {"forward": lambda: a @ a},
        torch.device("cuda"),
        tmp_path,
        schedule=ProfilerSchedule(wait=0, warmup=1, active=1),
        kernels_only=True,
    )
    categories = {
        event.get("cat") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert {"kernel", "cuda_runtime"} <= categories
    assert not {"cpu_op", "user_annotation"} & categories
    assert len(times["forward"]) == 1
