"""A network that is known by its traced operators alone: the terms of its step, and how much memory
it held from moment to moment.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.cost.streams.program import LaunchCost, LaunchGroup


@dataclasses.dataclass(frozen=True)
class Run:
    """Operators that follow one another in a block, or outside of all ("")."""

    unit: str
    terms: Sequence[Term]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedNetwork:
    """A training step as torch's dispatcher saw it.

    update      the optimizer's operators as one term
    parameters  elements of each that is trained
    units       elements of each block that ZeRO 3 gathers as one
    blocks      operators of each phase, of the optimizer its tensors, over those of a block of the
                network that the host's times were calibrated with
    between_bytes  of a stage of a pipeline, what it takes from another or gives, whichever is more
    moments     bytes by category, from moment to moment of a step on one device, by torch's count;
                none where memory was not traced
    kept_bytes  of them what is held between forward and backward, the input of a stage among it
    most_bytes  the same at most, with what forward and backward hold for a moment
    """

    forward: Sequence[Run]
    backward: Sequence[Run]
    update: Term
    parameters: Sequence[int]
    units: Mapping[str, int]
    blocks: Mapping[str, float]
    between_bytes: int = 0
    moments: Sequence[Mapping[str, int]] = ()
    kept_bytes: int = 0
    most_bytes: int = 0

    def runs(self, phase: str) -> Sequence[Run]:
        return self.forward if phase == "forward" else self.backward

    def terms(self, phase: str) -> list[Term]:
        return [term for run in self.runs(phase) for term in run.terms]


class TracedOperations:
    """What StepOperations is of the Transformer, of any network."""

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
        """What lies between stages of a pipeline."""
        return self.traced.between_bytes

    def launched(self, phase: str) -> float:
        return self.traced.blocks.get(phase, 0.0)

    def forward(self) -> Iterator[Term]:
        return iter(_together(self.traced.terms("forward")))

    def backward(self) -> Iterator[Term]:
        return iter(_together([*self.traced.terms("backward"), *self._added()]))

    def groups(self, phase: str, host: LaunchCost) -> Iterator[LaunchGroup]:
        """The runs, each with its part of the phase's launches, after what the host does first."""
        runs = self.traced.runs(phase)
        yield LaunchGroup(f"start of {phase}", [], host.us(0))
        total, place = sum(len(run.terms) for run in runs), 0
        host_us = host.block_us * self.launched(phase)
        for number, run in enumerate(runs):
            named = [
                dataclasses.replace(term, name=f"{n}.{term.name}")
                for n, term in enumerate(run.terms, place)
            ]
            place += len(named)
            part_us = host_us * len(named) / total
            yield LaunchGroup(run.unit or f"{phase} {number}", named, part_us, one_by_one=True)
        if phase == "backward":
            yield LaunchGroup("gradients", list(self._added()), 0.0)

    def optimizer(self, numel: float) -> Term:
        """Of so many of the parameters."""
        update, part = (
            self.traced.update,
            numel / max(1, self.num_parameters),
        )  # a frozen stage's: 0
        (size,) = update.sizes
        return dataclasses.replace(update, sizes=(size * part,), nbytes=update.nbytes * part)

    def _added(self) -> Iterator[Term]:
        """Gradients to those of earlier passes; ZeRO 3 adds shares alone."""
        if not self.share.gathered:
            yield from self.arithmetic.gradients_added(self.num_parameters, self.share.passes)


def _together(terms: Sequence[Term]) -> list[Term]:
    """Equal operators as one term, with their count."""
    counts: dict[Term, int] = {}
    for term in filter(lambda term: term.count, terms):
        alike = dataclasses.replace(term, count=1, gradient=0)
        counts[alike] = counts.get(alike, 0) + term.count
    return [dataclasses.replace(term, count=count) for term, count in counts.items()]
