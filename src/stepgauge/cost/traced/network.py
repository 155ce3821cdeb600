"""A network that is known by its traced operators alone: the terms of its step, and how much memory
it held from moment to moment.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.operations.supported import PRICED
from stepgauge.cost.operations.terms import Arithmetic, Term
from stepgauge.cost.streams.program import LaunchGroup, Launching
from stepgauge.spec.layout import WRAPPERS, Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.steps import AnyStep

TRACED = "a user's model, BERT, experts, windows and other masks"
LAYOUTS = f"of {TRACED} one device and data axes are predicted"


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
    moments     bytes by category, from moment to moment of a step on one device, by torch's count;
                none where memory was not traced
    """

    forward: Sequence[Run]
    backward: Sequence[Run]
    update: Term
    parameters: Sequence[int]
    units: Mapping[str, int]
    blocks: Mapping[str, float]
    moments: Sequence[Mapping[str, int]] = ()

    def runs(self, phase: str) -> Sequence[Run]:
        return self.forward if phase == "forward" else self.backward

    def terms(self, phase: str) -> list[Term]:
        return [term for run in self.runs(phase) for term in run.terms]


class TracedOperations:
    """What StepOperations is of a preset."""

    def __init__(self, spec: AnyStep, traced: TracedNetwork):
        self.spec, self.traced = spec, traced
        self.how = Arithmetic.of(
            spec.precision,
            is_compiled=spec.compile != "off",
            gathered=gathers_weights(spec.parsed_layout),
        )
        self.blocks = range(1)  # the host launches all of it as one block
        self.block_matrices: list[int] = []
        self.end_matrices = list(traced.parameters)
        self.num_parameters = sum(traced.parameters)
        self.units = traced.units

    def forward(self) -> Iterator[Term]:
        return iter(_together(self.traced.terms("forward")))

    def backward(self) -> Iterator[Term]:
        return iter(_together(self.traced.terms("backward")))

    def groups(self, phase: str, host: Launching) -> Iterator[LaunchGroup]:
        """The runs, each with its part of the phase's launches, after what the host does first."""
        runs = self.traced.runs(phase)
        yield LaunchGroup(f"start of {phase}", [], host.outside_us)
        total, place = sum(len(run.terms) for run in runs), 0
        for number, run in enumerate(runs):
            named = [
                dataclasses.replace(term, name=f"{n}.{term.name}")
                for n, term in enumerate(run.terms, place)
            ]
            place += len(named)
            host_us = host.block_us * len(named) / total
            yield LaunchGroup(run.unit or f"{phase} {number}", named, host_us, one_by_one=True)

    def optimizer(self, numel: float) -> Term:
        """Of so many of the parameters."""
        (size,) = self.traced.update.sizes
        part = size * numel / self.num_parameters
        return dataclasses.replace(self.traced.update, sizes=(part,))


def _together(terms: Sequence[Term]) -> list[Term]:
    """Equal operators as one term, with their count."""
    counts: dict[Term, int] = {}
    for term in filter(lambda term: term.count, terms):
        alike = dataclasses.replace(term, count=1, gradient=0)
        counts[alike] = counts.get(alike, 0) + term.count
    return [dataclasses.replace(term, count=count) for term, count in counts.items()]


def has_formulas(model: object) -> bool:
    """Whether the terms of the network are written down (cost/operations/): of other networks the
    operators are traced.
    """
    if not isinstance(model, ModelSpec):
        return False
    try:
        model.require_defaults(PRICED, "")
    except ValueError:
        return False
    return True


def require_traceable(spec: AnyStep) -> None:
    """Raises ValueError for what is not predicted by operators, before anything is traced."""
    if spec.compile not in ("off", "on"):
        raise ValueError(f"compile is {spec.compile!r}; of {TRACED} off and on are predicted")
    layout = spec.parsed_layout
    if set(layout.sizes) - {"data"}:
        raise ValueError(f"layout is {str(layout)!r}; {LAYOUTS}")
    if spec.compile == "on" and gathers_weights(layout):
        raise ValueError(
            f"compile is 'on'; of {TRACED} under {layout.wrapper} only off is predicted"
        )


def gathers_weights(layout: Layout) -> bool:
    """Whether ranks gather each other's parts of weights before they compute."""
    return WRAPPERS[layout.wrapper].shards("weights")
