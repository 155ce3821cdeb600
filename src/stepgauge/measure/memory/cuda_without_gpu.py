"""Makes fake CUDA tensors work on a machine without a GPU. Only this file patches torch for it.

It is used only for predictions for CUDA on a machine without CUDA, and taken back afterwards. It works
around these problems:

- Autograd queries the device's streams, which fails without a GPU: cuda_without_gpu.cpp. It can go
  when torch fixes this (pytorch issue 92627; pull request 163187, a guard that does nothing, was
  merged and reverted).
- Autograd starts a thread for each device at a process's first backward, and knows no other device
  later. Here backward runs in the calling thread.
- Autocast, is_bf16_supported and get_device_capability query the driver.
- A torch built without CUDA lacks CUDA kernels. From their presence autograd decides whether an
  operator is decomposed.
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
# CUDA has a kernel for each of these. On other backends they are decomposed, and autograd keeps
# intermediate results.
NOT_DECOMPOSED_ON_CUDA = (
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "silu_backward",
    "mish_backward",
    "native_channel_shuffle",
)


@contextlib.contextmanager
def cuda_without_gpu(architecture: str) -> Iterator[None]:
    """Makes autograd and autocast accept fake CUDA tensors inside the context. Raises ValueError
    without a C++ compiler.
    """
    _register_kernels()
    capability = int(architecture[2]), int(architecture[3])
    with (
        _fake_device(),
        torch.autograd.set_multithreading_enabled(False),
        mock.patch("torch.cuda.get_device_capability", lambda *_: capability),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_: True),
        # Otherwise recurrent layers try to flatten weights for cuDNN, and torch warns without it.
        mock.patch("torch.backends.cudnn.is_acceptable", lambda *_: False),
    ):
        yield


@contextlib.contextmanager
def _fake_device() -> Iterator[None]:
    """Registers the fake CUDA device inside the context."""
    try:
        library = ctypes.CDLL(str(shared_library(SOURCE, name="cuda_without_gpu")))
    except BuildError as error:
        raise ValueError(
            f"predicting for CUDA needs a CUDA device or a C++ compiler: {error}"
        ) from None
    # Autograd must not start a thread for the fake device: processes forked later could not run
    # backward.
    with torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()
    library.use_fake_cuda(True)
    try:
        yield
    finally:
        library.use_fake_cuda(False)


@functools.cache
def _register_kernels() -> torch.library.Library | None:
    """Registers CUDA kernels that are never called, because fake tensors run no kernels."""
    if torch.backends.cuda.is_built():
        return None

    def never(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a kernel of fake CUDA ran on real tensors")

    registered = torch.library.Library("aten", "IMPL")
    for name in NOT_DECOMPOSED_ON_CUDA:
        registered.impl(name, never, "CUDA")
    return registered
