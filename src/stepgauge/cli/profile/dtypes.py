"""`stepgauge profile dtypes`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_in
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.dtypes import dtype_table
from stepgauge.spec.dtypes import DtypesSpec
from stepgauge.spec.model import ModelSpec

Each = Annotated[bool, Parameter(help="Every block by itself, rather than equal ones as one row.")]

# What changes no type that is shown.
WITHOUT = ("compile", "optimizer", "checkpointing", "checkpoint_blocks", "memory_gib", "phases",
           "data", "seed")  # fmt: skip


@spec_options(
    DtypesSpec,
    ModelSpec,
    sweep=True,
    defaults={"size": "nano", "device": "auto", "precision": "bf16"},
    without=WITHOUT,
)
def dtypes(
    *,
    values: Values,
    each: Each = False,
    out: rows.Out = Path("runs/profile-dtypes"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Show the type of every parameter, module output, loss and gradient of a step.

    The logits are those of a forward without targets: a fused loss never makes them. Every option
    takes several values.
    """
    records = rows.measured(rows.with_devices(expand(DtypesSpec, values)), out, fresh=fresh)
    for record in records:
        if record.status == "ok":
            print_in(format, dtype_table(record, each=each))
    rows.require_success(records)
