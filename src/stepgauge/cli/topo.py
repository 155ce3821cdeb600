"""`stepgauge topo`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def topo(*, report: Annotated[Path | None, Parameter(help="HTML file.")] = None) -> None:
    """Soon."""
