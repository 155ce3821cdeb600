"""A step over time: every kind of work has a colour of its own."""

import importlib.resources
import re

from stepgauge.measure.trace import kinds as rules
from stepgauge.report.timeline import timeline
from stepgauge.spec.analysis import KINDS


def colours(kinds):
    return re.findall(r"var\(--series-(\d+)\)", timeline({kind: [(0, 1)] for kind in kinds}, order=KINDS))


def test_all_kinds_have_places_and_colours_of_their_own():
    assert {kind for kind, _ in (*rules._KERNELS, *rules._OPERATIONS)} <= set(KINDS)
    used = colours(KINDS)
    assert len(set(used)) == len(KINDS)
    style = (importlib.resources.files("stepgauge.report") / "page.css").read_text()
    for name in used:
        assert f"--series-{name}: light-dark(" in style


def test_a_kind_has_the_same_colour_in_every_drawing():
    assert colours(["copy"]) == colours(["matmul", "copy"])[1:]
