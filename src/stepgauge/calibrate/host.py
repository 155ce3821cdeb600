"""Times the host's launches of a step, with networks so narrow that the GPU always waits."""

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
MODES_AND_DTYPES = ("host eager bf16", "host eager fp32", "host compiled bf16", "host blocks bf16")
LENGTH, VOCABULARY = 16, 256
# A host moves by a quarter within tenths of a second, so it is timed over a second or more.
WARMUP, STEPS, ROUNDS = 5, 12, 6


def names() -> list[str]:
    """Returns the host operations of a single process.

    Eager networks are timed in two precisions, because each cast is a launch; compiled, it is part of
    another one. Selective checkpointing has its own, because it takes the host longer than the launches.
    """
    return [*MODES_AND_DTYPES, f"host eager bf16{launched_under(Layout(), 'selective')}"]


def names_on(ranks: int) -> list[str]:
    """Returns the host operations that are timed on several ranks at once: those of a single process, and
    those of layouts whose ranks launch other work.

    Left out are a network compiled as a whole, which takes long to compile on every rank, and wrappers
    with their own table (calibrate/wrappers.py).
    """
    tensor = (Layout(tensor=ranks), Layout(tensor=ranks, overlap=True))
    others = (
        Layout(data=ranks, wrapper="torch-ddp"),
        Layout(data=ranks, wrapper="torch-fsdp"),
        Layout(context=ranks, wrapper="zero1"),
        Layout(context=ranks, ulysses=True, wrapper="zero2"),
    )
    return [
        *(name for name in names() if name != "host compiled bf16"),
        *(f"host eager bf16{launched_under(layout, 'none')}" for layout in (*tensor, *others)),
        *(f"host blocks bf16{launched_under(layout, 'none')}" for layout in tensor),
    ]


def measures(name: str) -> bool:
    """Returns True for an operation that `measure` times, with or without a suffix from launched_under."""
    return any(name == known or name.startswith(f"{known} ") for known in MODES_AND_DTYPES)


def narrow_network(layers: int, heads: int = 1) -> ModelSpec:
    return ModelSpec(
        d_model=64 * heads, d_ff=128 * heads, num_layers=layers, num_heads=heads,
        context_length=LENGTH, vocab_size=VOCABULARY,
    )  # fmt: skip


def measure(spec: CalibrationSpec, device: torch.device) -> OperationTable:
    """Returns the median time of the host for each phase, for networks of LAYERS blocks.

    All ranks must call it together. The networks take turns, because a core's speed changes from second
    to second.
    """
    built = {layers: _build(spec, layers, device) for layers in LAYERS}
    times: dict[tuple[int, str], list[float]] = {}
    for number in range(ROUNDS):
        for layers, (step, phases) in built.items():
            warmup = 1 if number else WARMUP
            phase_times = host_times(step, phases, device, warmup=warmup, steps=STEPS)
            for phase in TRAINING_PHASES:
                times.setdefault((layers, phase), []).extend(phase_times[phase])
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
    """Returns the milliseconds until each phase's call returns.

    The launches of few layers fit into the device's queue, so the call returns when the host is done.
    """
    times: dict[str, list[float]] = {name: [] for name in phases}
    timed = {name: _timed(call, times[name]) for name, call in phases.items()}
    if dist.is_initialized():
        dist.barrier()
    with step.precision.matmul_mode(), warnings.catch_warnings():
        # torch recommends TF32, but fp32 is intended here
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        time_phases(timed, device, warmup=warmup, steps=steps)
    return {name: times[name][warmup:] for name in times}


def _timed(phase: Callable[[], None], times: list[float]) -> Callable[[], None]:
    def call() -> None:
        start = time.perf_counter()
        phase()
        times.append((time.perf_counter() - start) * 1e3)

    return call


def _build(
    calibration: CalibrationSpec, layers: int, device: torch.device
) -> tuple[TrainingStep, Phases]:
    """Builds a step with the launches of the operation.

    Under a layout, ranks share two sequences of two heads, because copies that reorder several sequences
    are launches, too. With overlap, there are enough tokens that communication does overlap.
    """
    _, mode, precision, *words = calibration.operation.split()
    layout_text, _, checkpointing = " ".join(words).partition("keeping ")
    settings = {"precision": precision, "compile": MODES[mode], "device": str(device),
                "checkpointing": checkpointing or "none"}  # fmt: skip
    layout = Layout.parse(layout_text) if layout_text.strip() else Layout()
    if layout.ranks == 1:
        spec = StepSpec(model=narrow_network(layers), batch=1, **settings)  # type: ignore[arg-type]
        step, rank_batch = build_step(spec, lr=LEARNING_RATE), 1
    else:
        model = narrow_network(layers, heads=max(2, layout.tensor * layout.context))
        if layout.context > 1:  # the ring needs this package's attention
            model = dataclasses.replace(model, attention="triton")
        rank_batch = 2
        if layout.overlap:
            rank_batch = layout.tensor * LEAST_OVERLAPPED_BYTES // (2 * LENGTH * model.d_model)
        layout_spec = LayoutSpec(
            model=model, layout=str(layout), batch=rank_batch * layout.data,
            bucket_mb=calibration.bucket_mb, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        step = build_layout_step(
            layout_spec, layout=layout, device=device, stages=[range(layers)], lr=LEARNING_RATE
        )
    batch = [part.to(device) for part in random_batch(VOCABULARY, rank_batch, LENGTH, 0)]
    return step, step.phases(batch)
