"""Steps that are predicted from networks of few blocks that were timed as a whole."""

import dataclasses
from pathlib import Path

import pytest

from stepgauge.spec.blocks import AXES, CLOCKS, LAYERS, blocks_of, operation_of
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import TRAINING_PHASES, StepSpec
from stepgauge.validate.predicted import predicted

FILE = Path(__file__).parents[2] / "hardware" / "h200-sxm.json"
MODEL = ModelSpec.preset("medium", context_length=512)
STEP = StepSpec(model=MODEL, size="medium", batch=4, precision="bf16", device="cuda")
# Microseconds of each phase of a block, and of everything outside of blocks, by clock.
DEVICE = {"forward": (900.0, 300.0), "backward": (2000.0, 700.0), "optimizer": (100.0, 50.0)}
HOST = {"forward": (400.0, 100.0), "backward": (500.0, 100.0), "optimizer": (40.0, 20.0)}


def machine(device=DEVICE, host=HOST, layout="none", spec=STEP) -> HardwareFile:
    rows = [
        (layers, TRAINING_PHASES.index(phase), CLOCKS.index(clock), outside + layers * block)
        for layers in LAYERS
        for clock, times in (("host", host), ("device", device))
        for phase, (block, outside) in times.items()
    ]
    file = HardwareFile.read(FILE)
    tables = {
        **file.operations,
        operation_of(spec, Layout.parse(layout)): OperationTable(AXES, tuple(rows)),
    }
    return dataclasses.replace(file, operations=tables)


def at_depth(times, layers: int) -> float:
    return sum(outside + layers * block for block, outside in times.values()) / 1e3


def test_a_step_is_its_blocks_and_everything_outside_of_them():
    found = predicted(STEP, machine())
    assert found.median("step_ms") == pytest.approx(at_depth(DEVICE, 24), rel=0.01)
    head, *rows = found.tables["terms"]
    products = [row for row in rows if row[head.index("operation")].startswith("matmul")]
    assert {row[head.index("source")] for row in products} == {"timed whole"}
    deeper = dataclasses.replace(STEP, model=dataclasses.replace(MODEL, num_layers=48))
    longer = predicted(deeper, machine()).median("step_ms") - found.median("step_ms")
    assert longer == pytest.approx(24 * 3000 / 1e3, rel=0.01)


def test_a_host_bound_step_takes_the_measured_time_of_the_host():
    host = {phase: (4 * block, 4 * outside) for phase, (block, outside) in DEVICE.items()}
    found = predicted(STEP, machine(host=host))
    assert found.median("step_ms") == pytest.approx(at_depth(host, 24), rel=0.03)
    assert found.median("device_ms") < at_depth(host, 24) / 2


def test_data_parallel_ranks_use_the_blocks_of_a_single_gpu():
    rank = DataParallelSpec(model=MODEL, size="medium", wrapper="bucketed", ranks=2, batch=4,
                            precision="bf16", device="cuda")  # fmt: skip
    assert blocks_of(rank) == [dataclasses.replace(blocks_of(STEP)[0], ranks=2)]
    assert blocks_of(rank) == blocks_of(dataclasses.replace(rank, wrapper="zero2"))
    found = predicted(rank, machine(layout="dp2 bucketed"))
    alone = at_depth(DEVICE, 24)
    assert found.median("without_communication_ms") == pytest.approx(alone, rel=0.03)


def test_pipeline_stages_use_blocks_timed_with_a_micro_batch():
    layout = LayoutSpec(model=MODEL, size="medium", layout="pp2 1f1b m4", batch=16,
                        precision="bf16", device="cuda")  # fmt: skip
    assert blocks_of(layout) == [dataclasses.replace(blocks_of(STEP)[0], ranks=2)]
    cut = layout.layout
    busiest = predicted(layout, machine(layout=cut)).median("busiest_rank_ms")
    faster = {**DEVICE, "forward": (450.0, 300.0)}
    fixed = predicted(layout, machine(layout=cut, device=faster))
    shorter = busiest - fixed.median("busiest_rank_ms")
    assert shorter == pytest.approx(4 * 12 * 0.45, rel=0.05)


def test_tensor_parallel_blocks_are_timed_with_their_communication():
    layout = LayoutSpec(model=MODEL, size="medium", layout="tp2", batch=4, precision="bf16",
                        device="cuda")  # fmt: skip
    assert [(few.cut, few.ranks) for few in blocks_of(layout)] == [("tp2", 2)]
    found = predicted(layout, machine(layout="tp2"))
    assert found.median("step_ms") == pytest.approx(at_depth(DEVICE, 24), rel=0.02)
    assert 0 < found.median("tensor_exposed_ms") < 0.5 * found.median("step_ms")


def test_zero3_uses_the_host_times_of_blocks_that_gather_weights():
    """The host's time includes its hooks, so that no other hooks are added."""
    rank = DataParallelSpec(model=MODEL, size="medium", wrapper="zero3", ranks=2, batch=4,
                            precision="bf16", device="cuda")  # fmt: skip
    assert [few.cut for few in blocks_of(rank)] == ["dp2 zero3", "none"]
    slow = {**HOST, "forward": (5000.0, 100.0)}
    found = predicted(rank, machine(layout="dp2 zero3", host=slow))
    assert found.median("forward_ms") == pytest.approx(24 * 5.0 + 0.1, rel=0.02)


def test_context_parallel_and_shallow_networks_have_no_timed_blocks():
    triton = dataclasses.replace(MODEL, attention="triton")
    sequences = LayoutSpec(model=triton, layout="cp2 bucketed", batch=4, device="cuda")
    assert blocks_of(sequences) == []
    shallow = dataclasses.replace(STEP, model=dataclasses.replace(MODEL, num_layers=5))
    assert blocks_of(shallow) == []
    assert blocks_of(dataclasses.replace(STEP, phases="forward")) == []
    other = dataclasses.replace(STEP, batch=3)
    same = predicted(other, HardwareFile.read(FILE)).median("step_ms")
    assert predicted(other, machine()).median("step_ms") == same
