"""Which sizes and loads a machine is asked for: on a GPU those that fit and fill it, on a CPU those
that end soon.
"""

from collections.abc import Iterable
from typing import Any

from stepgauge.spec.grids import Point
from stepgauge.spec.kernel import KERNELS, KernelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.study.experiment import StudyMachine

GPU_SIZES = ("small", "medium", "large", "xl", "2.7b", "10b")
CPU_SIZES = ("nano", "tiny", "mini")
# batch and context: our default, and the published ones
OURS, S1, S2 = (4, 512), (16, 128), (4, 128)


def sizes(machine: StudyMachine) -> list[str]:
    """Sizes whose parameters, gradients and optimizer state fit the device in fp32."""
    if not machine.is_gpu:
        return list(CPU_SIZES)

    from stepgauge.bench.build import least_bytes

    return [size for size in GPU_SIZES if least_bytes(step_spec(machine, size)) < machine.bytes]


def step_spec(
    machine: StudyMachine, size: str, *, load: tuple[int, int] | None = None, **fields: Any
) -> StepSpec:
    """A StepSpec on the machine; CPU rows are short."""
    batch, context = load or (OURS if machine.is_gpu else S2)
    counts = (
        {"warmup": 5, "steps": 10} if machine.is_gpu else {"warmup": 2, "steps": 5, "seconds": 0.5}
    )
    asked = {
        **counts,
        "model": ModelSpec.preset(size, context_length=context),
        "size": size,
        "batch": batch,
        "device": machine.device,
    }
    return StepSpec(**{**asked, **fields})


SECONDS = 0.05  # of timing for each implementation: a grid has many rows


def kernel_specs(machine: StudyMachine, kind: str, points: Iterable[Point]) -> list[KernelSpec]:
    """One row a point."""
    rows = ({"seconds": SECONDS, **point, "device": machine.device} for point in points)
    return [KERNELS[kind](**row) for row in rows]


def needs_gpu(machine: StudyMachine) -> str | None:
    """Elsewhere plain PyTorch runs in place of our kernels, which measures nothing of them."""
    return None if machine.is_gpu else "our kernels run on CUDA GPUs only"
