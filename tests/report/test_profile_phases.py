"""Tables of a profile: the overhead of the profiler, older analyses, the roofline."""

import json

import pytest
import torch

from stepgauge.measure import ceilings, cpu_contention
from stepgauge.measure.cpu_contention import Reading
from stepgauge.report.profile import operations_table, phases_table
from stepgauge.spec.analysis import Analysis


def test_profiler_overhead_compares_medians():
    found = Analysis(
        source="trace.json",
        steps=3,
        phases_us={"forward": [1e3, 1e3, 9e3], "backward": [2e3, 2e3, 2e3]},
        stopwatch_ms={"forward": 1.0, "backward": 2.1, "step": 3.0},
        watched_ms={"forward": [1.1, 1.1, 9.1], "backward": [2.0, 2.0, 2.0]},
    )
    table = phases_table(found)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["forward"]["profiler overhead %"] == pytest.approx(10.0)
    assert rows["backward"]["profiler overhead %"] is None  # faster with the profiler
    assert rows["step"]["stopwatch profiled ms"] == pytest.approx(3.1)


def test_an_analysis_of_an_older_version_is_read():
    now = Analysis(source="trace.json", phases_us={"forward": [1e3]})
    for schema, gone in (
        (1, {"lanes": [], "marks": []}),
        (2, {"timeline": {"names": []}, "streams": [{"late": 1}]}),
    ):
        older = {**json.loads(now.to_json()), **gone, "schema": schema}
        assert Analysis.from_json(json.dumps(older)) == now


@pytest.mark.parametrize(("busy_s", "missed"), [(4.0, 2.0), (2.0, 0.0)])
def test_the_caption_warns_of_ceilings_measured_beside_other_work(monkeypatch, busy_s, missed):
    readings = iter([Reading(0.0, 0.0, 0.0, 2), Reading(1.0, busy_s, 2.0, 2)])
    monkeypatch.setattr(cpu_contention, "reading", lambda: next(readings))
    monkeypatch.setattr(ceilings, "_best", lambda *_: 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    roof = ceilings.ceilings(torch.device("cpu"), torch.float32)
    assert roof.missed_cores == pytest.approx(missed, abs=0.1)
    caption = operations_table(Analysis(source="trace.json", ceilings=roof)).caption
    assert ("other work took 2.0 of the cores" in caption) == bool(missed)
