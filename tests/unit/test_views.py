"""Tables, their formats, and the comparison of two runs."""

import csv
import dataclasses
import io
import json

import pytest

from stepgauge.cli.console import summary
from stepgauge.report.compare import closest_differ_in, compare, difference_table
from stepgauge.report.names import (
    describe,
    identifying_fields,
    labels,
    layout_labels,
    shared_values,
)
from stepgauge.report.numbers import Doubtful, heading, number, size_unit
from stepgauge.report.table import FORMATS, Range, Table
from stepgauge.report.views import plotted, record_table, undisturbed
from stepgauge.spec.calibration import CalibrationSpec
from stepgauge.spec.fallbacks import fallbacks, what_ran, with_fallbacks
from stepgauge.spec.predictions import paired
from stepgauge.spec.record import Record, Sample
from stepgauge.validate.rows import specs_of


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


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ([2**30, 2**20, None], ["1.000 GiB", "0.000977 GiB", " GiB"]),
        ([2**30 - 2**20, 2**10], ["1,023 MiB", "0.000977 MiB"]),
        ([48_000.0], ["46.88 KiB"]),
        ([0, None], ["0 GiB", " GiB"]),
    ],
)
def test_sizes_of_a_table_are_in_one_unit(sizes, texts):
    unit = size_unit(sizes)
    assert list(map(unit.format, sizes)) == texts


def test_rows_for_an_answer_say_whether_some_all_or_none_were_disturbed(record):
    quiet, disturbed = record("small", step=[10.0, 10.2]), record("large", step=[10.0, 90.0])
    assert undisturbed([quiet]) == ([quiet], "", "")
    assert undisturbed([quiet, disturbed]) == ([quiet], "Of the undisturbed rows, ", "")
    assert undisturbed([disturbed]) == ([], "", "all rows were disturbed")
    assert undisturbed([]) == ([], "", "no row has a figure")


def test_exposed_time_below_zero_is_no_figure_anywhere(record):
    below = record("small", step=[10.0, 10.2])
    exposed = {"exposed_ms": Sample.exact(-0.5, "ms")}
    below = dataclasses.replace(below, metrics={**below.metrics, **exposed})
    table = record_table([below])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["exposed ms"] == "not measurable here"
    assert plotted(below, "exposed_ms") is None
    assert "exposed" not in summary(below, "row")
    assert "exposed_ms" not in [pair.metric for pair in compare([below], [below]).differences]


@pytest.mark.parametrize(
    ("device", "provenance", "is_shown"),
    [("cpu", "measured", False), ("cpu", "modelled", True), ("cuda", "measured", True)],
)
def test_exposed_time_above_all_communication_is_noise_on_a_cpu(device, provenance, is_shown):
    metrics = {"exposed_ms": Sample.exact(278, "ms"), "communication_ms": Sample.exact(51, "ms")}
    row = Record(
        kind="data-parallel", spec={"device": device}, metrics=metrics, provenance=provenance
    )
    assert ("exposed" in summary(row, "row")) == is_shown
    assert (plotted(row, "exposed_ms") is not None) == is_shown


def test_a_comparison_names_rows_that_say_little(record):
    ran = {"native": {"loss fused": "plain PyTorch: no CUDA GPU"}}
    fallback = dataclasses.replace(record("small", step=[10.0, 40.0]), environment=ran)
    assert compare([record("small")], [record("small")]).notes == []
    assert [note.partition(": ")[2] for note in compare([record("small")], [fallback]).notes] == [
        "loss fused ran in plain PyTorch: no CUDA GPU in B", "disturbed: p90 is over 1.5 × p10 in B"
    ]  # fmt: skip


def test_a_prediction_is_not_compared_with_itself(record):
    modelled = dataclasses.replace(record("small"), provenance="modelled")
    (alone,) = paired([modelled])
    assert alone.error("peak_bytes") is None
    (both,) = paired([modelled, record("small")])
    assert both.error("peak_bytes") == 0.0


@pytest.mark.parametrize(
    ("metric", "unit", "text"),
    [
        ("forward_ms", "ms", "forward ms"),
        ("traced_exposed_us", "us", "traced exposed µs"),
        ("peak_bytes", "bytes", "peak GiB"),
        ("kind_matmul_ms", "ms", "kind matmul ms"),
    ],
)
def test_headings(metric, unit, text):
    assert heading(metric, unit) == text


def test_columns_are_what_tells_rows_apart(record):
    rows = [record("small", batch=4), record("small", batch=8), record("medium", batch=4)]
    assert identifying_fields(rows) == ["size", "precision", "compile", "batch"]


def test_networks_of_two_kinds_differ_in_what_both_have(record):
    """A user's network has no shape, a preset no file: neither is a column of the other."""
    own = [_of_user(record, file) for file in ("a/my.py", "b/my.py")]
    presets = [record("nano"), record("small")]
    assert identifying_fields([*presets, own[0]]) == ["size", "precision", "compile", "batch"]
    table = record_table([*presets, own[0]])
    sizes = [row[table.columns.index("size")] for row in table.rows]
    assert sizes == ["nano", "small", "my.py:make"]
    assert [row[table.columns.index("batch")] for row in table.rows] == [4, 4, None]
    assert "rope base" not in table.columns
    assert "file" in identifying_fields(own)
    assert describe(own[0]).startswith("step model=my.py:make")
    factories = [_of_user(record, "a/my.py", factory) for factory in ("make", "other")]
    assert identifying_fields(factories) == [
        "size",
        "precision",
        "compile",
    ]  # the size has both names


def test_a_users_file_and_its_digest_are_columns_only_if_names_are_not_enough(record):
    first = _of_user(record, "a/gpt.py", content="1" * 16)
    named = [first, _of_user(record, "a/mlp.py", content="2" * 16)]
    moved = [first, _of_user(record, "b/gpt.py", content="2" * 16)]
    changed = [first, _of_user(record, "a/gpt.py", content="2" * 16)]
    fields = ["size", "precision", "compile"]
    assert identifying_fields(named) == fields
    assert identifying_fields(moved) == [*fields, "file"]
    assert identifying_fields(changed) == [*fields, "content"]


def test_a_long_text_names_no_row_that_others_tell_apart(record):
    """Such as all calls that were timed of an operation."""
    texts = {1: "4x4", 2: "8x8 " * 99}
    rows = [_with(record("small", batch=batch), sizes=text) for batch, text in texts.items()]
    assert identifying_fields(rows) == ["size", "precision", "compile", "batch"]
    assert "sizes" in identifying_fields([_with(row, batch=1) for row in rows])


def _with(row, **fields):
    return dataclasses.replace(row, spec={**row.spec, **fields})


def _of_user(record, file, factory="make", content="0" * 16):
    row = record("nano", batch=1)
    model = {"file": file, "factory": factory, "content": content, "network": "user"}
    return dataclasses.replace(row, spec={**row.spec, "model": model, "size": "make"})


def test_a_changed_shape_is_told_apart_within_a_size(record):
    changed = record("small")
    changed.spec["model"]["d_ff"] = 99
    assert identifying_fields([record("small"), changed]) == [
        "size",
        "precision",
        "compile",
        "d_ff",
    ]
    assert "d_model" not in identifying_fields([record("small"), record("medium")])


def test_a_row_without_figures_says_why(record):
    table = record_table(
        [record(), record("2.7b", status="oom", note="device memory ran out at 2 GiB more")]
    )
    assert table.rows[1][-1] == "OOM: device memory ran out at 2 GiB more"
    assert table.rows[0][-1] == ""


def test_options_of_the_network_name_the_row(record):
    changed = record("nano")
    changed.spec["model"].update(norm="triton", tied_head=True)
    plain = "step size=nano batch=4 context=512 precision=fp32"
    assert describe(record("nano")) == plain
    assert describe(changed) == f"{plain} norm=triton tied_head=true"
    custom = record("nano")
    custom.spec["size"] = "custom"
    assert (
        describe(custom)
        == "step batch=4 context=512 precision=fp32 d_model=64 d_ff=256 num_layers=2 num_heads=2"
    )


def test_rows_are_named_by_the_fields_that_vary(record):
    rows = [record("nano", warmup=0), record("nano", warmup=2), record("tiny")]
    assert labels(rows) == [
        "size=nano warmup=0",
        "size=nano warmup=2",
        "size=tiny warmup=5",
    ]
    assert labels([rows[0]]) == [describe(rows[0])] == labels([rows[0], rows[0]])[:1]
    mixed = [record("nano"), dataclasses.replace(record("nano"), kind="train")]
    assert [name.split()[0] for name in labels(mixed)] == ["step", "train"]


def test_rows_of_all_step_commands_are_named_by_their_layouts(record):
    """The layout "dp2 zero1" was shown as "data-parallel wrapper=zero1"."""

    def rows(*layouts, **options):
        values = {"size": ("nano",), "batch": (4,), **options}
        return [Record.of(spec) for spec in specs_of(values, layouts)]

    layouts = ("none", "dp2 zero1", "dp2 zero2 tp2", "pp2 1f1b m4")
    assert layout_labels(rows(*layouts)) == [f"layout={layout}" for layout in layouts]
    assert layout_labels(rows("zero1 dp2", "dp2")) == ["layout=dp2 zero1", "layout=dp2 bucketed"]
    assert layout_labels(rows("none", "dp2", batch=(4, 8)))[::2] == [
        "layout=none batch=4",
        "layout=dp2 bucketed batch=4",
    ]
    probe = Record.of(CalibrationSpec(operation="host eager"))  # before the rows of --now
    assert layout_labels([probe, *rows("none", "dp2")])[1:] == [
        "layout=none",
        "layout=dp2 bucketed",
    ]
    (alone,) = layout_labels(rows("dp2 zero1"))
    assert alone == "layout size=nano layout=dp2 zero1 batch=4 context=512 precision=fp32"
    forward = rows("none", "dp2", phases=("forward",))
    assert layout_labels(forward) == ["layout=none phases=forward", "layout=dp2 bucketed"]
    assert layout_labels([record("nano"), record("tiny")]) == ["size=nano", "size=tiny"]


@pytest.mark.parametrize(
    ("spec", "environment", "said"),
    [
        ({"optimizer": "fused"}, {}, ["optimizer fused ran in plain PyTorch: no CUDA GPU"]),
        ({"optimizer": "fused", "phases": "forward"}, {}, []),
        ({"optimizer": "fused", "device": "cuda:0"}, {"triton": "3.6.0"}, []),
        (
            {"optimizer": "fused", "device": "cuda"},
            {},
            ["optimizer fused ran in plain PyTorch: no Triton"],
        ),
        (
            {"optimizer": "fused", "loss": "fused"},
            {},
            ["loss fused, optimizer fused ran in plain PyTorch: no CUDA GPU"],
        ),
        ({}, {}, []),
    ],
)
def test_a_row_says_what_ran_in_place_of_our_kernels(record, spec, environment, said):
    asked = record()
    asked.spec.update(spec)
    row = with_fallbacks(dataclasses.replace(asked, environment=environment))
    assert fallbacks(row) == said
    assert record_table([row]).columns[-1] == ("remark" if said else "peak GiB")
    assert what_ran(row) == said


def test_statistics_are_columns(record):
    table = record_table([record(step=[1.0, 2.0, 3.0])], statistics=("mean", "std", "n"))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["step ms mean"], row["step ms std"], row["step ms n"]) == (2.0, 1.0, 3)
    assert row["peak GiB"] == 1.0


def test_formats_keep_every_cell():
    table = Table(
        ["name", "a|b"], [["x_1 & 50%", "1,000"], ['say "hi"', "#2"]], numeric=frozenset(["a|b"])
    )
    rows = list(csv.reader(io.StringIO(table.to("csv"))))
    assert rows == [["name", "a|b"], ["x_1 & 50%", "1000"], ['say "hi"', "#2"]]
    assert table.to("markdown").splitlines() == [
        "| name | a\\|b |",
        "| --- | ---: |",
        "| x_1 & 50% | 1,000 |",
        '| say "hi" | #2 |',
    ]
    latex = table.to("latex").splitlines()
    assert latex[0] == r"\begin{tabular}{lr}"
    assert latex[4] == r"x\_1 \& 50\% & 1,000 \\"
    assert json.loads(table.to("json")) == [
        {"name": "x_1 & 50%", "a|b": 1000},
        {"name": 'say "hi"', "a|b": "#2"},
    ]
    assert set(FORMATS) == {"json", "csv", "markdown", "latex"}


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1,234.5", 1234.5),
        ("-0.08", -0.08),
        ("+3", 3),
        ("", None),
        ("flat", "flat"),
        ("1 – 2", "1 – 2"),
        (1 / 3, 1 / 3),
        (Range(1.0, 2.5), [1.0, 2.5]),
        (None, None),
    ],
)
def test_json_has_numbers_where_a_column_has(cell, value):
    (row,) = json.loads(Table(["name", "ms"], [["7", cell]], numeric=frozenset(["ms"])).to("json"))
    assert row == {"name": "7", "ms": value}


def test_people_get_four_digits_and_machines_all_of_them():
    table = Table(
        ["name", "ms", "ratio", "p10 – p90", "n"],
        [["a", 1 / 3, 2 / 3, Range(1234.5, 2345.678), 12345], [None, None, None, None, None]],
        formats={"ratio": ".2f"},
    )
    shown = table.for_display()
    assert shown.rows[0] == ["a", "0.3333", "0.67", "1,234 – 2,346", "12,345"]
    assert shown.rows[1] == [""] * 5
    assert Table(["ms"], [[Doubtful(1 / 3)]]).for_display().rows == [["0.3333†"]]
    assert [name for name in table.columns if shown.is_numeric(name)] == table.columns[1:]
    assert table.to("csv").splitlines()[1] == f"a,{1 / 3},{2 / 3},1234.5 – 2345.678,12345"
    assert json.loads(table.to("json"))[0]["ratio"] == 2 / 3


def test_a_custom_network_shows_its_shape(record):
    row = record("small")
    row.spec["size"] = "custom"
    assert identifying_fields([row]) == [
        "size",
        "precision",
        "compile",
        "d_model",
        "d_ff",
        "num_layers",
        "num_heads",
    ]


def test_comparison_pairs_by_what_was_run(record):
    before = [record("small", step=[10.0, 10.1, 10.2]), record("medium", step=[20.0])]
    after = [record("small", step=[5.0, 5.1, 5.2]), record("large", step=[1.0])]
    step, peak = compare(before, after).differences
    assert (step.metric, peak.metric) == ("step_ms", "peak_bytes")
    assert step.ratio == pytest.approx(5.1 / 10.1)
    assert step.exceeds_spread
    assert peak.ratio == 1
    assert not peak.has_spread


def test_overlapping_ranges_do_not_differ(record):
    step, _ = compare(
        [record(step=[10.0, 11.0, 12.0])], [record(step=[11.5, 12.5, 13.5])]
    ).differences
    assert step.has_spread
    assert not step.exceeds_spread


def test_comparison_across_a_field_shows_both_values(record):
    before, after = [record(precision="fp32")], [record(precision="bf16")]
    assert compare(before, after).differences == []
    found = compare(before, after, ignoring=["precision"]).differences
    assert len(found) == 2
    assert "fp32 → bf16" in difference_table(found).rows[0]


def test_an_ambiguous_or_unknown_field_is_refused(record):
    rows = [record(precision="fp32"), record(precision="bf16")]
    with pytest.raises(ValueError, match="several rows of step size=small"):
        compare(rows, rows, ignoring=["precision"])
    with pytest.raises(ValueError, match="ignoring is 'colour'; choose from"):
        compare(rows, rows, ignoring=["colour"])


def test_a_field_is_ignored_by_its_options_name_too(record):
    before, after = record(), record()
    after.spec["model"]["context_length"] = 1024
    assert not compare([before], [after]).differences
    assert compare([before], [after], ignoring=["context"]).differences


def test_rows_without_a_partner_are_counted_and_the_first_named(record):
    first = [record(batch=batch) for batch in (1, 2, 3, 4, 5)]
    found = compare(first, [record(batch=1), record(batch=9)])
    assert found.notes == [
        "4 of 5 rows of A without a partner: batch=2; batch=3; batch=4 and 1 more",
        "1 of 2 rows of B without a partner: step size=small batch=9 context=512 precision=fp32",
    ]


def test_a_row_that_only_one_run_could_measure_is_named(record):
    found = compare([record()], [record(status="oom", note="memory ran out")])
    assert found.differences == []
    assert found.notes == [
        "step size=small batch=4 context=512 precision=fp32: OOM in B (memory ran out)"
    ]


def test_a_modelled_row_pairs_with_a_measured_one_only_where_that_is_asked(record):
    measured, modelled = record(), dataclasses.replace(record(), provenance="modelled")
    assert not compare([measured], [modelled]).differences
    assert compare([measured], [modelled], ignoring=["provenance"]).differences
    assert labels([measured, modelled]) == ["measured", "modelled"]
    other = dataclasses.replace(record("medium"), provenance="modelled")
    assert "provenance" in record_table([measured, other]).columns


def test_what_did_not_run_in_cpp_is_said(record):
    paths = [{"rms_norm": "C++", "attention": "Python: why"}, {}]
    rows = [dataclasses.replace(record("small"), environment={"native": path}) for path in paths]
    assert [what_ran(row) for row in rows] == [["attention ran in Python: why"], []]


def test_what_all_rows_share_is_said_once_above_them(record):
    table = record_table([record("small"), record("2.7b")])
    assert "fp32" in table.caption and "small" not in table.caption
    assert {"precision", "compile"} <= table.hidden and "size" not in table.hidden
    assert "precision" not in table.for_display().columns and "precision" in table.to("csv")
    alone = record_table([record("small")])
    assert "small" in alone.caption and "size" in alone.hidden


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(15, "", "15"), (1234, "", "1,234"), (0.93, "", "0.9300"), (15, "ms", "15.00")],
)
def test_a_count_is_written_as_one(record, value, unit, text):
    row = record()
    row.metrics["buckets"] = Sample.exact(value, unit)
    table = record_table([row])
    assert table.for_display().rows[0][-1] == text


def test_what_an_older_or_newer_version_recorded_has_a_table_too(record):
    assert record_table([]).rows == []
    partial, unknown = record(), record()
    del partial.spec["model"]["context_length"], partial.spec["batch"]
    unknown.spec["model"]["network"] = "vit"
    for row in (partial, unknown):
        assert record_table([row]).rows


def test_a_caption_says_what_all_rows_share(record):
    rows = [record(batch=4), record(batch=8)]
    assert labels(rows) == ["batch=4", "batch=8"]
    assert shared_values(rows).text == "size=small, context=512, precision=fp32"


def test_machines_get_what_the_caption_says(record):
    table = record_table([record(batch=4), record(batch=8)])
    (first, _) = csv.DictReader(io.StringIO(table.to("csv")))
    assert (first["size"], first["precision"], first["batch"], first["context length"]) == (
        "small",
        "fp32",
        "4",
        "512",
    )
    assert table.for_display().columns[0] == "batch"
    for form, start in (
        ("markdown", "size=small, "),
        ("latex", "% size=small, "),
    ):
        assert table.to(form).startswith(start) and "context=512" in table.to(form).splitlines()[0]


def test_the_closest_rows_say_what_keeps_them_apart(record):
    assert closest_differ_in(
        [record("small")], [record("medium", batch=8), record("small", batch=8)]
    ) == ["batch"]
    assert closest_differ_in([record()], [dataclasses.replace(record(), kind="train")]) == []


def test_a_prediction_stands_beside_its_measurement_and_alone_without_one(record):
    small, medium = record("small", step=[10.0]), record("medium", step=[40.0])
    predicted = [
        dataclasses.replace(
            each,
            provenance="modelled",
            metrics={"step_ms": Sample.exact(ms, "ms")},
            environment={"hardware": "box"},
        )
        for each, ms in ((small, 11.0), (record("large"), 100.0))
    ]
    table = record_table([*predicted, small, medium])
    rows = {row["size"]: row for row in json.loads(table.to("json"))}
    assert (rows["small"]["predicted ms"], rows["small"]["step ms"]) == (11.0, 10.0)
    assert rows["small"]["error"] == pytest.approx(0.1)
    assert "+10.0%" in table.to("markdown")
    assert rows["medium"]["error"] is None and rows["medium"]["provenance"] == "measured"
    assert rows["large"]["step ms"] == 100.0 and rows["large"]["provenance"] == "modelled"
    assert len(table.rows) == 3
    assert "predicted ms" not in record_table([small, medium]).columns


def test_predictions_say_for_which_machine(record):
    def made_for(machine, size="small"):
        environment = {"device": "Test GPU", "hardware": machine}
        return dataclasses.replace(record(size), provenance="modelled", environment=environment)

    table = record_table([made_for("box"), made_for("box", "medium")])
    assert table.caption == "batch=4, context=512, precision=fp32, predicted for box"
    assert "predicted for" not in table.for_display().columns
    assert [row["predicted for"] for row in csv.DictReader(io.StringIO(table.to("csv")))] == [
        "box",
        "box",
    ]
    for form in ("markdown", "latex"):
        assert "predicted for box" in table.to(form).splitlines()[0]
    several = record_table([made_for("box"), made_for("rack", "medium")])
    assert "predicted for" in several.for_display().columns
    assert "predicted" not in several.caption
    assert "predicted for" not in record_table([record(), made_for("box", "medium")]).columns
