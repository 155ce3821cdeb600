"""A traced network: the terms of its step, and its memory from moment to moment."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.cost.streams.program import LaunchCost, LaunchGroup


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive operators of one block, or outside of all blocks ("")."""

    unit: str
    terms: Sequence[Term]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedNetwork:
    """A training step as torch's dispatcher saw it.

    update         the optimizer's operators as one term
    parameters     elements of each trained parameter
    units          elements of each block that ZeRO 3 gathers together
    blocks         the host's work in each phase, as a number of blocks of the calibrated network: its
                   operators (in the optimizer its tensors) divided by those of such a block
    boundary_bytes  pipeline stage: the larger of its input and its output
    moments        bytes by category, from moment to moment of a step on one device, as torch counts them;
                   empty if memory was not traced
    kept_bytes     bytes that are kept between forward and backward, with the input of a stage
    most_bytes     the peak of the same, with temporaries of forward and backward
    """

    forward: Sequence[Run]
    backward: Sequence[Run]
    update: Term
    parameters: Sequence[int]
    units: Mapping[str, int]
    blocks: Mapping[str, float]
    boundary_bytes: int = 0
    moments: Sequence[Mapping[str, int]] = ()
    kept_bytes: int = 0
    most_bytes: int = 0

    def runs(self, phase: str) -> Sequence[Run]:
        return self.forward if phase == "forward" else self.backward

    def terms(self, phase: str) -> list[Term]:
        return [term for run in self.runs(phase) for term in run.terms]


class TracedOperations:
    """The operations of a traced network; the counterpart of StepOperations."""

    def __init__(self, spec: Any, share: NetworkPart, traced: TracedNetwork):
        self.spec, self.share, self.traced = spec, share, traced
        self.arithmetic = Arithmetic.of(
            spec.precision, is_compiled=spec.compile != "off", gathered=share.gathered
        )
        self.blocks = share.blocks or range(1)
        self.block_matrices: list[int] = []
        self.end_matrices = list(traced.parameters)
        self.num_parameters = sum(traced.parameters)
        self.units = traced.units

    @property
    def stream_bytes(self) -> float:
        """Bytes that a pipeline stage hands to the next one."""
        return self.traced.boundary_bytes

    def launched(self, phase: str) -> float:
        return self.traced.blocks.get(phase, 0.0)

    def forward(self) -> Iterator[Term]:
        return iter(_grouped(self.traced.terms("forward")))

    def backward(self) -> Iterator[Term]:
        terms = [term for run in self._runs("backward") for term in run.terms]
        return iter(_grouped([*terms, *self._added()]))

    def groups(self, phase: str, host: LaunchCost) -> Iterator[LaunchGroup]:
        """Yields the runs, each with its share of the phase's launches."""
        runs = self._runs(phase)
        yield LaunchGroup(f"start of {phase}", [], host.us(0))
        total, first = sum(len(run.terms) for run in runs), 0
        host_us = host.block_us * self.launched(phase)
        for number, run in enumerate(runs):
            # parameters are named after their terms, so names must be unique
            named = [
                dataclasses.replace(term, name=f"{n}.{term.name}")
                for n, term in enumerate(run.terms, first)
            ]
            first += len(named)
            run_us = host_us * len(named) / total
            yield LaunchGroup(run.unit or f"{phase} {number}", named, run_us, one_by_one=True)
        if phase == "backward":
            yield LaunchGroup("gradients", list(self._added()), 0.0)

    def _runs(self, phase: str) -> Sequence[Run]:
        runs = self.traced.runs(phase)
        return runs if phase == "forward" or self.share.averaged else _with_combined_sum(runs)

    def optimizer(self, numel: float) -> Term:
        """Returns the update of `numel` of the parameters."""
        update = self.traced.update
        part = numel / max(1, self.num_parameters)  # a frozen stage has none
        (size,) = update.sizes
        return dataclasses.replace(update, sizes=(size * part,), nbytes=update.nbytes * part)

    def _added(self) -> Iterator[Term]:
        """Yields the accumulation of gradients; none in ZeRO 3, which accumulates small shards."""
        if not self.share.gathered:
            yield from self.arithmetic.gradients_added(
                self.num_parameters, self.share.passes, tensors=len(self.end_matrices)
            )


def _with_combined_sum(runs: Sequence[Run]) -> list[Run]:
    """Returns backward with the sums of whole gradients over tensor ranks in one message at its end
    (parallel/tensor_parallel/gradient_sums.py).

    In the trace each has a message of its own, right before its gradient is complete, because the trace reads
    gradients during backward, as a data axis does.
    """
    others, nbytes = [], 0.0
    for run in runs:
        terms: list[Term] = []
        for term in run.terms:
            if term.gradient and terms and terms[-1].operation == "all_reduce":
                nbytes += terms.pop().sizes[0]
            terms.append(term)
        others.append(dataclasses.replace(run, terms=terms))
    if nbytes:
        others.append(Run("", [Term("gradients.sum", "all_reduce", (nbytes,), axis="tensor")]))
    return others


def _grouped(terms: Sequence[Term]) -> list[Term]:
    """Returns equal operators as one term each, with their count."""
    counts: dict[Term, int] = {}
    for term in filter(lambda term: term.count, terms):
        single = dataclasses.replace(term, count=1, gradient=0)
        counts[single] = counts.get(single, 0) + term.count
    return [dataclasses.replace(term, count=count) for term, count in counts.items()]
