"""The options that tune may choose, with the values that it tries on a kind of device.

They change neither the model nor its results, apart from the precision. The first value is the default.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout_choices import MICRO_BATCHES_PER_RANK, WRAPPERS, layouts_on
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
# A user's network determines these itself.
PRESET_OPTIONS = ("attention", "norm", "batch", "checkpointing")


@dataclasses.dataclass(frozen=True)
class Space:
    """Steps of one kind, by the values of their options.

    One value is fixed. Several values are a choice, and the first one is the default.
    """

    kind: type
    values: Mapping[str, tuple[Any, ...]]

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name, values in self.values.items() if len(values) > 1}

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.choices.items()}

    def require(self, chosen: Chosen) -> Any:
        """Returns the step with these choices. Raises ValueError if they do not go together."""
        values = {**self.values, **{name: (value,) for name, value in chosen.items()}}
        (spec,) = expand(self.kind, values)
        return spec.canonical()

    def spec(self, chosen: Chosen) -> Any | None:
        """Returns the step with these choices; None if they do not go together."""
        try:
            return self.require(chosen)
        except ValueError:
            return None

    @property
    def size(self) -> int:
        """The number of combinations, including impossible ones."""
        return math.prod(len(values) for values in self.choices.values())

    def all(self) -> list[Chosen]:
        """Returns every possible combination of the choices."""
        product = itertools.product(*self.choices.values())
        combinations = [dict(zip(self.choices, values, strict=True)) for values in product]
        return [chosen for chosen in combinations if self.spec(chosen) is not None]


def space(given: Values, *, device: str, ranks: int = 1) -> Space:
    """Returns the candidates for the device and number of ranks. `given` values override the table's.

    Over several ranks, the layout is a choice; or only the wrapper, for a user's network and if wrappers
    are given. Raises ValueError for an option that such steps do not have.
    """
    is_user = any(given.get("model", ()))
    kind: type = StepSpec
    if "layout" in given or (ranks > 1 and not is_user and "wrapper" not in given):
        kind = LayoutSpec
    elif ranks > 1:
        kind = DataParallelSpec
    known = {**options_of(kind, ModelSpec), "size": None}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{unknown[0]} is no option of a step over {ranks} ranks")
    table = ON_GPUS if device.startswith("cuda") else ON_CPUS
    values = {n: v for n, v in table.items() if not (is_user and n in PRESET_OPTIONS)}
    fixed: Values = {"device": (device,)}
    if kind is DataParallelSpec:
        values["wrapper"] = WRAPPERS
        fixed["ranks"] = (ranks,)
    if kind is LayoutSpec:
        values["layout"] = layouts(ranks, overlaps=device.startswith("cuda"))
        # networks that are cut between ranks are compiled by block
        values["compile"] = (*values["compile"], "blocks")
        if "batch" in values:  # counts the sequences of all ranks
            values["batch"] = tuple(ranks * batch for batch in values["batch"])
    return Space(kind, {**values, **given, **fixed})


def layouts(ranks: int, *, overlaps: bool = False) -> tuple[str, ...]:
    """Returns all layouts of data, tensor and pipeline axes, beginning with data parallel ones.

    If `overlaps`, tensor axes are tried with and without overlapping communication.
    """
    candidates = []
    for tensor, pipeline in itertools.product(divisors(ranks), repeat=2):
        if ranks % (tensor * pipeline):
            continue
        microbatches = MICRO_BATCHES_PER_RANK[0] * pipeline if pipeline > 1 else 1
        overlap_choices = (False, True) if overlaps and tensor > 1 else (False,)
        data = ranks // tensor // pipeline
        for layout in layouts_on(data=data, tensor=tensor, pipeline=pipeline):
            candidates += [
                dataclasses.replace(layout, microbatches=microbatches, overlap=overlap)
                for overlap in overlap_choices
            ]
    return tuple(map(str, candidates))
