"""A user's step as the terms of its operators, traced on tensors without memory."""

import collections
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from stepgauge.bench.build import build
from stepgauge.bench.storage_tracking import predict as predict_memory
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.traced.network import (
    Run,
    TracedNetwork,
    gathers_weights,
    require_traceable,
)
from stepgauge.measure.fusion import Moved, fused
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.memory.missing_rules import NotPredictableError
from stepgauge.measure.memory.recurrent import layers_that_raise
from stepgauge.measure.operators import OperatorTrace, record_step
from stepgauge.parallel.fsdp.sharded_unit import repeated_blocks
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.steps import AnyStep, work_of
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
    """A traced step: its runs of terms by phase, the elements of its parameters and of its units."""

    runs: dict[str, list[Run]]
    parameters: list[int]
    units: dict[str, int]

    def launched(self) -> dict[str, int]:
        """By phase, what grows with a network; of the optimizer its tensors, many a launch."""
        found = {
            name: sum(term.count > 0 for run in runs for term in run.terms)
            for name, runs in self.runs.items()
        }
        return {**found, "optimizer": len(self.parameters)}


def traced_apart(spec: AnyStep, architecture: str) -> TracedNetwork:
    """As `traced` in a process of its own, which leaves no memory on a GPU; once for all layouts of
    a step.
    """
    return _of_layout(spec, functools.partial(_in_a_process, architecture))


def traced(spec: AnyStep, architecture: str) -> TracedNetwork:
    """The step of the spec as it would run on a device of the architecture: cpu, sm80 or
    sm90. Raises ValueError for a step that is not predicted, or does what cannot be traced.
    """
    return _of_layout(spec, functools.partial(_traced, architecture))


def _of_layout(spec: AnyStep, trace: Callable[[WorkSpec, bool], TracedNetwork]) -> TracedNetwork:
    """ZeRO 3 gathers weights in the type that is computed in; what a rank updates is in theirs."""
    require_traceable(spec)
    work = work_of(spec)
    found = trace(work, False)
    if not gathers_weights(spec.parsed_layout) or work.precision != "bf16":
        return found
    return dataclasses.replace(trace(work, True), update=found.update)


def _traced(architecture: str, work: WorkSpec, gathered: bool) -> TracedNetwork:
    """`gathered`: with weights as ZeRO 3 gathers them under autocast."""
    weights = torch.bfloat16 if gathered else None
    try:
        found = _counted(work, architecture, weights)
        is_tracked = architecture != "cpu" and work.compile == "off"
        moments = _moments(work, architecture, weights) if is_tracked else []
    except ValueError:
        raise
    except Exception as error:  # of the user's own code: the step may run for all that
        raise ValueError(f"the step cannot be traced: {_why(error, work)}") from error
    blocks = {} if architecture == "cpu" else _in_blocks(found, work, architecture)
    update = [term for run in found.runs.get("optimizer", ()) for term in run.terms]
    return TracedNetwork(
        forward=found.runs["forward"],
        backward=found.runs.get("backward", ()),
        update=_as_one(update),
        parameters=found.parameters,
        units=found.units,
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


def _in_a_process(architecture: str, work: WorkSpec, gathered: bool) -> TracedNetwork:
    found = _told_by_a_process(architecture, work, gathered)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@functools.cache
def _told_by_a_process(architecture: str, work: WorkSpec, gathered: bool) -> TracedNetwork | str:
    return run_isolated(_traced_or_why, architecture, work, gathered)


def _traced_or_why(architecture: str, work: WorkSpec, gathered: bool) -> TracedNetwork | str:
    try:
        return _traced(architecture, work, gathered)
    except ValueError as error:
        return str(error)


def _counted(spec: WorkSpec, architecture: str, weights: torch.dtype | None = None) -> Counted:
    untimed = ValueError("the model runs a recurrent layer, which no calibration has a time for")
    with (
        fake_device(architecture) as device,
        layers_that_raise(untimed, () if architecture == "cpu" else RECURRENT),
    ):
        eager = dataclasses.replace(spec, device=str(device), compile="off")
        step, batch = build(eager, device, weights=weights)
        units = _units(step.module)
        trace = OperatorTrace(fp32="tf32" if spec.precision == "tf32" else "fp32")
        with step.precision.matmul_mode():
            phases = step.phases(batch, until=spec.phases)
            record_step(trace, phases, step.module, units, steps=STEPS)
        sizes = [p.numel() for p in step.module.parameters() if p.requires_grad]
        elements = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}
    if spec.compile == "on":
        runs = {name: [Run("", terms)] for name, terms in fused(trace.moved).items()}
    else:
        runs = {name: list(_runs(moved)) for name, moved in trace.moved.items()}
    return Counted(runs, sizes, elements)


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """Blocks with weights that no other has, as ZeRO 3 gathers them (parallel/fsdp/fsdp.py)."""
    names = {part: name for name, part in module.named_modules()}
    blocks = [block for block in dict.fromkeys(repeated_blocks(module)) if block is not module]
    users = collections.Counter(p for block in blocks for p in block.parameters())
    owned = (b for b in blocks if users.keys() & set(b.parameters()))
    return {names[b]: b for b in owned if all(users[p] == 1 for p in b.parameters())}


def _runs(moved: Sequence[Moved]) -> Iterator[Run]:
    for unit, each in itertools.groupby(moved, lambda each: each.unit):
        yield Run(unit, [moved.term for moved in each])


def _as_one(terms: list[Term]) -> Term:
    """The optimizer's operators: torch's fused one as it was calibrated, else its bytes. Raises
    ValueError for one that computes more.
    """
    for term in terms:
        if not term.operation.startswith(("optimizer", TRAFFIC, "cast")):
            raise ValueError(
                f"the optimizer runs {term.name}; of a user's optimizer what it reads and writes "
                "is predicted"
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


def _moments(
    spec: WorkSpec, architecture: str, weights: torch.dtype | None
) -> list[Mapping[str, int]]:
    """None of a step without its optimizer, whose memory is not tracked."""
    if spec.phases != "step":
        return []
    asked = MemorySpec(**{**vars(spec), "predict": architecture})
    return [moment.held for moment in predict_memory(asked, weights=weights).step.thinned()]
