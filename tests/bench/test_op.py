"""Users' functions: each call gets unchanged inputs, and the result is checked."""

import pytest

from stepgauge.bench.op import run
from stepgauge.spec.analysis import Ceilings
from stepgauge.spec.op import OpSpec

FILE = """
import torch

def inputs(device):
    return (torch.ones(1000, device=device),)

def doubled_in_place(x): return x.mul_(2)
def doubled_in_place_reference(x): return x * 2

def filled(x): x.fill_(3)
def filled_reference(x): x.fill_(3)

def once(x):
    assert x[0] == 1, "called on inputs that were changed"
    x.add_(1)
def once_reference(x): once(x)

def wrong(x): x.fill_(3)
def wrong_reference(x): return x * 2

sums = torch.zeros(1000)
def adds_up(x): return sums.add_(x).clone()
def adds_up_reference(x): return x * 1

def expanded(x): return x[:1].sum() + 1
def expanded_inputs(device): return (torch.ones(1, device=device).expand(1000),)

def hidden(x): return torch.where(x.cumsum(0) > 500, -torch.inf, x)
def hidden_reference(x): return hidden(x)
def shown(x): return torch.where(x.cumsum(0) > 500, 7.0, x)
def shown_reference(x): return hidden(x)

def turned(x): return torch.complex(x, -x)
def turned_reference(x): return torch.complex(x, x)
def complex_product(x): return torch.complex(x, x) * (1 + 3e-7)
def complex_product_reference(x): return torch.complex(x, x)

def thinned(x): return (x * torch.eye(1000)).to_sparse()
def thinned_reference(x): return torch.eye(1000).to_sparse()
def of_sparse(x): return torch.sparse.mm(x, torch.ones(1000, 2))
def of_sparse_inputs(device): return (torch.eye(1000).to_sparse(),)

def number(x): return 3
number_inputs = lambda device: (1.0,)
number_flops = 10

def negative(x): return x
negative_bytes = -5
def not_a_number(x): return x
not_a_number_flops = float("nan")
def text(x): return x
text_bytes = lambda x: "many"

def nothing(x): x.sum()
def nothing_reference(x): x.sum()

def triton_kernel(x): raise RuntimeError("0 active drivers ([]). There should only be one.")
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    roof = Ceilings(flop_per_s=1e12, bytes_per_s=1e11, condition="")  # its own test measures it
    monkeypatch.setattr("stepgauge.bench.op.ceilings", lambda *_: roof)
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return lambda name: run(OpSpec(file=str(file), function=name, content="", seconds=0.02))


@pytest.mark.parametrize("name", ["doubled_in_place", "filled", "once"])
def test_inputs_that_a_function_changes_are_restored_before_each_call(measured, name):
    record = measured(name)
    assert record.status == "ok" and record.median("error") == 0
    assert record.median("bytes") == 2 * 1000 * 4  # read and written
    assert "changes its inputs" in record.note


def test_changed_inputs_are_compared_with_the_reference(measured):
    record = measured("wrong")
    assert record.status == "failed" and record.note.startswith("wrong: relative error")


def test_a_function_that_is_right_only_in_its_first_call_fails(measured):
    record = measured("adds_up")
    assert record.status == "failed" and "ms" not in record.metrics
    assert record.note.startswith("right in its first call, then wrong: relative error")


def test_a_function_without_result_is_timed(measured):
    record = measured("nothing")
    assert record.status == "ok" and record.median("ms") > 0
    assert "nothing to check" in record.note


def test_expanded_inputs_are_not_restored_if_they_are_unchanged(measured):
    assert measured("expanded").status == "ok"


@pytest.mark.parametrize("name, is_right", [("hidden", True), ("shown", False)])
def test_an_infinity_is_right_only_if_the_reference_has_the_same(measured, name, is_right):
    assert (measured(name).status == "ok") is is_right


@pytest.mark.parametrize("name, is_right", [("complex_product", True), ("turned", False)])
def test_imaginary_parts_are_compared(measured, name, is_right):
    assert (measured(name).status == "ok") is is_right


def test_sparse_tensors_count_their_indices_and_values(measured):
    sparse = 1000 * (2 * 8 + 4)
    assert measured("thinned").median("bytes") == 1000 * 4 + sparse
    assert measured("of_sparse").median("bytes") == sparse + 2000 * 4


@pytest.mark.parametrize("name", ["negative", "not_a_number", "text"])
def test_a_count_that_is_not_a_number_raises_an_error(measured, name):
    with pytest.raises(ValueError, match=f"{name}_.* it must be a number of at least 0"):
        measured(name)


def test_a_function_without_bytes_is_limited_only_by_the_matrix_rate(measured):
    record = measured("number")
    assert record.status == "ok" and record.median("attainable_tflop_per_s") == 1.0
    assert "intensity" not in record.metrics


def test_a_triton_kernel_without_a_gpu_raises_a_clear_error(measured):
    with pytest.raises(ValueError, match="Triton kernel, which needs a GPU; device is cpu"):
        measured("triton_kernel")
