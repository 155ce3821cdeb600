"""Backward in two parts: the gradient of a stage's input first (I), those of its weights later (W).

How it is done, and why not otherwise. A linear layer's weight gradient is a product of its input
and of its output's gradient, and nothing waits for it. So the layers' own backward leaves that
product out and hands over its two factors instead; W multiplies them when the schedule says. The
factors leave autograd as gradients: each layer has two *slots*, leaf tensors without memory whose
"gradient" is the layer's input and its output's gradient. `torch.autograd.grad` of the stage's
output with respect to (stage inputs, slots, all other parameters) is the whole of I.

That is public autograd and no more, so that it holds inside compiled blocks (a compiled backward
returns what a slot is given like any other gradient; it may compute the factors again rather than
keep them) and under activation checkpointing. Two ways were left out. A walk over autograd's graph
from the weights to where they meet the input's path, as torch.distributed.pipelining does, leans on
the graph's inside and finds one node in a compiled block, which it cannot split. Calling
autograd.grad twice, once for inputs and once for weights, costs every backward product twice.

What is not a linear layer (norms, embeddings, biases outside of linear layers, a weight that is
used without its layer, that has a hook, or whose layer runs more than once in a forward) gets its
gradient in I: cheap, or rare.
"""

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.parallel.autograd.parameter_hooks import hooks_before
from stepgauge.parallel.sharding import local_part

Shape = tuple[torch.Size, torch.dtype]


class _LinearWithoutWeight(torch.autograd.Function):
    """y = x wᵀ + b. Backward gives x its gradient, and each slot a factor of the weight's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_slot: Tensor, dy_slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None, x, dy


class SplitLinear(nn.Linear):
    """An nn.Linear that hands the factors of its weight's gradient to its slots."""

    x_slot: Tensor
    dy_slot: Tensor

    def forward(self, input: Tensor) -> Tensor:  # by its name in nn.Linear
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        dtype = self.dy_slot.dtype  # of the computation, which autocast may have chosen
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return _LinearWithoutWeight.apply(
            input.to(dtype), self.weight.detach().to(dtype), bias, self.x_slot, self.dy_slot
        )


@dataclasses.dataclass
class Factors:
    """Of a layer's weight gradient: dyᵀ x. Each is dropped when it has been used."""

    layer: nn.Linear
    x: Tensor | None
    dy: Tensor | None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Adds the product to the layer's gradients, in the matrix product itself where the types
        allow it.
        """
        if self.x is None or self.dy is None:  # the layer took no part in this output
            return
        x, dy = self.x.flatten(0, -2), self.dy.flatten(0, -2)
        weight, bias = self.layer.weight, self.layer.bias
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = (dy.T @ x).to(weight.dtype)
            elif weight.grad.dtype == dy.dtype:
                weight.grad.addmm_(dy.T, x)
            else:
                weight.grad.add_(dy.T @ x)
        if bias is not None and bias.requires_grad:
            add_gradient(bias, dy.sum(0))
        self.x = self.dy = None


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def is_linear(layer: nn.Module) -> bool:
    """Whether it computes what nn.Linear does, of a weight that is its parameter: one, or a subclass
    that adds nothing to forward.
    """
    own = type(layer).forward in (nn.Linear.forward, SplitLinear.forward)
    names = (name for name, _ in layer.named_parameters(recurse=False))
    return isinstance(layer, nn.Linear) and own and "weight" in names


class Watch:
    """While it is open: what each linear layer of a module is called with, in one forward.

    besides  layers that are left as they are
    """

    def __init__(self, module: nn.Module, besides: Collection[nn.Module] = ()):
        self.calls: dict[nn.Linear, list[tuple[Shape, Shape]]] = {}
        layers = [each for each in module.modules() if is_linear(each) and each not in besides]
        self._hooks = [
            layer.register_forward_hook(self._called, with_kwargs=True) for layer in layers
        ]

    def _called(
        self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        (x,) = (*inputs, *named.values())
        assert isinstance(layer, nn.Linear)
        self.calls.setdefault(layer, []).append(((x.shape, x.dtype), (output.shape, output.dtype)))

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def splittable(self) -> dict[nn.Linear, tuple[torch.Size, Shape]]:
        """The shape of the input, and shape and type of the output, of the layers whose weight
        gradient can wait: they are called once, and their weight is trained, with no hook that
        wants its gradient.
        """
        return {
            layer: (calls[0][0][0], calls[0][1])
            for layer, calls in self.calls.items()
            if len(calls) == 1
            and layer.weight.requires_grad
            and not any(map(hooks_before, layer.parameters(recurse=False)))
        }


class SplitBackward:
    """The split of a module whose forward was watched. `close` gives the layers back as they were.

    splittable  as Watch found them
    """

    def __init__(self, module: nn.Module, splittable: dict[nn.Linear, tuple[torch.Size, Shape]]):
        self.layers: list[SplitLinear] = []
        self._classes: list[type[nn.Linear]] = []  # what the layers were
        for layer, (x_shape, (y_shape, dtype)) in splittable.items():
            device = layer.weight.device
            self._classes.append(type(layer))
            layer.__class__ = SplitLinear
            assert isinstance(layer, SplitLinear)
            self.layers.append(layer)
            layer.x_slot, layer.dy_slot = (
                torch.zeros((), dtype=dtype, device=device).expand(shape).detach()
                for shape in (x_shape, y_shape)
            )
            layer.x_slot.requires_grad_()
            layer.dy_slot.requires_grad_()
        # also weights of these layers: whatever uses one without its layer adds to its gradient
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def close(self) -> None:
        for layer, before in zip(self.layers, self._classes, strict=True):
            layer.__class__ = before  # type: ignore[assignment]
            del layer.x_slot, layer.dy_slot

    def input_gradients(
        self, outputs: Sequence[Any], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Factors]]:
        """I: the gradients of the inputs, and what W needs. Adds all other gradients of parameters.

        outputs  tensors or gradient edges; frees the graph behind them
        """
        slots = [slot for layer in self.layers for slot in (layer.x_slot, layer.dy_slot)]
        wanted = [*inputs, *self._trained, *slots]
        if not wanted or not outputs:
            return [None] * len(inputs), []
        found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        after = len(inputs) + len(self._trained)
        given, own, of_slots = found[: len(inputs)], found[len(inputs) : after], found[after:]
        _add_all(self._trained, own, others=[*gradients, *given, *of_slots])
        pairs = zip(of_slots[::2], of_slots[1::2], strict=True)
        factors = [Factors(layer, x, dy) for layer, (x, dy) in zip(self.layers, pairs, strict=True)]
        return list(given), factors


def _add_all(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    *,
    others: Sequence[Tensor | None],
) -> None:
    """Adds gradients to parameters', those that are there already in one call. A first one becomes
    `.grad` itself, as autograd has it: unless its memory is another one's too, for of what is summed
    all terms have one gradient, or is laid out in another way than the parameter's.
    """
    sums, terms, first = [], [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            first.append((parameter, gradient))
        else:
            sums.append(parameter.grad)
            terms.append(gradient)
    if sums:
        torch._foreach_add_(sums, terms)
    if first:
        users = collections.Counter(
            _memory(each) for each in (*gradients, *others) if each is not None
        )
        for parameter, gradient in first:
            dense = gradient.layout is torch.strided
            alike = not dense or gradient.stride() == parameter.stride()
            alone = users[_memory(gradient)] == 1
            parameter.grad = (
                gradient if alike and alone else torch.empty_like(parameter).copy_(gradient)
            )


def _memory(tensor: Tensor) -> int:
    own = local_part(tensor)
    return own.untyped_storage().data_ptr() if own.layout is torch.strided else id(tensor)
