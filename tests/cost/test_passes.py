"""Steps that accumulate gradients: passes that are added up, compared with all passes simulated."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgauge.cost.data_axis.wrappers import data_axis
from stepgauge.cost.layout_parts import LayoutParts
from stepgauge.cost.rates.contention import Slowdown
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.streams import passes
from stepgauge.cost.streams.outcome import run_program
from stepgauge.cost.streams.passes import run_passes
from stepgauge.cost.streams.program import DATA, DataParallelCost, Program
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec

HARDWARE = Path(__file__).parents[2] / "hardware"
H100 = HardwareFile.read(HARDWARE / "h100-sxm.json")
H100 = H100.with_links(HardwareFile.read(HARDWARE / "h200-nvlink.json").links)
SMALL = ModelSpec.preset("small", context_length=512, num_layers=3)


class NoContention:
    def of(self, operation, collective, axis, us=0.0):
        return Slowdown(1.0, 1.0, "assumed")

    def share_links(self, axis, other):
        return axis == other

    def occupies(self, operation, collective):
        return False


def all_simulated(step, axis, *, count):
    """Returns the outcome of one simulation of all passes, one after the other."""
    whole = Program()
    for number in range(count):
        one = step.program(axis) if number == count - 1 else step.earlier_pass(axis)
        first = len(whole.works)
        whole.works += [w._replace(after=tuple(first + i for i in w.after)) for w in one.works]
        whole.ends |= {phase: first + index for phase, index in one.ends.items()}
    return run_program(whole, step.prices.contention)


def figures(outcome):
    """Returns all figures of an outcome by name."""
    named = {}
    for name, value in dataclasses.asdict(outcome).items():
        inner = value if isinstance(value, dict) else {"": value}
        named |= {f"{name} {key}": figure for key, figure in inner.items()}
    return named


@pytest.mark.parametrize("batch", [2, 16])  # the host limits the first
@pytest.mark.parametrize(
    "layout", ["none", "tp2", "dp2 bucketed", "dp2 torch-ddp", "dp2 zero1", "dp2 zero3", "dp2 zero3 tp2"]
)  # fmt: skip
def test_a_hundred_passes_take_as_long_as_all_of_them_simulated(layout, batch):
    spec = LayoutSpec(
        model=SMALL, layout=layout, batch=batch, precision="bf16", device="cuda", accumulation=100
    )
    parts = LayoutParts.of(spec, CalibratedMachine(H100.on_ranks(spec.ranks)))
    step = parts.rank_step(0)
    added = run_passes(step, data_axis(parts.sending, step), count=100)
    whole = all_simulated(step, data_axis(parts.sending, step), count=100)
    assert figures(added) == pytest.approx(figures(whole), rel=1e-6, abs=1e-6)


def made_up(earlier, last):
    """Returns a step of such passes: (host's microseconds, device's, those of a message or 0)."""

    def program(works, phases):
        made = Program()
        for phase in phases:
            for host_us, device_us, sent_us in works:
                made.host("launch", host_us)
                made.compute("kernel", device_us)
                if sent_us:
                    made.wait(made.send("message", DATA, sent_us, "all_reduce"))
            made.end(phase)
        return made

    return SimpleNamespace(
        prices=SimpleNamespace(contention=NoContention()),
        program=lambda axis: program(last, ("forward", "backward", "optimizer")),
        earlier_pass=lambda axis: program(earlier, ("forward", "backward")),
    )


US = st.integers(0, 40).map(float)
PASS = st.lists(st.tuples(US, US, US), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(earlier=PASS, last=PASS, count=st.integers(1, 12))
def test_passes_of_any_host_and_device_are_added_up(earlier, last, count):
    step, axis = made_up(earlier, last), DataParallelCost()
    added, whole = (run(step, axis, count=count) for run in (run_passes, all_simulated))
    assert figures(added) == pytest.approx(figures(whole), abs=1e-9)


def test_the_host_may_gain_its_lead_in_many_passes():
    """Each pass the host gains 10 of 100 us. The last pass launches for 400 us, so that the host
    delays it unless its lead is that long. The first passes alone do not show which one it is.
    """
    step = made_up(earlier=[(45.0, 50.0, 0.0)], last=[(400.0, 50.0, 0.0)])
    for count in (2, 4, 100, 200):
        added, whole = (
            run(step, DataParallelCost(), count=count) for run in (run_passes, all_simulated)
        )
        assert figures(added) == pytest.approx(figures(whole))


def test_no_more_passes_are_simulated_if_there_are_more(monkeypatch):
    simulated = []

    def counted(*arguments, **named):
        simulated.append(arguments)
        return run_program(*arguments, **named)

    monkeypatch.setattr(passes, "run_program", counted)
    step = made_up(earlier=[(45.0, 50.0, 5.0)], last=[(400.0, 50.0, 5.0)])
    run_passes(step, DataParallelCost(), count=1_000)
    assert len(simulated) <= 4
