"""`stepgauge bench op`."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import print_records, print_table, tell
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.rows import Fresh, Out, RowFormat, require_success, resolve_devices, run_jobs
from stepgauge.report.ops import figures_table, launched_table, op_page
from stepgauge.spec.op import OpSpec, read_target
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore, StoreError

Target = Annotated[
    str,
    Parameter(help="FILE.py:function, or FILE.cu with its inputs in FILE.py.", show_default=False),
]


@spec_options(OpSpec, defaults={"device": "auto"})
def op(
    target: Target,
    /,
    *,
    values: Values,
    out: Out = Path("runs/bench-op"),
    fresh: Fresh = False,
    format: RowFormat = "table",
) -> None:
    """Check, time and profile a function of your own, and place it on the roofline.

    The file defines function(*inputs) and inputs(device), and if it can
    function_reference(*inputs), function_bytes and function_flops. A result that differs from the
    reference gets no time, and the command fails. Bytes default to inputs and results, FLOPs to
    those of the reference's matrix products.
    """
    path, function = read_target(target)

    from stepgauge.bench import op as bench_op
    from stepgauge.bench.sweep import Job
    from stepgauge.bench.user_file import require_tools
    from stepgauge.measure.devices import resolve

    (options,) = [{name: value for name, (value,) in values.items()}]
    require_tools(path, resolve(options["device"]))
    _require_function(path, function)
    (spec,) = resolve_devices(
        [OpSpec(file=str(path), function=function, content=_digest(path), **options)]
    )
    (record,) = run_jobs([Job(bench_op.run, spec)], RunStore(out), fresh=fresh)
    if not record.metrics:  # nothing was measured: the sentence says all
        require_success([record])
    if format != "table":
        print_records([record], format)
    else:
        for table in [figures_table(record)] + ([launched_table(record)] if record.series else []):
            print(table.caption)
            print_table(dataclasses.replace(table, caption=""))
    require_success([record])
    _write_page(record, out / "report.html")


def _write_page(record: Record, report: Path) -> None:
    try:
        report.write_text(op_page(record), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {report}: {error.strerror}") from None
    tell(f"report: {report}")


def _require_function(path: Path, function: str) -> None:
    """Raises ValueError for a file that cannot be imported, or that lacks what is measured."""
    from stepgauge.bench.user_file import problem
    from stepgauge.runtime.launch import RankError
    from stepgauge.runtime.workers import run_isolated

    # In a process of its own: a file may take a device as it is imported.
    try:
        lacks = run_isolated(problem, path, function)
    except RankError as error:  # sys.exit() or a crash
        lacks = f"{path} cannot be imported: {error}"
    if lacks:
        raise ValueError(lacks)


def _digest(path: Path) -> str:
    """Of the source and of the Python file that goes with it."""
    sources = dict.fromkeys((path, path.with_suffix(".py")))
    return hashlib.sha256(b"\n".join(source.read_bytes() for source in sources)).hexdigest()[:16]
