"""`stepgauge bench comm`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli import rows
from stepgauge.cli.options import Values, expand, parse_bytes, spec_options
from stepgauge.spec.comm import CommSpec, sizes

FACTOR = 2.0


@spec_options(CommSpec, sweep=True, defaults={"device": "auto"})
def comm(
    *,
    values: Values,
    begin: Annotated[
        str | None,
        Parameter(
            name=("--begin", "-b"), metavar="SIZE", help="Smallest of a range of sizes, such as 1M."
        ),
    ] = None,
    end: Annotated[
        str | None,
        Parameter(name=("--end", "-e"), metavar="SIZE", help="Largest of the range. [begin]"),
    ] = None,
    factor: Annotated[
        float | None,
        Parameter(name=("--factor", "-f"), help="From one size of the range to the next. [2]"),
    ] = None,
    out: rows.Out = Path("runs/bench-comm"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Time collectives in the columns of nccl-tests, with every element checked.

    Every option takes several values, and their product is measured. Under torchrun its processes
    are the ranks; otherwise the ranks are started here. `stepgauge comm fit RUN` turns the run into
    a cost per byte.
    """
    specs = _specs(values, _range(begin, end, factor))

    rows.measure_and_print(specs, out, fresh=fresh, format=format)


def _specs(values: Values, ranged: tuple[int, ...]) -> list[CommSpec]:
    """The rows in the order in which they run; `ranged` are the sizes of a range, if one is given."""
    if ranged:
        if "size_bytes" in values:
            raise ValueError("size and a range from begin to end are both given; choose one")
        values["size_bytes"] = ranged

    devices = tuple(rows.resolved(str(name)) for name in values["device"])
    values.setdefault("backend", ("gloo" if devices[0] == "cpu" else "nccl",))
    expanded = expand(CommSpec, rows.of_torchrun({**values, "device": devices}))
    specs = list(dict.fromkeys(spec.canonical() for spec in expanded))
    # The ranks of one number are started once if the rows that they measure follow one another.
    return sorted(specs, key=lambda spec: (spec.device, spec.ranks))


def _range(begin: str | None, end: str | None, factor: float | None) -> tuple[int, ...]:
    """The sizes from begin to end; none without a range. Raises ValueError for a range in part."""
    if begin is None:
        for name, value in (("end", end), ("factor", factor)):
            if value is not None:
                raise ValueError(f"{name} is {value}; it needs a begin, as in --begin 1K --end 1M")
        return ()
    first = parse_bytes(begin, "begin")
    return tuple(
        sizes(
            first, parse_bytes(end, "end") if end else first, FACTOR if factor is None else factor
        )
    )
