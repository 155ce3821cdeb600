"""Host times of wrappers: read from a calibration's table, and part of a predicted step."""

import dataclasses
from pathlib import Path

import pytest

from stepgauge.cost.data_axis.wrapper_host import Hooks, hooks_of, unknown_host
from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.host import SELECTIVE_HOST_FACTOR, launch_costs
from stepgauge.cost.layout import NOTHING_OVERLAPS, predict_layout
from stepgauge.cost.rates.estimate import INTERVAL, SLOWER_HOST, spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.calibration import (
    CALIBRATED_WRAPPERS,
    WRAPPER_PHASES,
    OperationTable,
    wrapper_operation,
)
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import SHIPPED, HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.links import Link, Piece
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

ROOT = Path(__file__).parents[2]
H100 = HardwareFile.read(ROOT / "hardware" / "h100-sxm.json")
H200 = HardwareFile.read(ROOT / "hardware" / "h200-sxm.json").on_ranks(2)
DGX = HardwareFile.read(SHIPPED / "dgx-h100.json")
SIZES = {  # parameters and messages of networks of 2 and 10 layers, and of 10 layers in many messages
    **dict.fromkeys(("bucketed", "zero1", "zero2"), ((15, 1), (63, 2), (63, 60))),
    **dict.fromkeys(("naive", "overlapped"), ((15, 15), (63, 63))),
    "flat": ((15, 1), (63, 1)),
    "zero3": ((15, 3), (63, 11)),
}
BLOCKS, PARAMETERS = 12, 75  # of size small


def table(wrapper, **phases):
    """Host times that are linear in parameters and messages."""
    rows = [
        (parameters, messages, number, once + each * parameters + every * messages)
        for phase, number in WRAPPER_PHASES.items()
        for each, every, once in [phases.get(phase, (0.0, 0.0, 0.0))]
        for parameters, messages in SIZES[wrapper]
    ]
    return OperationTable(("parameters", "messages", "phase"), tuple(rows))


def machine(wrapper=None, **phases):
    """The H100 with links that take no time, and host times of the wrapper."""
    links = [
        Link(settings={"op": op, "backend": "nccl", "ranks": 2}, pieces=[Piece(0.0, 1e18)],
             range_bytes=(1, 2**30), fitted={}, held_out={}, measured={})
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    ]  # fmt: skip
    tables = {wrapper_operation(wrapper): table(wrapper, **phases)} if wrapper else {}
    operations = {**H100.operations, **tables}
    return CalibratedMachine(dataclasses.replace(H100, links=links, operations=operations))


def predicted(wrapper, on, **changes):
    """Predicts a host-bound step, whose GPU always waits."""
    model = ModelSpec.preset("small", context_length=16)
    asked = {"model": model, "size": "small", "batch": 1, "device": "cuda", "precision": "bf16"}
    return predict_data_parallel(DataParallelSpec(wrapper=wrapper, **{**asked, **changes}), on)


def hooks(on, wrapper, device="cuda"):
    work = StepSpec(model=ModelSpec.preset("small"), device=device, precision="bf16")
    return hooks_of(on, wrapper, work, Layout(data=2, wrapper=wrapper))


def test_the_fit_finds_the_costs_that_made_the_table():
    for wrapper in CALIBRATED_WRAPPERS:
        found = hooks(machine(wrapper, backward=(0.0, 40.0, 7.0)), wrapper)["backward"]
        if wrapper == "flat":  # always one message
            assert found.us(75, 1) == pytest.approx(47.0)
        else:
            assert found == Hooks(0.0, pytest.approx(40.0), pytest.approx(7.0))
    both = hooks(machine("zero2", backward=(6.0, 40.0, 7.0)), "zero2")["backward"]
    assert both.us(219, 110) == pytest.approx(7.0 + 6.0 * 219 + 40.0 * 110)
    less = hooks(machine("zero3", forward=(0.0, -5.0, 0.0)), "zero3")["forward"]
    assert less == Hooks()  # a host that is faster with a wrapper is noise
    assert hooks(machine("zero3", forward=(0.0, 5.0, 0.0)), "zero3", "cpu")["forward"] == Hooks()


@pytest.mark.parametrize(
    ("wrapper", "phases", "added_us"),
    [
        ("bucketed", {"backward": (10.0, 0.0, 0.0)}, 10.0 * PARAMETERS),
        ("overlapped", {"backward": (0.0, 50.0, 0.0)}, 50.0 * PARAMETERS),
        ("naive", {"backward": (0.0, 50.0, 0.0)}, 50.0 * PARAMETERS),
        ("zero1", {"optimizer": (100.0, 0.0, 20.0)}, 100.0 * PARAMETERS + 20.0),
        ("zero3", {"forward": (0.0, 300.0, 0.0)}, 300.0 * (BLOCKS + 1)),
        ("zero3", {"backward": (0.0, 300.0, 0.0)}, 300.0 * (BLOCKS + 1)),
        ("flat", {"backward": (0.0, 0.0, 70.0)}, 70.0),
    ],
)
def test_hooks_lengthen_a_host_bound_step(wrapper, phases, added_us):
    """ZeRO 1 adds a little less, because the GPU updates three of four parts while the host works."""
    before = predicted(wrapper, machine(wrapper)).median("step_ms")
    after = predicted(wrapper, machine(wrapper, **phases)).median("step_ms")
    assert (after - before) * 1e3 == pytest.approx(added_us, rel=0.08)


def test_a_busy_gpu_hides_the_hooks():
    changes = {"model": ModelSpec.preset("2.7b"), "batch": 16, "size": "2.7b"}
    free, slow = (
        predicted("bucketed", machine("bucketed", backward=(each, 0.0, 0.0)), **changes)
        for each in (0.0, 20.0)
    )
    assert slow.median("step_ms") < 1.001 * free.median("step_ms")


def test_a_wrapper_without_host_times_gets_those_of_a_typical_host():
    """Without them, ZeRO 3 looked faster than buckets on every machine known by its data sheet."""
    words = "host cost assumed to be that of h200-sxm (calibrate --ranks measures it): bucketed"
    assert predicted("bucketed", machine()).note.startswith(words)
    assert hooks(machine(), "zero3") == hooks(CalibratedMachine(H200), "zero3") != {}
    steps = [predicted(w, machine()).median("step_ms") for w in ("none", "bucketed", "zero3")]
    assert steps == sorted(steps)
    assert "host cost" not in predicted("bucketed", machine("bucketed")).note
    assert "host cost" not in predicted("none", machine()).note


def eager_host(block_us, outside_us=0.0):
    """Host times of 2 and 10 blocks, equal in all phases."""
    rows = tuple(
        (layers, number, outside_us + block_us * layers)
        for layers in (2, 10)
        for number in range(3)
    )
    return OperationTable(("layers", "phase"), rows)


def timed(**tables):
    """The H100 with these host times, by the suffix of their names."""
    named = {f"host eager bf16{under.replace('_', ' ')}": t for under, t in tables.items()}
    return CalibratedMachine(dataclasses.replace(H100, operations={**H100.operations, **named}))


def test_host_times_of_another_number_of_ranks_are_used():
    work = StepSpec(model=ModelSpec.preset("small"), device="cuda", precision="bf16")
    on = timed(_tp2=eager_host(900.0), _tp8=eager_host(1000.0), _dp2_zero3=eager_host(700.0))
    for layout, block_us in (("tp2", 900.0), ("tp4 ", 900.0), ("tp8", 1000.0), ("tp16", 1000.0)):
        found = launch_costs(work, on, Layout.parse(layout))
        assert found["forward"].block_us == pytest.approx(block_us), layout
    assert launch_costs(work, on)["forward"].block_us < 900.0
    sharded = launch_costs(work, on, Layout.parse("dp4 zero3"))["backward"]
    assert sharded.block_us == pytest.approx(700.0)
    other = launch_costs(work, on, Layout.parse("dp4 zero1"))["backward"]
    assert other == launch_costs(work, on)["backward"], "its hooks have their own table"


def test_selective_checkpointing_takes_the_host_longer():
    """In forward and in recomputation, but not in compiled blocks."""

    def block_us(phase, checkpointing, on, **changes):
        work = StepSpec(model=ModelSpec.preset("small"), device="cuda", precision="bf16",
                        checkpointing=checkpointing, **changes)  # fmt: skip
        return launch_costs(work, on)[phase].block_us

    on = timed(**{"": eager_host(100.0)})
    assert block_us("forward", "blocks", on) == pytest.approx(100.0)
    assert block_us("backward", "blocks", on) == pytest.approx(200.0)
    assert block_us("forward", "selective", on) == pytest.approx(100.0 * SELECTIVE_HOST_FACTOR)
    assert block_us("backward", "selective", on) == pytest.approx(
        100.0 * (1 + SELECTIVE_HOST_FACTOR)
    )
    known = timed(**{"": eager_host(100.0), "_keeping_selective": eager_host(400.0)})
    assert block_us("forward", "selective", known) == pytest.approx(400.0)
    compiled = [block_us("forward", c, on, compile="blocks") for c in ("none", "selective")]
    assert compiled[0] == compiled[1]


def test_missing_host_times_of_a_layout_are_noted():
    def note(layout, on, batch=4, precision="bf16"):
        attention = "triton" if precision == "bf16" else "sdpa"
        asked = LayoutSpec(model=ModelSpec.preset("small", attention=attention), layout=layout,
                           batch=batch, precision=precision, device="cuda")  # fmt: skip
        return predict_layout(asked, on).note.partition("; the host limits this step")[0]

    links = machine().hardware.links
    with_links = CalibratedMachine(dataclasses.replace(H200, links=[*H200.links, *links]))
    assert note("tp2", with_links).startswith(
        "the host limits this step, or nearly: if it launches"
    )
    assert note("tp2 overlap", with_links) == NOTHING_OVERLAPS
    assert "host cost" not in note("tp2 overlap", with_links, batch=256)
    assert note("tp2 overlap", with_links, batch=256, precision="fp32").startswith(
        "host cost not measured and left out (calibrate --ranks measures it): what overlap adds"
    )
    assert note("zero2 cp2", with_links).endswith(": zero2 cp2")


def test_a_host_bound_step_has_a_larger_spread():
    bound = predicted("none", timed(**{"": eager_host(1000.0)}))
    free = predicted("none", timed(**{"": eager_host(1.0)}))
    assert spread(bound) > SLOWER_HOST - 1 > 4 * spread(free)
    assert INTERVAL not in free.tables
    ((_, late_us),) = bound.tables[INTERVAL][1:]
    assert late_us == pytest.approx((SLOWER_HOST - 1) * bound.median("step_ms") * 1e3, rel=0.1)


def step_ms_and_note(on, layout):
    spec = LayoutSpec(model=ModelSpec.preset("nano", context_length=128), layout=layout, batch=4,
                      device="cuda")  # fmt: skip
    record = predict_layout(spec, on)
    return record.median("step_ms"), record.note.partition("the host limits this step")[0]


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100"])
def test_layouts_on_data_sheet_machines_rank_as_on_the_typical_host(name):
    """Tensor parallel was first there, because only its host cost was left out."""
    sheet = CalibratedMachine(HardwareFile.read(SHIPPED / f"{name}.json").on_ranks(2))
    typical = CalibratedMachine(H200)
    layouts = ("none", "dp2 bucketed", "dp2 zero1", "tp2")
    for on in (sheet, typical):
        steps = {layout: step_ms_and_note(on, layout)[0] for layout in layouts}
        assert sorted(steps, key=steps.__getitem__) == list(layouts)
    assert step_ms_and_note(sheet, "tp2")[1].startswith(
        "host cost assumed to be that of h200-sxm (calibrate --ranks measures it): tp2"
    )
    assert not step_ms_and_note(typical, "tp2")[1]


def test_a_layout_without_host_times_gets_those_of_its_tensor_axis():
    """Otherwise overlap, or a data axis, would make a tensor axis look faster than without them."""
    for on in (CalibratedMachine(DGX), CalibratedMachine(H200)):
        work = StepSpec(model=ModelSpec.preset("small"), device="cuda", precision="bf16")
        tensor = launch_costs(work, on, Layout.parse("tp2"))
        assert launch_costs(work, on, Layout.parse("dp2 bucketed tp2")) == tensor
        overlapped, both = (
            launch_costs(work, on, Layout.parse(layout))
            for layout in ("tp2 overlap", "dp2 zero1 tp2 overlap")
        )
        assert overlapped == both != tensor
        in_fp32 = dataclasses.replace(work, precision="fp32")  # overlap was not timed
        of_fp32 = (launch_costs(in_fp32, on, Layout.parse(name)) for name in ("tp2", "tp2 overlap"))
        assert len({str(costs) for costs in of_fp32}) == 1
        hooked = hooks_of(on, "bucketed", work, Layout.parse("dp2 bucketed tp2"))
        assert hooked["backward"] != Hooks()
    layout = Layout.parse("dp2 zero1 tp2 overlap")
    assert unknown_host(CalibratedMachine(DGX), work, layout, replayed=False) == (
        "host cost assumed to be that of h200-sxm (calibrate --ranks measures it): tp2 overlap, zero1"
    )
    assert not unknown_host(CalibratedMachine(DGX), work, layout, replayed=True)
    known = Layout.parse("dp2 zero1 tp2")
    assert not unknown_host(CalibratedMachine(H200), work, known, replayed=False)


def test_a_layout_adds_to_a_host_what_it_adds_to_the_typical_one():
    work = StepSpec(model=ModelSpec.preset("small"), device="cuda", precision="bf16")
    here, typical = machine(), CalibratedMachine(H200)
    for layout in ("tp2", "tp8", "zero1 cp2"):
        for phase in ("forward", "backward"):
            added, expected = (
                launch_costs(work, on, Layout.parse(layout))[phase].us(12)
                - launch_costs(work, on)[phase].us(12)
                for on in (here, typical)
            )
            assert added == pytest.approx(expected)
    assert hooks_of(here, "zero1", work, Layout.parse("zero1 cp2"))["backward"] == Hooks()
