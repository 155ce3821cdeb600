"""`stepgauge bench step`, `data-parallel` and `layout`: a training step timed, each row beside what
was predicted of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgauge.cli import predictions, rows
from stepgauge.cli.earlier_rows import earlier_rows
from stepgauge.cli.options import Networks, Values, expand, spec_options
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.turns import turns_together


def _command(
    spec: type, help: str, *, network: type[ModelSpec] = ModelSpec, **defaults: Any
) -> Callable[..., None]:
    """The command that times steps of this kind; `defaults` are those of its options."""

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
        specs = rows.with_devices(rows.distinct(expand(spec, values, network=network)))
        earlier = [] if fresh else earlier_rows(specs, out)
        if turns > 1 and turns_together(earlier) < turns:
            earlier = []
        jobs = [] if earlier else rows.usable_jobs(specs, out)
        path = None if no_predict else hardware or predictions.hardware_of(specs[0].device, earlier)
        predicted = predictions.predict_rows(
            specs, out, path, fresh=fresh, is_asked=hardware is not None
        )
        records = earlier or rows.run_jobs(jobs, out, fresh=fresh, turns=turns)
        if earlier:
            rows.tell_of_all(earlier, out, reused=len(earlier))
        predictions.print_beside(predicted, records, format)
        rows.require_success(records)

    command.__doc__ = help
    usual = {"size": "small", "device": "auto", **defaults}
    return spec_options(spec, network, sweep=True, defaults=usual)(command)


step = _command(
    StepSpec,
    """Time a training step: forward, backward, optimizer and whole.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option takes
    several values, and their product is measured. Each row is on disk the moment it is measured;
    the same command again goes on where it stopped. A size that does not fit gives a row that says
    OOM. Where this device was calibrated, each row shows what was predicted before it was run.
    """,
    network=Networks,
)
data_parallel = _command(
    DataParallelSpec,
    """Time a training step spread over ranks: phases, communication, overlap, memory.

    The network is a preset, a shape, or your own (--model FILE.py:factory). Every option takes
    several values, and their product is measured, each row by ranks of its own: started here, or
    those of torchrun. Of each step the slowest rank counts. Bucket sizes vary only wrappers that
    have buckets. Where this device was calibrated, each row shows what was predicted before it was
    run.
    """,
    network=Networks,
)
layout = _command(
    LayoutSpec,
    """Time a training step under layouts: phases, exposed communication by axis, memory by part.

    A layout is a text: "dp2 zero3 tp2" or "pp2 1f1b m8 tp2" (docs/layouts.md). The batch is that of
    all ranks, so that rows of one batch do the same step. Your own network (--model
    FILE.py:factory) takes layouts with a data axis, and brings a batch for each data rank. Every
    option takes several values, and their product is measured, each row by ranks of its own:
    started here, or those of torchrun. Where this device was calibrated, each row shows what was
    predicted before it was run.
    """,
    network=Networks,
    layout=("none", "dp2", "tp2"),
)
