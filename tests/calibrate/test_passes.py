"""The elementwise work that is calibrated is that of the network, and predictions look it up."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgauge.calibrate import passes
from stepgauge.calibrate.grids import CPU, GPU
from stepgauge.calibrate.operations import operations
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import predict
from stepgauge.kernels import swiglu
from stepgauge.models.feed_forward import GatedFeedForward
from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

HERE = torch.device("cpu")
H100 = HardwareFile.read(Path(__file__).parents[2] / "hardware" / "h100-sxm.json")
M, N = 8, 256  # two heads of queries and two of keys


@pytest.mark.parametrize("name", list(passes.PASSES))
def test_both_directions_run_on_the_operands_of_their_grid(name):
    parts = passes.operands(name, torch.float32, M, N, HERE)
    forward = passes.run(name, False, *parts)
    assert all(out.grad_fn is None or out._is_view() for out in forward)  # nothing is kept
    gradient = passes.run(name, True, *parts)[0]
    assert gradient.shape == parts[0].shape and gradient.abs().max() > 0
    assert passes.run(name, True, *parts)  # as often as it is timed


def test_heads_get_the_inputs_of_the_networks_attention():
    """Queries, keys and values equal those that attention is called with, for the same product."""
    spec = ModelSpec(d_model=128, d_ff=256, num_layers=1, num_heads=2, context_length=M,
                     vocab_size=16)  # fmt: skip
    model, seen = TransformerLM(spec, device=HERE), []
    attention = model.blocks[0].attention
    whole = attention.attend
    attention.attend = lambda q, k, v: seen.extend((q, k, v)) or whole(q, k, v)
    products = []
    attention.input.register_forward_hook(lambda _, __, out: products.append(out))
    model(torch.zeros(1, M, dtype=torch.long), torch.zeros(1, M, dtype=torch.long))
    found = passes.PASSES["heads"].call(products[0], model.cos_TR, model.sin_TR)
    for ours, theirs in zip(found, seen, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_the_compiled_gate_is_the_operator_of_a_compiled_network(monkeypatch):
    """A compiled network runs the gate as a custom operator; an eager one does not."""
    called = []
    plain = swiglu._plain
    monkeypatch.setattr(swiglu, "_plain", lambda x: called.append(x) or plain(x))
    gate = passes.PASSES["gate"]
    (x,) = gate.inputs(M, N, torch.randn)
    network = GatedFeedForward(ModelSpec(d_model=16, d_ff=N, num_layers=1, num_heads=2), HERE)
    network.gate_up, network.down = torch.nn.Identity(), torch.nn.Identity()
    for is_compiling, ours in ((False, gate.call), (True, gate.compiled)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=is_compiling: value)
        assert torch.equal(*ours(x), network(x))
        assert len(called) == (2 if is_compiling else 0)


class Recorder(TorchDispatchMode):
    """Records operators that return new storages, with the strides of their inputs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in read}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.untyped_storage()._cdata not in known for x in made):
            self.calls.append((func.overloadpacket.__name__, [x.stride() for x in read]))
        return result


def test_heads_run_the_kernels_of_the_network():
    spec = ModelSpec(d_model=192, d_ff=256, num_layers=1, num_heads=3, context_length=8,
                     vocab_size=16)  # fmt: skip
    model = TransformerLM(spec, device=HERE)
    x_BTD = torch.randn(4, 8, 192, requires_grad=True)
    with Recorder() as network:
        y_BTD = model.blocks[0].attention(x_BTD, (model.cos_TR, model.sin_TR))
        y_BTD.backward(torch.ones_like(y_BTD))
    parts = passes.operands("heads", torch.float32, 32, 2 * 192, HERE)
    with Recorder() as ours:
        passes.run("heads", False, *parts)
        passes.run("heads", True, *parts)
    names = ("mul", "roll", "addcmul", "cat", "add", "clone")
    both = [[call for call in recorder.calls if call[0] in names] for recorder in (ours, network)]
    assert both[0] == both[1]


def test_passes_are_timed_on_gpus_only():
    ours = {"heads backward bf16", "gate forward fp32", "residual mixed", "strided copy bf16"}
    assert ours <= set(operations(GPU))
    assert not [name for name in operations(CPU) if name.startswith(("heads", "gate", "residual"))]
    compiled = {f"compiled {name} {direction}" for name in ("heads", "gate", "norm")
                for direction in ("forward", "backward")}  # fmt: skip
    assert compiled <= set(operations(GPU))


def test_a_compiled_prediction_uses_the_times_of_compiled_passes():
    spec = StepSpec(model=ModelSpec.preset("2.7b"), size="2.7b", precision="bf16", compile="on",
                    device="cuda")  # fmt: skip
    named = [f"compiled {name} {direction}" for name in ("heads", "gate", "norm")
             for direction in ("forward", "backward")]  # fmt: skip
    table = OperationTable(("m", "n"), ((4096, 4096, 1000.0),))
    tables = {**H100.operations, **dict.fromkeys(named, table)}
    slow = predict(spec, CalibratedMachine(dataclasses.replace(H100, operations=tables)))
    us = {row[1]: row[5] / row[4] for row in slow.tables["terms"][1:] if row[0] == "backward"}
    tokens = 4 * 512
    assert us["attention.rotation_and_split"] == pytest.approx(1000 * tokens * 5120 / 4096**2)
    assert us["feed_forward.norm"] == pytest.approx(1000 * tokens * 2560 / 4096**2)
    assert us["feed_forward.gate"] == pytest.approx(1000 * tokens * 10240 / 4096**2)


def test_an_eager_prediction_uses_the_times_of_passes_if_the_file_has_them():
    spec = StepSpec(model=ModelSpec.preset("2.7b"), size="2.7b", batch=4, precision="bf16",
                    device="cuda")  # fmt: skip
    named = {f"{name} {direction} bf16" for name in ("heads", "gate")
             for direction in ("forward", "backward")}  # fmt: skip
    others = {name: table for name, table in H100.operations.items() if name not in named}
    plain = predict(spec, CalibratedMachine(dataclasses.replace(H100, operations=others)))
    tables = {name: OperationTable(("m", "n"), ((2048, 5120, 1000.0),)) for name in named}
    tables["residual mixed"] = OperationTable(("numel",), ((2048 * 2560, 1000.0),))
    file = dataclasses.replace(H100, operations={**H100.operations, **tables})
    slow = predict(spec, CalibratedMachine(file))

    def rows(record):
        head, *rows = record.tables["terms"]
        return {row[head.index("operation")]: row for row in rows}

    assert named | {"residual mixed"} <= set(rows(slow))
    assert not named & set(rows(plain)) and "traffic" in rows(plain)
    assert slow.median("step_ms") > 2 * plain.median("step_ms")
    compiled = dataclasses.replace(spec, compile="on")
    assert not named & set(rows(predict(compiled, CalibratedMachine(file))))
