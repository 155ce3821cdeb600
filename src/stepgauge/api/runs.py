"""Measures specs, and opens and compares runs."""

import contextlib
import sys
import tempfile
import threading
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
    """Measures one or several specs, each in a separate process, as the commands do.

    folder  where the records are saved; rows that it already has are measured again only if `fresh`

    A spec that fails or runs out of memory gives a record with that status. Raises ValueError for a
    spec that cannot be run, and StoreError if the folder cannot be written.
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
    """Returns the records in a run's folder or in a .jsonl or .json file. Warns of damaged lines; raises
    StoreError if there is no run.
    """
    contents = RunStore(Path(folder)).read()
    for problem in contents.problems:
        warnings.warn(problem, stacklevel=2)
    return Run(contents.latest())


def compare(
    first: Sequence[Record] | str | Path,
    second: Sequence[Record] | str | Path,
    *,
    ignoring: str | Sequence[str] = (),
) -> Comparison:
    """Pairs the rows of two runs, or of their folders, and returns the ratios of second to first.

    ignoring  a field of the spec, or several, that may differ between the two rows of a pair

    Raises ValueError for an unknown field, and for runs that share no row.
    """
    sides = [open_run(side) if isinstance(side, str | Path) else side for side in (first, second)]
    fields = [ignoring] if isinstance(ignoring, str) else ignoring
    found = compare_records(*sides, ignoring=fields)
    if not found.differences:
        raise ValueError("the runs share no row; ignoring=[FIELD] pairs rows that differ in FIELD")
    return Comparison(difference_table(found.differences), found.notes)


class _WithoutMain:
    """Counts the blocks of without_main that run, in all threads, and keeps the real __main__."""

    lock = threading.Lock()
    num_blocks = 0
    main: types.ModuleType


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keeps processes that start within the block from running the user's script again.

    multiprocessing would import it to find its definitions, and a script without an
    `if __name__ == "__main__"` guard would start itself again and again. This package sends only
    objects that are defined in modules. Blocks may overlap: the first one removes the script, and the
    one that ends last restores it.
    """
    with _WithoutMain.lock:
        if _WithoutMain.num_blocks == 0:
            _WithoutMain.main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
        _WithoutMain.num_blocks += 1
    try:
        yield
    finally:
        with _WithoutMain.lock:
            _WithoutMain.num_blocks -= 1
            if _WithoutMain.num_blocks == 0:
                sys.modules["__main__"] = _WithoutMain.main
