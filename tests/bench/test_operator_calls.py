"""Calls of traced operators as text: they can be repeated, and their times are used in predictions."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.calibrate.run import run, with_operations
from stepgauge.calibrate.step_shapes import shape_jobs
from stepgauge.measure import operator_calls
from stepgauge.measure.footprint import tensors_in
from stepgauge.spec.calibration import EXACT, OPERATORS, CalibrationSpec, OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.step import StepSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import predicted, shapes_of

CPU = torch.device("cpu")
NETWORK = """
import torch
from torch import nn

def network():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)]
    layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    images, classes = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    return nn.Sequential(*layers, nn.Linear(2048, 10)), (images, classes), nn.CrossEntropyLoss()
"""


class Calls(TorchDispatchMode):
    """Records the name, text and result of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls.append((name, operator_calls.text_of(func, args, kwargs), result))
        return result


def pooled():
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    F.max_pool2d(nn.Conv2d(3, 4, 3, padding=1)(x), 2).square().mean().backward()


def indexed():
    table, places = nn.Embedding(16, 8), torch.randint(16, (4, 6))
    x = table(places)[:, torch.tensor([0, 2, 5])]
    x = x + torch.zeros(3, 8).index_add(0, torch.tensor([1, 1]), torch.ones(2, 8))
    x = x + torch.zeros(3, 8).index_add_(0, torch.tensor([1, 1]), torch.ones(2, 8))
    x.softmax(-1).masked_fill(x > 0, 0.0).gather(1, torch.zeros(4, 3, 8).long()).mean().backward()


def bagged():
    bag = nn.EmbeddingBag(16, 8)
    F.dropout(bag(torch.randint(16, (4, 6))), 0.5).mT.contiguous().mean().backward()


@pytest.mark.parametrize("program", [pooled, indexed, bagged])
def test_a_call_repeated_from_its_text_has_results_of_the_same_layout(monkeypatch, program):
    monkeypatch.setattr(operator_calls, "LEAST_BYTES", 0)
    with Calls() as recorded:
        program()
    texts = [text for _, text, _ in recorded.calls if text]
    assert len(texts) > 8 and len(texts) >= 0.8 * len(recorded.calls)
    for _, text, result in recorded.calls:
        if text:
            operands, operator = operator_calls.call_of(text, CPU)
            args, kwargs = operands()
            repeated = operator(*args, **kwargs)
            assert [(x.shape, x.dtype, x.stride()) for x in tensors_in(repeated)] == [
                (x.shape, x.dtype, x.stride()) for x in tensors_in(result)
            ], text


def test_a_call_that_depends_on_values_has_no_text(monkeypatch):
    monkeypatch.setattr(operator_calls, "LEAST_BYTES", 0)
    half = torch.full((4, 4), 0.5)
    with Calls() as recorded:
        torch.bincount(torch.tensor([1, 2, 2]))
        torch.randn(4, dtype=torch.complex64).abs()
        F.binary_cross_entropy(half, half)
        half.bernoulli()
        half[half > 0]
        half.nonzero()
    texts = {name: text for name, text, _ in recorded.calls}
    names = ("bincount", "abs", "binary_cross_entropy", "bernoulli", "index", "nonzero")
    assert [texts[name] for name in names] == [""] * len(names)


@pytest.fixture
def step(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NETWORK)
    return StepSpec(model=UserModel.read(f"{tmp_path / 'net.py'}:network"), device="cpu")


def hardware(device="cpu"):
    """Returns a machine with times of products, passes, the loss and the optimizer."""
    products = OperationTable(("m", "n", "k"), ((8, 8, 8, 1.0), (64, 64, 64, 8.0)))
    by_name = {f"matmul {how} fp32": products for how in ("nt", "nn", "tn")}
    passes = OperationTable(("bytes",), ((1e6, 100.0), (1e9, 1e5)))
    losses = OperationTable(("m", "v"), ((8, 10, 5.0),))
    optimizer = OperationTable(("numel",), ((1000, 9.0), (10**6, 900.0)))
    tables = {**by_name, "traffic": passes, "cross-entropy forward": losses,
              "cross-entropy backward": losses, "optimizer adamw fp32": optimizer}  # fmt: skip
    return HardwareFile(name="made", device=device, operations=tables)


def test_a_users_step_is_priced_by_its_timed_calls(step):
    """Each call counts once, also if it has two terms, such as a convolution's backward."""
    machine = hardware()
    (job,) = [
        job
        for job in shape_jobs(shapes_of([step], machine), CPU)
        if job.spec.operation == OPERATORS
    ]
    calls = json.loads(job.spec.sizes)
    assert {"convolution.default", "convolution_backward.default"} <= {c.split()[0] for c in calls}
    record = run(dataclasses.replace(job.spec, milliseconds=0.0))
    assert record.median("shapes") == len(calls) and record.median("shapes_left_out") == 0
    timed = with_operations(machine, [record])
    rows = [(call, 1000.0) for (call, *_) in timed.operations[f"{OPERATORS} {EXACT}"].rows]
    table = OperationTable(("call",), tuple(rows))
    terms = predicted(step, with_table(timed, table)).tables["terms"]
    exact = [row for row in terms if row[1].startswith(("convolution", "native_batch_norm"))]
    us = {}
    for phase, term, _, _, count, each, source, *_ in exact:
        us[phase, term] = us.get((phase, term), 0.0) + each
        assert (source, count) == ("calibrated", 1), (phase, term)
    assert us["forward", "convolution"] == pytest.approx(2000.0)
    assert us["backward", "convolution_backward"] == pytest.approx(2000.0)
    assert us["forward", "native_batch_norm"] == pytest.approx(1000.0)


def with_table(machine, table):
    tables = {**machine.operations, f"{OPERATORS} {EXACT}": table}
    return dataclasses.replace(machine, operations=tables)


def test_only_a_call_that_fails_is_left_out():
    text = '{"type":"float32","shape":[8],"stride":[1],"below":0,"cpu":true}'
    calls = [f"{name} [[{text}],{{}}]" for name in ("relu.default", "no_such.default")]
    record = run(CalibrationSpec(operation=OPERATORS, sizes=json.dumps(calls), milliseconds=0.0))
    assert (record.median("shapes"), record.median("shapes_left_out")) == (1, 1)


def test_a_hardware_file_keeps_the_calls(step, tmp_path):
    call = 'add.Tensor [[{"type":"float32"}],{}]'
    table = OperationTable(("call",), ((call, 12.5),))
    with_table(hardware(), table).write(tmp_path / "box.json")
    read = HardwareFile.read(tmp_path / "box.json")
    assert read.operations[f"{OPERATORS} {EXACT}"].rows == ((call, 12.5),)
