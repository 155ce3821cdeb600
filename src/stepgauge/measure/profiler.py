"""torch.profiler around the phases of a step: wait, warm up, record, as often as asked."""

import dataclasses
import gzip
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from stepgauge.measure.devices import synchronize
from stepgauge.measure.ranges import named
from stepgauge.measure.timing import Phases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps that pass unprofiled, steps in which the profiler warms up, recorded steps, and how often all that."""

    wait: int = 1
    warmup: int = 2
    active: int = 3
    repeat: int = 1

    @property
    def steps(self) -> int:
        return (self.wait + self.warmup + self.active) * self.repeat


def profile_phases(
    phases: Phases, device: torch.device, folder: Path, *, schedule: Schedule, stacks: bool = False
) -> list[Path]:
    """Runs the phases under the profiler; one gzipped Chrome trace a cycle in the folder, its paths.

    The host waits for the device once a step, at its end, as the stopwatch does. Shapes are recorded; Python stacks
    with `stacks`, which costs the host much more.
    """
    nvtx = device.type == "cuda"
    written: list[Path] = []

    def write(profiler: profile) -> None:
        written.append(folder / (f"trace-{len(written)}.json.gz" if schedule.repeat > 1 else "trace.json.gz"))
        _export(profiler, written[-1])

    with (
        warnings.catch_warnings(),
        profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if nvtx else [])],
            schedule=torch.profiler.schedule(**dataclasses.asdict(schedule)),
            on_trace_ready=write,
            record_shapes=True,
            with_stack=stacks,
            experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True) if stacks else None,
        ) as profiler,
    ):
        # It warns that a cycle's events end with the cycle: they are in the cycle's trace.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        for _ in range(schedule.steps):
            for name, phase in phases.items():
                with named(name, nvtx=nvtx):
                    phase()
            synchronize(device)
            profiler.step()
    return written


def _export(profiler: profile, path: Path) -> None:
    """The trace, packed: the profiler's own packing holds it in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        plain = Path(work) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target, 1 << 20)
