"""Ways of data parallel training as works on the data axis's communicator, from the plans that the
wrappers execute: buckets and launches (spec/plan/buckets.py), owners and units
(spec/plan/shards.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.prices import Prices
from stepgauge.cost.program import (
    DATA,
    DataParallelCost,
    LaunchGroup,
    Operations,
    Program,
    RankStep,
)
from stepgauge.cost.terms import TRAFFIC, Term, strided_copy
from stepgauge.cost.timed_blocks import timed_blocks
from stepgauge.cost.wrapper_host import hooks_of
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.plan.buckets import FIRST_BUCKET_MB, Bucket, Parameter, plan_buckets
from stepgauge.spec.plan.shards import (
    MOST_IN_FLIGHT,
    UPDATE_PARTS,
    dealt,
    plan_launches,
    plan_owners,
)

BYTES: Mapping[str, int] = {"own": 0, "bf16": 2, "fp16": 2}
TORCH_DDP = ("torch-ddp", "torch-ddp-views")
MODELLED = ("none", "naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3",
            *TORCH_DDP)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sending:
    """How gradients travel: as a spec's fields of these names."""

    wrapper: str
    ranks: int
    bucket_mb: float = 25.0
    reduce_dtype: str = "own"


def data_axis(sending: Sending, step: RankStep) -> DataParallelCost:
    """Raises ValueError for a wrapper that is not modelled."""
    if sending.wrapper not in MODELLED:
        raise ValueError(f"wrapper is {sending.wrapper!r}; predicted are {', '.join(MODELLED)}")
    if sending.wrapper == "none" or sending.ranks == 1:
        return DataParallelCost()
    if sending.wrapper == "zero3":
        return FullySharded(sending, step)
    if sending.wrapper in TORCH_DDP:
        if sending.reduce_dtype != "own":
            raise ValueError(
                f"reduce_dtype is {sending.reduce_dtype!r}; of {sending.wrapper} only own is predicted"
            )
        return TorchDdp(sending, step)
    return Owned(sending, step) if WRAPPERS[sending.wrapper].stage else Bucketed(sending, step)


def parameters_of(step: RankStep, reduce_dtype: str = "own") -> list[Parameter]:
    """Those of the rank, in the order of their first use."""
    itemsize = BYTES[reduce_dtype] or step.operations.how.weight
    found = []
    for group in step.groups("backward"):
        if step.coarse:
            whole = sum(term.gradient for term in group.terms)
            named = [("weights", whole)]
        else:
            named = [(term.name, term.gradient) for term in group.terms]
        found += [
            Parameter(name=f"{group.name}.{name}", numel=numel, bytes_per_value=itemsize)
            for name, numel in named
            if numel
        ]
    return found[::-1]


def num_gradients(step: RankStep) -> int:
    return sum(group.gradients for group in step.groups("backward"))


def most_owned(operations: Operations, ranks: int) -> int:
    """Elements of the fullest owner: parameters are owned whole (spec/plan/shards.py), so that no
    rank has less than the largest of them.
    """
    matrices = operations.block_matrices * len(operations.blocks) + operations.end_matrices
    vectors = operations.num_parameters - sum(matrices)
    return max(dealt(matrices, [0] * ranks)[0]) + -(-vectors // ranks)


class Bucketed(DataParallelCost):
    """Gradients in buckets, each all-reduced when it is complete, or all at the end."""

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices = sending, step.prices
        self._how = step.operations.how
        self.hooks = hooks_of(step.prices.machine, sending.wrapper, step.operations.spec.device)
        # one graph of the whole network gives all gradients at its end
        is_one_graph = step.operations.spec.compile in ("on", "reduce-overhead")
        self.overlaps = sending.wrapper not in ("naive", "flat") and not is_one_graph
        self.parameters = parameters_of(step, sending.reduce_dtype)
        wrapper = sending.wrapper
        caps = {"naive": 0.0, "overlapped": 0.0, "flat": None}
        self.buckets: tuple[Bucket, ...] = plan_buckets(
            self.parameters,
            cap_mb=caps.get(wrapper, sending.bucket_mb),
            first_mb=None if wrapper in caps else FIRST_BUCKET_MB,
            owners=self.owners(),
            alone=wrapper not in TORCH_DDP,
        )
        self._launches = plan_launches(self.buckets)
        self._launch_of = {
            name: number
            for number, launch in enumerate(self._launches)
            for bucket in launch
            for name in bucket.names
        }
        self._missing = [sum(len(bucket.names) for bucket in launch) for launch in self._launches]
        self.num_gradients = num_gradients(step)
        self._next = 0
        self._sent: list[int] = []

    def owners(self) -> Mapping[str, int] | None:
        """The rank that alone gets a gradient, by its name; None where all do."""
        return None

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        program.host(f"{group.name} hooks", self.hooks[phase].parameter_us * group.gradients)

    def after_term(self, program: Program, name: str, term: Term, place: int) -> None:
        if not term.gradient:
            return
        if self.sending.reduce_dtype != "own":  # narrowed and widened, a pass over memory each
            values = 4 + BYTES[self.sending.reduce_dtype]
            passes = Term(f"{name}.narrow", TRAFFIC, (2 * term.gradient * values,))
            place = program.compute(passes.name, self.prices.of(passes).us, TRAFFIC)
        self._missing[self._launch_of[name]] -= 1
        if self.overlaps:
            self._launch_complete(program, place)

    def after_backward(self, program: Program) -> None:
        self._launch_complete(program, program.ends["backward"])
        program.wait(*self._sent)
        program.host("end of hooks", self.hooks["backward"].once_us)
        synchronize = self.hooks["synchronize"]
        program.host("synchronize", synchronize.us(self.num_gradients, len(self.buckets)))

    def update_host_us(self) -> float:
        return self.hooks["optimizer"].us(self.num_gradients, len(self.buckets))

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        program.host("optimizer of the wrapper", self.update_host_us())
        super().optimizer(program, operations, prices)

    def messages_us(self) -> float:
        """Of all launches one after another."""
        messages = [self.message(launch) for launch in self._launches]
        return sum(self.prices.collective(op, nbytes, "data").us for op, nbytes in messages)

    def _launch_complete(self, program: Program, place: int) -> None:
        while self._next < len(self._launches) and not self._missing[self._next]:
            buckets = self._launches[self._next]
            operation, nbytes = self.message(buckets)
            us = self.prices.collective(operation, nbytes, "data").us
            name = f"bucket {self._next}"
            called = program.call(name, self.hooks["backward"].message_us * len(buckets))
            self._sent.append(program.send(name, DATA, us, operation, after=place, called=called))
            self._next += 1

    def message(self, buckets: Sequence[Bucket]) -> tuple[str, float]:
        """The collective that a launch is, and the bytes of its whole tensor. Reductions to several
        owners at once are a reduce-scatter, as far as the fullest owner's wire allows.
        """
        total = sum(bucket.bytes for bucket in buckets)
        if not WRAPPERS[self.sending.wrapper].shards("gradients"):
            return "all_reduce", total
        by_owner = [0] * self.sending.ranks
        for bucket in buckets:
            if bucket.owner is not None:
                by_owner[bucket.owner] += bucket.bytes
        return "reduce_scatter", max(total, _through_one(max(by_owner), self.sending.ranks))


def _through_one(nbytes: float, ranks: int) -> float:
    """Bytes of a reduce-scatter or all-gather that takes as long as so many into or out of one
    rank.
    """
    return nbytes * ranks / (ranks - 1)


class TorchDdp(Bucketed):
    """torch's DistributedDataParallel: each gradient is copied into its bucket, and without views of
    buckets as gradients back out of it when all have arrived. What it takes of the host is not
    known: it runs in C++.
    """

    def after_term(self, program: Program, name: str, term: Term, place: int) -> None:
        if term.gradient:
            place = self._copy(program, f"{name} into its bucket", term.gradient)
        super().after_term(program, name, term, place)

    def after_backward(self, program: Program) -> None:
        super().after_backward(program)
        if self.sending.wrapper == "torch-ddp":
            self._copy(program, "gradients out of buckets", sum(p.numel for p in self.parameters))

    def _copy(self, program: Program, name: str, numel: float) -> int:
        copy = Term(name, TRAFFIC, (2 * numel * self._how.weight,))
        return program.compute(copy.name, self.prices.of(copy).us, TRAFFIC)


class Owned(Bucketed):
    """ZeRO 1 and 2: each parameter has a rank that updates it and broadcasts it; in stage 2 its
    gradient is reduced to that rank alone.
    """

    def __init__(self, sending: Sending, step: RankStep):
        self.coarse = step.coarse
        super().__init__(sending, step)
        self.own = most_owned(step.operations, sending.ranks)

    def owners(self) -> Mapping[str, int] | None:
        """In a coarse step a block is one parameter, which no rank owns as a whole."""
        if self.coarse or not WRAPPERS[self.sending.wrapper].shards("gradients"):
            return None
        return plan_owners(self.parameters, ranks=self.sending.ranks).owners

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        """In parts: while one is broadcast, the next is updated. What a rank does not own comes
        through its wire, and what the fullest owner has leaves by one.
        """
        term = operations.optimizer(self.own / UPDATE_PARTS)
        ranks = self.sending.ranks
        sent = max(operations.num_parameters * (ranks - 1) / ranks, self.own)
        us = prices.broadcasts(sent * operations.how.weight / UPDATE_PARTS, "data").us
        works = []
        host_us = self.update_host_us() / UPDATE_PARTS
        for part in range(UPDATE_PARTS):
            program.host(f"optimizer {part}", host_us)
            place = program.compute(f"optimizer {part}", prices.us(term), term.operation)
            name = f"broadcast {part}"
            works.append(program.send(name, DATA, us, "all_gather", after=place))
        program.wait(*works)


class FullySharded(DataParallelCost):
    """ZeRO 3: a unit a block, and one for both ends, which stays whole between forward and
    backward. The next unit's weights are gathered while one computes; gradients are reduced to
    their slices, in each of several passes: no rank has a place for whole ones.
    """

    every_pass = True

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices, self._how = sending, step.prices, step.operations.how
        blocks = [f"blocks.{number}" for number in step.operations.blocks]
        self._elements = dict.fromkeys(blocks, step.operations.block_parameters)
        self._ends = step.operations.end_parameters
        machine, work = step.prices.machine, step.operations.spec
        is_timed = timed_blocks(work, machine, step.prices.layout) is not None  # with its hooks
        self._hooks = hooks_of(machine, sending.wrapper, "cpu" if is_timed else work.device)
        self.num_gradients = num_gradients(step)
        self._order = {"forward": blocks, "backward": blocks[::-1]}
        self._gathers: dict[tuple[str, str], int] = {}
        self._reductions: list[tuple[int, int]] = []  # with the elements of each

    def resident_us(self) -> tuple[float, float]:
        """Of a stage that is whole for a step (parallel/residency.py): all weights gathered, and all
        gradients averaged, in the parameters' type.
        """
        units = [*self._elements.values(), self._ends]
        sent = [numel * self._how.weight for numel in units if numel]
        gather, reduce = (
            sum(self.prices.collective(operation, nbytes, "data").us for nbytes in sent)
            for operation in ("all_gather", "reduce_scatter")
        )
        return gather, reduce

    def begin(self) -> None:
        self._gathers = {}

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        program.host(f"{group.name} hooks", self._hooks_us(phase, group))
        if group.name not in self._elements:
            if phase == "forward" and group.name == "embedding":
                program.wait(self._gather(program, "ends", self._ends))
                self._gather_unit(program, phase, 0)
            return
        place = self._order[phase].index(group.name)
        self._gather_unit(program, phase, place)
        program.wait(self._gathers[phase, group.name])
        self._gather_unit(program, phase, place + 1)

    def after(self, program: Program, phase: str, group: LaunchGroup) -> None:
        if phase != "backward":
            return
        if group.name in self._elements:
            self._reduce(program, group.name, self._elements[group.name])
            if len(self._reductions) > MOST_IN_FLIGHT:
                self._collect(program)

    def after_backward(self, program: Program) -> None:
        self._reduce(program, "ends", self._ends)
        while self._reductions:
            self._collect(program)

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        units = len(self._elements) + 1
        program.host("shards", self._hooks["optimizer"].us(self.num_gradients, units))
        term = operations.optimizer(operations.num_parameters / self.sending.ranks)
        program.compute(term.name, prices.us(term), term.operation)

    def _hooks_us(self, phase: str, group: LaunchGroup) -> float:
        """Of a block's unit, and with the group that begins the phase of that of the ends."""
        hooks = self._hooks[phase]
        own = hooks.message_us + hooks.parameter_us * group.gradients
        if group.name in self._elements:
            return own
        is_first = group.name == ("embedding" if phase == "forward" else "head")
        return own + hooks.once_us if is_first else 0.0

    def _gather_unit(self, program: Program, phase: str, place: int) -> None:
        units = self._order[phase]
        if place >= len(units) or (phase, units[place]) in self._gathers:
            return
        name = units[place]
        gathered = self._gather(program, f"{phase} {name}", self._elements[name])
        self._gathers[phase, name] = gathered

    def _gather(self, program: Program, name: str, numel: int) -> int:
        """The rank's slice in the type that is computed in, from all ranks."""
        if self._how.activation < self._how.weight:
            self._cast(program, f"{name} narrowed", numel)
        us = self.prices.collective("all_gather", numel * self._how.activation, "data").us
        return program.send(f"gather {name}", DATA, us, "all_gather")

    def _reduce(self, program: Program, name: str, numel: int) -> None:
        packed = strided_copy("gradients packed", numel)  # to the rows of the ranks
        program.compute(packed.name, self.prices.of(packed).us, TRAFFIC)
        us = self.prices.collective("reduce_scatter", numel * self._how.activation, "data").us
        sent = program.send(f"reduce {name}", DATA, us, "reduce_scatter")
        self._reductions.append((sent, numel))

    def _collect(self, program: Program) -> None:
        sent, numel = self._reductions.pop(0)
        program.wait(sent)
        if self._how.activation < self._how.weight:
            self._cast(program, "gradients widened", numel)

    def _cast(self, program: Program, name: str, numel: int) -> None:
        nbytes = numel / self.sending.ranks * (self._how.activation + self._how.weight)
        program.compute(name, self.prices.of(Term(name, TRAFFIC, (nbytes,))).us, TRAFFIC)
