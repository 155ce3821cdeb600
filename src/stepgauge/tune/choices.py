"""What may be chosen without another model or another result than the precision's, and the values
that are tried on a kind of device, the usual one first.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import Values, expand, options_of
from stepgauge.spec.step import StepSpec

Chosen = Mapping[str, Any]
ON_GPUS: Values = {
    "precision": ("fp32", "tf32", "bf16"),
    "compile": ("off", "on"),
    "attention": ("sdpa", "triton"),
    "norm": ("rmsnorm", "triton"),
    "optimizer": ("adamw", "fused"),
    "batch": (4, 8, 16),
    "checkpointing": ("none", "blocks"),
}
ON_CPUS: Values = {
    "precision": ("fp32", "bf16"),
    "compile": ("off", "on"),
    "batch": (4, 8, 16),
    "checkpointing": ("none", "blocks"),
}
WRAPPERS = ("bucketed", "zero1", "zero2", "zero3")
# A user's network brings these itself.
OF_PRESETS = ("attention", "norm", "batch", "checkpointing")


@dataclasses.dataclass(frozen=True)
class Space:
    """Steps of one kind, by the values of their options: one value is fixed, several are a choice
    whose first is usual.
    """

    kind: type
    values: Mapping[str, tuple[Any, ...]]

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name, values in self.values.items() if len(values) > 1}

    @property
    def usual(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.choices.items()}

    def require(self, chosen: Chosen) -> Any:
        """The step with these values for the choices. Raises ValueError where they do not go
        together.
        """
        values = {**self.values, **{name: (value,) for name, value in chosen.items()}}
        (spec,) = expand(self.kind, values)
        return spec.canonical()

    def spec(self, chosen: Chosen) -> Any | None:
        """The same; None where they do not go together."""
        try:
            return self.require(chosen)
        except ValueError:
            return None

    def all(self) -> list[Chosen]:
        """Every combination of the choices that can be."""
        product = itertools.product(*self.choices.values())
        every = [dict(zip(self.choices, values, strict=True)) for values in product]
        return [chosen for chosen in every if self.spec(chosen) is not None]


def space(given: Values, *, device: str, ranks: int = 1) -> Space:
    """The candidates on the device, over so many ranks; what is given counts more than the table.

    Raises ValueError for an option that such steps do not have.
    """
    kind = DataParallelSpec if ranks > 1 else StepSpec
    known = {**options_of(kind, ModelSpec), "size": None}
    if foreign := [name for name in given if name not in known]:
        raise ValueError(f"{foreign[0]} is no option of a step over {ranks} ranks")
    is_user = any(given.get("model", ()))
    table = ON_GPUS if device.startswith("cuda") else ON_CPUS
    values = {n: v for n, v in table.items() if not (is_user and n in OF_PRESETS)}
    fixed: Values = {"device": (device,)}
    if ranks > 1:
        values["wrapper"] = WRAPPERS
        fixed["ranks"] = (ranks,)
    return Space(kind, {**values, **given, **fixed})
