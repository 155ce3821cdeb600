"""One folder an operation: reference.py is the oracle, triton.py the kernels, __init__.py the
public function. `prepare` builds their launches in C++.
"""

import importlib
from typing import Any

# Public names, loaded when they are first asked for; functions that are called as their folder is
# are reached through it: kernels.rms_norm.rms_norm.
_HOMES = {
    "FusedAdamW": "adamw",
    "FusedLinearCrossEntropy": "linear_cross_entropy",
    "TritonRMSNorm": "rms_norm",
    "flash_attention": "attention",
    "flash_attention_varlen": "attention",
}
_FOLDERS = ("adamw", "attention", "linear_cross_entropy", "rms_norm")


def prepare() -> bool:
    """Builds or loads the C++ launches of attention and RMSNorm; call it once, before training.

    They save host time where a step's kernels are short (docs/kernels.md). Without it Python
    launches. Returns whether C++ serves; `stepgauge.runtime.extension.served` says why not.
    """
    from stepgauge.kernels import attention, rms_norm  # noqa: F401 - they register what is built
    from stepgauge.runtime import extension

    return extension.prepare()


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES, *_FOLDERS, "prepare"]
