"""`stepgauge bench broadcast`."""

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
    """Time ways to bring a host tensor to every GPU, and what part of the links' own rate each
    reaches.

    The links are measured alone in the same run. Without GPUs the same schedules run in a CPU's
    memory. Every option takes several values, and their product is measured.
    """
    import torch

    from stepgauge.measure.devices import resolve

    if values["schedule"] == ("all",):
        values["schedule"] = tuple(SCHEDULES)
    if "gpus" not in values and resolve(str(values["device"][0])).type == "cuda":
        values["gpus"] = (torch.cuda.device_count(),)
    specs = rows.resolve_devices(expand(BroadcastSpec, values))
    rows.measure_and_print(specs, out, fresh=fresh, format=format)
