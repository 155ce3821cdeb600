"""Traces of several ranks, with figures computed by hand."""

import dataclasses

import pytest

from stepgauge.report.profile_page import write_trace_report
from stepgauge.report.profile_ranks import sentences
from stepgauge.trace.analysis import analyse
from stepgauge.trace.ranks import across

ARGUMENTS = {
    "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "dtype": "Float",
    "Group size": 2, "Process Group Ranks": "[0, 1]",
}  # fmt: skip


def rank(gpu_trace, path, number, computes_us, communicates_us):
    """Two steps: a product in `mlp`, then an all-reduce of 4 MB on the same stream."""
    trace = gpu_trace(number)
    for step, (product, reduced) in enumerate(zip(computes_us, communicates_us, strict=True)):
        with trace.range(f"ProfilerStep#{step}"):
            with trace.range("mlp"), trace.op("aten::mm"):
                trace.launch("void gemm()", product)
            trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", reduced)
            trace.events[-1]["args"].update(ARGUMENTS)
            trace.synchronize()
    return analyse(trace.write(path / f"rank{number}.json"))


def test_a_collective_is_split_into_waiting_and_transfer(gpu_trace, tmp_path):
    # Rank 1 computes 300 µs longer each step, so rank 0 waits 300 µs in the all-reduce of 100 µs.
    ranks = [
        rank(gpu_trace, tmp_path, 0, (200, 200), (400, 420)),
        rank(gpu_trace, tmp_path, 1, (500, 500), (100, 120)),
    ]
    found = across(ranks)
    (row,) = found.collectives
    assert (row.name, row.group_size, row.bytes, row.calls) == ("all_reduce", 2, 4_000_000, 2)
    assert (row.transfer_us, row.waiting_us) == (100 + 120, (300 + 300) / 2)
    # nccl-tests: the factor 2 (N - 1) / N is 1 for two ranks; 4 MB take 110 µs.
    assert row.bus_bytes_per_s == pytest.approx(4e6 / 110e-6)
    assert (row.last, row.last_calls) == (1, 2)
    first, second = found.stragglers
    assert (first.waited_us, first.made_wait_us, first.calls_last) == (300, 0, 0)
    assert (second.waited_us, second.made_wait_us, second.calls_last) == (0, 300, 2)
    assert (second.most_in, second.excess_us) == ("matmul in mlp", 300)
    (text,) = sentences(found, ranks)
    assert text.startswith("Rank 1 made the others wait 0.3000 ms per step")
    assert text.endswith(
        "It spends 0.3000 ms more in matmul in mlp than the mean of the other ranks."
    )


def test_calls_that_do_not_match_are_reported_and_not_split(gpu_trace, tmp_path):
    ranks = [
        rank(gpu_trace, tmp_path, 0, (200, 200), (400, 400)),
        rank(gpu_trace, tmp_path, 1, (500,), (100,)),
    ]
    found = across(ranks)
    assert (found.collectives, found.stragglers) == ([], [])
    assert "cannot be matched" in found.notes[0] and "rank 0: 2, rank 1: 1" in found.notes[0]


def test_a_page_of_eight_ranks_of_very_many_kernels_stays_under_3_mb(gpu_trace, tmp_path):
    trace, functors = gpu_trace(), "at::native::BinaryFunctor<float, float, float, " * 3
    with trace.range("ProfilerStep#0"), trace.range("forward"):
        for block in range(100):
            for part in range(10):
                with trace.range(f"blocks.{block}"), trace.range(f"blocks.{block}.part_{part}"):
                    for name in ("gemm", "softmax_warp", "layer_norm"):
                        trace.launch(f"void {name}_kernel<{functors} {part}>(int)", 20)
    one = analyse(trace.write(tmp_path / "t.json"))
    found = {f"rank{rank}": dataclasses.replace(one, rank=rank) for rank in range(8)}
    page = write_trace_report(found, tmp_path, across(list(found.values())))
    assert sum(cell.calls for cell in one.cells) == 3000
    # The page has tables and the flame graph, but not the trace.
    assert 250_000 < page.stat().st_size < 3_000_000
    (forward,) = one.flame[2]
    assert len(forward[2]) == 100  # no block is left out
