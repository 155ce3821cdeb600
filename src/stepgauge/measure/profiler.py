"""Runs the phases of a step under torch.profiler and writes its traces."""

import dataclasses
import gzip
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from stepgauge.measure.devices import synchronize
from stepgauge.measure.ranges import named
from stepgauge.measure.timing import Phases, clock_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerSchedule:
    """The profiler's cycle: unprofiled steps, warm-up steps, recorded steps; and the number of cycles."""

    wait: int = 1
    warmup: int = 2
    active: int = 3
    repeat: int = 1

    @property
    def steps(self) -> int:
        return (self.wait + self.warmup + self.active) * self.repeat

    def is_recorded(self, step: int) -> bool:
        return step % (self.wait + self.warmup + self.active) >= self.wait + self.warmup


def profile_phases(
    phases: Phases,
    device: torch.device,
    folder: Path,
    *,
    schedule: ProfilerSchedule,
    stacks: bool = False,
    kernels_only: bool = False,
) -> tuple[list[Path], dict[str, list[float]]]:
    """Runs the phases under the profiler and writes one gzipped Chrome trace per cycle in the folder.

    Returns the paths of the traces, and the ms of each phase in the recorded steps.

    stacks        record Python stacks too, which slows the host much more
    kernels_only  on a GPU, record only kernels and driver calls, no operators or ranges. The host
                  then launches nearly as fast as without a profiler. No effect on a CPU.
    """
    hide_profiler_messages()
    clock = clock_of(device)
    ranged = {name: _ranged(name, phase, device.type == "cuda") for name, phase in phases.items()}
    recorded_ms: dict[str, list[float]] = {name: [] for name in phases}
    traces: list[Path] = []

    def write(profiler: profile) -> None:
        name = f"trace-{len(traces)}.json.gz" if schedule.repeat > 1 else "trace.json.gz"
        traces.append(folder / name)
        _export(profiler, traces[-1])

    profiler = _profiler(device, schedule, write, stacks=stacks, kernels_only=kernels_only)
    with warnings.catch_warnings(), profiler:
        # The warning says that events are cleared after each cycle, but by then they are written.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        for number in range(schedule.steps):
            times = clock(ranged, device)
            synchronize(device)
            profiler.step()
            if schedule.is_recorded(number):
                for name, milliseconds in zip(phases, times, strict=True):
                    recorded_ms[name].append(milliseconds)
    return traces, recorded_ms


def _profiler(
    device: torch.device,
    schedule: ProfilerSchedule,
    write: Callable[[profile], None],
    *,
    stacks: bool,
    kernels_only: bool,
) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = (
            [ProfilerActivity.CUDA] if kernels_only else [*activities, ProfilerActivity.CUDA]
        )
    verbose = torch.profiler._ExperimentalConfig(verbose=True)  # stacks are not written without it
    return profile(
        activities=activities,
        schedule=torch.profiler.schedule(**dataclasses.asdict(schedule)),
        on_trace_ready=write,
        record_shapes=True,
        with_stack=stacks,
        experimental_config=verbose if stacks else None,
    )


def hide_profiler_messages() -> None:
    """Hides the profiler's "USDT:" lines on standard error. Call it before the profiler's first use,
    when its library reads the variable. KINETO_LOG_LEVEL=0 to 5 shows the lines.

    No level hides these lines but shows errors.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _ranged(name: str, phase: Callable[[], None], nvtx: bool) -> Callable[[], None]:
    def run() -> None:
        with named(name, nvtx=nvtx):
            phase()

    return run


def _export(profiler: profile, path: Path) -> None:
    """Writes the gzipped trace. The profiler's own compression would hold it in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        plain = Path(work) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        if not plain.is_file():  # torch raises no error
            raise OSError(f"the trace could not be written to {path.parent}: is the disk full?")
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target, 1 << 20)
