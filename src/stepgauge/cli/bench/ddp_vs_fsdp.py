"""`stepgauge bench ddp-vs-fsdp`."""

import json
from pathlib import Path
from typing import Any

from stepgauge.cli.console import print_in, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Fresh, Out, RowFormat, distinct, require_success, run_jobs
from stepgauge.report.ddp_vs_fsdp import aggregated, comparison_table, gap_table
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.ddp_vs_fsdp import COMPARED, GLOBAL_BATCHES, SEEDS, GlobalBatch
from stepgauge.spec.store import RunStore, StoreError

DEFAULTS: dict[str, Any] = {
    "size": "bert-base",
    "wrapper": COMPARED,
    "global_batch": GLOBAL_BATCHES,
    "seed": SEEDS,
    "device": "auto",
}


@spec_options(
    GlobalBatch,
    DataParallelSpec,
    BertSpec,
    sweep=True,
    without=("batch", "model"),
    defaults=DEFAULTS,
)
def ddp_vs_fsdp(
    *,
    values: Values,
    out: Out = Path("runs/bench-ddp-vs-fsdp"),
    fresh: Fresh = False,
    format: RowFormat = "table",
) -> None:
    """Train BERT with replicated and with sharded weights, over seeds: throughput, step, memory a
    rank.

    Every option takes several values, and their product is measured, each row by ranks of its own:
    started here, or those of torchrun. Rows that differ in the seed alone are one row of the table
    and one object of ddp-vs-fsdp.json in the run's folder.
    """
    from stepgauge.bench import data_parallel as bench
    from stepgauge.bench.ranks import is_first_process
    from stepgauge.bench.sweep import Job
    from stepgauge.measure.devices import resolve

    named = {**values, "device": tuple(str(resolve(str(name))) for name in values["device"])}
    specs = _specs(named)
    for spec in specs:
        bench.check(spec)
    records = run_jobs([Job(bench.JOB, spec) for spec in specs], RunStore(out), fresh=fresh)
    rows = aggregated(records)
    text = json.dumps(rows, indent=1) + "\n"
    if is_first_process():
        _write(out / "ddp-vs-fsdp.json", text)
    if format == "json":
        print(text, end="")
    else:
        print_in(format, comparison_table(rows))
        gaps = gap_table(rows)
        if format == "table" and gaps.rows:
            print_in(format, gaps)
    require_success(records)


def _specs(values: Values) -> list[DataParallelSpec]:
    """The rows of each global batch. Raises ValueError for one that the ranks do not divide."""
    rest = {name: value for name, value in values.items() if name != "global_batch"}
    shares = [
        (ranks, GlobalBatch(global_batch=batch).of_rank(ranks))
        for batch in values["global_batch"]
        for ranks in values.get("ranks", (DataParallelSpec.ranks,))
    ]
    given = [{**rest, "ranks": (ranks,), "batch": (share,)} for ranks, share in shares]
    specs = [spec for each in given for spec in expand(DataParallelSpec, each, network=BertSpec)]
    return distinct(specs)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
    tell(f"aggregated: {path}")
