"""Fake CUDA tensors on a machine without a GPU: the only file that reaches into torch for it.

Entered only where a prediction for CUDA is asked for and there is no CUDA. Each part goes when torch
closes the issue that stands beside it:

- autograd asks for the device's streams and fails without a GPU (pytorch issue 92627; torch merged
  and took back a guard that does nothing, pull request 163187): cuda_without_gpu.cpp
- autocast, is_bf16_supported and get_device_capability ask the driver
- a torch built without CUDA lacks the kernels by which autograd decides whether an operator is taken
  apart
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from stepgauge.runtime.build import BuildError, shared_library

SOURCE = Path(__file__).with_name("cuda_without_gpu.cpp")
# CUDA has a kernel for each; other backends run, and autograd keeps, the steps of its formula.
WHOLE_ON_CUDA = (
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "silu_backward",
    "mish_backward",
    "native_channel_shuffle",
)


@contextlib.contextmanager
def cuda_without_gpu(architecture: str) -> Iterator[None]:
    """Within, autograd and autocast take fake CUDA tensors.

    Raises ValueError without a C++ compiler.
    """
    _register_device()
    _register_kernels()
    capability = int(architecture[2]), int(architecture[3])
    with (
        mock.patch("torch.cuda.get_device_capability", lambda *_: capability),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_: True),
        # recurrent layers would lay out weights for it, and a torch without it warns
        mock.patch("torch.backends.cudnn.is_acceptable", lambda *_: False),
    ):
        yield


@functools.cache
def _register_device() -> None:
    """For the rest of the process."""
    try:
        library = shared_library(SOURCE, name="cuda_without_gpu")
    except BuildError as error:
        raise ValueError(
            f"predicting for CUDA needs a CUDA device, or C++ to do without: {error}"
        ) from None
    ctypes.CDLL(str(library)).register_fake_cuda()


@functools.cache
def _register_kernels() -> torch.library.Library | None:
    """CUDA kernels that are there and never run: fake tensors run none."""
    if torch.backends.cuda.is_built():
        return None

    def never(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a kernel of fake CUDA ran on real tensors")

    registered = torch.library.Library("aten", "IMPL")
    for name in WHOLE_ON_CUDA:
        registered.impl(name, never, "CUDA")
    return registered
