"""`stepgauge predict` and its errors, and predictions next to measurements."""

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from tests.cpu_machine import made_up, wired
from tests.sentences import one_sentence

from stepgauge.cli.predict import _announce_traces
from stepgauge.cli.predictions import predict_rows
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore

H100 = Path(__file__).parents[2] / "hardware" / "h100-sxm.json"
PREDICT = ("predict", "--precision", "bf16", "--hardware", H100)
NANO = ("--size", "nano", "--context", "64", "--vocab-size", "1024", "--device", "cpu")


def test_rows_are_modelled_and_terms_prints_their_parts(stepgauge):
    status, out, err = stepgauge(*PREDICT, "--size", "medium", "2.7b", "--format", "json")
    assert status == 0, err
    rows = json.loads(out)
    assert [row["spec"]["size"] for row in rows] == ["medium", "2.7b"]
    assert {row["provenance"] for row in rows} == {"modelled"}
    status, out, err = stepgauge(*PREDICT, "--size", "medium", "2.7b", "--terms")
    assert status == 0, err
    assert "matmul tn bf16" in out and "interpolated" in out
    for size in ("medium", "2.7b"):
        assert re.search(rf"size={size}: terms of the predicted step, [\d.]+ ms ± \d+%, on ", out)
        assert f"size={size}: parts of the peak of" in out
    assert "optimizer state" in out
    status, out, _ = stepgauge(*PREDICT, "--size", "2.7b", "--terms", "--format", "json")
    assert status == 0 and "terms" in json.loads(out)[0]["tables"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "pp2 1f1b"), "has no send_recv"),
        (
            ("--layout", "tp2", "--phases", "forward"),
            "phases is not an option of bench layout",
        ),
        (("--layout", "dp2", "--phases", "forward"), "not an option of bench data-parallel"),
        (("--layout", "dp2"), "has no all_reduce between 2 ranks"),
        (("--layout", "dp2", "--batch", "3"), "2 data ranks do not divide; choose a multiple of 2"),
    ],
)
def test_unpredictable_rows_are_refused(stepgauge, arguments, message):
    status, _, err = stepgauge(*PREDICT, *arguments)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--attention", "triton"),
            "which stepgauge calibrate times in bf16 only: choose a 16-bit",
        ),
        (
            ("--attention", "sdpa-flash"),
            "supports only 16-bit types on a GPU; --precision is 'fp32'",
        ),
        (
            ("--attention", "sdpa-cudnn", "--precision", "tf32"),
            "supports only 16-bit types on a GPU",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["none", "dp2", "pp2 1f1b m4"])
def test_attention_in_fp32_that_no_calibration_times(stepgauge, arguments, message, layout):
    """Such a step was to be calibrated again, which cannot help."""
    asked = ("predict", "--size", "small", "--hardware", "h200-sxm", "--layout", layout)
    status, _, err = stepgauge(*asked, *arguments)
    assert status == 2 and message in err and "calibrate again" not in err


def test_steps_as_cuda_graphs_of_several_commands_are_several_tables(stepgauge):
    """bench layout does not record a lone data axis, which bench data-parallel does."""
    asked = ("predict", "--size", "small", "--precision", "bf16", "--hardware", "dgx-h100",
             "--cuda-graphs")  # fmt: skip
    status, out, err = stepgauge(*asked, "--layout", "dp2", "tp2", "pp2 1f1b m2", "--terms")
    assert status == 0, err
    assert "bucketed" in out and "tp2" in out and "pp2 1f1b m2" in out


def test_refused_rows_are_named_and_the_others_predicted(stepgauge):
    asked = ("predict", "--size", "small", "--hardware", "dgx-h100", "--format", "json")
    status, out, err = stepgauge(
        *asked, "--layout", "none", "dp3", "tp2", "--context", "512", "511"
    )
    assert status == 1
    rows = [(row["spec"].get("layout", ""), row["spec"]["model"]) for row in json.loads(out)]
    assert [(layout, model["context_length"]) for layout, model in rows] == [
        ("", 512), ("", 511), ("tp2", 512),
    ]  # fmt: skip
    assert "dp3 context=512: not predicted, --batch is 4, which 3 data ranks do not divide" in err
    assert "tp2 context=511: not predicted, --context is 511, which tp2 does not divide" in err
    assert one_sentence(err).endswith("3 of 6 rows were not predicted")
    status, out, err = stepgauge(
        *asked, "--precision", "fp32", "float8"
    )  # refused by the predictor
    assert status == 1 and len(json.loads(out)) == 1
    assert "none precision=float8: not predicted, --precision is 'float8'" in err


def test_rows_that_do_not_fit_the_device_say_so(stepgauge):
    asked = ("predict", "--size", "10b", "--context", "4096", "--precision", "bf16", "--batch", "32",
             "--hardware", H100.with_name("dgx-h100.json"), "--format", "json")  # fmt: skip
    status, out, err = stepgauge(*asked, "--layout", "none", "dp16", "dp8 zero3 tp4 overlap")
    assert status == 0, err
    alone, dp16, fits = json.loads(out)
    for row in (alone, dp16):
        needs = sum(nbytes for _, nbytes, _ in row["tables"]["memory"][1:]) / 2**30
        assert f"does not fit: a rank needs {needs:.1f} GiB, its device has 78.5" in row["note"]
    assert "does not fit" not in fits["note"]


@pytest.fixture
def linked(tmp_path):
    """Returns a file with the H100's operations and the H200's links."""
    h100 = HardwareFile.read(H100)
    h200 = HardwareFile.read(H100.with_name("h200-nvlink.json"))
    h100.with_links(h200.links).write(tmp_path / "linked.json")
    return tmp_path / "linked.json"


def test_a_layout_gives_the_row_of_the_command_that_measures_it(stepgauge, linked):
    layouts = ["none", "dp2 zero1", "tp2", "pp2 1f1b m4", "dp2 zero2 tp2", "pp2 zbv dp2"]
    status, out, err = stepgauge(
        "predict", "--size", "medium", "--precision", "bf16", "--batch", "8", "--hardware", linked,
        "--layout", *layouts, "--format", "json",
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out)
    assert [row["kind"] for row in rows] == ["step", "data-parallel", *["layout"] * 4]
    # --batch is the global batch; rows of bench data-parallel have the batch of one rank
    assert [row["spec"]["batch"] for row in rows] == [8, 4, 8, 8, 8, 8]
    assert all(row["metrics"]["peak_bytes"]["median"] > 2**30 for row in rows)
    assert rows[3]["metrics"]["bubble"]["median"] > 0
    remark = "the layout has no mN, so there is one micro-batch"
    assert [remark in row["note"] for row in rows] == [False] * 5 + [True]
    status, out, err = stepgauge(
        "predict", "--size", "medium", "--precision", "bf16-pure", "--batch", "8", "--hardware",
        linked, "--layout", "pp2 1f1b m4", "--phases", "backward", "--terms",
    )  # fmt: skip
    assert status == 0, err
    assert "waits for other stages" in out


def test_layouts_that_different_commands_measure_are_one_table(stepgauge, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    layouts = ["none", "dp2 zero1", "tp2", "pp2 1f1b m4"]
    asked = ("predict", "--size", "medium", "--precision", "bf16", "--batch", "8", "--layout",
             *layouts, "--hardware", "dgx-h100")  # fmt: skip
    status, out, err = stepgauge(*asked)
    assert status == 0, err
    caption, _, headings, *lines = out.splitlines()
    assert "batch=8" in caption and headings.split()[0] == "layout" and "GiB" in headings
    assert [line.split("  ")[0].strip() for line in lines[:4]] == layouts
    status, out, err = stepgauge(*asked, "--format", "csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["layout"] for row in rows] == ["none", "dp2 zero1", *layouts[2:]], err
    one_by_one = json.loads(stepgauge(*asked, "--format", "json")[1])
    steps = [row["metrics"]["step_ms"]["median"] for row in one_by_one]
    assert [float(row["step ms"]) for row in rows] == pytest.approx(steps)


def test_hides_prints_whether_each_axis_hides(stepgauge):
    asked = ("predict", "--size", "2.7b", "--precision", "bf16", "--hides", "--hardware",
             H100.with_name("dgx-h100.json"))  # fmt: skip
    layouts = ("none", "dp8", "pp2 1f1b m4 dp2 zero3 tp2")
    status, out, err = stepgauge(*asked, "--batch", "16", "--layout", *layouts)
    assert status == 0, err
    for message in (
        "forward FLOPs", "nothing is sent", "gradients over 8 data ranks, during backward",
        "weights gathered over 2 ranks, during forward", "weights and gradients over 2 ranks",
        "activations over 2 tensor ranks, during a block", "between stages of 16 blocks",
    ):  # fmt: skip
        assert message in out, message
    status, out, err = stepgauge(*asked, "--batch", "16", "--layout", "dp4 torch-fsdp")
    assert status == 0 and "weights gathered over 4 ranks, during forward" in out, err
    status, _, err = stepgauge(
        *asked, "--layout", "pp2 1f1b m4", "--phases", "backward", "--precision", "bf16-pure"
    )
    assert status == 2 and "--hides needs whole steps of a preset" in err


def test_a_missing_hardware_file(stepgauge, tmp_path):
    status, _, err = stepgauge("predict", "--hardware", tmp_path / "none.json")
    assert status == 2 and "no hardware file at" in err


def test_a_gpus_file_is_refused_for_a_cpu_and_vice_versa(stepgauge, tmp_path):
    path = tmp_path / "cpu.json"
    dataclasses.replace(made_up(), threads=2).write(path)
    for asked, file, message in (
        ("cpu", H100, "is that of an NVIDIA GPU: choose cuda"),
        ("mps", H100, "is that of an NVIDIA GPU: choose cuda"),
        ("cuda", path, "of a CPU"),
    ):
        for layout in ("none", "tp2"):
            options = ("--size", "nano", "--layout", layout, "--device", asked)
            status, out, err = stepgauge("predict", *options, "--hardware", file)
            assert status == 2 and out == "" and message in err


def test_the_default_device_is_that_of_the_file(stepgauge, tmp_path):
    dataclasses.replace(made_up(), threads=2).write(tmp_path / "cpu.json")
    for file, device in ((tmp_path / "cpu.json", "cpu"), ("h100-sxm", "cuda")):
        asked = ("--size", "nano", "--context", "64", "--vocab-size", "1024", "--format", "json")
        status, out, err = stepgauge("predict", *asked, "--hardware", file)
        assert status == 0, err
        assert json.loads(out)[0]["spec"]["device"] == device


def test_a_file_without_needed_operations_is_one_sentence(stepgauge, tmp_path):
    path = tmp_path / "cpu.json"
    machine = made_up()
    machine.operations.pop("traffic")
    dataclasses.replace(machine, threads=2).write(path)
    status, out, err = stepgauge("predict", *NANO, "--hardware", path)
    assert status == 2 and out == ""
    assert "has no 'traffic': run stepgauge calibrate again, without --only" in err


def test_a_step_is_predicted_before_it_is_measured(stepgauge, tmp_path):
    path = tmp_path / "cpu.json"
    made_up().write(path)
    out = tmp_path / "run"
    asked = (
        *NANO,
        "--steps",
        "2",
        "--warmup",
        "1",
        "--seconds",
        "0",
        "--hardware",
        path,
        "--out",
        out,
    )
    status, text, err = stepgauge("bench", "step", *asked)
    assert status == 0, err
    assert "predicted" in text and "error" in text
    assert "1 of 1 rows predicted" in err and "Error of the predicted step over 1 rows" in err
    modelled, measured = RunStore(out).read().records
    assert (modelled.provenance, measured.provenance) == ("modelled", "measured")
    assert modelled.key == measured.key
    # `validate` of the same row reuses the run's row and its prediction.
    status, text, err = stepgauge("validate", *asked, "--format", "json")
    assert status == 0, err
    table, groups = json.loads(text)
    assert table["rows"][0]["predicted ms"] == modelled.median("step_ms")
    assert "predicted after" not in table["rows"][0].get("remark", "") and groups["rows"] == []
    assert "Predicted and measured" in (out / "report.html").read_text()
    assert groups["caption"] == ""  # because its table is empty


def test_validate_names_each_row_by_its_layout(stepgauge, tmp_path):
    path = tmp_path / "cpu.json"
    wired(2).write(path)
    status, text, err = stepgauge(
        "validate", *NANO, "--batch", 2, "--layout", "none", "zero1 dp2", "--steps", 1, "--warmup", 1,
        "--seconds", 0, "--hardware", path, "--out", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, err
    for layout in ("none", "dp2 zero1"):
        assert f"\nlayout={layout} " in text  # a row of the table
        assert f"\nlayout={layout}: warming up" in err and f"\nlayout={layout}: forward ms" in err
    assert "The error is the sum of its parts: forward, backward, optimizer" in text


def test_a_bar_shows_which_rows_are_predicted(monkeypatch, tmp_path):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("stepgauge.cli.console.error_console", terminal)
    path = tmp_path / "cpu.json"
    made_up().write(path)
    specs = [StepSpec(model=ModelSpec.preset("nano"), batch=batch) for batch in (1, 2)]
    assert len(predict_rows(specs, tmp_path / "run", path, fresh=False)) == 2
    shown = Text.from_ansi(terminal.file.getvalue()).plain
    assert re.search(r"predicting .* 2/2 rows", shown)


def test_accumulation_over_a_data_axis_gives_the_row_of_bench_layout(stepgauge):
    """`plan` prints such commands, so they must be predicted as they were planned."""
    asked = ("--size", "nano", "--context", 64, "--layout", "dp2 zero1", "none", "--hardware",
             "dgx-h100", "--format", "json")  # fmt: skip
    status, out, err = stepgauge("predict", *asked, "--accumulation", 2)
    assert status == 0, err
    twice = json.loads(out)
    assert [(row["kind"], row["spec"]["accumulation"]) for row in twice] == 2 * [("layout", 2)]


def test_rows_that_torch_traces_are_announced(capsys):
    experts = ModelSpec.preset("nano", num_experts=4, experts_per_token=2)
    _announce_traces([StepSpec(model=experts), StepSpec(model=ModelSpec.preset("nano"))])
    assert capsys.readouterr().err == "tracing the step of 1 row: seconds to a minute each\n"
