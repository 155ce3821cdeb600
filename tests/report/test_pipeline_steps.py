"""Plots of pipeline steps: actions and memory, the predicted step above the measured one."""

import dataclasses
import html
import itertools
import re

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.report.page import Plot, Text
from stepgauge.report.pipeline_steps import (
    COUNTED,
    MAX_PLOTS,
    Step,
    step_blocks,
    steps_of,
    tracks,
    wide_tracks,
)
from stepgauge.spec.plan.pipeline import build, check, lower
from stepgauge.spec.plan.pipeline.check import Held
from stepgauge.spec.record import Record, Sample

GIB = 2**30
TIMELINE = simulate(lower(build("zb-h1", ranks=2, micro_batches=4)), Durations.of_stages(2))


def record(provenance="measured", *, held=None, number=0):
    """Returns a step whose ranks hold 1 GiB in addition to their micro-batches."""
    spans = [
        [rank, str(s.action), s.start, s.end]
        for rank, row in enumerate(TIMELINE.ranks)
        for s in row
    ]
    tables = {"spans": [["rank", "action", "start ms", "end ms"], *spans]}
    series = {}
    if held:
        rows = [
            [rank, ms, GIB + n]
            for rank, points in enumerate(TIMELINE.held(held))
            for ms, n in points
        ]
        tables["held"] = [["rank", "ms", "bytes"], *rows]
        series["rank_peak_bytes"] = [
            GIB + peak for peak in check(build("zb-h1", ranks=2, micro_batches=4), held=held).peak
        ]
    metrics = {"step_ms": Sample.exact(TIMELINE.step_ms, "ms")}
    return Record(kind="pipeline", spec={"schedule": "zb-h1", "number": number}, tables=tables,
                  series=series, metrics=metrics, provenance=provenance)  # fmt: skip


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv", "v-half", "izb"])
def test_the_highest_point_of_the_timeline_is_the_checkers_peak(name):
    found = check(build(name, ranks=3, micro_batches=9))
    held = {stage: Held(3.0 + stage, 1.0 + stage / 4) for stage in range(found.schedule.num_stages)}
    found = check(found.schedule, held=held)
    timeline = simulate(found.schedule, Durations.of_stages(found.schedule.num_stages))
    for spans, points, peak in zip(timeline.ranks, timeline.held(held), found.peak, strict=True):
        assert max(level for _, level in points) == pytest.approx(peak)
        assert points[-1] == (spans[-1].end, pytest.approx(0))


def test_bytes_are_drawn_if_prediction_and_measurement_have_them():
    held = {stage: Held(2.0 * GIB, 1.0 * GIB) for stage in range(2)}
    measured, modelled = record(held=held), record("modelled", held=held)
    both = steps_of(measured, [modelled, measured])
    assert list(both) == ["predicted", "measured"]
    assert both["measured"].unit == "GiB"
    assert both["measured"].peaks == both["predicted"].peaks == [5.0, 4.0]
    assert max(level for _, level in both["measured"].levels[0]) == 5.0
    svg = tracks(both)
    assert svg.index("predicted: ") < svg.index("measured, last step: ")
    assert "held, GiB" in svg and "predicted peak" in svg
    assert all(f">{kind}3<" in svg for kind in "FIW")  # bars are named, not only coloured
    assert all(f">{text}<" in svg for text in ("F, forward", "I, gradient of input"))
    alone = tracks(steps_of(measured, [measured]))
    assert "measured peak" in alone and "predicted" not in alone
    # An old record has no bytes, so both are counted in micro-batches.
    old = record()
    counted = steps_of(old, [modelled, old])
    assert [step.unit for step in counted.values()] == [COUNTED] * 2
    assert counted["measured"].peaks == [2, 2]


def names_in(svg):
    """Returns (x, y, name) of each name in a bar."""
    text = r'<text style="font-size: 6.5px[^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<'
    found = re.findall(text, svg)
    return sorted((float(y), float(x), name) for x, y, name in found)


def width(name):
    return TextPath((0, 0), name, size=6.5, prop=FontProperties("DejaVu Sans")).get_extents().width


@pytest.mark.parametrize("draw", [tracks, wide_tracks])
@pytest.mark.parametrize("name", ["zbv", "interleaved", "1f1b", "gpipe"])
def test_names_in_bars_do_not_overlap(name, draw):
    schedule = lower(build(name, ranks=4, micro_batches=8))
    timeline = simulate(schedule, Durations.of_stages(schedule.num_stages))
    names = names_in(draw({name: Step.counted(timeline)}))
    num_actions = sum(map(len, timeline.ranks))
    assert len(names) == num_actions, "each action has room for its micro-batch at least"
    for (y, x, left), (next_y, next_x, right) in itertools.pairwise(names):
        assert y != next_y or next_x - x > (width(left) + width(right)) / 2, (left, right)


def test_stages_of_one_rank_are_told_apart():
    """By their shades where there is no room for their numbers, as on a page."""
    schedule = lower(build("zbv", ranks=4, micro_batches=8))
    steps = {"zbv": Step.counted(simulate(schedule, Durations.of_stages(8)))}
    actions = sorted(str(action) for row in schedule.compute.ranks for action in row)
    assert sorted(name for _, _, name in names_in(wide_tracks(steps))) == actions
    page = tracks(steps)
    assert {name for _, _, name in names_in(page)} <= set("01234567")
    assert {"0.65", "0.3"} <= set(re.findall(r"opacity: ([\d.]+)", page))
    assert "fainter: the rank's later stages" in html.unescape(page)
    assert "fainter" not in tracks(steps_of(record(), [record()])), "one stage per rank"


def test_names_have_no_room_in_a_step_of_many_micro_batches_on_a_page():
    timeline = simulate(lower(build("1f1b", ranks=4, micro_batches=64)), Durations.of_stages(4))
    steps = {"1f1b": Step.counted(timeline)}
    assert names_in(tracks(steps)) == []
    assert "F63" in {name for _, _, name in names_in(wide_tracks(steps))}


def test_a_measured_step_is_said_to_be_the_last_one_next_to_the_median():
    """Tables show the median: two times of "the" measured step would contradict each other."""
    metrics = {"step_ms": Sample.of([40.0, 61.8, 90.0], "ms")}
    measured, modelled = dataclasses.replace(record(), metrics=metrics), record("modelled")
    last = f"measured, last step: {TIMELINE.step_ms:.4g} ms (median 61.8)"
    (plot,) = step_blocks([measured], [modelled, measured])
    assert f">{last}<" in plot.svg and f"; {last}, peak of each" in plot.svg
    assert f">predicted: {TIMELINE.step_ms:.4g} ms<" in plot.svg
    assert plot.caption.endswith("The measured actions are those of the last step.")


@pytest.mark.parametrize(("accumulation", "median"), [(1, " (median 50)"), (2, "")])
def test_a_layouts_timeline_is_said_to_be_without_the_optimizer(accumulation, median):
    """With accumulation it is one pass of several, whose median is not measured."""
    phases = {"forward_and_backward_ms": Sample.exact(50.0, "ms")}
    spec = {"layout": "pp2 m4", "accumulation": accumulation}
    steps = [
        dataclasses.replace(record(provenance), kind="layout", spec=spec, metrics=each)
        for provenance in ("modelled", "measured")
        for each in [{"step_ms": Sample.exact(60.0, "ms"), **phases}]
    ]
    svg = tracks(steps_of(steps[1], steps))
    assert f">predicted, forward and backward: {TIMELINE.step_ms:.4g} ms<" in svg
    assert f">measured, last forward and backward: {TIMELINE.step_ms:.4g} ms{median}<" in svg


def test_a_page_draws_its_first_steps_and_counts_the_others():
    records = [record(number=n) for n in range(MAX_PLOTS + 2)]
    torchs = Record(kind="pipeline", spec={"schedule": "torch-1f1b"})
    *plots, rest = step_blocks([torchs, *records], [torchs, *records])
    assert len(plots) == MAX_PLOTS and all(isinstance(plot, Plot) for plot in plots)
    assert rest == Text("2 more steps are not drawn.")
    assert re.search(r"number=0", plots[0].caption)
