"""The step of a network that is known by its traced operators alone, predicted for one device and for
a data axis: each operator as a term, its gradients complete where autograd completed them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.data_axis import MODELLED, Sending, data_axis
from stepgauge.cost.host import Launching, launching
from stepgauge.cost.ledger import step_rows
from stepgauge.cost.machine import Machine
from stepgauge.cost.outcome import Outcome, exposed_ms, outcome, without_communication_ms
from stepgauge.cost.prices import GLOO, NCCL, Prices
from stepgauge.cost.program import DATA, LaunchGroup, RankStep
from stepgauge.cost.step import modelled
from stepgauge.cost.terms import Arithmetic, Term
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, Layout, sent_bytes
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec

GROUP = 8  # operators that the host launches before the device may begin the first of them
LAYOUTS = "of a user's model one device and data axes up to zero2 are predicted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A training step as torch's dispatcher saw it.

    update      the optimizer's operators as one term
    parameters  elements of each that is trained
    blocks      operators of each phase, of the optimizer its tensors, over those of a block of the
                network that the host's times were calibrated with
    peak_bytes  of torch's count on one device; 0 where it was not traced
    """

    forward: Sequence[Term]
    backward: Sequence[Term]
    update: Term
    parameters: Sequence[int]
    blocks: Mapping[str, float]
    peak_bytes: int = 0


class TracedOperations:
    """What StepOperations is of a preset."""

    def __init__(self, spec: StepSpec | DataParallelSpec, traced: Traced):
        self.spec, self.traced = spec, traced
        self.how = Arithmetic.of(spec.precision, is_compiled=False)
        self.blocks = range(0)  # unknown: all of the network is its ends
        self.block_matrices: list[int] = []
        self.block_parameters = 0
        self.end_matrices = list(traced.parameters)
        self.end_parameters = self.num_parameters = sum(traced.parameters)

    def forward(self) -> Iterator[Term]:
        return iter(_together(self.traced.forward))

    def backward(self) -> Iterator[Term]:
        return iter(_together(self.traced.backward))

    def forward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        return list(self.traced.forward), [], []

    def backward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        return list(self.traced.backward), [], []

    def optimizer(self, numel: float) -> Term:
        """Of so many of the parameters."""
        (size,) = self.traced.update.sizes
        part = size * numel / self.num_parameters
        return dataclasses.replace(self.traced.update, sizes=(part,))


def _together(terms: Sequence[Term]) -> list[Term]:
    """Equal operators as one term, with their count."""
    counts: dict[Term, int] = {}
    for term in filter(lambda term: term.count, terms):
        alike = dataclasses.replace(term, count=1, gradient=0)
        counts[alike] = counts.get(alike, 0) + term.count
    return [dataclasses.replace(term, count=count) for term, count in counts.items()]


class TracedStep(RankStep):
    """A rank's step in groups of a few operators."""

    def groups(self, phase: str) -> Iterator[LaunchGroup]:
        before, _, _ = (
            self.operations.forward_parts()
            if phase == "forward"
            else self.operations.backward_parts()
        )
        cuts = range(0, len(before), GROUP)
        host_us = self.host[phase].us(0) / max(1, len(cuts))
        for first in cuts:
            named = [
                dataclasses.replace(term, name=f"{place}.{term.name}")
                for place, term in enumerate(before[first : first + GROUP], first)
            ]
            yield LaunchGroup(phase, named, host_us)


def require_traceable(spec: StepSpec | DataParallelSpec) -> None:
    """Raises ValueError for what is not predicted of a user's model, before anything is traced."""
    if spec.compile != "off":
        raise ValueError(
            f"compile is {spec.compile!r}; of a user's model eager steps are predicted"
        )
    if isinstance(spec, DataParallelSpec) and spec.wrapper not in set(MODELLED) - {"zero3"}:
        raise ValueError(f"wrapper is {spec.wrapper!r}; {LAYOUTS}")


def predict_traced(spec: StepSpec | DataParallelSpec, traced: Traced, machine: Machine) -> Record:
    """The modelled record of `bench step` or `bench data-parallel`. Raises ValueError for an operator
    that the hardware file does not have.
    """
    require_traceable(spec)
    operations = TracedOperations(spec, traced)
    ranks, wrapper = (
        (spec.ranks, spec.wrapper) if isinstance(spec, DataParallelSpec) else (1, "none")
    )
    layout = Layout() if wrapper == "none" else Layout(data=ranks, wrapper=wrapper)
    backend = getattr(spec, "group_backend", "")
    prices = Prices(machine, layout, GLOO if backend == "gloo" else NCCL)
    step = TracedStep(operations, prices, _host(spec, traced, machine))
    if isinstance(spec, StepSpec):
        axis = data_axis(Sending(wrapper="none", ranks=1), step)
        phases = spec.phases
    else:
        axis = data_axis(
            Sending(wrapper=wrapper, ranks=ranks, bucket_mb=spec.bucket_mb,
                    reduce_dtype=spec.reduce_dtype),
            step,
        )  # fmt: skip
        phases = "step"
    program = step.program(axis, phases=phases)
    found = outcome(program, machine.contention)
    figures = {
        **{f"{n}_ms": ms for n, ms in found.phases.items() if ranks > 1 or n != "synchronize"},
        "step_ms": found.step_ms,
        "device_ms": found.device_ms,
    }
    if isinstance(spec, DataParallelSpec):
        figures |= _communicated(found, without_communication_ms(program, DATA))
    metrics = {name: Sample.exact(value, "ms") for name, value in figures.items()}
    if isinstance(spec, DataParallelSpec):
        nbytes = operations.num_parameters * operations.how.residual
        sent = sent_bytes(wrapper, gradient_bytes=nbytes, weight_bytes=nbytes, ranks=ranks)
        metrics["sent_bytes"] = Sample.exact(sent, "bytes")
    if traced.peak_bytes and not WRAPPERS[wrapper].stage and not spec.device.startswith("cpu"):
        metrics["peak_bytes"] = Sample.exact(traced.peak_bytes, "bytes")
    return modelled(spec, machine, metrics, step_rows(operations, prices, found), None)


def _communicated(found: Outcome, without: float) -> dict[str, float]:
    return {
        "communication_ms": found.communication.get(DATA, 0.0),
        "without_communication_ms": without,
        "exposed_ms": exposed_ms(found.step_ms, without),
    }


def _host(
    spec: StepSpec | DataParallelSpec, traced: Traced, machine: Machine
) -> dict[str, Launching]:
    """Each phase's launches as so many blocks of the calibrated network's."""
    known = launching(spec, machine)  # type: ignore[arg-type]
    return {
        phase: Launching(0.0, launch.us(0) + launch.block_us * traced.blocks.get(phase, 0.0))
        for phase, launch in known.items()
    }
