"""Every behaviour of a user has the same effect under a wrapper as in one process, or it raises."""

import os

import pytest
from tests.parallel.conformance import gradients, page, sequences
from tests.parallel.conformance.table import BEHAVIOURS, IDLE, REFUSED, RIGHT, refusal, run
from tests.parallel.conformance.training import OURS, WRAPPERS

from stepgauge.runtime.launch import launch

# True runs all wrappers on two and four ranks; by default a part runs that CI has time for.
EVERYTHING = bool(os.environ.get("STEPGAUGE_CONFORMANCE"))
TESTED = OURS if EVERYTHING else ("bucketed", "zero1", "zero2", "zero3")
PLANS = ("naive", "flat", "overlapped")  # differ from bucketed only in their plan
SEEDS = range(2000 if EVERYTHING else 20)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(on_two_ranks, ranks=2)[0]


def on_two_ranks():
    of_gradients = [name for name in BEHAVIOURS if name.replace(" ", "_") in vars(gradients)]
    cells = run(list(BEHAVIOURS), list(TESTED)) | run(of_gradients[::4], list(PLANS))
    return cells, sequences.run(SEEDS, list(TESTED))


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(two_ranks, name):
    require_conformance({cell: result for cell, result in two_ranks[0].items() if cell[0] == name})


def test_four_ranks():
    names = list(BEHAVIOURS) if EVERYTHING else list(BEHAVIOURS)[::8]
    wrappers = TESTED if EVERYTHING else ("bucketed", "zero2", "zero3")
    require_conformance(launch(run, names, list(wrappers), ranks=4)[0])


def test_random_sequences(two_ranks):
    """`python -m tests.parallel.conformance.sequences` plays more."""
    found = two_ranks[1]
    assert not found["different"]
    assert len(found["refused"]) < len(SEEDS) * len(TESTED) / 20


def test_the_page_has_every_cell_as_the_tests_expect_it():
    text = page.PAGE.read_text(encoding="utf-8")
    cells, about, on_four = page.parsed(text)
    assert [*cells] == [(name, w) for name in BEHAVIOURS for w in WRAPPERS], page.COMMAND
    assert page.rendered(cells, about, on_four) == text, page.COMMAND
    for name, wrapper in cells:
        if wrapper in OURS:
            refused = refusal(name, wrapper) is not None
            assert cells[name, wrapper] in ((REFUSED,) if refused else (RIGHT, IDLE)), name
    assert len(BEHAVIOURS) >= 60 and len(WRAPPERS) >= 8


def require_conformance(cells):
    for (name, wrapper), (kind, message) in cells.items():
        expected = refusal(name, wrapper)
        if expected is not None:
            assert kind == REFUSED and expected in message, (name, wrapper, kind, message)
        else:
            assert kind in (RIGHT, IDLE), (name, wrapper, kind, message)
