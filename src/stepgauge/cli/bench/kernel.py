"""`stepgauge bench kernel ...`: an operation beside its peers, one command an operation."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.kernels import outcomes_of
from stepgauge.spec.grids import names_of, points
from stepgauge.spec.kernel import AUTO, KERNELS, KernelSpec

app = App(
    name="kernel",
    help="Time one operation beside its peers: checked first, then all in turns in one process.",
)

Peers = Annotated[
    tuple[str, ...],
    Parameter(
        help="Names, or auto: all that are installed.",
    ),
]

HOW = (
    "Every implementation is checked against float64; one that is wrong gets no time. Every option "
    "takes several values, and their product is measured. Rows are on disk at once, and the same "
    "command goes on where it stopped."
)


def expand_grid(spec: type[KernelSpec], grid: str, values: Values) -> list[KernelSpec]:
    """The grid's points, each with the product of the values given in place of its own, no row
    twice.

    The passes of one shape follow one another, since they share what was set up for it.
    """
    shapes: dict[KernelSpec, list[KernelSpec]] = {}
    for point in points(spec.kind, grid):
        for row in expand(spec, {name: (value,) for name, value in point.items()} | values):
            shapes.setdefault(dataclasses.replace(row, passes=spec.passes_offered[0]), []).append(
                row
            )
    return [row for shape in shapes.values() for row in dict.fromkeys(shape)]


def _command(spec: type[KernelSpec]) -> Callable[..., None]:
    def kernel(
        *,
        values: Values,
        grid: Annotated[
            str,
            Parameter(
                help=f"Shapes by name; options given override. ({', '.join(names_of(spec.kind))})"
            ),
        ] = "default",
        peers: Peers = (),
        out: rows.Out = Path("runs/bench-kernel"),
        fresh: rows.Fresh = False,
        format: rows.RowFormat = "table",
    ) -> None:
        names = [name for text in peers for name in text.split(",") if name]
        if names:
            values["peers"] = (AUTO if AUTO in names else " ".join(names),)
        records = rows.measured(
            rows.with_devices(expand_grid(spec, grid, values)), out, fresh=fresh
        )
        print_records(records, format)
        for sentence in outcomes_of(records):
            tell(sentence)
        rows.require_success(records)

    first, _, rest = (spec.__doc__ or "").partition("\n")
    kernel.__doc__ = f"{first}\n{rest}\n{HOW}"
    kernel.__name__ = spec.kind.replace("-", "_")
    return spec_options(spec, sweep=True, defaults={"device": "auto"})(kernel)


for _spec in KERNELS.values():
    app.command(_command(_spec), name=_spec.kind)
