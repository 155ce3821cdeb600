"""Splits a stage's backward in two: the gradient of the input first (I), those of weights later (W).

Method. The weight gradient of a linear layer is the product of two factors, its input and the
gradient of its output, and no other layer waits for it. During I the layer's backward skips this
product and hands out the two factors; W multiplies them when the schedule says so. The factors leave
autograd as gradients: each call of a layer has two *slots*, leaf tensors without memory whose
"gradients" are the layer's input and its output's gradient. I is one call of `torch.autograd.grad`
for the stage's inputs, the slots and all other parameters. A layer has one pair of slots per call in
a forward, and the number of calls may differ between micro-batches.

This needs only public autograd, so it works inside compiled blocks and under activation
checkpointing. (A compiled backward returns a slot's gradient like any other; it may recompute a
factor instead of keeping it.) Two alternatives were rejected. torch.distributed.pipelining walks
autograd's graph from the weights to where they meet the path of the input; that depends on the
graph's internals, and a compiled block is a single node that it cannot split. Calling autograd.grad
twice, for inputs and then for weights, computes every backward product twice.

Everything else gets its gradient in I: norms, embeddings, complex weights, weights that are used without
their layer or have a hook, and calls with other weights or of a frozen layer. They are cheap or rare.
"""

import collections
import contextlib
import dataclasses
import sys
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
    """The slots of one call of a layer, with the shapes of its input and its output."""

    x: Tensor
    dy: Tensor


class Calls(NamedTuple):
    """The calls of a layer in one forward: the dtype of its outputs, and the shapes of its inputs."""

    dtype: torch.dtype
    shapes: list[tuple[int, ...]]


class _LinearWithoutWeight(torch.autograd.Function):
    """y = x wᵀ + b. Backward returns the gradient of x, and the factors as gradients of the slots."""

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
    """An nn.Linear that passes the factors of its weight gradient to its slots.

    slots        one pair per split call in a forward, in order. A compiled block takes them as
                 inputs, and torch.compile cannot make them
    num_calls    split calls so far in the running forward; None outside of F and I
    dtype        dtype of the computation, which may differ from the weight's under autocast
    own          the layer's weight and bias, to which W adds. A call may use others: for example,
                 torch.func.functional_call replaces them
    trains_bias  True if the bias was trainable when the step began
    """

    slots: list[Slots]
    num_calls: int | None
    dtype: torch.dtype
    own: tuple[nn.Parameter | None, nn.Parameter | None]
    trains_bias: bool

    def forward(self, input: Tensor) -> Tensor:  # the argument has the name that nn.Linear gives it
        if not torch.is_grad_enabled() or self.num_calls is None or not self._trains_own():
            return F.linear(input, self.weight, self.bias)
        x_slot, dy_slot = self._next_slots(input, self.num_calls)
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return _LinearWithoutWeight.apply(
            input.to(self.dtype), self.weight.detach().to(self.dtype), bias, x_slot, dy_slot
        )

    def begin(self) -> None:
        """Called before a step, since parameters may have been replaced, frozen or unfrozen."""
        weight, bias = (self._parameters.get(name) for name in ("weight", "bias"))
        self.own, self.trains_bias = (weight, bias), bias is not None and bias.requires_grad

    def _trains_own(self) -> bool:
        """True if W can compute the gradients of this call: its weight and bias are the layer's own,
        and none of them was frozen since the step began.
        """
        weight, bias = self.weight, self.bias
        return (
            (weight is self.own[0] and bias is self.own[1])
            and weight.requires_grad
            and (bias is None or bias.requires_grad == self.trains_bias)
        )

    def _next_slots(self, input: Tensor, call: int) -> Slots:
        """Returns the slots of the next call. They are reused between forwards unless the shape
        differs; a micro-batch in flight then keeps the slots that it used.
        """
        self.num_calls = call + 1
        if call == len(self.slots) or self.slots[call].x.shape != input.shape:
            self.slots[call : call + 1] = [self.new_slots(input.shape)]
        return self.slots[call]

    def new_slots(self, shape: Sequence[int]) -> Slots:
        """Returns slots for a call with an input of this shape."""
        zero = torch.zeros((), dtype=self.dtype, device=self.weight.device)
        shapes = shape, (*shape[:-1], self.out_features)
        x, dy = (zero.expand(each).detach().requires_grad_() for each in shapes)
        x.register_post_accumulate_grad_hook(_refuse_backward)
        return Slots(x, dy)


def _refuse_backward(slot: Tensor) -> None:
    """Raises if a backward other than I reaches a slot. I returns the slots' gradients instead of
    accumulating them, so it does not call this hook.
    """
    raise RuntimeError(
        "a backward outside of the pipeline's step went through a linear layer whose backward is "
        "split; run the module's forward again outside of the step, or choose a schedule without W"
    )


@dataclasses.dataclass
class Factors:
    """The factors of a layer's weight gradient dyᵀ x, from one call. They are dropped after use.

    Both are None if the output does not depend on the call.
    """

    layer: SplitLinear
    x: Tensor | None
    dy: Tensor | None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Adds the product to the gradient of the weight, and the sum of dy to that of the bias."""
        if self.x is None or self.dy is None:
            return
        x, dy = (torch.atleast_2d(factor).flatten(0, -2) for factor in (self.x, self.dy))
        weight, bias = self.layer.own
        if weight is not None and weight.requires_grad:
            if weight.grad is None:
                weight.grad = (dy.T @ x).to(weight.dtype)
            elif weight.grad.dtype == dy.dtype:
                weight.grad.addmm_(dy.T, x)  # adds inside the matrix product
            else:
                weight.grad.add_(dy.T @ x)
        if bias is not None and bias.requires_grad and self.layer.trains_bias:
            if bias.grad is None:
                bias.grad = dy.sum(0).to(bias.dtype)
            else:
                bias.grad.add_(dy.sum(0))
        self.x = self.dy = None


def _is_plain_linear(layer: nn.Module) -> bool:
    """True if the layer computes what nn.Linear does, with a real weight that is its own parameter.
    Subclasses of nn.Linear count if they do not override forward.
    """
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward in (nn.Linear.forward, SplitLinear.forward)
        and "weight" in dict(layer.named_parameters(recurse=False))
        and not layer.weight.is_complex()
    )


class Watch:
    """Observes one forward inside its context, to learn which linear layers can be split.

    excluded  layers that must not be split
    """

    def __init__(self, module: nn.Module, excluded: Collection[nn.Module] = ()):
        self._dtypes: dict[nn.Linear, set[torch.dtype]] = collections.defaultdict(set)
        self._shapes: dict[nn.Linear, list[tuple[int, ...]]] = collections.defaultdict(list)
        self._differentiated: set[nn.Module] = set()  # layers that forward itself differentiates
        self._hooks = [
            layer.register_forward_hook(self._called)
            for layer in module.modules()
            if _is_plain_linear(layer) and layer not in excluded
        ]

    def _called(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        self._dtypes[layer].add(output.dtype)
        self._shapes[layer].append((*output.shape[:-1], layer.in_features))
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
    def splittable(self) -> dict[nn.Linear, Calls]:
        """The layers that can be split, with their calls: those that compute in one dtype, have a
        trainable weight and no hooks, and are not differentiated by forward itself.
        """
        return {
            layer: Calls(next(iter(dtypes)), self._shapes[layer])
            for layer, dtypes in self._dtypes.items()
            if len(dtypes) == 1
            and layer.weight.requires_grad
            and not _has_hooks(layer)
            and layer not in self._differentiated
        }


def _has_hooks(layer: nn.Module) -> bool:
    """True if a parameter of the layer has a hook. Hooks of data-parallel wrappers do not count: the
    pipeline tells the wrapper when a stage has all its gradients.
    """
    return any(
        without_wrapper_hooks([*tensor_hooks(p), *post_accumulate_hooks(p)])
        for p in layer.parameters(recurse=False)
    )


def _compiled_with_checkpoints() -> contextlib.AbstractContextManager[object]:
    """Lets torch.compile compile checkpointed blocks although a call of a split layer changes its
    `num_calls`. By default torch leaves such a block eager, because recomputing would have to repeat
    the change. Here it must not: backward recomputes within the graph, without calling the layers.

    The setting is private, but torch's error message advises it. The way out: a torch that compiles
    such blocks without it.
    """
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    if dynamo is None:
        return contextlib.nullcontext()
    setting: contextlib.AbstractContextManager[object] = dynamo.config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True
    )
    return setting


LayerCalls = Sequence[tuple[SplitLinear, Slots]]  # the calls of split layers in one forward


class SplitBackward:
    """Splits the backward of a module. `close` restores the module's layers.

    splittable  as returned by Watch
    """

    def __init__(self, module: nn.Module, splittable: Mapping[nn.Linear, Calls]):
        self.layers: dict[SplitLinear, type[nn.Linear]] = {}  # with their original classes
        for layer, calls in splittable.items():
            original = type(layer)
            layer.__class__ = SplitLinear
            assert isinstance(layer, SplitLinear)
            self.layers[layer] = original
            layer.dtype, layer.num_calls = calls.dtype, None
            layer.slots = [layer.new_slots(shape) for shape in calls.shapes]
        self._module = module
        self.begin()

    def begin(self) -> None:
        """Called before a step: restores layers whose parameters have got hooks since."""
        for layer in list(self.layers):
            if _has_hooks(layer):
                self._restore(layer)
            else:
                layer.begin()
        # Includes weights of the split layers, because they may also be used without their layer.
        self._parameters = list(self._module.parameters())

    def close(self) -> None:
        for layer in list(self.layers):
            self._restore(layer)

    def _restore(self, layer: SplitLinear) -> None:
        layer.__class__ = self.layers.pop(layer)  # type: ignore[assignment]
        del layer.slots, layer.num_calls, layer.dtype, layer.own, layer.trains_bias

    @contextlib.contextmanager
    def forward(self) -> Iterator[list[tuple[SplitLinear, Slots]]]:
        """Encloses a forward. Afterwards the yielded list has the calls for `input_gradients`."""
        calls: list[tuple[SplitLinear, Slots]] = []
        with self._splitting(), _compiled_with_checkpoints():
            yield calls
            calls += [
                (layer, slots) for layer in self.layers for slots in layer.slots[: layer.num_calls]
            ]

    @contextlib.contextmanager
    def _splitting(self) -> Iterator[None]:
        """Splits the calls of layers inside the context; otherwise they are ordinary layers."""
        self._set_num_calls(0)
        try:
            yield
        finally:
            self._set_num_calls(None)

    def _set_num_calls(self, num_calls: int | None) -> None:
        for layer in self.layers:
            vars(layer)["num_calls"] = num_calls  # nn.Module takes 20 times as long to set it

    def input_gradients(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        calls: LayerCalls,
    ) -> tuple[list[Tensor | None], list[Factors]]:
        """Runs I. Returns the gradients of the inputs and the factors for W. All other gradients of
        parameters are added to `.grad`. Frees the autograd graph.

        outputs  tensors or gradient edges
        """
        slots = [slot for _, pair in calls for slot in pair]
        trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        targets = [*inputs, *trainable, *slots]
        if not targets or not outputs:
            return [None] * len(inputs), []
        with self._splitting():  # activation checkpointing calls layers again
            all_gradients = torch.autograd.grad(outputs, targets, gradients, allow_unused=True)
        end = len(inputs) + len(trainable)
        for_inputs, for_parameters = all_gradients[: len(inputs)], all_gradients[len(inputs) : end]
        for_slots = all_gradients[end:]
        _add_all(trainable, for_parameters, others=[*gradients, *for_inputs, *for_slots])
        pairs = zip(for_slots[::2], for_slots[1::2], strict=True)
        factors = [Factors(layer, x, dy) for (layer, _), (x, dy) in zip(calls, pairs, strict=True)]
        return list(for_inputs), factors


def _add_all(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
    *,
    others: Sequence[Tensor | None],
) -> None:
    """Adds gradients to the parameters' `.grad` and calls post-accumulate hooks, as autograd does.

    Existing gradients are updated in one foreach call. A first gradient becomes `.grad` itself,
    unless its strides differ from the parameter's or another gradient (in `gradients` or `others`)
    has the same memory. The terms of a sum, for example, share one gradient.
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
            is_dense = gradient.layout is torch.strided
            same_layout = not is_dense or gradient.stride() == parameter.stride()
            owns_memory = users[_memory(gradient)] == 1
            parameter.grad = (
                gradient
                if same_layout and owns_memory
                else torch.empty_like(parameter).copy_(gradient)
            )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            for hook in without_wrapper_hooks(post_accumulate_hooks(parameter)):
                hook(parameter)


def _memory(tensor: Tensor) -> int:
    """Identifies the memory of a tensor: equal for tensors that share their storage."""
    local = local_part(tensor)
    is_dense = local.layout is torch.strided
    return local.untyped_storage().data_ptr() if is_dense else id(tensor)
