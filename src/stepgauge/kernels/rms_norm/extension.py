"""RMSNorm's eager path in C++ (extension.cpp): what it is told of the kernels that Python has
compiled.

In Python an autograd function and three launches cost about 140 µs of host time a step; the GPU
needs 30 µs at 2048 x 2560. How it is built and done without: stepgauge.runtime.extension.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from stepgauge.kernels.launch import LAUNCH_H, cuda_addresses, cuda_context, plain_launch
from stepgauge.runtime.extension import Extension

# Whether the installed torch's rms_norm is float32 under CUDA autocast (pytorch issue 188955) or
# keeps x's type. A constant, so that torch.compile need not trace the question.
BUILTIN_AUTOCAST_IS_FLOAT32 = TorchVersion(torch.__version__) >= (2, 12)
# What the kernels' run-time arguments must be, in Triton's terms, for C++ to pass them.
_FORWARD_SCALARS, _BACKWARD_SCALARS = ["i32", "fp32"], ["i32"]
_FUNCTIONS = "cuLaunchKernel", "aoti_torch_get_current_cuda_stream", "cuCtxSetCurrent"

_registered: dict = {}


def _configure(module) -> None:
    module.configure(*cuda_addresses(*_FUNCTIONS), BUILTIN_AUTOCAST_IS_FLOAT32)


NATIVE = Extension(
    "rms_norm", Path(__file__).with_name("extension.cpp"), _configure, headers=[LAUNCH_H]
)


def offer(plan_for, x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor) -> None:
    """After a call in Python: let C++ take the next one like it, as far as kernels are compiled."""
    if NATIVE.module is None:
        NATIVE.without_module += 1
        return
    plan = plan_for(x, weight, y.dtype, residual is not None)
    has_backward = plan.backward.compiled and plan.reduce.compiled
    if not plan.forward.compiled or _registered.get(plan) in (has_backward, True):
        return
    if x.get_device() != torch.cuda.current_device():
        return  # The context to register is the current device's.
    _registered[plan] = has_backward
    try:
        _register(x, residual, weight, y, plan, has_backward)
        NATIVE.kinds += 1
    except Exception as error:  # A Triton that keeps its binaries otherwise: go on in Python.
        _registered[plan], NATIVE.problem = True, f"{type(error).__name__}: {error}"


def _register(x, residual, weight, y, plan, has_backward: bool) -> None:
    extra = residual is not None
    forward = _handle(plan.forward, 6 if extra else 4, _FORWARD_SCALARS)
    backward = None
    if has_backward:
        main = _handle(plan.backward, 7 if extra else 6, _BACKWARD_SCALARS)
        last = _handle(plan.reduce, 2, _BACKWARD_SCALARS)
        backward = (main, plan.bwd.rows, plan.max_programs, plan.splits, last, plan.reduce_grid)
    NATIVE.module.register(x, weight, y, extra, cuda_context(), (*forward, plan.fwd.rows), backward)


def _handle(launch, num_pointers: int, scalars: list[str]) -> tuple[int, int, int]:
    """(function, threads, shared bytes); ValueError for arguments that C++ would not give so."""
    types = [t for t in launch.binary.src.signature.values() if t != "constexpr"]
    if not all(t.startswith("*") for t in types[:num_pointers]) or types[num_pointers:] != scalars:
        raise ValueError(f"{launch.kernel.__name__} takes {types}")
    return plain_launch(launch.binary)
