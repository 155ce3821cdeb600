"""Traces a step on fake tensors as the terms of its operators, for predictions without formulas."""

import collections
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stepgauge.bench.build import build
from stepgauge.bench.stage_step import Stage, StageStep, axes_of, build_stage_step, other_ranks
from stepgauge.bench.storage_tracking import predict as predict_memory
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.pipeline.cuts import stages_of
from stepgauge.cost.traced.network import Run, TracedNetwork
from stepgauge.cost.traced.traceable import TracedSpec, cut_of, require_traceable
from stepgauge.measure.fusion import TracedTerm, fuse, fuse_units
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.memory.missing_rules import NotPredictableError
from stepgauge.measure.memory.recurrent import layers_that_raise
from stepgauge.measure.memory.storage_tracker import ACTIVATIONS, TEMPORARIES
from stepgauge.measure.operators import OperatorTrace, record_step
from stepgauge.measure.weight_gradients import mark_weight_gradients
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
from stepgauge.train.user_layout import uncut_axes
from stepgauge.train.user_model import build_parts as build_user_parts

Built = tuple[TrainingStep, Sequence[Any]]
STEPS = 2  # the optimizer creates its state in the first step
BLOCKS = (1, 3)  # blocks of the reference networks; their difference is that of two blocks
CAST_BYTES = 2 + 4  # bytes of a value cast between bf16 and fp32
# cuDNN runs each of these in one call, so their operators cannot be traced.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A traced step.

    runs           runs of terms by phase
    parameters     elements of each trainable parameter
    units          elements of each block that ZeRO 3 unshards as one
    boundary_bytes  bytes received from or sent to another pipeline stage, whichever are more
    """

    runs: dict[str, list[Run]]
    parameters: list[int]
    units: dict[str, int]
    boundary_bytes: int

    def launches(self) -> dict[str, int]:
        """Returns the operators of each phase. For the optimizer it returns the number of parameters,
        because one launch updates many.
        """
        operators = {
            name: sum(term.count > 0 for run in runs for term in run.terms)
            for name, runs in self.runs.items()
        }
        return {**operators, "optimizer": len(self.parameters)}


def traced_isolated(spec: TracedSpec, architecture: str) -> list[TracedNetwork]:
    """Like `traced`, but in another process, which leaves no memory on a GPU. Layouts that shard the
    network alike are traced once.
    """
    return _trace_layout(spec, functools.partial(_trace_in_process, architecture))


def traced(spec: TracedSpec, architecture: str) -> list[TracedNetwork]:
    """Traces a rank's work in each stage of the spec's pipeline, or in the only stage.

    architecture  of the device: cpu, sm80 or sm90

    Raises ValueError if the step cannot be predicted or traced.
    """
    return _trace_layout(spec, functools.partial(_trace, architecture))


def uncut_isolated(model: UserModel, architecture: str) -> dict[str, str]:
    """Returns, by axis, why a user's network cannot be cut along it on any number of ranks. Calls its
    factory in another process, on fake tensors.
    """
    reasons: dict[str, str] = run_isolated(_uncut, model, architecture)
    return reasons


def _uncut(model: UserModel, architecture: str) -> dict[str, str]:
    try:
        with fake_device(architecture) as device:
            return uncut_axes(build_user_parts(WorkSpec(model=model), device))
    except Exception:  # from the user's code; the trace gives the reason
        return {}


def _trace_layout(
    spec: TracedSpec, trace: Callable[[Stage, bool], TracedNetwork]
) -> list[TracedNetwork]:
    """Traces all stages. ZeRO 3 computes with weights in the compute dtype, but updates the weights
    in their own dtype.
    """
    require_traceable(spec)
    networks = []
    for stage in _stages(spec):
        network = trace(stage, False)
        if spec.parsed_layout.gathers_weights and stage.work.precision == "bf16":
            network = dataclasses.replace(trace(stage, True), update=network.update)
        networks.append(network)
    return networks


def _stages(spec: TracedSpec) -> list[Stage]:
    """Returns the stages of the spec's pipeline. Without a pipeline there is one stage."""
    work, layout = work_of(spec), cut_of(spec)
    if isinstance(spec, PipelineSpec):
        return [Stage(work, layout, parts) for parts in stages_of(spec)]
    if layout.pipeline > 1:  # only for a user's model
        return [Stage(work, layout, number=n) for n in range(schedule_of(layout).num_stages)]
    if isinstance(spec, LayoutSpec) and spec.parsed_layout.pipeline > 1:
        layers = spec.network.num_layers
        return [Stage(work, layout, parts_of(blocks, layers)) for blocks in spec.stages()]
    return [Stage(work, layout)]


def _trace(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork:
    """Traces a stage.

    gathered  with weights in bf16, as ZeRO 3 unshards them under autocast
    """
    weights = torch.bfloat16 if gathered else None
    work = stage.work
    try:
        step = _trace_step(stage, architecture, weights, by_unit=gathered)
        has_memory = architecture != "cpu" and work.compile == "off"
        memory = _memory_of(stage, architecture, weights) if has_memory else {}
    except ValueError:
        raise
    except Exception as error:  # from the user's code, which may still run on a real device
        raise ValueError(f"the step cannot be traced: {_reason(error, work)}") from error
    blocks = {} if architecture == "cpu" else _num_blocks(step, stage, architecture)
    update = [term for run in step.runs.get("optimizer", ()) for term in run.terms]
    return TracedNetwork(
        forward=step.runs["forward"],
        backward=step.runs.get("backward", ()),
        update=_update_term(update),
        parameters=step.parameters,
        units=step.units,
        boundary_bytes=step.boundary_bytes,
        blocks=blocks,
        **memory,
    )


def _reason(error: Exception, spec: WorkSpec) -> str:
    """Returns the error's first line, preceded by its type and the line of the user's file unless it
    is a NotPredictableError.
    """
    first, *_ = str(error).splitlines() or [""]
    if isinstance(error, NotPredictableError):
        return first
    trace = "".join(traceback.format_exception(error))
    return ": ".join(filter(None, (user_line(trace, spec.model), type(error).__name__, first)))


def _trace_in_process(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork:
    result = _cached_trace(architecture, stage, gathered)
    if isinstance(result, str):
        raise ValueError(result)
    return result


@functools.cache
def _cached_trace(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork | str:
    """Traces the stage in another process. Returns the message of a ValueError, so that failures are
    cached too.
    """
    return run_isolated(_trace_or_message, architecture, stage, gathered)


def _trace_or_message(architecture: str, stage: Stage, gathered: bool) -> TracedNetwork | str:
    try:
        return _trace(architecture, stage, gathered)
    except ValueError as error:
        return str(error)


def _trace_step(
    stage: Stage,
    architecture: str,
    weights: torch.dtype | None = None,
    *,
    by_unit: bool = False,
) -> TracedStep:
    """Runs the stage's step on fake tensors and records its operators.

    weights  dtype to which the weights are cast
    by_unit  units are compiled separately, because ZeRO 3 unshards their weights before each
    """
    untimed = ValueError("the model runs a recurrent layer, which no calibration has a time for")
    work = stage.work
    with (
        other_ranks(stage.layout) as groups,
        fake_device(architecture) as device,
        layers_that_raise(untimed, () if architecture == "cpu" else RECURRENT),
    ):
        eager = dataclasses.replace(work, device=str(device), compile="off")
        step, batch = _build(dataclasses.replace(stage, work=eager), device, groups, weights)
        units = _units(step.module)
        trace = OperatorTrace(
            fp32="tf32" if work.precision == "tf32" else "fp32", axes=axes_of(groups)
        )
        with step.precision.matmul_mode():
            phases = step.phases(batch, until=work.phases)
            record_step(trace, phases, step.module, units, steps=STEPS)
        sizes = [p.numel() for p in step.module.parameters() if p.requires_grad]
        elements = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}
    # The first of them is that of the first block's input; an embedding's input has no gradient.
    gradients = [trace.input_gradients[name] for name in units if name in trace.input_gradients]
    if stage.is_in_pipeline and gradients:
        trace.traced["backward"] = mark_weight_gradients(trace.traced["backward"], gradients[0])
    boundary_bytes = step.boundary_bytes if isinstance(step, StageStep) else 0
    runs = _runs(trace.traced, work.compile, by_unit=by_unit)
    return TracedStep(runs, sizes, elements, boundary_bytes)


def _runs(
    phases: Mapping[str, Sequence[TracedTerm]], compile: str, *, by_unit: bool
) -> dict[str, list[Run]]:
    """Returns the runs of terms of each phase, fused as the compile mode does."""
    if compile == "off":
        return {
            name: [
                Run(unit, [each.term for each in run])
                for unit, run in itertools.groupby(traced, lambda each: each.unit)
            ]
            for name, traced in phases.items()
        }
    if compile == "blocks" or by_unit:
        units = fuse_units(phases, outside=compile != "blocks")
        return {name: [Run(*run) for run in runs] for name, runs in units.items()}
    return {name: [Run("", terms)] for name, terms in fuse(phases).items()}


def _units(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks that ZeRO 3 unshards as one (parallel/fsdp/fsdp.py): those that share no
    weight with another block.
    """
    names = {part: name for name, part in module.named_modules()}
    blocks = [block for block in dict.fromkeys(repeated_blocks(module)) if block is not module]
    num_users = collections.Counter(p for block in blocks for p in block.parameters())
    units = {}
    for block in blocks:
        weights = list(block.parameters())
        if weights and all(num_users[weight] == 1 for weight in weights):
            units[names[block]] = block
    return units


def _update_term(terms: list[Term]) -> Term:
    """Returns the optimizer's operators as one term: torch's fused one as calibrated, others by their
    bytes. Raises ValueError for an optimizer that runs more than elementwise operators.
    """
    for term in terms:
        if not term.operation.startswith(("optimizer", TRAFFIC, "cast")):
            raise ValueError(
                f"the optimizer runs {term.name}; a user's optimizer is predicted only if it runs "
                "nothing but elementwise operators"
            )
    fused = [term for term in terms if term.operation.startswith("optimizer")]
    if fused:
        numel = sum(term.sizes[0] for term in fused)
        nbytes = sum(term.nbytes for term in fused)
        return Term("optimizer", fused[0].operation, (numel,), nbytes=nbytes)
    nbytes = 0.0
    for term in terms:
        nbytes += term.sizes[0] if term.operation == TRAFFIC else term.sizes[0] * CAST_BYTES
    return Term("optimizer", TRAFFIC, (nbytes,))


def _num_blocks(step: TracedStep, stage: Stage, architecture: str) -> dict[str, float]:
    """Returns the launches of each phase as a multiple of those of one block of the calibrated
    network, sharded in the same way.
    """
    spec, ranks = stage.work, stage.layout.tensor * stage.layout.context

    def launches(blocks: int) -> Mapping[str, int]:
        # The network of calibrate/host.py, as large for each of the ranks that share it.
        model = ModelSpec(
            d_model=64 * ranks, d_ff=128 * ranks, num_layers=blocks, num_heads=ranks,
            context_length=16 * ranks, vocab_size=256 * ranks,
        )  # fmt: skip
        work = WorkSpec(
            model=model, batch=1, precision=spec.precision, phases=spec.phases,
            compile=spec.compile, optimizer=spec.optimizer,
        )  # fmt: skip
        return _trace_step(Stage(work, stage.layout), architecture).launches()

    few, many = BLOCKS
    with_few, with_many = launches(few), launches(many)
    num_blocks = {}
    for phase, count in step.launches().items():
        added = with_many.get(phase, 0) - with_few.get(phase, 0)
        if added > 0:
            num_blocks[phase] = count * (many - few) / added
    return num_blocks


def _memory_of(stage: Stage, architecture: str, weights: torch.dtype | None) -> dict[str, Any]:
    """Returns the memory fields of a TracedNetwork; none for a forward without backward, whose memory
    is not tracked. If the optimizer is not part of the phases, its state is left out.
    """
    if stage.work.phases == "forward":
        return {}
    inputs: list[Any] = []
    spec = MemorySpec(**{**vars(stage.work), "predict": architecture, "phases": "step"})
    with other_ranks(stage.layout) as groups:

        def make(spec: WorkSpec, device: torch.device, **_: Any) -> Built:
            built = _build(dataclasses.replace(stage, work=spec), device, groups, weights)
            inputs[:] = built[1]
            return built

        step = predict_memory(spec, make=make).step
    received = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    received_bytes = sum(x.nbytes for x in received) if stage.is_in_pipeline else 0
    left_out = () if stage.work.phases == "step" else (STATE,)
    return {
        "moments": [
            {name: size for name, size in moment.held.items() if name not in left_out}
            for moment in step.thinned()
        ],
        "kept_bytes": received_bytes + sum(step.bytes_of[a] for a in step.saved_for_backward()),
        "most_bytes": received_bytes + step.most_of(ACTIVATIONS, TEMPORARIES),
    }


def _build(
    stage: Stage, device: torch.device, groups: Mapping[str, Any], weights: torch.dtype | None
) -> Built:
    if stage.is_whole:
        return build(stage.work, device, weights=weights)
    return build_stage_step(stage, device, groups, weights)
