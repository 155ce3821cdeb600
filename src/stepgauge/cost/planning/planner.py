"""Every layout of a training run, ranked: screened by closed formula, the best simulated."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.operations.supported import require_priced
from stepgauge.cost.planning.dense import nearest_with_formulas, needed_bytes
from stepgauge.cost.planning.screen import Candidate, Screen, Screened, candidates
from stepgauge.cost.rates.estimate import spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.units import GIB

# Simulated for each row that is asked for, and at least: the first must not depend on how many.
FINALISTS, LEAST_FINALISTS = 3, 30
LEAST_TRACED = 8  # of a network without formulas, each of which takes seconds
DAY_S = 86_400.0
Trace = Callable[[LayoutSpec], Sequence[TracedNetwork]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """rows       modelled records of the best layouts, fastest first
    fastest    the fastest of each wrapper and of each checkpointing, by its name
    counted    layouts that were screened, and of these how many fit
    limit_bytes  of a device; infinite on a CPU, whose memory is not predicted
    refused    why an axis was left out, by its name
    """

    rows: Sequence[Record]
    fastest: Mapping[str, Mapping[str, Record]]
    counted: tuple[int, int]
    limit_bytes: float
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plan(
    spec: PlanSpec, machine: CalibratedMachine, *, top: int = 10, trace: Trace | None = None
) -> Plan:
    """Raises ValueError for a GPU of unknown memory, and where nothing fits. Memory on a CPU is not
    predicted: there everything fits.

    trace  the stages of a layout of a network without formulas, which is screened as the nearest
           one that has them
    """
    limit = limit_of(spec, machine)
    every, fitting = _screened(spec, machine, limit, is_traced=trace is not None)
    refused: list[str] = []
    simulate = functools.partial(
        _simulated, spec=spec, machine=machine, refused=refused, trace=trace
    )
    possible = filter(None, (simulate(one.candidate) for one in fitting))
    finalists = max(FINALISTS * top, LEAST_FINALISTS) if trace is None else max(top, LEAST_TRACED)
    rows = list(itertools.islice(possible, finalists))
    if not rows:
        raise ValueError(
            f"none of the {len(fitting)} layouts that fit can be predicted; the first: {refused[0]}"
        )
    if not (holding := [row for row in rows if device_bytes(row) <= limit]):
        raise ValueError(f"nothing fits: {rows[0].spec['layout']} {rows[0].note}")
    rows = sorted(holding, key=_step_ms)
    others = fitting if trace is None else ()  # each would be traced
    fastest = {
        "wrapper": _fastest_by(lambda c: c.layout.wrapper, rows, others, simulate),
        "checkpointing": _fastest_by(lambda c: c.checkpointing, rows, others, simulate),
    }
    return Plan(rows[:top], fastest, (every, len(fitting)), limit)


def _screened(
    spec: PlanSpec, machine: CalibratedMachine, limit: float, *, is_traced: bool
) -> tuple[int, list[Screened]]:
    """How many layouts there are, and those that fit by formula, the fastest first."""
    asked = nearest_with_formulas(spec) if is_traced else spec
    require_priced(_work(asked))
    screen = Screen(asked, machine)
    every = [screen.of(c) for c in candidates(asked, machine.network.gpus_per_node)]
    if not every:
        raise ValueError(
            f"no layout spreads {spec.global_batch} sequences over {spec.gpus} GPUs; choose a "
            f"global batch that has more common divisors with them"
        )
    times = spec.network.num_parameters / asked.network.num_parameters
    needs = [needed_bytes(one.memory, times=times) for one in every]
    if min(needs) > limit:
        raise ValueError(
            f"nothing fits: the least that a layout needs is {min(needs) / GIB:.1f} GiB a GPU, of "
            f"{limit / GIB:.1f}; add GPUs, or shorten the context"
        )
    fitting = [one for one, needed in zip(every, needs, strict=True) if needed <= limit]
    return len(every), sorted(fitting, key=lambda one: one.step_us)


def limit_of(spec: PlanSpec, machine: CalibratedMachine) -> float:
    """Bytes that a rank may need; of a CPU, whose memory is not predicted, infinite."""
    return memory_limit(machine) if spec.device != "cpu" else math.inf


def memory_limit(machine: CalibratedMachine) -> int:
    """Bytes of a device for a process and its CUDA context. Raises ValueError where they are not known."""
    peaks = machine.hardware.peaks
    if peaks is None or not peaks.memory_gb:
        raise ValueError(
            f"the memory of {machine.hardware.device!r} is not known; give the hardware file peaks"
        )
    return peaks.program_bytes


def device_bytes(row: Record) -> float:
    """Of the peak and of what lies outside of torch's count; 0 of a CPU."""
    return sum(float(nbytes) for _, nbytes, _ in row.tables.get("memory", [])[1:])


def layout_spec(candidate: Candidate, spec: PlanSpec) -> LayoutSpec:
    """What `bench layout` runs of a candidate. Raises ValueError for what cannot be run."""
    batch = candidate.micro_batch * candidate.layout.data * candidate.layout.microbatches
    return LayoutSpec(
        model=spec.model, size=spec.size, layout=str(candidate.layout), batch=batch,
        accumulation=candidate.accumulation, precision=spec.precision, compile=spec.compile,
        optimizer=spec.optimizer, checkpointing=candidate.checkpointing, device=spec.device,
    )  # fmt: skip


def _simulated(
    candidate: Candidate,
    spec: PlanSpec,
    machine: CalibratedMachine,
    refused: list[str],
    trace: Trace | None,
) -> Record | None:
    """The modelled record with what a run comes to; None for what the runtime refuses or nobody
    has calibrated, whose reason is then `refused`.
    """
    try:
        asked = layout_spec(candidate, spec)
        record = predict_layout(asked, machine, trace(asked) if trace else (), shortened=True)
    except ValueError as error:
        refused.append(str(error))
        return None
    step_ms = record.metrics["step_ms"].median
    more = {"spread": Sample.exact(spread(record), "fraction of the step")}
    if spec.num_tokens:
        seconds = spec.num_tokens / asked.tokens_per_step * step_ms / 1e3
        more["days"] = Sample.exact(seconds / DAY_S, "days")
        more["gpu_hours"] = Sample.exact(seconds / 3600 * spec.gpus, "GPU-hours")
    return dataclasses.replace(record, metrics={**record.metrics, **more})


def largest_micro_batch(spec: PlanSpec, machine: CalibratedMachine, candidate: Candidate) -> int:
    """Of the layout, by doubling; its global batch may grow with it."""
    limit, screen, found = memory_limit(machine), Screen(spec, machine), candidate
    while True:
        larger = dataclasses.replace(found, micro_batch=2 * found.micro_batch)
        try:
            needs = screen.of(larger).memory.device_bytes
        except ValueError:  # more sequences than a step takes
            return found.micro_batch
        if needs > limit:
            return found.micro_batch
        found = larger


def longest_context(spec: PlanSpec, machine: CalibratedMachine, candidate: Candidate) -> int:
    """The longest context of the candidate's micro-batch that fits, by doubling."""
    limit, found = memory_limit(machine), spec.network
    while True:
        try:
            longer = dataclasses.replace(found, context_length=2 * found.context_length)
        except ValueError:  # more than the network has positions
            return found.context_length
        screen = Screen(dataclasses.replace(spec, model=longer), machine)
        if screen.of(candidate).memory.device_bytes > limit:
            return found.context_length
        found = longer


def longest_of_all(spec: PlanSpec, machine: CalibratedMachine) -> tuple[int, Candidate]:
    """The longest context, by doubling, that any layout of the batch fits in, and the first that
    does, of those that hold least: all is shared, and blocks are computed again.
    """
    limit, asked, found = memory_limit(machine), spec, None
    while True:
        screen = Screen(asked, machine)
        fitting = (
            one
            for one in candidates(asked, machine.network.gpus_per_node)
            if one.checkpointing == "blocks" and one.layout.wrapper in ("zero3", "none")
            if screen.of(one).memory.device_bytes <= limit
        )
        first = next(fitting, None)
        if first is None:
            assert found, "a plan that has rows has one at its own context"
            return found
        found = asked.network.context_length, first
        try:
            longer = dataclasses.replace(asked.network, context_length=2 * found[0])
        except ValueError:  # more than the network has positions
            return found
        asked = dataclasses.replace(asked, model=longer)


def _fastest_by(
    word: Callable[[Candidate], str],
    rows: Sequence[Record],
    screened: Sequence[Screened],
    simulate: Callable[[Candidate], Record | None],
) -> dict[str, Record]:
    """The fastest for each word of a candidate: of the simulated rows, where these have none the
    simulation of the one that formulas call the fastest. The fastest word comes first.
    """
    found: dict[str, Record] = {}
    for row in rows:
        found.setdefault(word(candidate_of(row)), row)
    for one in screened:
        name = word(one.candidate)
        if name not in found and (simulated := simulate(one.candidate)) is not None:
            found[name] = simulated
    return dict(sorted(found.items(), key=lambda item: _step_ms(item[1])))


def _step_ms(row: Record) -> float:
    return row.metrics["step_ms"].median


def candidate_of(row: Record) -> Candidate:
    layout = Layout.parse(row.spec["layout"])
    sequences = row.spec["batch"] // layout.data // layout.microbatches
    return Candidate(layout, sequences, row.spec["accumulation"], row.spec["checkpointing"])


def _work(spec: PlanSpec) -> WorkSpec:
    return WorkSpec(
        model=spec.model, precision=spec.precision, compile=spec.compile, optimizer=spec.optimizer
    )
