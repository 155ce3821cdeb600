"""`predict` and what it refuses, and a prediction beside its measurement."""

import json
from pathlib import Path

import pytest

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.store import RunStore

H100 = Path(__file__).parents[2] / "hardware" / "h100-sxm.json"
PREDICT = ("predict", "--precision", "bf16", "--hardware", H100)
NANO = ("--size", "nano", "--context", "64", "--vocab-size", "1024", "--device", "cpu")


def test_rows_are_modelled_and_their_terms_can_be_seen(stepgauge):
    status, out, err = stepgauge(*PREDICT, "--size", "medium", "2.7b", "--format", "json")
    assert status == 0, err
    rows = json.loads(out)
    assert [row["spec"]["size"] for row in rows] == ["medium", "2.7b"]
    assert {row["provenance"] for row in rows} == {"modelled"}
    status, out, err = stepgauge(*PREDICT, "--size", "2.7b", "--terms")
    assert status == 0, err
    assert "matmul tn bf16" in out and "interpolated" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layout", "pp2 1f1b"), "only a data axis is predicted yet"),
        (("--layout", "dp2", "--phases", "forward"), "phases is no option of a step over 2 ranks"),
        (("--layout", "dp2"), "has no all_reduce between 2 ranks"),
    ],
)
def test_what_is_not_predicted_is_told(stepgauge, arguments, said):
    status, _, err = stepgauge(*PREDICT, *arguments)
    assert status == 2
    assert said in err


def test_a_file_that_is_not_there(stepgauge, tmp_path):
    status, _, err = stepgauge("predict", "--hardware", tmp_path / "none.json")
    assert status == 2 and "no hardware file at" in err


def made_up():
    """A machine on which every operation of a nano step has been timed once."""
    sizes = {"matmul": "mnk", "rmsnorm": "mn", "attention": "htd", "cross-entropy": "mv"}
    names = [f"matmul {layout} fp32" for layout in ("nt", "nn", "tn")]
    for direction in ("forward", "backward"):
        names += [f"rmsnorm {direction} fp32", f"attention sdpa {direction} fp32"]
        names.append(f"cross-entropy {direction}")
    tables = {
        name: OperationTable(axes, ((64,) * len(axes) + (10.0,),))
        for name in names
        for axes in [tuple(sizes[name.split()[0]])]
    }
    tables["optimizer adamw fp32"] = OperationTable(("numel",), ((1e6, 100.0),))
    tables["traffic"] = OperationTable(("bytes",), ((1e6, 10.0), (1e8, 900.0)))
    return HardwareFile(name="cpu", operations=tables)


def test_a_step_is_predicted_before_it_is_measured(stepgauge, tmp_path):
    path = tmp_path / "cpu.json"
    made_up().write(path)
    out = tmp_path / "run"
    status, text, err = stepgauge(
        "bench", "step", *NANO, "--steps", "2", "--warmup", "1", "--seconds", "0",
        "--hardware", path, "--out", out,
    )  # fmt: skip
    assert status == 0, err
    assert "predicted" in text and "error" in text
    assert "1 of 1 rows predicted" in err and "Error of the predicted step over 1 rows" in err
    modelled, measured = RunStore(out).read().records
    assert (modelled.provenance, measured.provenance) == ("modelled", "measured")
    assert modelled.key == measured.key
