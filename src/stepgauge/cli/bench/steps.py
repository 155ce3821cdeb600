"""`stepgauge bench step`, `data-parallel` and `layout`: time training steps and predict each row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgauge.cli import predictions, rows
from stepgauge.cli.earlier_rows import earlier_rows
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.turns import turns_together


def _command(spec: type, help: str, **defaults: Any) -> Callable[..., None]:
    """Returns the command that times steps of this kind; `defaults` are its options' defaults."""

    def command(
        *,
        values: Values,
        out: rows.Out = Path(f"runs/bench-{spec.kind}"),  # type: ignore[attr-defined]
        fresh: rows.Fresh = False,
        turns: rows.Turns = 1,
        format: rows.RowFormat = "table",
        hardware: predictions.Hardware = None,
        no_predict: predictions.NoPredict = False,
    ) -> None:
        if turns < 1:
            raise ValueError(f"--turns is {turns}; it must be 1 or more")
        specs = rows.resolve_devices(rows.canonical_specs(expand(spec, values)))
        earlier = [] if fresh else earlier_rows(specs, out)
        if turns > 1 and turns_together(earlier) < turns:
            earlier = []
        jobs = [] if earlier else rows.usable_jobs(specs, out)
        path = None if no_predict else hardware or predictions.hardware_of(specs[0].device, earlier)
        predicted = predictions.predict_rows(
            specs, out, path, fresh=fresh, is_requested=hardware is not None
        )
        records = earlier or rows.run_jobs(jobs, out, fresh=fresh, turns=turns)
        if earlier:
            rows.print_notes(earlier, out, reused=len(earlier))
        rows.require_single_success(records, format)
        predictions.print_with_predictions(predicted, records, format)
        rows.require_success(records)

    command.__doc__ = help
    all_defaults = {"size": "small", "device": "auto", **defaults}
    return spec_options(spec, ModelSpec, BertSpec, sweep=True, defaults=all_defaults)(command)


step = _command(
    StepSpec,
    """Time a training step: forward, backward, optimizer and the whole step.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option accepts
    several values; all combinations are measured. Each row is saved as soon as it is measured; rerun
    the command to continue. A step that does not fit into memory gives a row marked OOM. If there is
    a hardware file of this device (stepgauge calibrate), each row is predicted before it is run.
    """,
)
data_parallel = _command(
    DataParallelSpec,
    """Time a data-parallel training step: phases, communication, overlap and memory.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option accepts
    several values; all combinations are measured. This command starts the ranks of each row, unless
    torchrun started them. A step's time is that of the slowest rank. Several bucket sizes multiply
    only the rows of wrappers that use buckets. If there is a hardware file of this device (stepgauge
    calibrate), each row is predicted before it is run.
    """,
)
layout = _command(
    LayoutSpec,
    """Time a training step under layouts: phases, exposed communication per axis, memory by part.

    A layout is a text such as "dp2 zero3 tp2" or "pp2 1f1b m8 tp2" (docs/layouts.md). The batch is
    the global batch of all ranks, so that rows with the same batch do the same work. Your own network
    (--model FILE.py:factory) brings the batch of one data rank instead; it takes data axes, tensor
    axes with a table (docs/tensor-parallel.md) and, if it is an nn.Sequential, pipeline axes.

    Every option accepts several values; all combinations are measured. This command starts the ranks
    of each row, unless torchrun started them. If there is a hardware file of this device (stepgauge
    calibrate), each row is predicted before it is run.
    """,
    layout=("none", "dp2", "tp2"),
)
