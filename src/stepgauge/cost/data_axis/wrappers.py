"""Picks what models a data parallel wrapper, and models those of torch.

torch's wrappers differ from this package's in copies, and in what they do not overlap with
computation. Their host time is unknown, unless whole blocks were timed under them.
"""

from collections.abc import Mapping

from stepgauge.cost.data_axis.buckets import Bucketed, Owned, Sending
from stepgauge.cost.data_axis.fully_sharded import FullySharded
from stepgauge.cost.data_axis.ownership import most_owned
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
    """torch's DistributedDataParallel.

    It copies each gradient into its bucket. Without gradient_as_bucket_view, it also copies all
    gradients back after they have arrived. Its host time is unknown: it runs in C++.
    """

    def after_term(self, program: Program, name: str, term: Term, computed: int) -> None:
        if term.gradient:
            computed = self._copy(program, f"{name} into its bucket", term.gradient)
        super().after_term(program, name, term, computed)

    def after_backward(self, program: Program) -> None:
        super().after_backward(program)
        if self.sending.wrapper == "torch-ddp":
            self._copy(program, "gradients out of buckets", sum(p.numel for p in self.parameters))

    def _copy(self, program: Program, name: str, numel: float) -> int:
        copy = Term(name, TRAFFIC, (2 * numel * self._arithmetic.weight_bytes,))
        return program.compute(copy.name, self.prices.us(copy), TRAFFIC)


class TorchZero1(TorchDdp):
    """torch's ZeroRedundancyOptimizer over DistributedDataParallel.

    Each rank updates the parameters that it owns. Then the ranks broadcast theirs one after the other,
    with nothing to overlap.
    """

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        update = operations.optimizer(most_owned(operations, self.sending.ranks))
        program.compute(update.name, prices.us(update), update.operation)
        nbytes = operations.num_parameters * operations.arithmetic.weight_bytes
        us = prices.broadcasts(nbytes, "data").us
        program.wait(program.send("broadcasts", DATA, us, "all_gather"))


class TorchFullyShard(FullySharded):
    """torch's fully_shard: it gathers weights into one buffer and copies them out of it, and copies
    gradients into one buffer.
    """

    def copy_out(self, program: Program, name: str, numel: int) -> None:
        nbytes = 2 * numel * self.arithmetic.activation_bytes
        copy = Term(f"{name} copied out", TRAFFIC, (nbytes,))
        program.compute(copy.name, self.prices.us(copy), TRAFFIC)

    def packed_gradients(self, numel: int) -> Term:
        return Term("gradients packed", TRAFFIC, (2 * numel * self.arithmetic.activation_bytes,))


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
    """Returns what models the wrapper. Raises ValueError for what is not modelled."""
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
