"""`stepgauge bench ddp-vs-fsdp`."""

import json
from pathlib import Path
from typing import Any

from stepgauge.cli import rows
from stepgauge.cli.console import print_in, write
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.ddp_vs_fsdp import aggregated, comparison_table, gap_table
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.ddp_vs_fsdp import COMPARED, GLOBAL_BATCHES, SEEDS, GlobalBatch

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
    out: rows.Out = Path("runs/bench-ddp-vs-fsdp"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Train BERT with replicated and with sharded weights, over seeds: throughput, step, memory a
    rank.

    Every option takes several values, and their product is measured, each row by ranks of its own:
    started here, or those of torchrun. Rows that differ in the seed alone are one row of the table
    and one object of ddp-vs-fsdp.json in the run's folder.
    """
    specs = rows.resolve_devices(_specs(values))

    from stepgauge.bench.ranks import is_first_process

    records = rows.run_jobs(rows.checked_jobs(specs, out), out, fresh=fresh)
    compared = aggregated(records)
    text = json.dumps(compared, indent=1) + "\n"
    if is_first_process():
        write(text, out / "ddp-vs-fsdp.json", "aggregated")
    if format == "json":
        print(text, end="")
    else:
        print_in(format, comparison_table(compared))
        gaps = gap_table(compared)
        if format == "table" and gaps.rows:
            print_in(format, gaps)
    rows.require_success(records)


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
    return rows.distinct(specs)
