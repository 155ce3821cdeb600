"""A page's plots as SVG files that stand alone."""

import importlib.resources
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stepgauge.report.page import Block, Elsewhere, Plot, Section

LONGEST_NAME = 60


def save_plots(sections: Sequence[Section], folder: Path) -> int:
    """Writes each plot in the page's light colours, and gives how many. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count(1)
    for section in sections:
        for plot in _plots(section.blocks):
            told = re.sub(r"\W+", "-", f"{section.title} {plot.caption}").strip("-").lower()
            name = f"{next(numbers):02}-{told[:LONGEST_NAME].strip('-')}.svg"
            (folder / name).write_text(standalone(plot.svg), encoding="utf-8")
    return next(numbers) - 1


def _plots(blocks: Iterable[Block]) -> Iterator[Plot]:
    for block in blocks:
        if isinstance(block, Plot) and block.is_svg:
            yield block
        elif isinstance(block, Elsewhere):
            yield from _plots(block.blocks)


def standalone(svg: str) -> str:
    """The SVG with the values of the page's light colours for the variables of its style sheet."""
    css = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+): light-dark\(([^,]+(?:\([^)]*\))?),", css))
    values = {**colours, "--sans": "sans-serif"}
    return re.sub(r"var\((--[\w-]+)\)", lambda found: values[found[1]], svg)
