"""Which layouts this machine can run."""

from stepgauge.bench.ranks import require_ranks
from stepgauge.measure import devices
from stepgauge.measure.environment import device_memory
from stepgauge.runtime.host import available_cores
from stepgauge.runtime.workers import run_isolated
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.units import GIB


def why_not_here(spec: LayoutSpec, needed_bytes: float) -> str:
    """Why this machine cannot run the layout, a sentence; "" where it can.

    needed_bytes  that its fullest rank is predicted to need of a GPU
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
                f"layout {spec.layout!r} has {spec.ranks} ranks; this machine has {cores} cores, "
                f"one a rank"
            )
        return ""
    there = run_isolated(device_memory, device)  # apart: asking takes memory of the GPU
    if needed_bytes > there:
        return (
            f"layout {spec.layout!r} needs {needed_bytes / GIB:.1f} GiB a rank; a GPU of this "
            f"machine has {there / GIB:.1f}"
        )
    return ""
