"""What one rank of a layout runs, traced in a world whose other ranks are imagined: held against the
closed formulas of the Transformer, counts of FLOPs, and the whole network.
"""

import collections
import dataclasses
import functools

import pytest
from tests.cpu_machine import wired

from stepgauge.bench import operators
from stepgauge.bench.operators import traced
from stepgauge.bench.stage_step import Stage
from stepgauge.cost.layout import LayoutParts
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.memory import traced_memory
from stepgauge.cost.traced.network import TracedNetwork, TracedOperations
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.stages import num_parts
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import predicted

SHAPE = {"d_model": 64, "d_ff": 256, "num_heads": 4, "context_length": 32, "vocab_size": 256}
DENSE = ModelSpec(num_layers=4, **SHAPE)
BERT = BertSpec(num_layers=4, num_positions=32, **SHAPE)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2)
WINDOWED = dataclasses.replace(DENSE, window=8)


ONCE = functools.cache(operators._trace)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """A CPU needs no other; each stage is traced once there too."""
    monkeypatch.setattr(operators, "_trace_in_process", ONCE)


def flops(terms, prefix="matmul"):
    """Twice the multiply-adds of the products."""
    products = [term for term in terms if term.operation.startswith(prefix)]
    return sum(2 * term.count * term.sizes[0] * term.sizes[1] * term.sizes[2] for term in products)


def sent(terms):
    """Bytes of the collectives, by axis and operation, and of the products beside them the sizes."""
    found = collections.Counter()
    for term in terms:
        if term.axis:
            found[term.axis, term.operation] += term.count * term.sizes[0]
        if term.axis == "tensor":
            found["beside", *(other.sizes for other in term.hidden_by)] += term.count
    del found["beside",]
    return found


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2", {}),
        ("tp2 overlap", {}),
        ("cp2 ulysses", {}),
        ("dp2 zero3 tp2", {"num_kv_heads": 2, "qk_norm": True}),
        ("pp2 1f1b m2 tp2", {"norm": "layernorm", "feed_forward": "gelu", "tied_head": True}),
    ],
)
def test_a_share_of_the_transformer_runs_and_sends_what_its_formulas_say(
    layout, changes, monkeypatch
):
    monkeypatch.setattr("stepgauge.spec.plan.tensor.LEAST_OVERLAPPED_BYTES", 1024)
    model = dataclasses.replace(DENSE, num_layers=2, **changes)
    spec = LayoutSpec(model=model, layout=layout, batch=4)
    stages = LayoutParts.of(spec, CalibratedMachine(wired(8))).stages
    shares = traced(spec, "cpu")
    assert len(shares) == len(stages)
    for share, stage in zip(shares, stages, strict=True):
        assert sum(share.parameters) == stage.num_parameters
        for phase in ("forward", "backward"):
            ran, written = share.terms(phase), list(getattr(stage, phase)())
            assert flops(ran) == flops(written)
            assert sent(ran) == sent(written)


OF_A_USER = """
import dataclasses
import torch
from torch import nn
from stepgauge.models.transformer import Block
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor_tables import table_of

SPEC = ModelSpec(num_layers=4, positions="none", **{shape})

class Layer(Block):
    def forward(self, x):
        return super().forward(x, None)

def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def network():
    blocks = [Layer(SPEC, layer, None) for layer in range(4)]
    norm, head = nn.RMSNorm(SPEC.d_model), nn.Linear(SPEC.d_model, SPEC.vocab_size, bias=False)
    names = {"embedding": "0", "blocks.0": "1", "norm": "5", "head": "6"}
    table = {names.get(n, n.removeprefix("blocks.")): rule for n, rule in table_of(SPEC).items()}
    tokens = torch.zeros(BATCH, SPEC.context_length, dtype=torch.int64)
    return {"module": nn.Sequential(nn.Embedding(SPEC.vocab_size, SPEC.d_model), *blocks, norm, head),
            "batch": (tokens, tokens), "loss": loss, "table": table}
"""


@pytest.mark.parametrize("layout", ["tp2", "pp2 1f1b m2", "pp2 zb-h1 m2", "pp2 1f1b m2 tp2"])
def test_a_users_network_runs_and_sends_what_the_same_preset_does(layout, tmp_path):
    (tmp_path / "mine.py").write_text(
        OF_A_USER.replace("{shape}", str(SHAPE)).replace("BATCH", "4")
    )
    same = LayoutSpec(model=dataclasses.replace(DENSE, positions="none"), layout=layout, batch=4)
    mine = LayoutSpec(model=UserModel.read(f"{tmp_path / 'mine.py'}:network"), layout=layout)
    shares, stages = traced(mine, "cpu"), traced(same, "cpu")
    for share, stage in zip(shares, stages, strict=True):
        assert sum(share.parameters) == sum(stage.parameters)
        assert share.between_bytes == stage.between_bytes
        for phase in ("forward", "backward"):
            ran, preset = share.terms(phase), stage.terms(phase)
            assert flops(ran) == flops(preset)
            for collective in ("all_gather", "reduce_scatter"):  # its loss takes whole logits
                assert sent(ran)["tensor", collective] == sent(preset)["tensor", collective]
            assert flops(t for t in ran if t.for_weights) == flops(
                t for t in preset if t.for_weights
            )
    if "tp2" not in layout:
        took, takes = (predicted(spec, wired(8)).median("step_ms") for spec in (mine, same))
        assert took == pytest.approx(takes, rel=0.03)


@pytest.mark.parametrize("model", [BERT, EXPERTS, WINDOWED])
def test_stages_of_a_pipeline_are_the_network_in_parts(model):
    """Products for gradients of weights are as many FLOPs as forward's."""
    whole = traced(StepSpec(model=model, batch=2), "cpu")[0]
    stages = traced(LayoutSpec(model=model, layout="pp2 zbv m2", batch=4), "cpu")
    assert len(stages) == 4
    for phase in ("forward", "backward"):
        assert sum(flops(stage.terms(phase)) for stage in stages) == flops(whole.terms(phase))
    tied = 256 * 64 if isinstance(model, BertSpec) else 0  # stands in the first and in the last
    assert sum(sum(stage.parameters) for stage in stages) == sum(whole.parameters) + tied
    for stage in stages:
        for_weights = [term for term in stage.terms("backward") if term.for_weights]
        assert flops(for_weights) == flops(stage.terms("forward"))
    spec = PipelineSpec(model=model, schedule="1f1b", ranks=2, micro_batches=2, batch=4)
    halves = traced(spec, "cpu")
    assert sum(flops(half.terms("forward")) for half in halves) == flops(whole.terms("forward"))


@pytest.mark.parametrize("model", [BERT, WINDOWED])
def test_ranks_of_a_tensor_axis_share_the_flops(model):
    model = dataclasses.replace(model, num_layers=2)
    whole = traced(StepSpec(model=model, batch=2), "cpu")[0]
    (share,) = traced(LayoutSpec(model=model, layout="tp2", batch=2), "cpu")
    matrices = (
        2
        * 2
        * SHAPE["context_length"]
        * (model.num_layers * (12 if isinstance(model, BertSpec) else 16) * 64**2 + 256 * 64)
    )
    matrices += 2 * 64 * 64**2 if isinstance(model, BertSpec) else 0  # before the head
    assert flops(whole.terms("forward")) == matrices
    for phase in ("forward", "backward"):
        assert 2 * flops(share.terms(phase)) == flops(whole.terms(phase))
    found = sent([*share.terms("forward"), *share.terms("backward")])
    stream = 2 * 32 * 64 * 4
    layers = 4 * model.num_layers
    assert found["tensor", "reduce_scatter"] == (layers + 1) * stream
    assert found["tensor", "all_gather"] == (layers + 2) * stream


@pytest.mark.parametrize("layout", ["tp2", "tp2 overlap", "cp2 ulysses"])
def test_what_selective_checkpointing_keeps_is_not_sent_again(layout):
    spec = LayoutSpec(
        model=dataclasses.replace(DENSE, num_layers=2), layout=layout, batch=4,
        checkpointing="selective",
    )  # fmt: skip
    (stage,) = LayoutParts.of(spec, CalibratedMachine(wired(8))).stages
    (share,) = traced(spec, "cpu")
    for phase in ("forward", "backward"):
        assert sent(share.terms(phase)) == sent(getattr(stage, phase)())


def test_a_share_that_is_all_of_the_network_is_the_step_of_one_process():
    work = WorkSpec(model=BERT, batch=2)
    alone, all_parts = (
        operators._trace_step(Stage(work, parts=parts), "cpu")
        for parts in (None, range(num_parts(BERT.num_layers)))
    )
    for phase, runs in alone.runs.items():
        terms, same = (
            [term for run in each for term in run.terms] for each in (runs, all_parts.runs[phase])
        )
        assert [(t.operation, t.sizes) for t in terms] == [(t.operation, t.sizes) for t in same]


@pytest.mark.parametrize("layout", ["none", "tp2", "pp2 1f1b m2", "dp2 zero3 tp2"])
@pytest.mark.parametrize("compile", ["off", "blocks"])
def test_networks_without_formulas_are_predicted_under_every_axis(layout, compile):
    """More bandwidth is never slower, and blocks that are compiled move fewer bytes."""
    machine, model = wired(8), dataclasses.replace(BERT, num_layers=2)
    spec = LayoutSpec(model=model, layout=layout, batch=4, compile=compile)
    fabric = machine.other["fabric"]
    faster = {"within": {**fabric["within"], "bytes_per_s": 1e12, "latency_us": 1}}
    quick = dataclasses.replace(machine, other={"fabric": {**fabric, **faster}})
    here, there = predicted(spec, machine), predicted(spec, quick)
    assert 0 < there.median("step_ms") <= here.median("step_ms")
    assert here.median("tokens_per_s") == pytest.approx(4 * 32 / here.median("step_ms") * 1e3)
    if layout == "none":
        alone = predicted(StepSpec(model=model, batch=4, compile=compile), machine)
        assert here.median("step_ms") == pytest.approx(alone.median("step_ms"))


def test_what_no_hardware_file_can_tell_is_refused_by_name():
    for changes, words in (
        ({"precision": "float8"}, "precision is 'float8'; its cost is not calibrated"),
        ({"layout": "cp2", "model": dataclasses.replace(EXPERTS, attention="triton")},
         "layout is 'bucketed cp2'; of .* a ring of keys is not predicted: add ulysses"),
        ({"layout": "pp2 1f1b m2", "balance": "time"}, "stages are predicted as cut by flops"),
    ):  # fmt: skip
        asked = {"model": BERT, "layout": "none", "batch": 4, **changes}
        with pytest.raises(ValueError, match=words):
            predicted(LayoutSpec(**asked), wired(8))


@pytest.mark.parametrize(
    ("wrapper", "parameters", "state"), [("zero1", 40, 40), ("zero3", 20, 40), ("bucketed", 40, 80)]
)
@pytest.mark.parametrize("axis", ["dp2", "cp2 ulysses"])
def test_ranks_that_share_sequences_share_weights_and_state_as_those_of_data_do(
    axis, wrapper, parameters, state
):
    layout = Layout.parse(f"{axis} {wrapper}")
    found = traced_memory(
        TracedOperations(
            StepSpec(model=DENSE, precision="fp32"),
            NetworkPart(batch=1, gathered=layout.gathers_weights),
            TracedNetwork(
                forward=(), backward=(), update=Term("optimizer", TRAFFIC, (1,)),
                parameters=[5, 5], units={}, blocks={},
                moments=[{"parameters": 40, "optimizer state": 80}],
            ),
        ),
        layout,
        accumulates=False,
    )  # fmt: skip
    held = {item.name: item.bytes for item in found.items}
    assert (held["parameters"], held["optimizer state"]) == (parameters, state)
