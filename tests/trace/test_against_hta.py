"""The overlap ratio equals that of Holistic Trace Analysis, on random kernels on two streams."""

import random

import pytest

from stepgauge.trace.events import load
from stepgauge.trace.overlap import overlap

trace_analysis = pytest.importorskip(
    "hta.trace_analysis", reason="needs Holistic Trace Analysis (module hta)"
)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_overlap_ratio_equals_that_of_hta(gpu_trace, gpu_step, tmp_path, seed):
    for rank in range(2):
        trace, draw = gpu_trace(rank), random.Random(10 * seed + rank)
        gpu_step(trace, 0)
        with trace.range("ProfilerStep#1"), trace.range("backward"):
            for _ in range(200):
                trace.launch("void gemm()", draw.randint(5, 90))
                if draw.random() < 0.4:
                    trace.launch("ncclDevKernel_AllReduce_Sum(x)", draw.randint(20, 300), stream=20)
            trace.synchronize()
        trace.write(tmp_path / f"rank{rank}.json")
    # By default, HTA leaves out the last step.
    theirs = trace_analysis.TraceAnalysis(trace_dir=str(tmp_path), include_last_profiler_step=True)
    table = theirs.get_comm_comp_overlap(visualize=False).set_index("rank")
    for rank in range(2):
        ours = overlap(load(tmp_path / f"rank{rank}.json"))
        assert round(100 * ours.ratio, 2) == pytest.approx(
            table.loc[rank, "comp_comm_overlap_pctg"], abs=0.011
        )
