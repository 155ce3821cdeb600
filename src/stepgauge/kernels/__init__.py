"""One folder an operation: reference.py is the oracle, triton.py the kernels, __init__.py the
public function. `prepare` builds their launches in C++.
"""


def prepare() -> bool:
    """Builds or loads the C++ launches of attention and RMSNorm; call it once, before training.

    They save host time where a step's kernels are short (docs/kernels.md). Without it Python
    launches. Returns whether C++ serves; `stepgauge.runtime.extension.served` says why not.
    """
    from stepgauge.kernels import attention, rms_norm  # noqa: F401 - they register what is built
    from stepgauge.runtime import extension

    return extension.prepare()
