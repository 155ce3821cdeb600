"""Pipeline parallel training: each rank runs its list of a checked schedule, action by action."""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.communication.peer_memory import on_one_machine
from stepgauge.parallel.counted_mean import Count, CountedMean
from stepgauge.parallel.data_parallel import DataParallel
from stepgauge.parallel.pipeline.between import Given, Meta, inputs_of
from stepgauge.parallel.pipeline.clock import Clock
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.peer_transfers import PeerTransfers
from stepgauge.parallel.pipeline.stage import Stage
from stepgauge.parallel.pipeline.step import (
    Batch,
    PipelineStep,
    StageRunner,
    StageWeights,
    on_device,
)
from stepgauge.parallel.pipeline.tied import Tie, TiedWeights, with_shared
from stepgauge.parallel.pipeline.transfers import Transfers, handed, shared
from stepgauge.runtime.recording import Recorder
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.pipeline import (
    Action,
    Channel,
    Schedule,
    ScheduleError,
    check,
    lower,
    to_text,
)
from stepgauge.spec.plan.pipeline.lower import AHEAD

TRANSPORTS: Mapping[str, type[Transfers] | type[PeerTransfers]] = {
    "messages": Transfers,
    "copies": PeerTransfers,
}
Stages = Callable[[int], nn.Module] | Sequence[nn.Module]


class Pipeline:
    """The stages of this rank, and the step over a whole batch: forward, backward and nothing else.

        pipeline = Pipeline(stages, build("zbv", ranks=4, micro_batches=8), loss=F.cross_entropy)
        loss = pipeline.step((tokens,), targets=(targets,))  # .grad is as after one process's

    stages    a list of modules, or a function that builds stage i: only a rank's own are built. The
              tensors that one gives are the arguments of the next
    schedule  checked here; one that cannot run is refused with ScheduleError. Lowered if it is not
    loss      of the last stage's outputs and the targets: the mean over a micro-batch. None: the
              last stage takes the targets after its inputs, and gives the loss
    share     of targets: what they count in the mean, such as a number of tokens, in all or of each
              sequence, which is one call a step. By default all count alike. A CountedMean counts
              those of other ranks too
    tied      copies of one weight in several stages; weights that modules of a list share are tied
    reduce    called with stage and module when its gradients of a step are there: data parallel
    weights   of stages that are sharded, as DataAxis has it: whole from a stage's first action of a
              step to its last, by the schedule's UNSHARD and RESHARD
    group     whose ranks are the pipeline's; None: all. Pipelines beside each other, as in data
              parallel, are made at the same time
    context   around every forward, such as autocast
    ahead     where receives are posted, as `lower` has it, if the schedule is not lowered
    transport "copies" into the memory of the other ranks, on one machine, or "messages" of the
              process group; "auto": copies between GPUs of one machine
    recording keeps when each action ran: `spans`
    graphs    records forward and backward of each stage, to be replayed: CudaGraphs(device)
    every_output  for outputs that the loss depends on in some steps only: a gradient comes back for
              each that has one in any, zeros in the other steps. False: for those of the first step

    Raises ValueError for another number of stages or ranks than the schedule's, and for ranks that
    have different schedules.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        *,
        loss: Callable[..., Tensor] | None = None,
        share: Count | CountedMean | None = None,
        tied: Sequence[Tie] = (),
        reduce: Callable[[int, nn.Module], None] | None = None,
        weights: StageWeights | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        ahead: int = AHEAD,
        transport: str = "auto",
        recording: bool = False,
        graphs: Recorder | None = None,
        every_output: bool = False,
    ):
        self.schedule = _agreed(schedule, group, ahead=ahead, sharded=weights is not None)
        self._weights, self.rank = weights, dist.get_rank(group)
        self.modules = _own_modules(stages, self.schedule, self.rank)
        ties = tied if callable(stages) else with_shared(tied, stages)
        self.device = torch.device(device or _device_of(self.modules.values()))
        self._group, self._reduce, self._every_output = group, reduce, every_output
        self._mean = CountedMean(share) if callable(share) else share
        make = functools.partial(
            self._stage,
            context=context,
            loss=loss,
            graphs=graphs,
            whole=_shared_layers(self.modules),
        )
        self.stages: dict[int, StageRunner] = {
            number: make(number, module) for number, module in self.modules.items()
        }
        self._transfers = _transfers(transport, self.schedule, group, self.device)
        self._tied = TiedWeights(ties, self.modules, self.schedule, group)
        self.metas: dict[int, list[Meta]] = {}  # what goes into each stage, after the first step
        self.clock = Clock(self.device) if recording else None

    def _stage(
        self,
        number: int,
        module: nn.Module,
        *,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        loss: Callable[..., Tensor] | None,
        graphs: Recorder | None,
        whole: Collection[nn.Module],
    ) -> StageRunner:
        stage = Stage(
            module,
            context=context,
            splits=self.schedule.splits(number),
            loss=loss if number == self.schedule.num_stages - 1 else None,
            recorded=graphs is not None,
            whole=whole,
        )
        if graphs is None:
            return stage
        return GraphedStage(stage, graphs, self.schedule.in_flight(number), self.device)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, inputs: Batch, targets: Batch = (), *, batches: int = 1) -> Tensor | None:
        """Adds the gradients of the batch's mean loss to .grad; the loss on the last stage's rank,
        None elsewhere. Both are divided by the number of `batches` whose gradients add up.

        Every rank gives the whole batch, and those with the first and the last stage read it. All
        tensors are split along their first dimension. Raises ValueError for a batch that the
        micro-batches do not divide.
        """
        step = self._begin_step(inputs, targets, batches=batches)
        for action in self.schedule.ranks[self.rank]:
            try:
                step.act(action)
            except Exception as error:
                error.add_note(f"in {action} on rank {self.rank} of the pipeline")
                raise
        self._transfers.finish()
        self._tied.finish()
        for number in sorted(self._tied.stages & self.modules.keys()):
            if self._reduce is not None:
                self._reduce(number, self.modules[number])
        return step.loss

    def _begin_step(self, inputs: Batch, targets: Batch, *, batches: int) -> PipelineStep:
        if self.clock:
            self.clock.begin()
        parts = _split(inputs, self.schedule.num_micro_batches)
        answers = _split(targets, self.schedule.num_micro_batches)
        self._prepare(parts[0], answers[0])
        for module in self.modules.values():
            if isinstance(module, DataParallel):
                module.prepare_local_backward()
        self._tied.begin()
        for stage in self.stages.values():
            stage.begin()
        return PipelineStep(
            schedule=self.schedule,
            stages=self.stages,
            metas=self.metas,
            transfers=self._transfers,
            device=self.device,
            inputs=parts,
            targets=answers,
            shares=self._shares(targets) / batches,
            reduce=self._reduce_early,
            weights=self._weights,
            clock=self.clock,
        )

    def _reduce_early(self, stage: int, module: nn.Module) -> None:
        """While other stages still compute, unless the stage waits for copies of its weights."""
        if self._reduce is not None and stage not in self._tied.stages:
            self._reduce(stage, module)

    @torch.no_grad()
    def evaluate(self, inputs: Batch, targets: Batch = ()) -> Tensor | None:
        """The loss of a batch of any size on the last stage's rank, None elsewhere: one stage after
        the other. Every rank gives the whole batch.
        """
        last, values = self.schedule.num_stages - 1, on_device(inputs, self.device)
        for number in range(last + 1):
            answers = on_device(targets, self.device) if number == last else ()
            if number in self.stages:
                values = self.stages[number].evaluate(values, answers)
            if self.schedule.crosses(number, number + 1):
                values = handed(self.schedule.rank_of, number, values, self._group, self.device)
        return values[0] if last in self.stages else None

    def _shares(self, targets: Batch) -> Tensor:
        """Of each micro-batch, its part of the whole batch's mean. The last stage's rank reads them."""
        parts = self.schedule.num_micro_batches
        if self._mean is None or self.schedule.num_stages - 1 not in self.stages:
            return torch.full((parts,), 1.0 / parts, device=self.device)
        return self._mean.weights_of_equal(targets, parts, self.device)

    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients by the norm of the whole pipeline's; gives the norm before, in the
        gradients' type or float32, whichever is wider.
        """
        repeated = self._tied.repeated
        parameters = list(self.parameters())
        own = [p.grad for p in parameters if p.grad is not None and id(p) not in repeated]
        total = torch.nn.utils.get_total_norm(own)
        # in float64: stages may have other types, and the squares of all ranks add up
        squared = total.to(self.device, torch.float64).square()
        dist.all_reduce(squared, group=self._group)
        norm = squared.sqrt().to(torch.promote_types(total.dtype, torch.float32))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @property
    def repeated(self) -> set[int]:
        """The ids of parameters whose gradient another one's stands for, in a norm."""
        return self._tied.repeated

    def parameters(self) -> list[nn.Parameter]:
        """Of all stages of this rank, each once."""
        found = (p for module in self.modules.values() for p in module.parameters())
        return list(dict.fromkeys(found))

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """Each computation of the last step with its start and end in ms from the step's begin.

        Raises ValueError where the pipeline does not record.
        """
        if self.clock is None:
            raise ValueError("recording is False; a pipeline that records has spans")
        return self.clock.spans()

    def close(self) -> None:
        """Gives the modules back as they were."""
        self.metas = {}
        for stage in self.stages.values():
            stage.close()

    # -- before the first step, and before one with other shapes ---------------------------------

    def _prepare(self, inputs: Batch, targets: Batch) -> None:
        first = [Meta.of(tensor) for tensor in inputs]
        if self.metas.get(0) == first:
            return
        given = self._given(inputs, targets)
        self.metas = inputs_of(first, given, every_output=self._every_output)
        self._transfers.prepare(_messages(self.metas))
        last = self.schedule.num_stages - 1
        for number, stage in self.stages.items():
            if isinstance(stage, GraphedStage):
                answers = on_device(targets, self.device) if number == last else ()
                outputs = given[last].outputs if number == last else self.metas[number + 1]
                stage.record(self.metas[number], outputs, answers)

    def _given(self, inputs: Batch, targets: Batch) -> dict[int, Given]:
        """What each stage gives for a micro-batch, found by one after the other."""
        owners, last = self.schedule.rank_of, self.schedule.num_stages - 1
        values, trained, given = on_device(inputs, self.device), [False] * len(inputs), {}
        for number in range(last + 1):
            found = None
            if number in self.stages:
                answers = on_device(targets, self.device) if number == last else ()
                found, values = self.stages[number].prepare(values, trained, answers)
            given[number] = shared(found, owners[number], self._group)
            trained = [meta.is_trained for meta in given[number].outputs]
            if self.schedule.crosses(number, number + 1):
                values = handed(owners, number, values, self._group, self.device)
        return given


def _own_modules(stages: Stages, schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    if not callable(stages) and len(stages) != schedule.num_stages:
        raise ScheduleError(
            f"there are {len(stages)} modules; the schedule has {schedule.num_stages} stages"
        )
    build = stages if callable(stages) else stages.__getitem__
    return {stage: build(stage) for stage in schedule.stages(rank)}


def _agreed(
    schedule: Schedule, group: dist.ProcessGroup | None, *, ahead: int, sharded: bool
) -> Schedule:
    """The schedule, lowered, if it can run. Raises ScheduleError for another, and on all ranks where
    they have different ones or lower them in different ways: they would wait for each other. That is
    asked first, since one rank alone may refuse its own.
    """
    text = f"{to_text(schedule)}{ahead} {sharded}"
    told = gathered_objects(hashlib.sha256(text.encode()).hexdigest(), group)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise ScheduleError(f"the schedule of rank {rank} is another one than that of rank 0")
    lowered = lower(schedule, ahead=ahead, sharded=schedule.rank_of if sharded else ())
    return check(lowered, ranks=dist.get_world_size(group)).schedule


def _shared_layers(modules: Mapping[int, nn.Module]) -> set[nn.Module]:
    """Those that are in several stages of this rank."""
    stages = collections.Counter(each for module in modules.values() for each in module.modules())
    return {layer for layer, number in stages.items() if number > 1}


def _transfers(
    transport: str, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device
) -> Transfers | PeerTransfers:
    if transport == "auto":
        copies = device.type == "cuda" and on_one_machine(group)
        transport = "copies" if copies else "messages"
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; choose auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[transport](schedule, group, device)


def _messages(metas: Mapping[int, list[Meta]]) -> dict[Channel, list[Meta]]:
    """What travels on each channel, by the inputs of each stage."""
    messages: dict[Channel, list[Meta]] = {}
    for stage, inputs in metas.items():
        if stage > 0:
            messages[Channel(stage - 1, stage)] = inputs
            messages[Channel(stage, stage - 1)] = [meta for meta in inputs if meta.has_gradient]
    return messages


def _split(batch: Batch, parts: int) -> list[Batch]:
    for tensor in batch:
        if len(tensor) % parts:
            raise ValueError(f"the batch is {len(tensor)}; {parts} micro-batches must divide it")
    columns: list[Sequence[Tensor]] = [tensor.chunk(parts) for tensor in batch]
    return [list(row) for row in zip(*columns, strict=True)] if batch else [[]] * parts


def _device_of(modules: Any) -> torch.device:
    found = next((p.device for module in modules for p in module.parameters()), None)
    return found or torch.device("cpu")
