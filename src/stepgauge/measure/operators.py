"""Traces the operators that torch's dispatcher runs as terms that cost/ can price: products, attention,
norms, the loss and casts by their sizes, all others by the bytes that they read and write.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from stepgauge.cost.operations.terms import TRAFFIC, Term, padded
from stepgauge.measure import own_operators
from stepgauge.measure.collective_operators import NAMESPACE, Axis, CollectiveOperators
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.fusion import TracedTerm
from stepgauge.measure.operator_calls import is_large, text_of
from stepgauge.measure.pointwise import contiguous_copies, is_near_its_bytes, passes
from stepgauge.spec.calibration import BATCHED, FULL_MASK, GROUPED

NO_WORK = Term("", TRAFFIC, (0.0,), count=0)
FREE = ("empty", "new_empty", "detach", "lift", "_local_scalar_dense", "is_", "_unsafe_view")
# These read as many values of their first input as they write.
GATHERS = ("embedding", "gather", "index", "index_select", "nll_loss_forward", "slice_backward")
# These are not calibrated, and compute too much to be priced by their bytes: parts of names, and
# words in names.
UNPRICED = (
    "rnn", "lstm", "gru", "fft", "linalg", "svd", "cholesky", "ctc_loss", "addmm", "conv_", "conv2d",
    "convolution",
)  # fmt: skip
UNPRICED_WORDS = {
    "mm", "linear", "trilinear", "attention", "transformer", "triangular", "lu", "geqrf", "ormqr",
    "cdist", "pdist",
}  # fmt: skip
PRICED_EXCEPTIONS = ("linalg_vector_norm",)  # reads its input once
SMALLEST_CAST = 2048  # values in the smallest calibrated cast (calibrate/grids.py)
KINDS = {torch.bfloat16: "bf16", torch.float16: "bf16"}  # fp16 is as fast as bf16
Sized = tuple[str, tuple[float, ...], int]  # operation, sizes, count


class OperatorTrace(TorchDispatchMode):
    """Records the terms of each phase, in order. A term with `gradient` marks where the gradient of a
    parameter with so many elements is complete.

    fp32  how products of fp32 tensors are computed: "fp32" or "tf32"
    axes  the axes of a layout whose ranks communicate, by the name of their process group

    An operator without a price raises a ValueError that names it.
    """

    def __init__(self, *, fp32: str = "fp32", axes: Mapping[str, Axis] | None = None):
        super().__init__()
        self._axes = axes or {}
        self._collectives = CollectiveOperators(self._axes)
        self.traced: dict[str, list[TracedTerm]] = {}
        self.input_gradients: dict[str, int] = {}  # by unit, the storage of its input's gradient
        # Keeps storages alive, so that their addresses, which identify them, are not reused.
        self._storages: list[Any] = []
        self._fp32, self._phase, self._unit = fp32, "", ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the operators inside the context under this name, replacing earlier ones."""
        self._phase, self._unit, self.traced[name] = name, "", []
        try:
            yield
        finally:
            self._phase = ""

    @property
    def terms(self) -> dict[str, list[Term]]:
        """The terms of each phase, as eager PyTorch runs them."""
        return {name: [each.term for each in traced] for name, traced in self.traced.items()}

    @contextlib.contextmanager
    def watching(self, module: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Records when gradients of the module's parameters are complete, and which unit runs each
        operator.
        """
        handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._gradient_complete)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        for name, unit in units.items():
            handles += self._watch_unit(name, unit)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gradient_complete(self, parameter: Tensor) -> None:
        if self._phase:
            name = f"gradient of {parameter.numel()}"
            term = Term(name, TRAFFIC, (0.0,), gradient=parameter.numel(), count=0)
            self.traced[self._phase].append(TracedTerm(term, unit=self._unit))

    def _watch_unit(self, name: str, unit: nn.Module) -> list[RemovableHandle]:
        """Sets the current unit from a unit's call to its return, and in backward from the gradients
        of its outputs to those of its inputs.
        """
        callers: list[str] = []

        def before_forward(_: nn.Module, inputs: Any, keywords: Any) -> None:
            callers.append(self._unit)
            self._unit = name
            for x in _differentiable((inputs, keywords)):
                x.register_hook(after_backward)

        def after_forward(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self._unit = callers.pop()
            for y in _differentiable(outputs):
                y.register_hook(before_backward)

        def before_backward(_: Tensor) -> None:
            self._unit = name

        def after_backward(gradient: Tensor) -> None:
            if self._unit == name:  # otherwise the hook of the previous unit's output ran first
                self._unit = ""
            self.input_gradients[name] = gradient.untyped_storage()._cdata

        return [
            unit.register_forward_pre_hook(before_forward, with_kwargs=True),
            unit.register_forward_hook(after_forward),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and name not in NORMS:
            with self:  # in inference mode autograd does not decompose composite operators
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if self._phase:
            self._record(func, name, args, kwargs, tensors_in(result))
        return result

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = tensors_in((args, kwargs))
        is_collective = func.namespace == NAMESPACE
        if not is_collective and _is_free(func, name, inputs, outputs):
            return
        written = outputs or inputs  # without outputs, the operator changes lists in place
        nbytes = self._by_storage(_read(name, inputs, outputs)), self._by_storage(written)
        traced = self.traced[self._phase]
        if is_collective:
            self._collectives.record(name, args, TracedTerm(NO_WORK, *nbytes, self._unit), traced)
            return
        terms = list(self._priced(func, name, args, inputs, outputs))
        if func.namespace == "aten" and _is_timed_as_call(terms):
            is_exact = name in NORMS or is_near_its_bytes(func) or not is_large((args, kwargs))
            terms = _parts_of_call(terms, text_of(func, args, kwargs), is_rough=not is_exact)
        traced += [TracedTerm(term, *nbytes, self._unit) for term in terms]

    def _by_storage(self, tensors: list[Tensor]) -> dict[int, int]:
        """Returns the bytes of the tensors by storage."""
        by_storage: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages.append(storage)
            total = by_storage.get(storage._cdata, 0) + _bytes(tensor)
            by_storage[storage._cdata] = min(total, storage.nbytes())
        return by_storage

    def _priced(
        self, func: Any, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Iterator[Term]:
        """Yields the operator's terms. Raises ValueError if it has no price."""
        unpriced = f"the model runs {func}, which no calibration has a time for"
        if func.namespace == own_operators.NAMESPACE:
            yield from own_operators.own_terms(
                func, _by_name(func, args), inputs, outputs, self._axes
            )
            return
        if func.namespace != "aten":
            raise ValueError(unpriced)
        if calibrated := list(self._calibrated(func, name, args, inputs, outputs)):
            if name in NORMS:
                yield from contiguous_copies(name, inputs)
            terms = (Term(name, *sized) for sized in calibrated)
            # the summands of a convolution are no rows that could be unaligned
            yield from map(padded, terms) if name in CONVOLUTIONS else terms
        elif _is_unpriced(name):
            raise ValueError(unpriced)
        elif name != "nll_loss_backward":  # part of the calibrated loss's backward
            yield from passes(func, inputs, outputs, _bytes_moved(name, inputs, outputs))

    def _calibrated(
        self, func: Any, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Iterator[Sized]:
        """Yields the calibrated operation with its sizes; nothing for operators without calibration."""
        product = name.removesuffix("_")  # addmm_ is addmm in place
        if product == "_grouped_mm" and outputs[0].ndim + args[0].ndim + args[1].ndim < 9:
            yield self._grouped_product(*args[:2], experts=args[2].numel())
        elif product in PRODUCTS:
            yield self._product(*args[PRODUCTS[product] : PRODUCTS[product] + 2])
        elif name in CONVOLUTIONS:
            yield from self._convolution(name, args, outputs)
        elif name.startswith("_scaled_dot_product"):
            yield self._attention(func, name, args)
        elif name in NORMS:
            x = args[1] if "backward" in name else args[0]
            rows = x.numel() // x.shape[-1]
            yield f"{NORMS[name]} {self._kind(x, 'fp32')}", (rows, x.shape[-1]), 1
        elif name in LOSSES and args[0].ndim == 2:
            yield LOSSES[name], (len(args[0]), args[0].nbytes / 4 / len(args[0])), 1
        elif name == "_fused_adamw_":
            numel = sum(parameter.numel() for parameter in args[0])
            yield f"optimizer adamw {self._kind(args[0][0], 'fp32')}", (numel,), 1
        elif name == "_to_copy" and (pair := _cast(inputs, outputs)):
            yield pair, (outputs[0].numel(),), 1

    def _kind(self, x: Tensor, fp32: str = "") -> str:
        return KINDS.get(x.dtype, fp32 or self._fp32)

    def _product(self, a: Tensor, b: Tensor) -> Sized:
        """Returns the product (M, K) x (K, N), or the batch of such products."""
        if b.ndim == 1:
            return TRAFFIC, (float(_bytes(a)),), 1
        how = _layout(a, b)
        *batch, m, k = a.shape
        sizes = (m, b.shape[-1], k)
        if math.prod(batch) > 1:
            return f"matmul {BATCHED}{how} {self._kind(a)}", (*batch, *sizes), 1
        return f"matmul {how} {self._kind(a)}", sizes, 1

    def _grouped_product(self, a: Tensor, b: Tensor, *, experts: int) -> Sized:
        """Returns a product of several experts; its sizes are those of all experts together."""
        operation = f"matmul {GROUPED}{_layout(a, b)} {self._kind(a)}"
        return operation, (experts, a.shape[-2], b.shape[-1], a.shape[-1]), 1

    def _convolution(self, name: str, args: Any, outputs: list[Tensor]) -> Iterator[Sized]:
        """Yields the implicit product (batch · positions, channels out, channels in · kernel), and in
        backward the products of its two gradients. A transposed convolution is the input gradient of
        a plain one, and its positions are those of its input.
        """
        is_backward = name == "convolution_backward"
        weight, transposed = (args[2], args[7]) if is_backward else (args[1], args[6])
        x, y = (args[1], args[0]) if is_backward else (args[0], outputs[0])
        positions_of = x if transposed else y
        m, n, k = positions_of.numel() // positions_of.shape[1], weight.shape[0], weight[0].numel()
        in_tf32 = y.is_cuda and torch.backends.cudnn.allow_tf32  # torch's default
        kind = self._kind(y, "tf32" if in_tf32 else "")
        plain, transpose = (f"matmul nt {kind}", (m, n, k), 1), (f"matmul nn {kind}", (m, k, n), 1)
        if not is_backward:
            yield transpose if transposed else plain
            return
        needs_input_gradient, needs_weight_gradient, *_ = args[-1]
        if needs_input_gradient:
            yield plain if transposed else transpose
        if needs_weight_gradient:
            yield f"matmul tn {kind}", (n, k, m), 1

    def _attention(self, func: Any, name: str, args: Any) -> Sized:
        direction = "backward" if "backward" in name else "forward"
        arguments = _by_name(func, args)
        q, k = arguments["query"], arguments["key"]
        heads, length = math.prod(q.shape[:-2]), math.sqrt(q.shape[-2] * k.shape[-2])
        mask = "" if arguments.get("is_causal") else FULL_MASK
        operation = f"attention sdpa{mask} {direction} {self._kind(q, 'fp32')}"
        return operation, (heads, length, q.shape[-1]), 1


# Products, with the position of the first factor in their arguments.
PRODUCTS = {
    "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "mv": 0, "_grouped_mm": 0,
}  # fmt: skip
CONVOLUTIONS = ("convolution", "convolution_backward")
NORMS = {
    "native_layer_norm": "layernorm forward",
    "native_layer_norm_backward": "layernorm backward",
    "_fused_rms_norm": "rmsnorm forward",
    "_fused_rms_norm_backward": "rmsnorm backward",
}
LOSSES = {  # fp32 was timed, so that words of other types count by their bytes
    "_log_softmax": "cross-entropy forward",
    "_log_softmax_backward_data": "cross-entropy backward",
}


def record_step(
    trace: OperatorTrace,
    phases: Mapping[str, Callable[[], None]],
    module: nn.Module,
    units: Mapping[str, nn.Module],
    *,
    steps: int,
) -> None:
    """Runs the phases several times under the trace, which keeps the terms of the last step."""
    with trace, trace.watching(module, units):
        for _ in range(steps):
            for name, phase in phases.items():
                with trace.phase(name):
                    phase()


def _is_timed_as_call(terms: list[Term]) -> bool:
    """True for operators that `calibrate` times as whole calls: those with passes over memory, and
    convolutions. It times all others at the sizes of a step.
    """
    return any(
        term.operation == TRAFFIC or term.nbytes or term.name in CONVOLUTIONS for term in terms
    )


def _parts_of_call(terms: list[Term], call: str, *, is_rough: bool) -> list[Term]:
    """Returns the terms with the call that they are part of, and their shares of its time."""
    works = [_work(term) for term in terms]
    total = sum(works)
    if not total:
        return terms
    return [
        dataclasses.replace(term, operator=call, share=work / total, is_rough=is_rough)
        for term, work in zip(terms, works, strict=True)
    ]


def _work(term: Term) -> float:
    """Returns the work by which terms of one call are weighted: FLOPs of products, or else bytes. A
    norm reads and writes values of four bytes.
    """
    if term.operation == TRAFFIC or term.is_product:
        return math.prod(term.sizes)
    return term.nbytes or 8 * math.prod(term.sizes)


def _by_name(func: Any, args: Any) -> dict[str, Any]:
    return {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}


def _differentiable(values: Any) -> list[Tensor]:
    return [x for x in tensors_in(values) if x.requires_grad]


def _is_free(func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """True if nothing runs on the device: a view, uninitialized memory, or an empty result."""
    if name.startswith(FREE) or (not outputs and not func._schema.is_mutable):
        return True
    if outputs and not any(tensor.numel() for tensor in outputs):
        return True
    if func._schema.is_mutable:
        return False
    input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in input_storages for tensor in outputs)


def _is_unpriced(name: str) -> bool:
    if name in PRICED_EXCEPTIONS:
        return False
    return any(part in name for part in UNPRICED) or not UNPRICED_WORDS.isdisjoint(name.split("_"))


def _layout(a: Tensor, b: Tensor) -> str:
    """Returns the layout of both factors, as BLAS names it: n for row-major, t for column-major."""
    layouts = {(False, True): "nt", (True, False): "tn"}
    return layouts.get((_is_column_major(a), _is_column_major(b)), "nn")


def _is_column_major(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _bytes(x: Tensor) -> int:
    """Returns the bytes of the stored values; an expanded tensor has fewer than its shape suggests."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


def _read(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that an operator reads. A gather reads as much of its first as it writes."""
    return [*outputs, *inputs[1:]] if name in GATHERS else inputs


def _bytes_moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Returns the bytes that an operator reads and writes."""
    written = sum(map(_bytes, outputs))
    if name in GATHERS:
        return 2 * written
    if name == "_embedding_bag":  # reads a row of its first input for each index
        weight, indices, *_ = inputs
        return written + _bytes(indices) + indices.numel() * _bytes(weight[0])
    if not outputs:  # lists that are changed in place are read and written
        return 2 * sum(map(_bytes, inputs))
    return written + sum(map(_bytes, inputs))


def _cast(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Returns the calibrated cast, or "" for other copies and those below all calibrated sizes."""
    if outputs[0].numel() < SMALLEST_CAST:
        return ""
    source, target = (KINDS.get(x.dtype, x.dtype) for x in (inputs[0], outputs[0]))
    if (source, target) == (torch.float32, "bf16"):
        return "cast fp32 bf16"
    return "cast bf16 fp32" if (source, target) == ("bf16", torch.float32) else ""
