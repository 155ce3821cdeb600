"""Scales the times of one device to another by the ratio of their published peaks."""

from stepgauge.spec.hardware import ACCELERATORS, HardwareFile, Peaks

EXAMPLE = (
    '"peaks": {"flops": {"fp32": FLOP/s, "tf32": FLOP/s, "bf16": FLOP/s, "fp16": FLOP/s}, '
    '"memory_bytes_per_s": B/s, "memory_gb": GB, "source": "TEXT"}'
)


class PeakRatios:
    """How many times as long operations take here as on the base.

    Raises ValueError if the published peaks of either are not known.
    """

    def __init__(self, base: HardwareFile, here: HardwareFile):
        before, now = _required_peaks(base), _required_peaks(here)
        self._name, self._types = here.name, list(now.flops)
        self._flops = {
            dtype: before.flops[dtype] / rate
            for dtype, rate in now.flops.items()
            if dtype in before.flops
        }
        self._memory = before.memory_bytes_per_s / now.memory_bytes_per_s

    def of(self, operation: str) -> float:
        """Returns the ratio of FLOP/s for products and attention, of memory for everything else.

        Raises ValueError if the peaks lack the operation's arithmetic type.
        """
        words = operation.split()
        if words[0] not in ("matmul", "attention"):
            return self._memory
        if words[-1] not in self._flops:
            raise ValueError(
                f"the hardware file {self._name}: peaks.flops has no {words[-1]}; it has "
                f"{', '.join(self._types) or 'nothing'}"
            )
        return self._flops[words[-1]]


def _required_peaks(file: HardwareFile) -> Peaks:
    if (known := file.peaks) is not None:
        return known
    raise ValueError(
        f"the hardware file {file.name} has no peaks, and its device {file.device!r} is not one of "
        f"{', '.join(ACCELERATORS)}; times are scaled by the ratio of published peaks, so write them "
        f"into the file: {EXAMPLE}"
    )
