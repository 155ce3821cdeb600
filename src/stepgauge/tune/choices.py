"""What may be chosen without another model or another result than the precision's, and the values
that are tried on a kind of device, the usual one first.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.model_fields import divisors
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
SCHEDULES = ("1f1b", "zbv")
PER_STAGE = 4  # micro-batches of a pipeline for each of its ranks
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

    @property
    def size(self) -> int:
        """Combinations, those that cannot be among them."""
        return math.prod(len(values) for values in self.choices.values())

    def all(self) -> list[Chosen]:
        """Every combination of the choices that can be."""
        product = itertools.product(*self.choices.values())
        every = [dict(zip(self.choices, values, strict=True)) for values in product]
        return [chosen for chosen in every if self.spec(chosen) is not None]


def space(given: Values, *, device: str, ranks: int = 1) -> Space:
    """The candidates on the device, over so many ranks; what is given counts more than the table.

    Over ranks the layout is a choice, of a network whose layers are not known from outside, or
    where wrappers are given, the wrapper. Raises ValueError for an option that such steps do not
    have.
    """
    is_user = any(given.get("model", ()))
    kind: type = StepSpec
    if "layout" in given or (ranks > 1 and not is_user and "wrapper" not in given):
        kind = LayoutSpec
    elif ranks > 1:
        kind = DataParallelSpec
    known = {**options_of(kind, ModelSpec), "size": None}
    if foreign := [name for name in given if name not in known]:
        raise ValueError(f"{foreign[0]} is no option of a step over {ranks} ranks")
    table = ON_GPUS if device.startswith("cuda") else ON_CPUS
    values = {n: v for n, v in table.items() if not (is_user and n in OF_PRESETS)}
    fixed: Values = {"device": (device,)}
    if kind is DataParallelSpec:
        values["wrapper"] = WRAPPERS
        fixed["ranks"] = (ranks,)
    if kind is LayoutSpec:  # whose batch is that of all ranks; cut networks are compiled by block
        values["layout"] = layouts(ranks, hides=device.startswith("cuda"))
        values["compile"] = (*values["compile"], "blocks")
        if "batch" in values:
            values["batch"] = tuple(ranks * batch for batch in values["batch"])
    return Space(kind, {**values, **given, **fixed})


def layouts(ranks: int, *, hides: bool = False) -> tuple[str, ...]:
    """Every way to spread a step over the ranks by data, tensor and pipeline axes, data alone
    first.

    hides  what a tensor axis sends may run beside products
    """
    found = []
    for tensor, pipeline in itertools.product(divisors(ranks), repeat=2):
        if ranks % (tensor * pipeline):
            continue
        data = ranks // tensor // pipeline
        for schedule in SCHEDULES if pipeline > 1 else ("",):
            for wrapper in WRAPPERS if data > 1 else ("none",):
                microbatches = PER_STAGE * pipeline if pipeline > 1 else 1
                for overlap in (False, True)[: 1 + (hides and tensor > 1)]:
                    found.append(Layout(
                        data=data, wrapper=wrapper, tensor=tensor, pipeline=pipeline,
                        schedule=schedule, microbatches=microbatches, overlap=overlap,
                    ))  # fmt: skip
    return tuple(map(str, found))
