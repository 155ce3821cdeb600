"""The time of each term on a machine, under a layout."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from stepgauge.cost.operations.terms import COLLECTIVES, TRAFFIC, TRANSFER, Term
from stepgauge.cost.rates.contention import COPIES_SLOWDOWN, ContentionTable, Slowdown
from stepgauge.cost.rates.estimate import ASSUMED, UNTIMED, Estimate
from stepgauge.cost.rates.launch_gaps import gap_us, kernels_of
from stepgauge.cost.rates.machine import CALIBRATED_PRODUCT_SHARE, CalibratedMachine
from stepgauge.cost.rates.network import Axis, axes_of
from stepgauge.spec.calibration import LAUNCH_GAP
from stepgauge.spec.comm import COPIED
from stepgauge.spec.layout import Layout

NCCL, GLOO = "nccl", "gloo"
PIPELINE = "pipeline"  # an axis whose transfers are copies within a machine
SINGLE_PROCESS = "host eager bf16"  # in the file of every calibrated GPU
# On GPUs, what a message that computation waits for costs beside its own time. In traces of tp2 and tp4 on H200s: 6
# to 7 us between it and the kernels before and after it, and 3 to 16 us (medians 1 to 9) until the slower rank
# has arrived (docs/log/2026-11-30-tensor-waits.md).
MESSAGE_OVERHEAD_US = 12.0


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
    copies   copy engines do within a machine what they can; False if only messages of the backend do
    """

    def __init__(
        self,
        machine: CalibratedMachine,
        layout: Layout | None = None,
        backend: str = NCCL,
        *,
        without: str = "",
        copies: bool = True,
    ):
        self.machine, self.layout, self.backend = machine, layout or Layout(), backend
        self._without, self._copies = without, copies
        self._gap_us = gap_us(machine.table(LAUNCH_GAP))
        self._is_gpu = machine.hardware.device_kind != "cpu"
        self.axes: Mapping[str, Axis] = axes_of(self.layout, machine.network.gpus_per_node)
        self.contention = ContentionTable(machine.hardware, self.axes)
        self._cache: dict[tuple[Any, ...], Estimate] = {}

    def at_product_share_of(
        self,
        network: ForwardBackward,
        *,
        passes: int = 1,
        updates: Iterable[Term] = (),
        busy: float = 1.0,
    ) -> "Prices":
        """Returns prices at which products take the share of the time that they have in a step.

        A GPU draws less power in passes and while it waits, and its limit is on an average of tens of
        milliseconds, so that products run faster beside them. A GPU waits for messages of a tensor or context
        axis, and for other stages. On a device whose times are another's, it is not known what waiting brings.

        passes   forwards and backwards of the network
        updates  of the optimizer
        busy     fraction of the passes in which the busiest rank computes
        """
        waits_count = not self.machine.is_transferred
        terms = [t for t in (*network.forward(), *network.backward()) if waits_count or not t.axis]
        usual = self._on(self.machine.at_product_share(CALIBRATED_PRODUCT_SHARE), self._without)
        products_us = passes * usual.total_us(term for term in terms if term.is_product)
        passes_us = passes * usual.total_us(terms)
        if waits_count:
            passes_us /= busy
        share = products_us / (passes_us + usual.total_us(updates) or 1.0)
        return self._on(self.machine.at_product_share(share), self._without)

    def without(self, axis: str) -> "Prices":
        """Returns prices at which communication on the axis takes no time."""
        return self._on(self.machine, axis)

    def _on(self, machine: CalibratedMachine, without: str) -> "Prices":
        return Prices(machine, self.layout, self.backend, without=without, copies=self._copies)

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
        """Returns the time of all runs of the term, at its pace, with the gaps before its kernels."""
        return term.count * term.pace * self.estimate(term).us + self.gaps_us(term)

    def gaps_us(self, term: Term) -> float:
        """Returns the gaps before the kernels of all runs of the term (launch_gaps.py), or the overhead of its
        messages.

        Operators of traced networks that are timed as whole calls have none: how many kernels they launch is
        not known.
        """
        if term.axis:
            is_sent = self._is_gpu and term.axis != self._without
            return term.count * term.pace * term.waits * MESSAGE_OVERHEAD_US if is_sent else 0.0
        if term.operator:
            return 0.0
        return term.count * term.pace * self._gap_us * kernels_of(term.operation)

    def estimate(self, term: Term) -> Estimate:
        """Returns the time of one run of the term, without its count, its pace and gaps."""
        key = (
            term.operation, term.sizes, term.axis, term.hidden_by, term.copied_as, term.nbytes,
            term.operator, term.share, term.is_rough,
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
        copied = self._copied(term)
        if copied:
            whole = copied
        elif term.operation == TRANSFER:
            whole = self.transfer(nbytes, term.axis)
        else:
            whole = self.collective(term.operation, nbytes, term.axis)
        if not (term.hidden_by and whole.us):
            return whole
        beside = [
            (self.us(product), self._slowdown(product, term, is_copied=copied is not None))
            for product in term.hidden_by
        ]
        return Estimate(exposed_us(whole.us, beside), ASSUMED)

    def _copied(self, term: Term) -> Estimate | None:
        """Returns the time of the collective that copy engines run for the term; None without one, and
        in the cases of `by_copies`.
        """
        (nbytes,) = term.sizes
        if not term.copied_as:
            return None
        ranks = self.axes[term.axis].ranks
        if term.operation == TRANSFER:  # the bytes that a rank sends to the others
            nbytes *= ranks / max(1, ranks - 1)
        return self.by_copies(term.copied_as, nbytes, term.axis)

    def _slowdown(self, product: Term, message: Term, *, is_copied: bool) -> Slowdown:
        """Returns how much a product and a message beside it slow each other down."""
        if is_copied:
            collective = f"{COPIED}{message.copied_as}"
        elif message.operation == TRANSFER and self._is_gpu:
            collective = TRANSFER
        else:
            return COPIES_SLOWDOWN
        us = self.estimate(product).us
        return self.contention.of(product.operation, collective, message.axis, us)

    def is_plain_pass(self, term: Term) -> bool:
        """True if the term is priced by its bytes, because the file has no times of the operation."""
        return term.nbytes > 0 and not self.machine.knows(term.operation, term.sizes)

    def collective(self, operation: str, nbytes: float, axis: str) -> Estimate:
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        return self.machine.network.collective(
            operation, nbytes, self.axes[axis], backend=self.backend
        )

    def by_copies(self, operation: str, nbytes: float, axis: str) -> Estimate | None:
        """Returns the time of a collective by copy engines. None if the ranks are on several machines or
        CPUs, only messages are sent, or the hardware file has no such link: NCCL's time is used instead.
        """
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        if self.backend != NCCL or not self._copies:
            return None
        return self.machine.network.by_copies(operation, nbytes, self.axes[axis])

    def transfer(self, nbytes: float, axis: str = PIPELINE) -> Estimate:
        """Returns the time to send to the next rank of the axis; for a pipeline, to the next stage."""
        if axis == self._without:
            return Estimate(0.0, ASSUMED)
        if axis == PIPELINE and (copied := self.by_copies(TRANSFER, nbytes, axis)):
            return copied
        return self.machine.network.transfer(nbytes, self.axes[axis], backend=self.backend)

    def broadcasts(self, nbytes: float, axis: str) -> Estimate:
        """Returns the time in which all ranks broadcast what they own.

        `nbytes` go through the busiest wire.
        """
        ranks = self.axes[axis].ranks
        if self.machine.network.is_measured("broadcast", self.axes[axis], backend=self.backend):
            return self.collective("broadcast", nbytes, axis)
        return self.collective("all_gather", nbytes * ranks / (ranks - 1), axis)


def exposed_us(message_us: float, products: Iterable[tuple[float, Slowdown]]) -> float:
    """Returns by how much communication lengthens products that run at the same time, plus what is left
    of it after the last one.

    With a slowdown of k for a product and s for the message: while both run, the message progresses at 1/s
    of its speed, and the product at 1/k. So a product of P us is lengthened by (k-1) P if the message
    does not end before, and else by (k-1)/k of the s W us that a message of W us then takes. What is left
    after all products runs at full speed.

    message_us  time of the message alone
    products    the time of each alone, in order, and the slowdown of both
    """
    left_us, lengthened_us = message_us, 0.0
    for us, slowdown in products:
        both_us = min(slowdown.kernel * us, slowdown.collective * left_us)
        lengthened_us += both_us * (1 - 1 / slowdown.kernel)
        left_us -= both_us / slowdown.collective
    return lengthened_us + left_us
