"""Plots use only the colours of the page, and equal input gives equal bytes."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from stepgauge.report import figure


def draw():
    return figure.stacked_bars(
        ["a", "b"],
        {"x": [1.0, 2.0], "y": [3.0, None]},
        totals=[4.0, 2.0],
        unit="ms",
        points={"P": [3.5, None]},
    )


def test_equal_input_gives_equal_bytes():
    assert draw() == draw()


def test_colours_are_variables_of_the_page():
    svg = draw()
    for name in ("ink", "grid", "series-1", "series-2"):
        assert f"var(--{name})" in svg
    assert not re.findall(r"#0[12]0[123]0\d", svg)
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)[0-9a-f]{6}", svg)


def test_a_plot_is_well_formed_has_no_fixed_size_and_keeps_text():
    svg = draw()
    root = ElementTree.fromstring(svg)
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & set(root.attrib)
    assert {"a", "b", "ms"} <= {
        element.text for element in root.iter() if element.tag.endswith("text")
    }


def test_labels_are_not_cut():
    svg = figure.grouped_bars(["a"], {"x": [0.0123], "y": [figure.Doubtful(1.25)]}, unit="ms")
    assert ">0.0123<" in svg and ">1.25†<" in svg


def test_short():
    assert [figure.short(v) for v in (0.01234, 1.2345, 99.95, 1234.5)] == [
        "0.0123",
        "1.23",
        "100",
        "1,234",
    ]


def test_more_series_than_colours_are_refused():
    with pytest.raises(ValueError, match="7 series in one plot; it can show 6"):
        figure.lines({str(i): ([1], [1]) for i in range(7)}, x="x", y="y")


def test_logarithmic_axes_say_so_and_have_ticks_at_1_2_and_5_of_each_power_of_ten():
    ends = [30.5, 80.5]
    svg = figure.lines(
        {"same": (ends, ends)}, x="measured", y="predicted",
        scales={"x": figure.short, "y": figure.short},
    )  # fmt: skip
    assert ">measured (log scale)<" in svg and ">predicted (log scale)<" in svg
    assert svg.count(">50<") == 2 and ">32<" not in svg
    sizes = figure.lines({"a": ([16, 32], [1, 2])}, x="x", y="y", scales={"x": figure.short})
    assert ">16<" in sizes and ">32<" in sizes and "y (log" not in sizes
