"""Memory over a step, of several records on one page."""

import re

from stepgauge.report.memory import timeline
from stepgauge.spec.memory import CATEGORIES
from stepgauge.spec.record import Record, Sample

MIB = 2**20


def record(mib):
    series = {name.replace(" ", "_"): [0.0, 0.0, 0.0] for name in CATEGORIES}
    series |= {"event": [0.0, 1.0, 2.0], "phase_start": [0.0, 1.0, 2.0]}
    series["activations"] = [0.0, mib * MIB, 0.0]
    return Record(
        kind="memory",
        spec={"batch": mib},
        metrics={"peak_bytes": Sample.exact(mib * MIB, "bytes")},
        series=series,
    )


def numbers(plot):
    """Returns the labels of the vertical axis."""
    axis = plot.svg.partition('id="matplotlib.axis_2"')[2]
    return re.findall(r">\s*([\d.]+)\s*</text>", axis)


def test_timelines_share_a_scale_unless_one_would_be_too_low():
    low, high, tiny = record(300), record(700), record(20)
    alone = timeline(low)
    shared, other = (timeline(each, beside=[low, high, tiny]) for each in (low, high))
    assert numbers(shared) == numbers(other) != numbers(alone)
    assert numbers(timeline(tiny, beside=[low, high, tiny])) == numbers(timeline(tiny))
