"""Estimates time and memory of thousands of layouts by closed formula, to pick those to simulate.

A micro-batch takes the sum of its terms on the fullest stage. A pipeline adds its bubble, and the data
axis adds the communication that backward cannot hide.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from stepgauge.cost.data_axis.ownership import num_updated
from stepgauge.cost.host import launch_costs
from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.memory.peak import stage_memory, step_memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import Arithmetic
from stepgauge.cost.rates.contention import DEFAULT_SLOWDOWN
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import GLOO, NCCL, Prices
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.layout_choices import layouts_on
from stepgauge.spec.layout_rules import check_layout
from stepgauge.spec.model_fields import divisors
from stepgauge.spec.plan.pipeline.schedules import stages_per_rank
from stepgauge.spec.plan.tensor import overlaps
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.units import ceil_div

SCHEDULES = ("1f1b", "interleaved", "zbv")
CHECKPOINTING = ("none", "selective", "blocks")
MAX_CPU_MICRO_BATCH = 64  # sequences; memory does not limit them on a CPU
# Tokens of a sequence per context-parallel rank. With fewer, computation hides little of each message.
LEAST_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with its micro-batch, accumulated passes and checkpointing."""

    layout: Layout
    micro_batch: int
    accumulation: int
    checkpointing: str


@dataclasses.dataclass(frozen=True)
class Screened:
    """A candidate with its estimated step and memory."""

    candidate: Candidate
    step_us: float
    memory: Memory


def candidates(spec: PlanSpec, gpus_per_node: int) -> Iterator[Candidate]:
    """Yields all layouts that use every GPU, divide batch, heads, sequences and blocks, and run with the
    settings of the step.

    A tensor axis stays within a node.
    """
    runs = functools.cache(functools.partial(_runs_with_settings, spec))
    for candidate in _dividing(spec, gpus_per_node):
        layout = candidate.layout
        # The rules depend on which axes there are, not on how many stages, replicas or micro-batches.
        fewer = {n: min(getattr(layout, n), 2) for n in ("pipeline", "data", "microbatches")}
        if runs(dataclasses.replace(layout, **fewer), candidate.checkpointing):
            yield candidate


def _runs_with_settings(spec: PlanSpec, layout: Layout, checkpointing: str) -> bool:
    """Returns True if a step of the layout is allowed, for example compiled as the spec says."""
    try:
        check_layout(
            layout,
            spec.network,
            batch=layout.data * layout.microbatches,
            device=spec.device,
            precision=spec.precision,
            compile=spec.compile,
            reduce_dtype=DataParallelSpec.reduce_dtype,
            checkpointing=checkpointing,
        )
    except ValueError:
        return False
    return True


def _dividing(spec: PlanSpec, gpus_per_node: int) -> Iterator[Candidate]:
    """Yields all layouts that use every GPU and divide batch, heads, sequences and blocks."""
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
    schedules = [
        name for name in SCHEDULES if stages_per_rank(name) * pipeline <= spec.network.num_layers
    ]
    for axes in layouts_on(
        data=data, context=context, tensor=tensor, pipeline=pipeline, schedules=schedules
    ):
        if axes.schedule == "zbv" and (tensor > 1 or WRAPPERS[axes.wrapper].shards("weights")):
            continue
        for micro_batch in _micro_batches(spec, rank_batch):
            passes = rank_batch // micro_batch
            if pipeline > 1 and not _runs(axes.schedule, pipeline, passes):
                continue
            # ranks that could have whole sequences do not share them
            if math.gcd(micro_batch, context) > 1:
                continue
            overlap = _overlaps(spec, micro_batch, tensor, context)
            microbatches, accumulation = (passes, 1) if pipeline > 1 else (1, passes)
            for ulysses in _context_modes(spec, tensor, context):
                layout = dataclasses.replace(
                    axes, ulysses=ulysses, overlap=overlap, microbatches=microbatches
                )
                for checkpointing in CHECKPOINTING:
                    yield Candidate(layout, micro_batch, accumulation, checkpointing)


def _context_modes(spec: PlanSpec, tensor: int, context: int) -> Iterator[bool]:
    """Yields the values of `ulysses` with which ranks can share a sequence.

    A ring (False) needs this package's attention, an exchange of heads (True) enough heads. There are
    none if each rank had too few tokens.
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


def _overlaps(spec: PlanSpec, micro_batch: int, tensor: int, context: int) -> bool:
    """Returns True if tensor parallelism should overlap: on GPUs, if its messages are large enough."""
    itemsize = Arithmetic.of(spec.precision, is_compiled=spec.compile != "off").activation_bytes
    tokens = micro_batch * spec.network.context_length // context
    stream = tokens * spec.network.d_model * itemsize
    return tensor > 1 and spec.device != "cpu" and overlaps(stream, tensor)


def _runs(schedule: str, pipeline: int, micro_batches: int) -> bool:
    """Returns True if there is a micro-batch per rank; interleaved schedules need whole rounds."""
    return micro_batches >= pipeline and (
        schedule != "interleaved" or micro_batches % pipeline == 0
    )


def _micro_batches(spec: PlanSpec, rank_batch: int) -> list[int]:
    """Returns all divisors of a rank's batch, so that a batch of 25 has 5 as well as 1 and 25."""
    largest = MAX_CPU_MICRO_BATCH if spec.device == "cpu" else rank_batch
    return [size for size in divisors(rank_batch) if size <= largest]


class Screen:
    """Estimates candidates on a machine. Results for equal shares of the network are cached."""

    def __init__(self, spec: PlanSpec, machine: CalibratedMachine):
        self.spec, self.machine = spec, machine
        self._stages = functools.cache(self._operations)
        self._prices = functools.cache(self._priced)
        self._times = functools.cache(self._timed)
        self._hosts = functools.cache(self._launched)
        self._num_updated = functools.cache(num_updated)

    def of(self, candidate: Candidate) -> Screened:
        """Estimates a candidate. Raises ValueError for what the machine has no times for."""
        layout, layers = candidate.layout, self.spec.network.num_layers
        stage = self._fullest(candidate)
        prices = self._prices(layout.tensor, layout.data, layout.context, layout.pipeline)
        forward, backward = self._times(stage, prices)
        bubble = _bubble(layout.schedule, layout.pipeline, forward, backward)
        if layout.pipeline > 1:
            # the last stage has the head, which may take longer than blocks
            last = self._stage(candidate, range(layers - layers // layout.pipeline, layers))
            forward, backward = max((forward, backward), self._times(last, prices), key=sum)
        passes = layout.microbatches * candidate.accumulation
        exposed, slowed = self._data_us(stage, prices, layout, forward, backward, passes)
        updated = self._num_updated(stage, layout.wrapper, layout.num_replicas)
        update = prices.us(stage.optimizer(updated))
        pass_us = max(forward + backward, self._hosts(stage, prices))
        step_us = passes * pass_us + bubble + exposed + slowed + update
        return Screened(candidate, step_us, self.memory(candidate))

    def memory(self, candidate: Candidate) -> Memory:
        """Returns the memory of the fullest rank."""
        stage, layout = self._fullest(candidate), candidate.layout
        if layout.pipeline > 1:
            return stage_memory(stage, layout)
        return step_memory(stage, layout, accumulates=candidate.accumulation > 1)

    def _fullest(self, candidate: Candidate) -> StepOperations:
        """Returns the operations of a rank of the pipeline's fullest stage, the first."""
        layers = self.spec.network.num_layers
        return self._stage(candidate, range(ceil_div(layers, candidate.layout.pipeline)))

    def _stage(self, candidate: Candidate, blocks: range) -> StepOperations:
        """Returns the operations of these blocks on a rank of the candidate."""
        layout = candidate.layout
        share = NetworkPart(
            batch=candidate.micro_batch, tensor=layout.tensor, overlap=layout.overlap,
            context=layout.context, ulysses=layout.ulysses, blocks=blocks,
            gathered=layout.gathers_weights, averaged=layout.num_replicas > 1,
        )  # fmt: skip
        return self._stages(share, candidate.checkpointing)

    def _timed(self, stage: StepOperations, prices: Prices) -> tuple[float, float]:
        """Returns the microseconds of forward and backward of a micro-batch."""
        return prices.total_us(stage.forward()), prices.total_us(stage.backward())

    def _launched(self, stage: StepOperations, prices: Prices) -> float:
        """Returns the host's microseconds for a micro-batch, which may be more than the device's."""
        host = launch_costs(stage.spec, prices.machine, prices.layout)
        return sum(host[phase].us(len(stage.blocks)) for phase in ("forward", "backward"))

    def _data_us(
        self, stage: StepOperations, prices: Prices, layout: Layout, forward: float,
        backward: float, passes: int,
    ) -> tuple[float, float]:  # fmt: skip
        """Returns the exposed time of the data axis, and the time by which it slows computation."""
        if layout.num_replicas == 1:
            return 0.0, 0.0
        numel, arithmetic = stage.num_parameters, stage.arithmetic

        def collectives_us(operation: str, itemsize: int, parts: int) -> float:
            nbytes = numel * itemsize / parts
            return parts * prices.collective(operation, nbytes, "data").us

        wrapper = WRAPPERS[layout.wrapper]
        units = len(stage.blocks)
        if wrapper.shards("weights") and layout.pipeline > 1:
            both_us = [
                collectives_us(operation, arithmetic.weight_bytes, units)
                for operation in ("all_gather", "reduce_scatter")
            ]
            return passes / layout.microbatches * sum(both_us), 0.0
        if wrapper.shards("weights"):
            gather = collectives_us("all_gather", arithmetic.activation_bytes, units)
            reduce = collectives_us("reduce_scatter", arithmetic.activation_bytes, units)
            exposed = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
            hidden = min(gather, forward) + min(gather + reduce, backward)
            return passes * exposed, passes * hidden * (1 - 1 / DEFAULT_SLOWDOWN.kernel)
        buckets = max(
            1, round(numel * arithmetic.weight_bytes / (DataParallelSpec.bucket_mb * 1e6))
        )
        operation = "reduce_scatter" if wrapper.shards("gradients") else "all_reduce"
        gradients = collectives_us(operation, arithmetic.weight_bytes, buckets)
        # all but the last bucket can be hidden
        can_hide = backward * (buckets - 1) / buckets if layout.pipeline == 1 else 0.0
        exposed, hidden = max(0.0, gradients - can_hide), min(gradients, can_hide)
        if wrapper.shards("optimizer state"):
            exposed += collectives_us("all_gather", arithmetic.weight_bytes, 4)
        return exposed, hidden * (1 - 1 / DEFAULT_SLOWDOWN.kernel)

    def _operations(self, share: NetworkPart, checkpointing: str) -> StepOperations:
        spec = self.spec
        work = WorkSpec(
            model=spec.model, size=spec.size, batch=share.batch, precision=spec.precision,
            compile=spec.compile, optimizer=spec.optimizer, checkpointing=checkpointing,
            device=spec.device,
        )  # fmt: skip
        return StepOperations(work, share)

    def _priced(self, tensor: int, data: int, context: int, pipeline: int) -> Prices:
        layout = Layout(
            tensor=tensor, data=data, context=context, pipeline=pipeline,
            wrapper="naive" if data * context > 1 else "none",
            schedule="1f1b" if pipeline > 1 else "",
        )  # fmt: skip
        return Prices(self.machine, layout, GLOO if self.spec.device == "cpu" else NCCL)


def _bubble(schedule: str, ranks: int, forward: float, backward: float) -> float:
    """Returns the idle time of a rank (spec/plan/pipeline/schedules.py).

    Of p ranks, 1f1b idles (p-1)(F + I + W). Interleaved with two stages per rank halves that, and zbv
    idles half of (p-1) F.
    """
    match schedule:
        case "1f1b":
            return (ranks - 1) * (forward + backward)
        case "interleaved":
            return (ranks - 1) * (forward + backward) / 2
        case "zbv":
            return (ranks - 1) * forward / 2
    return 0.0
