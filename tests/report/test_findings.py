"""Findings, and the answers of sections."""

import dataclasses

import pytest

from stepgauge.report.answers import choice_answer
from stepgauge.report.findings import command, findings, pairs
from stepgauge.report.kinds import answer
from stepgauge.report.page import Page
from stepgauge.report.run_page import run_page
from stepgauge.report.views import NOT_MEASURABLE, record_table
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.turns import of_turns


def in_turns(*rows, turns=(1.0, 1.01, 0.99)):
    """Returns the rows as if measured in turns. In each turn, all steps are longer by its factor."""
    return [
        of_turns([with_step(row, times) for times in turns], "2026-11-23T10:00:00+00:00")
        for row in rows
    ]


def with_step(row, times):
    step = row.metrics["step_ms"]
    return dataclasses.replace(
        row, metrics={"step_ms": Sample.of([step.p10 * times, step.p90 * times], "ms")}
    )


def test_findings_are_ranked_by_the_milliseconds_that_they_save(record):
    rows = in_turns(
        record("small", step=[50.0, 50.1]),
        record("small", step=[45.0, 45.1], compile="on"),
        record("small", step=[20.0, 20.1], precision="bf16"),
        record("small", step=[10.0, 10.1], precision="bf16-pure"),
        record("small", step=[12.0, 12.1], precision="bf16", compile="on"),
    )
    first, second = findings(rows)
    assert (first.title, second.title) == ("precision=bf16", "compile=on")  # bf16-pure: a caution
    assert first.saved_ms == pytest.approx(33.0) and second.saved_ms == pytest.approx(8.0)
    assert first.text == (
        "A step takes 45.05 ms with precision=fp32 and 12.05 ms with precision=bf16: 3.74 times as "
        "fast (size=small batch=4 context=512 compile=on). Both were measured in turns, 3 times each."
    )
    assert first.command == (
        "stepgauge bench step --size small --batch 4 --context 512 --precision bf16 --compile on"
    )


def test_rows_not_measured_in_turns_confirm_nothing(record):
    rows = [
        dataclasses.replace(record("small", step=step, precision=precision), created=created)
        for step, precision, created in (
            ([50.0, 50.1], "fp32", "2026-11-23T10:00:00+00:00"),
            ([20.0, 20.1], "bf16", "2026-11-23T10:03:00+00:00"),
        )
    ]
    (finding,) = findings(rows)
    assert not finding.is_confirmed and finding.rows == tuple(rows)
    assert "measured only once, 3 minutes apart: the machine's speed may" in finding.text
    assert finding.command == (
        "stepgauge bench step --size small --batch 4 --context 512 --precision fp32 bf16 --turns 3"
    )
    page = Page(title="", sections=[], facts={}, findings=[finding]).html()
    assert "<h3>Not confirmed</h3>" in page and "precision=bf16 may save 30.00 ms per step" in page
    (confirmed,) = findings(in_turns(*rows))
    page = Page(title="", sections=[], facts={}, findings=[confirmed]).html()
    assert "Not confirmed" not in page and "<b>precision=bf16 saves 30.00 ms per step</b>" in page
    apart = [in_turns(rows[0])[0], of_turns(rows[1:], "2026-11-23T11:00:00+00:00")]
    assert not findings(apart)[0].is_confirmed


def test_a_drifting_machine_confirms_only_gains_larger_than_its_drift(record):
    fp32, bf16 = (
        record("small", step=[50.0, 50.1]),
        record("small", step=[40, 40], precision="bf16"),
    )
    assert findings(in_turns(fp32, bf16, turns=(1.0, 1.2, 1.1)))[0].is_confirmed
    assert findings(in_turns(fp32, bf16, turns=(1.0, 1.3, 1.1))) == []


def test_checkpointing_is_never_recommended_to_save_time(record):
    """On a busy machine it can look faster, even when measured in turns."""
    rows = [record("mini", step=[730.0, 731.0])]
    rows += [
        record("mini", step=[391.0, 392.0], checkpointing=name) for name in ("blocks", "selective")
    ]
    assert findings(rows) == findings(in_turns(*rows)) == []
    slower = in_turns(
        record("mini", step=[30.0, 30.1]),
        record("mini", step=[20.0, 20.1], precision="bf16"),
        record("mini", step=[40.0, 40.1], checkpointing="blocks"),
        record("mini", step=[25.0, 25.1], precision="bf16", checkpointing="blocks"),
    )
    assert [finding.saved_ms for finding in findings(slower)] == [pytest.approx(10.0)]


def test_noise_fallbacks_and_other_work_give_no_findings(record):
    base = record("small", step=[50.0, 50.1])
    assert findings([base, record("small", step=[49.0, 50.2], precision="bf16")]) == []
    assert findings([base, record("small", step=[10.0, 40.0], precision="bf16")]) == []  # disturbed
    fused = record("small", step=[9.0, 9.1], optimizer="fused")
    assert [finding.title for finding in findings([base, fused])] == ["optimizer=fused"]
    plain = {"native": {"optimizer fused": "plain PyTorch: no CUDA GPU"}}
    assert findings([base, dataclasses.replace(fused, environment=plain)]) == []
    other = record("small", step=[9.0, 9.1])
    other.spec["model"]["norm"] = "layernorm"
    assert findings([base, other]) == []
    modelled = dataclasses.replace(fused, provenance="modelled")
    assert findings([base, modelled]) == []


def test_a_device_that_waits_for_the_host_is_a_finding(record):
    figures = {"step_ms": 20.0, "profiled_step_ms": 30.0, "idle_ms": 22.0}
    row = dataclasses.replace(
        record("small"),
        kind="profile",
        metrics={name: Sample.exact(ms, "ms") for name, ms in figures.items()},
    )
    (finding,) = findings([row])
    assert finding.saved_ms == 12 and finding.command.endswith(
        "--compile off reduce-overhead --turns 3"
    )
    assert not finding.is_confirmed
    assert "busy for 8.000 of the step's 20.00 ms" in finding.text


def test_the_command_line_accepts_the_commands(record):
    from stepgauge.cli import app

    user = record("small")
    user.spec["model"] = {"file": "a.py", "factory": "f", "content": "1", "network": "user"}
    named = record("small")
    named.spec["size"] = "llama-3-8b"
    custom = record("small")
    custom.spec["size"] = "custom"
    custom.spec["model"]["num_layers"] = 2
    rows = record("small"), record("tiny", compile="on", seed=3), user, named, custom
    assert command(user) == "stepgauge bench step --model a.py:f --precision fp32"
    assert "--hf-config CONFIG.json" in command(named)
    assert "--size" not in command(custom) and "--num-layers 2" in command(custom)
    for row in rows:
        for line in (command(row), command(row, precision="fp32 bf16", turns=3)):
            words = line.split()[1:]
            _, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
            assert bound.args or bound.kwargs


def test_a_page_of_one_row_has_no_findings_and_counts_predictions_separately(record, tmp_path):
    row = dataclasses.replace(record("small"), kind="profile")
    beside = dataclasses.replace(row, kind="pipeline", metrics={}, provenance="modelled")
    page = run_page([row, beside], tmp_path)
    page_of_layouts = Page(title="", sections=[], facts={}, findings=[]).html()
    assert "Layouts and schedules are compared in their own sections" in page_of_layouts
    assert page.findings is None and page.facts["Rows"] == "1 measured, 1 predicted"


def test_a_choice_is_answered_by_speedup_and_phase(record):
    def row(forward, optimizer, **spec):
        times = {"forward_ms": forward, "optimizer_ms": optimizer, "step_ms": forward + optimizer}
        metrics = {name: Sample.of([ms, 1.01 * ms], "ms") for name, ms in times.items()}
        return dataclasses.replace(record("small", **spec), metrics=metrics)

    rows = [row(80.0, 20.0), row(40.0, 20.2, precision="bf16")]
    text = choice_answer(rows, "precision")
    speedup, apart = (
        "precision=bf16 is 1.66 times as fast as precision=fp32",
        "(measured at different times, not in turns)",
    )
    assert text.startswith(f"{speedup} {apart}. With precision=bf16 at ")
    assert "forward 2.0 × faster, optimizer unchanged" in text
    assert len(pairs(rows, {"precision": "fp32"})) == 1
    fp16 = row(90.0, 20.0, precision="fp16")
    turned = [of_turns([each] * 3, "2026-11-23T10:00:00+00:00") for each in rows]
    assert choice_answer([*turned, fp16], "precision").startswith(
        f"{speedup}. precision=fp16 is 0.91 times as fast as precision=fp32 {apart}."
    )
    assert "forward 80 %, optimizer 20 %" in answer(rows)
    assert answer([]) == "No row could be measured; the table gives the reasons."


def test_exposed_time_below_zero_is_not_shown():
    metrics = {"step_ms": Sample.exact(5.0, "ms"), "exposed_ms": Sample.exact(-0.2, "ms")}
    table = record_table([Record(kind="data-parallel", spec={"wrapper": "flat"}, metrics=metrics)])
    assert table.rows[0][table.columns.index("exposed ms")] == NOT_MEASURABLE


def test_a_value_of_several_words_is_quoted():
    spec = LayoutSpec(model=ModelSpec.preset("nano"), size="nano", layout="dp2 zero1", batch=4)
    assert "--layout 'dp2 zero1' --batch 4" in command(Record.of(spec))
    assert "--precision fp32 bf16" in command(Record.of(spec), precision="fp32 bf16")


def test_the_answer_mentions_that_it_ignores_disturbed_rows(record):
    quick, slow = record("nano", step=[5.0, 50.0]), record("tiny", step=[20.0, 20.1])
    assert answer([quick]).startswith("All rows were disturbed. A step takes ")
    assert answer([quick, slow]).startswith("The only undisturbed step takes 20.05 ms (")
    slower = record("mini", step=[30.0, 30.1])
    text = answer([quick, slow, slower])
    assert text.startswith("The longest undisturbed step takes 30.05 ms (size=mini)")
    assert "The shortest takes 20.05 ms (size=tiny)" in text
    assert answer([slow]).startswith("A step takes 20.05 ms")
