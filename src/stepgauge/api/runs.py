"""Specs run, and runs opened and compared."""

import contextlib
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepgauge.api.show import Comparison, Run
from stepgauge.report.compare import compare as compare_records
from stepgauge.report.compare import difference_table
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore


def run(spec: Any, *, folder: str | Path | None = None, fresh: bool = False) -> Run:
    """Measures a spec, or several, each in a process of its own, as the commands do.

    folder  where records are kept; rows that it has are not measured again unless `fresh`

    What fails or does not fit is a record that says so. Raises ValueError for a spec that cannot be
    run, StoreError where the folder cannot be written.
    """
    from stepgauge.bench.jobs import checked_jobs
    from stepgauge.bench.sweep import sweep

    specs = spec if isinstance(spec, Sequence) else [spec]
    place = Path(folder or tempfile.mkdtemp(prefix="stepgauge-run-"))
    store = RunStore(place)
    with store.held(), without_main():
        outcomes = sweep(checked_jobs(specs, place), store, fresh=fresh)
        return Run([outcome.record for outcome in outcomes])


def open_run(folder: str | Path) -> Run:
    """The records of a run's folder. Raises StoreError where there is none; warns of damage."""
    contents = RunStore(Path(folder)).read()
    for problem in contents.problems:
        warnings.warn(problem, stacklevel=2)
    return Run(contents.latest())


def compare(
    first: Sequence[Record] | str | Path,
    second: Sequence[Record] | str | Path,
    *,
    ignoring: Sequence[str] = (),
) -> Comparison:
    """The rows of two runs, or of their folders, side by side, second over first.

    ignoring  fields of the spec that may differ within a pair

    Raises ValueError for an unknown field, or runs that share no row.
    """
    sides = [open_run(side) if isinstance(side, str | Path) else side for side in (first, second)]
    found = compare_records(*sides, ignoring=ignoring)
    if not found.differences:
        raise ValueError("the runs share no row; ignoring=[FIELD] pairs rows that differ in FIELD")
    return Comparison(difference_table(found.differences), found.notes)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Processes that start while the block runs do not run the user's script again.

    multiprocessing would, to find what it defines; a script without `if __name__ == "__main__"`
    then starts itself without end. What we send there is defined in modules.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
