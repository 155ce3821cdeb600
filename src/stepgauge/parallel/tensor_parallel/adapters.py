"""Rules of layers to which peft's LoRA adds two small ones (Hu et al. 2021): W x + s B(A x)."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from stepgauge.parallel.tensor_parallel.layer_types import ADAPTED, base_of
from stepgauge.spec.plan.tensor import Rule

ADAPTABLE = ("column", "row")


def rules_of_adapted(
    name: str, layer: Any, rule: Rule, *, by_sequence: bool, is_gathered: bool
) -> Iterator[tuple[str, Rule]]:
    """The rules of the parts of such a layer, in the place of its own.

    Of a column each rank has all of x and some of the output: A is whole, and its gradients are
    parts; B is cut as W is. Of a row each rank has some of x and all of the output: A is cut as W
    is, what it gives is summed, and B is whole.

    is_gathered  a module around the layer gathers x already

    Raises ValueError for what peft computes otherwise, such as DoRA.
    """
    _require_plain(name, layer)
    is_column = rule.kind == "column"
    after = Rule("sequence" if by_sequence else "whole")
    if is_column and not is_gathered:
        yield name, Rule("gather")
    yield f"{name}.base_layer", rule
    for adapter in layer.lora_A:
        yield f"{name}.lora_A.{adapter}", Rule("heads") if is_column else rule
        yield f"{name}.lora_B.{adapter}", rule if is_column else after


def is_adapted(layer: nn.Module) -> bool:
    return base_of(layer, (ADAPTED,)) is not None


def _require_plain(name: str, layer: Any) -> None:
    variants = {type(each).__name__ for each in getattr(layer, "lora_variant", {}).values()}
    known = ("base_layer.", "lora_A.", "lora_B.")
    others = {key for key, _ in layer.named_parameters() if not key.startswith(known)}
    if more := sorted(variants or others):
        raise ValueError(
            f"{name} is {ADAPTED.name} with {more[0]}, whose outputs cannot be cut; choose plain LoRA, "
            f"or leave the layer whole"
        )
