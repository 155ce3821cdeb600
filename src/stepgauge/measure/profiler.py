"""torch.profiler around the phases of a step: wait, warm up, record, as often as asked."""

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
    """Steps unprofiled, steps of warm-up, recorded steps, and how often all that."""

    wait: int = 1
    warmup: int = 2
    active: int = 3
    repeat: int = 1

    @property
    def steps(self) -> int:
        return (self.wait + self.warmup + self.active) * self.repeat

    def records(self, step: int) -> bool:
        return step % (self.wait + self.warmup + self.active) >= self.wait + self.warmup


def profile_phases(
    phases: Phases,
    device: torch.device,
    folder: Path,
    *,
    schedule: ProfilerSchedule,
    stacks: bool = False,
    kernels_alone: bool = False,
) -> tuple[list[Path], dict[str, list[float]]]:
    """Runs the phases under the profiler; one gzipped Chrome trace a cycle in the folder.

    Gives the traces' paths and, by the stopwatch's own clock, the ms of each phase of the recorded
    steps. Shapes are recorded; Python stacks with `stacks`, which costs the host much more.

    kernels_alone  of a GPU record its kernels and the driver's calls, no operations or ranges: the
                   host launches nearly as fast as unprofiled. Without effect on a CPU
    """
    without_marks()
    clock = clock_of(device)
    ranged = {name: _ranged(name, phase, device.type == "cuda") for name, phase in phases.items()}
    watched: dict[str, list[float]] = {name: [] for name in phases}
    written: list[Path] = []

    def write(profiler: profile) -> None:
        name = f"trace-{len(written)}.json.gz" if schedule.repeat > 1 else "trace.json.gz"
        written.append(folder / name)
        _export(profiler, written[-1])

    profiler = _profiler(device, schedule, write, stacks=stacks, kernels_alone=kernels_alone)
    with warnings.catch_warnings(), profiler:
        # It warns that a cycle's events end with the cycle: they are in the cycle's trace.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        for number in range(schedule.steps):
            times = clock(ranged, device)
            synchronize(device)
            profiler.step()
            if schedule.records(number):
                for name, milliseconds in zip(phases, times, strict=True):
                    watched[name].append(milliseconds)
    return written, watched


def _profiler(
    device: torch.device,
    schedule: ProfilerSchedule,
    write: Callable[[profile], None],
    *,
    stacks: bool,
    kernels_alone: bool,
) -> profile:
    verbose = torch.profiler._ExperimentalConfig(verbose=True)  # else no stack is written
    return profile(
        activities=_activities(device, kernels_alone=kernels_alone),
        schedule=torch.profiler.schedule(**dataclasses.asdict(schedule)),
        on_trace_ready=write,
        record_shapes=True,
        with_stack=stacks,
        experimental_config=verbose if stacks else None,
    )


def without_marks() -> None:
    """Keeps the profiler's own marks, lines of "USDT:", from standard error; KINETO_LOG_LEVEL=0 to
    5 shows all.

    Its library reads the variable at its first use, and has no level between errors and these
    marks.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _activities(device: torch.device, *, kernels_alone: bool) -> list[ProfilerActivity]:
    if device.type != "cuda":
        return [ProfilerActivity.CPU]
    return (
        [ProfilerActivity.CUDA] if kernels_alone else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    )


def _ranged(name: str, phase: Callable[[], None], nvtx: bool) -> Callable[[], None]:
    def run() -> None:
        with named(name, nvtx=nvtx):
            phase()

    return run


def _export(profiler: profile, path: Path) -> None:
    """The trace, packed: the profiler's own packing holds it in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        plain = Path(work) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        if not plain.is_file():  # torch does not say so
            raise OSError(f"the trace could not be written to {path.parent}: is the disk full?")
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target, 1 << 20)
