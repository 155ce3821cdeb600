"""Predicts the measured steps of committed records with today's code and prints the errors.

    python benchmarks/predict_again.py                                  # all records of steps
    python benchmarks/predict_again.py benchmarks/results/2026-11-23-h200-validation*.jsonl --rows
    python benchmarks/predict_again.py --hardware NVIDIA_H200=my.json   # another hardware file

Predictions use only the hardware file and nothing that was measured in the row's own run. The
default is the package's file for the device. A row counts as host-bound if the predicted step would
be at least 10 % shorter with a host that takes no time.

Prints for each file and for all of them the mean, median and maximum absolute error, the signed
mean, the number of errors within the stated interval, and in how many groups the fastest row was
ranked first.
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
from stepgauge.spec.host_tables import is_host_operation
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
HOST_BOUND = 0.1  # fraction of the step that waits for the host: from here on a row is host-bound


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A measured step and its prediction with today's code.

    host_fraction  fraction of the predicted step that waits for the host
    """

    measured: Record
    prediction: Record
    host_fraction: float

    @property
    def error(self) -> float:
        return _step_ms(self.prediction) / _step_ms(self.measured) - 1

    @property
    def is_covered(self) -> bool:
        """Returns whether the measured step lies within the prediction's stated interval."""
        return abs(_step_ms(self.measured) / _step_ms(self.prediction) - 1) <= spread(
            self.prediction
        )


def _step_ms(record: Record) -> float:
    return record.metrics[STEP].median


def without_host(file: HardwareFile) -> HardwareFile:
    """Returns the machine with a host that takes no time."""

    def free(table: OperationTable) -> OperationTable:
        return dataclasses.replace(table, rows=tuple((*row[:-1], 0.0) for row in table.rows))

    def all_free(tables: Mapping[str, OperationTable]) -> dict[str, OperationTable]:
        return {
            name: free(table) if is_host_operation(name) else table
            for name, table in tables.items()
        }

    by_ranks = {ranks: all_free(tables) for ranks, tables in file.by_ranks.items()}
    return dataclasses.replace(file, operations=all_free(file.operations), by_ranks=by_ranks)


class Predictor:
    """Predicts records, equal steps only once. Counts the reasons why others have no prediction."""

    def __init__(self, files: Mapping[str, HardwareFile]):
        self.files = files
        self.refused: collections.Counter[str] = collections.Counter()
        self._known: dict[str, tuple[Record, float] | None] = {}

    def predict(self, record: Record) -> Prediction | None:
        device = record.environment.get("device", "")
        if device not in self.files or record.spec["model"].get("network"):
            self.refused[f"no hardware file for {device}, or its network needs tracing"] += 1
            return None
        name = f"{device} {record.key}"
        if name not in self._known:
            self._known[name] = self._predicted(record, self.files[device])
        found = self._known[name]
        return Prediction(record, *found) if found else None

    def _predicted(self, record: Record, file: HardwareFile) -> tuple[Record, float] | None:
        try:
            spec: Any = SPECS[record.kind](
                **{**record.spec, "model": ModelSpec(**record.spec["model"])}
            )
            prediction = predicted(spec, file)
            free = predicted(spec, without_host(file))
        except (TypeError, ValueError) as error:  # a field was removed, or a part is unknown
            self.refused[str(error)] += 1
            return None
        return prediction, 1 - _step_ms(free) / _step_ms(prediction)


def steps_of(path: Path) -> Iterator[Record]:
    """Yields the measured steps of a file of records."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = Record.from_json(line)
        except ValueError:
            continue
        if record.kind in KINDS and record.provenance == "measured" and STEP in record.metrics:
            yield record


def sentence(rows: Sequence[Prediction]) -> str:
    if not rows:
        return "none"
    sizes = [abs(row.error) for row in rows]
    covered = sum(row.is_covered for row in rows)
    return (
        f"{len(rows):3d} rows: mean {statistics.fmean(sizes):6.1%}, median "
        f"{statistics.median(sizes):6.1%}, maximum {max(sizes):6.1%}, signed mean "
        f"{statistics.fmean(row.error for row in rows):+6.1%}, {covered} within the interval"
    )


def print_errors(name: str, rows: Sequence[Prediction], ranked: tuple[int, int]) -> None:
    print(name)
    print(f"  GPU-bound   {sentence([row for row in rows if row.host_fraction < HOST_BOUND])}")
    print(f"  host-bound  {sentence([row for row in rows if row.host_fraction >= HOST_BOUND])}")
    if ranked[1]:
        print(f"  the fastest row was ranked first in {ranked[0]} of {ranked[1]} groups")


def ranking(rows: Iterable[Prediction]) -> tuple[int, int]:
    """Returns in how many groups the fastest row was also predicted to be fastest, and the number of
    groups.
    """
    records = [record for row in rows for record in (row.prediction, row.measured)]
    found = groups(errors(records))
    return sum(group.rank == 1 for group in found), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, nargs="*")
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=[],
        metavar="DEVICE=FILE",
        help="hardware file of a device; write _ for spaces of its name",
    )
    parser.add_argument("--rows", action="store_true", help="also print each row")
    arguments = parser.parse_args()
    files = {device: str(ROOT / "hardware" / f"{name}.json") for device, name in FILES.items()}
    files |= {
        d.replace("_", " "): file for d, _, file in (h.partition("=") for h in arguments.hardware)
    }
    predictor = Predictor({d: HardwareFile.read(Path(file)) for d, file in files.items()})
    paths = arguments.records or sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    all_rows: list[Prediction] = []
    first = [0, 0]
    for path in paths:
        rows = [row for record in steps_of(path) if (row := predictor.predict(record))]
        if not rows:
            continue
        ranked = ranking(rows)
        print_errors(path.stem, rows, ranked)
        all_rows += rows
        first = [before + now for before, now in zip(first, ranked, strict=True)]
        for row in rows if arguments.rows else ():
            spec = row.measured.spec
            layout = spec.get("layout") or spec.get("wrapper") or spec.get("schedule", "")
            print(
                f"    {_step_ms(row.measured):8.2f} ms, {row.error:+6.1%} ± {spread(row.prediction):.0%}"
                f", host {row.host_fraction:4.0%}: {spec['size']} {spec['model']['num_layers']} x "
                f"{spec['model']['d_model']}, {spec['batch']} x {spec['model']['context_length']}, "
                f"{spec['precision']} {spec['compile']} {spec.get('checkpointing', '')} {layout}"
            )  # fmt: skip
    print_errors("all", all_rows, (first[0], first[1]))
    for reason, count in predictor.refused.most_common():
        print(f"{count} not predicted: {reason}")


if __name__ == "__main__":
    main()
