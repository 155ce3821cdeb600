"""Units of memory and loss, and integer division that rounds up."""

import math

MIB = 2**20
GIB = 2**30
NATS_PER_BIT = math.log(2)


def ceil_div(whole: int, part: int) -> int:
    """Returns whole / part, rounded up."""
    return -(-whole // part)


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least `size`."""
    return ceil_div(size, multiple) * multiple
