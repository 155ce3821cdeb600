"""A network that is known by its traced operators alone: the terms of its step, and how much memory
it held from moment to moment.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from stepgauge.cost.data_axis import SHARDED
from stepgauge.cost.priced import PRICED
from stepgauge.cost.program import LaunchGroup, RankStep
from stepgauge.cost.terms import Arithmetic, Term
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

TracedSpec = StepSpec | DataParallelSpec | LayoutSpec
GROUP = 8  # operators that the host launches before the device may begin the first of them
TRACED = "a user's model, BERT, experts, windows and other masks"
LAYOUTS = f"of {TRACED} one device and data axes up to zero2 are predicted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A training step as torch's dispatcher saw it.

    update      the optimizer's operators as one term
    parameters  elements of each that is trained
    blocks      operators of each phase, of the optimizer its tensors, over those of a block of the
                network that the host's times were calibrated with
    moments     bytes by category, from moment to moment of a step on one device, by torch's count;
                none where memory was not traced
    """

    forward: Sequence[Term]
    backward: Sequence[Term]
    update: Term
    parameters: Sequence[int]
    blocks: Mapping[str, float]
    moments: Sequence[Mapping[str, int]] = ()


class TracedOperations:
    """What StepOperations is of a preset."""

    def __init__(self, spec: TracedSpec, traced: Traced):
        self.spec, self.traced = spec, traced
        self.how = Arithmetic.of(spec.precision, is_compiled=spec.compile != "off")
        self.blocks = range(0)  # unknown: all of the network is its ends
        self.block_matrices: list[int] = []
        self.block_parameters = 0
        self.end_matrices = list(traced.parameters)
        self.end_parameters = self.num_parameters = sum(traced.parameters)

    def forward(self) -> Iterator[Term]:
        return iter(_together(self.traced.forward))

    def backward(self) -> Iterator[Term]:
        return iter(_together(self.traced.backward))

    def forward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        return list(self.traced.forward), [], []

    def backward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        return list(self.traced.backward), [], []

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


class TracedStep(RankStep):
    """A rank's step in groups of a few operators."""

    def groups(self, phase: str) -> Iterator[LaunchGroup]:
        before, _, _ = (
            self.operations.forward_parts()
            if phase == "forward"
            else self.operations.backward_parts()
        )
        cuts = range(0, len(before), GROUP)
        host_us = self.host[phase].us(0) / max(1, len(cuts))
        for first in cuts:
            named = [
                dataclasses.replace(term, name=f"{place}.{term.name}")
                for place, term in enumerate(before[first : first + GROUP], first)
            ]
            yield LaunchGroup(phase, named, host_us)


def has_formulas(model: object) -> bool:
    """Whether the terms of the network are written down (cost/operations.py): of other networks the
    operators are traced.
    """
    if not isinstance(model, ModelSpec):
        return False
    try:
        model.require_defaults(PRICED, "")
    except ValueError:
        return False
    return True


def require_traceable(spec: TracedSpec) -> None:
    """Raises ValueError for what is not predicted by operators, before anything is traced."""
    if spec.compile not in ("off", "on"):
        raise ValueError(f"compile is {spec.compile!r}; of {TRACED} off and on are predicted")
    if isinstance(spec, LayoutSpec) and set(spec.axes.axes) - {"data"}:
        raise ValueError(f"layout is {spec.layout!r}; {LAYOUTS}")
    wrapper = wrapper_of(spec)
    if wrapper in SHARDED:
        raise ValueError(f"wrapper is {wrapper!r}; {LAYOUTS}")


def wrapper_of(spec: TracedSpec) -> str:
    """How the ranks of the data axis are kept equal."""
    if isinstance(spec, LayoutSpec):
        return spec.axes.wrapper
    return spec.wrapper if isinstance(spec, DataParallelSpec) else "none"
