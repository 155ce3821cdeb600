"""Plans for a user's own network: every axis along which it can be cut."""

import pytest

torch = pytest.importorskip("torch")

from stepgauge.bench.operators import traced  # noqa: E402
from stepgauge.cost.rates.machine import CalibratedMachine  # noqa: E402
from stepgauge.cost.traced.plan import _degrees, _layouts, _rows_of_degrees, plan_traced  # noqa: E402
from stepgauge.cost.traced.traceable import cut_of  # noqa: E402
from stepgauge.runtime.launch import RankError  # noqa: E402
from stepgauge.runtime.workers import run_isolated  # noqa: E402
from stepgauge.spec.hardware import HardwareFile  # noqa: E402
from stepgauge.spec.hardware_files import file_named  # noqa: E402
from stepgauge.spec.planning import PlanSpec  # noqa: E402
from stepgauge.spec.user_model import UserModel  # noqa: E402

NETWORKS = """
import torch
from torch import nn
from stepgauge.spec.plan.tensor import Rule

def stack(batch=8):
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU()]
    table = {"0": Rule("column"), "2": Rule("row")}
    return {"module": nn.Sequential(*layers), "batch": torch.randn(batch, 64), "table": table}

def odd_batch():
    return stack(batch=2)

def opaque():
    return nn.Bilinear(4, 4, 4), (torch.randn(2, 4), torch.randn(2, 4))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return self.layer(x)

def whole():
    return Net(), torch.randn(3, 64)
"""


def plan_in_this_process(spec):
    machine = CalibratedMachine(HardwareFile.read(file_named("dgx-h100")).on_ranks(spec.gpus))
    traces = {}

    def trace(step):
        key = cut_of(step), step.parsed_layout.gathers_weights
        if key not in traces:
            traces[key] = traced(step, "sm90")
        return traces[key]

    return plan_traced(spec, trace, machine, uncut={})


@pytest.fixture
def plan(tmp_path):
    """Plans in another process: autograd, once used on a CPU, refuses a fake GPU."""
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)

    def plan(factory, gpus, **fields):
        spec = PlanSpec(model=UserModel.read(f"{file}:{factory}"), gpus=gpus, **fields)
        return run_isolated(plan_in_this_process, spec)

    return plan


def test_a_network_with_a_table_and_in_sequence_gets_every_axis(plan):
    found = plan("stack", 2, global_batch=4, precision="bf16")
    layouts = {row.spec["layout"]: row for row in found.rows}
    data = {f"dp2 {wrapper}" for wrapper in ("bucketed", "zero1", "zero2", "zero3")}
    assert set(layouts) == data | {"tp2", "pp2 1f1b m8", "pp2 zbv m8"}
    assert not found.refused
    steps = [row.metrics["step_ms"].median for row in found.rows]
    assert steps == sorted(steps)
    # every layout does the same step: four batches of the factory
    assert {name: row.spec["accumulation"] for name, row in layouts.items()} == {
        **dict.fromkeys(data, 2), "tp2": 4, "pp2 1f1b m8": 4, "pp2 zbv m8": 4,
    }  # fmt: skip
    assert layouts["tp2"].median("peak_bytes") < layouts["dp2 bucketed"].median("peak_bytes")


def test_axes_are_tried_alone_before_they_are_combined():
    assert _degrees(8, gpus_per_node=2) == [
        (1, 1), (1, 2), (2, 1), (1, 4), (1, 8), (2, 2), (2, 4),
    ]  # fmt: skip
    names = [str(one) for layouts in _layouts(2, 2, 2) for one in layouts]
    assert len(names) == 4 * 2 * 3 and "pp2 1f1b m8 dp2 zero1 tp2" in names


def test_micro_batches_divide_the_batch(plan):
    (row,) = [r for r in plan("odd_batch", 2).rows if "1f1b" in r.spec["layout"]]
    assert row.spec["layout"] == "pp2 1f1b m2"


def test_an_axis_that_cannot_be_cut_is_left_out_with_the_reason(plan):
    found = plan("whole", 2)
    assert {row.spec["layout"] for row in found.rows} == {
        "dp2 bucketed", "dp2 zero1", "dp2 zero2", "dp2 zero3",
    }  # fmt: skip
    assert "a pipeline cuts an nn.Sequential" in found.refused["pipeline"]  # not its odd batch
    assert "table of names and rules" in found.refused["tensor"]


NET = UserModel(file="net.py", factory="net", content="")


def dgx(gpus):
    return CalibratedMachine(HardwareFile.read(file_named("dgx-h100")).on_ranks(gpus))


def traced_before_refusal(error, message, *, gpus, uncut, **fields):
    """Plans with traces that all raise `error`. Checks the message of the refusal, and returns the
    layouts that were traced before.
    """
    layouts = []

    def trace(step):
        layouts.append(step.layout)
        raise ValueError(error)

    with pytest.raises(ValueError, match=message):
        plan_traced(PlanSpec(model=NET, gpus=gpus, **fields), trace, dgx(gpus), uncut=uncut)
    return layouts


def test_other_layouts_are_not_traced_if_the_whole_network_cannot_be():
    """A module that cannot be traced was traced for every layout before the plan was refused."""
    error = "the step cannot be traced: RuntimeError"
    assert traced_before_refusal(error, f"^{error}$", gpus=4, uncut={}) == ["dp4 bucketed"]


def test_axes_that_can_never_work_are_not_traced():
    uncut = {"pipeline": "the module is no nn.Sequential"}
    message = "global_batch is 1; 2 data ranks"
    layouts = traced_before_refusal("cannot be cut", message, gpus=2, uncut=uncut, global_batch=1)
    assert layouts == ["tp2"]


def test_the_smallest_number_of_micro_batches_is_in_the_reason():
    def trace(step):
        count = step.parsed_layout.microbatches
        raise ValueError(f"3 samples cannot be divided into {count} micro-batches")

    spec = PlanSpec(model=NET, gpus=2, global_batch=2)
    with pytest.raises(ValueError, match="3 samples cannot be divided into 2 micro-batches"):
        _rows_of_degrees(spec, 1, 2, trace, dgx(2))


def test_a_network_that_cannot_be_traced_is_refused(plan):
    with pytest.raises(RankError, match="trilinear"):
        plan("opaque", 2)
