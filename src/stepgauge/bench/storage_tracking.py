"""Runs a MemorySpec's step under a storage tracker: on real tensors as a measurement, or on fake
tensors as a prediction.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepgauge.bench.build import build
from stepgauge.kernels.attention import libraries
from stepgauge.kernels.linear_cross_entropy.chunked import transient_bytes
from stepgauge.measure.memory.fake_device import fake_device
from stepgauge.measure.memory.storage_tracker import StorageTracker
from stepgauge.measure.memory.timeline import MemoryTimeline, memory_timeline
from stepgauge.measure.memory.workspaces import CudaWorkspaces
from stepgauge.spec.memory import GRADIENTS, OTHER, PARAMETERS, STATE, MemorySpec
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.train.step import TrainingStep

FORWARD_ONLY = "forward only"
KNOWN_WORKSPACES: Mapping[str, Callable[[Any], int]] = {
    "stepgauge::linear_cross_entropy": transient_bytes
}
HOPPER_WORKSPACES: Mapping[str, Callable[[Any], int]] = {
    "stepgauge::flash_attention_backward": libraries.backward_bytes
}
STEPS = 2  # the optimizer creates its state in the first step; the second is like all later ones
Make = Callable[..., tuple[TrainingStep, Sequence[Any]]]  # as bench.build.build
Around = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of one tracked run.

    step                the timeline of the last step
    forward_only_bytes  the peak of a forward pass without gradients
    left_out            sentences that say which memory a prediction does not contain
    """

    step: MemoryTimeline
    forward_only_bytes: int
    left_out: tuple[str, ...] = ()


def predict(
    spec: MemorySpec,
    *,
    plan: RecomputePlan | None = None,
    make: Make = build,
) -> StepMemory:
    """Predicts the step's memory by running it on fake tensors, for the spec's architecture or that
    of its device.

    plan  replaces the spec's checkpointing
    make  builds the step, as `bench.build.build` does
    """
    architecture = (
        spec.predict if spec.predict != "no" else _architecture(torch.device(spec.device))
    )
    left_out: list[str] = []
    with fake_device(architecture, left_out) as device:
        is_cuda = device.type == "cuda"
        known = {**KNOWN_WORKSPACES, **(HOPPER_WORKSPACES if architecture == "sm90" else {})}
        workspaces = CudaWorkspaces(architecture, known) if is_cuda else None
        tracker = StorageTracker(device, workspaces=workspaces)
        with tracker:
            on_device = dataclasses.replace(spec, device=str(device))
            track_step(on_device, device, tracker, plan=plan, make=make)
    memory = step_memory(tracker, tracker.allocations, caching=is_cuda)
    return dataclasses.replace(memory, left_out=tuple(left_out))


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    return "sm90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm80"


def track_step(
    spec: MemorySpec,
    device: torch.device,
    tracker: StorageTracker,
    *,
    around_forward_only: contextlib.AbstractContextManager[None] | None = None,
    plan: RecomputePlan | None = None,
    make: Make = build,
) -> Callable[[Around], None]:
    """Builds the step, runs forward without gradients and then whole steps, and labels their tensors
    in the tracker. Returns a function that runs one more step, each phase within a given context.

    Call it inside the tracker's context, so that the tracker sees eager operators. It cannot see
    inside compiled code; for a compiled step this function reports to it what is kept for backward.
    """
    with tracker.phase("build"):
        step, batch = make(spec, device, recompute=plan)
    phases = step.phases(batch, until=spec.phases)

    def one_step(around: Around) -> None:
        with step.precision.matmul_mode():
            for name, phase in phases.items():
                with around(name):
                    phase()

    for name, parameter in step.module.named_parameters():
        tracker.label([parameter], PARAMETERS, name=name)
    tracker.label([*step.module.buffers(), *tree_leaves(batch)], OTHER)
    if spec.compile == "off":
        watching = tracker.watching(step.module)
    else:
        watching = _reporting_kept(spec, step, tracker)
    with watching:
        with around_forward_only or contextlib.nullcontext(), tracker.phase(FORWARD_ONLY):
            _forward_only(step, batch)
        for _ in range(STEPS):
            one_step(functools.partial(_labelled_phase, step, tracker))
    return one_step


@contextlib.contextmanager
def _labelled_phase(step: TrainingStep, tracker: StorageTracker, name: str) -> Iterator[None]:
    """Runs a phase in the tracker, then labels gradients and optimizer state."""
    with tracker.phase(name):
        yield
    names: dict[Any, str] = {p: path for path, p in step.module.named_parameters()}
    for parameter, path in names.items():
        tracker.label([parameter.grad], GRADIENTS, name=path)
    for owner, state in step.optimizer.state.items():
        for key, value in state.items():
            tracker.label([value], STATE, name=f"{names.get(owner, '')} {key}")


def _forward_only(step: TrainingStep, batch: Sequence[Any]) -> None:
    """Runs forward without gradients, unless the network itself computes gradients, as for forces or
    a gradient penalty.
    """
    with step.precision.matmul_mode():
        try:
            with torch.no_grad():
                step.forward(*batch)
            return
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        step.forward(*batch)


@contextlib.contextmanager
def _reporting_kept(
    spec: MemorySpec, step: TrainingStep, tracker: StorageTracker
) -> Iterator[None]:
    """After each forward, reports to the tracker which tensors compiled code keeps for backward."""
    if not spec.kept_is_known:
        yield
        return
    from stepgauge.measure.memory.compiled import KeptByGraphs  # importing the compiler takes 2 s

    compute, kept = step.compute_loss, KeptByGraphs()

    def compute_loss(*batch: Any) -> Tensor:
        loss = compute(*batch)
        for tensor, place in kept.of(loss):
            tracker.held_for_backward(tensor, place.operator, place.module, place.line)
        return loss

    step.compute_loss = compute_loss
    with kept.noting():
        yield


def step_memory(
    tracker: StorageTracker, allocations: Sequence[Any], *, caching: bool
) -> StepMemory:
    """Returns the last step's timeline and the forward-only peak.

    caching  count bytes as the CUDA caching allocator does
    """
    forward_only = [phase for phase in tracker.phases if phase.name == FORWARD_ONLY]
    last_step = tracker.phases[-3:]
    assert [phase.name for phase in last_step] == ["forward", "backward", "optimizer"]
    return StepMemory(
        memory_timeline(allocations, last_step, caching=caching),
        memory_timeline(allocations, forward_only, caching=caching).peak.total,
    )
