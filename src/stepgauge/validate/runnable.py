"""Decides which layouts this machine can run."""

from stepgauge.bench.ranks import require_ranks
from stepgauge.measure import devices
from stepgauge.measure.environment import device_memory
from stepgauge.runtime.host import available_cores
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.units import GIB


def why_not_here(spec: LayoutSpec, needed_bytes: float) -> str:
    """Returns why this machine cannot run the layout; "" if it can.

    `needed_bytes` is the predicted GPU memory of the layout's fullest rank.
    """
    try:
        device = devices.resolve(spec.device)
        require_ranks(spec)
    except ValueError as error:
        return str(error)
    if device.type == "cpu":
        cores = available_cores()
        if spec.ranks > cores:
            return (
                f"layout {spec.layout!r} has {spec.ranks} ranks, which need one core each; this "
                f"machine has {cores} cores"
            )
        return ""
    # in another process, because the query itself takes GPU memory
    available_bytes = run_isolated(device_memory, device)
    if needed_bytes > available_bytes:
        return (
            f"layout {spec.layout!r} needs {needed_bytes / GIB:.1f} GiB per rank; a GPU of this "
            f"machine has {available_bytes / GIB:.1f}"
        )
    return ""
