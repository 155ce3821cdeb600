"""Terms of the collectives that a traced step runs. Each term stands at the position of its wait."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stepgauge.cost.operations.terms import TRANSFER, Term
from stepgauge.measure.fusion import TracedTerm

NAMESPACE = "_c10d_functional"
WAIT = "wait_tensor"
OPERATIONS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": TRANSFER,
}
COPIED = ("all_to_all_single",)  # between GPUs of one machine (context_parallel/head_exchange.py)


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a layout: its name, and the number of ranks in its group."""

    name: str
    ranks: int


class CollectiveOperators:
    """Records the collectives of a layout's groups.

    axes  the layout's axes, by the name of their process group
    """

    def __init__(self, axes: Mapping[str, Axis]):
        self._axes = axes
        # Collectives in flight, by storage of the output: the term, and the number of terms before.
        self._in_flight: dict[int, tuple[TracedTerm, int]] = {}

    def record(self, name: str, args: Any, traced: TracedTerm, terms: list[TracedTerm]) -> None:
        """Records the launch of a collective, or its wait, which appends the collective's term to
        `terms`. The products since the launch hide the collective. Raises ValueError for a collective
        without a price.

        traced  the bytes that the operator reads and writes
        """
        if name != WAIT:
            (storage,) = traced.writes
            launched = dataclasses.replace(traced, term=self._term(name, args, traced))
            self._in_flight[storage] = launched, len(terms)
            return
        (storage,) = traced.reads
        if storage not in self._in_flight:  # checkpointing kept the result, which is complete
            return
        launched, start = self._in_flight.pop(storage)
        products = tuple(each.term for each in terms[start:] if each.term.is_product)
        term = dataclasses.replace(launched.term, hidden_by=products)
        terms.append(dataclasses.replace(launched, term=term, writes=traced.writes))

    def _term(self, name: str, args: Any, traced: TracedTerm) -> Term:
        if name not in OPERATIONS:
            raise ValueError(
                f"the model runs {NAMESPACE}.{name}, which no calibration has a time for"
            )
        axis = self._axes.get(args[-1])
        if axis is None:
            raise ValueError(f"the model runs {name} in a group that is not an axis of its layout")
        operation = OPERATIONS[name]
        nbytes = float(max(*traced.reads.values(), *traced.writes.values()))
        if operation == TRANSFER:  # a rank does not send its own part; the traced rank is 0
            parts = args[2] or [1] * axis.ranks
            nbytes *= 1 - parts[0] / sum(parts)
        copied = "all_to_all" if name in COPIED else ""
        return Term(name, operation, (nbytes,), axis=axis.name, copied_as=copied)
