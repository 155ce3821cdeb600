"""Tables, their formats, and the comparison of two runs."""

import csv
import io
import json

import pytest

from stepgauge.report.table import FORMATS, Table
from stepgauge.report.views import differences, number, record_table, varying


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123456, "ms", "0.01235"),
        (123456.0, "tokens/s", "123,456"),
        (2**31, "bytes", "2.000"),
        (0.3831, "fraction of dense peak", "38.31"),
        (None, "ms", ""),
        (0, "ms", "0"),
    ],
)
def test_numbers(value, unit, text):
    assert number(value, unit) == text


def test_columns_are_what_tells_rows_apart(record):
    rows = [record("small", batch=4), record("small", batch=8), record("medium", batch=4)]
    assert varying(rows) == ["size", "precision", "compile", "batch"]


def test_a_changed_shape_is_told_apart_within_a_size(record):
    changed = record("small")
    changed.spec["model"]["d_ff"] = 99
    assert varying([record("small"), changed]) == ["size", "precision", "compile", "d_ff"]
    assert "d_model" not in varying([record("small"), record("medium")])


def test_a_row_without_figures_says_why(record):
    table = record_table([record(), record("2.7b", status="oom", note="device memory ran out at 2 GiB more")])
    assert table.rows[1][-1] == "OOM: device memory ran out at 2 GiB more"
    assert table.rows[0][-1] == ""


def test_statistics_are_columns(record):
    table = record_table([record(step=[1.0, 2.0, 3.0])], statistics=("mean", "std", "n"))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["step ms mean"], row["step ms std"], row["step ms n"]) == ("2.000", "1.000", "3")
    assert row["peak GiB"] == "1.000"


def test_formats_keep_every_cell():
    table = Table(["name", "a|b"], [["x_1 & 50%", "1,000"], ['say "hi"', "#2"]], numeric=frozenset(["a|b"]))
    assert list(csv.reader(io.StringIO(table.to("csv")))) == [list(table.columns), *map(list, table.rows)]
    assert table.to("markdown").splitlines() == [
        "| name | a\\|b |",
        "| --- | ---: |",
        "| x_1 & 50% | 1,000 |",
        '| say "hi" | #2 |',
    ]
    latex = table.to("latex").splitlines()
    assert latex[0] == r"\begin{tabular}{lr}"
    assert latex[4] == r"x\_1 \& 50\% & 1,000 \\"
    typst = table.to("typst")
    assert r"[x\_1 & 50%], [1,000]," in typst
    assert r"[\#2]" in typst
    assert json.loads(table.to("json"))[0] == {"name": "x_1 & 50%", "a|b": "1,000"}
    assert set(FORMATS) == {"json", "csv", "markdown", "latex", "typst"}


def test_differences_pair_by_what_was_run(record):
    before = [record("small", step=[10.0, 10.1, 10.2]), record("medium", step=[20.0])]
    after = [record("small", step=[5.0, 5.1, 5.2]), record("large", step=[1.0])]
    (step, peak) = differences(before, after)
    assert (step.metric, peak.metric) == ("step_ms", "peak_bytes")
    assert step.ratio == pytest.approx(5.1 / 10.1)
    assert step.exceeds_spread
    assert peak.ratio == 1
    assert not peak.exceeds_spread


def test_overlapping_ranges_do_not_differ(record):
    (step, _) = differences([record(step=[10.0, 11.0, 12.0])], [record(step=[11.5, 12.5, 13.5])])
    assert not step.exceeds_spread


def test_differences_across_a_field(record):
    before, after = [record(precision="fp32")], [record(precision="bf16")]
    assert differences(before, after) == []
    assert len(differences(before, after, ignoring=["precision"])) == 2
