"""How rotary angles are stretched, so that a network reads a longer context than it was trained on.

A scaling is written as its kind and its numbers: "linear:4", "llama3:32:1:4:8192".
"""

import dataclasses
import math
from typing import Self

# Of each kind, what its numbers are. Kinds without numbers are known by name alone: a network can
# be counted with them, and is refused when it is built.
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
    kind: str
    numbers: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for a text that names no scaling."""
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
        return ":".join([self.kind, *(f"{number:g}" for number in self.numbers)])

    def frequency(self, frequency: float) -> float:
        """The angle a position, in radians, that takes the place of this one.

        linear divides by the factor (Chen et al. 2023). llama3 divides that of waves longer than
        context / low, leaves that of waves shorter than context / high, and blends between them
        (Llama 3.1).
        """
        if self.kind == "linear":
            return frequency / self.numbers[0]
        if self.kind != "llama3":
            return frequency
        factor, low, high, context = self.numbers
        waves = context * frequency / (2 * math.pi)  # in the context that it was trained on
        kept = min(1.0, max(0.0, (waves - low) / (high - low)))
        return kept * frequency + (1 - kept) * frequency / factor
