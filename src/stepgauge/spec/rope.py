"""Scaling of rotary angles, so that a network can read longer contexts than it was trained on.

A scaling is written as its kind and its parameters: "linear:4", "llama3:32:1:4:8192".
"""

import dataclasses
import math
from typing import Self

# The parameters of each kind. "dynamic", "longrope" and "yarn" are known only by name: their networks
# can be counted but not built.
SCALINGS = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_context"),
    "dynamic": (),
    "longrope": (),
    "yarn": (),
}
RUNNABLE = ("none", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A kind in SCALINGS with the values of its parameters."""

    kind: str
    numbers: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the written form. Raises ValueError if it is not a scaling."""
        kind, *rest = text.split(":")
        names = SCALINGS.get(kind)
        if names is None:
            raise ValueError(f"rope_scaling is {text!r}; choose one of {', '.join(SCALINGS)}")
        try:
            numbers = tuple(float(number) for number in rest)
        except ValueError:
            numbers = ()
        if len(numbers) != len(names) or not all(0 < n < math.inf for n in numbers):
            form = ":".join([kind, *(name.upper() for name in names)])
            raise ValueError(f"rope_scaling is {text!r}; write it as {form}")
        return cls(kind, numbers)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{number:.15g}" for number in self.numbers)])

    def frequency(self, frequency: float) -> float:
        """Returns the scaled frequency, in radians per position.

        linear divides it by the factor (Chen et al. 2023). llama3 divides frequencies with a
        wavelength above context / low, keeps those with a wavelength below context / high, and
        interpolates between the two (Llama 3.1).
        """
        if self.kind == "linear":
            return frequency / self.numbers[0]
        if self.kind != "llama3":
            return frequency
        factor, low, high, context = self.numbers
        waves = context * frequency / (2 * math.pi)  # wavelengths per original context
        kept = min(1.0, max(0.0, (waves - low) / (high - low)))
        return kept * frequency + (1 - kept) * frequency / factor
