"""Pipeline parallel training: each rank runs its actions of a checked schedule, one after another."""

import collections
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepgauge.parallel.communication.peer_memory import copies_reach
from stepgauge.parallel.counted_mean import Count, CountedMean
from stepgauge.parallel.data_parallel import DataParallel
from stepgauge.parallel.pipeline.clock import Clock
from stepgauge.parallel.pipeline.graphed import GraphedStage
from stepgauge.parallel.pipeline.host_lead import HostLead
from stepgauge.parallel.pipeline.interfaces import Exchange, Meta, StageOutputs, stage_inputs
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
from stepgauge.parallel.pipeline.transfers import Transfers, broadcast_object, send_to_next_stage
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

TRANSPORTS: Mapping[str, type[Transfers] | type[PeerTransfers]] = {
    "messages": Transfers,
    "copies": PeerTransfers,
}
Stages = Callable[[int], nn.Module] | Sequence[nn.Module]


class Pipeline:
    """The stages of this rank. `step` runs forward and backward of a whole batch, and nothing else.

        pipeline = Pipeline(stages, build("zbv", ranks=4, micro_batches=8), loss=F.cross_entropy)
        loss = pipeline.step((tokens,), targets=(targets,))  # .grad is the same as in one process

    stages    a list of modules, or a function that builds stage i and is called for this rank's
              stages only. The outputs of a stage are the arguments of the next
    schedule  is checked, and lowered if necessary. `lower` chooses where receives are posted
    loss      called with the last stage's outputs and the targets; returns the mean over a
              micro-batch. None: the last stage takes the targets after its inputs and returns the
              loss
    share     called with targets; returns how much they count in the mean loss, such as a number of
              tokens: either in total, or per sequence, which takes one call per step. None: all
              micro-batches count equally. A CountedMean also counts the targets of other ranks. The
              loss over no targets may be NaN, but its gradient times 0 must be 0
    tied      copies of one weight in several stages. Weights that modules of a list share are tied
              automatically
    reduce    called with a stage and its module when the stage's gradients of a step are complete,
              for data parallel
    weights   for sharded stages (see DataAxis): unshards a stage before its first action of a step
              and reshards it after the last
    group     the ranks of the pipeline; None: all ranks. Pipelines side by side, as in data
              parallel, must be created at the same time
    context   entered around every forward, such as autocast
    transport "copies" into the memory of the other ranks, on one machine; "messages" of the process
              group; "auto": copies between GPUs of one machine that reach each other's memory (peer
              access), otherwise messages
    recording keeps when each action ran, for `spans`
    graphs    records forward and backward of each stage and replays them, for example
              CudaGraphs(device)
    every_output  for outputs that only affect the loss in some steps: a gradient is sent for every
              output, zeros if the loss does not depend on it. False: gradients are sent for the
              outputs that the loss depends on when the pipeline is prepared

    Raises ScheduleError, a ValueError, if the schedule cannot run, has another number of stages or
    ranks, or differs between ranks.
    """

    _failed: Exchange | None = None  # has tensors of a step that raised; another would get them

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
        transport: str = "auto",
        recording: bool = False,
        graphs: Recorder | None = None,
        every_output: bool = False,
    ):
        self.schedule = _agreed_schedule(schedule, group, sharded=weights is not None)
        self._weights, self.rank = weights, dist.get_rank(group)
        self.modules = _local_modules(stages, self.schedule, self.rank)
        ties = tied if callable(stages) else with_shared(tied, stages)
        self.device = torch.device(device or _device_of(self.modules.values()))
        self._group, self._reduce, self._every_output = group, reduce, every_output
        self._mean = CountedMean(share) if callable(share) else share
        self.stages: dict[int, StageRunner] = {}
        for number, module in self.modules.items():
            stage = Stage(
                module,
                context=context,
                splits=self.schedule.splits(number),
                loss=loss if number == self.schedule.num_stages - 1 else None,
                unsplit=_shared_layers(self.modules),
            )
            self.stages[number] = stage if graphs is None else self._graphed(number, stage, graphs)
        self._transfers = _transfers(transport, self.schedule, group, self.device)
        self._tied = TiedWeights(ties, self.modules, self.schedule, group)
        self.metas: dict[int, list[Meta]] = {}  # inputs by stage, set by the first step
        self.clock = Clock(self.device) if recording else None

    def _graphed(self, number: int, stage: Stage, graphs: Recorder) -> GraphedStage:
        return GraphedStage(stage, graphs, self.schedule.in_flight(number), self.device)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, inputs: Batch, targets: Batch = (), *, batches: int = 1) -> Tensor | None:
        """Adds the gradients of the batch's mean loss to .grad. Returns the loss on the last stage's
        rank, None elsewhere.

        Every rank passes the whole batch; only the ranks with the first and the last stage read it.
        All tensors are split into micro-batches along their first dimension.

        batches  loss and gradients are divided by this number, to average over several steps

        Raises ValueError if the batch is not a multiple of the number of micro-batches, and RuntimeError
        after a step that raised.
        """
        self._require_no_failed_step()
        step = self._begin_step(inputs, targets, batches=batches)
        self._failed = self._transfers  # until the step is done
        for action in self.schedule.ranks[self.rank]:
            try:
                step.run(action)
            except Exception as error:
                error.add_note(f"in {action} on rank {self.rank} of the pipeline")
                raise
        self._transfers.finish()
        self._tied.finish()
        for number in sorted(self._tied.stages & self.modules.keys()):
            if self._reduce is not None:
                self._reduce(number, self.modules[number])
        self._failed = None
        return step.loss

    def _require_no_failed_step(self) -> None:
        if self._failed is not None:
            remedy = "call close()" if self._failed.can_restart else "create a new pipeline"
            raise RuntimeError(
                f"the last step of this pipeline raised, and its tensors may still be on their way: "
                f"{remedy} on all ranks"
            )

    def _begin_step(self, inputs: Batch, targets: Batch, *, batches: int) -> PipelineStep:
        if self.clock:
            self.clock.begin()
        input_parts = _split(inputs, self.schedule.num_micro_batches)
        target_parts = _split(targets, self.schedule.num_micro_batches)
        self._prepare(input_parts[0], target_parts[0])
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
            inputs=input_parts,
            targets=target_parts,
            loss_weights=self._loss_weights(targets) / batches,
            reduce=self._reduce_early,
            weights=self._weights,
            clock=self.clock,
            lead=HostLead(self.device),
        )

    def _reduce_early(self, stage: int, module: nn.Module) -> None:
        """Reduces a stage while other stages still compute, unless it has tied weights: their
        gradients are complete only at the end of the step.
        """
        if self._reduce is not None and stage not in self._tied.stages:
            self._reduce(stage, module)

    @torch.no_grad()
    def evaluate(self, inputs: Batch, targets: Batch = ()) -> Tensor | None:
        """Returns the loss of a batch of any size on the last stage's rank, None elsewhere. Runs one
        stage after the other. Every rank passes the whole batch.
        """
        last, values = self.schedule.num_stages - 1, on_device(inputs, self.device)
        for number in range(last + 1):
            stage_targets = on_device(targets, self.device) if number == last else ()
            if number in self.stages:
                values = self.stages[number].evaluate(values, stage_targets)
            values = self._pass_on(number, values)
        return values[0] if last in self.stages else None

    def _pass_on(self, number: int, outputs: list[Tensor]) -> list[Tensor]:
        """Returns a stage's outputs on the rank of the next stage."""
        if not self.schedule.crosses(number, number + 1):
            return outputs
        return send_to_next_stage(self.schedule.rank_of, number, outputs, self._group, self.device)

    def _loss_weights(self, targets: Batch) -> Tensor:
        """Returns the weight of each micro-batch in the mean loss of the batch. Only the last stage's
        rank uses them.
        """
        parts = self.schedule.num_micro_batches
        if self._mean is None or self.schedule.num_stages - 1 not in self.stages:
            return torch.full((parts,), 1.0 / parts, dtype=torch.float64, device=self.device)
        return self._mean.weights_of_equal(targets, parts, self.device)

    def clip(self, max_norm: float) -> Tensor:
        """Clips the norm of all gradients of the pipeline. Returns the norm before, in the gradients'
        dtype or float32, whichever is wider.
        """
        repeated = self._tied.repeated
        parameters = self.parameters()
        counted = [p.grad for p in parameters if p.grad is not None and id(p) not in repeated]
        total = torch.nn.utils.get_total_norm(counted)
        # float64, because stages may have different dtypes and the squares are summed over ranks
        squared = total.to(self.device, torch.float64).square()
        dist.all_reduce(squared, group=self._group)
        norm = squared.sqrt().to(torch.promote_types(total.dtype, torch.float32))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @property
    def repeated(self) -> set[int]:
        """The ids of tied parameters that a norm must not count, because another copy is counted."""
        return self._tied.repeated

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all stages of this rank, without duplicates."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return list(dict.fromkeys(parameters))

    @property
    def spans(self) -> list[tuple[Action, float, float]]:
        """The computations of the last step, each with its start and end in ms from the beginning of
        the step. Raises ValueError if the pipeline does not record.
        """
        if self.clock is None:
            raise ValueError("recording is False; only a pipeline with recording=True has spans")
        return self.clock.spans()

    @contextlib.contextmanager
    def exchanging_by(self, transfers: Exchange) -> Iterator[None]:
        """Steps in the context exchange tensors with other ranks by `transfers`. Raises RuntimeError before
        the first step, which prepares the usual ones.
        """
        if not self.metas:
            raise RuntimeError("the pipeline has not run a step, which prepares its transfers")
        usual, self._transfers = self._transfers, transfers
        try:
            yield
        finally:
            self._transfers = usual

    def close(self) -> None:
        """Restores the modules. The next step prepares the pipeline again."""
        self.metas = {}
        if self._failed is not None and self._failed.can_restart:
            self._failed = None
        for stage in self.stages.values():
            stage.close()

    # -- before the first step, and before one with other shapes ---------------------------------

    def _prepare(self, inputs: Batch, targets: Batch) -> None:
        """Learns the tensors between the stages from one micro-batch, and prepares transfers and
        recordings for them. Does nothing if the inputs have the same shapes as before.
        """
        batch = [Meta.of(tensor) for tensor in inputs]
        if self.metas.get(0) == batch:
            return
        all_outputs = self._run_once(inputs, targets)
        self.metas = stage_inputs(batch, all_outputs, every_output=self._every_output)
        self._transfers.prepare(_messages(self.metas))
        last = self.schedule.num_stages - 1
        for number, stage in self.stages.items():
            if isinstance(stage, GraphedStage):
                stage_targets = on_device(targets, self.device) if number == last else ()
                outputs = all_outputs[last].outputs if number == last else self.metas[number + 1]
                stage.record(self.metas[number], outputs, stage_targets)

    def _run_once(self, inputs: Batch, targets: Batch) -> dict[int, StageOutputs]:
        """Runs all stages, one after the other, on one micro-batch. Returns the description of each
        stage's outputs, on all ranks.
        """
        rank_of, last = self.schedule.rank_of, self.schedule.num_stages - 1
        values, requires_grad = on_device(inputs, self.device), [False] * len(inputs)
        all_outputs: dict[int, StageOutputs] = {}
        for number in range(last + 1):
            outputs = None
            if number in self.stages:
                stage_targets = on_device(targets, self.device) if number == last else ()
                outputs, values = self.stages[number].prepare(values, requires_grad, stage_targets)
            all_outputs[number] = broadcast_object(outputs, rank_of[number], self._group)
            requires_grad = [meta.requires_grad for meta in all_outputs[number].outputs]
            values = self._pass_on(number, values)
        return all_outputs


def _local_modules(stages: Stages, schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    if not callable(stages) and len(stages) != schedule.num_stages:
        raise ScheduleError(
            f"there are {len(stages)} modules; the schedule has {schedule.num_stages} stages"
        )
    build = stages if callable(stages) else stages.__getitem__
    return {stage: build(stage) for stage in schedule.stages(rank)}


def _agreed_schedule(
    schedule: Schedule, group: dist.ProcessGroup | None, *, sharded: bool
) -> Schedule:
    """Returns the schedule, lowered. Raises ScheduleError if it cannot run.

    Also raises, on all ranks, if ranks have different schedules or lower them differently, because
    they would wait for each other. This is checked first: if only one rank's schedule could not run,
    only that rank would raise.
    """
    text = f"{to_text(schedule)} {sharded}"
    hashes = gathered_objects(hashlib.sha256(text.encode()).hexdigest(), group)
    for rank, other in enumerate(hashes):
        if other != hashes[0]:
            raise ScheduleError(f"the schedule of rank {rank} differs from that of rank 0")
    lowered = lower(schedule, sharded=schedule.rank_of if sharded else ())
    return check(lowered, ranks=dist.get_world_size(group)).schedule


def _shared_layers(modules: Mapping[int, nn.Module]) -> set[nn.Module]:
    """Returns the layers that occur in several stages of this rank."""
    counts = collections.Counter(layer for module in modules.values() for layer in module.modules())
    return {layer for layer, count in counts.items() if count > 1}


def _transfers(
    transport: str, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device
) -> Exchange:
    if transport == "auto":
        transport = "copies" if copies_reach(group, device) else "messages"
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; choose auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[transport](schedule, group, device)


def _messages(metas: Mapping[int, list[Meta]]) -> dict[Channel, list[Meta]]:
    """Returns the tensors that travel on each channel, from the inputs of each stage."""
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
    if not batch:
        return [[]] * parts
    return [list(part) for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True)]


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    device = next((p.device for module in modules for p in module.parameters()), None)
    return device or torch.device("cpu")
