"""Traced work of one rank of a layout, with simulated other ranks: compared with the formulas of the
Transformer, with counts of FLOPs, and with the whole network.
"""

import collections
import dataclasses
import functools

import pytest
from tests.cpu_machine import wired

from stepgauge.bench import operators
from stepgauge.bench.operators import traced
from stepgauge.bench.stage_step import Stage
from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.memory.outside import COMMUNICATOR, outside
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


CACHED_TRACE = functools.cache(operators._trace)


@pytest.fixture(autouse=True)
def trace_in_this_process(monkeypatch):
    """A CPU needs no other process. Each stage is traced once."""
    monkeypatch.setattr(operators, "_trace_in_process", CACHED_TRACE)


def flops(terms, prefix="matmul"):
    """Returns the FLOPs of the products: twice their multiply-adds."""
    products = [term for term in terms if term.operation.startswith(prefix)]
    return sum(2 * term.count * term.sizes[0] * term.sizes[1] * term.sizes[2] for term in products)


def sent(terms):
    """Returns the bytes and the number of collectives by axis and operation, and how often which products hide
    them.
    """
    result = collections.Counter()
    for term in terms:
        if term.axis:
            result[term.axis, term.operation] += term.count * term.sizes[0]
            result["number", term.axis, term.operation] += term.count
        if term.axis == "tensor" and term.hidden_by:
            result["hidden by", *(product.sizes for product in term.hidden_by)] += term.count
    return result


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2", {}),
        ("tp2 overlap", {}),
        ("cp2 ulysses", {}),
        ("dp2 zero3 tp2", {"num_kv_heads": 2, "qk_norm": True}),
        ("pp2 1f1b m2 tp2", {"norm": "layernorm", "feed_forward": "gelu", "tied_head": True}),
        ("tp2", {"loss": "fused", "positions": "learned"}),
        ("tp4", {"num_kv_heads": 2, "attention_bias": "all"}),
        ("dp2 bucketed tp2", {"attention_bias": "all", "feed_forward_bias": True, "qk_norm": True}),
    ],
)
def test_a_rank_computes_and_sends_as_much_as_the_formulas_say(layout, changes, monkeypatch):
    monkeypatch.setattr("stepgauge.spec.plan.tensor.LEAST_OVERLAPPED_BYTES", 1024)
    model = dataclasses.replace(DENSE, num_layers=2, **changes)
    spec = LayoutSpec(model=model, layout=layout, batch=4)
    stages = LayoutParts.of(spec, CalibratedMachine(wired(8))).stages
    shares = traced(spec, "cpu")
    assert len(shares) == len(stages)
    for share, stage in zip(shares, stages, strict=True):
        assert sum(share.parameters) == stage.num_parameters
        operations = TracedOperations(stage.spec, stage.share, share)
        for phase in ("forward", "backward"):
            traced_terms, formulas = (list(getattr(each, phase)()) for each in (operations, stage))
            assert flops(traced_terms) == flops(formulas)
            assert sent(traced_terms) == sent(formulas)


USER_MODEL = """
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
def test_a_users_network_computes_and_sends_as_much_as_the_same_preset(layout, tmp_path):
    (tmp_path / "mine.py").write_text(
        USER_MODEL.replace("{shape}", str(SHAPE)).replace("BATCH", "4")
    )
    preset = LayoutSpec(model=dataclasses.replace(DENSE, positions="none"), layout=layout, batch=4)
    user = LayoutSpec(model=UserModel.read(f"{tmp_path / 'mine.py'}:network"), layout=layout)
    shares, stages = traced(user, "cpu"), traced(preset, "cpu")
    for share, stage in zip(shares, stages, strict=True):
        assert sum(share.parameters) == sum(stage.parameters)
        assert share.boundary_bytes == stage.boundary_bytes
        for phase in ("forward", "backward"):
            terms, expected = share.terms(phase), stage.terms(phase)
            assert flops(terms) == flops(expected)
            # Not the all-reduce: the user's loss takes all logits.
            for collective in ("all_gather", "reduce_scatter"):
                assert sent(terms)["tensor", collective] == sent(expected)["tensor", collective]
            assert flops(t for t in terms if t.for_weights) == flops(
                t for t in expected if t.for_weights
            )
    if "tp2" not in layout:
        user_ms, preset_ms = (
            predicted(spec, wired(8)).median("step_ms") for spec in (user, preset)
        )
        assert user_ms == pytest.approx(preset_ms, rel=0.03)


@pytest.mark.parametrize("model", [BERT, EXPERTS, WINDOWED])
def test_the_stages_of_a_pipeline_add_up_to_the_network(model):
    """The products of weight gradients have as many FLOPs as those of forward."""
    whole = traced(StepSpec(model=model, batch=2), "cpu")[0]
    stages = traced(LayoutSpec(model=model, layout="pp2 zbv m2", batch=4), "cpu")
    assert len(stages) == 4
    for phase in ("forward", "backward"):
        assert sum(flops(stage.terms(phase)) for stage in stages) == flops(whole.terms(phase))
    tied = 256 * 64 if isinstance(model, BertSpec) else 0  # in the first and the last stage
    assert sum(sum(stage.parameters) for stage in stages) == sum(whole.parameters) + tied
    for stage in stages:
        for_weights = [term for term in stage.terms("backward") if term.for_weights]
        assert flops(for_weights) == flops(stage.terms("forward"))
    spec = PipelineSpec(model=model, schedule="1f1b", ranks=2, micro_batches=2, batch=4)
    halves = traced(spec, "cpu")
    assert sum(flops(half.terms("forward")) for half in halves) == flops(whole.terms("forward"))


@pytest.mark.parametrize("model", [BERT, WINDOWED])
def test_tensor_parallel_ranks_share_the_flops(model):
    model = dataclasses.replace(model, num_layers=2)
    whole = traced(StepSpec(model=model, batch=2), "cpu")[0]
    (share,) = traced(LayoutSpec(model=model, layout="tp2", batch=2), "cpu")
    tokens = 2 * SHAPE["context_length"]
    block_weights = (12 if isinstance(model, BertSpec) else 16) * 64**2
    expected = 2 * tokens * (model.num_layers * block_weights + 256 * 64)
    expected += (
        2 * tokens * 64**2 if isinstance(model, BertSpec) else 0
    )  # the layer before the head
    assert flops(whole.terms("forward")) == expected
    for phase in ("forward", "backward"):
        assert 2 * flops(share.terms(phase)) == flops(whole.terms(phase))
    collectives = sent([*share.terms("forward"), *share.terms("backward")])
    stream = 2 * 32 * 64 * 4
    layers = 4 * model.num_layers
    assert collectives["tensor", "reduce_scatter"] == (layers + 1) * stream
    assert collectives["tensor", "all_gather"] == (layers + 2) * stream


@pytest.mark.parametrize("layout", ["tp2", "tp2 overlap", "cp2 ulysses"])
def test_selective_checkpointing_does_not_repeat_collectives(layout):
    spec = LayoutSpec(
        model=dataclasses.replace(DENSE, num_layers=2), layout=layout, batch=4,
        checkpointing="selective",
    )  # fmt: skip
    (stage,) = LayoutParts.of(spec, CalibratedMachine(wired(8))).stages
    (share,) = traced(spec, "cpu")
    operations = TracedOperations(stage.spec, stage.share, share)
    for phase in ("forward", "backward"):
        assert sent(getattr(operations, phase)()) == sent(getattr(stage, phase)())


def test_a_stage_with_all_parts_equals_the_step_of_one_process():
    work = WorkSpec(model=BERT, batch=2)
    step, stage = (
        operators._trace_step(Stage(work, parts=parts), "cpu")
        for parts in (None, range(num_parts(BERT.num_layers)))
    )
    for phase in step.runs:
        of_step, of_stage = (
            [(term.operation, term.sizes) for run in each.runs[phase] for term in run.terms]
            for each in (step, stage)
        )
        assert of_step == of_stage


@pytest.mark.parametrize("layout", ["none", "tp2", "pp2 1f1b m2", "dp2 zero3 tp2"])
@pytest.mark.parametrize("compile", ["off", "blocks"])
def test_networks_without_formulas_are_predicted_on_every_axis(layout, compile):
    """More bandwidth never makes a step slower."""
    machine, model = wired(8), dataclasses.replace(BERT, num_layers=2)
    spec = LayoutSpec(model=model, layout=layout, batch=4, compile=compile)
    fabric = machine.other["fabric"]
    faster = {"within": {**fabric["within"], "bytes_per_s": 1e12, "latency_us": 1}}
    fast_machine = dataclasses.replace(machine, other={"fabric": {**fabric, **faster}})
    row, fast_row = predicted(spec, machine), predicted(spec, fast_machine)
    assert 0 < fast_row.median("step_ms") <= row.median("step_ms")
    assert row.median("tokens_per_s") == pytest.approx(4 * 32 / row.median("step_ms") * 1e3)
    if layout == "none":
        step = predicted(StepSpec(model=model, batch=4, compile=compile), machine)
        assert row.median("step_ms") == pytest.approx(step.median("step_ms"))


def test_errors_say_what_cannot_be_predicted():
    for changes, words in (
        ({"precision": "float8"}, "precision is 'float8'; its cost is not calibrated"),
        ({"layout": "cp2", "model": dataclasses.replace(EXPERTS, attention="triton")},
         "layout is 'bucketed cp2'; of .* a ring of keys is not predicted: add ulysses"),
        ({"layout": "pp2 1f1b m2", "balance": "time"}, "stages are predicted as cut by flops"),
    ):  # fmt: skip
        fields = {"model": BERT, "layout": "none", "batch": 4, **changes}
        with pytest.raises(ValueError, match=words):
            predicted(LayoutSpec(**fields), wired(8))


@pytest.mark.parametrize(
    ("wrapper", "parameters", "state"), [("zero1", 40, 40), ("zero3", 20, 40), ("bucketed", 40, 80)]
)
@pytest.mark.parametrize("axis", ["dp2", "cp2 ulysses"])
def test_context_parallel_ranks_shard_weights_and_state_like_data_parallel_ranks(
    axis, wrapper, parameters, state
):
    layout = Layout.parse(f"{axis} {wrapper}")
    memory = traced_memory(
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
    held = {item.name: item.bytes for item in memory.items}
    assert (held["parameters"], held["optimizer state"]) == (parameters, state)


@pytest.mark.parametrize(
    "axes", ["dp2 zero1 tp2 overlap", "dp2 zero2 cp2 ulysses", "pp2 1f1b m2 tp2"]
)
def test_a_traced_network_needs_as_much_memory_outside_torch_as_its_formulas_say(axes, monkeypatch):
    monkeypatch.setattr("stepgauge.spec.plan.tensor.LEAST_OVERLAPPED_BYTES", 1024)
    layout = Layout.parse(axes)
    spec = LayoutSpec(model=dataclasses.replace(DENSE, num_layers=2), layout=axes, batch=4)
    stages = LayoutParts.of(spec, CalibratedMachine(wired(8))).stages
    shares = [
        TracedOperations(stage.spec, stage.share, share)
        for stage, share in zip(stages, traced(spec, "cpu"), strict=True)
    ]
    parts = {item.name: item.bytes for item in outside(layout, *shares)}
    assert parts == {item.name: item.bytes for item in outside(layout, *stages)}
    assert parts["communicators"] == len(layout.sizes) * COMMUNICATOR
    assert ("buffers for other ranks" in parts) == (layout.overlap or layout.ulysses)
