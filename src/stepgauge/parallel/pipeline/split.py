"""Backward in two parts: the gradient of a stage's input first (I), those of its weights later (W).

How it is done, and why not otherwise. A linear layer's weight gradient is a product of its input
and of its output's gradient, and nothing waits for it. So the layers' own backward leaves that
product out and hands over its two factors instead; W multiplies them when the schedule says. The
factors leave autograd as gradients: each call of a layer has two *slots*, leaf tensors without memory
whose "gradient" is the layer's input and its output's gradient. `torch.autograd.grad` of the stage's
output with respect to (stage inputs, slots, all other parameters) is the whole of I. A layer has as
many slots as it has calls in a forward, which may be others for each micro-batch.

That is public autograd and no more, so that it holds inside compiled blocks (a compiled backward
returns what a slot is given like any other gradient; it may compute the factors again rather than
keep them) and under activation checkpointing. Two ways were left out. A walk over autograd's graph
from the weights to where they meet the input's path, as torch.distributed.pipelining does, leans on
the graph's inside and finds one node in a compiled block, which it cannot split. Calling
autograd.grad twice, once for inputs and once for weights, costs every backward product twice.

What is not a linear layer (norms, embeddings, biases outside of linear layers, a weight that is
used without its layer or that has a hook) gets its gradient in I: cheap, or rare.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.parallel.autograd.first_derivatives import without_second_derivative
from stepgauge.parallel.autograd.parameter_hooks import (
    post_accumulate_hooks,
    tensor_hooks,
    without_wrapper_hooks,
)
from stepgauge.parallel.autograd.running_backward import is_inside_func_transform
from stepgauge.parallel.sharding import local_part


class Slots(NamedTuple):
    """Of one call of a layer: leaves of the shape of its input and of its output."""

    x: Tensor
    dy: Tensor


class _LinearWithoutWeight(torch.autograd.Function):
    """y = x wᵀ + b. Backward gives x its gradient, and each slot a factor of the weight's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_slot: Tensor, dy_slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @without_second_derivative("a linear layer with a split backward")
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None, x, dy


class SplitLinear(nn.Linear):
    """An nn.Linear that hands the factors of its weight's gradient to its slots.

    slots      of its calls in a forward, in their order; a compiled block reads them as inputs
    num_calls  of the forward that is running
    dtype      of the computation, which autocast may have chosen
    """

    slots: list[Slots]
    num_calls: int
    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # by its name in nn.Linear
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        x_slot, dy_slot = self._slots_of_call(input)
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return _LinearWithoutWeight.apply(
            input.to(self.dtype), self.weight.detach().to(self.dtype), bias, x_slot, dy_slot
        )

    def _slots_of_call(self, input: Tensor) -> Slots:
        """Those of the forwards before, unless there were fewer calls or the shape was another one.
        Slots that an earlier micro-batch used stay with it.
        """
        call = self.num_calls
        self.num_calls = call + 1
        if call == len(self.slots) or self.slots[call].x.shape != input.shape:
            self.slots[call : call + 1] = [self._new_slots(input)]
        return self.slots[call]

    def _new_slots(self, input: Tensor) -> Slots:
        nothing = torch.zeros((), dtype=self.dtype, device=input.device)
        shapes = input.shape, (*input.shape[:-1], self.out_features)
        x, dy = (nothing.expand(shape).detach().requires_grad_() for shape in shapes)
        return Slots(x, dy)


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
        x, dy = (torch.atleast_2d(factor).flatten(0, -2) for factor in (self.x, self.dy))
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
    """While it is open: in which types each linear layer of a module computes, in one forward.

    besides  layers that are left as they are
    """

    def __init__(self, module: nn.Module, besides: Collection[nn.Module] = ()):
        self._dtypes: dict[nn.Linear, set[torch.dtype]] = collections.defaultdict(set)
        self._differentiated: set[nn.Module] = set()
        layers = [each for each in module.modules() if is_linear(each) and each not in besides]
        self._hooks = [layer.register_forward_hook(self._called) for layer in layers]

    def _called(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        self._dtypes[layer].add(output.dtype)
        if is_inside_func_transform():
            self._differentiated.add(layer)
        elif output.requires_grad:
            output.register_hook(lambda _: self._differentiated.add(layer))

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def splittable(self) -> dict[nn.Linear, torch.dtype]:
        """The type of the layers whose weight gradient can wait: their weight is trained, with no
        hook that wants its gradient, and forward itself does not differentiate them.
        """
        return {
            layer: min(dtypes, key=str)
            for layer, dtypes in self._dtypes.items()
            if len(dtypes) == 1
            and layer.weight.requires_grad
            and not _has_hooks(layer)
            and layer not in self._differentiated
        }


def _has_hooks(layer: nn.Module) -> bool:
    """A wrapper's are not counted: its pipeline tells it when a stage has all its gradients."""
    return any(
        without_wrapper_hooks([*tensor_hooks(p), *post_accumulate_hooks(p)])
        for p in layer.parameters(recurse=False)
    )


Calls = Sequence[tuple[SplitLinear, Slots]]  # of a forward


class SplitBackward:
    """The split of a module whose forward was watched. `close` gives the layers back as they were.

    splittable  as Watch found them
    """

    def __init__(self, module: nn.Module, splittable: Mapping[nn.Linear, torch.dtype]):
        self.layers: dict[SplitLinear, type[nn.Linear]] = {}  # and what they were
        for layer, dtype in splittable.items():
            before = type(layer)
            layer.__class__ = SplitLinear
            assert isinstance(layer, SplitLinear)
            self.layers[layer] = before
            layer.dtype, layer.slots, layer.num_calls = dtype, [], 0
        # also weights of these layers: whatever uses one without its layer adds to its gradient
        self._parameters = list(module.parameters())

    def begin(self) -> None:
        """Before a step: layers whose weights have hooks since are left as they were."""
        for layer in [layer for layer in self.layers if _has_hooks(layer)]:
            self._give_back(layer)

    def close(self) -> None:
        for layer in list(self.layers):
            self._give_back(layer)

    def _give_back(self, layer: SplitLinear) -> None:
        layer.__class__ = self.layers.pop(layer)  # type: ignore[assignment]
        del layer.slots, layer.num_calls, layer.dtype

    @contextlib.contextmanager
    def forward(self) -> Iterator[list[tuple[SplitLinear, Slots]]]:
        """Around a forward; afterwards the list has the calls of its layers, for `input_gradients`."""
        calls: list[tuple[SplitLinear, Slots]] = []
        self._count_anew()
        yield calls
        calls += [
            (layer, slots) for layer in self.layers for slots in layer.slots[: layer.num_calls]
        ]

    def _count_anew(self) -> None:
        for layer in self.layers:
            layer.num_calls = 0

    def input_gradients(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        calls: Calls,
    ) -> tuple[list[Tensor | None], list[Factors]]:
        """I: the gradients of the inputs, and what W needs. Adds all other gradients of parameters.

        outputs  tensors or gradient edges; frees the graph behind them
        """
        slots = [slot for _, pair in calls for slot in pair]
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        wanted = [*inputs, *trained, *slots]
        if not wanted or not outputs:
            return [None] * len(inputs), []
        self._count_anew()  # of layers that checkpointing runs again
        found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        after = len(inputs) + len(trained)
        given, own, of_slots = found[: len(inputs)], found[len(inputs) : after], found[after:]
        _add_all(trained, own, others=[*gradients, *given, *of_slots])
        pairs = zip(of_slots[::2], of_slots[1::2], strict=True)
        factors = [Factors(layer, x, dy) for (layer, _), (x, dy) in zip(calls, pairs, strict=True)]
        return list(given), factors


def _add_all(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    *,
    others: Sequence[Tensor | None],
) -> None:
    """Adds gradients to parameters', those that are there already in one call. A first one becomes
    `.grad` itself, as autograd has it: unless its memory is another one's too, for of what is summed
    all terms have one gradient, or is laid out in another way than the parameter's. Hooks that wait
    for `.grad` are called, as autograd does.
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
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            for hook in without_wrapper_hooks(post_accumulate_hooks(parameter)):
                hook(parameter)


def _memory(tensor: Tensor) -> int:
    own = local_part(tensor)
    return own.untyped_storage().data_ptr() if own.layout is torch.strided else id(tensor)
