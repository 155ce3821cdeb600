"""Fits of time against bytes: they find the pieces that made the points, and are honest about sizes not seen."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.links import Link, fit, link, split

SIZES = [2**i for i in range(10, 31)]


def made(size, pieces):
    alpha, rate = next((a, r) for limit, a, r in pieces if size <= limit)
    return alpha + size / rate * 1e3


@given(alpha=st.floats(1e-3, 10), rate=st.floats(1e6, 1e12))
def test_one_line_is_found_as_one_line(alpha, rate):
    (piece,) = fit([(size, made(size, [(math.inf, alpha, rate)])) for size in SIZES])
    assert piece.to_bytes is None
    for size in SIZES:
        assert piece.time_ms(size) == pytest.approx(made(size, [(math.inf, alpha, rate)]), rel=1e-3)


def test_the_size_where_the_algorithm_changes_is_found():
    pieces = [(2**18, 0.03, 40e9), (math.inf, 0.2, 400e9)]
    found = fit([(size, made(size, pieces)) for size in SIZES])
    assert len(found) == 2
    assert 2**18 < found[0].to_bytes < 2**19
    assert [round(p.bytes_per_s / 1e9) for p in found] == [40, 400]


def test_noise_makes_no_pieces():
    noisy = [(size, (0.1 + size / 1e10 * 1e3) * (1 + 0.008 * (-1) ** i)) for i, size in enumerate(SIZES)]
    assert len(fit(noisy)) == 1


def test_sizes_that_were_held_out_are_not_fitted():
    points = [(size, 0.1 + size / 1e10 * 1e3) for size in SIZES]
    seen, unseen = split(points)
    assert sorted(seen + unseen) == points
    assert points[0] in seen
    assert points[-1] in seen
    wrong_there = [(size, ms * 2 if (size, ms) in unseen else ms) for size, ms in points]
    found = link(wrong_there, asked={"op": "all_reduce"}, measured={})
    assert set(found.held_out) == {size for size, _ in unseen}
    assert found.held_out_error() == pytest.approx(0.5, rel=1e-3)
    assert max(abs(error) for error in found.fitted.values()) < 1e-6
    assert found.held_out_error(least_bytes=2**40) is None


def test_a_time_that_falls_with_size_is_flat():
    (piece,) = fit([(1, 2.0), (2, 1.9)])
    assert piece.time_ms(10**9) == pytest.approx(1.95, rel=0.01)


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="at least 2 sizes; there is 1"):
        fit([(8, 1.0)])


def test_links_in_a_hardware_file(tmp_path):
    path = tmp_path / "machines" / "box.json"
    found = link(
        [(size, 0.1 + size / 1e7) for size in SIZES], asked={"op": "reduce", "ranks": 2}, measured={"date": "d"}
    )
    HardwareFile(name="box", other={"peaks": {"bf16": 1}}).with_links([found]).write(path)
    again = HardwareFile.read(path)
    assert again.links == [found]
    assert again.other == {"peaks": {"bf16": 1}}
    assert again.link(op="reduce").time_ms(10**6) == pytest.approx(0.2, rel=1e-3)
    assert again.link(op="gather") is None
    replaced = again.with_links([link([(1, 1.0), (2, 2.0)], asked=found.asked, measured={})])
    assert len(replaced.links) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("[]", "no hardware file"), ("{", "cannot read"), ('{"schema": 1, "links": [{"op": 1}]}', "not a link")],
)
def test_what_is_no_hardware_file(tmp_path, text, words):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        HardwareFile.read(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="no hardware file at"):
        HardwareFile.read(tmp_path / "none.json")


def test_a_link_survives_json():
    found = link([(size, 1 + size / 1e6) for size in SIZES], asked={"op": "x"}, measured={})
    assert Link.from_json(json.loads(json.dumps(found.to_json()))) == found
