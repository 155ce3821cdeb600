"""Attention of fewer heads than were timed, on a GPU.

A kernel gives each multiprocessor a tile of queries, or of keys, of one head, which walks along the sequence.
With few heads there are fewer tiles than multiprocessors: the time of the longest walk is then left, however
few heads there are. On an H200, 8 heads of 2048 x 64 are 128 tiles for 132 multiprocessors.
"""

import dataclasses

from stepgauge.cost.rates.estimate import Estimate
from stepgauge.cost.rates.grid import Grid


def with_longest_walk(estimate: Estimate, grid: Grid, sizes: tuple[float, ...]) -> Estimate:
    """Raises the time of fewer heads than the grid has to that of the longest walk.

    The walk takes a time per token. The fewest timed heads bound it at each length; the least bound is at
    the length whose tiles just fill the device. If that is the shortest length, the walk is not known.

    sizes  heads, length and head width
    """
    heads, length, width = sizes
    (fewest, *_), lengths, _ = grid.axes
    if heads >= fewest or estimate.us <= 0:
        return estimate
    us_per_token = {each: grid.time((fewest, each, width)).us / each for each in lengths}
    filling = min(us_per_token, key=us_per_token.__getitem__)
    if filling == lengths[0]:
        return estimate
    fewest_us = grid.time((fewest, length, width)).us
    walk_us = min(fewest_us, length * us_per_token[filling])
    return dataclasses.replace(estimate, us=max(estimate.us, heads / fewest * fewest_us, walk_us))
