"""`stepgauge bench broadcast`."""

from pathlib import Path

from stepgauge.cli.console import print_records
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Fresh, Out, RowFormat, require_success, resolve_devices, run_jobs
from stepgauge.spec.broadcast import SCHEDULES, BroadcastSpec
from stepgauge.spec.store import RunStore


@spec_options(BroadcastSpec, sweep=True, defaults={"device": "auto", "schedule": "all"})
def broadcast(
    *,
    values: Values,
    out: Out = Path("runs/bench-broadcast"),
    fresh: Fresh = False,
    format: RowFormat = "table",
) -> None:
    """Time ways to bring a host tensor to every GPU, and what part of the links' own rate each
    reaches.

    The links are measured alone in the same run. Without GPUs the same schedules run between
    processes. Every option takes several values, and their product is measured.
    """
    from stepgauge.bench.broadcast import job
    from stepgauge.measure.devices import resolve

    if values["schedule"] == ("all",):
        values["schedule"] = tuple(SCHEDULES)
    if "gpus" not in values and resolve(str(values["device"][0])).type == "cuda":
        values["gpus"] = (_gpus(),)
    specs = resolve_devices(expand(BroadcastSpec, values))
    jobs = {job(spec).asked.key: job(spec) for spec in specs}
    records = run_jobs(list(jobs.values()), RunStore(out), fresh=fresh)
    print_records(records, format)
    require_success(records)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
