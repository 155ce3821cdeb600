"""`stepgauge bench kernel ...`: times implementations of an operation, one command per operation."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import info, warn
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.kernels import outcomes_of
from stepgauge.spec.grids import names_of, points
from stepgauge.spec.kernel import AUTO, KERNELS, KernelSpec

app = App(
    name="kernel",
    help="Check and time implementations of one operation, alternating in one process.",
)

COMMON_HELP = (
    "Every implementation is checked against a float64 reference; one that is wrong is not timed. "
    "Every option accepts several values; all combinations are measured. Each row is saved as soon "
    "as it is measured; rerun the command to continue."
)


def expand_grid(spec: type[KernelSpec], grid: str, values: Values) -> list[KernelSpec]:
    """Returns the specs of the grid's points, without duplicates. Values given as options replace
    the points' own.

    The passes of one shape are adjacent, because they share the setup of their inputs.
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
                help=f"Named set of shapes ({', '.join(names_of(spec.kind))}); options override it."
            ),
        ] = "default",
        peers: Annotated[
            tuple[str, ...],
            Parameter(help="Implementations to compare with; auto: all that are installed."),
        ] = (),
        out: rows.Out = Path("runs/bench-kernel"),
        fresh: rows.Fresh = False,
        format: rows.RowFormat = "table",
    ) -> None:
        names = [name for text in peers for name in text.split(",") if name]
        if names:
            values["peers"] = (AUTO if AUTO in names else " ".join(names),)
        specs = rows.resolve_devices(expand_grid(spec, grid, values))
        if grid != "default" and any(each.device.startswith("cpu") for each in specs):
            warn(
                f"the shapes of --grid {grid} are sizes for GPUs, and a row may take minutes on a CPU: "
                "--grid default has a small one"
            )
        records = rows.measure(specs, out, fresh=fresh)
        rows.print_rows(records, format)
        for sentence in outcomes_of(records):
            info(sentence)
        rows.require_success(records)

    first, _, rest = (spec.__doc__ or "").partition("\n")
    kernel.__doc__ = f"{first}\n{rest}\n{COMMON_HELP}"
    kernel.__name__ = spec.kind.replace("-", "_")
    return spec_options(spec, sweep=True, defaults={"device": "auto"})(kernel)


for _spec in KERNELS.values():
    app.command(_command(_spec), name=_spec.kind)
