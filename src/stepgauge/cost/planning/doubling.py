"""Finds by doubling how large a micro-batch or a context fits."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from stepgauge.cost.planning.planner import memory_limit
from stepgauge.cost.planning.screen import Candidate, Screen, candidates
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.spec.planning import PlanSpec

T = TypeVar("T")


def largest_micro_batch(spec: PlanSpec, machine: CalibratedMachine, candidate: Candidate) -> int:
    """Returns the layout's largest micro-batch that fits, found by doubling.

    The global batch may grow with it.
    """
    limit, screen = memory_limit(machine), Screen(spec, machine)

    def larger(fitting: Candidate) -> Candidate | None:
        twice = dataclasses.replace(fitting, micro_batch=2 * fitting.micro_batch)
        return twice if screen.memory(twice).device_bytes <= limit else None

    return _doubled(candidate, larger).micro_batch


def longest_context(spec: PlanSpec, machine: CalibratedMachine, candidate: Candidate) -> int:
    """Returns the longest context that fits with the candidate's micro-batch, found by doubling."""
    limit = memory_limit(machine)

    def longer(fitting: PlanSpec) -> PlanSpec | None:
        twice = _with_twice_the_context(fitting)
        return twice if Screen(twice, machine).memory(candidate).device_bytes <= limit else None

    return _doubled(spec, longer).network.context_length


def longest_of_all(
    spec: PlanSpec, machine: CalibratedMachine, fitting: Candidate
) -> tuple[int, Candidate]:
    """Returns the longest context that fits with any layout, found by doubling, and the first such layout;
    `fitting` if that is the plan's own context.
    """

    def longer(found: tuple[PlanSpec, Candidate]) -> tuple[PlanSpec, Candidate] | None:
        twice = _with_twice_the_context(found[0])
        layout = _first_with_least_memory(twice, machine)
        return (twice, layout) if layout else None

    # With a single block, recomputing it needs more memory than keeping it.
    first = _first_with_least_memory(spec, machine) or fitting
    longest, layout = _doubled((spec, first), longer)
    return longest.network.context_length, layout


def _doubled(value: T, larger: Callable[[T], T | None]) -> T:
    """Returns the last value of a search by doubling.

    `larger` returns the next value; None if it does not fit. It raises ValueError for what cannot be.
    """
    while True:
        try:
            twice = larger(value)
        except ValueError:  # more sequences than a step may have, or more tokens than positions
            return value
        if twice is None:
            return value
        value = twice


def _with_twice_the_context(spec: PlanSpec) -> PlanSpec:
    """Returns the plan with longer sequences, of any number of tokens."""
    context = 2 * spec.network.context_length
    longer = dataclasses.replace(spec.network, context_length=context)
    return dataclasses.replace(spec, model=longer, tokens="0")


def _first_with_least_memory(spec: PlanSpec, machine: CalibratedMachine) -> Candidate | None:
    """Returns the first layout that fits of those with ZeRO 3 and recomputed blocks."""
    screen, limit = Screen(spec, machine), memory_limit(machine)
    fitting = (
        candidate
        for candidate in candidates(spec, machine.network.gpus_per_node)
        if candidate.checkpointing == "blocks" and candidate.layout.wrapper in ("zero3", "none")
        if screen.memory(candidate).device_bytes <= limit
    )
    return next(fitting, None)
