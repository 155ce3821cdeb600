"""Gradients in buckets as works on the data axis's communicator, and weights that each have an owner
(ZeRO 1 and 2), from the plans that the wrappers execute (spec/plan/buckets.py, spec/plan/shards.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.wrapper_host import Hooks, hooks_of
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import (
    DATA,
    DataParallelCost,
    LaunchGroup,
    Operations,
    Program,
    RankStep,
)
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.plan.buckets import Bucket, Parameter
from stepgauge.spec.plan.shards import deal_out, num_update_parts, plan_launches, plan_owners
from stepgauge.spec.units import ceil_div

BYTES: Mapping[str, int] = {"own": 0, "bf16": 2, "fp16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sending:
    """How gradients travel: as a spec's fields of these names. `recorded`: in one CUDA graph with
    forward and backward, where no hook runs.
    """

    wrapper: str
    ranks: int
    bucket_mb: float = 25.0
    reduce_dtype: str = "own"
    recorded: bool = False


def parameters_of(step: RankStep, reduce_dtype: str = "own") -> list[Parameter]:
    """Those of the rank, in the order of their first use."""
    itemsize = BYTES[reduce_dtype] or step.operations.how.weight
    found = []
    for group in step.groups("backward"):
        found += [
            Parameter(
                name=f"{group.name}.{term.name}", numel=term.gradient, bytes_per_value=itemsize
            )
            for term in group.terms
            if term.gradient
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
    return max(deal_out(matrices, [0] * ranks)[0]) + ceil_div(vectors, ranks)


class Bucketed(DataParallelCost):
    """Gradients in buckets, each all-reduced when it is complete, or all at the end."""

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices = sending, step.prices
        self._how = step.operations.how
        self.hooks = hooks_of(
            self.prices.machine, sending.wrapper, step.operations.spec, self.prices.layout
        )
        if sending.recorded:
            self.hooks = {**self.hooks, "forward": Hooks(), "backward": Hooks()}
        # one graph of the whole network gives all gradients at its end
        is_one_graph = step.operations.spec.compile in ("on", "reduce-overhead")
        wrapper = WRAPPERS[sending.wrapper]
        self.overlaps = wrapper.overlaps and not is_one_graph
        self.parameters = parameters_of(step, sending.reduce_dtype)
        self.buckets = wrapper.plan_buckets(
            self.parameters, bucket_mb=sending.bucket_mb, owners=self.owners()
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
        self._launch_complete(program, program.compute("gradients computed", 0.0))
        program.wait(*self._sent)
        program.host("end of hooks", self.hooks["backward"].once_us)

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


class Owned(Bucketed):
    """ZeRO 1 and 2: each parameter has a rank that updates it and broadcasts it; in stage 2 its
    gradient is reduced to that rank alone.
    """

    def __init__(self, sending: Sending, step: RankStep):
        super().__init__(sending, step)
        self.own = most_owned(step.operations, sending.ranks)

    def owners(self) -> Mapping[str, int] | None:
        if not WRAPPERS[self.sending.wrapper].shards("gradients"):
            return None
        return plan_owners(self.parameters, ranks=self.sending.ranks).owners

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        """In parts: while one is broadcast, the next is updated. What a rank does not own comes
        through its wire, and what the fullest owner has leaves by one.
        """
        weight, ranks = operations.how.weight, self.sending.ranks
        num_parts = num_update_parts(operations.num_parameters * weight)
        term = operations.optimizer(self.own / num_parts)
        sent = max(operations.num_parameters * (ranks - 1) / ranks, self.own)
        us = prices.broadcasts(sent * weight / num_parts, "data").us
        works = []
        host_us = self.update_host_us() / num_parts
        for part in range(num_parts):
            program.host(f"optimizer {part}", host_us)
            place = program.compute(f"optimizer {part}", prices.us(term), term.operation)
            name = f"broadcast {part}"
            works.append(program.send(name, DATA, us, "all_gather", after=place))
        program.wait(*works)
