"""Layouts by the thousand, by closed formula: what a step takes and needs, near enough to tell
which are worth a simulation.

A micro-batch takes what its terms take on the fullest stage; a pipeline adds its bubble, the data
axis what backward cannot hide.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from stepgauge.cost.data_axis.buckets import most_owned
from stepgauge.cost.host import launch_costs
from stepgauge.cost.memory.peak import Memory, stage_memory, step_memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Arithmetic
from stepgauge.cost.rates.contention import DEFAULT_SLOWDOWN
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import GLOO, NCCL, Prices
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.model_fields import divisors
from stepgauge.spec.plan.pipeline.schedules import stages_per_rank
from stepgauge.spec.plan.tensor import overlaps
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.units import ceil_div

SCHEDULES = ("1f1b", "interleaved", "zbv")
CHECKPOINTING = ("none", "selective", "blocks")
MOST_ON_A_CPU = 64  # sequences of a micro-batch, where no memory limits them
# Of a sequence on each rank that shares it: with fewer, each message waits for little computing.
LEAST_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with its micro-batch and checkpointing; a batch of `accumulation` passes."""

    layout: Layout
    micro_batch: int
    accumulation: int
    checkpointing: str


@dataclasses.dataclass(frozen=True)
class Screened:
    candidate: Candidate
    step_us: float
    memory: Memory


def candidates(spec: PlanSpec, gpus_per_node: int) -> Iterator[Candidate]:
    """All that fill the GPUs and divide batch, heads, sequences and blocks: a tensor axis within a
    node.
    """
    model = spec.network
    for tensor in divisors(spec.gpus):
        if tensor > gpus_per_node or model.num_heads % tensor or model.d_ff % tensor:
            continue
        if model.context_length % tensor or model.kv_heads % min(tensor, model.kv_heads):
            continue
        for pipeline in divisors(spec.gpus // tensor):
            if pipeline > model.num_layers:
                continue
            replicas = spec.gpus // tensor // pipeline
            for data in divisors(replicas):
                if spec.global_batch % data == 0:
                    yield from _of_axes(spec, tensor, pipeline, data, replicas // data)


def _of_axes(
    spec: PlanSpec, tensor: int, pipeline: int, data: int, context: int
) -> Iterator[Candidate]:
    rank_batch = spec.global_batch // data
    wrappers = ("bucketed", "zero1", "zero2", "zero3") if data * context > 1 else ("none",)
    schedules = [
        name for name in SCHEDULES if stages_per_rank(name) * pipeline <= spec.network.num_layers
    ]
    for wrapper in wrappers:
        for schedule in schedules if pipeline > 1 else ("",):
            if schedule == "zbv" and (tensor > 1 or WRAPPERS[wrapper].shards("weights")):
                continue
            for micro_batch in _micro_batches(spec, rank_batch):
                passes = rank_batch // micro_batch
                if pipeline > 1 and not _runs(schedule, pipeline, passes):
                    continue
                if math.gcd(micro_batch, context) > 1:  # ranks have sequences of their own first
                    continue
                for ulysses in _exchanges(spec, tensor, context):
                    layout = Layout(
                        data=data, wrapper=wrapper, context=context, ulysses=ulysses,
                        tensor=tensor, pipeline=pipeline, schedule=schedule,
                        microbatches=passes if pipeline > 1 else 1,
                        overlap=_hides(spec, micro_batch, tensor, context),
                    )  # fmt: skip
                    for kept in CHECKPOINTING:
                        yield Candidate(layout, micro_batch, 1 if pipeline > 1 else passes, kept)


def _exchanges(spec: PlanSpec, tensor: int, context: int) -> Iterator[bool]:
    """How ranks may share a sequence: by a ring of keys, which is our attention's, or by an exchange
    of heads; none where they would have too few tokens each to be worth it.
    """
    model = spec.network
    if context == 1:
        yield False
        return
    if model.context_length < LEAST_TOKENS * context:
        return
    if model.attention == "triton" and model.context_length % (2 * context * tensor) == 0:
        yield False
    if model.context_length % (context * tensor) == 0 and model.kv_heads % (context * tensor) == 0:
        yield True


def _hides(spec: PlanSpec, micro_batch: int, tensor: int, context: int) -> bool:
    """Whether what the tensor axis sends runs beside products: on GPUs, where it is large enough."""
    itemsize = Arithmetic.of(spec.precision, is_compiled=spec.compile != "off").activation_bytes
    tokens = micro_batch * spec.network.context_length // context
    stream = tokens * spec.network.d_model * itemsize
    return tensor > 1 and spec.device != "cpu" and overlaps(stream, tensor)


def _runs(schedule: str, pipeline: int, micro_batches: int) -> bool:
    """Fewer micro-batches than stages leave ranks idle; interleaved ones come in whole rounds."""
    return micro_batches >= pipeline and (
        schedule != "interleaved" or micro_batches % pipeline == 0
    )


def _micro_batches(spec: PlanSpec, rank_batch: int) -> list[int]:
    """All that divide the batch of a rank: a batch of 25 is 25 passes of one without them."""
    most = MOST_ON_A_CPU if spec.device == "cpu" else rank_batch
    return [size for size in divisors(rank_batch) if size <= most]


class Screen:
    """Candidates on a machine. What depends on share and checkpointing alone is computed once."""

    def __init__(self, spec: PlanSpec, machine: CalibratedMachine):
        self.spec, self.machine = spec, machine
        self._shares = functools.cache(self._share)
        self._prices = functools.cache(self._priced)
        self._times = functools.cache(self._timed)
        self._hosts = functools.cache(self._launched)
        self._most_owned = functools.cache(most_owned)

    def of(self, candidate: Candidate) -> Screened:
        """Raises ValueError for what the machine does not know."""
        layout, layers = candidate.layout, self.spec.network.num_layers
        stage = self._stage(candidate, range(ceil_div(layers, layout.pipeline)))
        prices = self._prices(layout.tensor, layout.data, layout.context, layout.pipeline)
        forward, backward = self._times(stage, prices)
        bubble = _bubble(layout.schedule, layout.pipeline, forward, backward)
        if layout.pipeline > 1:
            # the last has the head, which may take longer than blocks
            last = self._stage(candidate, range(layers - layers // layout.pipeline, layers))
            forward, backward = max((forward, backward), self._times(last, prices), key=sum)
            memory = stage_memory(stage, layout)
        else:
            memory = step_memory(stage, layout, accumulates=candidate.accumulation > 1)
        passes = layout.microbatches * candidate.accumulation
        exposed, slowed = self._data_us(stage, prices, layout, forward, backward, passes)
        update = prices.us(stage.optimizer(self._updated(stage, layout)))
        each = max(forward + backward, self._hosts(stage, prices))
        step_us = passes * each + bubble + exposed + slowed + update
        return Screened(candidate, step_us, memory)

    def _stage(self, candidate: Candidate, blocks: range) -> StepOperations:
        """These blocks as a rank of the candidate has them."""
        layout = candidate.layout
        return self._shares(
            candidate.micro_batch,
            layout.tensor,
            layout.overlap,
            layout.context,
            layout.ulysses,
            candidate.checkpointing,
            layout.gathers_weights,
            blocks,
        )

    def _updated(self, stage: StepOperations, layout: Layout) -> float:
        """Parameters that a rank's optimizer steps."""
        wrapper = WRAPPERS[layout.wrapper]
        if wrapper.shards("weights"):
            return stage.num_parameters / layout.num_replicas
        if wrapper.shards("optimizer state"):
            return self._most_owned(stage, layout.num_replicas)
        return stage.num_parameters

    def _timed(self, stage: StepOperations, prices: Prices) -> tuple[float, float]:
        """Microseconds of a micro-batch."""
        return prices.total_us(stage.forward()), prices.total_us(stage.backward())

    def _launched(self, stage: StepOperations, prices: Prices) -> float:
        """Microseconds of the host for a micro-batch, which it may need longer for than the device."""
        host = launch_costs(stage.spec, prices.machine, prices.layout)
        return sum(host[phase].us(len(stage.blocks)) for phase in ("forward", "backward"))

    def _data_us(
        self, stage: StepOperations, prices: Prices, layout: Layout, forward: float,
        backward: float, passes: int,
    ) -> tuple[float, float]:  # fmt: skip
        """What the data axis adds: while nothing computes, and by slowing down what does."""
        if layout.num_replicas == 1:
            return 0.0, 0.0
        numel, arithmetic = stage.num_parameters, stage.arithmetic

        def sent(operation: str, itemsize: int, parts: int) -> float:
            nbytes = numel * itemsize / parts
            return parts * prices.collective(operation, nbytes, "data").us

        wrapper = WRAPPERS[layout.wrapper]
        if wrapper.shards("weights") and layout.pipeline > 1:
            units = len(stage.blocks)
            whole = [
                sent(op, arithmetic.weight_bytes, units) for op in ("all_gather", "reduce_scatter")
            ]
            return passes / layout.microbatches * sum(whole), 0.0
        if wrapper.shards("weights"):
            units = len(stage.blocks)
            gather = sent("all_gather", arithmetic.activation_bytes, units)
            reduce = sent("reduce_scatter", arithmetic.activation_bytes, units)
            over = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
            beside = min(gather, forward) + min(gather + reduce, backward)
            return passes * over, passes * beside * (1 - 1 / DEFAULT_SLOWDOWN.kernel)
        buckets = max(
            1, round(numel * arithmetic.weight_bytes / (DataParallelSpec.bucket_mb * 1e6))
        )
        operation = "reduce_scatter" if wrapper.shards("gradients") else "all_reduce"
        gradients = sent(operation, arithmetic.weight_bytes, buckets)
        hidden = backward * (buckets - 1) / buckets if layout.pipeline == 1 else 0.0
        over, beside = max(0.0, gradients - hidden), min(gradients, hidden)
        if wrapper.shards("optimizer state"):
            over += sent("all_gather", arithmetic.weight_bytes, 4)
        return over, beside * (1 - 1 / DEFAULT_SLOWDOWN.kernel)

    def _share(
        self,
        batch: int,
        tensor: int,
        overlap: bool,
        context: int,
        ulysses: bool,
        checkpointing: str,
        gathered: bool,
        blocks: range,
    ) -> StepOperations:
        """A stage of so many blocks. The first has the embedding and holds the most micro-batches."""
        spec = self.spec
        work = WorkSpec(
            model=spec.model, size=spec.size, batch=batch, precision=spec.precision,
            compile=spec.compile, optimizer=spec.optimizer, checkpointing=checkpointing,
            device=spec.device,
        )  # fmt: skip
        return StepOperations(
            work,
            NetworkPart(
                batch=batch, tensor=tensor, overlap=overlap, context=context, ulysses=ulysses,
                blocks=blocks, gathered=gathered,
            ),
        )  # fmt: skip

    def _priced(self, tensor: int, data: int, context: int, pipeline: int) -> Prices:
        layout = Layout(
            tensor=tensor, data=data, context=context, pipeline=pipeline,
            wrapper="naive" if data * context > 1 else "none",
            schedule="1f1b" if pipeline > 1 else "",
        )  # fmt: skip
        return Prices(self.machine, layout, GLOO if self.spec.device == "cpu" else NCCL)


def _bubble(schedule: str, ranks: int, forward: float, backward: float) -> float:
    """Idle time of a rank: (p-1)(F + I + W), of two stages a rank half of it; of zbv the way down
    alone (spec/plan/pipeline/schedules.py).
    """
    match schedule:
        case "1f1b":
            return (ranks - 1) * (forward + backward)
        case "interleaved":
            return (ranks - 1) * (forward + backward) / 2
        case "zbv":
            return (ranks - 1) * forward / 2
    return 0.0
