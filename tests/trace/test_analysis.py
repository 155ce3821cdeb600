"""The analysis of traces for which all figures are computed by hand."""

import contextlib

import pytest

from stepgauge.spec.analysis import Analysis
from stepgauge.trace import flops
from stepgauge.trace.analysis import analyse
from stepgauge.trace.events import Shapes, load
from stepgauge.trace.flame import thinned
from stepgauge.trace.idle import DEPENDENCY, HOST_BOUND, SYNCHRONISED, TURNAROUND
from stepgauge.trace.names import repeated
from stepgauge.trace.overlap import overlap
from stepgauge.trace.read import TraceError


@pytest.fixture
def trace(gpu_trace):
    return gpu_trace()


def test_every_kernel_has_its_kind_phase_and_range(trace, gpu_step, tmp_path):
    for number in range(3):
        gpu_step(trace, number)
    found = analyse(trace.write(tmp_path / "t.json"))
    placed = {(c.kind, c.phase, c.range): (c.calls, c.us) for c in found.cells if c.calls}
    assert placed == {
        ("matmul", "forward", "blocks.*.attention.scores"): (3, 300),
        ("softmax", "forward", "blocks.*.attention.softmax"): (3, 150),
        # It runs on the autograd thread, in the range whose forward created it.
        ("matmul", "backward", "blocks.*.attention.scores"): (3, 600),
        ("communication", "backward", ""): (3, 450),
        ("optimizer", "optimizer", ""): (3, 180),
    }
    assert found.steps == 3
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert Analysis.from_json(found.to_json()) == found


def test_flops_are_counted_once_per_operation(trace, gpu_step, tmp_path):
    gpu_step(trace)
    found = analyse(trace.write(tmp_path / "t.json"))
    flops = {(c.kind, c.phase): c.flops for c in found.cells if c.flops}
    assert flops == {
        ("matmul", "forward"): 2 * 64 * 32 * 16,
        ("softmax", "forward"): 5 * 64 * 16,
        ("matmul", "backward"): 2 * 32 * 64 * 16,
    }
    forward = next(row for row in found.operations if row.shapes == "64×32 32×16")
    assert forward.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_only_touched_elements_count_as_bytes():
    def cost(operation, *dims):
        return flops.cost(operation, Shapes(tuple(dims), ("c10::BFloat16",) * len(dims), ()))

    cache, rows = (100_000, 16, 128), (8, 16, 128)
    assert cost("aten::index_put_", cache, (), rows).bytes == 2 * 2 * 8 * 16 * 128
    assert cost("aten::embedding", (50_000, 64), (4, 10)).bytes == 2 * 2 * 40 * 64
    assert cost("_C_cache_ops::reshape_and_cache_flash", rows, rows, cache, cache).bytes is None
    assert cost("aten::index", cache, ()).bytes is None
    assert cost("aten::add", (10, 10), (10, 10)).bytes == 3 * 2 * 100


def test_phases_and_idle_times_fill_the_device_time_line(trace, gpu_step, tmp_path):
    gpu_step(trace)
    found = analyse(trace.write(tmp_path / "t.json"))
    # Forward begins at 1000 on the host, its first kernel 2 µs later: the lead-in. The all-reduce
    # ends 90 µs after the product. The host's step ends 40 µs after the optimizer's kernel.
    assert (found.lead_in_us, found.tail_us) == (pytest.approx(2), pytest.approx(40))
    assert found.phases_us["forward"] == [pytest.approx(100 + 50)]
    assert found.phases_us["backward"] == [pytest.approx(200 + 90)]
    assert found.phases_us["optimizer"] == [pytest.approx(2 + 60)]
    whole = sum(sum(values) for values in found.phases_us.values())
    assert sum(c.busy_us + c.idle_us for c in found.cells) == pytest.approx(whole)
    assert {(row.reason, row.phase): row.us for row in found.idle} == {
        (SYNCHRONISED, "optimizer"): pytest.approx(2)
    }


def test_steps_last_as_long_as_on_the_device_if_the_host_runs_ahead(trace, tmp_path):
    """Four launches in 60 µs, and four kernels of 20 ms without a gap: a step takes 20 ms."""
    for number in range(4):
        with trace.range(f"ProfilerStep#{number}"), trace.op("aten::mm"):
            trace.launch("void gemm()", 20_000)
            trace.now += 5
    trace.synchronize()
    found = analyse(trace.write(tmp_path / "t.json"))
    assert found.steps == 4
    assert found.phases_us == {"forward": [20_000.0] * 4}
    assert found.idle == []
    assert (found.lead_in_us, found.tail_us) == (2, 0)


def test_a_kernel_that_outlasts_its_step_hides_nothing_of_the_next_one(trace, tmp_path):
    """Step 0: product 0 to 10, all-reduce 30 to 40. Step 1: product 12 to 20, and 45 to 50."""
    for number, (first, second) in enumerate((((0, 10), (30, 40)), ((12, 20), (45, 50)))):
        with trace.range(f"ProfilerStep#{number}"), trace.op("aten::mm"):
            for stream, name, (start, end) in (
                (7, "gemm", first),
                (7 if number else 20, "gemm" if number else "ncclDevKernel_AllReduce", second),
            ):
                trace.free[stream] = 2000 + start
                trace.launch(name, end - start, stream=stream)
    found = analyse(trace.write(tmp_path / "t.json"))
    # 0-10 | 10-12 idle, 12-20 | 20-30 idle, 30-40 | 40-45 idle, 45-50
    assert found.phases_us == {"forward": [10 + 10 + 10, 2 + 8 + 5 + 5]}
    assert sum(row.us for row in found.idle) == 2 + 10 + 5
    assert found.overlap.communication_us == 10
    assert found.overlap.hidden_us == 0


def test_time_between_consecutive_steps_counts_and_unrecorded_steps_do_not(trace, tmp_path):
    for number in (3, 4, 9):  # 5 to 8 were not recorded
        trace.now += 1000
        with trace.range(f"ProfilerStep#{number}"), trace.op("aten::mm"):
            trace.launch("void gemm()", 50)
            trace.synchronize()
            trace.now += 30
    found = analyse(trace.write(tmp_path / "t.json"))
    # Step 4's product begins 30 + 1000 + 2 µs after step 3's. Step 9 is another cycle.
    assert found.phases_us == {"forward": [50, 1032 + 50, 50]}
    assert (found.lead_in_us, found.tail_us) == (4, 60)


def test_a_marked_step_that_launched_nothing_does_not_count(trace, tmp_path):
    for number in range(3):
        with trace.range(f"ProfilerStep#{number}"):
            if number < 2:
                trace.launch("void gemm()", 50)
            trace.now += 100
    found = analyse(trace.write(tmp_path / "t.json"))
    assert (found.steps, [len(values) for values in found.phases_us.values()]) == (2, [2])
    assert "1 of 3 marked steps launched no work" in found.notes[0]


def test_unknown_devices_are_reported(trace, tmp_path):
    with trace.op("aten::mm"):
        trace.now += 50
    trace.event("dma_request", "mtia_ccp_events", 1010, 1020, tid=801, pid=9)
    trace.event("process", "", 1010, 1020, tid=1, pid=77)  # a process without a name
    trace.events.append({"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "MTIA 9"}})
    found = analyse(trace.write(tmp_path / "t.json"))
    assert not found.on_device
    assert "1 of MTIA 9" in found.notes[0]
    assert "only of the host's operations" in found.notes[0]


def test_without_step_marks_the_lead_in_is_not_idle_time(trace, tmp_path):
    trace.now += 5000
    with trace.op("aten::mm"):
        trace.launch("void gemm()", 50)
        trace.launch("void gemm()", 50)
    found = analyse(trace.write(tmp_path / "t.json"))
    assert found.phases_us == {"forward": [100]}
    assert (found.idle, found.lead_in_us, found.tail_us) == ([], 0, 0)


def test_reasons_of_idle_time(trace, tmp_path):
    with trace.range("ProfilerStep#0"), trace.range("forward"):
        trace.launch("void gemm_a()", 50)
        trace.now += 500  # Python is slow: the device becomes idle
        trace.launch("void gemm_b()", 50)
        trace.free[7] += 5  # both were launched in time, the second starts late
        trace.launch("void gemm_c()", 50)
        trace.free[20] = trace.free[7]
        trace.launch("ncclDevKernel_AllGather(x)", 300, stream=20)
        trace.free[7] = trace.free[20] + 4  # waits for the other stream
        trace.launch("void gemm_d()", 50)
        trace.synchronize()
        trace.now += 30  # the host read a result first
        trace.launch("void gemm_e()", 50)
        trace.now += 100
    found = analyse(trace.write(tmp_path / "t.json"))
    gaps = {row.reason: row.us for row in found.idle}
    assert gaps[HOST_BOUND] == pytest.approx(1510 + 2 - 1052)
    assert gaps[TURNAROUND] == pytest.approx(5)
    assert gaps[DEPENDENCY] == pytest.approx(4)
    assert gaps[SYNCHRONISED] == pytest.approx(32)


@pytest.mark.parametrize(
    ("call", "waits"),
    [("hipMemcpyWithStream", True), ("cudaFree", True), ("urQueueFinish", True),
     ("cudaMemcpyAsync", False), ("cudaStreamWaitEvent", False)],
)  # fmt: skip
def test_calls_in_which_the_host_waits_for_the_device(trace, tmp_path, call, waits):
    with trace.range("ProfilerStep#0"):
        trace.launch("void gemm_a()", 50)
        with trace.call(call, "cuda_runtime"):
            trace.now += 100
        trace.launch("void gemm_b()", 50)
    (row,) = analyse(trace.write(tmp_path / "t.json")).idle
    assert row.reason == (SYNCHRONISED if waits else HOST_BOUND)


@pytest.mark.parametrize("recorded", [False, True])
def test_idle_time_until_a_phase_ends_on_the_host_counts_for_it(trace, tmp_path, recorded):
    with trace.range("ProfilerStep#0"):
        with trace.range("forward"):
            trace.launch("void gemm_a()", 50)  # from 1002 to 1052
            trace.now = 1300.0
        trace.now = 1310.0
        if recorded:
            with trace.call("cudaEventRecord", "cuda_runtime"):
                trace.now = 1320.0
        trace.now = 1400.0
        with trace.range("backward"):
            trace.launch("void gemm_b()", 50)  # from 1402 to 1452
    found = analyse(trace.write(tmp_path / "t.json"))
    end = 1320 if recorded else 1300
    assert found.phases_us["forward"] == [pytest.approx(end - 1002)]
    assert found.phases_us["backward"] == [pytest.approx(1452 - end)]
    assert {row.phase: row.us for row in found.idle} == {
        "forward": pytest.approx(end - 1052),
        "backward": pytest.approx(1402 - end),
    }
    assert {cell.name: cell.calls for cell in found.cells} == {"gemm_a": 1, "gemm_b": 1}


def test_overlap_is_hidden_over_communication(trace, gpu_step, tmp_path):
    gpu_step(trace)
    found = overlap(load(trace.write(tmp_path / "t.json")))
    assert (found.rank, found.communication_us, found.hidden_us, found.exposed_us) == (
        0,
        150,
        60,
        90,
    )
    assert found.ratio == pytest.approx(0.4)
    assert found.computation_us == 100 + 50 + 200 + 60


@pytest.mark.parametrize("name", ["Memcpy PtoP (Device -> Device)", "Memcpy Peer"])
def test_only_copies_between_gpus_are_communication(trace, tmp_path, name):
    with trace.range("ProfilerStep#0"), trace.range("backward"):
        trace.launch("void gemm()", 100)  # from 1002 to 1102
        trace.launch(name, 150, stream=20, category="gpu_memcpy")  # from 1012 to 1162
        trace.launch("Memcpy DtoD (Device -> Device)", 500, stream=21, category="gpu_memcpy")
        trace.synchronize()
    path = trace.write(tmp_path / "t.json")
    found = overlap(load(path))
    assert (found.communication_us, found.hidden_us, found.exposed_us) == (150, 90, 60)
    assert found.computation_us == 100
    kinds = {cell.name: cell.kind for cell in analyse(path).cells}
    assert kinds == {
        "gemm": "matmul",
        name.partition(" (")[0]: "communication",
        "Memcpy DtoD": "copy",
    }


def test_a_trace_without_communication_has_no_overlap(trace, gpu_step, tmp_path):
    gpu_step(trace, communicates=False)
    path = trace.write(tmp_path / "t.json")
    assert overlap(load(path)) is None


def test_a_foreign_trace_needs_no_ranges(trace, tmp_path):
    """Without marks of steps, phases and modules, autograd is backward, Optimizer.step is optimizer and
    the rest is forward.
    """
    with trace.op("aten::mm", sequence=5):
        trace.launch("void some_gemm()", 10)
    with trace.backward_of("MmBackward0", 5), trace.op("aten::mm"):
        trace.launch("void some_gemm()", 20)
    with trace.range("Optimizer.step#SGD.step"), trace.op("aten::_foreach_add_"):
        trace.launch("void multi_tensor_apply_kernel<BinaryOp>()", 30)
    trace.launch("void mystery()", 5)
    found = analyse(trace.write(tmp_path / "t.json"))
    assert {(c.kind, c.phase): c.us for c in found.cells} == {
        ("matmul", "forward"): 10, ("matmul", "backward"): 20, ("optimizer", "optimizer"): 30, ("other", ""): 5,
    }  # fmt: skip
    assert found.steps == 1


def test_modules_of_a_foreign_trace_are_its_ranges(trace, tmp_path):
    python = "nn.Module: Net_0", "nn.Module: Linear_3", "torch/nn/functional.py(1): linear"
    with contextlib.ExitStack() as stack:
        for name in python:
            stack.enter_context(trace.call(name, "python_function"))
        with trace.op("aten::addmm"):
            trace.launch("void gemm()", 10)
    (cell,) = analyse(trace.write(tmp_path / "t.json")).cells
    assert cell.range == "Net_*.Linear_*"


def test_a_kernel_whose_name_matches_no_rule_has_its_operations_kind(trace, tmp_path):
    with trace.op("FlashAttentionTriton"):
        trace.launch("forward_kernel", 10)
    with trace.op("RMSNormTriton"):
        trace.launch("forward_kernel", 20)
    with trace.op("aten::copy_"):
        trace.launch("Memcpy HtoD (Pinned -> Device)", 30, category="gpu_memcpy")
    with trace.op("CompiledFunction"):
        trace.launch("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", 40)
        trace.launch("triton_poi_fused_mul_silu_4", 50)
    found = analyse(trace.write(tmp_path / "t.json"))
    assert {(c.kind, c.us) for c in found.cells} == {
        ("attention", 10), ("norm", 20), ("copy", 30), ("norm", 40), ("elementwise", 50),
    }  # fmt: skip


def test_a_trace_with_nothing_to_analyse_is_refused(trace, tmp_path):
    path = trace.write(tmp_path / "t.json")
    with pytest.raises(TraceError, match="has neither kernels nor operations of PyTorch"):
        analyse(path)
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}')
    with pytest.raises(TraceError, match="an event has no valid name or time"):
        analyse(path)
    path.write_text('[{"ph": "X", "pid": "CPU functions", "name": "aten::mm", "ts": 1, "dur": 2}]')
    with pytest.raises(TraceError, match=r"only events of no category; .* since PyTorch 1\.8"):
        analyse(path)
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "browser", "name": "paint", "ts": 1, "dur": 2}]}'
    )
    with pytest.raises(TraceError, match="has neither kernels nor operations"):
        analyse(path)


def test_numbers_of_repeated_modules_become_a_star():
    assert repeated("blocks.11.attention.scores") == "blocks.*.attention.scores"
    assert repeated("Net_0.Linear_12") == "Net_*.Linear_*"
    assert repeated("layer1.conv2d") == "layer1.conv2d"


def test_the_flame_graph_keeps_small_modules_only_if_many_blocks_have_them():
    blocks = [
        [f"blocks.{number}", 0.0, [["mm", 999.0, []], ["norm", 1.0, []]]] for number in range(50)
    ]
    found = thinned(["", 0.0, [["forward", 5.0, [*blocks, ["lone", 1.0, [["kernel", 2.0, []]]]]]]])
    (forward,) = found[2]
    assert forward == ["forward", 8.0, blocks]


def test_recomputed_work_keeps_its_range(trace, tmp_path):
    """Activation checkpointing: the block's forward runs inside the backward of its last operation."""

    def product(us, *ranges, sequence=None):
        with contextlib.ExitStack() as stack:
            for name in ranges:
                stack.enter_context(trace.range(name))
            with trace.op("aten::mm", sequence=sequence):
                trace.launch("void gemm()", us)

    with trace.range("ProfilerStep#0"):
        product(10, "forward", "blocks.0", "blocks.0.down", sequence=3)
        with trace.range("backward"), trace.backward_of("MmBackward0", 3):
            product(20, "blocks.0", "blocks.0.up", "softmax")
        trace.now += 100
    found = analyse(trace.write(tmp_path / "t.json"))
    assert {(c.phase, c.range): c.us for c in found.cells} == {
        ("forward", "blocks.*.down"): 10, ("backward", "blocks.*.up.softmax"): 20,
    }  # fmt: skip


def test_a_host_operation_that_only_calls_another_has_no_row(trace, tmp_path):
    """linear calls addmm, so its self time is overhead and not a matrix product. A norm that only
    allocates its result does its own work.
    """

    def taking(us, name, *dims):
        with trace.op(name, dims):
            trace.now += us

    with trace.range("ProfilerStep#0"), trace.range("forward"):
        with trace.op("aten::linear", [(64, 32), (16, 32), (16,)]):
            trace.now += 5
            taking(1, "aten::t", (16, 32))
            taking(100, "aten::addmm", (16,), (64, 32), (32, 16))
        with trace.op("aten::native_layer_norm", [(64, 32), (32,)]):
            taking(1, "aten::empty", (64, 32))
            trace.now += 20
        with trace.op("aten::to", [(64, 32)]), trace.op("aten::_to_copy", [(64, 32)]):
            taking(7, "aten::copy_", (64, 32), (64, 32))
    found = analyse(trace.write(tmp_path / "t.json"))
    took = {row.operation: row.us for row in found.operations}
    assert took == {"aten::addmm": 100, "aten::native_layer_norm": 20, "aten::copy_": 7}
    assert sum(cell.us for cell in found.cells if cell.name == "aten::linear") == 5
