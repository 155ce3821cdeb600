"""Decides which steps are predicted by their traced operators, and which layouts are traced."""

import dataclasses
from typing import Any

from stepgauge.cost.operations.supported import (
    CALIBRATED,
    require_formulas,
    require_predicted,
)
from stepgauge.spec.layout import Layout
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.step import BUDGET
from stepgauge.spec.steps import AnyStep
from stepgauge.spec.user_model import UserModel

TracedSpec = AnyStep | PipelineSpec
TRACED = "a user's model, BERT, experts, windows and other masks"


def has_formulas(spec: Any) -> bool:
    """True if the terms of the step have formulas (cost/operations). Other steps are traced."""
    is_updated = getattr(spec, "phases", "step") == "step"
    if is_updated and getattr(spec, "optimizer", CALIBRATED[0]) not in CALIBRATED:
        return False
    try:
        require_formulas(spec.model)
    except ValueError:
        return False
    return True


def require_traceable(spec: TracedSpec) -> None:
    """Raises ValueError, before anything is traced, for a step that a trace cannot predict."""
    require_predicted(compile=spec.compile, precision=spec.precision)
    layout = spec.parsed_layout
    if layout.torch_tensor:
        raise ValueError(f"layout is {str(layout)!r}; torch's tensor parallel is not predicted")
    if layout.context > 1 and not layout.ulysses:
        raise ValueError(
            f"layout is {str(layout)!r}; of {TRACED} a ring of keys is not predicted: add ulysses"
        )
    if layout.pipeline > 1 and getattr(spec, "needs_times", False):
        raise ValueError(
            f"of {TRACED} stages are predicted as cut by flops: choose --balance flops"
        )
    if getattr(spec, "checkpointing", "none") == BUDGET:
        raise ValueError(f"checkpointing is {BUDGET!r}; what it comes to is not predicted yet")


def cut_of(spec: TracedSpec) -> Layout:
    """Returns the part of the spec's layout that is traced: what cuts layers and sequences.

    That includes the pipeline of a user's model, whose modules are not known from a spec.
    """
    layout = spec.parsed_layout
    if isinstance(spec.model, UserModel):
        return dataclasses.replace(layout, data=1, wrapper="none")
    return Layout(
        tensor=layout.tensor, overlap=layout.overlap, context=layout.context, ulysses=layout.ulysses,
        wrapper=layout.wrapper if layout.context > 1 else "none",
    )  # fmt: skip
