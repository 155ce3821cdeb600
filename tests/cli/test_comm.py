"""The commands for collectives as a user sees them."""

import csv
import itertools
import json

import pytest

from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.store import RunStore

SIZES = ("64K", "128K", "256K", "512K", "1M")
BENCH = ("bench", "comm", "--device", "cpu", "--seconds", "0.01", "-n", "3", "-w", "1")


def test_bench_comm_then_fit(stepgauge, tmp_path):
    run, hardware, page = tmp_path / "run", tmp_path / "box.json", tmp_path / "fit.html"
    status, out, err = stepgauge(
        *BENCH, "-b", "64K", "-e", "1M", "-f", "2", "-c", "1", "--out", run, "--format", "csv"
    )
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith(
        "op,over,ranks,type,timing,size B,time µs,busbw GB/s,algbw GB/s,wrong,"
    )
    assert len(lines) == 1 + len(SIZES)
    assert lines[1].startswith("all_reduce,gloo,2,float32,pipelined,65536,")
    assert ",16384,sum,-1,in,1.0" in lines[1]  # the last is the busbw factor for two ranks
    assert next(csv.DictReader(lines))["wrong"] == "0"
    status, out, err = stepgauge("comm", "fit", run, "--hardware", hardware)
    assert status == 0, err
    assert "held out" in out
    (link,) = HardwareFile.read(hardware).links
    assert link.settings["op"] == "all_reduce"
    assert list(link.held_out) == [128 << 10]
    assert link.measured["date"]
    assert link.time_ms(10**6) > 0
    assert stepgauge("report", run, "--out", page)[0] == 0
    assert "measured, held out" in page.read_text() and "Gloo of torch" in page.read_text()
    status, out, err = stepgauge("comm", "fit", run, "--format", "json")
    assert status == 0, err
    (fit,) = json.loads(out)
    assert (fit["ranks"], fit["from B"]) == (2, 65536)
    status, out, _ = stepgauge("show", run)
    assert status == 0
    assert "busbw" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "1"), "--ranks is 1; a collective needs at least 2"),
        (
            ("--size", "1X"),
            "--size is '1X'; it must be a number of bytes such as 65536, 512K, 1M or 2G",
        ),
        (("--nodes", "2"), "--nodes is 2; start several nodes with torchrun"),
        (("--backend", "nccl"), "--backend is 'nccl', which takes only GPU tensors"),
        (
            ("--backend", "copies"),
            "has all_gather, all_to_all, send_recv: choose one of them, as in --op all_gather",
        ),
        (
            ("-b", "1K", "-e", "1M", "--size", "3K"),
            "size and a range from begin to end are both given",
        ),
        (("-e", "1M"), "--end is 1M; it needs --begin"),
        (("-f", "4"), "--factor is 4.0; it needs --begin"),
        (("-b", "1M", "-e", "1K"), "--begin must be at least 1, and --end must not be less"),
    ],
)
def test_unsupported_options_are_refused(stepgauge, tmp_path, arguments, words):
    status, _, err = stepgauge("bench", "comm", "--device", "cpu", *arguments, "--out", tmp_path)
    assert status == 2
    assert words in err
    assert not (tmp_path / "records.jsonl").exists()


def test_a_barrier_has_no_size(stepgauge, tmp_path):
    status, _, err = stepgauge(*BENCH, "--op", "barrier", "--size", "1K", "1M", "--out", tmp_path)
    assert status == 0, err
    assert err.count("comm op=barrier backend=gloo ranks=2:") == 1


def test_a_missing_network_interface_is_named(stepgauge, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    status, _, err = stepgauge(*BENCH, "--size", "4K", "--out", tmp_path)
    assert status == 1
    assert "GLOO_SOCKET_IFNAME is 'nope0'; this machine has" in err
    assert RunStore(tmp_path).read().records[0].status == "failed"


def test_a_fit_needs_sizes(stepgauge, tmp_path):
    assert stepgauge(*BENCH, "--size", "4K", "8K", "--out", tmp_path)[0] == 0
    status, _, err = stepgauge("comm", "fit", tmp_path)
    assert status == 2
    assert "no collective at three sizes" in err


def test_explain_shows_the_values_of_real_processes(stepgauge):
    status, out, err = stepgauge("comm", "explain", "--ranks", "3")
    assert status == 0, err
    words = " ".join(out.split())
    assert "rank 0 0 1 2 30 33 36" in words  # all-reduce: before and after
    assert "rank 1 10 11 12 1 11 21" in words  # all-to-all
    assert "rank 1 · 1" in words  # scatter
    assert "rank 0 chunk 2 → rank 1" in words  # ring
    assert "reduce-scatter 2" in out
    assert "4 steps; each rank sends 2·(3 − 1)·K/3 of K bytes" in out
    # Other work may delay a rank by more than it is late.
    repeated = (stepgauge("comm", "explain", "barrier", "--ranks", "3")[1] for _ in range(4))
    assert any(
        waits[0] > waits[1] > 30 for waits in map(waits_of, itertools.chain([out], repeated))
    )


def waits_of(out):
    """Returns the ms that each rank waited at the barrier."""
    lines = out[out.index("barrier") :].splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("rank")][:3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dance",), "op is 'dance'; choose one of broadcast"),
        (("--ranks", "1"), "--ranks is 1; a table can show 2 to 8"),
    ],
)
def test_explain_refuses(stepgauge, arguments, words):
    status, _, err = stepgauge("comm", "explain", *arguments)
    assert status == 2
    assert words in err


def test_bench_broadcast(stepgauge, tmp_path):
    asked = ("--device", "cpu", "--size", "1M", "--repeats", "2", "--gpus", "2")
    blocks = ("--schedule", "pinned", "staged", "--block", "256K", "128K", "--format", "csv")
    status, out, err = stepgauge("bench", "broadcast", *asked, *blocks, "--out", tmp_path)
    assert status == 0, err
    rows = list(csv.DictReader(out.splitlines()))
    assert len(rows) == 1 + 2  # one row without blocks, and one per block size with them
    assert ("staged", "262144") in [(row["schedule"], row["block bytes"]) for row in rows]
    assert all(float(row["GB/s"]) > 0 and row["of the bound"] for row in rows)


def test_topo(stepgauge, tmp_path):
    page = tmp_path / "topo.html"
    status, out, _ = stepgauge("topo", "--report", page)
    assert status == 0
    assert "NUMA" in out and "interface" in out
    assert "<svg" in page.read_text()
    status, out, _ = stepgauge("topo", "--format", "json")
    assert json.loads(out)["cores"] >= 1
