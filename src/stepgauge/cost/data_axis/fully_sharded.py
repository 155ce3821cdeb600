"""ZeRO 3: each unit's weights are all-gathered before it computes, and its gradients reduced after."""

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
from stepgauge.spec.layout import WRAPPERS
from stepgauge.spec.plan.shards import MOST_IN_FLIGHT, PREFETCHED


class FullySharded(DataParallelCost):
    """ZeRO 3 with one unit per block, and one for the rest, which is not resharded after forward.

    While one unit computes, the next units' weights are gathered. Gradients are reduce-scattered in
    each of several passes, because no rank has memory for whole ones.
    """

    every_pass = True

    def __init__(self, sending: Sending, step: RankStep):
        self.sending, self.prices = sending, step.prices
        self.arithmetic = step.operations.arithmetic
        self._keeps_last = WRAPPERS[sending.wrapper].keeps_last
        self._elements = step.operations.units
        self._ends = step.operations.num_parameters - sum(self._elements.values())
        self._hooks = hooks_of(
            self.prices.machine, sending.wrapper, step.operations.spec, self.prices.host_layout
        )
        self.num_gradients = num_gradients(step)
        self._first: dict[str, str] = {}  # the first group of each phase
        self._order: dict[str, list[str]] = {}  # its units in the order of computation
        for phase in ("forward", "backward"):
            names = [group.name for group in step.groups(phase)]
            self._first[phase] = names[0]
            self._order[phase] = [name for name in names if name in self._elements]
        self._begun = {"forward": 0, "backward": 0}  # number of units that have started
        self._gathers: dict[tuple[str, int], int] = {}  # works, by phase and place in _order
        self._reductions: list[tuple[int, int]] = []  # works in flight, with their elements

    def resident_us(self) -> tuple[float, float]:
        """Returns the time to gather all weights of a pipeline stage, and to reduce all its gradients.

        A stage stays unsharded for the whole step (parallel/fsdp), in the parameters' dtype.
        """
        units = [*self._elements.values(), self._ends]
        sizes = [numel * self.arithmetic.weight_bytes for numel in units if numel]

        def total_us(operation: str) -> float:
            return sum(self.prices.collective(operation, nbytes, "data").us for nbytes in sizes)

        return total_us("all_gather"), total_us("reduce_scatter")

    def begin(self) -> None:
        self._gathers, self._begun = {}, {"forward": 0, "backward": 0}

    def before(self, program: Program, phase: str, group: LaunchGroup) -> None:
        program.host(f"{group.name} hooks", self._hooks_us(phase, group))
        if phase == "forward" and group.name == self._first[phase] and self._ends:
            program.wait(self._gather(program, "ends", self._ends))
            self.copy_out(program, "ends", self._ends)
            self._gather_unit(program, phase, 0)
        if group.name not in self._elements:
            return
        place = self._begun[phase]
        is_whole = phase == "backward" and place == 0 and self._keeps_last
        if not is_whole:
            self._gather_unit(program, phase, place)
            program.wait(self._gathers[phase, place])
            self.copy_out(program, group.name, self._elements[group.name])
        for following in range(place + 1, place + 1 + PREFETCHED):
            self._gather_unit(program, phase, following)
        self._begun[phase] += 1

    def after(self, program: Program, phase: str, group: LaunchGroup) -> None:
        if phase != "backward" or group.name not in self._elements:
            return
        if group.name in self._order[phase][self._begun[phase] :]:  # the unit runs again later
            return
        self._reduce(program, group.name, self._elements[group.name])
        if len(self._reductions) > MOST_IN_FLIGHT:
            self._finish_reduction(program)

    def after_backward(self, program: Program) -> None:
        if self._ends:
            self._reduce(program, "ends", self._ends)
        while self._reductions:
            self._finish_reduction(program)

    def copy_out(self, program: Program, name: str, numel: int) -> None:
        """Adds the copy of gathered weights; here none, since they are used where they arrive."""

    def packed_gradients(self, numel: int) -> Term:
        """Returns the copy of gradients into one row per rank."""
        return strided_copy("gradients packed", numel)

    def optimizer(self, program: Program, operations: Operations, prices: Prices) -> None:
        units = len(self._elements) + 1
        program.host("shards", self._hooks["optimizer"].us(self.num_gradients, units))
        term = operations.optimizer(operations.num_parameters / self.sending.ranks)
        program.compute(term.name, prices.us(term), term.operation)

    def _hooks_us(self, phase: str, group: LaunchGroup) -> float:
        """Returns the host time of a group that is a unit, or that starts the phase."""
        hooks = self._hooks[phase]
        is_first = group.name == self._first[phase]
        if not is_first and group.name not in self._elements:
            return 0.0
        unit_us = hooks.message_us + hooks.parameter_us * group.gradients
        return unit_us + hooks.once_us * is_first

    def _gather_unit(self, program: Program, phase: str, place: int) -> None:
        """Gathers the unit at this place of the phase, unless there is none or it was gathered before."""
        units = self._order[phase]
        if place < len(units) and (phase, place) not in self._gathers:
            name = units[place]
            gathered = self._gather(program, f"{phase} {name}", self._elements[name])
            self._gathers[phase, place] = gathered

    def _gather(self, program: Program, name: str, numel: int) -> int:
        """Gathers weights in the dtype of activations; each rank casts its shard first."""
        if self.arithmetic.activation_bytes < self.arithmetic.weight_bytes:
            self._cast(program, f"{name} cast", numel)
        us = self.prices.collective(
            "all_gather", numel * self.arithmetic.activation_bytes, "data"
        ).us
        return program.send(f"gather {name}", DATA, us, "all_gather")

    def _reduce(self, program: Program, name: str, numel: int) -> None:
        packed = self.packed_gradients(numel)
        program.compute(packed.name, self.prices.us(packed), TRAFFIC)
        us = self.prices.collective(
            "reduce_scatter", numel * self.arithmetic.activation_bytes, "data"
        ).us
        sent = program.send(f"reduce {name}", DATA, us, "reduce_scatter")
        self._reductions.append((sent, numel))

    def _finish_reduction(self, program: Program) -> None:
        """Waits for the oldest reduction and casts its result to the weights' dtype."""
        sent, numel = self._reductions.pop(0)
        program.wait(sent)
        if self.arithmetic.activation_bytes < self.arithmetic.weight_bytes:
            self._cast(program, "gradients cast", numel)

    def _cast(self, program: Program, name: str, numel: int) -> None:
        nbytes = (
            numel
            / self.sending.ranks
            * (self.arithmetic.activation_bytes + self.arithmetic.weight_bytes)
        )
        program.compute(name, self.prices.us(Term(name, TRAFFIC, (nbytes,))), TRAFFIC)
