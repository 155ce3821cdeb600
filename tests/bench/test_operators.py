"""A user's step as terms of its traced operators: held against the closed formulas of a preset, and
against what is counted by hand.
"""

import dataclasses
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.cpu_machine import wired

from stepgauge.bench import operators
from stepgauge.bench.operators import traced, traced_apart
from stepgauge.cost.data_axis.buckets import Sending
from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.host import launch_costs
from stepgauge.cost.layout import predict_layout
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import Term
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import GLOO, Prices
from stepgauge.cost.step import predict
from stepgauge.cost.streams.program import DATA, RankStep
from stepgauge.cost.traced.network import TracedOperations
from stepgauge.measure.fusion import TracedTerm, fuse
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.operators import OperatorTrace
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import predicted

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


def cells(kind):
    return Called(lambda m, x: m[0](x)[0], kind(4, 4)), torch.randn(2, 4)


def gru_cell():
    return cells(nn.GRUCell)


def lstm_cell():
    return cells(nn.LSTMCell)


class Called(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self.layers, x).square().mean()


def transposed():
    layers = nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1, groups=2)
    return Called(lambda m, x: m[1](m[0](x)), *layers), torch.randn(2, 3, 8, 8)


def in_place():
    def function(m, x):
        y = torch.zeros(4, 8, 8).baddbmm_(m[0](x), x.mT)
        return torch.addbmm(torch.zeros(8, 8), y, y).addmm_(y[0], y[1])

    return Called(function, nn.Linear(16, 16)), torch.randn(4, 8, 16)


def inference():
    def function(m, x):
        with torch.inference_mode():
            y = nn.functional.scaled_dot_product_attention(m[0](x)[None], x[None], x[None])[0]
        return m[0](x[:, :0]).sum() + m[0](y.clone())

    return Called(function, nn.Linear(16, 16)), torch.randn(4, 8, 16)


def repeated():
    def function(m, x):
        return m[0](m[1](m[0](x)))

    net = Called(function, *(nn.Linear(16, 16, bias=False) for _ in range(2)))
    net.scale = nn.Parameter(torch.ones(16))
    return Scaled(net), torch.randn(8, 16)


class Scaled(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.layers, self.function, self.scale = net.layers, net.function, net.scale

    def forward(self, x):
        return self.function(self.layers, x * self.scale).square().mean()


def bag():
    return Called(lambda m, x: m[0](x), nn.EmbeddingBag(1000, 16)), torch.randint(1000, (4, 8))


def bilinear():
    return Called(lambda m, x: m[0](x, x), nn.Bilinear(16, 16, 4)), torch.randn(8, 16)


def frozen_encoder():
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).requires_grad_(False)

    def function(m, x):
        return m[0](encoder.eval()(x))

    return Called(function, nn.Linear(16, 16)), torch.randn(4, 8, 16)


class Orthogonal(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                parameter.grad = parameter.grad @ parameter.grad.mT @ parameter.grad
        return super().step(closure)


def orthogonal():
    module, batch = Called(lambda m, x: m[0](x), nn.Linear(16, 16)), torch.randn(8, 16)
    return {"module": module, "batch": batch, "optimizer": Orthogonal}
"""


ON_GPU = {"model": ModelSpec.preset("medium", num_layers=2), "precision": "bf16", "device": "cuda"}
EAGER = StepSpec(**ON_GPU, size="medium", batch=16)
COMPILED = dataclasses.replace(EAGER, compile="on")
MASTERS = dataclasses.replace(EAGER, precision="bf16-master", optimizer="fused", batch=1)
ZERO3 = LayoutSpec(**ON_GPU, batch=32, layout="dp2 zero3")
ONE_BLOCK, THREE_BLOCKS = (
    LayoutSpec(
        model=ModelSpec(
            d_model=768, d_ff=768, num_layers=layers, num_heads=96, context_length=192,
            vocab_size=768,
        ),
        precision="bf16", device="cuda", batch=1, layout="tp3",
    )
    for layers in (1, 3)
)  # fmt: skip


@pytest.fixture(scope="module")
def presets():
    """In one process of their own: another test may have run a backward here."""
    asked = (EAGER, COMPILED, MASTERS, ZERO3, ONE_BLOCK, THREE_BLOCKS)
    return run_isolated(first_stages, asked, "sm90")


def first_stages(specs, architecture):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that only a trace does is told a user
        return {spec: traced(spec, architecture)[0] for spec in specs}


def test_a_presets_operators_cost_what_its_formulas_say(presets):
    """Two ways to one figure: terms written down from the network's shape, and the operators that
    torch dispatches for it, with the memory of their tensors. The file has rotation's backward as it
    was with one copy more.
    """
    machine, dgx = (
        CalibratedMachine(HardwareFile.read(HARDWARE / f"{name}.json"))
        for name in ("h200-sxm", "dgx-h100")
    )
    seen = presets[EAGER]
    formula, by_operators = predict(EAGER, machine), predict(EAGER, machine, seen)
    for metric, within in (
        ("backward_ms", 0.08), ("optimizer_ms", 0.01), ("device_ms", 0.05), ("peak_bytes", 0.03)
    ):  # fmt: skip
        assert abs(by_operators.median(metric) / formula.median(metric) - 1) < within, metric
    for wrapper in ("bucketed", "zero1", "zero2", "zero3"):
        two = DataParallelSpec(**ON_GPU, batch=16, ranks=2, wrapper=wrapper)
        layout = dataclasses.replace(ZERO3, layout=f"dp2 {wrapper}")
        if wrapper == "zero3":  # whose products take weights that came narrow
            seen = presets[ZERO3]
        by_rank = predict_data_parallel(two, dgx, seen)
        by_formula = predict_data_parallel(two, dgx)
        for metric in ("peak_bytes", "communication_ms", "sent_bytes"):
            assert by_rank.median(metric) == pytest.approx(by_formula.median(metric), rel=0.05)
        same, rows = by_rank, predict_layout(layout, dgx, [seen])
        assert rows.median("step_ms") == same.median("step_ms")
        assert rows.median("data_exposed_ms") == same.median("exposed_ms")
        twice = predict_layout(dataclasses.replace(layout, accumulation=2), dgx, [seen])
        assert 1.5 < twice.median("step_ms") / rows.median("step_ms") < 2
        assert twice.median("peak_bytes") >= rows.median("peak_bytes")
    assert 2 <= seen.blocks["forward"] < 4  # two blocks and both ends
    assert sum(term.gradient for term in seen.terms("backward")) == EAGER.model.num_parameters


def test_the_peak_of_traced_stages_is_that_of_formulas():
    """Of micro-batches in flight, weights shared or whole; and its parts are its sum."""
    dgx = CalibratedMachine(HardwareFile.read(HARDWARE / "dgx-h100.json"))
    staged = LayoutSpec(**ON_GPU, batch=16, layout="pp2 1f1b m4")
    seen = run_isolated(traced, staged, "sm90")
    peaks = {}
    for layout in ("pp2 1f1b m4", "pp2 gpipe m4", "pp2 1f1b m4 dp2 zero1", "pp2 1f1b m4 dp2 zero3"):
        batch = 16 * (2 if "dp2" in layout else 1)
        asked = dataclasses.replace(staged, layout=layout, batch=batch)
        row = predict_layout(asked, dgx, seen)
        peaks[layout] = row.median("peak_bytes")
        by_formula = predict_layout(asked, dgx).median("peak_bytes")
        assert peaks[layout] == pytest.approx(by_formula, rel=0.03), layout
        parts = {name: size for name, size, _ in row.tables["memory"][1:]}
        inside = sum(size for name, size in parts.items() if not name.endswith("(outside)"))
        assert inside == pytest.approx(peaks[layout], abs=1)
    assert peaks["pp2 1f1b m4"] < peaks["pp2 gpipe m4"]


FROZEN = """
import torch
from torch import nn
def network():
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers), torch.ones(4, 8)
"""


@pytest.mark.parametrize("layout", ["pp2 1f1b m2 dp2 zero1", "pp2 zb-h1 m2"])
def test_a_stage_without_trained_weights_updates_nothing(layout, tmp_path):
    (tmp_path / "mine.py").write_text(FROZEN)
    model = UserModel.read(f"{tmp_path / 'mine.py'}:network")
    spec = LayoutSpec(model=model, layout=layout, device="cuda")
    found = predicted(spec, HardwareFile.read(HARDWARE / "dgx-h200.json"))
    assert found.median("step_ms") > 0 and found.median("peak_bytes") > 0


def test_the_peak_of_a_pipeline_alone_is_near_that_measured():
    """Without an optimizer's state. On two H200s it was 1.167 and 1.170 GiB
    (benchmarks/results/2026-11-23-h200-pipeline-stages.jsonl).
    """
    spec = PipelineSpec(
        model=BertSpec.preset("bert-base", context_length=128), size="bert-base", schedule="1f1b",
        ranks=2, micro_batches=4, batch=64, precision="bf16-pure", device="cuda",
    )  # fmt: skip
    row = predicted(spec, HardwareFile.read(HARDWARE / "dgx-h200.json"))
    assert row.median("peak_bytes") / 2**30 == pytest.approx(1.168, rel=0.065)
    parts = {name: size for name, size, _ in row.tables["memory"][1:]}
    assert "optimizer state" not in parts and parts["activations in flight"] > parts["gradients"]


def test_a_compiled_presets_operators_are_passes_between_products(presets):
    machine = CalibratedMachine(HardwareFile.read(HARDWARE / "h200-sxm.json"))
    seen = presets[COMPILED]
    formula, by_operators = predict(COMPILED, machine), predict(COMPILED, machine, seen)
    for metric, within in (("forward_ms", 0.12), ("backward_ms", 0.12), ("optimizer_ms", 0.01)):
        assert abs(by_operators.median(metric) / formula.median(metric) - 1) < within, metric
    products = [term for term in formula.tables["terms"] if term[2].startswith("matmul")]
    assert sum(
        term.is_product for term in (*seen.terms("forward"), *seen.terms("backward"))
    ) >= len(products)
    assert sum(term.gradient for term in seen.terms("backward")) == COMPILED.model.num_parameters
    assert "peak_bytes" not in by_operators.metrics  # of eager steps alone is memory traced


def test_an_update_of_masters_takes_what_its_bytes_do(presets):
    """No calibration has a time for it."""
    machine = CalibratedMachine(HardwareFile.read(HARDWARE / "h200-sxm.json"))
    formula, by_operators = (
        [row for row in predict(MASTERS, machine, *seen).tables["terms"] if row[1] == "optimizer"]
        for seen in ((), (presets[MASTERS],))
    )
    assert by_operators == formula


def test_launches_are_counted_in_blocks_of_a_network_that_ranks_share(presets):
    one, three = (presets[spec].blocks for spec in (ONE_BLOCK, THREE_BLOCKS))
    for phase in ("forward", "backward"):
        assert three[phase] - one[phase] == pytest.approx(2)


def test_passes_that_follow_one_another_read_and_write_what_others_do():
    def moved(operation, reads, writes):
        return TracedTerm(Term(operation, operation, (1.0,)), reads, writes)

    forward = [
        moved("traffic", {1: 10}, {2: 10}),
        moved("cast fp32 bf16", {2: 10}, {3: 5}),  # 2 is read by nothing after the product
        moved("matmul nt bf16", {3: 5, 4: 7}, {5: 8}),
        moved("traffic", {5: 8, 3: 5}, {6: 8, 7: 2}),
    ]
    backward = [moved("traffic", {6: 8}, {8: 8}), moved("optimizer adamw fp32", {8: 8}, {1: 10})]
    found = fuse({"forward": forward, "backward": backward})
    sizes = {name: [term.sizes[0] for term in terms] for name, terms in found.items()}
    assert sizes == {"forward": [10 + 5, 1.0, 8 + 5 + 8], "backward": [8 + 8, 1.0]}


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return lambda name: UserModel.read(f"{path}:{name}")


def test_convolutions_are_their_implicit_products(nets):
    [found] = traced(StepSpec(model=nets("convolutions")), "cpu")
    products = [t.sizes for t in found.terms("forward") if t.operation == "matmul nt fp32"]
    assert products == [(2 * 64, 8, 3 * 9), (2 * 64, 16, 8 * 9)]
    back = sorted(t.operation for t in found.terms("backward") if t.operation.startswith("matmul"))
    assert back == ["matmul nn fp32", "matmul tn fp32", "matmul tn fp32"]  # of x no gradient
    assert sorted(found.parameters) == [8, 16, 8 * 27, 16 * 72]


def test_a_transposed_convolution_is_a_product_at_the_positions_of_its_input(nets):
    [found] = traced(StepSpec(model=nets("transposed")), "cpu")
    *_, wide = [t for t in found.terms("forward") if t.operation.startswith("matmul")]
    positions, kernel = 2 * 8 * 8, 16 // 2 * 4 * 4  # of half of the channels
    assert (wide.operation, wide.sizes) == ("matmul nn fp32", (positions, kernel, 8))
    back = [
        (t.operation, t.sizes) for t in found.terms("backward") if t.operation.startswith("matmul")
    ]
    assert back[:2] == [
        ("matmul nt fp32", (positions, 8, kernel)), ("matmul tn fp32", (8, kernel, positions)),
    ]  # fmt: skip


def test_products_are_counted_however_they_are_called(nets):
    """In place, summed over a batch, and in inference_mode, which hands on whole layers."""
    [found] = traced(StepSpec(model=nets("in_place")), "cpu")
    products = [t.sizes for t in found.terms("forward") if t.operation.startswith("matmul")]
    assert products == [(32, 16, 16), (4, 8, 8, 16), (4, 8, 8, 8), (8, 8, 8)]
    [found] = traced(StepSpec(model=nets("inference")), "cpu")
    products = [(t.operation, t.sizes) for t in found.terms("forward") if t.operation != "traffic"]
    linear = ("matmul nt fp32", (32, 16, 16))
    assert products == [linear, ("attention sdpa-full forward fp32", (4, 8.0, 16)), linear]


def test_a_bag_reads_the_rows_that_it_is_asked_for(nets):
    [found] = traced(StepSpec(model=nets("bag")), "cpu")
    (lookup,) = [t for t in found.terms("forward") if t.name == "_embedding_bag"]
    assert 4 * 16 * (32 + 4) < lookup.sizes[0] < 4 * 16 * (32 + 4) + 8 * 100  # and its indices


def test_a_norm_of_vectors_is_priced_by_the_bytes_that_it_reads(nets):
    [found] = traced(StepSpec(model=nets("normalized")), "cpu")
    norm, *_ = [t for t in found.terms("forward") if t.name == "linalg_vector_norm"]
    assert norm.operation == "traffic"
    assert norm.sizes == (4 * (2 * 3 * 8 * 8 + 2 * 8 * 8),)  # a value of each pixel's channels


def test_what_has_no_price_is_named(nets):
    with pytest.raises(ValueError, match=r"the step cannot be traced: .*numpy"):
        traced(StepSpec(model=nets("valued")), "cpu")
    with pytest.raises(ValueError, match=r"traced: nets\.py:\d+: KeyError: 'no such tile'"):
        traced(StepSpec(model=nets("broken")), "cpu")
    with pytest.raises(ValueError, match=r"the model runs aten\._fft\w*.*no calibration"):
        traced(StepSpec(model=nets("spectral")), "cpu")
    for name, words in (
        ("bilinear", "the model runs aten._trilinear"),
        ("frozen_encoder", "the model runs aten._transformer_encoder_layer_fwd"),
        ("orthogonal", "the optimizer runs mm; a user's optimizer"),
    ):
        with pytest.raises(ValueError, match=words):
            traced(StepSpec(model=nets(name)), "cpu")
    for name in ("recurrent", "gru_cell", "lstm_cell"):
        with (
            warnings.catch_warnings(action="error"),  # of torch, about a cuDNN that is not there
            pytest.raises(ValueError, match="the model runs a recurrent layer, which no calib"),
        ):
            traced(StepSpec(model=nets(name), device="cuda"), "sm90")
    with pytest.raises(
        ValueError, match="compile is 'max-autotune'; predicted are off, on, blocks"
    ):
        traced(StepSpec(model=nets("convolutions"), compile="max-autotune"), "cpu")


def test_units_of_a_users_network_are_gathered_ahead_and_each_gradient_is_reduced_once(nets):
    """One is called twice, and its weights are gathered for each call."""
    spec = DataParallelSpec(model=nets("repeated"), wrapper="zero3", ranks=2, device="cpu")
    [seen] = traced(spec, "cpu")
    assert [run.unit for run in seen.forward if run.unit] == ["layers.0", "layers.1", "layers.0"]
    assert [run.unit for run in seen.backward if run.unit] == ["layers.0", "layers.1", "layers.0"]
    assert seen.units == {"layers.0": 16 * 16, "layers.1": 16 * 16}
    machine = CalibratedMachine(wired(2))
    operations = TracedOperations(spec, NetworkPart(batch=1, gathered=True), seen)
    step = RankStep(
        operations, Prices(machine, spec.parsed_layout, GLOO), launch_costs(spec, machine)
    )
    program = step.program(data_axis(Sending(wrapper="zero3", ranks=2), step))
    sent = [work.name for work in program.works if work.stream == DATA]
    assert sent == [
        "gather ends", *(f"gather forward layers.{n}" for n in (0, 1, 0)),
        *(f"gather backward layers.{n}" for n in (0, 1, 0)),
        "reduce layers.1", "reduce layers.0", "reduce ends",
    ]  # fmt: skip


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
    for layout, said in (
        ("tp2", "a Convolutions has no config of the transformers library"),
        ("pp2 1f1b", "module is a Convolutions; a pipeline cuts an nn.Sequential"),
    ):
        status, _, err = stepgauge(*asked, "--layout", layout)
        assert status == 2 and said in err


def test_presets_without_formulas_are_predicted_by_their_operators(monkeypatch):
    """Each block's products: of experts those that tokens go to, of a window what SDPA computes."""
    monkeypatch.setattr(operators, "_trace_in_process", operators._trace)  # a CPU needs none
    machine = wired(2)
    dense = ModelSpec.preset("nano", num_layers=1, context_length=64, vocab_size=256)
    bert = BertSpec.preset("bert-tiny", num_layers=1, context_length=64)
    windowed, mixed = (
        predicted(StepSpec(model=model, batch=4), machine)
        for model in (
            dataclasses.replace(dense, window=16),
            dataclasses.replace(dense, num_experts=4, experts_per_token=2),
        )
    )
    assert windowed.median("tokens_per_s") > 0
    products = [sizes for _, _, name, sizes, *_ in mixed.tables["terms"] if "matmul nt" in name]
    an_expert = f"{4 * 64 * 2 // 4} × {2 * dense.d_ff} × {dense.d_model}"  # gate and up together
    assert an_expert in products
    two = predicted(LayoutSpec(model=bert, layout="dp2 zero1", batch=8), machine)
    up = (4 * 64, bert.d_ff, bert.d_model)  # of a rank's sequences
    assert " × ".join(map(str, up)) in {row[3] for row in two.tables["terms"]}
    assert two.median("tokens_per_s") == pytest.approx(8 * 64 / two.median("step_ms") * 1e3)
    with pytest.raises(ValueError, match=r"tp2 torch-tp.*torch's tensor parallel is not predicted"):
        predicted(LayoutSpec(model=dense, layout="tp2 torch-tp", optimizer="sgd"), machine)


def test_experts_on_a_gpu_are_one_product_a_layer():
    """Forward two of all chosen tokens, backward four; nothing asks the GPU for a number."""
    model = ModelSpec.preset("nano", num_layers=1, num_experts=4, experts_per_token=2)
    tokens, rows = 3 * model.context_length * 2, 2 * model.d_ff
    spec = StepSpec(model=model, batch=3, precision="bf16", device="cuda")
    (found,) = traced_apart(spec, "sm90")
    sizes = {
        phase: sorted(t.sizes for t in found.terms(phase) if "grouped" in t.name)
        for phase in ("forward", "backward")
    }
    up, down = (4, tokens, rows, model.d_model), (4, tokens, model.d_model, model.d_ff)
    assert sizes["forward"] == sorted([up, down])
    assert sum(map(math.prod, sizes["backward"])) == 2 * sum(map(math.prod, sizes["forward"]))
    assert len(sizes["backward"]) == 4


def test_passes_over_views_take_a_gpu_longer_than_their_bytes():
    """As long as the bytes of a plain pass that torch's kernel for such operands keeps up with."""
    trace = OperatorTrace()
    with fake_device("sm90") as device, trace, trace.phase("forward"):
        half = {"dtype": torch.bfloat16, "device": device}
        gate_MF, up_MF = torch.empty(64, 64, **half).chunk(2, dim=-1)
        kept_MF = gate_MF * up_MF
        kept_MF * kept_MF
        torch.cat((kept_MF, kept_MF))
        torch.cat((gate_MF, up_MF))
        gate_MF.roll(16, -1)
        torch.empty(64, 32, device=device) + kept_MF
        kept_MF * torch.empty(32, **half)
        kept_MF.mT * kept_MF.mT  # dense, and alike
        kept_MF.mT.contiguous()
    numel = 64 * 32
    assert [(term.name, *term.sizes) for term in trace.terms["forward"]] == [
        ("mul of views", 12 * numel), ("mul", 6 * numel), ("cat", 8 * numel),
        ("cat of views", 20 * 2 * numel), ("roll of views", (21 + 12) * numel),
        ("add of two types", 16 * numel), ("mul of views", 12 * numel), ("mul", 6 * numel),
        ("clone of views", 25 * numel),
    ]  # fmt: skip


def test_a_norm_copies_what_is_not_contiguous():
    trace = OperatorTrace()
    with fake_device("sm90") as device, trace, trace.phase("forward"):
        x = torch.empty(512, 64, 512, device=device)
        F.layer_norm(x, (512,))
        F.layer_norm(x.mT.contiguous().mT, (512,))
    numel = 512 * 64 * 512
    norms = [term for term in trace.terms["forward"] if "layer_norm" in term.name]
    assert [(term.name, math.prod(term.sizes)) for term in norms] == [
        ("native_layer_norm", numel), ("native_layer_norm copy", 25 * numel),
        ("native_layer_norm", numel),
    ]  # fmt: skip
    assert [bool(term.operator) for term in norms] == [False, True, True]


def test_operators_of_two_kernels_take_a_gpu_both():
    """The gradient of a softmax is multiplied by it first, and what is masked is a copy."""
    trace = OperatorTrace()
    with fake_device("sm90") as device:
        shares = torch.empty(64, 32, device=device)
        hidden = torch.empty(32, device=device, dtype=torch.bool)
        rows, places = torch.empty(256, 32, device=device), torch.empty(256, device=device).int()
        with trace, trace.phase("backward"):
            torch.ops.aten._softmax_backward_data(shares, shares, -1, torch.float32)
            shares.masked_fill(hidden, 0.0)
            shares.index_add(0, places, rows)
    numel = 64 * 32
    assert [(term.name, *term.sizes) for term in trace.terms["backward"]] == [
        ("_softmax_backward_data product", 12 * numel), ("_softmax_backward_data", 12 * numel),
        ("masked_fill copy", 8 * numel), ("masked_fill of views", 12 * numel),
        ("index_add copy", 8 * numel), ("index_add by index", 34 * 256 * 32),
    ]  # fmt: skip
