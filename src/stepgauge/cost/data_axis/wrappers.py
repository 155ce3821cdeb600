"""Ways of data parallel training as works on the data axis's communicator, from the plans that the
wrappers execute: buckets and launches (spec/plan/buckets.py), owners and units
(spec/plan/shards.py).

torch's own ways differ from ours in copies, and in what is not sent beside computing. What they take
of the host is not known, unless blocks were timed under them.
"""

from collections.abc import Mapping

from stepgauge.cost.data_axis.buckets import Bucketed, Owned, Sending, most_owned
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import (
    DATA,
    DataParallelCost,
    Operations,
    Program,
    RankStep,
)
from stepgauge.spec.layout import WRAPPERS


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


class TorchZero1(TorchDdp):
    """torch's ZeroRedundancyOptimizer over its DDP: each rank updates what it owns, then broadcasts
    it, one rank after the other, beside nothing.
    """

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        own = operations.optimizer(most_owned(operations, self.sending.ranks))
        program.compute(own.name, prices.us(own), own.operation)
        nbytes = operations.num_parameters * operations.how.weight
        us = prices.broadcasts(nbytes, "data").us
        program.wait(program.send("broadcasts", DATA, us, "all_gather"))


class TorchFullyShard(FullySharded):
    """torch's fully_shard: weights are gathered into one buffer and copied out of it, gradients
    copied into one.
    """

    def copied_out(self, program: Program, name: str, numel: int) -> None:
        copy = Term(f"{name} copied out", TRAFFIC, (2 * numel * self.how.activation,))
        program.compute(copy.name, self.prices.us(copy), TRAFFIC)

    def packed(self, numel: int) -> Term:
        return Term("gradients packed", TRAFFIC, (2 * numel * self.how.activation,))


TORCH_DDP: Mapping[str, type[TorchDdp]] = {
    "torch-ddp": TorchDdp,
    "torch-ddp-views": TorchDdp,
    "torch-zero1": TorchZero1,
}
FULLY_SHARDED: Mapping[str, type[FullySharded]] = {
    "zero3": FullySharded,
    "torch-fsdp": TorchFullyShard,
}


def data_axis(sending: Sending, step: RankStep) -> DataParallelCost:
    """Raises ValueError for what is not modelled."""
    wrapper = sending.wrapper
    if wrapper == "none" or sending.ranks == 1:
        return DataParallelCost()
    if wrapper in FULLY_SHARDED:
        return FULLY_SHARDED[wrapper](sending, step)
    if wrapper in TORCH_DDP:
        if sending.reduce_dtype != "own":
            raise ValueError(
                f"reduce_dtype is {sending.reduce_dtype!r}; of {wrapper} only own is predicted"
            )
        return TORCH_DDP[wrapper](sending, step)
    return Owned(sending, step) if WRAPPERS[wrapper].stage else Bucketed(sending, step)
