"""A user's step as the terms of its operators, traced on tensors without memory."""

import dataclasses
import functools
import traceback
from collections.abc import Mapping
from pathlib import Path

from stepgauge.bench import step as bench_step
from stepgauge.bench.storage_tracking import predict as predict_memory
from stepgauge.cost.terms import TRAFFIC, Term
from stepgauge.cost.traced import Traced, TracedSpec, require_traceable
from stepgauge.measure.fusion import fused
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.memory.missing_rules import NotPredictableError
from stepgauge.measure.memory.recurrent import layers_that_raise
from stepgauge.measure.operators import OperatorTrace, record_step
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.user_model import UserModel

STEPS = 2  # the optimizer makes its state in the first
BLOCKS = (1, 3)  # of the narrow network that tells how many operators a block launches
NARROW = ModelSpec(
    d_model=64, d_ff=128, num_layers=1, num_heads=1, context_length=16, vocab_size=256
)  # as calibrate/host.py
CAST_BYTES = 2 + 4  # of a value between bf16 and fp32
# cuDNN runs each in one call, within which no operator is seen.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


@dataclasses.dataclass(frozen=True)
class Counted:
    """A traced step: its terms by phase, and the elements of its parameters."""

    terms: dict[str, list[Term]]
    parameters: list[int]

    def launched(self) -> dict[str, int]:
        """By phase, what grows with a network; of the optimizer its tensors, many a launch."""
        found = {name: sum(term.count > 0 for term in terms) for name, terms in self.terms.items()}
        return {**found, "optimizer": len(self.parameters)}


def traced_apart(spec: TracedSpec, architecture: str) -> Traced:
    """The same in a process of its own, which leaves no memory on a GPU; once for all layouts of a
    step.
    """
    require_traceable(spec)
    found = _in_a_process(_work(spec), architecture)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def traced(spec: TracedSpec, architecture: str) -> Traced:
    """The step of the spec as it would run on a device of the architecture: cpu, sm80 or
    sm90. Raises ValueError for a step that is not predicted, or does what cannot be traced.
    """
    require_traceable(spec)
    work = _work(spec)
    try:
        found = _counted(work, architecture)
        is_tracked = architecture != "cpu" and work.compile == "off"
        moments = _moments(work, architecture) if is_tracked else []
    except ValueError:
        raise
    except Exception as error:  # of the user's own code: the step may run for all that
        raise ValueError(f"the step cannot be traced: {_why(error, work)}") from error
    blocks = {} if architecture == "cpu" else _in_blocks(found, work, architecture)
    return Traced(
        forward=found.terms["forward"],
        backward=found.terms.get("backward", ()),
        update=_as_one(found.terms.get("optimizer", [])),
        parameters=found.parameters,
        blocks=blocks,
        moments=moments,
    )


def _why(error: Exception, spec: WorkSpec) -> str:
    """Its first line; of another error than ours with its type, and the line of the user's file."""
    first, *_ = str(error).splitlines() or [""]
    if isinstance(error, NotPredictableError):
        return first
    trace = "".join(traceback.format_exception(error))
    where = user_line(trace, Path(spec.model.file)) if isinstance(spec.model, UserModel) else ""
    return ": ".join(filter(None, (where, type(error).__name__, first)))


@functools.cache
def _in_a_process(work: WorkSpec, architecture: str) -> Traced | str:
    return run_isolated(_traced_or_why, work, architecture)


def _traced_or_why(work: WorkSpec, architecture: str) -> Traced | str:
    try:
        return traced(StepSpec(**vars(work)), architecture)
    except ValueError as error:
        return str(error)


def _work(spec: TracedSpec) -> WorkSpec:
    """What a rank of the spec computes."""
    own = {field.name for field in dataclasses.fields(WorkSpec)}
    values = {name: value for name, value in vars(spec).items() if name in own}
    if isinstance(spec, LayoutSpec) and not isinstance(spec.model, UserModel):
        values["batch"] = spec.rank_batch
    return WorkSpec(**values)


def _counted(spec: WorkSpec, architecture: str) -> Counted:
    untimed = ValueError("the model runs a recurrent layer, which no calibration has a time for")
    with (
        fake_device(architecture) as device,
        layers_that_raise(untimed, () if architecture == "cpu" else RECURRENT),
    ):
        eager = dataclasses.replace(spec, device=str(device), compile="off")
        step, batch = bench_step.build(eager, device)
        trace = OperatorTrace(fp32="tf32" if spec.precision == "tf32" else "fp32")
        with step.precision.matmul_mode():
            phases = step.phases(batch, until=spec.phases)
            record_step(trace, phases, step.module, steps=STEPS)
        sizes = [p.numel() for p in step.module.parameters() if p.requires_grad]
    return Counted(fused(trace.moved) if spec.compile == "on" else trace.terms, sizes)


def _as_one(terms: list[Term]) -> Term:
    """The optimizer's operators: torch's fused one as it was calibrated, else its bytes. Raises
    ValueError for one that computes more.
    """
    for term in terms:
        if not term.operation.startswith(("optimizer", TRAFFIC, "cast")):
            raise ValueError(
                f"the optimizer runs {term.name}; of a user's optimizer what it reads and writes "
                "is "
                "predicted"
            )
    if fused := [term for term in terms if term.operation.startswith("optimizer")]:
        return Term("optimizer", fused[0].operation, (sum(term.sizes[0] for term in fused),))
    moved = sum(term.sizes[0] * (1 if term.operation == TRAFFIC else CAST_BYTES) for term in terms)
    return Term("optimizer", TRAFFIC, (moved,))


def _in_blocks(found: Counted, spec: WorkSpec, architecture: str) -> dict[str, float]:
    """Launches of each phase over those of a block of the calibrated network."""
    few, many = (
        _counted(
            WorkSpec(
                model=dataclasses.replace(NARROW, num_layers=number), batch=1,
                precision=spec.precision, phases=spec.phases, compile=spec.compile,
            ),
            architecture,
        ).launched()
        for number in BLOCKS
    )  # fmt: skip
    blocks = BLOCKS[1] - BLOCKS[0]
    return {
        name: count * blocks / (many[name] - few[name])
        for name, count in found.launched().items()
        if many.get(name, 0) > few.get(name, 0)
    }


def _moments(spec: WorkSpec, architecture: str) -> list[Mapping[str, int]]:
    """None of a step without its optimizer, whose memory is not tracked."""
    if spec.phases != "step":
        return []
    asked = MemorySpec(**{**vars(spec), "predict": architecture})
    return [moment.held for moment in predict_memory(asked).step.thinned()]
