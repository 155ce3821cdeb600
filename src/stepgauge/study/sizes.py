"""Model sizes and batches of the study: on a GPU those that fit, on a CPU small ones."""

from collections.abc import Iterable
from typing import Any

from stepgauge.spec.grids import Point
from stepgauge.spec.kernel import KERNELS, KernelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import StudyMachine

GPU_SIZES = ("small", "medium", "large", "xl", "2.7b", "10b")
CPU_SIZES = ("nano", "tiny", "mini")
# (batch, context): our default, and those of the published sources
DEFAULT_LOAD, S1_LOAD, S2_LOAD = (4, 512), (16, 128), (4, 128)


def sizes(machine: StudyMachine) -> list[str]:
    """Returns the sizes whose parameters, gradients and optimizer state in fp32 fit on the device."""
    if not machine.is_gpu:
        return list(CPU_SIZES)

    from stepgauge.bench.build import least_bytes

    return [size for size in GPU_SIZES if least_bytes(step_spec(machine, size)) < machine.bytes]


def step_spec(
    machine: StudyMachine, size: str, *, load: tuple[int, int] | None = None, **fields: Any
) -> StepSpec:
    """Returns a StepSpec for the machine, with few repetitions on a CPU."""
    batch, context = load or (DEFAULT_LOAD if machine.is_gpu else S2_LOAD)
    counts = (
        {"warmup": 5, "steps": 10} if machine.is_gpu else {"warmup": 2, "steps": 5, "seconds": 0.5}
    )
    defaults = {
        **counts,
        "model": ModelSpec.preset(size, context_length=context),
        "size": size,
        "batch": batch,
        "device": machine.device,
    }
    return StepSpec(**{**defaults, **fields})


SECONDS = 0.05  # timing per implementation; short, because a grid has many rows


def kernel_specs(machine: StudyMachine, kind: str, points: Iterable[Point]) -> list[KernelSpec]:
    """Returns one spec per point."""
    rows = ({"seconds": SECONDS, **point, "device": machine.device} for point in points)
    return [KERNELS[kind](**row) for row in rows]


def needs_gpu(machine: StudyMachine) -> str | None:
    """Without a GPU, plain PyTorch would run instead of our kernels."""
    return None if machine.is_gpu else "our kernels run on CUDA GPUs only"
