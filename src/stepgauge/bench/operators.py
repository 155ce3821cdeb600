"""A user's step as the terms of its operators, traced on tensors without memory."""

import collections
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgauge.bench.build import build
from stepgauge.bench.stage_step import Stage, StageStep, axes_of, build_stage_step, other_ranks
from stepgauge.bench.storage_tracking import predict as predict_memory
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.traced.asked import TracedSpec, cut_of, require_traceable
from stepgauge.cost.traced.network import Run, TracedNetwork
from stepgauge.measure.fusion import Moved, fused, fused_units
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.memory.missing_rules import NotPredictableError
from stepgauge.measure.memory.recurrent import layers_that_raise
from stepgauge.measure.memory.storage_tracker import ACTIVATIONS, TEMPORARIES
from stepgauge.measure.operators import OperatorTrace, record_step
from stepgauge.measure.weight_gradients import marked
from stepgauge.parallel.fsdp.sharded_unit import repeated_blocks
from stepgauge.runtime.load_file import user_line
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import STATE, MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.stages import parts_of
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.steps import work_of
from stepgauge.spec.user_model import UserModel
from stepgauge.train.step import TrainingStep

Built = tuple[TrainingStep, Sequence[Any]]
STEPS = 2  # the optimizer makes its state in the first
BLOCKS = (1, 3)  # of the narrow network that tells how many operators a block launches
CAST_BYTES = 2 + 4  # of a value between bf16 and fp32
# cuDNN runs each in one call, within which no operator is seen.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


@dataclasses.dataclass(frozen=True)
class Counted:
    """A traced step: its runs of terms by phase, the elements of its parameters and of its units, and
    the bytes of what lies between it and other stages.
    """

    runs: dict[str, list[Run]]
    parameters: list[int]
    units: dict[str, int]
    between_bytes: int

    def launched(self) -> dict[str, int]:
        """By phase, what grows with a network; of the optimizer its tensors, many a launch."""
        found = {
            name: sum(term.count > 0 for run in runs for term in run.terms)
            for name, runs in self.runs.items()
        }
        return {**found, "optimizer": len(self.parameters)}


def traced_apart(spec: TracedSpec, architecture: str) -> list[TracedNetwork]:
    """As `traced` in a process of its own, which leaves no memory on a GPU; once for all layouts of
    a step that cut the network alike.
    """
    return _of_layout(spec, functools.partial(_in_a_process, architecture))


def traced(spec: TracedSpec, architecture: str) -> list[TracedNetwork]:
    """What a rank computes of each stage of the spec's pipeline, or of the only one there is, as it
    would run on a device of the architecture: cpu, sm80 or sm90. Raises ValueError for a step that
    is not predicted, or does what cannot be traced.
    """
    return _of_layout(spec, functools.partial(_traced, architecture))


def _of_layout(
    spec: TracedSpec, trace: Callable[[Stage, bool], TracedNetwork]
) -> list[TracedNetwork]:
    """ZeRO 3 gathers weights in the type that is computed in; what a rank updates is in theirs."""
    require_traceable(spec)
    found = []
    for stage in _stages(spec):
        own = trace(stage, False)
        if spec.parsed_layout.gathers_weights and stage.work.precision == "bf16":
            own = dataclasses.replace(trace(stage, True), update=own.update)
        found.append(own)
    return found


def _stages(spec: TracedSpec) -> list[Stage]:
    """Of the spec's pipeline: without one a stage that is all of the network."""
    work, layout = work_of(spec), cut_of(spec)
    if isinstance(spec, PipelineSpec):
        return [Stage(work, layout, parts) for parts in stages_of(spec)]
    if layout.pipeline > 1:  # of a user's model
        return [Stage(work, layout, number=n) for n in range(schedule_of(layout).num_stages)]
    if isinstance(spec, LayoutSpec) and spec.parsed_layout.pipeline > 1:
        layers = spec.network.num_layers
        return [Stage(work, layout, parts_of(blocks, layers)) for blocks in spec.stages()]
    return [Stage(work, layout)]


def _traced(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork:
    """`gathered`: with weights as ZeRO 3 gathers them under autocast."""
    weights = torch.bfloat16 if gathered else None
    work = stage.work
    try:
        found = _counted(stage, architecture, weights, by_unit=gathered)
        is_tracked = architecture != "cpu" and work.compile == "off"
        tracked = _tracked(stage, architecture, weights) if is_tracked else {}
    except ValueError:
        raise
    except Exception as error:  # of the user's own code: the step may run for all that
        raise ValueError(f"the step cannot be traced: {_why(error, work)}") from error
    blocks = {} if architecture == "cpu" else _in_blocks(found, stage, architecture)
    update = [term for run in found.runs.get("optimizer", ()) for term in run.terms]
    return TracedNetwork(
        forward=found.runs["forward"],
        backward=found.runs.get("backward", ()),
        update=_as_one(update),
        parameters=found.parameters,
        units=found.units,
        between_bytes=found.between_bytes,
        blocks=blocks,
        **tracked,
    )


def _why(error: Exception, spec: WorkSpec) -> str:
    """Its first line; of another error than ours with its type, and the line of the user's file."""
    first, *_ = str(error).splitlines() or [""]
    if isinstance(error, NotPredictableError):
        return first
    trace = "".join(traceback.format_exception(error))
    where = user_line(trace, Path(spec.model.file)) if isinstance(spec.model, UserModel) else ""
    return ": ".join(filter(None, (where, type(error).__name__, first)))


def _in_a_process(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork:
    found = _told_by_a_process(architecture, stage, gathered)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@functools.cache
def _told_by_a_process(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork | str:
    return run_isolated(_traced_or_why, architecture, stage, gathered)


def _traced_or_why(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork | str:
    try:
        return _traced(architecture, stage, gathered)
    except ValueError as error:
        return str(error)


def _counted(
    stage: Stage,
    architecture: str,
    weights: torch.dtype | None = None,
    *,
    by_unit: bool = False,
) -> Counted:
    """`by_unit`: units are compiled apart, for their weights come before each."""
    untimed = ValueError("the model runs a recurrent layer, which no calibration has a time for")
    work = stage.work
    with (
        other_ranks(stage.layout) as groups,
        fake_device(architecture) as device,
        layers_that_raise(untimed, () if architecture == "cpu" else RECURRENT),
    ):
        eager = dataclasses.replace(work, device=str(device), compile="off")
        step, batch = _built(dataclasses.replace(stage, work=eager), device, groups, weights)
        units = _units(step.module)
        trace = OperatorTrace(
            fp32="tf32" if work.precision == "tf32" else "fp32", axes=axes_of(groups)
        )
        with step.precision.matmul_mode():
            phases = step.phases(batch, until=work.phases)
            record_step(trace, phases, step.module, units, steps=STEPS)
        sizes = [p.numel() for p in step.module.parameters() if p.requires_grad]
        elements = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}
    gradients = [trace.input_gradients[name] for name in units if name in trace.input_gradients]
    if stage.is_in_pipeline and gradients:  # of the first; an embedding's tokens have none
        trace.moved["backward"] = marked(trace.moved["backward"], gradients[0])
    between = step.boundary_bytes if isinstance(step, StageStep) else 0
    return Counted(_runs(trace.moved, work.compile, by_unit=by_unit), sizes, elements, between)


def _runs(
    phases: Mapping[str, Sequence[Moved]], compile: str, *, by_unit: bool
) -> dict[str, list[Run]]:
    """As the mode of compiling leaves them."""
    if compile == "off":
        return {name: list(_eager_runs(moved)) for name, moved in phases.items()}
    if compile == "blocks" or by_unit:
        units = fused_units(phases, outside=compile != "blocks")
        return {name: [Run(*run) for run in runs] for name, runs in units.items()}
    return {name: [Run("", terms)] for name, terms in fused(phases).items()}


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """Blocks with weights that no other has, as ZeRO 3 gathers them (parallel/fsdp/fsdp.py)."""
    names = {part: name for name, part in module.named_modules()}
    blocks = [block for block in dict.fromkeys(repeated_blocks(module)) if block is not module]
    num_users = collections.Counter(p for block in blocks for p in block.parameters())
    found = {}
    for block in blocks:
        weights = list(block.parameters())
        if weights and all(num_users[weight] == 1 for weight in weights):
            found[names[block]] = block
    return found


def _eager_runs(moved: Sequence[Moved]) -> Iterator[Run]:
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
    fused = [term for term in terms if term.operation.startswith("optimizer")]
    if fused:
        numel = sum(term.sizes[0] for term in fused)
        nbytes = sum(term.nbytes for term in fused)
        return Term("optimizer", fused[0].operation, (numel,), nbytes=nbytes)
    moved = 0.0
    for term in terms:
        moved += term.sizes[0] if term.operation == TRAFFIC else term.sizes[0] * CAST_BYTES
    return Term("optimizer", TRAFFIC, (moved,))


def _in_blocks(found: Counted, stage: Stage, architecture: str) -> dict[str, float]:
    """Launches of each phase over those of a block of the calibrated network, cut alike."""
    spec, ranks = stage.work, stage.layout.tensor * stage.layout.context

    def launched(blocks: int) -> Mapping[str, int]:
        narrow = WorkSpec(
            model=_narrow(blocks, ranks),
            batch=1,
            precision=spec.precision,
            phases=spec.phases,
            compile=spec.compile,
            optimizer=spec.optimizer,
        )
        return _counted(Stage(narrow, stage.layout), architecture).launched()

    few, many = BLOCKS
    of_few, of_many = launched(few), launched(many)
    in_blocks = {}
    for phase, count in found.launched().items():
        more = of_many.get(phase, 0) - of_few.get(phase, 0)
        if more > 0:
            in_blocks[phase] = count * (many - few) / more
    return in_blocks


def _narrow(layers: int, ranks: int) -> ModelSpec:
    """The network of calibrate/host.py, with as much for each of the ranks that share it."""
    return ModelSpec(
        d_model=64 * ranks, d_ff=128 * ranks, num_layers=layers, num_heads=ranks,
        context_length=16 * ranks, vocab_size=256 * ranks,
    )  # fmt: skip


def _tracked(stage: Stage, architecture: str, weights: torch.dtype | None) -> dict[str, Any]:
    """What a TracedNetwork has of memory; nothing of forward alone, whose memory is not tracked.
    That of forward and backward is a step's before its optimizer has made a state.
    """
    if stage.work.phases == "forward":
        return {}
    inputs: list[Any] = []
    asked = MemorySpec(**{**vars(stage.work), "predict": architecture, "phases": "step"})
    with other_ranks(stage.layout) as groups:

        def make(spec: WorkSpec, device: torch.device, **_: Any) -> Built:
            built = _built(dataclasses.replace(stage, work=spec), device, groups, weights)
            inputs[:] = built[1]
            return built

        step = predict_memory(asked, make=make).step
    hidden = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    given = sum(x.nbytes for x in hidden) if stage.is_in_pipeline else 0
    left_out = () if stage.work.phases == "step" else (STATE,)
    return {
        "moments": [
            {name: size for name, size in moment.held.items() if name not in left_out}
            for moment in step.thinned()
        ],
        "kept_bytes": given + sum(step.bytes_of[a] for a in step.saved_for_backward()),
        "most_bytes": given + step.most_of(ACTIVATIONS, TEMPORARIES),
    }


def _built(
    stage: Stage, device: torch.device, groups: Mapping[str, Any], weights: torch.dtype | None
) -> Built:
    if stage.is_whole:
        return build(stage.work, device, weights=weights)
    return build_stage_step(stage, device, groups, weights)
