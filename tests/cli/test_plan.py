"""`stepgauge plan`: its tables and records, --verify, and errors."""

import functools
import io
import json
import re
import types
from pathlib import Path

import pytest
from rich.console import Console
from tests.cpu_machine import wired

from stepgauge.bench import operators
from stepgauge.cli.fitting import GAP, column_widths, columns_that_fit
from stepgauge.cost.data_axis.wrapper_host import LEFT_OUT
from stepgauge.report.plan import close_to_first, joined_notes, plan_table, training_run
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.store import RunStore
from stepgauge.spec.units import GIB
from stepgauge.validate import runnable
from stepgauge.validate.predicted import predicted

HARDWARE = Path(__file__).parents[2] / "hardware"
SMALL = ("--size", "medium", "--context", "1024", "--gpus", "8", "--global-batch", "32")
TINY = ("--size", "nano", "--num-layers", 1, "--d-model", 16, "--num-heads", 1, "--d-ff", 16,
        "--vocab-size", 11, "--context", 8, "--hardware", "dgx-h100")  # fmt: skip


def test_rows_are_modelled_records_of_bench_layout(stepgauge):
    status, out, err = stepgauge(
        "plan", *SMALL, "--precision", "bf16", "--tokens", "10B", "--top", "2", "--format", "json",
        "--hardware", HARDWARE / "dgx-h200.json",
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out)
    assert [(row["kind"], row["provenance"]) for row in rows] == [("layout", "modelled")] * 2
    assert all(row["metrics"]["days"]["median"] > 0 for row in rows)
    assert {"terms", "memory"} <= rows[0]["tables"].keys()
    days = rows[0]["metrics"]["days"]["median"]
    found = re.fullmatch(
        r"10B tokens take (\S+) days with layout 1, (\S+) GPU-hours",
        training_run([Record.from_json(json.dumps(row)) for row in rows], "10B"),
    )
    assert found and float(found[1]) == pytest.approx(days, rel=1e-3)
    assert float(found[2].replace(",", "")) == pytest.approx(8 * 24 * days, rel=1e-3)


def test_tables_fit_80_columns_and_captions_state_common_values(monkeypatch, stepgauge):
    tables = []
    monkeypatch.setattr(
        "stepgauge.cli.plan.print_table", lambda table, *_, **__: tables.append(table)
    )
    asked = ("--top", "3", "--tokens", "1T", "--hardware", HARDWARE / "dgx-h100.json")
    assert stepgauge("plan", *SMALL, *asked)[0] == 0
    assert "tokens a step in fp32 on 8 x NVIDIA H100" in tables[0].caption
    assert "fit in 78 GiB; predicted for dgx-h100, " in tables[0].caption
    assert "dgx-h100" in tables[0].to("csv")
    assert "accumulation 1" in tables[0].caption and "accumulation" in tables[0].hidden
    ranked, parts = ([dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in tables)
    for row, held in zip(ranked, parts, strict=True):
        assert held["peak"] == pytest.approx(row["peak GiB"])
        assert held["peak"] + held["outside"] == pytest.approx(held["total"])
    for table in tables:
        part = columns_that_fit(table.for_display(), 80)
        assert list(part.columns[:2]) == ["#", "layout"]
        widths = column_widths(part, 80)
        assert sum(widths) + GAP * (len(widths) - 1) <= 80


def test_compile_modes_are_ranked_together(stepgauge):
    asked = ("plan", "--size", "2.7b", "--num-layers", "2", "--context", "1024", "--gpus", "2",
             "--global-batch", "4", "--precision", "bf16", "--hardware", "dgx-h100")  # fmt: skip
    status, out, err = stepgauge(
        *asked, "--compile", "off", "blocks", "max-autotune", "--top", "99"
    )
    assert status == 0, err
    assert "fastest by compile: blocks " in out and "; off " in out
    assert "compile max-autotune: --compile is 'max-autotune'; predicted are off" in out
    assert "--compile blocks" in out.partition("Run the first layout")[2]
    ranked = json.loads(stepgauge(*asked, "--compile", "off,blocks", "--format", "json")[1])
    steps = [row["metrics"]["step_ms"]["median"] for row in ranked]
    modes = {row["spec"]["compile"] for row in ranked}
    assert steps == sorted(steps) and modes == {"off", "blocks"}
    (best,) = json.loads(stepgauge(*asked, "--top", "1", "--format", "json")[1])
    assert best == next(row for row in ranked if row["spec"]["compile"] == "off")
    status, _, err = stepgauge(*asked, "--compile", "max-autotune")
    assert status == 2 and "predicted are off, on, blocks, reduce-overhead" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "many"), "--tokens is 'many'; it must be a number such as 300B or 1e11"),
        (("--tokens", "300"), "--tokens is '300'; a single step has 32,768"),
        (("--top", "0"), "--top is 0; it must be at least 1"),
        (("--d-model", "17"), "--num-heads is 16, which does not divide --d-model 17"),
    ],
)
def test_wrong_options_are_refused(stepgauge, arguments, message):
    status, _, err = stepgauge("plan", *SMALL, *arguments, "--hardware", HARDWARE / "dgx-h100.json")
    assert status == 2 and message in err


@pytest.mark.parametrize(("text", "tokens"), [("300B", 3e11), ("1e11", 1e11), ("1.5E+12", 1.5e12)])
def test_tokens_are_a_number_with_or_without_a_unit(text, tokens):
    assert PlanSpec(model=ModelSpec.preset("nano"), tokens=text).num_tokens == tokens


@pytest.mark.parametrize("text", ["1e", "e11", "1e999", "9" * 400])
def test_other_numbers_of_tokens_are_refused(text):
    with pytest.raises(ValueError, match="it must be a number such as 300B or 1e11"):
        PlanSpec(model=ModelSpec.preset("nano"), tokens=text)


def test_the_help_gives_one_default_of_the_device(stepgauge):
    help = " ".join(stepgauge("plan", "--help")[1].split())
    assert "[default: that of the hardware file]" in help and "[default: cuda]" not in help


def test_a_missing_hardware_file_is_named_with_those_there_are(stepgauge):
    message = stepgauge("plan")[2]
    assert message.startswith("stepgauge: plan needs a value for --hardware: ")
    assert "h100-sxm, " in message and message.endswith("or a file of stepgauge calibrate\n")


def test_a_bar_shows_the_progress_in_a_terminal(stepgauge, monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr("stepgauge.cli.console.error_console", terminal)
    assert stepgauge("plan", *TINY, "--gpus", 2, "--global-batch", 2, "--top", 2)[0] == 0
    assert re.search(r"finding .*1/2.* layouts", terminal.file.getvalue())


def planned_row(step_ms, *, batch, checkpointing):
    spec = {"model": {}, "layout": "dp8 zero3", "batch": batch, "accumulation": 64 // batch}
    spec["compile"] = "off"
    metrics = {"step_ms": step_ms, "spread": 0.1, "peak_bytes": 80 * GIB, "days": 15.0, "mfu": 0.5}
    samples = {name: Sample.exact(value, "") for name, value in metrics.items()}
    return Record(kind="layout", spec={**spec, "checkpointing": checkpointing}, metrics=samples)


def test_rows_that_differ_in_one_setting_show_it_in_a_narrow_terminal():
    rows = [
        planned_row(12_963.0, batch=16, checkpointing="selective"),
        planned_row(13_528.0, batch=16, checkpointing="none"),
        planned_row(13_600.0, batch=32, checkpointing="none"),
    ]
    shown = columns_that_fit(plan_table(rows, "").for_display(), 44)
    assert shown.columns == ["#", "layout", "step ms", "micro batch", "checkpointing"]


def test_memory_of_a_tiny_network_is_not_in_gib(stepgauge):
    status, out, err = stepgauge("plan", *TINY, "--gpus", 2, "--global-batch", 2, "--top", 2)
    assert status == 0, err
    ranked = out.partition("Communication")[0]
    assert "Memory of the fullest rank in MiB" in ranked and "GiB   " not in ranked


def test_bert_is_refused(stepgauge, tmp_path):
    file = tmp_path / "bert.json"
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2}
    file.write_text(json.dumps({"model_type": "bert", **sizes, **counts}))
    status, _, err = stepgauge("plan", "--hf-config", file, "--gpus", 2, "--hardware", "dgx-h100")
    assert status == 2
    assert err.startswith("stepgauge: plan does not support BERT, ") and err.count("\n") == 1


def test_a_layout_of_several_nodes_is_started_by_torchrun(stepgauge):
    asked = ("plan", "--size", "nano", "--context", "64", "--top", "1", "--hardware", "dgx-h100")
    for gpus, message in ((4, "\n  stepgauge bench layout"),
                       (12, "torchrun --nnodes 2 --nproc-per-node 6 ")):  # fmt: skip
        status, out, err = stepgauge(*asked, "--gpus", str(gpus), "--global-batch", "12")
        assert status == 0, err
        assert message in out
        assert not out.rstrip().endswith(")")  # the last line is the command and nothing else
        assert "in fp32, which is the default: --precision bf16 has 15 times the peak FLOP/s" in out


def test_missing_host_costs_are_listed_as_an_assumption(stepgauge):
    asked = ("plan", *SMALL, "--precision", "bf16", "--top", "3", "--hardware")
    text = stepgauge(*asked, "dgx-h100")[1]
    (line,) = [
        line for line in text.split("\nAssumptions\n")[1].splitlines() if "host cost" in line
    ]
    assert line.startswith(
        "  host cost assumed to be that of h200-sxm (calibrate --ranks measures it): "
    )
    assert "± is the possible error of a step" in text
    assert "values of a hidden state" in text and "in fp32" not in text


def test_the_reason_is_given_if_no_layout_can_be_predicted(stepgauge):
    asked = ("plan", "--size", "small", "--gpus", "7", "--global-batch", "8", "--hardware")
    status, _, err = stepgauge(*asked, HARDWARE / "h100-sxm.json")
    assert status == 2 and "layouts that fit can be predicted; the first: " in err
    assert "h100-sxm has no send_recv; stepgauge calibrate --ranks 2" in err


def test_a_machine_without_operations_or_a_base(stepgauge):
    status, _, err = stepgauge("plan", *SMALL, "--hardware", HARDWARE / "h200-nvlink.json")
    assert status == 2 and "has links only" in err


@pytest.fixture
def two_cores(tmp_path):
    path = tmp_path / "two.json"
    wired(2).write(path)
    return path


NANO = ("--size", "nano", "--context", "16", "--vocab-size", "256", "--device", "cpu")


def test_verify_runs_the_best_layouts_that_this_machine_can_run(
    stepgauge, tmp_path, two_cores, monkeypatch
):
    monkeypatch.setattr(runnable, "available_cores", lambda: 2)
    asked = ("plan", *NANO, "--gpus", "2", "--global-batch", "2", "--hardware", two_cores)
    out = tmp_path / "run"
    status, text, err = stepgauge(*asked, "--top", "2", "--verify", "1", "--out", out)
    assert status == 0, err
    assert "memory of a CPU is not predicted" in text
    assert "Error of the predicted step over 1 rows" in text
    modelled, measured = RunStore(out).read().records
    assert (modelled.provenance, measured.provenance) == ("modelled", "measured")
    assert modelled.key == measured.key and measured.spec["layout"] in text
    # With more ranks than cores the plan is printed, and why it cannot be run.
    monkeypatch.setattr(runnable, "available_cores", lambda: 1)
    status, text, err = stepgauge(*asked, "--verify", "1", "--out", out)
    assert status == 2 and "Communication compared with computation" in text
    assert "has 2 ranks, which need one core each; this machine has 1" in err


def test_layouts_for_other_machines_are_not_run_here(stepgauge, monkeypatch):
    asked = (*SMALL, "--hardware", HARDWARE / "dgx-h100.json", "--verify", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, out, err = stepgauge("plan", *asked)
    assert status == 2 and "Communication compared with computation" in out
    assert "this machine can run no layout of the plan: --device 'cuda' is not available" in err
    spec = LayoutSpec(model=ModelSpec.preset("nano"), layout="none", device="cuda")
    gpu = types.SimpleNamespace(type="cuda", __str__=lambda self: "cuda")
    monkeypatch.setattr(runnable.devices, "resolve", lambda name: gpu)
    monkeypatch.setattr(runnable, "run_isolated", lambda ask, device: 80 * 2**30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert runnable.why_not_here(spec, 79 * 2**30) == ""
    assert "needs 81.0 GiB per rank; a GPU of this machine has 80.0" in runnable.why_not_here(
        spec, 81 * 2**30
    )


def test_a_file_of_another_kind_of_machine(stepgauge):
    asked = (*NANO, "--gpus", "2", "--global-batch", "2", "--hardware", HARDWARE / "dgx-h100.json")
    status, _, err = stepgauge("plan", *asked)
    assert status == 2 and "is that of an NVIDIA GPU: choose cuda" in err


NET = """
import torch
from torch import nn
def net():
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    return layers, (torch.randn(4, 32), torch.zeros(4, dtype=torch.long)), nn.CrossEntropyLoss()
"""


def device_us(row):
    """Returns the device's computing time in a step, without waiting."""
    head, *terms = row["tables"]["terms"]
    phases = ("forward", "backward", "optimizer")
    return sum(term[head.index("us")] for term in terms if term[0] in phases)


def test_a_network_without_formulas_is_screened_as_a_dense_one_and_traced(
    stepgauge, tmp_path, monkeypatch
):
    monkeypatch.setattr(operators, "_trace_in_process", functools.cache(operators._trace))
    wired(8).write(tmp_path / "cpu.json")
    asked = (
        "plan", "--size", "nano", "--num-layers", 2, "--context", 32, "--vocab-size", 64, "--gpus", 2,
        "--global-batch", 2, "--hardware", tmp_path / "cpu.json",
    )  # fmt: skip
    status, out, err = stepgauge(
        *asked, "--num-experts", 4, "--experts-per-token", 2, "--top", 2, "--format", "json"
    )
    assert status == 0 and "tracing dp2 " in err, err
    rows = json.loads(out)
    assert {row["spec"]["model"]["num_experts"] for row in rows} == {4}
    predicted_here = [
        predicted(LayoutSpec(**{**row["spec"], "model": ModelSpec(**row["spec"]["model"])}),
                  wired(8)).median("step_ms")
        for row in rows
    ]  # fmt: skip
    assert [row["metrics"]["step_ms"]["median"] for row in rows] == pytest.approx(predicted_here)
    status, out, err = stepgauge(*asked, "--window", 8, "--top", 1)
    assert status == 0 and "screened as those of a dense network" in out and "What hides" not in out


def test_a_users_network_is_ranked(stepgauge, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(NET)
    asked = ("plan", "--model", f"{file}:net", "--gpus", "2", "--precision", "bf16")
    on_gpus = (*asked, "--hardware", HARDWARE / "dgx-h100.json")
    status, out, err = stepgauge(*on_gpus, "--format", "json", "--global-batch", "4")
    assert status == 0, err
    rows = json.loads(out)
    wrappers = ("bucketed", "zero1", "zero2", "zero3")
    layouts = {row["spec"]["layout"]: row["spec"]["accumulation"] for row in rows}
    assert layouts == {**{f"dp2 {name}": 2 for name in wrappers}, "pp2 1f1b m4": 4}
    times = [row["metrics"]["step_ms"]["median"] for row in rows]
    assert times == sorted(times)
    state = {row["spec"]["layout"]: dict(r[:2] for r in row["tables"]["memory"])["optimizer state"]
             for row in rows}  # fmt: skip
    assert state["dp2 bucketed"] > state["dp2 zero1"] >= state["dp2 bucketed"] / 2
    status, out, err = stepgauge(*on_gpus)
    assert status == 0, err
    assert "net of" in out and "2 of its batches a step" in out and "5 fit in 78 GiB" in out
    assert "bench layout --model" in out and "--batch" not in out
    status, out, err = stepgauge(
        *on_gpus, "--compile", "on", "--format", "json", "--global-batch", "4"
    )
    assert status == 0, err
    compiled = json.loads(out)
    assert {row["spec"]["compile"] for row in compiled} == {"on"}
    assert {row["spec"]["layout"] for row in compiled} == {f"dp2 {name}" for name in wrappers}
    assert max(device_us(row) for row in compiled) < min(device_us(row) for row in rows)
    status, out, err = stepgauge(*on_gpus, "--global-batch", "3")
    assert status == 0, err
    assert "data: --global-batch is 3; 2 data ranks cannot share so many batches" in out
    status, _, err = stepgauge(*on_gpus, "--tokens", "1B")
    assert status == 2 and "--tokens is '1B'; the tokens of a user's model are not known" in err


def test_the_search_for_the_largest_micro_batch_ends_for_a_tiny_network(stepgauge):
    """A million sequences would fit; the search stops before that."""
    status, out, err = stepgauge("plan", *TINY, "--gpus", 1, "--global-batch", 1, "--top", 1)
    assert status == 0, err
    assert "the largest micro-batch of the first layout is 524288" in out


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([100.0], ""),
        ([100.0, 103.0], ""),
        ([100.0, 101.0, 103.0], "layout 2 is predicted within 2% of the first"),
        ([100.0, 100.5, 101.9, 102.1], "layouts 2 and 3 are predicted within 2% of the first"),
    ],
)
def test_layouts_that_a_prediction_cannot_tell_apart_are_named(steps, sentence):
    rows = [
        Record(kind="layout", spec={}, metrics={"step_ms": Sample.of([ms], "ms")}) for ms in steps
    ]
    assert close_to_first(rows).startswith(sentence)
    assert bool(close_to_first(rows)) == bool(sentence)


def test_notes_of_several_rows_are_one_sentence_with_their_numbers():
    def row(note):
        return Record(kind="layout", spec={}, note=note)

    late = "if it launches 1.7 times as slowly, the step takes {} ms longer (compiled: fewer)"
    host, missing = f"the host limits this step: {late}", f"{LEFT_OUT}: "
    rows = [
        row(f"blocks 5 6; {host.format('8,165')}; {missing}tp2"),
        row("blocks 6 5"),
        row(f"{host.format('786')}; {missing}tp4, zero1"),
        row(host.format("1,000")),
    ]
    assert joined_notes(rows) == [
        f"{LEFT_OUT}: tp2, tp4, zero1",
        "row 1: blocks 5 6",
        f"rows 1, 3 and 4: {host.format('786 to 8,165')}",
        "row 2: blocks 6 5",
    ]
    assert joined_notes(rows[2:])[1] == f"all rows: {host.format('786 to 1,000')}"
    assert joined_notes(rows[3:]) == [host.format("1,000")]
