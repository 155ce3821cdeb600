"""Broadcast schedules: each brings every byte to every GPU, in an order that can be executed."""

import pytest
import torch

from stepgauge.bench import broadcast
from stepgauge.bench.broadcast import job, record
from stepgauge.bench.sweep import sweep
from stepgauge.measure.transfer import Engine
from stepgauge.spec.broadcast import HOST, PINNED, SCHEDULES, STAGING, BroadcastSpec, Rates
from stepgauge.spec.store import RunStore

SHAPES = [(1000, 1, 100), (1000, 2, 300), (1001, 3, 128), (4096, 5, 5000), (7, 4, 1)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("size", "gpus", "block"), SHAPES)
def test_every_byte_reaches_every_gpu_from_a_place_that_already_has_it(name, size, gpus, block):
    schedule = SCHEDULES[name](size, gpus, block)
    origin = schedule.moves[0].source
    has = {origin: set(range(size)), **{g: set() for g in range(gpus)}, STAGING: set()}
    ended = {}
    for index, move in enumerate(schedule.moves):
        moved = range(move.start, move.stop)
        assert has[move.source].issuperset(moved)
        assert all(before < index for before in move.after)
        if move.source not in (HOST, PINNED):  # it waits for the move that brought the bytes there
            assert any(ended[before].issuperset(moved) for before in move.after)
        assert move.target not in has or not has[move.target].intersection(moved)  # no byte twice
        has[move.target] |= set(moved)
        ended[index] = set(moved) if move.target != PINNED else set()
    assert all(has[g] == set(range(size)) for g in range(gpus))


def test_a_staging_buffer_is_refilled_only_after_its_block_was_sent():
    schedule = SCHEDULES["staged"](1000, 3, 100)
    fills = [index for index, move in enumerate(schedule.moves) if move.target == STAGING]
    for earlier, later in zip(fills, fills[2:], strict=False):
        assert schedule.moves[later].after == tuple(range(earlier + 1, earlier + 4))


def test_schedules_send_the_expected_bytes_over_host_links():
    def host_bytes(name):
        return sum(
            m.bytes for m in SCHEDULES[name](1200, 4, 100).moves if m.source in (HOST, PINNED)
        )

    assert host_bytes("pinned") == 4 * 1200
    assert host_bytes("tree") == host_bytes("chain") == host_bytes("scatter-gather") == 1200


def test_the_bound_is_the_time_of_the_busiest_link():
    rates = Rates(host_link=10.0, host_links=20.0, peer_link=100.0, host_copy=5.0)
    assert rates.bound_s(SCHEDULES["naive"](100, 4, 10)) == pytest.approx(40)
    assert rates.bound_s(SCHEDULES["pinned"](100, 4, 10)) == pytest.approx(20)
    assert rates.bound_s(SCHEDULES["chain"](100, 4, 10)) == pytest.approx(10)
    assert rates.bound_s(SCHEDULES["scatter-gather"](100, 4, 10)) == pytest.approx(5)
    assert rates.bound_s(SCHEDULES["staged"](100, 1, 10)) == pytest.approx(20)


def test_all_schedules_run_on_a_cpu(tmp_path):
    specs = [
        BroadcastSpec(
            schedule=name, size_bytes=100_003, block_bytes=20_000, gpus=gpus, repeats=3, warmup=0
        )
        for name, gpus in (*((name, 3) for name in SCHEDULES), ("scatter-gather", 1))
    ]
    rows = [row.record for row in sweep([job(spec) for spec in specs], RunStore(tmp_path))]
    assert {row.status for row in rows} == {"ok"}
    # Other work may slow the links down while they are measured separately.
    assert {row.note for row in rows} <= {"", broadcast.NO_BOUND}
    for row in rows:
        assert row.median("wrong") == 0
        assert row.metrics["time_ms"].n == 3
        assert row.median("gb_per_s") == pytest.approx(100_003 / row.median("time_ms") / 1e6)


def test_figures_of_a_row():
    rates = Rates(host_link=50e9, host_links=200e9, peer_link=300e9, host_copy=10e9)
    row = record(BroadcastSpec(schedule="chain", size_bytes=10**9), [20.0, 25.0, 30.0], rates)
    assert row.median("gb_per_s") == pytest.approx(40)
    assert row.median("of_host_link") == pytest.approx(0.8)
    assert row.median("bound_ms") == pytest.approx(20)
    assert row.median("of_bound") == pytest.approx(0.8)


def test_the_bound_uses_the_best_rates_from_before_and_after(monkeypatch):
    """The machine may be busy while the links are measured for the first time."""
    busy = Rates(host_link=1e3, host_links=1e3, peer_link=1e9, host_copy=1e3)
    quiet = Rates(host_link=1e12, host_links=1e12, peer_link=1e3, host_copy=1e12)
    measured = iter([busy, quiet])
    monkeypatch.setattr(broadcast, "rates", lambda *link: next(measured))
    row = broadcast.run(BroadcastSpec(schedule="naive", size_bytes=1000, repeats=1, warmup=0))
    assert row.median("bound_ms") == pytest.approx(1000 * 2 / 1e12 * 1e3)
    assert row.median("peer_link_gb_per_s") == pytest.approx(1) and not row.note


def test_a_bound_longer_than_the_measured_time_is_reported_as_invalid():
    slow = Rates(host_link=6e9, host_links=6e9, peer_link=6e9, host_copy=6e9)
    row = record(BroadcastSpec(schedule="naive", size_bytes=10**9), [120.0], slow)
    assert row.note == broadcast.NO_BOUND
    assert not record(BroadcastSpec(schedule="naive", size_bytes=10**9), [330.0], slow).note


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_on_gpus(name):
    size, gpus, block = 10_000_003, torch.cuda.device_count(), 1_000_000
    engine = Engine(size, [torch.device("cuda", number) for number in range(gpus)], block)
    for _ in range(3):
        engine.clear()
        assert engine.wrong() > 0
        engine.run(SCHEDULES[name](size, gpus, block))
        assert engine.wrong() == 0
