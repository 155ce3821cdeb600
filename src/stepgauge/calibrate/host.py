"""What the host takes to launch a step: steps of a network so narrow that its GPU always waits."""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.spec.calibration import CalibrationSpec, OperationTable, launched_under
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor import LEAST_OVERLAPPED_BYTES
from stepgauge.spec.step import TRAINING_PHASES, StepSpec
from stepgauge.train.build import build_step
from stepgauge.train.data import random_batch
from stepgauge.train.layout import build_layout_step
from stepgauge.train.step import TrainingStep

AXES = ("layers", "phase")
LAYERS = (2, 10)
MODES = {"eager": "off", "compiled": "on", "blocks": "blocks"}
MODES_AND_TYPES = ("host eager bf16", "host eager fp32", "host compiled bf16", "host blocks bf16")
LENGTH, WORDS = 16, 256
WARMUP, STEPS, ROUNDS = 5, 12, 3


def names() -> list[str]:
    """Eager, each cast is a launch; compiled, it is part of another. Checkpointing that asks what is
    kept costs the host more than the launches.
    """
    return [*MODES_AND_TYPES, f"host eager bf16{launched_under(Layout(), 'selective')}"]


def names_on(ranks: int) -> list[str]:
    """Of ranks that launch otherwise than one process does, and whose wrapper has no table of its
    own (calibrate/wrappers.py).
    """
    layouts = (
        Layout(tensor=ranks),
        Layout(tensor=ranks, overlap=True),
        Layout(data=ranks, wrapper="torch-ddp"),
        Layout(data=ranks, wrapper="torch-fsdp"),
        Layout(context=ranks, wrapper="zero1"),
        Layout(context=ranks, ulysses=True, wrapper="zero2"),
    )
    return [f"host eager bf16{launched_under(layout, 'none')}" for layout in layouts]


def is_host(name: str) -> bool:
    """Whether the operation is a mode of the host, alone or under what launched_under says."""
    return any(name == known or name.startswith(f"{known} ") for known in MODES_AND_TYPES)


def narrow_network(layers: int, heads: int = 1) -> ModelSpec:
    return ModelSpec(
        d_model=64 * heads, d_ff=128 * heads, num_layers=layers, num_heads=heads,
        context_length=LENGTH, vocab_size=WORDS,
    )  # fmt: skip


def measure(spec: CalibrationSpec, device: torch.device) -> OperationTable:
    """Median microseconds that the host takes for each phase, for networks of LAYERS blocks; where
    ranks do it together, all of them must call it. The networks take turns: a core's pace moves
    from second to second.
    """
    built = {layers: _build(spec, layers, device) for layers in LAYERS}
    times: dict[tuple[int, str], list[float]] = {}
    for number in range(ROUNDS):
        for layers, (step, phases) in built.items():
            warmup = 1 if number else WARMUP
            found = host_times(step, phases, device, warmup=warmup, steps=STEPS)
            for phase in TRAINING_PHASES:
                times.setdefault((layers, phase), []).extend(found[phase])
    torch.compiler.reset()
    rows = [
        (layers, number, 1e3 * statistics.median(times[layers, phase]))
        for layers in LAYERS
        for number, phase in enumerate(TRAINING_PHASES)
    ]
    return OperationTable(AXES, tuple(rows))


def host_times(
    step: TrainingStep, phases: Phases, device: torch.device, *, warmup: int, steps: int
) -> Mapping[str, list[float]]:
    """Milliseconds until each phase's call returns. Launches of few layers fit into the device's
    queue, so that it returns when the host is through.
    """
    found: dict[str, list[float]] = {name: [] for name in phases}
    watched = {name: _watched(call, found[name]) for name, call in phases.items()}
    if dist.is_initialized():
        dist.barrier()
    with step.precision.matmul_mode(), warnings.catch_warnings():
        # fp32 is asked for here
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        time_phases(watched, device, warmup=warmup, steps=steps)
    return {name: times[warmup:] for name, times in found.items()}


def _watched(phase: Callable[[], None], times: list[float]) -> Callable[[], None]:
    def call() -> None:
        begin = time.perf_counter()
        phase()
        times.append((time.perf_counter() - begin) * 1e3)

    return call


def _build(
    asked: CalibrationSpec, layers: int, device: torch.device
) -> tuple[TrainingStep, Phases]:
    """Under a layout two sequences of two heads, which ranks share: copies of several sequences are
    launches, too; where ranks send beside products, as many as they do it for.
    """
    _, mode, precision, *words = asked.operation.split()
    under, _, keeping = " ".join(words).partition("keeping ")
    how = {"precision": precision, "compile": MODES[mode], "device": str(device),
           "checkpointing": keeping or "none"}  # fmt: skip
    cut = Layout.parse(under) if under.strip() else Layout()
    if cut.ranks == 1:
        spec = StepSpec(model=narrow_network(layers), batch=1, **how)  # type: ignore[arg-type]
        step, own = build_step(spec, lr=LEARNING_RATE), 1
    else:
        model = narrow_network(layers, heads=max(2, cut.tensor * cut.context))
        if cut.context > 1:  # keys go around a ring of ours
            model = dataclasses.replace(model, attention="triton")
        own = 2
        if cut.overlap:
            own = cut.tensor * LEAST_OVERLAPPED_BYTES // (2 * LENGTH * model.d_model)
        layout = LayoutSpec(model=model, layout=str(cut), batch=own * cut.data,
                            bucket_mb=asked.bucket_mb, **how)  # type: ignore[arg-type]  # fmt: skip
        step = build_layout_step(
            layout, layout=cut, device=device, stages=[range(layers)], lr=LEARNING_RATE
        )
    batch = [part.to(device) for part in random_batch(WORDS, own, LENGTH, 0)]
    return step, step.phases(batch)
