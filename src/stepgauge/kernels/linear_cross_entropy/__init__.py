"""Linear + cross-entropy without holding the logits: a language model's output layer and loss as
one operation.

    from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
    loss = linear_cross_entropy(hidden_BTD, head.weight, targets_BT)

`linear_cross_entropy` is the function, `LinearCrossEntropyFunction` its autograd function,
`FusedLinearCrossEntropy` a module that replaces the output layer, and
`reference.linear_cross_entropy` the oracle. docs/log/2026-11-21-linear_cross_entropy.md has the
derivation, the lower bounds and the experiments.

With l = hidden_n weight^T (l = softcap tanh(l / softcap) if `softcap` is set) and lse its
log-sum-exp: loss = mean or sum over n of  lse - l[target_n] + z_loss lse^2. Tokens whose target is
`ignore_index` count neither in the sum nor in the mean; the mean over no tokens is NaN, as in
F.cross_entropy.

Types: fp32, bf16 or fp16, the same for hidden and weight. Under autocast the matmuls run in
autocast's type, as in F.linear. float64 runs in plain PyTorch.

If hidden or weight needs a gradient, it is computed in the forward pass: three matmuls in all,
where computing it in backward would need a fourth matmul or all the logits. Extra memory: one chunk
of logits of at most `max_logits_bytes`, and under autocast a copy of the weight in autocast's type.
By default a chunk on CUDA has up to 512 MiB, or all logits of up to 4 D tokens (four times the
weight's bytes). The weight's gradient is summed in fp32 within a chunk; `weight_grad_accumulation`
says where the sum is kept between chunks:
  "weight"  in the gradient itself, in the weight's type: no extra memory, one rounding per chunk
  "fp32"    in an fp32 buffer of V x D if the weight has fewer bits: one rounding
  "auto"    like "weight" up to 8 chunks, where its error is about twice that of one rounding, and
            like "fp32" for more chunks
Backward runs only once: a second backward through the same loss (retain_graph) raises RuntimeError,
and so does one with create_graph, because there is no second derivative.

Small bf16 losses on CUDA run in torch's own operators, which hold the logits but are faster there
(spec/fused_loss.py). Setting any option of the fused loop (such as `max_logits_bytes`) or
STEPGAUGE_LOSS_BY_TORCH=0 selects the fused kernels.

Legend: N tokens, D model width, V vocabulary, `...` any leading dimensions, or none.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from stepgauge.kernels.plain_eager import is_plain_eager

from . import by_torch, chunked

__all__ = ["FusedLinearCrossEntropy", "LinearCrossEntropyFunction", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weight_grad_accumulation: str = "auto",
    max_logits_bytes: int | None = None,
) -> Tensor:
    """Returns the cross-entropy of `softmax(hidden weight^T)` against `targets`, in nats; the
    docstring of this file has the equation and the options.

    Shapes: hidden (..., D), weight_VD (V, D), targets (...) int64 or int32. Returns a scalar in
    fp32, or in float64 for float64 inputs. Raises ValueError for invalid shapes, types or options.
    A target outside the vocabulary raises ValueError on a CPU and makes the loss NaN on CUDA.
    """
    _check_tensors(hidden, weight_VD, targets)
    _check_options(reduction, softcap, weight_grad_accumulation, max_logits_bytes)
    compute_dtype = _compute_dtype(hidden, weight_VD)
    fused_options = {
        "z_loss": z_loss,
        "softcap": softcap,
        "accumulation": weight_grad_accumulation != "auto",
        "max_logits_bytes": max_logits_bytes,
    }
    if by_torch.takes(hidden, weight_VD, compute_dtype, **fused_options):
        return by_torch.loss(
            hidden, weight_VD, targets, reduction=reduction, ignore_index=ignore_index
        )
    loss = reduction == "mean", ignore_index, z_loss, softcap
    memory = weight_grad_accumulation, max_logits_bytes or 0
    return _fused_loss(hidden, weight_VD, targets, compute_dtype, *loss, *memory)


def _fused_loss(hidden: Tensor, weight_VD: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """Runs the fused loop. `options` are the operator's, without need_hidden and need_weight."""
    is_plain = is_plain_eager(hidden, weight_VD, targets)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight_VD)]
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    run = LinearCrossEntropyFunction.apply if is_plain else _OPERATOR
    return run(hidden_ND, weight_VD, targets.reshape(-1), *options, *needed)[0]


class FusedLinearCrossEntropy(nn.Module):
    """Output layer and loss in one module. It replaces `nn.Linear(d_model, vocabulary, bias=False)`
    and has the same state_dict.

    `module(hidden, targets)` with hidden (..., D) and targets (...) returns the loss;
    `module(hidden)` returns the logits, like the linear layer. `FusedLinearCrossEntropy.of(linear)`
    shares a layer's weight, tied or not. Keyword arguments other than `device` and `dtype` are
    those of linear_cross_entropy.
    """

    def __init__(
        self,
        d_model: int,
        vocabulary: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, d_model, device=device, dtype=dtype))
        self.options = options
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weight like nn.Linear: uniform within 1/sqrt(d_model) of zero."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    @classmethod
    def of(cls, linear: nn.Linear, **options: Any) -> "FusedLinearCrossEntropy":
        """Returns a module that shares `linear.weight`. Raises ValueError for a layer with a
        bias.
        """
        if linear.bias is not None:
            raise ValueError(
                f"linear + cross-entropy takes no bias, but the layer has one: {linear}"
            )
        module = cls(linear.in_features, linear.out_features, device="meta", **options)
        module.weight = linear.weight
        return module

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(hidden, self.weight, targets, **self.options)

    def extra_repr(self) -> str:
        vocabulary, d_model = self.weight.shape
        return ", ".join(
            [
                f"{d_model}, {vocabulary}",
                *(f"{name}={value!r}" for name, value in self.options.items()),
            ]
        )


def _compute(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    compute_dtype: torch.dtype,
    mean: bool,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    weight_grad_accumulation: str,
    max_logits_bytes: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = hidden_ND.device.type
    # Inputs have autocast's type by now; without this, autocast would also cast fp32 operands.
    with (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else contextlib.nullcontext()
    ):
        return chunked.loss_and_gradients(
            hidden_ND,
            weight_VD,
            targets_N,
            chunked.Loss(mean, ignore_index, z_loss, softcap),
            compute_dtype=compute_dtype,
            accumulation=weight_grad_accumulation,
            max_logits_bytes=max_logits_bytes,
            need_hidden=need_hidden,
            need_weight=need_weight,
        )


# Opaque to the compiler, because the loop manages its own buffers and runs cuBLAS and Triton on
# them.
_linear_cross_entropy = torch.library.custom_op(
    "stepgauge::linear_cross_entropy", _compute, mutates_args=()
)
_OPERATOR = torch.ops.stepgauge.linear_cross_entropy.default


@_linear_cross_entropy.register_fake
def _fake(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    compute_dtype: torch.dtype,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_hidden, need_weight = options[-2:]
    loss = hidden_ND.new_empty(
        (), dtype=torch.float64 if compute_dtype == torch.float64 else torch.float32
    )
    hidden_dtype = chunked.held_dtype(hidden_ND.dtype, compute_dtype)
    weight_dtype = chunked.held_weight_dtype(weight_VD.dtype, compute_dtype)
    grad_hidden = hidden_ND.new_empty(hidden_ND.shape if need_hidden else 0, dtype=hidden_dtype)
    grad_weight = hidden_ND.new_empty(weight_VD.shape if need_weight else 0, dtype=weight_dtype)
    return loss, grad_hidden, grad_weight, torch.empty_like(loss)


@register_flop_formula(torch.ops.stepgauge.linear_cross_entropy)
def _flops(
    hidden_shape: tuple[int, ...], weight_shape: tuple[int, ...], *options: Any, **_: Any
) -> int:
    """Returns 2NVD for the logits, and the same for each gradient that is computed."""
    need_hidden, need_weight = options[-2:]
    return 2 * hidden_shape[0] * weight_shape[0] * weight_shape[1] * (1 + need_hidden + need_weight)


@torch.library.custom_op("stepgauge::linear_cross_entropy_multiply_", mutates_args=("gradients",))
def _multiply_(gradients: list[Tensor], factor: Tensor) -> None:
    chunked.kernels_for(factor.device, factor.dtype).multiply_(gradients, factor)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, compute_dtype, mean, *_ = inputs
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.needs = inputs[-2:]
    ctx.scale_is_pending = mean and not chunked.scales_gradient(compute_dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The autograd function. `.apply` takes the operator's arguments and returns its outputs.

    The first output is the loss. The others are the gradients of hidden and weight for an incoming
    gradient of one, and 1 / (number of tokens). Backward multiplies these gradients in place by the
    incoming one and returns them.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Dispatching the operator costs the host a few times as much as the launches.
        run = _compute if is_plain_eager(*arguments[:3]) else _OPERATOR
        output = run(*arguments)
        _setup_context(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        no_grads = (None,) * 10
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative (create_graph=True): "
                "use F.linear and F.cross_entropy for it"
            )
        if grad_loss is None:
            return None, None, *no_grads
        *gradients, scale = ctx.saved_tensors
        # If no token counts, the scale is infinite and the gradients are zero; like
        # F.cross_entropy's, they stay zero.
        factor = grad_loss * scale.nan_to_num(posinf=0.0) if ctx.scale_is_pending else grad_loss
        gradients = _multiplied(gradients, factor)
        hidden, weight = (
            gradient.to(dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
        )
        return hidden, weight, *no_grads


torch.library.register_autograd(
    "stepgauge::linear_cross_entropy",
    LinearCrossEntropyFunction.backward,
    setup_context=_setup_context,
)


def _multiplied(gradients: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Multiplies each gradient by `factor`, in place on the device; a factor of one costs no memory
    traffic.

    Traced tensors get a plain product instead, which the compiler can fuse and compute in place.
    """
    if is_plain_eager(*gradients, factor) and not torch.is_grad_enabled():
        chunked.kernels_for(factor.device, factor.dtype).multiply_(gradients, factor)
        # So that autograd raises if backward runs a second time.
        torch.autograd.graph.increment_version(gradients)
        return gradients
    if (
        torch.compiler.is_compiling()
        or get_proxy_mode()
        or any(isinstance(g, FunctionalTensor) for g in gradients)
    ):
        return [gradient * factor for gradient in gradients]
    torch.ops.stepgauge.linear_cross_entropy_multiply_.default(gradients, factor)
    return gradients


def _compute_dtype(hidden: Tensor, weight_VD: Tensor) -> torch.dtype:
    """Returns the matmuls' type: autocast's if it is on and no input is float64, otherwise the
    inputs' own.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight_VD.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight_VD.dtype}: expected one type, or autocast"
        )
    return hidden.dtype


def _check_tensors(hidden: Tensor, weight_VD: Tensor, targets: Tensor) -> None:
    if weight_VD.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight_VD.shape[1]:
        raise ValueError(
            f"expected hidden (..., D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight_VD.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"expected targets of shape {tuple(hidden.shape[:-1])} to match hidden, "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"expected targets in int64 or int32, got {targets.dtype}")
    for name, dtype in (("hidden", hidden.dtype), ("weight", weight_VD.dtype)):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ValueError(f"expected {name} in fp32, bf16, fp16 or float64, got {dtype}")


def _check_options(
    reduction: str,
    softcap: float | None,
    weight_grad_accumulation: str,
    max_logits_bytes: int | None,
) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: expected 'mean' or 'sum'")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: expected a positive number, or None")
    if weight_grad_accumulation not in chunked.ACCUMULATIONS:
        raise ValueError(
            f"weight_grad_accumulation is {weight_grad_accumulation!r}: "
            f"expected one of {chunked.ACCUMULATIONS}"
        )
    if max_logits_bytes is not None and max_logits_bytes <= 0:
        raise ValueError(
            f"max_logits_bytes is {max_logits_bytes}: expected a positive number, or None"
        )
