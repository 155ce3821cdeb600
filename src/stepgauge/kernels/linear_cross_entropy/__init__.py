"""Linear + cross-entropy without holding the logits: a language model's output layer and loss as
one operation.

    from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
    loss = linear_cross_entropy(hidden_BTD, head.weight, targets_BT)

`linear_cross_entropy` is the function, `LinearCrossEntropyFunction` its autograd function,
`FusedLinearCrossEntropy` a module that takes the place of the output layer,
`reference.linear_cross_entropy` the oracle. The derivation, the floors and what was tried stand in
docs/log/2026-11-21-linear_cross_entropy.md.

With l = hidden_n weight^T (l = softcap tanh(l / softcap) where `softcap` is given) and lse its
log-sum-exp: loss = mean or sum over n of  lse - l[target_n] + z_loss lse^2. Tokens whose target is
`ignore_index` count in neither; the mean over no tokens is NaN, as in F.cross_entropy.

Types: fp32, bf16 or fp16, the same for hidden and weight; under autocast the matmuls run in
autocast's type, as F.linear's do. float64 computes in plain PyTorch.

The gradients are formed in the forward pass where hidden or weight wants one: three matmuls in all,
where backward would need a fourth or all the logits. Extra memory: one chunk of logits, of at most
`max_logits_bytes`, and under autocast a copy of the weight in autocast's type. On CUDA that is 512 MiB
unless given, or all logits of up to 4 D tokens: four times the weight's bytes. The weight's gradient
is summed in fp32 within a chunk of tokens; `weight_grad_accumulation` says what holds the sum
between chunks:
  "weight"  the gradient itself, in the weight's type: no memory, one rounding a chunk
  "fp32"    an fp32 buffer of V x D where the weight is in fewer bits: rounded once
  "auto"    "weight" up to 8 chunks, where its error is about twice that of one rounding, and "fp32"
            past that
Backward runs once: a second backward through the same loss (retain_graph) raises RuntimeError, and
so does one with create_graph, since there is no second derivative.

Small ones in bf16 on CUDA are computed by torch's own operators, which are faster there
(spec/fused_loss.py): these hold the logits. Any option of the fused loop, `max_logits_bytes` for one,
or STEPGAUGE_LOSS_BY_TORCH=0 keeps the fused kernels.

Legend: N tokens, D model width, V vocabulary, `...` any leading dimensions, none included.
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
    """Cross-entropy of `softmax(hidden weight^T)` against `targets`, in nats (this file's docstring).

    Shapes: hidden (..., D), weight_VD (V, D), targets (...) int64 or int32. Returns a scalar: fp32,
    or float64 for float64. Raises ValueError for shapes, types or options that do not fit, and on a
    CPU for a target outside the vocabulary; on CUDA such a target gives a NaN loss.
    """
    _check_tensors(hidden, weight_VD, targets)
    _check_options(reduction, softcap, weight_grad_accumulation, max_logits_bytes)
    compute_dtype = _compute_dtype(hidden, weight_VD)
    asked = {
        "z_loss": z_loss,
        "softcap": softcap,
        "accumulation": weight_grad_accumulation != "auto",
        "max_logits_bytes": max_logits_bytes,
    }
    if by_torch.takes(hidden, weight_VD, compute_dtype, **asked):
        how = {"reduction": reduction, "ignore_index": ignore_index}
        return by_torch.loss(hidden, weight_VD, targets, **how)
    loss = reduction == "mean", ignore_index, z_loss, softcap
    memory = weight_grad_accumulation, max_logits_bytes or 0
    return _by_chunks(hidden, weight_VD, targets, compute_dtype, *loss, *memory)


def _by_chunks(hidden: Tensor, weight_VD: Tensor, targets: Tensor, *options: Any) -> Tensor:
    """The fused loop, with the operator's options but for which gradients are needed."""
    is_plain = is_plain_eager(hidden, weight_VD, targets)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight_VD)]
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    run = LinearCrossEntropyFunction.apply if is_plain else _OPERATOR
    return run(hidden_ND, weight_VD, targets.reshape(-1), *options, *needed)[0]


class FusedLinearCrossEntropy(nn.Module):
    """Output layer and loss in one: takes the place of `nn.Linear(d_model, vocabulary,
    bias=False)`, same state_dict.

    `module(hidden, targets)` with hidden (..., D), targets (...) gives the loss; `module(hidden)`
    gives the logits, as the linear layer does. `FusedLinearCrossEntropy.of(linear)` shares a
    layer's weight, tied or not. The keyword arguments past `device` and `dtype` are
    linear_cross_entropy's.
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
        """As nn.Linear: uniform within 1/sqrt(d_model) of zero."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    @classmethod
    def of(cls, linear: nn.Linear, **options: Any) -> "FusedLinearCrossEntropy":
        """The module that uses `linear.weight` itself. Raises ValueError for a layer with a bias."""
        if linear.bias is not None:
            raise ValueError(f"linear + cross-entropy has no bias, the layer has one: {linear}")
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
    # Autocast would cast the matmuls' fp32 operands again; what is to be cast has been.
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


# Opaque to the compiler: it runs cuBLAS into buffers that it manages itself, and Triton between
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
    """2NVD for the logits and for each gradient that is formed."""
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
    """The autograd function: `.apply` takes the operator's arguments, in its order, and gives its
    outputs.

    The first output is the loss. The others are the gradients of hidden and weight for an incoming
    gradient of one, and 1 / (number of tokens): backward multiplies them by the gradient that comes
    in, in place, and hands them on.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # The operator's dispatch takes the host a few times as long as the launches.
        run = _compute if is_plain_eager(*arguments[:3]) else _OPERATOR
        output = run(*arguments)
        _setup_context(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 10
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative (create_graph=True): "
                "use F.linear and F.cross_entropy for it"
            )
        if grad_loss is None:
            return None, None, *nothing
        *gradients, scale = ctx.saved_tensors
        # 1 / (no tokens) is infinite and the gradients zero: they stay zero, as F.cross_entropy's
        # do.
        factor = grad_loss * scale.nan_to_num(posinf=0.0) if ctx.scale_is_pending else grad_loss
        gradients = _multiplied(gradients, factor)
        hidden, weight = (
            gradient.to(dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
        )
        return hidden, weight, *nothing


torch.library.register_autograd(
    "stepgauge::linear_cross_entropy",
    LinearCrossEntropyFunction.backward,
    setup_context=_setup_context,
)


def _multiplied(gradients: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Each gradient times `factor`: in place on the device, where no memory is touched for a factor
    of one.

    A tracer's tensors take the plain product, which the compiler fuses and may put in the
    gradient's own place.
    """
    if is_plain_eager(*gradients, factor) and not torch.is_grad_enabled():
        chunked.kernels_for(factor.device, factor.dtype).multiply_(gradients, factor)
        # A second backward must find that they changed.
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
    """The matmuls' type: autocast's where it is on, but for float64; else the inputs' own."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight_VD.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight_VD.dtype}: expected one type, or autocast"
        )
    return hidden.dtype


def _check_tensors(hidden: Tensor, weight_VD: Tensor, targets: Tensor) -> None:
    if weight_VD.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight_VD.shape[1]:
        raise ValueError(
            f"expected hidden (..., D) and weight (V, D), got {tuple(hidden.shape)} and {tuple(weight_VD.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"expected targets {tuple(hidden.shape[:-1])}, as hidden has, got {tuple(targets.shape)}"
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
            f"weight_grad_accumulation is {weight_grad_accumulation!r}: expected {chunked.ACCUMULATIONS}"
        )
    if max_logits_bytes is not None and max_logits_bytes <= 0:
        raise ValueError(
            f"max_logits_bytes is {max_logits_bytes}: expected a positive number, or None"
        )
