"""Units of memory, in bytes, and of losses; whole numbers that are rounded up."""

import math

MIB = 2**20
GIB = 2**30
NATS_PER_BIT = math.log(2)


def ceil_div(whole: int, part: int) -> int:
    """How many parts hold the whole."""
    return -(-whole // part)


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below the size."""
    return ceil_div(size, multiple) * multiple
