"""The time of attention on a GPU, from a grid of heads, lengths and head widths.

A kernel gives each multiprocessor a tile of queries, or of keys, of one head, which walks along the sequence.
A tile is as wide as a power of two, and narrower heads fill it up: on an H200, heads 80 wide take 91 to 100 %
of the time of heads 128 wide.
"""

import dataclasses

from stepgauge.cost.rates.estimate import CALIBRATED, INTERPOLATED, Estimate
from stepgauge.cost.rates.grid import Grid


def attention_time(grid: Grid, heads: float, length: float, width: float) -> Estimate:
    """Returns the time from the grid. A head that is narrower than every timed one of its tile counts as
    wide as the narrowest of them.
    """
    timed_width = _timed_width(grid, width)
    estimate = grid.time((heads, length, timed_width))
    if timed_width != width and estimate.source == CALIBRATED:
        estimate = dataclasses.replace(estimate, source=INTERPOLATED)
    return _with_longest_walk(estimate, grid, (heads, length, timed_width))


def _timed_width(grid: Grid, width: float) -> float:
    """Returns the narrowest timed width of the tile if `width` is narrower still, otherwise `width`."""
    *_, widths = grid.axes
    tile = 2 ** (int(width) - 1).bit_length()
    of_tile = [each for each in widths if tile / 2 < each <= tile]
    return max(width, of_tile[0]) if of_tile else width


def _with_longest_walk(estimate: Estimate, grid: Grid, sizes: tuple[float, ...]) -> Estimate:
    """Raises the time of fewer heads than the grid has to that of the longest walk.

    With few heads there are fewer tiles than multiprocessors, and the longest walk takes as long however few
    they are: on an H200, 8 heads of 2048 x 64 are 128 tiles for 132 multiprocessors. A walk takes a time per
    token. The fewest timed heads bound it at each length; the least bound is at the length whose tiles just
    fill the device. If that is the shortest length, the walk is not known.
    """
    heads, length, width = sizes
    (fewest, *_), lengths, _ = grid.axes
    if heads >= fewest:
        return estimate
    us_per_token = {each: grid.time((fewest, each, width)).us / each for each in lengths}
    filling = min(us_per_token, key=us_per_token.__getitem__)
    if filling == lengths[0]:
        return estimate
    fewest_us = grid.time((fewest, length, width)).us
    walk_us = min(fewest_us, length * us_per_token[filling])
    return dataclasses.replace(estimate, us=max(estimate.us, heads / fewest * fewest_us, walk_us))
