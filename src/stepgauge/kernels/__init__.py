"""One folder per operation: reference.py is the oracle, triton.py has the kernels, and __init__.py
the public function.
"""

import importlib
from typing import Any

# Public names, imported on first access. A function with the name of its folder is reached through
# the folder: kernels.rms_norm.rms_norm.
_HOMES = {
    "FusedAdamW": "adamw",
    "FusedLinearCrossEntropy": "linear_cross_entropy",
    "TritonRMSNorm": "rms_norm",
    "flash_attention": "attention",
    "flash_attention_varlen": "attention",
}
_FOLDERS = ("adamw", "attention", "linear_cross_entropy", "rms_norm", "rotary", "swiglu")


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES, *_FOLDERS]
