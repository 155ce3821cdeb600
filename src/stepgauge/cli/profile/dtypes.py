"""`stepgauge profile dtypes`."""

from typing import Annotated, Literal

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import resolve_devices
from stepgauge.report.memory import dtype_table
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec

Each = Annotated[bool, Parameter(help="Every block by itself, rather than equal ones as one row.", negative="")]


@spec_options(MemorySpec, ModelSpec, defaults={"size": "nano", "device": "auto", "precision": "bf16"})
def dtypes(
    *,
    values: Values,
    each: Each = False,
    format: Annotated[Literal[Format], Parameter(help="How the table is printed.")] = "table",
) -> None:
    """Show the type of every parameter, module output, loss and gradient of a step.

    The logits are those of a forward without targets: a fused loss never makes them.
    """
    from stepgauge.bench.memory import probe_dtypes

    (spec,) = resolve_devices(expand(MemorySpec, values))
    table = dtype_table([(f.what, f.path, f.module, f.dtype) for f in probe_dtypes(spec)], each=each)
    if format == "table":
        print_table(table)
    else:
        print(table.to(format), end="")
