"""A StepSpec run and timed: `run` gives its record."""

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from stepgauge.measure import devices
from stepgauge.measure.environment import device_name, environment
from stepgauge.measure.timing import time_phases
from stepgauge.spec.hardware import peaks
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.train import DEFAULT_CORPUS
from stepgauge.train.build import build_step
from stepgauge.train.data import Corpus, random_batch, read_text
from stepgauge.train.precision import PRECISIONS, unavailable

SMALLEST_BYTE_VOCABULARY = 256
LEARNING_RATE = 1e-4  # small enough that random tokens never drive a timed model to infinities


def check(spec: WorkSpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    reason = unavailable(spec.precision, torch.device(spec.device))
    if reason:
        raise ValueError(reason)
    if spec.data == "text" and spec.model.vocab_size < SMALLEST_BYTE_VOCABULARY:
        raise ValueError(f"vocab_size is {spec.model.vocab_size}; text as bytes needs at least 256")


def run(spec: StepSpec) -> Record:
    """Builds, warms up and times the step. Raises what torch raises: out of memory, mostly."""
    check(spec)
    device = torch.device(spec.device)
    if device.type == "cpu":
        devices.require_host_memory(least_bytes(spec))
    step = build_step(spec, lr=LEARNING_RATE)
    batch = make_batch(spec, device)
    phases = step.phases(batch, until=spec.phases)
    with step.precision.matmul_mode():
        compile_s = _first_call(phases, device) if spec.compile != "off" else None
        devices.reset_peak_memory(device)
        times = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=_metrics(spec, times, device, compile_s),
        environment=environment(device),
    )


def make_batch(spec: WorkSpec, device: torch.device) -> list[Tensor]:
    """tokens_BT and targets_BT, the targets one position on."""
    length = spec.model.context_length
    if spec.data == "random":
        batch = random_batch(spec.model.vocab_size, spec.batch, length, spec.seed)
    else:
        corpus = Corpus.tokenize(read_text(DEFAULT_CORPUS), "bytes", spec.model.vocab_size)
        batch = corpus.batch(0, batch=spec.batch, length=length, seed=spec.seed)
    return [part.to(device) for part in batch]


def _first_call(phases: dict[str, Callable[[], None]], device: torch.device) -> float:
    """Seconds of the step in which torch.compile works."""
    start = time.perf_counter()
    for phase in phases.values():
        phase()
    devices.synchronize(device)
    return time.perf_counter() - start


def _metrics(
    spec: StepSpec, times: dict[str, list[float]], device: torch.device, compile_s: float | None
) -> dict[str, Sample]:
    metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in times.items()}
    flops = model_flops(spec)
    metrics["tokens_per_s"] = Sample.of(
        (spec.tokens / ms * 1e3 for ms in times["step"]), "tokens/s"
    )
    metrics["tflop_per_s"] = Sample.of((flops / ms / 1e9 for ms in times["step"]), "TFLOP/s")
    known = peaks(device_name(device))
    peak = known.of(spec.precision) if known else None
    if peak:
        metrics["mfu"] = Sample.of(
            (flops / (ms / 1e3) / peak for ms in times["step"]), "fraction of dense peak"
        )
    metrics |= {
        name: Sample.exact(value, "bytes") for name, value in devices.peak_memory(device).items()
    }
    if compile_s is not None:
        metrics["compile_s"] = Sample.exact(
            max(0.0, compile_s - metrics["step_ms"].median / 1e3), "s"
        )
    return metrics


def model_flops(spec: StepSpec) -> int:
    """Model FLOPs of what the row times: the forward alone, or forward and backward."""
    sequence = spec.model.context_length
    if spec.phases == "forward":
        return spec.model.forward_flops(batch=spec.batch, sequence=sequence)
    return spec.model.step_flops(batch=spec.batch, sequence=sequence)


def least_bytes(spec: WorkSpec) -> int:
    """Parameters, and where they are trained gradients and optimizer state too: no step can do with
    less.
    """
    copies = 1 if spec.phases == "forward" else 2
    if spec.phases == "step" and spec.optimizer != "sgd":
        copies += 2
    return copies * spec.model.num_parameters * PRECISIONS[spec.precision].parameters.itemsize
