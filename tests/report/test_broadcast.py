"""The answer to which broadcast schedule is the fastest."""

from stepgauge.report.kinds import answer
from stepgauge.spec.record import Record, Sample


def row(schedule, gpus, time_ms):
    metrics = {
        "time_ms": Sample.exact(time_ms, "ms"),
        "gb_per_s": Sample.exact(1e3 / time_ms, "GB/s"),
    }
    spec = {"schedule": schedule, "gpus": gpus, "size_bytes": 2**30, "device": "cuda"}
    return Record(kind="broadcast", spec=spec, metrics=metrics)


def test_the_speedup_is_over_naive_copies_to_as_many_devices():
    fast = row("tree", 4, 10.0)
    text = answer([row("naive", 2, 100.0), fast])
    assert text == "tree is the fastest schedule: 100.0 GB/s to each of 4 devices."
    text = answer([row("naive", 2, 100.0), row("naive", 4, 200.0), fast])
    assert text.endswith("devices, 20.0 times as fast as the naive copies.")
