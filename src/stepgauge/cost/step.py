"""A training step on one device, predicted: the record that `bench step` would give.

The host launches the operations, the device runs them in order; a phase ends when both are
through. Times of operations come from a hardware file, and nothing is scaled to fit.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.machine import ASSUMED, Estimate, Machine
from stepgauge.cost.operations import TRAFFIC, StepOperations, Term
from stepgauge.spec.hardware import peaks
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec

HOST_PHASES = ("forward", "backward", "optimizer")
HEADINGS = ["phase", "term", "operation", "sizes", "count", "us", "source"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """The device's terms of a phase, and the host's microseconds to launch them."""

    name: str
    terms: list[tuple[Term, Estimate]]
    host_us: float

    @property
    def device_us(self) -> float:
        return sum(term.count * found.us for term, found in self.terms)


def predict(spec: StepSpec, machine: Machine) -> Record:
    """The modelled record of the step, its terms in a table. Raises ValueError for a step that the
    cost model or the hardware file does not know.
    """
    operations = StepOperations(spec)
    layers = operations.model.num_layers
    phases = [
        Phase(
            name,
            [(term, estimate(term, machine)) for term in terms],
            _host_us(name, layers, spec, machine),
        )
        for name, terms in operations.phases().items()
    ]
    metrics = {f"{name}_ms": Sample.exact(us / 1e3, "ms") for name, us in _ends(phases).items()}
    step_ms = metrics["step_ms"].median
    metrics["tokens_per_s"] = Sample.exact(operations.tokens / step_ms * 1e3, "tokens/s")
    metrics["host_ms"] = Sample.exact(sum(phase.host_us for phase in phases) / 1e3, "ms")
    metrics["device_ms"] = Sample.exact(sum(phase.device_us for phase in phases) / 1e3, "ms")
    metrics |= _rates(spec, operations.model, machine, step_ms)
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        tables={"terms": [HEADINGS, *(row for phase in phases for row in _rows(phase))]},
        environment={"device": machine.hardware.device, "hardware": machine.hardware.name},
        provenance="modelled",
    )


def estimate(term: Term, machine: Machine) -> Estimate:
    """Of one run of the term's operation."""
    if term.operation == TRAFFIC:
        return machine.traffic(*term.sizes)
    return machine.time(term.operation, *term.sizes)


def _host_us(phase: str, layers: int, spec: StepSpec, machine: Machine) -> float:
    """The host's time for a phase: linear in the number of blocks. None on a CPU."""
    if spec.device == "cpu":
        return 0.0
    mode = "eager" if spec.compile == "off" else "compiled"
    precision = "bf16" if spec.precision in ("bf16", "fp16") else "fp32"
    table = machine.hardware.operations.get(f"host {mode} {precision}")
    if table is None:
        raise ValueError(f"the hardware file {machine.hardware.name} has no host times")
    number = HOST_PHASES.index(phase)
    (few, short), (many, long) = sorted((row[0], row[2]) for row in table.rows if row[1] == number)
    slope = (long - short) / (many - few)
    return max(0.0, short + slope * (layers - few))


def _ends(phases: Sequence[Phase]) -> dict[str, float]:
    """Microseconds of each phase and of the step, as events on the device's queue see them: a phase
    ends when the host has launched it and the device has run it.
    """
    host = end = 0.0
    times: dict[str, float] = {}
    for phase in phases:
        host += phase.host_us
        before, end = end, max(host, end + phase.device_us)
        times[phase.name] = end - before
    return {**times, "step": end}


def _rates(spec: StepSpec, model: ModelSpec, machine: Machine, step_ms: float) -> dict[str, Sample]:
    count = model.forward_flops if spec.phases == "forward" else model.step_flops
    flops = count(batch=spec.batch, sequence=model.context_length)
    rates = {"tflop_per_s": Sample.exact(flops / step_ms / 1e9, "TFLOP/s")}
    known = peaks(machine.hardware.device)
    if known and (peak := known.of(spec.precision)):
        share = flops / (step_ms / 1e3) / peak
        rates["mfu"] = Sample.exact(share, "fraction of dense peak")
    return rates


def _rows(phase: Phase) -> list[list[object]]:
    rows: list[list[object]] = [
        [
            phase.name,
            term.name,
            term.operation,
            " × ".join(f"{size:g}" for size in term.sizes),
            term.count,
            found.us * term.count,
            found.source,
        ]
        for term, found in phase.terms
    ]
    waits = max(0.0, phase.host_us - phase.device_us)
    return [*rows, [phase.name, "host", "launches", "", 1, waits, ASSUMED]] if waits else rows
