"""A step over time: every kind of work has a colour of its own."""

import importlib.resources
import re

from stepgauge.report.timeline import timeline
from stepgauge.spec.analysis import KINDS
from stepgauge.trace import kinds as rules


def colours(kinds):
    return re.findall(
        r"var\(--series-(\d+)\)", timeline({kind: [(0, 1)] for kind in kinds}, order=KINDS)
    )


def test_all_kinds_have_places_and_colours_of_their_own():
    assert {kind for kind, _ in (*rules._KERNELS, *rules._OPERATIONS)} <= set(KINDS)
    used = colours(KINDS)
    assert len(set(used)) == len(KINDS)
    style = (importlib.resources.files("stepgauge.report") / "page.css").read_text()
    for name in used:
        assert f"--series-{name}: light-dark(" in style


def test_a_kind_has_the_same_colour_in_every_drawing():
    assert colours(["copy"]) == colours(["matmul", "copy"])[1:]


def test_a_phase_is_named_as_far_as_there_is_room():
    drawn = timeline(
        {"kind": [(0, 1000)]}, [["forward", 0, 880], ["optimizer", 880, 980], ["x", 980, 1000]]
    )
    assert re.findall(r'y="12"[^>]*>([^<]*)<', drawn) == ["forward 0.88 ms", "optimizer", "x"]
    assert (
        re.findall(
            r'y="12"[^>]*>([^<]*)<', timeline({}, [["a", 0, 995], ["optimizer", 995, 1000]])
        )[1]
        == ""
    )
