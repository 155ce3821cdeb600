"""`stepgauge tune`: finds the fastest configuration of a model on this machine, by measurement."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import info, print_table, progress_heard
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.predictions import (
    Hardware,
    hardware_of,
    predict_rows,
    print_with_predictions,
)
from stepgauge.cli.rows import (
    Device,
    Fresh,
    Out,
    resolve_devices_and_models,
    run_jobs,
)
from stepgauge.cost.planning.planner import device_bytes
from stepgauge.cost.traced.traceable import has_formulas
from stepgauge.spec import turns
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore
from stepgauge.spec.user_model import UserModel
from stepgauge.tune import search
from stepgauge.tune.choices import Space, space
from stepgauge.tune.output import command_line, gain_table, sentence, write_config

CONFIG = "tuned.toml"


@spec_options(
    LayoutSpec, DataParallelSpec, StepSpec, ModelSpec,
    sweep=True, without=("device",), defaults={"size": "small"},
)  # fmt: skip
def tune(
    *,
    values: Values,
    ranks: Annotated[
        int, Parameter(help="Processes, one per device. With several the layout is tuned, too.")
    ] = 1,
    device: Device = "auto",
    best: Annotated[
        int, Parameter(help="How many of the best-predicted candidates are measured.")
    ] = 4,
    hardware: Hardware = None,
    out: Out = Path("runs/tune"),
    fresh: Fresh = False,
) -> None:
    """Find the fastest precision, compile mode, kernels, batch, checkpointing and, over several
    ranks, layout.

    An option with one value is fixed. An option with several values is a choice, and its first value
    is the baseline's. What is not given is chosen from what this device can run, and its default below
    is the baseline's; the baseline's layout is data parallel. Layouts have data, tensor and pipeline
    axes, and the batch is that of all ranks. With --wrapper, or for your own network, only the
    wrapper of a data axis is tuned, and the batch is that of one rank.

    All candidates are predicted first, and the best few are measured. Values that cannot be
    predicted are then measured with the fastest candidate. Without a hardware file, one choice after
    the other is measured. At the end the winner and the baseline are measured again, alternating.
    Prints what each choice gains and the winner's command, and writes a file for --config.
    """
    for name, count in (("best", best), ("ranks", ranks)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    has_file = bool(values.keys() & {"hf_config", "model"})
    given = {name: value for name, value in values.items() if name != "size" or not has_file}
    requested = space(given, device=device, ranks=ranks)
    requested.require(requested.defaults)  # raises for wrong options before torch is imported

    from stepgauge.measure.devices import resolve

    candidates = space(given, device=str(resolve(device)), ranks=ranks)
    resolve_devices_and_models([candidates.require(candidates.defaults)])
    path = hardware or hardware_of(str(resolve(device)))
    file = HardwareFile.read(path) if path else None
    measure = _Measurements(out, path, fresh)
    predict = functools.partial(_predict, file)
    predicted = []
    if file:
        with progress_heard("candidate") as hear:
            predicted = search.predicted_candidates(candidates, predict, hear)
    with saved_rows(out):
        tuned = search.tune(
            candidates, predicted, measure, predict, in_turns=measure.in_turns, best=best
        )
    _print_result(tuned, candidates, measure, out)


@contextlib.contextmanager
def saved_rows(out: Path) -> Iterator[None]:
    """Adds to an interrupt how many rows all phases have saved; run_jobs only knows its own phase."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        store = RunStore(out)
        rows = store.read().latest() if store.path.exists() else []
        saved = sum(row.provenance == "measured" for row in rows)
        if not saved:
            raise
        are = "rows are" if saved > 1 else "row is"
        message = f"{saved} {are} in {out}; rerun the command to continue"
        raise type(interrupt)(message) from None


def _print_result(
    tuned: search.Tuned, candidates: Space, measure: "_Measurements", out: Path
) -> None:
    """Prints all rows, what each choice gains, and the winner."""
    modelled = [r for r in RunStore(out).read().latest() if r.provenance == "modelled"]
    print_with_predictions(
        [r for r in modelled if r.key in measure.records], [*measure.records.values()], "table"
    )
    if tuned.gains:
        print_table(gain_table(tuned))
    info(sentence(tuned))
    write_config(tuned, candidates, out / CONFIG)
    print(command_line(tuned, candidates))
    info(f"the same options as a file: --config {out / CONFIG}")


class _Measurements:
    """Measures each spec once and keeps the records by key."""

    def __init__(self, out: Path, hardware: Path | None, fresh: bool):
        self._out, self._hardware, self._fresh = out, hardware, fresh
        self.records: dict[str, Record] = {}

    def __call__(self, specs: Sequence[Any], what: str) -> list[Record]:
        from stepgauge.bench.jobs import checked_jobs

        jobs = checked_jobs(specs, self._out)
        new = [job for job in jobs if job.pending.key not in self.records]
        if new:
            info(f"measuring {what}")
            predict_rows([job.spec for job in new], self._out, self._hardware, fresh=self._fresh)
            found = run_jobs(new, self._out, fresh=self._fresh)
            self.records.update((record.key, record) for record in found)
        return [self.records[job.pending.key] for job in jobs]

    def in_turns(self, specs: Sequence[Any], what: str) -> list[Record]:
        """Measures the specs again, alternating; the new records replace the old ones."""
        from stepgauge.bench.jobs import checked_jobs

        jobs = checked_jobs(specs, self._out)
        info(f"measuring {what}")
        found = run_jobs(jobs, self._out, fresh=False, turns=turns.DEFAULT_TURNS)
        self.records.update((record.key, record) for record in found)
        return [self.records[job.pending.key] for job in jobs]


def _predict(hardware: HardwareFile | None, spec: Any) -> Record | None:
    """Returns the step's prediction, shortened for layouts because there are many. Its status is
    "oom" if it needs more memory than the machine has. None if it cannot be predicted.
    """
    from stepgauge.validate.predicted import predicted

    if hardware is None:
        return None
    if not (has_formulas(spec) or isinstance(spec.model, UserModel)):
        return None  # it would have to be traced, which takes seconds for each of many candidates
    try:
        prediction = predicted(spec, hardware, shortened=True)
    except ValueError:
        return None
    available = hardware.peaks.program_bytes if hardware.peaks else 0
    if available and device_bytes(prediction) > available:
        return dataclasses.replace(prediction, status="oom")
    return prediction
