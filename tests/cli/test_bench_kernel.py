"""`bench kernel` and `bench op` as a user sees them."""

from pathlib import Path

import pytest

from stepgauge.spec.store import RunStore

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--rows", "64", "--width", "32", "--dtype", "fp32", "--seconds", "0", "--device", "cpu")


def test_each_pass_is_a_row_and_missing_peers_are_named(stepgauge, tmp_path):
    status, out, err = stepgauge(
        "bench", "kernel", "rms-norm", *SMALL, "--peers", "eager,liger", "--out", tmp_path
    )
    assert status == 0, err
    assert [r.spec["passes"] for r in RunStore(tmp_path).read().records] == [
        "forward",
        "backward",
        "both",
    ]
    assert "over" in out and "eager" in out
    assert "without liger: No module named" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rms-norm", "--peers", "dance"), "--peers is 'dance'; rms-norm has ours, eager"),
        (
            ("rms-norm", "--grid", "dance"),
            "--grid is 'dance'; choose one of default, anchors, norm-layers",
        ),
        (("adamw", "--passes", "forward"), "--passes is 'forward'; choose one of step"),
        (
            ("linear-cross-entropy", "--passes", "backward"),
            "linear-cross-entropy supports forward, both",
        ),
    ],
)
def test_mistakes(stepgauge, tmp_path, arguments, words):
    status, _, err = stepgauge(
        "bench", "kernel", *arguments, "--device", "cpu", "--out", tmp_path / "run"
    )
    assert status == 2
    assert words in err


OP = """
import torch
def inputs(device): return (torch.randn(64, 64, device=device),)
def right(x): return x @ x
def right_reference(x): return x @ x
def wrong(x): return 1.01 * (x @ x)
wrong_reference = right_reference
"""


def test_op_is_checked_and_placed_on_the_roofline(stepgauge, tmp_path):
    (tmp_path / "mine.py").write_text(OP)
    quick = ("--device", "cpu", "--seconds", "0", "--out", tmp_path / "run")
    status, out, err = stepgauge("bench", "op", f"{tmp_path / 'mine.py'}:right", *quick)
    assert status == 0, err
    assert "of the roofline" in out and "aten::mm" in out
    assert "USDT" not in out + err
    (record,) = RunStore(tmp_path / "run").read().records
    assert record.median("flops") == 2 * 64**3
    assert record.median("bytes") == 2 * 4 * 64**2
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    status, _, err = stepgauge("bench", "op", f"{tmp_path / 'mine.py'}:wrong", *quick)
    assert status == 1
    assert "wrong: relative error 1.0e-02" in err
    assert "ms" not in RunStore(tmp_path / "run").read().records[-1].metrics


def test_op_that_raises_is_one_sentence(stepgauge, tmp_path):
    (tmp_path / "mine.py").write_text(OP + "def bad(x): raise RuntimeError('no such tile')")
    target = f"{tmp_path / 'mine.py'}:bad"
    status, out, err = stepgauge(
        "bench", "op", target, "--device", "cpu", "--out", tmp_path / "run"
    )
    assert status == 1
    assert not out
    assert err.count("no such tile") == 1


def test_op_mistakes(stepgauge, tmp_path):
    (tmp_path / "mine.py").write_text(OP)
    for target, words in (
        (EXAMPLES / "saxpy.cu", "it needs a CUDA device"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        (EXAMPLES / "softmax.py", "name the function"),
        (f"{tmp_path / 'mine.py'}:nope", "defines no nope; it has inputs, right"),
    ):
        status, _, err = stepgauge("bench", "op", target, "--device", "cpu", "--out", tmp_path)
        assert status == 2
        assert words in err
