"""Wrappers that send gradients in buckets, and ZeRO 1 and 2, whose parameters each have an owner.

Both follow the plans that the wrappers execute (spec/plan/buckets.py, spec/plan/shards.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from stepgauge.cost.data_axis.ownership import most_owned
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
from stepgauge.spec.plan.shards import num_update_parts, plan_launches, plan_owners

REDUCE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2}  # by a spec's reduce_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sending:
    """How gradients are sent, by the spec's fields of these names.

    recorded  in one CUDA graph with forward and backward, in which no hook runs
    """

    wrapper: str
    ranks: int
    bucket_mb: float = 25.0
    reduce_dtype: str = "own"
    recorded: bool = False


def parameters_of(step: RankStep, reduce_dtype: str = "own") -> list[Parameter]:
    """Returns the rank's parameters in the order of their first use.

    That is the reverse of the order in which their gradients are complete.
    """
    itemsize = REDUCE_BYTES.get(reduce_dtype, step.operations.arithmetic.weight_bytes)
    parameters = [
        Parameter(name=f"{group.name}.{term.name}", numel=term.gradient, bytes_per_value=itemsize)
        for group in step.groups("backward")
        for term in group.terms
        if term.gradient
    ]
    return parameters[::-1]


def num_gradients(step: RankStep) -> int:
    """Returns the number of parameters that get a gradient."""
    return sum(group.gradients for group in step.groups("backward"))


class Bucketed(DataParallelCost):
    """Wrappers that reduce each bucket when its gradients are complete, or all buckets at the end."""

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices = sending, step.prices
        self._arithmetic = step.operations.arithmetic
        self.hooks = hooks_of(
            self.prices.machine, sending.wrapper, step.operations.spec, self.prices.host_layout
        )
        if sending.recorded:
            self.hooks = {**self.hooks, "forward": Hooks(), "backward": Hooks()}
        # A compiled graph of the whole network returns all gradients at its end.
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
        # the number of gradients that each launch still waits for
        self._missing = [sum(len(bucket.names) for bucket in launch) for launch in self._launches]
        self.num_gradients = num_gradients(step)
        self._next = 0  # the next launch
        self._sent: list[int] = []

    def owners(self) -> Mapping[str, int] | None:
        """Returns by parameter the only rank that gets its gradient; None if all ranks get all."""
        return None

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        program.host(f"{group.name} hooks", self.hooks[phase].parameter_us * group.gradients)

    def after_term(self, program: Program, name: str, term: Term, computed: int) -> None:
        if not term.gradient:
            return
        if self.sending.reduce_dtype != "own":  # cast before and after, a pass over memory each
            value_bytes = 4 + REDUCE_BYTES[self.sending.reduce_dtype]
            casts = Term(f"{name}.casts", TRAFFIC, (2 * term.gradient * value_bytes,))
            computed = program.compute(casts.name, self.prices.us(casts), TRAFFIC)
        self._missing[self._launch_of[name]] -= 1
        if self.overlaps:
            self._launch_complete(program, computed)

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
        """Returns the time of all messages one after another."""
        messages = [self.message(launch) for launch in self._launches]
        return sum(self.prices.collective(op, nbytes, "data").us for op, nbytes in messages)

    def _launch_complete(self, program: Program, computed: int) -> None:
        """Sends the next buckets that are complete after the work `computed`."""
        while self._next < len(self._launches) and not self._missing[self._next]:
            buckets = self._launches[self._next]
            operation, nbytes = self.message(buckets)
            us = self.prices.collective(operation, nbytes, "data").us
            name = f"bucket {self._next}"
            called = program.call(name, self.hooks["backward"].message_us * len(buckets))
            self._sent.append(
                program.send(name, DATA, us, operation, after=computed, called=called)
            )
            self._next += 1

    def message(self, buckets: Sequence[Bucket]) -> tuple[str, float]:
        """Returns a launch as a collective with the bytes of its whole tensor.

        Reductions to several owners at once count as a reduce-scatter, or more if the wire of the
        fullest owner takes longer.
        """
        total = sum(bucket.bytes for bucket in buckets)
        if not WRAPPERS[self.sending.wrapper].shards("gradients"):
            return "all_reduce", total
        by_owner = [0] * self.sending.ranks
        for bucket in buckets:
            if bucket.owner is not None:
                by_owner[bucket.owner] += bucket.bytes
        # a reduce-scatter of this size brings each rank as many bytes as the fullest owner gets
        ranks = self.sending.ranks
        return "reduce_scatter", max(total, max(by_owner) * ranks / (ranks - 1))


class Owned(Bucketed):
    """ZeRO 1 and 2: each parameter has an owner, which updates it and broadcasts it.

    In stage 2, its gradient is reduced to the owner only.
    """

    def __init__(self, sending: Sending, step: RankStep):
        super().__init__(sending, step)
        self.own = most_owned(step.operations, sending.ranks)

    def owners(self) -> Mapping[str, int] | None:
        if not WRAPPERS[self.sending.wrapper].shards("gradients"):
            return None
        return plan_owners(self.parameters, ranks=self.sending.ranks).owners

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        """Updates in parts, so that one part is broadcast while the next is updated.

        A rank receives everything that it does not own, and the fullest owner sends what it owns; the
        larger of both limits the broadcasts.
        """
        weight, ranks = operations.arithmetic.weight_bytes, self.sending.ranks
        num_parts = num_update_parts(operations.num_parameters * weight)
        term = operations.optimizer(self.own / num_parts)
        sent = max(operations.num_parameters * (ranks - 1) / ranks, self.own)
        us = prices.broadcasts(sent * weight / num_parts, "data").us
        works = []
        host_us = self.update_host_us() / num_parts
        for part in range(num_parts):
            program.host(f"optimizer {part}", host_us)
            updated = program.compute(f"optimizer {part}", prices.us(term), term.operation)
            works.append(program.send(f"broadcast {part}", DATA, us, "all_gather", after=updated))
        program.wait(*works)
