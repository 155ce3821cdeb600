"""A MemorySpec's step under a tracker: on real tensors as it is told, or on tensors without memory
as a prediction.
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
OF_HOPPER: Mapping[str, Callable[[Any], int]] = {
    "stepgauge::flash_attention_backward": libraries.backward_bytes
}
STEPS = 2  # the optimizer makes its state in the first; the second is like every later one
Make = Callable[..., tuple[TrainingStep, Sequence[Any]]]  # as bench.build.build
Around = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """One run under a tracker: the timeline of its last step, the peak of the forward pass without
    gradients, and sentences on what a prediction has left out.
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
    """The same step on tensors without memory, for the device that is asked for or the one it runs
    on; with a plan in place of the spec's checkpointing, and as `make` builds it.
    """
    architecture = (
        spec.predict if spec.predict != "no" else _architecture(torch.device(spec.device))
    )
    left_out: list[str] = []
    with fake_device(architecture, left_out) as device:
        is_cuda = device.type == "cuda"
        known = {**KNOWN_WORKSPACES, **(OF_HOPPER if architecture == "sm90" else {})}
        workspaces = CudaWorkspaces(architecture, known) if is_cuda else None
        tracker = StorageTracker(device, workspaces=workspaces)
        with tracker:
            here = dataclasses.replace(spec, device=str(device))
            track_step(here, device, tracker, plan=plan, make=make)
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
    """Builds the step, runs forward without gradients and then whole steps, and tells whose is what.
    Gives what runs one step more, each phase within a context.

    Eager operators are seen by entering the tracker around this; of a compiled step it is told
    what backward keeps.
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
    watching = (
        tracker.watching(step.module)
        if spec.compile == "off"
        else _told_what_is_kept(spec, step, tracker)
    )
    with watching:
        with around_forward_only or contextlib.nullcontext(), tracker.phase(FORWARD_ONLY):
            _forward_only(step, batch)
        for _ in range(STEPS):
            one_step(functools.partial(_labelled_phase, step, tracker))
    return one_step


@contextlib.contextmanager
def _labelled_phase(step: TrainingStep, tracker: StorageTracker, name: str) -> Iterator[None]:
    """A phase after which the tracker is told which storages are gradients and optimizer state."""
    with tracker.phase(name):
        yield
    names: dict[Any, str] = {p: path for path, p in step.module.named_parameters()}
    for parameter, path in names.items():
        tracker.label([parameter.grad], GRADIENTS, name=path)
    for owner, state in step.optimizer.state.items():
        for key, value in state.items():
            tracker.label([value], STATE, name=f"{names.get(owner, '')} {key}")


def _forward_only(step: TrainingStep, batch: Sequence[Any]) -> None:
    """Without gradients, unless the network takes gradients itself: forces, a gradient penalty."""
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
def _told_what_is_kept(
    spec: MemorySpec, step: TrainingStep, tracker: StorageTracker
) -> Iterator[None]:
    """After each forward the tracker is told what compiled code keeps for backward."""
    if not spec.kept_is_told:
        yield
        return
    from stepgauge.measure.memory.compiled import KeptByGraphs  # imports the compiler: two seconds

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
    """The last step's timeline and the forward-only peak; `caching` counts bytes as the CUDA
    allocator does.
    """
    alone = [phase for phase in tracker.phases if phase.name == FORWARD_ONLY]
    last = tracker.phases[-3:]
    assert [phase.name for phase in last] == ["forward", "backward", "optimizer"]
    return StepMemory(
        memory_timeline(allocations, last, caching=caching),
        memory_timeline(allocations, alone, caching=caching).peak.total,
    )
