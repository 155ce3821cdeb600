"""The time of each term on a machine, under a layout."""

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
SINGLE_PROCESS = "host eager bf16"  # in the file of every calibrated GPU
# A collective that products hide still costs a copy, a flag and a wait before it and after it.
LEAST_EXPOSED_US = 10.0


def library_of(spec: Any) -> str:
    """Returns the library that runs the collectives of a step."""
    return GLOO if spec.group_backend == "gloo" else NCCL


class ForwardBackward(Protocol):
    """Anything with the terms of a forward and a backward."""

    def forward(self) -> Iterator[Term]: ...
    def backward(self) -> Iterator[Term]: ...


@dataclasses.dataclass(frozen=True)
class StageChain:
    """Pipeline stages one after another, as one network."""

    stages: Sequence[ForwardBackward]

    def forward(self) -> Iterator[Term]:
        return itertools.chain(*(stage.forward() for stage in self.stages))

    def backward(self) -> Iterator[Term]:
        return itertools.chain(*(stage.backward() for stage in self.stages))


class Prices:
    """Looks up the time of terms, each only once. Raises ValueError for an operation without a time.

    without  an axis whose communication takes no time
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
        self.contention = ContentionTable(machine.hardware, self.axes)
        self._cache: dict[tuple[Any, ...], Estimate] = {}

    def at_product_share_of(self, network: ForwardBackward) -> "Prices":
        """Returns prices at which products take the share of the time that they have in the network."""
        terms = [t for t in (*network.forward(), *network.backward()) if not t.axis]
        products_us = self.total_us(term for term in terms if term.is_product)
        machine = self.machine.at_product_share(products_us / (self.total_us(terms) or 1.0))
        return Prices(machine, self.layout, self.backend, without=self._without)

    def without(self, axis: str) -> "Prices":
        """Returns prices at which communication on the axis takes no time."""
        return Prices(self.machine, self.layout, self.backend, without=axis)

    @property
    def host_layout(self) -> Layout:
        """The layout that the host launches: without the tensor axis if its communication is left out and
        the file has the host's times of a single process.
        """
        if self._without != "tensor" or SINGLE_PROCESS not in self.machine.operations:
            return self.layout
        return dataclasses.replace(self.layout, tensor=1, overlap=False)

    def total_us(self, terms: Iterable[Term]) -> float:
        return sum(map(self.us, terms))

    def us(self, term: Term) -> float:
        """Returns the time of all runs of the term, at its pace."""
        if term.packs and term.packs == self._without:
            return 0.0
        return term.count * term.pace * self.estimate(term).us

    def estimate(self, term: Term) -> Estimate:
        """Returns the time of one run of the term; its count and its pace are left out."""
        key = (
            term.operation, term.sizes, term.axis, term.hidden_by, term.nbytes, term.operator,
            term.share, term.is_rough,
        )  # fmt: skip
        if key not in self._cache:
            self._cache[key] = self._estimate(term)
        return self._cache[key]

    def _estimate(self, term: Term) -> Estimate:
        if term.operator and (timed := self.machine.operator(term.operator)):
            return timed.scaled(term.share)
        if term.operation in (*COLLECTIVES, TRANSFER):
            estimate = self._message(term)
        elif term.operation == TRAFFIC:
            estimate = self.machine.traffic(*term.sizes)
        elif self.is_plain_pass(term):
            estimate = self.machine.traffic(term.nbytes)
        else:
            estimate = self.machine.time(term.operation, *term.sizes)
        return dataclasses.replace(estimate, source=UNTIMED) if term.is_rough else estimate

    def _message(self, term: Term) -> Estimate:
        """Returns the time of communication, or of the part that products do not hide."""
        (nbytes,) = term.sizes
        if term.operation == TRANSFER:
            whole = self.transfer(nbytes, term.axis)
        else:
            whole = self.collective(term.operation, nbytes, term.axis)
        if not term.hidden_by:
            return whole
        exposed_us = whole.us - self.total_us(term.hidden_by)
        return Estimate(max(exposed_us, LEAST_EXPOSED_US) if whole.us else 0.0, ASSUMED)

    def is_plain_pass(self, term: Term) -> bool:
        """True if the term is priced by its bytes, because the file has no times of the operation."""
        return term.nbytes > 0 and not self.machine.knows(term.operation, term.sizes)

    def collective(self, operation: str, nbytes: float, axis: str) -> Estimate:
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        return self.machine.network.collective(
            operation, nbytes, self.axes[axis], backend=self.backend
        )

    def transfer(self, nbytes: float, axis: str = "pipeline") -> Estimate:
        """Returns the time to send to the next rank of the axis; for a pipeline, to the next stage."""
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        return self.machine.network.transfer(nbytes, self.axes[axis], backend=self.backend)

    def broadcasts(self, nbytes: float, axis: str) -> Estimate:
        """Returns the time in which all ranks broadcast what they own.

        `nbytes` go through the busiest wire.
        """
        ranks = self.axes[axis].ranks
        if self.machine.network.is_measured("broadcast", self.axes[axis], backend=self.backend):
            return self.collective("broadcast", nbytes, axis)
        return self.collective("all_gather", nbytes * ranks / (ranks - 1), axis)
