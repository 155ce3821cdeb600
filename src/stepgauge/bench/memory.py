"""A MemorySpec run: storages followed, beside the allocator's figures and the prediction. `run` gives its record."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stepgauge.bench import step as bench_step
from stepgauge.bench.own_model import build_own, load_factory
from stepgauge.kernels.linear_cross_entropy.chunked import transient_bytes
from stepgauge.measure import devices
from stepgauge.measure.dtypes import Found, probe, told
from stepgauge.measure.environment import environment
from stepgauge.measure.memory import history
from stepgauge.measure.memory.extras import CudaExtras
from stepgauge.measure.memory.follow import CATEGORIES, GRADIENTS, OTHER, PARAMETERS, STATE, Follower
from stepgauge.measure.memory.picture import LARGEST, Picture, by_block, picture, savers
from stepgauge.measure.memory.pretended import pretending
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.record import Record, Sample
from stepgauge.train.build import build_step
from stepgauge.train.step import TrainingStep

FORWARD_ONLY = "forward only"
KNOWN_EXTRAS: Mapping[str, Callable[[Any], int]] = {"stepgauge::linear_cross_entropy": transient_bytes}
STEPS = 2  # the optimizer makes its state in the first; the second is like every later one


@dataclasses.dataclass(frozen=True)
class Followed:
    """One run under a follower: the picture of its last step, and the peak of the forward pass without gradients."""

    step: Picture
    forward_only_bytes: int


def check(spec: MemorySpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    if spec.predict == "no":
        bench_step.check(spec)
        if spec.compile != "off" and not spec.device.startswith("cuda"):
            raise ValueError(f"compile is {spec.compile!r}; what compiled code holds can be seen on CUDA only")
    if spec.own:
        load_factory(spec.own)


def run(spec: MemorySpec, *, folder: Path | None = None) -> Record:
    """Predicts the step's memory, then measures it, unless prediction is all that is asked for.

    What does not fit is a record with status "oom" and the prediction. The allocator's snapshot goes to the folder.
    """
    check(spec)
    asked = Record(kind=spec.kind, spec=dataclasses.asdict(spec), environment=environment(torch.device(spec.device)))
    predicted = predict(spec) if spec.compile == "off" else None
    if spec.predict != "no":
        assert predicted is not None
        shown = {**_figures(predicted), "predicted_peak_bytes": predicted.step.peak.total}
        return _record(asked, predicted.step, shown, provenance="modelled", note=f"predicted for {spec.predict}")
    try:
        found, figures = _measured(spec, folder, predicted)
    except Exception as error:
        reason = devices.out_of_memory_reason(error)
        if reason is None or predicted is None:
            raise
        known = {"predicted_peak_bytes": predicted.step.peak.total}
        return dataclasses.replace(_record(asked, predicted.step, known), status="oom", note=reason)
    if predicted is not None:
        figures |= _compared(figures, predicted)
    return _record(asked, found, figures)


def probe_dtypes(spec: MemorySpec) -> list[Found]:
    """The types of one step of the model, uncompiled."""
    device = torch.device(spec.device)
    step, batch = _build(spec, device)
    with step.precision.matmul_mode():
        found = probe(step.module, lambda: step.forward(*batch), step.backward)
        if spec.own:
            return found
        # The loss takes the head's weight; its logits are a module's output only without targets.
        with torch.no_grad(), step.precision.autocasting(device):
            logits = step.module(batch[0])
    here = [f.what for f in found].index("loss")
    return [*found[:here], told("logits", "head", logits, "Linear"), *found[here:]]


def predict(spec: MemorySpec) -> Followed:
    """The same step on tensors without memory, for the device that is asked for or the one it runs on."""
    architecture = spec.predict if spec.predict != "no" else _architecture(torch.device(spec.device))
    with pretending(architecture) as device:
        is_cuda = device.type == "cuda"
        extras = CudaExtras(architecture, KNOWN_EXTRAS) if is_cuda else None
        follower = Follower(device, extras=extras)
        with follower:
            _follow(dataclasses.replace(spec, device=str(device)), device, follower, steps=STEPS)
    return _pictures(follower, follower.allocations, caching=is_cuda)


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    return "sm90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm80"


def _measured(spec: MemorySpec, folder: Path | None, predicted: Followed | None) -> tuple[Picture, dict[str, float]]:
    device = torch.device(spec.device)
    if device.type == "cuda":
        return _measured_by_allocator(spec, device, folder)
    if predicted is not None and device.type == "cpu":
        devices.require_host_memory(predicted.step.peak.total)
    follower = Follower(device)
    with follower:
        _follow(spec, device, follower, steps=STEPS)
    found = _pictures(follower, follower.allocations, caching=False)
    resident = devices.peak_memory(device)
    extra = {"resident_peak_bytes": float(resident)} if resident else {}
    return found.step, {**_figures(found), **extra}


def _measured_by_allocator(
    spec: MemorySpec, device: torch.device, folder: Path | None
) -> tuple[Picture, dict[str, float]]:
    """The last step but one runs alone, for its peaks; the last is followed, for whose bytes they are."""
    history.release_what_earlier_steps_left()
    first = history.event_count(device)
    baseline = torch.cuda.memory_allocated(device)
    follower = Follower(device, events=lambda: history.event_count(device))
    peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def peak_of(name: str, number: int) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        yield
        if number == STEPS or name == FORWARD_ONLY:
            peaks[f"{_metric(name)}_peak_bytes"] = torch.cuda.max_memory_allocated(device) - baseline

    follows = follower if spec.compile == "off" else contextlib.nullcontext()
    with history.recording():
        with follows:
            # One step more than is predicted: the last one is the one that is followed.
            _follow(spec, device, follower, steps=STEPS + 1, around=peak_of)
        devices.synchronize(device)
        found = history.snapshot(device)
    if folder is not None:
        history.save(found, snapshot_path(spec, folder))
    lives = history.joined(history.trace_of(found, device), follower, first=first)
    shown = _pictures(follower, lives, caching=True)
    peaks["peak_bytes"] = max(peaks[f"{name}_peak_bytes"] for name in ("forward", "backward", "optimizer"))
    held = shown.step.peak.held
    parts = {f"{_metric(name)}_bytes": float(held[name]) for name in CATEGORIES}
    parts["unexplained_bytes"] = peaks["peak_bytes"] - sum(held.values())
    parts["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return shown.step, {**peaks, **parts}


def snapshot_path(spec: MemorySpec, folder: Path) -> Path:
    """Where the allocator's snapshot of a row lies."""
    digest = hashlib.sha256(Record(kind=spec.kind, spec=dataclasses.asdict(spec)).key.encode()).hexdigest()[:8]
    place = folder / "snapshots"
    place.mkdir(parents=True, exist_ok=True)
    return place / f"{spec.size}-{spec.precision}-{spec.model.context_length}-{digest}.pickle"


def _nothing(name: str, number: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _follow(
    spec: MemorySpec,
    device: torch.device,
    follower: Follower,
    *,
    steps: int,
    around: Callable[[str, int], contextlib.AbstractContextManager[None]] = _nothing,
) -> None:
    """Builds the step, runs forward without gradients and then `steps` whole steps, and tells whose is what."""
    with follower.phase("build"):
        step, batch = _build(spec, device)
    names: dict[Any, str] = {parameter: name for name, parameter in step.module.named_parameters()}
    for parameter, name in names.items():
        follower.label([parameter], PARAMETERS, name=name)
    follower.label([*step.module.buffers(), *tree_leaves(batch)], OTHER)
    watching = follower.watching(step.module) if spec.compile == "off" else contextlib.nullcontext()
    with watching, step.precision.matmul_mode():
        with around(FORWARD_ONLY, 0), follower.phase(FORWARD_ONLY), torch.no_grad():
            step.forward(*batch)
        phases = bench_step.make_phases(spec, step, batch)
        for number in range(1, steps + 1):
            for name, phase in phases.items():
                with around(name, number), follower.phase(name):
                    phase()
                for parameter, name in names.items():
                    follower.label([parameter.grad], GRADIENTS, name=name)
            for owner, state in step.optimizer.state.items():
                for key, value in state.items():
                    follower.label([value], STATE, name=f"{names.get(owner, '')} {key}")


def _build(spec: MemorySpec, device: torch.device) -> tuple[TrainingStep, Sequence[Any]]:
    if spec.own:
        return build_own(spec.own, precision=spec.precision, optimizer=spec.optimizer, device=device, seed=spec.seed)
    return build_step(spec, lr=bench_step.LEARNING_RATE), bench_step.make_batch(spec, device)


def _pictures(follower: Follower, allocations: Sequence[Any], *, caching: bool) -> Followed:
    alone = [phase for phase in follower.phases if phase.name == FORWARD_ONLY]
    last = follower.phases[-3:]
    assert [phase.name for phase in last] == ["forward", "backward", "optimizer"]
    return Followed(
        picture(allocations, last, caching=caching), picture(allocations, alone, caching=caching).peak.total
    )


def _figures(found: Followed) -> dict[str, float]:
    shown = found.step
    peaks = {f"{_metric(phase.name)}_peak_bytes": shown.peak_of(phase) for phase in shown.phases}
    parts = {f"{_metric(name)}_bytes": shown.peak.held[name] for name in CATEGORIES}
    reserved = {"reserved_peak_bytes": shown.reserved} if shown.reserved else {}
    return {
        "peak_bytes": shown.peak.total,
        f"{_metric(FORWARD_ONLY)}_peak_bytes": found.forward_only_bytes,
        **peaks,
        **parts,
        **reserved,
    }


def _compared(figures: Mapping[str, float], predicted: Followed) -> dict[str, float]:
    """The prediction and its signed error, of the step and of the forward pass alone."""
    peak, alone = predicted.step.peak.total, predicted.forward_only_bytes
    return {
        "predicted_peak_bytes": peak,
        "predicted_error": peak / figures["peak_bytes"] - 1,
        "predicted_forward_only_peak_bytes": alone,
        "predicted_forward_only_error": alone / figures["forward_only_peak_bytes"] - 1,
    }


def _metric(name: str) -> str:
    return name.replace(" ", "_")


def _record(asked: Record, found: Picture, figures: Mapping[str, float], **fields: Any) -> Record:
    saved = found.saved_for_backward()
    blocks = by_block(saved, found.bytes_of)
    metrics = {
        name: Sample.exact(value, "signed fraction" if name.endswith("_error") else "bytes")
        for name, value in figures.items()
    }
    metrics["saved_for_backward_bytes"] = Sample.exact(sum(blocks.values()), "bytes")
    return dataclasses.replace(
        asked, metrics=metrics, series=_series(found), tables=_tables(found, blocks, saved), **fields
    )


def _series(found: Picture) -> dict[str, list[float]]:
    """The curve of each category over the step's events, and where its phases begin."""
    moments = found.thinned()
    start = found.phases[0].start
    return {
        "event": [float(max(0, moment.event - start)) for moment in moments],
        **{_metric(name): [float(moment.held[name]) for moment in moments] for name in CATEGORIES},
        "phase_start": [float(phase.start - start) for phase in found.phases],
    }


def _tables(found: Picture, blocks: Mapping[str, int], saved: Sequence[Any]) -> dict[str, list[list[Any]]]:
    return {
        "at_the_peak": [
            ["category", "module", "made by", "line", "phase", "tensors", "bytes"],
            *([*row] for row in found.holders(found.peak.event)[:LARGEST]),
        ],
        "saved_by_block": [["block", "bytes"], *([name, size] for name, size in blocks.items())],
        "savers": [
            ["kept by", "made by", "line", "tensors", "bytes"],
            *([*row] for row in savers(saved, found.bytes_of)),
        ],
    }
