"""`stepgauge bench broadcast`: times copies of a host tensor to all GPUs."""

from pathlib import Path

from stepgauge.cli import rows
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.spec.broadcast import SCHEDULES, BroadcastSpec


@spec_options(BroadcastSpec, sweep=True, defaults={"device": "auto", "schedule": "all"})
def broadcast(
    *,
    values: Values,
    out: rows.Out = Path("runs/bench-broadcast"),
    fresh: rows.Fresh = False,
    format: rows.RowFormat = "table",
) -> None:
    """Time schedules that copy a host tensor to every GPU, compared with the rate of the links.

    The links are measured on their own in the same run. Without GPUs the same schedules copy within
    the memory of the CPU. Every option accepts several values; all combinations are measured.
    """
    import torch

    from stepgauge.measure.devices import resolve

    if values["schedule"] == ("all",):
        values["schedule"] = tuple(SCHEDULES)
    if "gpus" not in values and resolve(str(values["device"][0])).type == "cuda":
        values["gpus"] = (torch.cuda.device_count(),)
    specs = rows.resolve_devices_and_models(expand(BroadcastSpec, values))
    records = rows.measure(specs, out, fresh=fresh)
    rows.print_rows(records, format)
    rows.require_success(records)
