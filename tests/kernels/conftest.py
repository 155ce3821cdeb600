"""Fixtures of the kernels' tests: poisoned memory, and fixes for Triton 3.6's interpreter, which
numpy 2.4 breaks.
"""

import math

import pytest
import torch


def patch_interpreter(set_attribute=setattr):
    """Fixes two errors of Triton 3.6's interpreter.

    It converts a one-element array to an index when a kernel's argument is the bound of a range(),
    which numpy 2.4 forbids. And it stores bf16 as 16-bit integers and multiplies those. Call this
    in a process with TRITON_INTERPRET=1; `set_attribute` replaces the interpreter's functions.
    """
    import numpy
    from triton import language
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        original(tensor, *scope)
        index = lambda self: int(self.handle.data.item())  # noqa: E731
        if scope:  # 3.6 undoes its patches after each launch
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    set_attribute(interpreter, "_patch_lang_tensor", patched)

    def in_fp32(operand):
        if operand.dtype.scalar != language.bfloat16:
            return operand
        numbers = (operand.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(numbers, language.float32)

    create_dot = interpreter.InterpreterBuilder.create_dot
    set_attribute(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: create_dot(self, in_fp32(a), in_fp32(b), *rest),
    )


@pytest.fixture
def interpreter(monkeypatch):
    patch_interpreter(monkeypatch.setattr)


@pytest.fixture
def poisoned(monkeypatch):
    """Fills new memory with NaN, so that elements that are never written show up."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def filled(*args, original=original, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, filled)


class Hopper:
    """A replacement for Triton's driver, which compiling and tracing ask for the target, on
    machines without a GPU.
    """

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def hopper_driver(monkeypatch):
    from triton.runtime import driver

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", Hopper())


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    """Makes calls run in our kernels instead of libraries; tests of the libraries turn them on."""
    monkeypatch.setenv("STEPGAUGE_CUDNN", "0")
    monkeypatch.setenv("STEPGAUGE_FA4", "0")
    for operation in ("attention", "linear_cross_entropy"):
        monkeypatch.setattr(f"stepgauge.kernels.{operation}.by_torch.IS_ALLOWED", False)
    monkeypatch.setattr("stepgauge.kernels.rms_norm.TORCH_BYTES", 0)


@pytest.fixture(autouse=True)
def empty_cuda_cache():
    """Frees torch's cached memory after each test, because several test processes share a GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
