"""Predicts which backend torch's scaled_dot_product_attention chooses on a GPU, on a machine without it.

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.11 to 2.13. On
Hopper cuDNN's attention comes first, as it does with cuDNN later than 9.15.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CUDNN_WIDEST_HEAD = 128
FLASH_WIDEST_HEAD = 256
FLASH_MULTIPLE = 8  # heads are padded to a multiple of this width
MASK_MULTIPLE = 16  # mask rows are padded to this for the memory-efficient kernels
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One call: q_BHTD, k_BHSD, v_BHSD after autocast, and the other arguments of torch's function."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @property
    def low_precision(self) -> bool:
        return self.q.dtype in (torch.bfloat16, torch.float16)

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def mask_needs_gradient(self) -> bool:
        return self.mask is not None and self.mask.requires_grad and torch.is_grad_enabled()


def attention_of(architecture: str) -> Callable[..., Tensor]:
    """Returns a scaled_dot_product_attention that uses the backend torch chooses on sm80 or sm90.

    It replaces torch's function. A dispatch mode would not work in autograd's thread, where
    checkpoints are recomputed.
    """
    original = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not query.is_cuda:
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        q, k, v, mask = map(_autocast, (query, key, value, attn_mask))
        call = AttentionCall(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
        with torch.autocast("cuda", enabled=False):  # torch's function casts only its arguments
            return backend(call, architecture)(call)

    return attend


def _autocast(tensor: Any) -> Any:
    casts = torch.is_autocast_enabled("cuda") and isinstance(tensor, Tensor)
    if casts and tensor.is_cuda and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


def backend(call: AttentionCall, architecture: str) -> Callable[[AttentionCall], Tensor]:
    """Returns the first backend that supports the call, or else the math backend, which materializes
    the scores.
    """
    settings = torch.backends.cuda
    order = [
        (settings.flash_sdp_enabled(), _flash_supports, _flash),
        (settings.mem_efficient_sdp_enabled(), _efficient_supports, _efficient),
    ]
    cudnn = (settings.cudnn_sdp_enabled(), _cudnn_supports, _cudnn)
    order.insert(0 if architecture == "sm90" else 2, cudnn)
    if any(x.ndim != 4 or 0 in x.shape for x in (call.q, call.k, call.v)):
        return _math
    return next((run for enabled, supports, run in order if enabled and supports(call)), _math)


def _heads_agree(call: AttentionCall, *, grouped: bool) -> bool:
    heads, keys, values = (x.shape[1] for x in (call.q, call.k, call.v))
    if heads == keys == values:
        return True
    return grouped and call.gqa and keys == values and heads % keys == 0


def _cudnn_supports(call: AttentionCall) -> bool:
    widths = call.q.shape[-1], call.v.shape[-1]
    return (
        call.low_precision
        and all(width <= CUDNN_WIDEST_HEAD and width % 8 == 0 for width in widths)
        and _heads_agree(call, grouped=True)
        and call.k.shape[2] != 1
        and call.dropout * 16 == int(call.dropout * 16)
        and not call.mask_needs_gradient
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_supports(call: AttentionCall) -> bool:
    return (
        call.low_precision
        and call.mask is None
        and call.q.shape[-1] == call.v.shape[-1] <= FLASH_WIDEST_HEAD
        and _heads_agree(call, grouped=True)
        and (not call.causal or call.q.shape[2] == call.k.shape[2])
        and all(x.stride(-1) == 1 for x in (call.q, call.k, call.v))
    )


def _efficient_supports(call: AttentionCall) -> bool:
    multiple = 8 if call.low_precision else 4
    return (
        call.q.dtype != torch.float64
        and all(x.shape[-1] % multiple == 0 for x in (call.q, call.v))
        and _heads_agree(call, grouped=False)
        and all(x.stride(-1) == 1 for x in (call.q, call.k, call.v))
    )


def _cudnn(call: AttentionCall) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(
        call.q, call.k, call.v, _added_mask(call), call.needs_gradient, call.dropout, call.causal,
        False, scale=call.scale,
    )[0]  # fmt: skip


def _flash(call: AttentionCall) -> Tensor:
    width = call.q.shape[-1]
    inputs = [call.q, call.k, call.v]
    if padding := -width % FLASH_MULTIPLE:
        inputs = [F.pad(x, (0, padding)) for x in inputs]
    scale = call.scale or width**-0.5
    return aten._scaled_dot_product_flash_attention(
        *inputs, call.dropout, call.causal, False, scale=scale
    )[0][..., :width]


def _efficient(call: AttentionCall) -> Tensor:
    mask = _added_mask(call)
    if mask is not None:
        mask = mask.expand(*call.q.shape[:3], call.k.shape[2])
        if padding := -mask.shape[-1] % MASK_MULTIPLE:
            mask = F.pad(mask, (0, padding))[..., :-padding]
        elif any(stride % MASK_MULTIPLE for stride in mask.stride()[:3]):
            mask = mask.contiguous()
    return aten._scaled_dot_product_efficient_attention(
        call.q, call.k, call.v, mask, call.needs_gradient or call.mask_needs_gradient,
        call.dropout, call.causal, scale=call.scale,
    )[0]  # fmt: skip


def _math(call: AttentionCall) -> Tensor:
    return aten._scaled_dot_product_attention_math(
        call.q, call.k, call.v, _added_mask(call), call.dropout, call.causal, None,
        scale=call.scale, enable_gqa=call.gqa,
    )[0]  # fmt: skip


def _added_mask(call: AttentionCall) -> Tensor | None:
    """Returns the mask that is added to the scores. A boolean mask becomes 0 and -inf in q's dtype."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    return torch.zeros_like(call.mask, dtype=call.q.dtype).masked_fill_(
        call.mask.logical_not(), -torch.inf
    )
