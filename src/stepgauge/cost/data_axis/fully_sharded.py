"""ZeRO 3 as works on the data axis's communicator: a unit's weights gathered before it computes, its
gradients reduced after it.
"""

from stepgauge.cost.data_axis.buckets import Sending, num_gradients
from stepgauge.cost.data_axis.wrapper_host import hooks_of
from stepgauge.cost.operations.terms import TRAFFIC, Term, strided_copy
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import (
    DATA,
    DataParallelCost,
    LaunchGroup,
    Operations,
    Program,
    RankStep,
)
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED


class FullySharded(DataParallelCost):
    """ZeRO 3: a unit a block, and one for the rest, which stays whole between forward and
    backward. The next units' weights are gathered while one computes; gradients are reduced to
    their slices, in each of several passes: no rank has a place for whole ones.
    """

    every_pass = True

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices, self.how = sending, step.prices, step.operations.how
        self._elements = step.operations.units
        self._ends = step.operations.num_parameters - sum(self._elements.values())
        self._hooks = hooks_of(
            self.prices.machine, sending.wrapper, step.operations.spec, self.prices.layout
        )
        self.num_gradients = num_gradients(step)
        self._first: dict[str, str] = {}  # of each phase, the group that begins it
        self._order: dict[str, list[str]] = {}  # and its units as they compute
        for phase in ("forward", "backward"):
            names = [group.name for group in step.groups(phase)]
            self._first[phase] = names[0]
            self._order[phase] = [name for name in names if name in self._elements]
        self._begun = {"forward": 0, "backward": 0}  # how many units of a phase have
        self._gathers: dict[tuple[str, int], int] = {}
        self._reductions: list[tuple[int, int]] = []  # with the elements of each

    def resident_us(self) -> tuple[float, float]:
        """Of a stage that is whole for a step (parallel/fsdp): all weights gathered, and all
        gradients averaged, in the parameters' type.
        """
        units = [*self._elements.values(), self._ends]
        sent = [numel * self.how.weight for numel in units if numel]

        def total_us(operation: str) -> float:
            return sum(self.prices.collective(operation, nbytes, "data").us for nbytes in sent)

        return total_us("all_gather"), total_us("reduce_scatter")

    def begin(self) -> None:
        self._gathers, self._begun = {}, {"forward": 0, "backward": 0}

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        program.host(f"{group.name} hooks", self._hooks_us(phase, group))
        if phase == "forward" and group.name == self._first[phase] and self._ends:
            program.wait(self._gather(program, "ends", self._ends))
            self.copied_out(program, "ends", self._ends)
            self._gather_unit(program, phase, 0)
        if group.name not in self._elements:
            return
        place = self._begun[phase]
        self._gather_unit(program, phase, place)
        program.wait(self._gathers[phase, place])
        self.copied_out(program, group.name, self._elements[group.name])
        for following in range(place + 1, place + 1 + PREFETCHED):
            self._gather_unit(program, phase, following)
        self._begun[phase] += 1

    def after(self, program: Program, phase: str, group: LaunchGroup) -> None:
        if phase != "backward" or group.name not in self._elements:
            return
        if group.name in self._order[phase][self._begun[phase] :]:  # it is run once more
            return
        self._reduce(program, group.name, self._elements[group.name])
        if len(self._reductions) > MOST_IN_FLIGHT:
            self._collect(program)

    def after_backward(self, program: Program) -> None:
        if self._ends:
            self._reduce(program, "ends", self._ends)
        while self._reductions:
            self._collect(program)

    def copied_out(self, program: Program, name: str, numel: int) -> None:
        """What is done to weights that have arrived: they lie where they are used."""

    def packed(self, numel: int) -> Term:
        """Gradients, copied to the rows of the ranks."""
        return strided_copy("gradients packed", numel)

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        units = len(self._elements) + 1
        program.host("shards", self._hooks["optimizer"].us(self.num_gradients, units))
        term = operations.optimizer(operations.num_parameters / self.sending.ranks)
        program.compute(term.name, prices.us(term), term.operation)

    def _hooks_us(self, phase: str, group: LaunchGroup) -> float:
        """Of a block's unit, and with the group that begins the phase of that of the ends."""
        hooks = self._hooks[phase]
        is_first = group.name == self._first[phase]
        own = hooks.message_us + hooks.parameter_us * group.gradients
        found = own if is_first or group.name in self._elements else 0.0
        return found + hooks.once_us * is_first

    def _gather_unit(self, program: Program, phase: str, place: int) -> None:
        units = self._order[phase]
        if place < len(units) and (phase, place) not in self._gathers:
            name = units[place]
            gathered = self._gather(program, f"{phase} {name}", self._elements[name])
            self._gathers[phase, place] = gathered

    def _gather(self, program: Program, name: str, numel: int) -> int:
        """The rank's slice in the type that is computed in, from all ranks."""
        if self.how.activation < self.how.weight:
            self._cast(program, f"{name} narrowed", numel)
        us = self.prices.collective("all_gather", numel * self.how.activation, "data").us
        return program.send(f"gather {name}", DATA, us, "all_gather")

    def _reduce(self, program: Program, name: str, numel: int) -> None:
        packed = self.packed(numel)
        program.compute(packed.name, self.prices.of(packed).us, TRAFFIC)
        us = self.prices.collective("reduce_scatter", numel * self.how.activation, "data").us
        sent = program.send(f"reduce {name}", DATA, us, "reduce_scatter")
        self._reductions.append((sent, numel))

    def _collect(self, program: Program) -> None:
        sent, numel = self._reductions.pop(0)
        program.wait(sent)
        if self.how.activation < self.how.weight:
            self._cast(program, "gradients widened", numel)

    def _cast(self, program: Program, name: str, numel: int) -> None:
        nbytes = numel / self.sending.ranks * (self.how.activation + self.how.weight)
        program.compute(name, self.prices.of(Term(name, TRAFFIC, (nbytes,))).us, TRAFFIC)
