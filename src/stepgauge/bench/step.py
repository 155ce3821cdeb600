"""A StepSpec run and timed: `run` gives its record."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgauge.measure import devices
from stepgauge.measure.environment import device_name, environment
from stepgauge.measure.timing import time_phases
from stepgauge.runtime.progress import tell
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.hardware import peaks
from stepgauge.spec.plan.recompute import RecomputePlan
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.throughput import throughput
from stepgauge.spec.train import DEFAULT_CORPUS, TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.data import BYTES, Corpus, read_text
from stepgauge.train.precision import PRECISIONS, unavailable
from stepgauge.train.step import TrainingStep
from stepgauge.train.user_model import build_user_step, in_type

LEARNING_RATE = 1e-4  # small enough that random tokens never drive a timed model to infinities


def check(spec: WorkSpec) -> None:
    """Raises ValueError for what the spec asks together but cannot have, before anything is built."""
    reason = unavailable(spec.precision, torch.device(spec.device))
    if reason:
        raise ValueError(reason)
    if isinstance(spec.model, UserModel):
        return
    if spec.data == "text" and isinstance(spec.model, BertSpec):
        raise ValueError("data is 'text', which has no masked tokens; BERT takes 'random'")
    if spec.data == "text" and spec.network.vocab_size < BYTES:
        raise ValueError(
            f"vocab_size is {spec.network.vocab_size}; text as bytes needs at least {BYTES}"
        )


def run(spec: StepSpec) -> Record:
    """Builds, warms up and times the step. Raises what torch raises: out of memory, mostly."""
    check(spec)
    device = torch.device(spec.device)
    if device.type == "cpu":
        devices.require_host_memory(least_bytes(spec))
    from stepgauge.bench.checkpoint_budget import solve  # which builds steps itself

    tell("builds")
    solution = solve(spec)
    step, batch = build(spec, device, recompute=solution.plan)
    phases = step.phases(batch, until=spec.phases)
    with step.precision.matmul_mode():
        compile_s = _first_call(phases, device) if spec.compile != "off" else None
        devices.reset_peak_memory(device)
        times = time_phases(
            phases, device, warmup=spec.warmup, steps=spec.steps, seconds=spec.seconds
        )
    where = {**environment(device), "optimizer": step.optimizer_name, **solution.told()}
    metrics = _metrics(spec, times, device, compile_s)
    return Record.of(spec, metrics=metrics, environment=where, note=solution.note)


def build(
    spec: WorkSpec,
    device: torch.device,
    *,
    recompute: RecomputePlan | None = None,
    weights: torch.dtype | None = None,
) -> tuple[TrainingStep, Sequence[Any]]:
    """The step on the device and its batch, of a preset or of a user's model; `recompute` in place
    of the spec's checkpointing. `weights`: another type of these and of inputs, as ZeRO 3 computes.
    """
    if isinstance(spec.model, UserModel):
        built = build_user_step(spec, device, lr=LEARNING_RATE)
        step = built.step
        batch: Sequence[Any] = built.arguments(0)
    else:
        on_device = dataclasses.replace(spec, device=str(device))
        step = build_step(on_device, lr=LEARNING_RATE, recompute=recompute)
        batch = make_batch(spec, device)
    if weights is not None:
        step.module.to(weights)
        batch = in_type(batch, weights)
    return step, batch


def make_batch(spec: WorkSpec, device: torch.device) -> list[Tensor]:
    """tokens_BT and targets_BT, the targets one position on; of BERT as its loss takes them."""
    if spec.data == "random":
        batch = batch_for(spec.network, spec.batch, spec.seed)
    else:
        length = spec.network.context_length
        corpus = Corpus.of(read_text(DEFAULT_CORPUS))
        batch = corpus.batch(0, batch=spec.batch, length=length, seed=spec.seed)
    return [part.to(device) for part in batch]


def _first_call(phases: dict[str, Callable[[], None]], device: torch.device) -> float:
    """Seconds of the step in which torch.compile works."""
    tell("compiles in its first step")
    start = time.perf_counter()
    for phase in phases.values():
        phase()
    devices.synchronize(device)
    return time.perf_counter() - start


def _metrics(
    spec: StepSpec, times: dict[str, list[float]], device: torch.device, compile_s: float | None
) -> dict[str, Sample]:
    metrics = {f"{name}_ms": Sample.of(values, "ms") for name, values in times.items()}
    if not isinstance(spec.model, UserModel):  # of which tokens and FLOPs are not known
        tokens = spec.batch * spec.network.context_length
        metrics |= rates(spec, times["step"], tokens=tokens, flops=model_flops(spec))
    metrics |= {
        name: Sample.exact(value, "bytes") for name, value in devices.peak_memory(device).items()
    }
    if compile_s is not None:
        metrics["compile_s"] = Sample.exact(
            max(0.0, compile_s - metrics["step_ms"].median / 1e3), "s"
        )
    return metrics


def rates(spec: Any, step_ms: Sequence[float], *, tokens: int, flops: float) -> dict[str, Sample]:
    """Tokens and FLOPs of a step of the device by the second, and the share of its peak."""
    known = peaks(device_name(torch.device(spec.device)))
    peak = known.of(spec.precision) if known else None
    return throughput(step_ms, tokens=tokens, flops=flops, peak=peak)


def model_flops(spec: StepSpec) -> int:
    """Model FLOPs of what the row times: the forward alone, or forward and backward."""
    sequence = spec.network.context_length
    if spec.phases == "forward":
        return spec.network.forward_flops(batch=spec.batch, sequence=sequence)
    return spec.network.step_flops(batch=spec.batch, sequence=sequence)


def least_bytes(spec: WorkSpec | TrainSpec) -> int:
    """Parameters, and where they are trained gradients and optimizer state too: no step can do with
    less. Nothing of a user's model, which is not built yet.
    """
    if isinstance(spec.model, UserModel):
        return 0
    phases = spec.phases if isinstance(spec, WorkSpec) else "step"
    precision = PRECISIONS[spec.precision]
    each = precision.parameters.itemsize * (1 if phases == "forward" else 2)
    if phases == "step":
        each += precision.state_bytes(spec.optimizer)
    return each * spec.network.num_parameters
