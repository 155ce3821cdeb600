"""Which operators of a backward compute gradients of weights alone: no other stage of a pipeline
waits for them.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.measure.fusion import Moved


def marked(backward: Sequence[Moved], input_gradient: int) -> list[Moved]:
    """The operators, those marked that the storage of the input's gradient does not come from."""
    needed, found = {input_gradient}, []
    for each in reversed(backward):
        if needed.isdisjoint(each.writes):
            found.append(
                dataclasses.replace(each, term=dataclasses.replace(each.term, weights=True))
            )
        else:
            needed |= each.reads.keys()
            found.append(each)
    return found[::-1]
