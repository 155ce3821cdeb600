"""What the host takes to launch a step: steps of a network so narrow that its GPU always waits."""

import warnings

import torch

from stepgauge.measure.timing import time_phases
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.train.build import build_step
from stepgauge.train.data import random_batch

AXES = ("layers", "phase")
PHASES = ("forward", "backward", "optimizer")  # by number in the table
LAYERS = (2, 10)
MODES = {"eager": "off", "compiled": "on"}


def names() -> list[str]:
    """Eager, each cast is a launch; compiled, it is part of another."""
    return ["host eager bf16", "host eager fp32", "host compiled bf16"]


def narrow_network(layers: int) -> ModelSpec:
    return ModelSpec(
        d_model=64, d_ff=128, num_layers=layers, num_heads=1, context_length=16, vocab_size=256
    )


def measure(name: str, device: torch.device) -> OperationTable:
    """Median microseconds of each phase, for networks of LAYERS blocks."""
    _, mode, precision = name.split()
    rows: list[tuple[float, ...]] = []
    for layers in LAYERS:
        spec = StepSpec(
            model=narrow_network(layers),
            batch=1,
            precision=precision,
            compile=MODES[mode],
            device=str(device),
        )
        step = build_step(spec, lr=1e-4)
        batch = [part.to(device) for part in random_batch(256, 1, 16, 0)]
        with step.precision.matmul_mode(), warnings.catch_warnings():
            # fp32 is asked for here
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            times = time_phases(step.phases(batch), device, warmup=5, steps=30)
        for number, phase in enumerate(PHASES):
            middle = sorted(times[phase])[len(times[phase]) // 2]
            rows.append((layers, number, middle * 1e3))
        torch.compiler.reset()
    return OperationTable(AXES, tuple(rows))
