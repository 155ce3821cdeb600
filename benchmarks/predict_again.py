"""Predicts the measured steps of committed records again, with today's code, and tells the errors.

    python benchmarks/predict_again.py                                  # all records of steps
    python benchmarks/predict_again.py benchmarks/results/2026-11-23-h200-validation*.jsonl --rows
    python benchmarks/predict_again.py --hardware NVIDIA_H200=my.json   # from another file

Steps are predicted from the hardware file alone (of a row's own run nothing is known), by default
the one of the package that was calibrated on the device. A row is bound by its host where a host
that takes nothing would make the predicted step shorter by a tenth. Of each file of records and
of all: the mean, median and largest absolute error, the signed mean, how many errors lie within
the stated interval, and how often the truly fastest of a group is ranked first.
"""

import argparse
import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgauge.cost.rates.estimate import spread
from stepgauge.report.prediction_errors import errors, groups
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.kinds import SPECS
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.predictions import STEP
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.validate.predicted import predicted

ROOT = Path(__file__).parents[1]
KINDS = {spec.kind for spec in (StepSpec, DataParallelSpec, LayoutSpec, PipelineSpec)}
FILES = {"NVIDIA H200": "h200-sxm", "NVIDIA H100 80GB HBM3": "h100-sxm"}
WAITS = 0.1  # of the step: what a row waits at least that is bound by its host


@dataclasses.dataclass(frozen=True)
class Again:
    """A measured step, its prediction of today, and of this the part that the host takes."""

    measured: Record
    prediction: Record
    waits: float

    @property
    def error(self) -> float:
        return _step(self.prediction) / _step(self.measured) - 1

    @property
    def is_covered(self) -> bool:
        """Whether the measured step lies within what is predicted, by the stated interval."""
        return abs(_step(self.measured) / _step(self.prediction) - 1) <= spread(self.prediction)


def _step(record: Record) -> float:
    return record.metrics[STEP].median


def without_host(file: HardwareFile) -> HardwareFile:
    """The machine with a host that takes no time."""

    def free(table: OperationTable) -> OperationTable:
        return dataclasses.replace(table, rows=tuple((*row[:-1], 0.0) for row in table.rows))

    operations = {
        name: free(table) if name.startswith("host") else table
        for name, table in file.operations.items()
    }
    return dataclasses.replace(file, operations=operations)


class Predictor:
    """Equal steps are predicted once. Of what cannot be predicted it counts the reasons."""

    def __init__(self, files: Mapping[str, HardwareFile]):
        self.files = files
        self.refused: collections.Counter[str] = collections.Counter()
        self._known: dict[str, tuple[Record, float] | None] = {}

    def again(self, record: Record) -> Again | None:
        device = record.environment.get("device", "")
        if device not in self.files or record.spec["model"].get("network"):
            self.refused[f"on {device}, of a network whose operators are traced, or both"] += 1
            return None
        name = f"{device} {record.key}"
        if name not in self._known:
            self._known[name] = self._predicted(record, self.files[device])
        found = self._known[name]
        return Again(record, *found) if found else None

    def _predicted(self, record: Record, file: HardwareFile) -> tuple[Record, float] | None:
        try:
            spec: Any = SPECS[record.kind](
                **{**record.spec, "model": ModelSpec(**record.spec["model"])}
            )
            whole = predicted(spec, file)
            free = predicted(spec, without_host(file))
        except (TypeError, ValueError) as error:  # of a field that there is no more, or not known
            self.refused[str(error)] += 1
            return None
        return whole, 1 - _step(free) / _step(whole)


def steps_of(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = Record.from_json(line)
        except ValueError:
            continue
        if record.kind in KINDS and record.provenance == "measured" and STEP in record.metrics:
            yield record


def sentence(rows: Sequence[Again]) -> str:
    if not rows:
        return "none"
    sizes = [abs(row.error) for row in rows]
    covered = sum(row.is_covered for row in rows)
    return (
        f"{len(rows):3d} rows: mean {statistics.fmean(sizes):6.1%}, median "
        f"{statistics.median(sizes):6.1%}, at most {max(sizes):6.1%}, signed "
        f"{statistics.fmean(row.error for row in rows):+6.1%}, {covered} within their interval"
    )


def tell(name: str, rows: Sequence[Again], ranked: tuple[int, int]) -> None:
    print(name)
    print(f"  GPU   {sentence([row for row in rows if row.waits < WAITS])}")
    print(f"  host  {sentence([row for row in rows if row.waits >= WAITS])}")
    if ranked[1]:
        print(f"  the fastest was ranked first in {ranked[0]} of {ranked[1]} groups")


def ranking(rows: Iterable[Again]) -> tuple[int, int]:
    """In how many groups the truly fastest is predicted to be it, and of how many."""
    records = [record for row in rows for record in (row.prediction, row.measured)]
    found = groups(errors(records))
    return sum(group.rank == 1 for group in found), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, nargs="*")
    parser.add_argument("--hardware", nargs="+", default=[], metavar="DEVICE=FILE")
    parser.add_argument("--rows", action="store_true", help="tell each row, too")
    asked = parser.parse_args()
    named = {device: str(ROOT / "hardware" / f"{name}.json") for device, name in FILES.items()}
    named |= {
        d.replace("_", " "): file for d, _, file in (h.partition("=") for h in asked.hardware)
    }
    predictor = Predictor({d: HardwareFile.read(Path(file)) for d, file in named.items()})
    paths = asked.records or sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    every: list[Again] = []
    first = [0, 0]
    for path in paths:
        rows = [row for record in steps_of(path) if (row := predictor.again(record))]
        if not rows:
            continue
        ranked = ranking(rows)
        tell(path.stem, rows, ranked)
        every += rows
        first = [before + now for before, now in zip(first, ranked, strict=True)]
        for row in rows if asked.rows else ():
            spec = row.measured.spec
            named_as = spec.get("layout") or spec.get("wrapper") or spec.get("schedule", "")
            print(
                f"    {_step(row.measured):8.2f} ms, {row.error:+6.1%} ± {spread(row.prediction):.0%}"
                f", host {row.waits:4.0%}: {spec['size']} {spec['model']['num_layers']} x "
                f"{spec['model']['d_model']}, {spec['batch']} x {spec['model']['context_length']}, "
                f"{spec['precision']} {spec['compile']} {spec.get('checkpointing', '')} {named_as}"
            )  # fmt: skip
    tell("all", every, (first[0], first[1]))
    for reason, count in predictor.refused.most_common():
        print(f"not predicted, {count}: {reason}")


if __name__ == "__main__":
    main()
