"""Traced operators of a step, compared with the formulas of a preset and with counts by hand."""

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
from stepgauge.bench.operators import traced, traced_isolated
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


def misfit():
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 4)), (torch.randn(2, 5),)

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
    """Traced in another process, because an earlier test may have run a backward in this one."""
    specs = (EAGER, COMPILED, MASTERS, ZERO3, ONE_BLOCK, THREE_BLOCKS)
    return run_isolated(first_stages, specs, "sm90")


def first_stages(specs, architecture):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tracing must not show warnings to the user
        return {spec: traced(spec, architecture)[0] for spec in specs}


def test_the_traced_operators_of_a_preset_cost_as_much_as_its_formulas(presets):
    """Compares predictions from the network's shape with those from the operators that torch
    dispatches. The hardware file has an older backward of the rotation, which made one more copy.
    """
    machine, dgx = (
        CalibratedMachine(HardwareFile.read(HARDWARE / f"{name}.json"))
        for name in ("h200-sxm", "dgx-h100")
    )
    network = presets[EAGER]
    formula, by_operators = predict(EAGER, machine), predict(EAGER, machine, network)
    for metric, tolerance in (
        ("backward_ms", 0.08), ("optimizer_ms", 0.01), ("device_ms", 0.05), ("peak_bytes", 0.03)
    ):  # fmt: skip
        assert abs(by_operators.median(metric) / formula.median(metric) - 1) < tolerance, metric
    for wrapper in ("bucketed", "zero1", "zero2", "zero3"):
        two = DataParallelSpec(**ON_GPU, batch=16, ranks=2, wrapper=wrapper)
        layout = dataclasses.replace(ZERO3, layout=f"dp2 {wrapper}")
        if wrapper == "zero3":  # its products take weights that were unsharded in bf16
            network = presets[ZERO3]
        by_operators = predict_data_parallel(two, dgx, network)
        by_formula = predict_data_parallel(two, dgx)
        for metric in ("peak_bytes", "communication_ms", "sent_bytes"):
            assert by_operators.median(metric) == pytest.approx(by_formula.median(metric), rel=0.05)
        row = predict_layout(layout, dgx, [network])
        assert row.median("step_ms") == by_operators.median("step_ms")
        assert row.median("data_exposed_ms") == by_operators.median("exposed_ms")
        twice = predict_layout(dataclasses.replace(layout, accumulation=2), dgx, [network])
        assert 1.5 < twice.median("step_ms") / row.median("step_ms") < 2
        assert twice.median("peak_bytes") >= row.median("peak_bytes")
    # Two blocks, embedding and head. Up to torch 2.12 autocast casts nothing around a norm in bf16.
    assert 1.5 < network.blocks["forward"] < 4
    assert sum(term.gradient for term in network.terms("backward")) == EAGER.model.num_parameters


def test_the_peak_of_traced_stages_equals_that_of_formulas():
    """For several schedules and wrappers. The parts of the peak add up to it."""
    dgx = CalibratedMachine(HardwareFile.read(HARDWARE / "dgx-h100.json"))
    pipeline = LayoutSpec(**ON_GPU, batch=16, layout="pp2 1f1b m4")
    stages = run_isolated(traced, pipeline, "sm90")
    peaks = {}
    for layout in ("pp2 1f1b m4", "pp2 gpipe m4", "pp2 1f1b m4 dp2 zero1", "pp2 1f1b m4 dp2 zero3"):
        batch = 16 * (2 if "dp2" in layout else 1)
        spec = dataclasses.replace(pipeline, layout=layout, batch=batch)
        row = predict_layout(spec, dgx, stages)
        peaks[layout] = row.median("peak_bytes")
        by_formula = predict_layout(spec, dgx).median("peak_bytes")
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
def test_a_stage_without_trainable_weights_is_predicted(layout, tmp_path):
    (tmp_path / "mine.py").write_text(FROZEN)
    model = UserModel.read(f"{tmp_path / 'mine.py'}:network")
    spec = LayoutSpec(model=model, layout=layout, device="cuda")
    prediction = predicted(spec, HardwareFile.read(HARDWARE / "dgx-h200.json"))
    assert prediction.median("step_ms") > 0 and prediction.median("peak_bytes") > 0


def test_the_predicted_peak_of_a_pipeline_is_near_the_measured_one():
    """The pipeline has no optimizer state. On two H200s its peak was 1.167 and 1.170 GiB
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


def test_the_operators_of_a_compiled_preset_are_fused_between_products(presets):
    machine = CalibratedMachine(HardwareFile.read(HARDWARE / "h200-sxm.json"))
    network = presets[COMPILED]
    formula, by_operators = predict(COMPILED, machine), predict(COMPILED, machine, network)
    for metric, tolerance in (("forward_ms", 0.12), ("backward_ms", 0.12), ("optimizer_ms", 0.01)):
        assert abs(by_operators.median(metric) / formula.median(metric) - 1) < tolerance, metric
    products = [term for term in formula.tables["terms"] if term[2].startswith("matmul")]
    terms = [*network.terms("forward"), *network.terms("backward")]
    assert sum(term.is_product for term in terms) >= len(products)
    assert sum(term.gradient for term in network.terms("backward")) == COMPILED.model.num_parameters
    assert "peak_bytes" not in by_operators.metrics  # memory is traced only for eager steps


def test_an_update_with_master_weights_is_priced_by_its_bytes(presets):
    """It is not calibrated."""
    machine = CalibratedMachine(HardwareFile.read(HARDWARE / "h200-sxm.json"))
    formula, by_operators = (
        [row for row in predict(MASTERS, machine, *how).tables["terms"] if row[1] == "optimizer"]
        for how in ((), (presets[MASTERS],))
    )
    assert by_operators == formula


def test_launches_are_counted_in_blocks_of_an_equally_sharded_network(presets):
    one, three = (presets[spec].blocks for spec in (ONE_BLOCK, THREE_BLOCKS))
    for phase in ("forward", "backward"):
        assert three[phase] - one[phase] == pytest.approx(2)


def test_a_fused_pass_reads_its_inputs_and_writes_what_is_read_later():
    def term(operation, reads, writes):
        return TracedTerm(Term(operation, operation, (1.0, 1.0, 1.0)), reads, writes)

    forward = [
        term("traffic", {1: 10}, {2: 10}),
        term("cast fp32 bf16", {2: 10}, {3: 5}),  # nothing reads storage 2 after the product
        term("matmul nt bf16", {3: 5, 4: 7}, {5: 8}),
        term("traffic", {5: 8, 3: 5}, {6: 8, 7: 2}),
    ]
    backward = [term("traffic", {6: 8}, {8: 8}), term("optimizer adamw fp32", {8: 8}, {1: 10})]
    fused = fuse({"forward": forward, "backward": backward})
    sizes = {name: [term.sizes[0] for term in terms] for name, terms in fused.items()}
    assert sizes == {"forward": [10 + 5, 1.0, 8 + 5 + 8], "backward": [8 + 8, 1.0]}


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return lambda name: UserModel.read(f"{path}:{name}")


def test_convolutions_are_their_implicit_products(nets):
    [network] = traced(StepSpec(model=nets("convolutions")), "cpu")
    forward = [t.sizes for t in network.terms("forward") if t.operation == "matmul nt fp32"]
    assert forward == [(2 * 64, 8, 3 * 9), (2 * 64, 16, 8 * 9)]
    backward = [t.operation for t in network.terms("backward") if t.operation.startswith("matmul")]
    # The input of the first convolution needs no gradient.
    assert sorted(backward) == ["matmul nn fp32", "matmul tn fp32", "matmul tn fp32"]
    assert sorted(network.parameters) == [8, 16, 8 * 27, 16 * 72]


def test_convolutions_in_16_bits_are_not_priced_as_products_with_unaligned_rows(nets):
    """Three channels in a kernel of nine are 27 summands, but no matrix has rows of 27 numbers."""
    [network] = traced(StepSpec(model=nets("convolutions"), precision="bf16"), "cpu")
    forward = [t.sizes for t in network.terms("forward") if t.operation == "matmul nt bf16"]
    assert forward == [(2 * 64, 8, 32), (2 * 64, 16, 8 * 9)]


def test_a_transposed_convolution_is_a_product_at_the_positions_of_its_input(nets):
    [network] = traced(StepSpec(model=nets("transposed")), "cpu")
    *_, last = [t for t in network.terms("forward") if t.operation.startswith("matmul")]
    positions, kernel = 2 * 8 * 8, 16 // 2 * 4 * 4  # each group has half of the channels
    assert (last.operation, last.sizes) == ("matmul nn fp32", (positions, kernel, 8))
    backward = [
        (t.operation, t.sizes)
        for t in network.terms("backward")
        if t.operation.startswith("matmul")
    ]
    assert backward[:2] == [
        ("matmul nt fp32", (positions, 8, kernel)), ("matmul tn fp32", (8, kernel, positions)),
    ]  # fmt: skip


def test_all_ways_to_call_a_product_are_counted(nets):
    """In place, summed over a batch, and in inference mode, where layers are not decomposed."""
    [network] = traced(StepSpec(model=nets("in_place")), "cpu")
    products = [t.sizes for t in network.terms("forward") if t.operation.startswith("matmul")]
    assert products == [(32, 16, 16), (4, 8, 8, 16), (4, 8, 8, 8), (8, 8, 8)]
    [network] = traced(StepSpec(model=nets("inference")), "cpu")
    terms = [(t.operation, t.sizes) for t in network.terms("forward") if t.operation != "traffic"]
    linear = ("matmul nt fp32", (32, 16, 16))
    assert terms == [linear, ("attention sdpa-full forward fp32", (4, 8.0, 16)), linear]


def test_an_embedding_bag_reads_the_indexed_rows(nets):
    [network] = traced(StepSpec(model=nets("bag")), "cpu")
    (lookup,) = [t for t in network.terms("forward") if t.name == "_embedding_bag"]
    assert 4 * 16 * (32 + 4) < lookup.sizes[0] < 4 * 16 * (32 + 4) + 8 * 100  # and the indices


def test_a_norm_of_vectors_is_priced_by_the_bytes_that_it_reads(nets):
    [network] = traced(StepSpec(model=nets("normalized")), "cpu")
    norm, *_ = [t for t in network.terms("forward") if t.name == "linalg_vector_norm"]
    assert norm.operation == "traffic"
    # It reads all values and writes one per pixel.
    assert norm.sizes == (4 * (2 * 3 * 8 * 8 + 2 * 8 * 8),)


def test_a_step_whose_shapes_do_not_fit_is_refused_without_a_traceback(nets, capfd):
    with pytest.raises(
        ValueError, match=r"traced: RuntimeError: in module 1 \(Linear\): .*\[2, 4\]"
    ):
        traced(StepSpec(model=nets("misfit")), "cpu")
    assert "Traceback" not in capfd.readouterr().err  # torch logs one


def test_errors_name_the_operator_that_cannot_be_priced(nets):
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
            warnings.catch_warnings(action="error"),  # torch warns about the missing cuDNN
            pytest.raises(ValueError, match="the model runs a recurrent layer, which no calib"),
        ):
            traced(StepSpec(model=nets(name), device="cuda"), "sm90")
    with pytest.raises(
        ValueError, match="compile is 'max-autotune'; predicted are off, on, blocks"
    ):
        traced(StepSpec(model=nets("convolutions"), compile="max-autotune"), "cpu")


def test_zero3_unshards_a_unit_before_each_call_and_reduces_each_gradient_once(nets):
    """One unit is called twice. The last call stays whole until its backward, which comes first."""
    spec = DataParallelSpec(model=nets("repeated"), wrapper="zero3", ranks=2, device="cpu")
    [network] = traced(spec, "cpu")
    calls = ["layers.0", "layers.1", "layers.0"]
    assert [run.unit for run in network.forward if run.unit] == calls
    assert [run.unit for run in network.backward if run.unit] == calls
    assert network.units == {"layers.0": 16 * 16, "layers.1": 16 * 16}
    machine = CalibratedMachine(wired(2))
    operations = TracedOperations(spec, NetworkPart(batch=1, gathered=True), network)
    step = RankStep(
        operations, Prices(machine, spec.parsed_layout, GLOO), launch_costs(spec, machine)
    )
    program = step.program(data_axis(Sending(wrapper="zero3", ranks=2), step))
    sent = [work.name for work in program.works if work.stream == DATA]
    assert sent == [
        "gather ends", *(f"gather forward layers.{n}" for n in (0, 1, 0)),
        *(f"gather backward layers.{n}" for n in (1, 0)),
        "reduce layers.1", "reduce layers.0", "reduce ends",
    ]  # fmt: skip


def test_predict_accepts_a_user_model_on_a_data_axis(stepgauge, nets):
    command = ("predict", "--model", f"{nets('convolutions').file}:convolutions", "--hardware",
               HARDWARE / "dgx-h100.json")  # fmt: skip
    layouts = ("none", "dp2", "dp4 zero2")
    status, out, err = stepgauge(*command, "--layout", *layouts, "--format", "json")
    assert status == 0, err
    one, two, four = json.loads(out)
    assert [row["kind"] for row in (one, two, four)] == ["step", *["data-parallel"] * 2]
    numel = 8 * 27 + 8 + 16 * 72 + 16
    assert two["metrics"]["sent_bytes"]["median"] == 4 * numel
    assert two["metrics"]["exposed_ms"]["median"] == 0  # the host takes longer than communication
    for row in (two, four):
        sent, step = (row["metrics"][f"{n}_ms"]["median"] for n in ("communication", "step"))
        assert 0 < sent < step
        head, *terms = row["tables"]["terms"]
        total = sum(term[head.index("us")] for term in terms) / 1e3
        assert total == pytest.approx(step, rel=1e-3)
    for layout, message in (
        ("tp2", "a Convolutions has no config of the transformers library"),
        ("pp2 1f1b", "module is a Convolutions; a pipeline cuts an nn.Sequential"),
    ):
        status, _, err = stepgauge(*command, "--layout", layout)
        assert status == 2 and message in err


def test_presets_without_formulas_are_predicted_by_their_operators(monkeypatch):
    """A mixture of experts, an attention window, and BERT."""
    # A CPU needs no other process.
    monkeypatch.setattr(operators, "_trace_in_process", operators._trace)
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
    up = (4 * 64, bert.d_ff, bert.d_model)  # the tokens of one rank
    assert " × ".join(map(str, up)) in {row[3] for row in two.tables["terms"]}
    assert two.median("tokens_per_s") == pytest.approx(8 * 64 / two.median("step_ms") * 1e3)
    with pytest.raises(ValueError, match=r"tp2 torch-tp.*torch's tensor parallel is not predicted"):
        predicted(LayoutSpec(model=dense, layout="tp2 torch-tp", optimizer="sgd"), machine)


def test_experts_on_a_gpu_are_one_grouped_product_per_layer():
    """Two products in forward and four in backward. No operator reads a value from the GPU."""
    model = ModelSpec.preset("nano", num_layers=1, num_experts=4, experts_per_token=2)
    tokens, rows = 3 * model.context_length * 2, 2 * model.d_ff
    spec = StepSpec(model=model, batch=3, precision="bf16", device="cuda")
    (network,) = traced_isolated(spec, "sm90")
    sizes = {
        phase: sorted(t.sizes for t in network.terms(phase) if "grouped" in t.name)
        for phase in ("forward", "backward")
    }
    up, down = (4, tokens, rows, model.d_model), (4, tokens, model.d_model, model.d_ff)
    assert sizes["forward"] == sorted([up, down])
    assert sum(map(math.prod, sizes["backward"])) == 2 * sum(map(math.prod, sizes["forward"]))
    assert len(sizes["backward"]) == 4


def test_passes_over_views_take_longer_on_a_gpu_than_moving_their_bytes():
    """They are priced as plain passes over more bytes."""
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
        kept_MF.mT * kept_MF.mT  # both dense, with the same layout
        kept_MF.mT.contiguous()
    numel = 64 * 32
    assert [(term.name, *term.sizes) for term in trace.terms["forward"]] == [
        ("mul of views", 12 * numel), ("mul", 6 * numel), ("cat", 8 * numel),
        ("cat of views", 20 * 2 * numel), ("roll of views", (21 + 12) * numel),
        ("add of two types", 16 * numel), ("mul of views", 12 * numel), ("mul", 6 * numel),
        ("clone of views", 25 * numel),
    ]  # fmt: skip


def test_a_norm_copies_inputs_that_are_not_contiguous():
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


def test_operators_with_two_kernels_have_two_terms():
    """A softmax's backward multiplies first, and masked_fill and index_add copy first."""
    trace = OperatorTrace()
    with fake_device("sm90") as device:
        shares = torch.empty(64, 32, device=device)
        hidden = torch.empty(32, device=device, dtype=torch.bool)
        rows, indices = torch.empty(256, 32, device=device), torch.empty(256, device=device).int()
        with trace, trace.phase("backward"):
            torch.ops.aten._softmax_backward_data(shares, shares, -1, torch.float32)
            shares.masked_fill(hidden, 0.0)
            shares.index_add(0, indices, rows)
    numel = 64 * 32
    assert [(term.name, *term.sizes) for term in trace.terms["backward"]] == [
        ("_softmax_backward_data product", 12 * numel), ("_softmax_backward_data", 12 * numel),
        ("masked_fill copy", 8 * numel), ("masked_fill of views", 12 * numel),
        ("index_add copy", 8 * numel), ("index_add by index", 34 * 256 * 32),
    ]  # fmt: skip
