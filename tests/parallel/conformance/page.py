"""Writes docs/conformance.md: `python -m tests.parallel.conformance.page` runs all cells on two and on
four ranks.
"""

import datetime
import re
import sys
import textwrap
from pathlib import Path

import torch
from tests.parallel.conformance.table import BEHAVIOURS, IDLE, REFUSED, RIGHT, WRONG, run
from tests.parallel.conformance.training import OURS, WRAPPERS

from stepgauge.runtime.launch import launch

PAGE = Path(__file__).parents[3] / "docs/conformance.md"
MARKS = {RIGHT: "✓", REFUSED: "raises", WRONG: "**wrong**", IDLE: "·"}
KINDS = {mark: kind for kind, mark in MARKS.items()}
COMMAND = "python -m tests.parallel.conformance.page"
ALL = "Right under all of them:"
OTHERS = "On four ranks"

Cells = dict[tuple[str, str], str]  # rating by behaviour and wrapper


def rendered(cells: Cells, about: str, on_four: str) -> str:
    """Returns the page. `about` says where the cells ran, `on_four` what differs on four ranks."""
    names = list(dict.fromkeys(name for name, _ in cells))
    differ = [n for n in names if any(cells[n, w] != RIGHT for w in WRAPPERS)]
    alike = [name for name in names if name not in differ]
    counts = [
        f"| {wrapper} | {' | '.join(str(_count(cells, wrapper, kind)) for kind in MARKS)} |"
        for wrapper in WRAPPERS
    ]
    rows = [
        f"| {name} | {' | '.join(MARKS[cells[name, wrapper]] for wrapper in WRAPPERS)} |"
        for name in differ
    ]
    head = f"""# What is right under which wrapper

<!-- Written by `{COMMAND}`: do not edit. -->

`tests/parallel/conformance/` runs {len(names)} behaviours, things that users do with gradients, weights, modules
and optimizers, under {len(WRAPPERS)} wrappers. It compares weights and gradients with those of one process that
computes the batches of all ranks. PyTorch's own wrappers are used as their documentation says: DDP
with `find_unused_parameters` and, if it is copied, over the default group; `ZeroRedundancyOptimizer`
consolidated before it is saved.

{about}

    python -m tests.parallel.conformance.table adamw zero3       # cells by name
    {COMMAND}                    # all of them, and this page
    STEPGAUGE_CONFORMANCE=1 pytest tests/parallel/conformance    # stepgauge's wrappers, 2 and 4 ranks

The first seven wrappers are stepgauge's. If one of them raises, the message says why, and a test
checks the message; under zero3, DTensor itself raises for Rprop, fused SGD and a `.grad` that is not
a DTensor. For torch-fsdp, `parallelise` raises for an embedding with max_norm, not torch. A dot means
that the behaviour does not apply: for example, under fully sharded wrappers all ranks must gather the
same weights, so no rank can be the only one to use a layer."""
    table = [
        head,
        "\n".join(
            [
                "| | right | raises | wrong without an error | does not apply |",
                "| --- |" + " ---: |" * 4,
                *counts,
            ]
        ),
        "\n".join(
            [f"| behaviour | {' | '.join(WRAPPERS)} |", "| --- |" + " :-: |" * len(WRAPPERS), *rows]
        ),
        ALL,
        textwrap.fill(", ".join(alike) + ".", 100),
        on_four,
    ]
    return "\n\n".join(table) + "\n"


def _count(cells: Cells, wrapper: str, kind: str) -> int:
    return sum(found == kind for (_, of), found in cells.items() if of == wrapper)


def parsed(text: str) -> tuple[Cells, str, str]:
    """Returns the arguments of `rendered` from a page, with the behaviours in their present order."""
    found: Cells = {}
    for line in text.partition("| behaviour |")[2].splitlines():
        name, *marks = (part.strip() for part in line.strip("|").split("|"))
        if len(marks) == len(WRAPPERS) and marks[0] in KINDS:
            found |= {(name, w): KINDS[m] for w, m in zip(WRAPPERS, marks, strict=True)}
    names = text.partition(ALL)[2].partition(OTHERS)[0].strip().rstrip(".").replace("\n", " ")
    found |= {(name, wrapper): RIGHT for name in names.split(", ") for wrapper in WRAPPERS}
    cells = {(n, w): found[n, w] for n in BEHAVIOURS for w in WRAPPERS if (n, w) in found}
    unknown = {name for name, _ in found} - set(BEHAVIOURS)
    assert not unknown, f"the page has {unknown}; write it again with {COMMAND}"
    about = re.search(r"^Two ranks.*$", text, re.MULTILINE)
    assert about is not None, "the page must say where its cells ran"
    return cells, about[0], OTHERS + text.partition(f"\n{OTHERS}")[2].rstrip("\n")


def main() -> None:
    """Runs the wrappers in the arguments, or all; the columns of other wrappers stay as they are."""
    names, wrappers = list(BEHAVIOURS), sys.argv[1:] or list(WRAPPERS)
    is_whole = wrappers == list(WRAPPERS)
    cells, _, on_four = ({}, "", "") if is_whole else parsed(PAGE.read_text(encoding="utf-8"))
    cells |= {cell: kind for cell, (kind, _) in launch(run, names, wrappers, ranks=2)[0].items()}
    cells = {(name, w): cells[name, w] for name in names for w in WRAPPERS}
    if ours := [wrapper for wrapper in wrappers if wrapper in OURS]:
        on_four = _on_four_ranks(names, ours, cells)
    today = datetime.datetime.now(datetime.UTC).date()
    about = f"Two ranks over Gloo, torch {torch.__version__.partition('+')[0]}, {today}."
    PAGE.write_text(rendered(cells, about, on_four), encoding="utf-8")


def _on_four_ranks(names: list[str], ours: list[str], cells: Cells) -> str:
    others = [
        f"{name} under {wrapper}: {MARKS[kind]}"
        for (name, wrapper), (kind, _) in launch(run, names, ours, ranks=4)[0].items()
        if kind != cells[name, wrapper]
    ]
    result = f"these cells differ: {'; '.join(others)}" if others else "all cells are the same"
    return textwrap.fill(f"{OTHERS}, under {', '.join(ours)}, {result}.", 100)


if __name__ == "__main__":
    main()
