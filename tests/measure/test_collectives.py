"""Collectives: results, timing that all ranks agree on, and the error for a wrong result."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from stepgauge.bench.comm import ON_RANKS, WrongResultError, measure, record
from stepgauge.bench.sweep import Job, sweep
from stepgauge.measure.collectives import Collective, time_collective
from stepgauge.runtime.launch import launch
from stepgauge.spec.comm import OPS, RING_OPS, CommSpec, sizes
from stepgauge.spec.store import RunStore

CPU = torch.device("cpu")
QUICK = {"seconds": 0.0, "warmup": 1, "iterations": 2}


def specs(ranks, **fields):
    shared = {**QUICK, "ranks": ranks, "size_bytes": 4004, **fields}
    plain = [CommSpec(op=op, **shared) for op in OPS]
    return plain + [CommSpec(op=op, algorithm="ring", **shared) for op in RING_OPS]


def check_all(ranks):
    """Returns, for each collective, its number of wrong elements, and that with one wrong element on
    one rank.
    """
    counts = {}
    for spec in [
        *specs(ranks),
        CommSpec(op="all_reduce", ranks=ranks, dtype="bfloat16", size_bytes=6, **QUICK),
    ]:
        collective = Collective(spec, CPU)
        wrong = collective.wrong()
        run = collective.run

        def corrupted(run=run, collective=collective):
            run()
            if dist.get_rank() == 0 and collective.output.numel():
                collective.output[-1] += 1

        collective.run = corrupted
        counts[f"{spec.op} {spec.algorithm} {spec.dtype}"] = wrong, collective.wrong()
    return counts


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_element_of_every_collective_is_checked(ranks):
    for name, (wrong, corrupted) in launch(check_all, ranks, ranks=ranks)[0].items():
        assert wrong == 0, name
        assert corrupted == (0 if "barrier" in name else 1), name


def time_both(_):
    times = {}
    for timing in ("pipelined", "blocking"):
        spec = CommSpec(ranks=2, size_bytes=400, timing=timing, seconds=0.05, iterations=7)
        times[timing] = time_collective(Collective(spec, CPU))
    return times


def test_ranks_time_the_same_number_of_batches_and_blocking_times_single_operations():
    first, second = launch(time_both, None, ranks=2)
    for timing in ("pipelined", "blocking"):
        assert len(first[timing][0]) == len(second[timing][0]) >= 5
        assert first[timing][1] == second[timing][1]
    assert first["blocking"][1] == 1
    assert first["pipelined"][1] <= 7


def test_a_row_has_the_columns_of_nccl_tests(tmp_path):
    jobs = [
        Job(ON_RANKS, spec)
        for spec in specs(3)
        if spec.op in ("all_reduce", "all_gather", "barrier")
    ]
    rows = [row.record for row in sweep(jobs, RunStore(tmp_path))]
    assert {row.status for row in rows} == {"ok"}
    by_name = {(row.spec["op"], row.spec["algorithm"]): row for row in rows}
    found = by_name["all_reduce", "library"]
    seconds = found.median("time_ms") / 1e3
    assert found.median("algbw_gb_per_s") == pytest.approx(4004 / seconds / 1e9)
    assert found.median("busbw_gb_per_s") == pytest.approx(4004 / seconds / 1e9 * 2 * 2 / 3)
    assert found.median("wrong") == 0
    assert found.series["rank_median_ms"] != []
    assert found.environment["library"].startswith("Gloo")
    ring = by_name["all_reduce", "ring"].metrics["sent_bytes"]
    assert ring.mean == pytest.approx(2 * 2 / 3 * 4004)
    assert "busbw_gb_per_s" not in by_name["barrier", "library"].metrics
    # rounded down to a whole number of elements per rank
    assert CommSpec(op="all_gather", ranks=3, size_bytes=4004).bytes == 3996


def measure_wrong_collective(spec):
    original = Collective._call
    Collective._call = lambda self: lambda: self.output.fill_(7)
    try:
        return measure(spec)
    except WrongResultError as error:
        return str(error)
    finally:
        Collective._call = original


def test_a_wrong_result_raises_an_error_instead_of_giving_a_time():
    spec = CommSpec(ranks=2, size_bytes=400, **QUICK)
    (message, _) = launch(measure_wrong_collective, spec, ranks=2)
    assert message == "200 elements of all_reduce are wrong, counted over all ranks"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": 1}, "ranks is 1; a collective needs at least 2"),
        ({"backend": "nccl"}, "'nccl', which takes only GPU tensors"),
        ({"timing": "graph"}, "which only NCCL supports"),
        (
            {"algorithm": "ring", "op": "gather"},
            "algorithm 'ring' supports all_reduce, reduce_scatter, all_gather",
        ),
        ({"size_bytes": 3}, "size_bytes is 3; all_reduce needs at least one element per rank"),
        ({"op": "dance"}, "op is 'dance'; choose one of broadcast, reduce"),
    ],
)
def test_impossible_specs_raise_an_error_with_the_reason(fields, words):
    with pytest.raises(ValueError, match=words):
        CommSpec(**fields)


def test_sizes_of_a_range():
    assert sizes(1024, 8192, 2) == [1024, 2048, 4096, 8192]
    assert sizes(1, 4, 1.1) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="factor is 1"):
        sizes(1, 2, 1)
    with pytest.raises(ValueError, match="begin must be at least 1"):
        sizes(2, 1, 2)


def test_a_size_beyond_memory_gives_a_row_with_status_oom(tmp_path):
    jobs = [Job(ON_RANKS, CommSpec(size_bytes=size, **QUICK)) for size in (400, 1 << 40, 800)]
    rows = [row.record for row in sweep(jobs, RunStore(tmp_path))]
    assert [row.status for row in rows] == ["ok", "oom", "ok"]
    assert "GiB of memory" in rows[1].note


def test_a_record_has_the_slowest_rank_of_each_batch_and_the_spread():
    from stepgauge.bench.comm import RankTimes

    spec = CommSpec(ranks=2, size_bytes=10**6)
    row = record(
        spec, [RankTimes([1.0, 4.0, 1.0], 3, 0, "x"), RankTimes([2.0, 2.0, 2.0], 3, 0, "x")]
    )
    assert row.series["time_ms"] == [2.0, 4.0, 2.0]
    assert row.series["rank_median_ms"] == [1.0, 2.0]
    assert row.metrics["rank_spread_ms"].median == 1.0
    assert dataclasses.asdict(spec) == row.spec


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_of_gpu_tensors(tmp_path, backend):
    ops = OPS if backend == "nccl" else ("all_reduce", "broadcast")
    gpu = {"backend": backend, "device": "cuda", **QUICK}
    specs = [
        CommSpec(op=op, algorithm=algorithm, size_bytes=100_004, **gpu)
        for op in ops
        for algorithm in ("library", "ring")
        if algorithm == "library" or (backend == "nccl" and op in RING_OPS)
    ]
    if backend == "nccl":
        specs.append(CommSpec(timing="graph", size_bytes=4096, **gpu))
    rows = [
        row.record for row in sweep([Job(ON_RANKS, spec) for spec in specs], RunStore(tmp_path))
    ]
    assert [(row.status, row.note) for row in rows] == [("ok", "")] * len(rows)
