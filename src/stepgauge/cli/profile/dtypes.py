"""`stepgauge profile dtypes`: shows the types of a step's tensors."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.dtypes import dtype_table
from stepgauge.spec.dtypes import DtypesSpec
from stepgauge.spec.model import ModelSpec

# Fields that change no type that is shown.
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
    each: Annotated[
        bool, Parameter(help="Print every block, instead of merging equal blocks into one row.")
    ] = False,
    out: rows.Out = Path("runs/profile-dtypes"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Show the type of every parameter, module output, loss and gradient of a step.

    The logits are those of a forward pass without targets, because a fused loss never computes them.
    Every option accepts several values; all combinations are measured.
    """
    records = rows.measure(rows.resolve_devices(expand(DtypesSpec, values)), out, fresh=fresh)
    for record in records:
        if record.status == "ok":
            print_table(dtype_table(record, each=each), format)
    rows.require_success(records)
