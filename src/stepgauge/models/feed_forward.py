"""The feed-forward layer of a block: plain, gated, or a mixture of experts.

Legend: B batch, T sequence, N tokens of the batch, D model width, F feed-forward width, E experts,
K experts per token.
"""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.kernels.swiglu import swiglu
from stepgauge.kernels.swiglu.feed_forward import swiglu_feed_forward
from stepgauge.models.drawing import has_values
from stepgauge.models.fused_linear import FusedLinear
from stepgauge.spec.model import ModelSpec

gelu_tanh = functools.partial(F.gelu, approximate="tanh")

# The activation of each kind; for gated kinds, the activation of the gate (Shazeer 2020).
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": gelu_tanh,
    "reglu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


def build_feed_forward(spec: ModelSpec, device: torch.device | None) -> nn.Module:
    """Returns the layer that the spec names: x_BTD -> y_BTD."""
    if spec.num_experts:
        return Experts(spec, device)
    if spec.gate == "quack":
        return FusedGateFeedForward(spec, device)
    return (GatedFeedForward if spec.is_gated else FeedForward)(spec, device)


class FeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        bias = spec.feed_forward_bias
        self.activation = ACTIVATIONS[spec.feed_forward]
        self.up = nn.Linear(spec.d_model, spec.d_ff, bias=bias, device=device)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=bias, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up as one matrix product (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        bias = spec.feed_forward_bias
        self.activation = ACTIVATIONS[spec.feed_forward]
        self.gate_up = FusedLinear(spec.d_model, (spec.d_ff, spec.d_ff), bias=bias, device=device)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=bias, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_up_BTF = self.gate_up(x_BTD)
        if self.activation is F.silu and torch.compiler.is_compiling():
            return self.down(swiglu(gate_up_BTF))
        gate_BTF, up_BTF = gate_up_BTF.chunk(2, dim=-1)
        return self.down(self.activation(gate_BTF) * up_BTF)


class FusedGateFeedForward(GatedFeedForward):
    """The gated layer with the gate fused into its products."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return swiglu_feed_forward(x_BTD, self.gate_up.weight, self.down.weight)


class Experts(nn.Module):
    """A mixture of experts: a router chooses K of E feed-forward layers for each token. The output is
    the mean of their outputs, weighted by the softmax of the K scores (Mixtral, Jiang et al. 2024).

    No token is dropped, and there is no loss that balances the experts.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | None):
        super().__init__()
        self.num_experts, self.per_token = spec.num_experts, spec.experts_per_token
        self.is_gated = spec.is_gated
        self.activation = ACTIVATIONS[spec.feed_forward]
        rows = (2 if spec.is_gated else 1) * spec.d_ff
        shape_up = (spec.num_experts, rows, spec.d_model)
        shape_down = (spec.num_experts, spec.d_model, spec.d_ff)
        self.router = nn.Linear(spec.d_model, spec.num_experts, bias=False, device=device)
        self.up_weight = nn.Parameter(torch.empty(shape_up, device=device))
        self.down_weight = nn.Parameter(torch.empty(shape_down, device=device))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        scores_NK, chosen_NK = self.router(x_ND).topk(self.per_token, dim=-1)
        shares_NK = scores_NK.softmax(-1, dtype=torch.float32).to(scores_NK.dtype)
        # K copies of each token, sorted by expert.
        experts, order = chosen_NK.flatten().sort(stable=True)
        token = order // self.per_token
        copies = x_ND[token]
        weights = _autocast(x_ND, self.up_weight, self.down_weight)
        if _can_be_grouped(*weights):
            y = self._grouped(copies.to(weights[0].dtype), experts, *weights)
        else:
            y = self._one_by_one(copies, chosen_NK)
        y = y * shares_NK.flatten()[order, None]
        return torch.zeros_like(x_ND, dtype=y.dtype).index_add(0, token, y).view_as(x_BTD)

    def _grouped(self, x: Tensor, experts: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
        """Computes all experts in one product per layer. The numbers of tokens per expert stay on the
        GPU, so the host does not wait for them.
        """
        numbers = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        hidden = F.grouped_mm(x, up_EFD.mT, offs=ends)
        return F.grouped_mm(self._activated(hidden), down_EDF.mT, offs=ends)

    def _one_by_one(self, x: Tensor, chosen_NK: Tensor) -> Tensor:
        """Computes the experts one after another, on their parts of the sorted copies."""
        parts = x.split(self._copies_per_expert(chosen_NK))
        experts = zip(parts, self.up_weight, self.down_weight, strict=True)
        return torch.cat(
            [F.linear(self._activated(F.linear(part, up)), down) for part, up, down in experts]
        )

    def _activated(self, hidden: Tensor) -> Tensor:
        if not self.is_gated:
            return self.activation(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _copies_per_expert(self, chosen_NK: Tensor) -> list[int]:
        """Returns the number of copies for each expert. Tensors without values are split evenly."""
        if not has_values(chosen_NK):
            share, rest = divmod(chosen_NK.numel(), self.num_experts)
            return [share + (expert < rest) for expert in range(self.num_experts)]
        return chosen_NK.flatten().bincount(minlength=self.num_experts).tolist()


def _autocast(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Returns the weights, cast to autocast's dtype if it is on for the device of x."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return weights
    return tuple(weight.to(torch.get_autocast_dtype(kind)) for weight in weights)


def _can_be_grouped(*weights: Tensor) -> bool:
    """True if torch has a grouped product for the weights: bf16 on a GPU, rows of a multiple of 16
    bytes.
    """
    return all(w.is_cuda and w.dtype == torch.bfloat16 and w.shape[-1] % 8 == 0 for w in weights)
