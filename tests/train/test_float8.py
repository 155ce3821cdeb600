"""float8 as a precision: why it is unavailable, which layers it converts and, on a GPU that supports
it, losses close to bf16's.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from stepgauge.bench import step as bench_step
from stepgauge.bench.build import build
from stepgauge.cost.operations.supported import require_priced
from stepgauge.models.fused_linear import FusedLinear
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.train import float8
from stepgauge.train.precision import unavailable

SHAPE = ModelSpec(
    vocab_size=256, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=2
)


@pytest.fixture
def torchao(monkeypatch):
    """A stand-in for torchao, which replaces layers by another class with the same weight."""
    spec = SimpleNamespace(name=float8.PACKAGE)
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == float8.PACKAGE else original(name)
    )

    def convert(model, *, module_filter_fn, config):
        for name, part in list(model.named_modules()):
            if module_filter_fn(part, name):
                with torch.device("meta"):
                    other = nn.Linear(part.in_features, part.out_features, bias=False)
                other.weight = part.weight
                model.set_submodule(name, other)

    module = ModuleType("torchao.float8")
    module.convert_to_float8_training = convert
    module.Float8LinearConfig = lambda **settings: settings
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = unavailable("float8", torch.device("cuda"))
    assert reason == "float8 needs the package torchao, which is not installed"
    with pytest.raises(ValueError, match="needs the package torchao"):
        bench_step.run(StepSpec(model=SHAPE, precision="float8"))


def test_without_a_suitable_gpu_it_is_refused(torchao, monkeypatch):
    assert "need a GPU's matrix units" in unavailable("float8", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = unavailable("float8", torch.device("cuda"))
    assert reason == "float8 products need compute capability 8.9; this GPU has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unavailable("float8", torch.device("cuda")) is None


def test_linear_layers_but_the_head_are_converted(torchao, monkeypatch):
    monkeypatch.setattr(float8, "why_not", lambda device: None)
    step, batch = build(StepSpec(model=SHAPE, precision="float8"), torch.device("cpu"))
    plain, _ = build(StepSpec(model=SHAPE, precision="bf16"), torch.device("cpu"))
    classes = {
        name: type(part)
        for name, part in step.module.named_modules()
        if isinstance(part, nn.Linear)
    }
    assert classes.pop("head") is nn.Linear  # not converted
    assert set(classes.values()) == {nn.Linear} and FusedLinear not in classes.values()
    assert torch.equal(step.forward(*batch), plain.forward(*batch))
    assert not float8.is_convertible(nn.Linear(64, 20), "router")


def test_what_does_not_support_float8_refuses_it():
    with pytest.raises(ValueError, match="torchao's tensors cannot be tracked"):
        MemorySpec(model=SHAPE, precision="float8")
    with pytest.raises(ValueError, match="its cost is not calibrated"):
        require_priced(StepSpec(model=SHAPE, precision="float8"))
    with pytest.raises(ValueError, match="layers need unsharded weights; zero3 shards"):
        DataParallelSpec(model=SHAPE, precision="float8", wrapper="zero3", ranks=2)
    with pytest.raises(ValueError, match="layers need unsharded weights; in 'tp2'"):
        LayoutSpec(model=SHAPE, precision="float8", layout="tp2")


@pytest.mark.gpu
@pytest.mark.skipif(
    unavailable("float8", torch.device("cuda")) is not None,
    reason=unavailable("float8", torch.device("cuda")) or "",
)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_gpu_losses_are_close_to_bf16(mode):
    device, losses = torch.device("cuda"), {}
    for precision in ("bf16", "float8"):
        spec = StepSpec(model=SHAPE, precision=precision, compile=mode, device="cuda")
        step, batch = build(spec, device)
        losses[precision] = []
        for _ in range(5):
            loss = step.forward(*batch)
            step.backward(loss)
            step.update()
            losses[precision].append(loss.item())
    assert losses["float8"] == pytest.approx(losses["bf16"], rel=0.02)
    assert losses["float8"] != losses["bf16"]  # the products were in float8
