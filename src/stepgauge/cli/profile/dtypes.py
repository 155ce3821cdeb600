"""`stepgauge profile dtypes`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_in
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import RunFailedError, named_folder, resolve_devices
from stepgauge.report.dtypes import dtype_table
from stepgauge.spec.dtypes import DtypesSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.store import RunStore

Each = Annotated[bool, Parameter(help="Every block by itself, rather than equal ones as one row.")]

Keep = Annotated[
    Path | None,
    Parameter(
        help="Folder of a run that keeps the record, for stepgauge report.", converter=named_folder
    ),
]

# What changes no type that is shown.
WITHOUT = ("compile", "optimizer", "checkpointing", "checkpoint_blocks", "memory_gib", "phases",
           "data", "seed")  # fmt: skip


@spec_options(
    DtypesSpec,
    ModelSpec,
    defaults={"size": "nano", "device": "auto", "precision": "bf16"},
    without=WITHOUT,
)
def dtypes(
    *,
    values: Values,
    each: Each = False,
    out: Keep = None,
    format: Annotated[Format, Parameter(help="How the table is printed.")] = "table",
) -> None:
    """Show the type of every parameter, module output, loss and gradient of a step.

    The logits are those of a forward without targets: a fused loss never makes them.
    """
    (spec,) = resolve_devices(expand(DtypesSpec, values))

    from stepgauge.bench import dtypes as bench
    from stepgauge.bench import step as bench_step
    from stepgauge.bench.sweep import stamped, what_failed
    from stepgauge.runtime.launch import RankError
    from stepgauge.runtime.workers import run_isolated

    bench_step.check(spec)
    try:  # in a process of its own, as a user's model may exit
        record = run_isolated(bench.run, spec)
    except RankError as error:
        raise RunFailedError(what_failed(error, spec)) from None
    if out is not None:
        store = RunStore(out)
        with store.held():
            store.append(stamped(record))
    print_in(format, dtype_table(record, each=each))
