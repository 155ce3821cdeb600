"""Plots as files: each brings its colours along, light and dark, and a background."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.report.pipeline_steps import Step, tracks
from stepgauge.report.standalone import palette, standalone
from stepgauge.spec.plan.pipeline import build, lower

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plot():
    timeline = simulate(lower(build("1f1b", ranks=2, micro_batches=2)), Durations.of_stages(2))
    return tracks({"1f1b": Step.counted(timeline)})


def test_every_variable_of_a_file_is_defined_in_it_for_light_and_dark(plot):
    drawn = standalone(plot)
    light, dark = re.search(r"<style>(.*?)@media (.*?)</style>", drawn).groups()
    used = set(re.findall(r"var\((--[\w-]+)", drawn))
    assert {"--ink", "--series-1", "--card"} <= used
    for defined in (light, dark):
        assert set(re.findall(r"(--[\w-]+): ", defined)) == used
    assert "--series-1: #2b63d6;" in light and "--series-1: #7ea6ff;" in dark
    assert "light-dark(" not in drawn, "some programs know variables but not this"


def test_a_file_has_a_background_and_the_size_of_its_drawing(plot):
    root = ElementTree.fromstring(standalone(plot))
    size = root.get("viewBox").split()[2:]
    assert [root.get("width"), root.get("height")] == [f"{side}pt" for side in size]
    background = root.find(f"{SVG}rect")
    assert (background.get("width"), background.get("fill")) == ("100%", "#ffffff")


def test_programs_without_variables_show_the_light_colours(plot):
    """They ignore a style with a variable; the attribute next to it has the value."""
    root = ElementTree.fromstring(standalone(plot))
    coloured = [each for each in root.iter() if "var(--" in each.get("style", "")]
    for element in coloured:
        for what, name in re.findall(r"(fill|stroke): var\(--([\w-]+)\)", element.get("style")):
            assert element.get(what) == palette()[name][0]
    assert len(coloured) > 20
