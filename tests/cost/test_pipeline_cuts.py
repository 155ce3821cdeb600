"""Stages for the shortest simulated step, compared with stages of equal load."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.pipeline.cuts import shortest_cut
from stepgauge.cost.pipeline.step import predict_pipeline
from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import build, lower
from stepgauge.spec.plan.stages import cut_parts

ROOT = Path(__file__).parents[2]
# Times of embedding, half blocks and head in ms on an H200.
PARTS = [0.5, *[4.9, 5.7] * 16, 6.3]


def step_of(parts, weights, schedule):
    actions = {
        (stage, kind): sum(weights[part] for part in own) / 3
        for stage, own in enumerate(parts)
        for kind in "FIW"
    }
    return simulate(lower(schedule), Durations(actions=actions)).step_ms


@pytest.mark.parametrize(("name", "gain"), [("1f1b", 1.01), ("interleaved", 1.05), ("zbv", 1.03)])
def test_stages_for_the_shortest_step_beat_stages_of_equal_load(name, gain):
    schedule = build(name, ranks=4, micro_batches=8)
    loads, shortest = cut_parts(PARTS, schedule), shortest_cut(PARTS, schedule)
    assert list(itertools.chain(*shortest)) == list(range(len(PARTS)))
    assert all(shortest)
    assert step_of(loads, PARTS, schedule) > gain * step_of(shortest, PARTS, schedule)


def test_no_single_move_of_a_border_gives_a_shorter_step():
    schedule = build("zbv", ranks=2, micro_batches=4)
    weights = [1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 4.0]
    found = step_of(shortest_cut(weights, schedule), weights, schedule)
    every = [
        [range(a), range(a, b), range(b, c), range(c, 7)]
        for a, b, c in itertools.combinations(range(1, 7), 3)
    ]
    assert found == pytest.approx(min(step_of(parts, weights, schedule) for parts in every))


def test_an_overweight_stage_gets_additional_blocks():
    schedule = build("1f1b", ranks=2, micro_batches=4)
    plain, heavier = (shortest_cut([1.0] * 8, schedule, overweight=more) for more in (0, 1))
    assert [len(part) for part in heavier] == [len(plain[0]), len(plain[1]) + 2]
    with pytest.raises(ValueError, match="stages is 2; the network has 1 parts to cut"):
        shortest_cut([1.0], schedule)


WIDE = ModelSpec(num_layers=16, context_length=4096, d_model=4096, d_ff=11_008, num_heads=32,
                 vocab_size=32_000, attention="sdpa", loss="cross-entropy")  # fmt: skip


def test_layouts_are_cut_between_whole_blocks():
    machine = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "h200-sxm.json"))
    by_load, by_step = (
        predict_layout(
            LayoutSpec(model=WIDE, layout="pp4 interleaved m8", batch=8, precision="bf16",
                       device="cuda", balance=balance),
            machine,
        )
        for balance in ("time", "step")
    )  # fmt: skip
    assert by_load.median("step_ms") > 1.02 * by_step.median("step_ms")
    assert by_step.note.startswith("stages of 3, 2, 2, 2, ")
    assert by_step.note.endswith(" blocks, for the shortest step by predicted time")


def test_a_predicted_row_notes_its_stages():
    asked = PipelineSpec(model=WIDE, schedule="zbv", ranks=4, micro_batches=8, batch=8,
                         precision="bf16-pure", device="cuda", balance="time")  # fmt: skip
    machine = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "h200-sxm.json"))
    by_load, by_step = (
        predict_pipeline(dataclasses.replace(asked, balance=balance), machine)
        for balance in ("time", "step")
    )
    assert by_load.median("step_ms") > 1.02 * by_step.median("step_ms")
    assert by_step.note.startswith("stages of 5, 5, ")
    assert by_step.note.endswith(" parts, for the shortest step by predicted time")
