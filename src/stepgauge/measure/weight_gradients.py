"""Finds the operators of a backward that compute only weight gradients. No other pipeline stage waits
for them.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.measure.fusion import TracedTerm


def mark_weight_gradients(backward: Sequence[TracedTerm], input_gradient: int) -> list[TracedTerm]:
    """Returns the terms, with `for_weights` set if the input's gradient does not depend on them.

    input_gradient  storage of the input's gradient
    """
    needed, marked = {input_gradient}, []
    for each in reversed(backward):
        if needed.isdisjoint(each.writes):
            marked.append(
                dataclasses.replace(each, term=dataclasses.replace(each.term, for_weights=True))
            )
        else:
            needed |= each.reads.keys()
            marked.append(each)
    return marked[::-1]
