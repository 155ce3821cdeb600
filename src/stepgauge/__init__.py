"""Measures a Transformer training step, explains it, makes it faster and predicts it.

Use it as `import stepgauge as sg`: sg.time_step, sg.profile_step, sg.profile_memory,
sg.predict_memory, sg.predict, sg.plan, sg.run, sg.open_run, sg.compare, sg.kernels and sg.parallel
(see docs/api.md). Importing the package is cheap: torch is loaded by the first call that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stepgauge import kernels, parallel
    from stepgauge.api.measure import predict_memory, profile_memory, profile_step, time_step
    from stepgauge.api.predictions import plan, predict
    from stepgauge.api.runs import compare, open_run, run
    from stepgauge.spec.bert import BertSpec
    from stepgauge.spec.data_parallel import DataParallelSpec
    from stepgauge.spec.layout_step import LayoutSpec
    from stepgauge.spec.memory import MemorySpec
    from stepgauge.spec.model import ModelSpec
    from stepgauge.spec.options import expand
    from stepgauge.spec.planning import PlanSpec
    from stepgauge.spec.profile import ProfileSpec
    from stepgauge.spec.step import StepSpec
    from stepgauge.spec.user_model import UserModel

__all__ = [
    "BertSpec",
    "DataParallelSpec",
    "LayoutSpec",
    "MemorySpec",
    "ModelSpec",
    "PlanSpec",
    "ProfileSpec",
    "StepSpec",
    "UserModel",
    "compare",
    "expand",
    "kernels",
    "open_run",
    "parallel",
    "plan",
    "predict",
    "predict_memory",
    "profile_memory",
    "profile_step",
    "run",
    "time_step",
]

# The module that defines each name; __getattr__ imports it at first use.
_DEFINED_IN = {
    **dict.fromkeys(
        ("predict_memory", "profile_memory", "profile_step", "time_step"), "api.measure"
    ),
    **dict.fromkeys(("plan", "predict"), "api.predictions"),
    **dict.fromkeys(("compare", "open_run", "run"), "api.runs"),
    "BertSpec": "spec.bert",
    "DataParallelSpec": "spec.data_parallel",
    "LayoutSpec": "spec.layout_step",
    "MemorySpec": "spec.memory",
    "ModelSpec": "spec.model",
    "PlanSpec": "spec.planning",
    "ProfileSpec": "spec.profile",
    "StepSpec": "spec.step",
    "UserModel": "spec.user_model",
    "expand": "spec.options",
}


def __getattr__(name: str) -> Any:
    if name in ("kernels", "parallel"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
