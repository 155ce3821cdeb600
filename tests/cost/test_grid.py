"""Times between, beside and below the timed shapes: the lookup has no jumps where steps have none."""

import itertools
from pathlib import Path

import pytest

from stepgauge.cost.rates.grid import WORK, Grid
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile

ROOT = Path(__file__).parents[2]
H200 = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "h200-sxm.json"))


def test_in_a_hole_of_the_grid_the_rate_changes_gradually():
    """The largest shapes take too long to be timed. Two widths differ in their rates by a factor of 4."""
    rows = [(8, 64, 64, 10.0), (8, 64, 128, 5.0), (8, 128, 64, 40.0), (8, 128, 128, 20.0),
            (32, 64, 64, 40.0), (32, 64, 128, 20.0)]  # fmt: skip
    table = OperationTable(("h", "t", "d"), tuple(rows))
    grid = Grid(table, WORK["attention"], may_be_launches=False)
    widths = range(64, 129, 4)
    rates = [32 * width / grid.time((32, 128, width)).us for width in widths]
    assert rates[-1] == pytest.approx(4 * rates[0])
    assert all(1 < later / earlier < 1.2 for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize(
    ("operation", "sizes", "larger"),
    [
        ("attention sdpa forward fp32", (192, 8192, 96), (192, 8192, 104)),
        ("matmul tn bf16", (6912, 17344, 362), (6912, 17344, 366)),
        ("matmul nn tf32", (485, 10926, 510), (485, 10926, 516)),
        ("attention sdpa backward fp32", (8, 357, 32), (9, 357, 32)),
    ],
)
def test_the_rate_has_no_jump_at_the_edge_of_a_hole(operation, sizes, larger):
    """The nearest shape alone: 0.74 and 0.78. The timed corners alone: 0.64 and 0.52."""
    ratio = H200.time(operation, *larger).us / H200.time(operation, *sizes).us
    assert 0.95 < ratio < 1.13


@pytest.mark.parametrize(
    "operation", ["attention sdpa forward bf16", "attention triton forward bf16"]
)
@pytest.mark.parametrize("length", [128, 512, 1024])
def test_heads_wider_than_the_timed_ones_do_not_take_less_time(operation, length):
    """At short lengths the timed ones are launch-bound, so that their rates say nothing of wider ones."""
    times = [H200.time(operation, 12, length, width).us for width in (64, 128, 129, 160, 256)]
    assert times == sorted(times)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["sdpa", "triton"])
def test_few_heads_take_as_long_as_one_walk_along_the_sequence(direction, kind):
    """8 heads of 2048 tokens are 128 tiles for 132 multiprocessors, so fewer heads save nothing."""

    def us(heads, length):
        return H200.time(f"attention {kind} {direction} bf16", heads, length, 64).us

    assert us(2, 2048) == pytest.approx(us(8, 2048))
    assert us(2, 8192) == pytest.approx(4 * us(2, 2048), rel=0.15)
    assert us(2, 8192) < 0.6 * us(8, 8192)
    for length in (512, 1024, 4096, 8192):
        times = [us(heads, length) for heads in range(1, 12)]
        assert times == sorted(times)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_narrow_heads_fill_up_a_tile(direction, dtype):
    """80 wide heads take about as long as 128 wide ones: so do 72 wide ones, and 48 as long as 64."""

    def us(width):
        return H200.time(f"attention sdpa {direction} {dtype}", 64, 2048, width).us

    assert us(80) == pytest.approx(us(128), rel=0.1)
    assert us(72) == us(80) and us(48) == us(64)
    assert us(80) <= us(96) <= us(128) or us(96) == pytest.approx(us(128), rel=0.1)
    assert us(256) == pytest.approx(2 * us(128), rel=0.01)  # of this tile nothing was timed
