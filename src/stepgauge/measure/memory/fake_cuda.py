"""Tensors without memory on a device that need not be there.

torch's fake tensors run every operator's shape rules and no kernel. On a machine without a GPU four
things are missing for fake CUDA tensors, and are added: a device for autograd (fake_cuda.cpp), the
choices that torch makes by looking at the GPU (which attention, whether RMSNorm is one kernel),
autocast's belief that there is CUDA, and the kernels of which autograd wants to know that they are
there.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.runtime.build import BuildError, shared_library

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
CUDNN_WIDEST_HEAD = 128
# on a CPU other operators do their work
CUDA_ALONE = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
aten = torch.ops.aten


@contextlib.contextmanager
def pretending(architecture: str) -> Iterator[torch.device]:
    """Within, tensors made on the device it gives own no memory. architecture: cpu, or sm80, sm90
    for CUDA.

    Raises ValueError where CUDA would have to be pretended and no C++ compiler is there to do so.
    """
    with contextlib.ExitStack() as stack:
        if architecture != "cpu" and not torch.cuda.is_available():
            _pretend_cuda()
            _register_missing_kernels()
            stack.enter_context(
                mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
            )
            stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_: True))
            attend = _attention_of(architecture)
            stack.enter_context(
                mock.patch("torch.nn.functional.scaled_dot_product_attention", attend)
            )
        stack.enter_context(mock.patch("torch.nn.Module._apply", _applying()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(PretendedValues())
        yield torch.device("cpu" if architecture == "cpu" else "cuda:0")


@functools.cache
def _register_missing_kernels() -> torch.library.Library:
    """CUDA kernels, never run, of operators that a torch without CUDA would take apart: RMSNorm,
    the gradient of silu.

    autograd uses an operator's composite formula where the backend has no kernel of its own; CUDA
    has one, and so holds none of the formula's steps.
    """

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pretended kernel ran on real tensors")

    registered = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or has_kernel(name, "CUDA"):
            continue
        taken_apart = has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU")
        if taken_apart or name in CUDA_ALONE:
            registered.impl(name.removeprefix("aten::"), never, "CUDA")
    return registered


def _applying() -> Callable[..., nn.Module]:
    """Module._apply that replaces a parameter: its own swaps tensors, which fake ones do not take.
    Ties stay.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for part in module.modules() if recurse else [module]:
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in replaced:
                    with torch.no_grad():
                        made = fn(parameter)
                    if made is not parameter:
                        replaced[id(parameter)] = (
                            parameter,
                            nn.Parameter(made, parameter.requires_grad),
                        )
                if id(parameter) in replaced:
                    part._parameters[name] = replaced[id(parameter)][1]
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else fn(buffer)
        replaced.clear()  # the old ones may go
        return module

    return apply


class PretendedValues(TorchDispatchMode):
    """Answers the host's question for a value: no infinity was found by loss scaling, and anything
    else is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._infinities: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._infinities.add(args[1].untyped_storage()._cdata)
        if func is aten._local_scalar_dense.default:
            value = args[0].untyped_storage()._cdata not in self._infinities
            return float(value) if args[0].is_floating_point() else int(value)
        return func(*args, **(kwargs or {}))


def _attention_of(architecture: str) -> Callable[..., Tensor]:
    """scaled_dot_product_attention by the backend that torch picks on that architecture.

    A function in its place rather than a mode: modes do not follow autograd into its thread, where
    checkpoints run.
    """
    original = F.scaled_dot_product_attention
    prefers_cudnn = architecture == "sm90"

    def attend(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        chosen = _fused_attention(prefers_cudnn, q, *args, **kwargs) if q.is_cuda else None
        return original(q, *args, **kwargs) if chosen is None else chosen

    return attend


def _fused_attention(
    prefers_cudnn: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The result of the fused backend, or None where torch takes the plain one."""
    if q.ndim != 4 or enable_gqa:
        return None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    width = q.shape[-1]
    enabled = torch.backends.cuda
    needs_gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    cudnn_takes = narrow and width <= CUDNN_WIDEST_HEAD and width % 8 == 0
    if (
        enabled.cudnn_sdp_enabled()
        and cudnn_takes
        and (prefers_cudnn or not enabled.flash_sdp_enabled())
    ):
        run = aten._scaled_dot_product_cudnn_attention
        return run(q, k, v, attn_mask, needs_gradient, dropout_p, is_causal, False, scale=scale)[0]
    if enabled.flash_sdp_enabled() and narrow and attn_mask is None and width <= 256:
        padded = [F.pad(x, (0, -width % 8)) if width % 8 else x for x in (q, k, v)]
        run = aten._scaled_dot_product_flash_attention
        return run(*padded, dropout_p, is_causal, False, scale=scale or width**-0.5)[0][..., :width]
    if enabled.mem_efficient_sdp_enabled() and width % (8 if narrow else 4) == 0:
        run = aten._scaled_dot_product_efficient_attention
        return run(q, k, v, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]
    return None


@functools.cache
def _pretend_cuda() -> None:
    try:
        library = shared_library(SOURCE, name="pretended")
    except BuildError as error:
        raise ValueError(
            f"predicting for CUDA needs a CUDA device, or C++ to pretend one: {error}"
        ) from None
    ctypes.CDLL(str(library)).pretend_cuda()
