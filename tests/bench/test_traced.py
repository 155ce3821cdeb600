"""The overlap of profiled steps: from traces of kernels alone, as a GPU's are, and of a host."""

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
    """Steps whose traces hold kernels alone: a product of 100 µs, and 150 µs of NCCL from its
    middle on.
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


def test_of_kernels_only(profiled):
    found = trace_steps(PHASES, torch.device("cpu"))
    assert (found.overlap.communication_us, found.overlap.hidden_us) == (STEPS * 150, STEPS * 50)
    assert found.step_ms == [4.0, 7.0]
    assert found.tracks == {
        "computation_start_ms": [0.0], "computation_end_ms": [pytest.approx(0.1)],
        "communication_start_ms": [pytest.approx(0.05)], "communication_end_ms": [pytest.approx(0.2)],
    }  # fmt: skip


def test_steps_that_do_not_communicate_have_none():
    assert (
        trace_steps({"forward": lambda: torch.ones(8) @ torch.ones(8)}, torch.device("cpu")) is None
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_only_are_recorded_with_their_launches(tmp_path):
    a = torch.ones(256, 256, device="cuda")
    (path,), watched = profile_phases(
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
    assert len(watched["forward"]) == 1
