"""What ranks send each other, as terms: the collectives that torch's dispatcher begins, each where it
is waited for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stepgauge.cost.operations.terms import TRANSFER, Term
from stepgauge.measure.fusion import Moved

NAMESPACE = "_c10d_functional"
WAIT = "wait_tensor"
OPERATIONS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": TRANSFER,
}


@dataclasses.dataclass(frozen=True)
class Axis:
    """Of a layout: its name, and how many ranks are in the group."""

    name: str
    ranks: int


class SentOperators:
    """Collectives of groups that are axes of a layout, by the group's name."""

    def __init__(self, axes: Mapping[str, Axis]):
        self._axes = axes
        self._begun: dict[int, tuple[Moved, int]] = {}  # by storage, after so many operators

    def see(self, name: str, args: Any, moved: Moved, ran: list[Moved]) -> None:
        """An operator that reads and writes as `moved` says; adds to what `ran` a collective that
        has been waited for, with the products since it began, which hide it. Raises ValueError for
        one without a price.
        """
        if name != WAIT:
            (storage,) = moved.writes
            self._begun[storage] = (
                dataclasses.replace(moved, term=self._term(name, args, moved)),
                len(ran),
            )
            return
        (storage,) = moved.reads
        if storage not in self._begun:  # kept by checkpointing: it has arrived already
            return
        sent, place = self._begun.pop(storage)
        beside = tuple(each.term for each in ran[place:] if each.term.is_product)
        term = dataclasses.replace(sent.term, beside=beside)
        ran.append(dataclasses.replace(sent, term=term, writes=moved.writes))

    def _term(self, name: str, args: Any, moved: Moved) -> Term:
        if name not in OPERATIONS:
            raise ValueError(
                f"the model runs {NAMESPACE}.{name}, which no calibration has a time for"
            )
        axis = self._axes.get(args[-1])
        if axis is None:
            raise ValueError(f"the model runs {name} in a group that is no axis of its layout")
        operation = OPERATIONS[name]
        nbytes = float(max(*moved.reads.values(), *moved.writes.values()))
        if operation == TRANSFER:  # a rank keeps its own part
            nbytes *= (axis.ranks - 1) / axis.ranks
        return Term(name, operation, (nbytes,), axis=axis.name)
