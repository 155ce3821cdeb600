"""`stepgauge bench comm`: times collectives."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.options import Values, expand, parse_bytes, spec_options
from stepgauge.spec.comm import CommSpec, sizes

DEFAULT_FACTOR = 2.0  # from one size of a range to the next


@spec_options(CommSpec, sweep=True, defaults={"device": "auto"})
def comm(
    *,
    values: Values,
    begin: Annotated[
        str | None,
        Parameter(
            name=("--begin", "-b"),
            metavar="SIZE",
            help="Smallest size of a range, such as 1M.",
        ),
    ] = None,
    end: Annotated[
        str | None,
        Parameter(
            name=("--end", "-e"), metavar="SIZE", help="Largest size of the range. [default: begin]"
        ),
    ] = None,
    factor: Annotated[
        float | None,
        Parameter(
            name=("--factor", "-f"), help="Ratio of one size to the one before. [default: 2]"
        ),
    ] = None,
    out: rows.Out = Path("runs/bench-comm"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Time collectives, report bandwidths as nccl-tests defines them, and check every element.

    Every option accepts several values; all combinations are measured. Under torchrun its processes
    are the ranks; otherwise this command starts them. `stepgauge comm fit RUN` fits a cost per byte
    to the run.
    """
    specs = _specs(values, _sizes_of_range(begin, end, factor))
    records = rows.measure(specs, out, fresh=fresh)
    rows.print_rows(records, format)
    rows.require_success(records)


def _specs(values: Values, range_sizes: tuple[int, ...]) -> list[CommSpec]:
    """Returns the rows in the order in which they run. `range_sizes` is empty without a range."""
    if range_sizes:
        if "size_bytes" in values:
            raise ValueError("size and a range from begin to end are both given; choose one")
        values["size_bytes"] = range_sizes

    devices = tuple(rows.resolve_device(str(name)) for name in values["device"])
    values.setdefault("backend", ("gloo" if devices[0] == "cpu" else "nccl",))
    expanded = expand(CommSpec, rows.with_torchrun_ranks({**values, "device": devices}))
    specs = list(dict.fromkeys(spec.canonical() for spec in expanded))
    # Processes are reused from one row to the next if the number of ranks is the same.
    return sorted(specs, key=lambda spec: (spec.device, spec.ranks))


def _sizes_of_range(begin: str | None, end: str | None, factor: float | None) -> tuple[int, ...]:
    """Returns the sizes from begin to end; empty without a range. Raises ValueError if only end or
    factor is given.
    """
    if begin is None:
        for name, value in (("end", end), ("factor", factor)):
            if value is not None:
                raise ValueError(f"{name} is {value}; it needs --begin, as in --begin 1K --end 1M")
        return ()
    first = parse_bytes(begin, "begin")
    last = parse_bytes(end, "end") if end else first
    return tuple(sizes(first, last, DEFAULT_FACTOR if factor is None else factor))
