"""Fits of time against bytes: they find the pieces that made the points, and are honest about sizes
not seen.
"""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgauge.cost.rates.link_fit import LinkPoint, fit, link, split
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.links import Link

SIZES = [2**i for i in range(10, 31)]


def made(size, pieces):
    alpha, rate = next((a, r) for limit, a, r in pieces if size <= limit)
    return alpha + size / rate * 1e3


@given(alpha=st.floats(1e-3, 10), rate=st.floats(1e6, 1e12))
def test_points_on_a_line_give_one_piece(alpha, rate):
    (piece,) = fit([LinkPoint(size, made(size, [(math.inf, alpha, rate)])) for size in SIZES])
    assert piece.to_bytes is None
    for size in SIZES:
        assert piece.time_ms(size) == pytest.approx(made(size, [(math.inf, alpha, rate)]), rel=1e-3)


def test_the_breakpoint_between_two_algorithms_is_found():
    pieces = [(2**18, 0.03, 40e9), (math.inf, 0.2, 400e9)]
    found = fit([LinkPoint(size, made(size, pieces)) for size in SIZES])
    assert len(found) == 2
    assert 2**18 < found[0].to_bytes < 2**19
    assert [round(p.bytes_per_s / 1e9) for p in found] == [40, 400]


def test_noise_does_not_add_pieces():
    noisy = [
        LinkPoint(size, (0.1 + size / 1e10 * 1e3) * (1 + 0.008 * (-1) ** i))
        for i, size in enumerate(SIZES)
    ]
    assert len(fit(noisy)) == 1


def test_a_noisy_size_counts_less():
    points = [LinkPoint(size, 0.1 + size / 1e10 * 1e3) for size in SIZES]
    outlier = points[12]._replace(ms=points[12].ms * 1.5, noise=0.5)
    (piece,) = fit([*points[:12], outlier, *points[13:]])
    assert piece.time_ms(outlier.bytes) == pytest.approx(points[12].ms, rel=0.01)
    assert len(fit([*points[:12], outlier._replace(noise=0.01), *points[13:]])) > 1


def test_few_sizes_are_all_fitted():
    points = [LinkPoint(size, 0.1 + size / 1e10 * 1e3) for size in SIZES[:3]]
    assert split(points) == (points, [])


def test_sizes_that_were_held_out_are_not_fitted():
    points = [LinkPoint(size, 0.1 + size / 1e10 * 1e3) for size in SIZES]
    seen, unseen = split(points)
    assert sorted(seen + unseen) == points
    assert points[0] in seen
    assert points[-1] in seen
    wrong_there = [
        point._replace(ms=point.ms * 2) if point in unseen else point for point in points
    ]
    found = link(wrong_there, settings={"op": "all_reduce"}, measured={})
    assert set(found.held_out) == {point.bytes for point in unseen}
    assert found.held_out_error() == pytest.approx(0.5, rel=1e-3)
    assert max(abs(error) for error in found.fitted.values()) < 1e-6
    assert found.held_out_error(least_bytes=2**40) is None


def test_a_predicted_time_lies_between_those_of_the_measured_sizes():
    """Also of sizes that were held out of the fit, which two lines do not go through."""
    times = {2**10: 0.02, 2**16: 0.03, 2**20: 0.021, 2**24: 0.05, 2**26: 0.16, 2**28: 0.56}
    points = [LinkPoint(size, ms) for size, ms in times.items()]
    found = link(points, settings={}, measured={})
    assert found.held_out, "no size is held out"
    for size, ms in times.items():
        assert found.time_ms(size) == pytest.approx(0.03 if size == 2**20 else ms), "never falls"
    assert found.time_ms((2**24 + 2**26) / 2) == pytest.approx((0.05 + 0.16) / 2)
    assert found.time_ms(1) == pytest.approx(0.02)
    more_ms = 2**28 / found.pieces[-1].bytes_per_s * 1e3
    assert found.time_ms(2**29) == pytest.approx(0.56 + more_ms)


def test_times_that_fall_with_size_give_a_flat_line():
    (piece,) = fit([LinkPoint(1, 2.0), LinkPoint(2, 1.9)])
    assert piece.time_ms(10**9) == pytest.approx(1.95, rel=0.01)


@given(st.lists(st.floats(1e-4, 1e4), min_size=2, max_size=12))
def test_predicted_times_are_never_negative(times):
    """That holds for any noise, and below the smallest measured size."""
    points = [LinkPoint(2 ** (12 + i), ms) for i, ms in enumerate(times)]
    fitted = link(points, settings={}, measured={})
    for size in (1, *(2**i for i in range(8, 26))):
        assert fitted.time_ms(size) >= -1e-9 * max(times)


def test_one_size_is_not_enough():
    with pytest.raises(ValueError, match="at least 2 sizes; there is 1"):
        fit([LinkPoint(8, 1.0)])


def test_links_in_a_hardware_file(tmp_path):
    path = tmp_path / "machines" / "box.json"
    found = link(
        [LinkPoint(size, 0.1 + size / 1e7) for size in SIZES],
        settings={"op": "reduce", "ranks": 2},
        measured={"date": "d"},
    )
    HardwareFile(name="box", other={"peaks": {"bf16": 1}}).with_links([found]).write(path)
    again = HardwareFile.read(path)
    assert again.links == [found]
    assert again.other == {"peaks": {"bf16": 1}}
    assert again.link(op="reduce").time_ms(10**6) == pytest.approx(0.2, rel=1e-3)
    assert again.link(op="gather") is None
    replaced = again.with_links(
        [link([LinkPoint(1, 1.0), LinkPoint(2, 2.0)], settings=found.settings, measured={})]
    )
    assert len(replaced.links) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not a hardware file"),
        ("{", "is not a hardware file: it is not JSON"),
        ('{"schema": 1, "links": [{"op": 1}]}', "not a link"),
    ],
)
def test_invalid_hardware_files_are_refused(tmp_path, text, words):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        HardwareFile.read(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="no hardware file at"):
        HardwareFile.read(tmp_path / "none.json")


def test_a_link_can_be_written_and_read():
    found = link(
        [LinkPoint(size, 1 + size / 1e6) for size in SIZES], settings={"op": "x"}, measured={}
    )
    assert Link.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found
