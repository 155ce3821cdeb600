"""What a term takes on a machine, under a layout."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from stepgauge.cost.operations.terms import COLLECTIVES, TRAFFIC, TRANSFER, Term
from stepgauge.cost.rates.contention import ContentionTable
from stepgauge.cost.rates.estimate import ASSUMED, UNTIMED, Estimate
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.network import Axis, axes_of
from stepgauge.spec.layout import Layout

NCCL, GLOO = "nccl", "gloo"
# Of a collective beside a product: a copy, a flag and a wait before it and after it.
LEAST_EXPOSED_US = 10.0


def library_of(spec: Any) -> str:
    """What carries the collectives of a step."""
    return GLOO if spec.group_backend == "gloo" else NCCL


class Computing(Protocol):
    """What a rank computes."""

    def forward(self) -> Iterator[Term]: ...
    def backward(self) -> Iterator[Term]: ...


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Stages, one after another, as one network."""

    stages: Sequence[Computing]

    def forward(self) -> Iterator[Term]:
        return itertools.chain(*(stage.forward() for stage in self.stages))

    def backward(self) -> Iterator[Term]:
        return itertools.chain(*(stage.backward() for stage in self.stages))


class Prices:
    """Looks each operation up once. Raises ValueError where the machine does not know one.

    without  an axis whose collectives take nothing
    """

    def __init__(
        self,
        machine: CalibratedMachine,
        layout: Layout | None = None,
        backend: str = NCCL,
        *,
        without: str = "",
    ):
        self.machine, self.layout, self.backend = machine, layout or Layout(), backend
        self._without = without
        self.axes: Mapping[str, Axis] = axes_of(self.layout, machine.network.gpus_per_node)
        self.contention = ContentionTable(
            machine.hardware, {name: axis.ranks for name, axis in self.axes.items()}
        )
        self._known: dict[tuple[Any, ...], Estimate] = {}

    def paced_by(self, operations: "Computing") -> "Prices":
        """The same where products have that share of the time which they have in the network."""
        terms = [t for t in (*operations.forward(), *operations.backward()) if not t.axis]
        products = [term for term in terms if term.is_product]
        share = self.total_us(products) / (self.total_us(terms) or 1.0)
        machine = self.machine.at(share)
        return Prices(machine, self.layout, self.backend, without=self._without)

    def of(self, term: Term) -> Estimate:
        """Of one run of the term's operation, at no pace but its own."""
        key = (
            term.operation, term.sizes, term.axis, term.beside, term.nbytes, term.operator, term.share,
            term.is_rough,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._found(term)
        return self._known[key]

    def _found(self, term: Term) -> Estimate:
        if term.operator and (exact := self.machine.operator(term.operator)):
            return Estimate(term.share * exact.us, exact.source)
        usual = self._usual(term)
        return dataclasses.replace(usual, source=UNTIMED) if term.is_rough else usual

    def _usual(self, term: Term) -> Estimate:
        if term.operation == TRAFFIC:
            return self.machine.traffic(*term.sizes)
        if self.is_plain_pass(term):
            return self.machine.traffic(term.nbytes)
        if term.operation in (*COLLECTIVES, TRANSFER):
            (nbytes,) = term.sizes
            found = (
                self.transfer(nbytes, term.axis)
                if term.operation == TRANSFER
                else self.collective(term.operation, nbytes, term.axis)
            )
            return self._exposed(found, term.beside) if term.beside else found
        return self.machine.time(term.operation, *term.sizes)

    def _exposed(self, collective: Estimate, beside: Iterable[Term]) -> Estimate:
        """What of a collective that takes any time is left when the products beside it are done."""
        rest = collective.us - self.total_us(beside)
        return Estimate(max(rest, LEAST_EXPOSED_US) if collective.us else 0.0, ASSUMED)

    def is_plain_pass(self, term: Term) -> bool:
        """Whether it is priced by its bytes: the file has no times of the operation."""
        return term.nbytes > 0 and not self.machine.knows(term.operation, term.sizes)

    def collective(self, operation: str, nbytes: float, axis: str) -> Estimate:
        found = self.axes[axis]
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        return self.machine.network.collective(operation, nbytes, found, backend=self.backend)

    def broadcasts(self, nbytes: float, axis: str) -> Estimate:
        """Of all ranks together, each of what it owns; so many bytes go through the busiest wire."""
        found = self.axes[axis]
        if self.machine.network.is_measured("broadcast", found, backend=self.backend):
            return self.collective("broadcast", nbytes, axis)
        return self.collective("all_gather", nbytes * found.ranks / (found.ranks - 1), axis)

    def without(self, axis: str) -> "Prices":
        """The same with nothing sent on an axis."""
        return Prices(self.machine, self.layout, self.backend, without=axis)

    def transfer(self, nbytes: float, axis: str = "pipeline") -> Estimate:
        """Between neighbours on the axis: of a pipeline its stages."""
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        return self.machine.network.transfer(nbytes, self.axes[axis], backend=self.backend)

    def us(self, term: Term) -> float:
        """Of all its runs, at its pace."""
        return term.count * term.pace * self.of(term).us

    def total_us(self, terms: Iterable[Term]) -> float:
        return sum(map(self.us, terms))
