"""A user's step as terms of its traced operators: held against the closed formulas of a preset, and
against what is counted by hand.
"""

import json
from pathlib import Path

import pytest

from stepgauge.bench.operators import traced
from stepgauge.cost.machine import Machine
from stepgauge.cost.step import predict
from stepgauge.cost.traced import predict_traced
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.user_model import UserModel

HARDWARE = Path(__file__).parents[2] / "hardware"
NETS = """
import torch
from torch import nn


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def convolutions():
    return Convolutions(), torch.randn(2, 3, 8, 8)


def valued():
    class Valued(Convolutions):
        def forward(self, x):
            return super().forward(x) * float(x.numpy().mean())

    return Valued(), torch.randn(2, 3, 8, 8)


def normalized():
    class Normalized(Convolutions):
        def forward(self, x):
            return super().forward(nn.functional.normalize(x))

    return Normalized(), torch.randn(2, 3, 8, 8)


def broken():
    class Broken(Convolutions):
        def forward(self, x):
            raise KeyError("no such tile")

    return Broken(), torch.randn(2, 3, 8, 8)


def spectral():
    class Spectral(Convolutions):
        def forward(self, x):
            return super().forward(torch.fft.fft(x).abs())

    return Spectral(), torch.randn(2, 3, 8, 8)


def recurrent():
    return nn.GRU(4, 4), torch.randn(2, 3, 4)
"""


def test_a_presets_operators_cost_what_its_formulas_say(tmp_path):
    """Two ways to one figure: terms written down from the network's shape, and the operators that
    torch dispatches for it, with the memory of their tensors.
    """
    machine = Machine(HardwareFile.read(HARDWARE / "h100-sxm.json"))
    model = ModelSpec.preset("medium", num_layers=2)
    spec = StepSpec(model=model, size="medium", precision="bf16", batch=16, device="cuda")
    seen = run_isolated(traced, spec, "sm90")  # another test may have run a backward here
    formula, operators = predict(spec, machine), predict_traced(spec, seen, machine)
    for metric, within in (
        ("backward_ms", 0.05), ("optimizer_ms", 0.01), ("device_ms", 0.04), ("peak_bytes", 0.03)
    ):  # fmt: skip
        assert abs(operators.median(metric) / formula.median(metric) - 1) < within, metric
    assert 2 <= seen.blocks["forward"] < 4  # two blocks and both ends
    assert sum(term.gradient for term in seen.backward) == model.num_parameters


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return lambda name: UserModel.read(f"{path}:{name}")


def test_convolutions_are_their_implicit_products(nets):
    found = traced(StepSpec(model=nets("convolutions")), "cpu")
    products = [t.sizes for t in found.forward if t.operation == "matmul nt fp32"]
    assert products == [(2 * 64, 8, 3 * 9), (2 * 64, 16, 8 * 9)]
    back = sorted(t.operation for t in found.backward if t.operation.startswith("matmul"))
    assert back == ["matmul nn fp32", "matmul tn fp32", "matmul tn fp32"]  # of x no gradient
    assert sorted(found.parameters) == [8, 16, 8 * 27, 16 * 72]


def test_a_norm_of_vectors_is_priced_by_the_bytes_that_it_reads(nets):
    found = traced(StepSpec(model=nets("normalized")), "cpu")
    norm, *_ = [t for t in found.forward if t.name == "linalg_vector_norm"]
    assert norm.operation == "traffic"
    assert norm.sizes == (4 * (2 * 3 * 8 * 8 + 2 * 8 * 8),)  # a value of each pixel's channels


def test_what_has_no_price_is_named(nets):
    with pytest.raises(ValueError, match=r"the step cannot be traced: .*numpy"):
        traced(StepSpec(model=nets("valued")), "cpu")
    with pytest.raises(ValueError, match=r"traced: nets\.py:\d+: KeyError: 'no such tile'"):
        traced(StepSpec(model=nets("broken")), "cpu")
    with pytest.raises(ValueError, match=r"the model runs aten\._fft\w*.*no calibration"):
        traced(StepSpec(model=nets("spectral")), "cpu")
    with pytest.raises(ValueError, match="the model runs a recurrent layer, which no calibration"):
        traced(StepSpec(model=nets("recurrent"), device="cuda"), "sm90")
    with pytest.raises(ValueError, match="compile is 'on'; of a user's model eager steps"):
        traced(StepSpec(model=nets("convolutions"), compile="on"), "cpu")
    with pytest.raises(ValueError, match="wrapper is 'zero3'; of a user's model one device"):
        traced(DataParallelSpec(model=nets("convolutions"), wrapper="zero3"), "cpu")


def test_predict_takes_a_user_model_over_a_data_axis(stepgauge, nets):
    asked = ("predict", "--model", f"{nets('convolutions').file}:convolutions", "--hardware",
             HARDWARE / "dgx-h100.json")  # fmt: skip
    layouts = ("none", "dp2", "dp4 zero2")
    status, out, err = stepgauge(*asked, "--layout", *layouts, "--format", "json")
    assert status == 0, err
    alone, two, four = json.loads(out)
    assert [row["kind"] for row in (alone, two, four)] == ["step", *["data-parallel"] * 2]
    numel = 8 * 27 + 8 + 16 * 72 + 16
    assert two["metrics"]["sent_bytes"]["median"] == 4 * numel
    assert two["metrics"]["exposed_ms"]["median"] == 0  # the host takes longer than what is sent
    for row in (two, four):
        sent, step = (row["metrics"][f"{n}_ms"]["median"] for n in ("communication", "step"))
        assert 0 < sent < step
        head, *terms = row["tables"]["terms"]
        total = sum(term[head.index("us")] for term in terms) / 1e3
        assert total == pytest.approx(step, rel=1e-3)
    status, _, err = stepgauge(*asked, "--layout", "tp2")
    assert status == 2 and "layout is 'tp2'; of a user's model one device and data axes" in err
