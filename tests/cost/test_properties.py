"""What holds of every prediction: faster wires are never slower and more memory never leaves less to
choose from, bytes add up, one rank is the single GPU, and a plan does not depend on its order.
"""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.planning import planner
from stepgauge.cost.rates.estimate import SPREAD, spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.step import predict
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.step import StepSpec

ROOT = Path(__file__).parents[2]
DGX = HardwareFile.read(ROOT / "hardware" / "dgx-h100.json")
GIB = 2**30
few = settings(max_examples=6, deadline=None, derandomize=True)


def small_model(layers, width, context, attention):
    return ModelSpec(
        vocab_size=4096, context_length=context, d_model=width, d_ff=2 * width,
        num_layers=layers, num_heads=8, attention=attention,
    )  # fmt: skip


models = st.builds(
    small_model,
    st.integers(4, 8),
    st.sampled_from((512, 1024, 2048)),
    st.sampled_from((1024, 4096, 16_384)),
    st.sampled_from(("sdpa", "triton")),
)


def wired(rate):
    fabric = dict(DGX.other["fabric"])
    fabric["within"] = {**fabric["within"], "bytes_per_s": rate}
    fabric["between"] = {**fabric["between"], "bytes_per_s": rate / 8}
    return CalibratedMachine(dataclasses.replace(DGX, other={**DGX.other, "fabric": fabric}))


def holding(memory_gib):
    """A machine whose GPUs have this much memory."""
    peaks = dataclasses.replace(DGX.peaks, memory_gb=memory_gib * GIB / 1e9)
    values = {f.name: getattr(peaks, f.name) for f in dataclasses.fields(peaks)}
    return CalibratedMachine(dataclasses.replace(DGX, other={**DGX.other, "peaks": values}))


@few
@given(
    models,
    st.sampled_from(
        ("dp4 bucketed", "dp4 zero2", "dp4 zero3", "tp4", "zero1 cp4", "zero2 cp4 ulysses",
         "dp2 zero3 cp2 tp2", "pp2 1f1b m4 tp2", "pp2 interleaved m4 dp2 zero1")
    ),
    st.floats(1e9, 1e12),
    st.floats(1.0, 20.0),
    st.sampled_from((1, 2)),
)  # fmt: skip
def test_faster_wires_are_never_slower(model, layout, rate, ratio, accumulation):
    model = dataclasses.replace(model, attention="triton")  # for the ring
    asked = LayoutSpec(model=model, layout=layout, batch=16, precision="bf16", device="cuda",
                       accumulation=accumulation)  # fmt: skip
    slow, fast = (
        predict_layout(asked, wired(each)).median("step_ms") for each in (rate, ratio * rate)
    )
    assert fast <= slow * (1 + 1e-9)


@settings(few, max_examples=2)  # of two plans each
@given(models, st.integers(0, 3), st.floats(2.0, 5.0), st.floats(1.0, 4.0))
@example(small_model(4, 2048, 4096, "triton"), 1, 2.0, 2.0)  # fits only in twice the memory
def test_more_memory_never_removes_a_layout(model, batch, memory_gib, ratio):
    """Nor does it make the first layout slower, because it only adds layouts."""
    asked = PlanSpec(model=model, gpus=4, global_batch=8 * 2**batch, precision="bf16")
    found = []
    for gib in (memory_gib, ratio * memory_gib):
        try:
            found.append(planner.plan(asked, holding(gib), top=1))
        except ValueError as error:
            assert "nothing fits" in str(error)
            found.append(None)
    small, large = found
    if small is not None:
        assert large is not None and large.counted[1] >= small.counted[1]
        less, more = (each.rows[0].median("step_ms") for each in found)
        assert more <= less * (1 + 1e-9)


@few
@given(models, st.sampled_from(sorted(set(WRAPPERS) - {"none"})), st.sampled_from((2, 4, 8)))
def test_the_parts_of_memory_add_up(model, wrapper, ranks):
    """The parts add up to the peak, and all shards together are the whole."""
    asked = LayoutSpec(model=model, layout=f"dp{ranks} {wrapper}", batch=ranks, precision="bf16",
                       device="cuda")  # fmt: skip
    row = predict_layout(asked, CalibratedMachine(DGX))
    parts = {name: float(size) for name, size, _ in row.tables["memory"][1:]}
    inside = sum(size for name, size in parts.items() if not name.endswith("(outside)"))
    assert inside == pytest.approx(row.median("peak_bytes"), abs=1)
    whole = 8 * model.num_parameters  # Adam has two values of 4 bytes
    shares = ranks if WRAPPERS[wrapper].shards("optimizer state") else 1
    assert parts["optimizer state"] * shares >= whole * 0.999
    backward = LayoutParts.of(asked, CalibratedMachine(DGX)).rank_step(0).groups("backward")
    gradients = sum(term.gradient for group in backward for term in group.terms)
    assert gradients == model.num_parameters


@few
@given(
    models,
    st.sampled_from(("bf16", "fp32", "bf16-pure")),
    st.sampled_from(("none", "selective", "blocks")),
    st.integers(1, 4),
)
def test_a_layout_of_one_rank_equals_the_single_gpu(model, precision, checkpointing, batch):
    how = {"model": model, "precision": precision, "checkpointing": checkpointing, "batch": batch}
    alone = predict(StepSpec(device="cuda", **how), CalibratedMachine(DGX))
    spread_out = predict_layout(
        LayoutSpec(layout="none", device="cuda", **how), CalibratedMachine(DGX)
    )
    for metric in ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "mfu", "peak_bytes"):
        assert spread_out.median(metric) == pytest.approx(alone.median(metric)), metric
    for row in (alone, spread_out):
        assert min(SPREAD.values()) <= spread(row)


@settings(few, max_examples=2)  # of two plans each
@given(models, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_layouts(model, shuffler):
    asked = PlanSpec(model=model, gpus=4, global_batch=16, precision="bf16")
    usual = planner.candidates

    def shuffled(*args):
        found = list(usual(*args))
        shuffler.shuffle(found)
        return found

    before = planner.plan(asked, CalibratedMachine(DGX), top=8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner, "candidates", shuffled)
        after = planner.plan(asked, CalibratedMachine(DGX), top=8)
    assert [row.spec for row in after.rows] == [row.spec for row in before.rows]
    assert after.counted == before.counted
