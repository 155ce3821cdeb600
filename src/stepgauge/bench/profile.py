"""A ProfileSpec run: stopwatch, profiler, analysis. `run` gives its record; the rest lies in a
folder beside it.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.bench import step as bench_step
from stepgauge.measure import devices
from stepgauge.measure.ceilings import ceilings
from stepgauge.measure.environment import environment
from stepgauge.measure.profiler import Schedule, profile_phases
from stepgauge.measure.ranges import module_ranges
from stepgauge.measure.timing import time_phases
from stepgauge.report.names import labels
from stepgauge.report.page import Section, page
from stepgauge.report.profile import blocks as profile_blocks
from stepgauge.report.where import measured_where
from stepgauge.spec.analysis import Analysis
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.trace.analysis import analyse
from stepgauge.trace.flame import collapsed, speedscope
from stepgauge.train.step import TrainingStep

ANALYSIS = "analysis.json"
METHOD = (
    "The step runs under torch.profiler. A kernel belongs to the host call that launched it, a backward kernel to the "
    "part of the model whose forward made its operation. On a device, a phase lasts from the end of the phase before "
    "to its own last kernel's end. On a CPU every operation counts for what it did itself."
)


def folder_of(record: Record, run: Path) -> Path:
    """Where the run keeps the profile's trace, analysis and flame graphs."""
    digest = hashlib.sha256(record.key.encode()).hexdigest()[:8]
    spec = record.spec
    length = spec["model"].get("context_length")  # a user's model has none
    named = [spec["size"], *([str(length)] if length else []), spec["precision"], digest]
    return run / "profiles" / "-".join(named)


def check(spec: ProfileSpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    bench_step.check(spec)


def run(spec: ProfileSpec, *, folder: Path) -> Record:
    """Times the step, profiles it, analyses the trace. Raises what torch raises: out of memory,
    mostly.
    """
    check(spec)
    device = torch.device(spec.device)
    if device.type == "cpu":
        devices.require_host_memory(bench_step.least_bytes(spec))
    asked = Record(kind=spec.kind, spec=dataclasses.asdict(spec))
    place = folder_of(asked, folder)
    step, batch = bench_step.build(spec, device)
    phases = step.phases(batch, until=spec.phases)
    with step.precision.matmul_mode():
        watch = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
        before = devices.peak_host_memory()
        start = time.perf_counter()
        with _ranges(spec, step, device):
            plan = Schedule(
                wait=spec.wait, warmup=spec.profiler_warmup, active=spec.active, repeat=spec.repeat
            )
            traces, watched = profile_phases(
                phases, device, place, schedule=plan, stacks=spec.stacks
            )
        found = analyse(*traces)
        cost_s = (
            time.perf_counter() - start - plan.steps * Sample.of(watch["step"], "ms").median / 1e3
        )
        cost_bytes = devices.peak_host_memory() - before
        del step, phases
        devices.reset_peak_memory(device)  # the model's memory is free for the ceilings
        limits = ceilings(device, _compute_dtype(spec))
    stopwatch = {name: Sample.of(values, "ms") for name, values in watch.items()}
    found = dataclasses.replace(
        found,
        source=traces[0].name,
        ceilings=limits,
        stopwatch_ms={name: sample.median for name, sample in stopwatch.items()},
        watched_ms=watched,
    )
    write(found, place)
    costs = {
        "profiling_s": Sample.exact(cost_s, "s"),
        "profiling_host_bytes": Sample.exact(cost_bytes, "bytes"),
    }
    sizes = Sample.exact(sum(trace.stat().st_size for trace in traces), "bytes")
    return dataclasses.replace(
        asked,
        metrics={**metrics(found, stopwatch), **costs, "trace_bytes": sizes},
        environment=environment(device),
    )


@contextlib.contextmanager
def _ranges(spec: ProfileSpec, step: TrainingStep, device: torch.device) -> Iterator[None]:
    """Ranges of the modules, unless they are compiled: a graph has none, and hooks would change it."""
    if spec.compile != "off":
        yield
        return
    with module_ranges(step.module, nvtx=device.type == "cuda"):
        yield


def _compute_dtype(spec: ProfileSpec) -> torch.dtype:
    return {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}.get(
        spec.precision, torch.float32
    )


def metrics(found: Analysis, stopwatch: dict[str, Sample]) -> dict[str, Sample]:
    """Phases by stopwatch and by profiler, and ms a step of each kind of work; phase and kind may
    share a name.
    """
    result = {f"{name}_ms": sample for name, sample in stopwatch.items()}
    for phase, values in found.phases_us.items():
        if phase:
            result[f"profiled_{phase}_ms"] = Sample.of([us / 1e3 for us in values], "ms")
    whole = [sum(values) / 1e3 for values in zip(*found.phases_us.values(), strict=True)]
    result["profiled_step_ms"] = Sample.of(whole, "ms")
    kinds: dict[str, float] = {}
    for cell in found.cells:
        kinds[cell.kind] = kinds.get(cell.kind, 0.0) + cell.us
    for kind, us in sorted(kinds.items(), key=lambda item: -item[1]):
        result[f"kind_{kind}_ms"] = Sample.exact(us / 1e3 / found.steps, "ms")
    if found.on_device:
        result["idle_ms"] = Sample.exact(
            sum(row.us for row in found.idle) / 1e3 / found.steps, "ms"
        )
    if found.overlap:
        result["overlap_ratio"] = Sample.exact(found.overlap.ratio, "")
        result["exposed_ms"] = Sample.exact(found.overlap.exposed_us / 1e3 / found.steps, "ms")
    return result


def write(found: Analysis, place: Path) -> None:
    """The analysis, and the flame graph for speedscope and for flamegraph.pl."""
    place.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        ANALYSIS: found.to_json(),
        "speedscope.json": speedscope(found.flame, place.name),
        "stacks.txt": "\n".join(collapsed(found.flame)) + "\n",
    }
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")


def read(record: Record, run: Path) -> Analysis | None:
    """The analysis beside the record; None for a row that has none."""
    path = folder_of(record, run) / ANALYSIS
    return (
        Analysis.from_json(path.read_text(encoding="utf-8"))
        if record.status == "ok" and path.exists()
        else None
    )


def write_report(found: Sequence[tuple[Record, Analysis | None]], run: Path) -> Path:
    """One page of all rows; those without an analysis say why."""
    titles = labels([record for record, _ in found])
    sections = [
        _section(title, analysis, record.note)
        for title, (record, analysis) in zip(titles, found, strict=True)
    ]
    return _write_page(
        "stepgauge profile step", sections, measured_where([record for record, _ in found]), run
    )


def trace_names(files: Sequence[Path]) -> list[str]:
    """Each file's name without its endings, after as many of its folders as it takes to tell all
    apart.

    Raises ValueError for a file that is given twice.
    """
    full = [(file.parent.resolve() / file.name).parts[1:] for file in files]
    paths = [(*folders, name.removesuffix(".gz").removesuffix(".json")) for *folders, name in full]
    for depth in range(1, max(map(len, paths)) + 1):
        shown = ["/".join(path[-depth:]) for path in paths]
        if len(set(shown)) == len(shown):
            return shown
    twice = next(file for file, path in zip(files, paths, strict=True) if paths.count(path) > 1)
    raise ValueError(f"FILE is {twice} twice; give each trace once")


def write_trace_report(found: Mapping[str, Analysis], folder: Path) -> Path:
    """One page of all traces, by name."""
    sections = [_section(name, analysis, "") for name, analysis in found.items()]
    devices_seen = dict.fromkeys(analysis.device for analysis in found.values() if analysis.device)
    return _write_page(
        "stepgauge profile trace",
        sections,
        {"Device": ", ".join(devices_seen) or "not in the trace"},
        folder,
    )


def _section(title: str, found: Analysis | None, note: str) -> Section:
    question = "Where does the time of a step go?"
    if found is None:
        return Section(title, question, reason=note or "its analysis is not on disk")
    return Section(title, question, profile_blocks(found), method=METHOD)


def _write_page(
    title: str, sections: Sequence[Section], shown: Mapping[str, str], folder: Path
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(page(title, sections, facts=shown), encoding="utf-8")
    return path
