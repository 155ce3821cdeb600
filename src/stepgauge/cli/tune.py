"""`stepgauge tune`: the fastest measured configuration of a model on this machine."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import print_table, tell
from stepgauge.cli.options import Values, spec_options
from stepgauge.cli.predictions import Hardware, hardware_of, predict_rows, print_beside
from stepgauge.cli.rows import Device, Fresh, Out, checked_jobs, resolve_devices, run_jobs
from stepgauge.cost.planning.planner import device_bytes
from stepgauge.cost.traced.asked import has_formulas
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
        int, Parameter(help="Processes, each with a device of its own: tunes the layout, too.")
    ] = 1,
    device: Device = "auto",
    best: Annotated[int, Parameter(help="Candidates that are measured, by prediction.")] = 4,
    hardware: Hardware = None,
    out: Out = Path("runs/tune"),
    fresh: Fresh = False,
) -> None:
    """Find the fastest step: precision, compile, kernels, batch, checkpointing, and over ranks the
    layout.

    An option with one value is fixed. One with several is a choice, and its first value is the
    baseline. Everything else is chosen from what this device can run. Layouts are data, tensor and
    pipeline axes, and their batch that of all ranks; with --wrapper, and of a network of your own,
    wrappers of a data axis with the batch of a rank. Candidates are predicted first, and the best
    few measured; what no prediction covers (a compiled network of your own) is measured on the
    fastest. Without a hardware file one choice after the other is measured. The winner and the
    usual step are measured once more, in turns. Prints what each choice gains, the winner's
    command, and writes it as a file for --config.
    """
    if best < 1 or ranks < 1:
        raise ValueError(f"best is {best} and ranks is {ranks}; both must be at least 1")
    has_file = bool(values.keys() & {"hf_config", "model"})
    given = {name: value for name, value in values.items() if name != "size" or not has_file}
    asked_for = space(given, device=device, ranks=ranks)
    asked_for.require(asked_for.usual)  # what cannot be is said before torch is loaded

    from stepgauge.measure.devices import resolve

    candidates = space(given, device=str(resolve(device)), ranks=ranks)
    resolve_devices([candidates.require(candidates.usual)])
    path = hardware or hardware_of(str(resolve(device)))
    known = HardwareFile.read(path) if path else None
    measure = _Measured(out, path, fresh)
    predict = functools.partial(_predicted, known)
    tuned = search.tune(candidates, measure, predict, in_turns=measure.in_turns, best=best)
    _tell_of(tuned, candidates, measure, out)


def _tell_of(tuned: search.Tuned, candidates: Space, measure: "_Measured", out: Path) -> None:
    """What was predicted and measured, what each choice gains, and the winner."""
    modelled = [r for r in RunStore(out).read().latest() if r.provenance == "modelled"]
    print_beside(
        [r for r in modelled if r.key in measure.records], [*measure.records.values()], "table"
    )
    if tuned.gains:
        print_table(gain_table(tuned))
    tell(sentence(tuned))
    write_config(tuned, candidates, out / CONFIG)
    print(command_line(tuned, candidates))
    tell(f"the same as a file: --config {out / CONFIG}")


class _Measured:
    """Measures specs, each once; the records by their keys."""

    def __init__(self, out: Path, hardware: Path | None, fresh: bool):
        self._out, self._hardware, self._fresh = out, hardware, fresh
        self.records: dict[str, Record] = {}

    def __call__(self, specs: Sequence[Any]) -> list[Record]:
        jobs = checked_jobs(specs, self._out)
        new = [job for job in jobs if job.asked.key not in self.records]
        if new:
            specs = [job.spec for job in new]
            predict_rows(specs, self._out, self._hardware, fresh=self._fresh)
            found = run_jobs(new, self._out, fresh=self._fresh)
            self.records.update((record.key, record) for record in found)
        return [self.records[job.asked.key] for job in jobs]

    def in_turns(self, specs: Sequence[Any]) -> list[Record]:
        """The specs measured once more, in turns: their records take the place of those before."""
        jobs = checked_jobs(specs, self._out)
        tell("the usual step and the fastest are measured once more, in turns")
        found = run_jobs(jobs, self._out, fresh=False, turns=turns.USUAL)
        self.records.update((record.key, record) for record in found)
        return [self.records[job.asked.key] for job in jobs]


def _predicted(hardware: HardwareFile | None, spec: Any) -> Record | None:
    """The prediction, where the machine was calibrated and the step is modelled; of layouts, which
    are many, a shortened one. Out of memory where the machine has less than it needs.
    """
    from stepgauge.validate.predicted import predicted

    if hardware is None:
        return None
    if not (has_formulas(spec) or isinstance(spec.model, UserModel)):
        return None  # a trace takes seconds, and a preset has a hundred candidates
    try:
        found = predicted(spec, hardware, shortened=True)
    except ValueError:
        return None
    has = hardware.peaks.program_bytes if hardware.peaks else 0
    if has and device_bytes(found) > has:
        return dataclasses.replace(found, status="oom")
    return found
