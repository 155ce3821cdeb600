"""Collectives by copies: results over runs that follow each other at once, and what is refused."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from stepgauge.bench.comm import ON_RANKS
from stepgauge.bench.sweep import Job, sweep
from stepgauge.measure.copied import CheckedCopies
from stepgauge.parallel.communication.copied_collectives import CopiedCollective
from stepgauge.runtime.launch import launch
from stepgauge.spec.comm import COPIED_OPS, COPY_ALGORITHMS, CommSpec
from stepgauge.spec.store import RunStore

CPU = torch.device("cpu")
RUNS = 40
PART = 3  # elements of a message


def value(sender, receiver, run):
    return 1000 * run + 10 * sender + receiver


def received(case):
    """Runs a collective, each run with other values, with ranks that are late by turns. Returns the
    runs whose result is wrong.
    """
    operation, algorithm = case
    rank, ranks = dist.get_rank(), dist.get_world_size()
    late = random.Random(rank)
    count = PART if operation == "send_recv" else PART * ranks
    copies = CopiedCollective(
        operation, count, torch.int32, CPU, dist.group.WORLD, pulls=algorithm == "pull"
    )
    wrong = []
    for run in range(RUNS):
        if late.random() < 0.2:
            time.sleep(0.002)
        receivers = range(ranks) if operation == "all_to_all" else [0]
        values = [value(rank, receiver, run) for receiver in receivers]
        copies.input().copy_(torch.tensor(values, dtype=torch.int32).repeat_interleave(PART))
        found = {sender: part.tolist() for sender, part in copies.run().items()}
        to = rank if operation == "all_to_all" else 0
        senders = [(rank - 1) % ranks] if operation == "send_recv" else range(ranks)
        expected = {s: [value(s, to, run)] * PART for s in senders if s != rank}
        if found != expected:
            wrong.append((run, found, expected))
    return wrong


def received_in_all(cases):
    return {case: received(case) for case in cases}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_run_receives_what_was_sent_in_it(ranks):
    cases = [(op, algorithm) for op in COPIED_OPS for algorithm in COPY_ALGORITHMS]
    for own in launch(received_in_all, cases, ranks=ranks):
        assert own == {case: [] for case in cases}


def count_wrong(_):
    """Returns the numbers of wrong elements: of right results, and of a rank that sends the wrong part."""
    counts = {}
    for op in COPIED_OPS:
        for algorithm in COPY_ALGORITHMS:
            spec = CommSpec(op=op, backend="copies", algorithm=algorithm, ranks=3, size_bytes=4004)
            copies = CheckedCopies(spec, CPU)
            right, run = copies.wrong(), copies.run

            def corrupted(run=run):
                parts = run()
                if dist.get_rank() == 1:
                    next(iter(parts.values()))[-1] += 1
                return parts

            copies.run = corrupted
            counts[op, algorithm] = right, copies.wrong()
    return counts


def test_every_received_element_is_checked():
    assert set(launch(count_wrong, None, ranks=3)[0].values()) == {(0, 1)}


def test_rows_have_times_and_the_bandwidths_of_nccl_tests(tmp_path):
    specs = [
        CommSpec(op=op, backend="copies", algorithm=how, timing=timing, size_bytes=2**16, seconds=0.0)
        for op, how, timing in (
            ("all_gather", "push", "pipelined"),
            ("all_to_all", "pull", "blocking"),
            ("send_recv", "library", "pipelined"),
        )
    ]  # fmt: skip
    specs = [spec.canonical() for spec in specs]
    assert [spec.algorithm for spec in specs] == ["push", "pull", "push"]
    rows = [
        row.record for row in sweep([Job(ON_RANKS, spec) for spec in specs], RunStore(tmp_path))
    ]
    assert [(row.status, row.note, row.median("wrong")) for row in rows] == [("ok", "", 0)] * 3
    assert all(row.environment["library"] == "shared memory" for row in rows)
    ratios = [row.median("busbw_gb_per_s") / row.median("algbw_gb_per_s") for row in rows]
    assert ratios == pytest.approx([0.5, 0.5, 1.0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"op": "all_reduce"}, "backend 'copies' has all_gather, all_to_all, send_recv"),
        ({"algorithm": "ring"}, "algorithm is 'ring'; backend 'copies' has push and pull"),
        ({"nodes": 2}, "nodes is 2; backend 'copies' works within one machine"),
        ({"timing": "graph"}, "only NCCL supports; backend is 'copies'"),
        ({"backend": "gloo", "algorithm": "pull"}, "'pull', which needs backend 'copies'"),
    ],
)
def test_impossible_specs_raise_an_error_with_the_reason(fields, words):
    with pytest.raises(ValueError, match=words):
        CommSpec(**{"op": "all_gather", "backend": "copies", **fields})


def test_ranks_that_do_not_reach_each_other_are_refused(monkeypatch):
    monkeypatch.setattr("stepgauge.measure.copied.on_one_machine", lambda group: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match="needs ranks on one machine"):
        CheckedCopies(CommSpec(op="all_gather", backend="copies"), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("algorithm", COPY_ALGORITHMS)
def test_copies_between_gpus(tmp_path, algorithm):
    specs = [
        CommSpec(op=op, backend="copies", algorithm=algorithm, size_bytes=size, device="cuda",
                 ranks=min(4, torch.cuda.device_count()), seconds=0.02)
        for op in COPIED_OPS for size in (100_004, 2**26)
    ]  # fmt: skip
    rows = [
        row.record for row in sweep([Job(ON_RANKS, spec) for spec in specs], RunStore(tmp_path))
    ]
    assert [(row.status, row.note) for row in rows] == [("ok", "")] * len(rows)
