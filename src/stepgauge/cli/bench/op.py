"""`stepgauge bench op`: checks, times and profiles a user's function."""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.console import print_records, print_table
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.records import write_page
from stepgauge.report.ops import figures_table, launched_table
from stepgauge.spec.op import OpSpec, read_target


@spec_options(OpSpec, defaults={"device": "auto"})
def op(
    target: Annotated[
        str, Parameter(help="FILE.py:function, or FILE.cu with its inputs in FILE.py.")
    ],
    /,
    *,
    values: Values,
    out: rows.Out = Path("runs/bench-op"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Check, time and profile your own function, and place it on the roofline.

    The file defines function(*inputs) and inputs(device), and optionally
    function_reference(*inputs), function_bytes and function_flops. If the result differs from the
    reference, the function is not timed and the command fails. By default the bytes are those of
    inputs and results, and the FLOPs those of the reference's matrix products.
    """
    path, function = read_target(target)
    options = {name: value for name, (value,) in values.items()}
    (spec,) = rows.resolve_devices(
        [OpSpec(file=str(path), function=function, content=_digest(path), **options)]
    )
    check = functools.partial(_require_usable, path, spec)
    (record,) = rows.measure([spec], out, fresh=fresh, check=check)
    if not record.metrics:  # nothing was measured, and there is no table to print
        rows.require_success([record])
    if format != "table":
        print_records([record], format)
    else:
        for table in [figures_table(record)] + ([launched_table(record)] if record.series else []):
            print(table.caption)
            print_table(dataclasses.replace(table, caption=""))
    rows.require_success([record])
    write_page(out)


def _require_usable(path: Path, spec: OpSpec) -> None:
    """Raises ValueError for a file that cannot be built or run here or lacks the function."""
    import torch

    from stepgauge.bench.user_file import problem, require_tools

    require_tools(path, torch.device(spec.device))
    rows.require_usable(path, problem, path, spec.function)


def _digest(path: Path) -> str:
    """Returns a hash of the source and, for a .cu file, of the Python file with its inputs."""
    sources = dict.fromkeys((path, path.with_suffix(".py")))
    return hashlib.sha256(b"\n".join(source.read_bytes() for source in sources)).hexdigest()[:16]
