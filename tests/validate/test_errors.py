"""Errors by term, and how predictions rank layouts."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepgauge.report.prediction_errors import (
    DISTURBED_FILE,
    errors,
    groups,
    ranks_of,
    sentence,
)
from stepgauge.report.prediction_tables import error_table, group_table
from stepgauge.report.run_page import run_page
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import BEFORE
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec

ROWS = Path(__file__).parents[2] / "benchmarks/results/2026-11-23-h200-validation-first.jsonl"
NANO = ModelSpec.preset("nano")
STEP = StepSpec(model=NANO, size="nano", batch=4)


def two_ranks(wrapper):
    return DataParallelSpec(model=NANO, size="nano", batch=2, ranks=2, wrapper=wrapper)


def row(spec, provenance="measured", terms=(), **milliseconds):
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics={f"{name}_ms": Sample.exact(ms, "ms") for name, ms in milliseconds.items()},
        tables={"terms": [["phase", "term", "us"], *terms]} if terms else {},
        provenance=provenance,
    )


def test_the_terms_of_a_row_add_up_to_its_error():
    measured = row(STEP, forward=30.0, backward=60.0, optimizer=10.0, step=100.0)
    modelled = row(STEP, "modelled", forward=33.0, backward=57.0, optimizer=12.0, step=103.0)
    (found,) = errors([modelled, measured])
    assert found.step == pytest.approx(0.03)
    assert found.terms == pytest.approx(
        {"forward": 0.03, "backward": -0.03, "optimizer": 0.02, "unexplained": 0.01}
    )
    bound = dataclasses.replace(
        modelled, tables={"terms": [["phase", "term"], ["forward", "host"]]}
    )
    (found,) = errors([bound, measured])
    assert found.terms["host"] == pytest.approx(0.03) and "forward" not in found.terms


def test_the_table_says_that_its_columns_add_up_to_the_error():
    measured = row(STEP, forward=30.0, backward=60.0, optimizer=10.0, step=100.0)
    modelled = row(STEP, "modelled", forward=33.0, backward=57.0, optimizer=10.0, step=100.0)
    table = error_table([modelled, measured])
    assert table.notes == ["The error is the sum of its parts: forward, backward."]
    figures = dict(zip(table.columns, table.rows[0], strict=True))
    assert figures["error"] == pytest.approx(figures["forward"] + figures["backward"])
    assert not error_table(wrappers((12, 10, 11), (12, 10, 22))).notes  # only the step is known


def test_communication_is_what_it_adds_to_the_step():
    phases = {"forward": 20.0, "backward": 50.0, "synchronize": 10.0, "optimizer": 10.0}
    measured = row(two_ranks("bucketed"), **phases, step=90.0, exposed=30.0)
    modelled = row(two_ranks("bucketed"), "modelled", **phases, step=90.0, exposed=21.0)
    (found,) = errors([modelled, measured])
    assert found.step == 0.0
    assert found.terms["communication"] == pytest.approx(-0.1)
    assert found.terms["backward"] == pytest.approx(0.1)  # both were hidden in one phase


def test_a_wait_that_an_older_record_has_apart_is_part_of_backward():
    phases = {"forward": 20.0, "backward": 50.0, "optimizer": 10.0}
    older = row(two_ranks("zero3"), "modelled", **phases, synchronize=10.0, step=90.0)
    measured = row(two_ranks("zero3"), **{**phases, "backward": 60.0}, synchronize=0.0, step=90.0)
    (found,) = errors([older, measured])
    assert found.terms == pytest.approx(dict.fromkeys([*phases, "unexplained"], 0.0))


def test_axes_that_communicate_everywhere_leave_computing_as_the_rest():
    spec = LayoutSpec(model=NANO, size="nano", batch=4, layout="pp2 1f1b m2 dp2")
    phases = {"forward_and_backward": 80.0, "synchronize": 10.0, "optimizer": 10.0}
    measured = row(spec, **phases, step=100.0, data_exposed=20.0, pipeline_exposed=30.0)
    modelled = row(spec, "modelled", **phases, step=100.0, data_exposed=10.0, tensor_exposed=1.0,
                   pipeline_exposed=35.0)  # fmt: skip
    (found,) = errors([modelled, measured])
    assert found.terms == pytest.approx(
        {"computing": 0.05, "optimizer": 0.0, "communication": -0.1, "bubble": 0.05,
         "unexplained": 0.0}
    )  # fmt: skip
    assert ranks_of(measured) == 4


def wrappers(predicted, measured):
    """Rows of three wrappers that took so long, and were predicted to."""
    names = ("naive", "bucketed", "zero1")
    return [
        row(two_ranks(name), provenance, step=ms)
        for provenance, times in (("modelled", predicted), ("measured", measured))
        for name, ms in zip(names, times, strict=True)
    ]


def test_the_fastest_of_a_group_is_looked_for_among_the_predictions():
    alone = [row(STEP, provenance, step=5.0) for provenance in ("modelled", "measured")]
    (group,) = groups(errors([*alone, *wrappers((12, 10, 11), (12, 10, 11))]))
    assert group.rank == 1 and group.loses == 0.0 and len(group.rows) == 3
    records = wrappers((12, 10, 9), (12, 10, 11))
    (group,) = groups(errors(records))
    assert group.rank == 2 and group.loses == pytest.approx(0.1)
    assert "ranked the fastest row first in 0 of 1 groups" in sentence(records)
    assert group_table(records).rows[0][:3] == ["layout=dp2 bucketed", 3, 2]


def test_every_row_is_named_by_the_layout_that_the_user_typed():
    tp2 = LayoutSpec(model=NANO, size="nano", batch=4, layout="tp2")
    specs = (STEP, two_ranks("zero1"), tp2)
    records = [row(spec, p, step=5.0) for spec in specs for p in ("modelled", "measured")]
    names = [cells[0] for cells in error_table(records).rows]
    assert names == ["layout=none", "layout=dp2 zero1", "layout=tp2"]


def test_steps_of_other_phases_or_of_more_batches_are_no_group():
    tp2 = LayoutSpec(model=NANO, size="nano", batch=4, layout="tp2")
    others = (dataclasses.replace(tp2, accumulation=2), dataclasses.replace(STEP, phases="forward"))
    specs = (tp2, STEP, *others)
    records = [row(s, p, step=5.0) for s in specs for p in ("modelled", "measured")]
    assert len(errors(records)) == 4 and groups(errors(records)) == []


def test_rows_are_told_with_their_remarks_and_drawn_in_the_report(tmp_path):
    records = wrappers((12, 10, 9), (12, 10, 11))
    records[0] = dataclasses.replace(records[0], note="predicted after it was measured")
    table = error_table(records)
    assert "mean 6.1%, at most 18.2%; signed mean -6.1%" in table.caption
    assert table.rows[0][-1] == "predicted after it was measured" and table.rows[1][-1] == ""
    text = run_page(records, tmp_path).html()
    assert "Predicted and measured" in text and "predicted = measured" in text
    assert "Predicted and measured" not in run_page(records[3:], tmp_path).html()
    assert sentence(records[3:]) == "No row was both predicted and measured."


def test_rows_of_a_machine_that_was_not_idle_are_told_apart():
    records = wrappers((12, 10, 11), (12, 10, 22))
    restless = Sample.of([20.0, 22.0, 40.0], "ms")
    records[-1] = dataclasses.replace(records[-1], metrics={"step_ms": restless})
    assert "over 2 rows: mean 0.0%" in sentence(records)
    assert "1 more was disturbed; with it mean 16.7%, at most 50.0%." in sentence(records)
    assert "disturbed: p90 is over" in error_table(records).rows[-1][-1]
    all_restless = [
        r if r.provenance == "modelled" else dataclasses.replace(r, metrics={"step_ms": restless})
        for r in records
    ]
    assert sentence(all_restless).startswith(
        "Other work disturbed all rows, so their errors say little. "
    )


def test_a_row_that_was_not_predicted_stands_beside_the_others_where_that_is_asked():
    measured = row(STEP, forward=30.0, step=100.0)
    modelled = row(STEP, "modelled", forward=33.0, step=103.0)
    alone = row(two_ranks("zero1"), step=50.0)
    table = error_table([modelled, measured, alone], unpredicted=True)
    assert table.rows[1][1:4] == [None, 50.0, None] and table.rows[1][-1] == "not predicted"
    shown = table.for_display()
    assert shown.rows[1][1:4] == ["-", "50.00", "-"]
    assert len(error_table([modelled, measured, alone]).rows) == 1


def test_a_predicted_row_that_did_not_end_has_its_status_and_its_prediction():
    def done(spec):
        return row(spec, step=100.0), row(spec, "modelled", step=103.0)

    (measured, modelled), (failed, predicted) = done(STEP), done(two_ranks("zero1"))
    alone = row(two_ranks("naive"), step=50.0)
    peak = {**predicted.metrics, "peak_bytes": Sample.exact(150 * 2**30, "bytes")}
    predicted = dataclasses.replace(predicted, metrics=peak, note=f"{BEFORE}; too large")
    for status in ("oom", "failed"):
        failed = dataclasses.replace(failed, metrics={}, status=status, note="why")
        records = [predicted, modelled, failed, measured]
        table = error_table(records)
        first, second = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
        assert (first["row"], first["predicted ms"]) == ("layout=dp2 zero1", 103.0)
        assert (first["predicted peak GiB"], second["predicted peak GiB"]) == (150.0, None)
        assert first["remark"] == f"{status.upper()}: why; prediction: too large"
        assert (first["measured ms"], first["error"], second["measured ms"]) == (None, None, 100.0)
        assert "over 1 rows: mean 3.0%, at most 3.0%" in table.caption
        assert "predicted peak GiB" not in error_table([modelled, measured]).columns
    only = error_table([predicted, failed])
    assert only.rows[0][1:3] == [103.0, 150.0] and len(error_table([failed, alone]).rows) == 0


def test_what_is_to_be_known_of_the_file_is_said_once():
    """Beside each row it left no room for the errors."""
    rows = []
    for batch in (1, 2):
        asked = dataclasses.asdict(StepSpec(model=ModelSpec.preset("nano"), batch=batch))
        step = {"step_ms": Sample.exact(5.0, "ms")}
        note = f"{BEFORE}; by its rules; the hardware file cpu {DISTURBED_FILE} (matmul)"
        rows += [
            Record(kind="step", spec=asked, metrics=step, provenance="modelled", note=note),
            Record(kind="step", spec=asked, metrics=step),
        ]
    table = error_table(rows)
    remark = list(table.columns).index("remark")
    assert [row[remark] for row in table.rows] == ["prediction: by its rules"] * 2
    assert table.caption.count(DISTURBED_FILE) == 1


def test_a_table_is_the_same_to_the_last_digit_in_every_process():
    """Terms are added up in the order of the step, not in that of a set."""
    code = (
        "import sys\n"
        "from stepgauge.report.prediction_tables import error_table\n"
        "from stepgauge.spec.record import Record\n"
        "print(error_table([Record.from_json(line) for line in open(sys.argv[1])]).to('json'))"
    )
    tables = [
        subprocess.run(
            [sys.executable, "-c", code, str(ROWS)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    ]  # fmt: skip
    assert tables[0] == tables[1] and "backward" in tables[0]
