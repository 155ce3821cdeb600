"""Operators that torch's dispatcher runs, as terms that cost/ knows: products, attention, norms, the
loss and casts by their sizes, all else by the bytes that it reads and writes.
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

from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.measure import own_operators
from stepgauge.measure.footprint import tensors_in
from stepgauge.measure.fusion import Moved
from stepgauge.measure.operator_calls import is_long, text_of
from stepgauge.measure.pointwise import copied_first, is_near_its_bytes, passes
from stepgauge.measure.sent_operators import NAMESPACE, Axis, SentOperators
from stepgauge.spec.calibration import BATCHED, FULL_MASK, GROUPED

NOTHING = Term("", TRAFFIC, (0.0,), count=0)
FREE = ("empty", "new_empty", "detach", "lift", "_local_scalar_dense", "is_", "_unsafe_view")
# Read as many values of their first input as they write.
GATHERS = ("embedding", "gather", "index", "index_select", "nll_loss_forward", "slice_backward")
# Compute more than their bytes say, and no calibration has them: parts of names, and words of names.
UNPRICED = (
    "rnn", "lstm", "gru", "fft", "linalg", "svd", "cholesky", "ctc_loss", "addmm", "conv_", "conv2d",
    "convolution",
)  # fmt: skip
UNPRICED_WORDS = {
    "mm", "linear", "trilinear", "attention", "transformer", "triangular", "lu", "geqrf", "ormqr",
    "cdist", "pdist",
}  # fmt: skip
BUT_PRICED = ("linalg_vector_norm",)  # reads its input once
SMALLEST_CAST = 2048  # values, as calibrate/grids.py
KINDS = {torch.bfloat16: "bf16", torch.float16: "bf16"}  # fp16 has the same rate
Sized = tuple[str, tuple[float, ...], int]  # operation, sizes, count


class OperatorTrace(TorchDispatchMode):
    """Terms of each phase, in order. The gradient of a parameter is complete after the term whose
    `gradient` counts its elements.

    fp32  how products of fp32 tensors are computed: "fp32" or "tf32"
    axes  of a layout, whose ranks send each other what the step needs, by the name of their group

    An operator without a price raises ValueError, which names it.
    """

    def __init__(self, *, fp32: str = "fp32", axes: Mapping[str, Axis] | None = None):
        super().__init__()
        self._axes = axes or {}
        self._sent = SentOperators(self._axes)
        self.moved: dict[str, list[Moved]] = {}
        self.input_gradients: dict[str, int] = {}  # of each unit, the storage
        self._held: list[Any] = []  # storages, so that none of their places is taken again
        self._fp32, self._phase, self._unit = fp32, "", ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs within is recorded under the name, anew."""
        self._phase, self._unit, self.moved[name] = name, "", []
        try:
            yield
        finally:
            self._phase = ""

    @property
    def terms(self) -> dict[str, list[Term]]:
        """As eager PyTorch runs them."""
        return {name: [each.term for each in moved] for name, moved in self.moved.items()}

    @contextlib.contextmanager
    def watching(self, module: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Notes when gradients of the module's parameters are complete, and which of its units runs
        what.
        """
        handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._complete)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        for name, unit in units.items():
            handles += self._watch(name, unit)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _complete(self, parameter: Tensor) -> None:
        if self._phase:
            name = f"gradient of {parameter.numel()}"
            term = Term(name, TRAFFIC, (0.0,), gradient=parameter.numel(), count=0)
            self.moved[self._phase].append(Moved(term, unit=self._unit))

    def _watch(self, name: str, unit: nn.Module) -> list[RemovableHandle]:
        """A unit runs from its call to its return, and in backward from the gradients of its outputs
        to those of its inputs.
        """
        callers: list[str] = []

        def called(_: nn.Module, inputs: Any, named: Any) -> None:
            callers.append(self._unit)
            self._unit = name
            for x in _differentiable((inputs, named)):
                x.register_hook(left)

        def returned(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self._unit = callers.pop()
            for y in _differentiable(outputs):
                y.register_hook(lambda _: entered())

        def entered() -> None:
            self._unit = name

        def left(gradient: Tensor) -> None:
            if self._unit == name:  # else the unit before, whose output this is, has begun
                self._unit = ""
            self.input_gradients[name] = gradient.untyped_storage()._cdata

        return [
            unit.register_forward_pre_hook(called, with_kwargs=True),
            unit.register_forward_hook(returned),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and name not in NORMS:
            with self:  # autograd, which would see what it is made of, is not asked
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if self._phase:
            self._record(func, name, args, kwargs, tensors_in(result))
        return result

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = tensors_in((args, kwargs))
        is_sent = func.namespace == NAMESPACE
        if not is_sent and _is_free(func, name, inputs, outputs):
            return
        written = outputs or inputs  # lists that are changed in place
        places = self._by_storage(_read(name, inputs, outputs)), self._by_storage(written)
        ran = self.moved[self._phase]
        if is_sent:
            self._sent.see(name, args, Moved(NOTHING, *places, self._unit), ran)
            return
        terms = list(self._priced(func, name, args, inputs, outputs))
        if func.namespace == "aten" and _is_timed_by_its_call(terms):
            is_known = name in NORMS or is_near_its_bytes(func) or not is_long((args, kwargs))
            terms = _shares(terms, text_of(func, args, kwargs), is_rough=not is_known)
        ran += [Moved(term, *places, self._unit) for term in terms]

    def _by_storage(self, tensors: list[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._held.append(storage)
            whole = found.get(storage._cdata, 0) + _bytes(tensor)
            found[storage._cdata] = min(whole, storage.nbytes())
        return found

    def _priced(
        self, func: Any, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Iterator[Term]:
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
                yield from copied_first(name, inputs)
            yield from (Term(name, *sized) for sized in calibrated)
        elif _is_unpriced(name):
            raise ValueError(unpriced)
        elif name != "nll_loss_backward":  # which the calibrated loss's backward has in it
            yield from passes(func, inputs, outputs, _moved(name, inputs, outputs))

    def _calibrated(
        self, func: Any, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Iterator[Sized]:
        """What hardware files have times of; nothing for other operators."""
        product = name.removesuffix("_")  # addmm_ writes into what it adds to
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
            yield LOSSES[name], tuple(map(float, args[0].shape)), 1
        elif name == "_fused_adamw_":
            numel = sum(parameter.numel() for parameter in args[0])
            yield f"optimizer adamw {self._kind(args[0][0], 'fp32')}", (numel,), 1
        elif name == "_to_copy" and (pair := _cast(inputs, outputs)):
            yield pair, (outputs[0].numel(),), 1

    def _kind(self, x: Tensor, fp32: str = "") -> str:
        return KINDS.get(x.dtype, fp32 or self._fp32)

    def _product(self, a: Tensor, b: Tensor) -> Sized:
        """(M, K) times (K, N), or as many of them as the first dimension of both says."""
        if b.ndim == 1:
            return TRAFFIC, (float(_bytes(a)),), 1
        how = _layout(a, b)
        *batch, m, k = a.shape
        sizes = (m, b.shape[-1], k)
        if math.prod(batch) > 1:
            return f"matmul {BATCHED}{how} {self._kind(a)}", (*batch, *sizes), 1
        return f"matmul {how} {self._kind(a)}", sizes, 1

    def _grouped_product(self, a: Tensor, b: Tensor, *, experts: int) -> Sized:
        """Rows, columns or what is summed over are those of all experts."""
        operation = f"matmul {GROUPED}{_layout(a, b)} {self._kind(a)}"
        return operation, (experts, a.shape[-2], b.shape[-1], a.shape[-1]), 1

    def _convolution(self, name: str, args: Any, outputs: list[Tensor]) -> Iterator[Sized]:
        """As the implicit product (N · positions, channels in · kernel, channels out); its backward
        as two of them. A transposed one is the backward of the other way: its positions are of its
        input.
        """
        is_backward = name == "convolution_backward"
        weight, transposed = (args[2], args[7]) if is_backward else (args[1], args[6])
        x, y = (args[1], args[0]) if is_backward else (args[0], outputs[0])
        narrow = x if transposed else y
        m, n, k = narrow.numel() // narrow.shape[1], weight.shape[0], weight[0].numel()
        in_tf32 = y.is_cuda and torch.backends.cudnn.allow_tf32  # torch's default
        kind = self._kind(y, "tf32" if in_tf32 else "")
        narrowing, widening = (
            (f"matmul nt {kind}", (m, n, k), 1),
            (f"matmul nn {kind}", (m, k, n), 1),
        )
        if not is_backward:
            yield widening if transposed else narrowing
            return
        wants_input, wants_weight, *_ = args[-1]
        if wants_input:
            yield narrowing if transposed else widening
        if wants_weight:
            yield f"matmul tn {kind}", (n, k, m), 1

    def _attention(self, func: Any, name: str, args: Any) -> Sized:
        direction = "backward" if "backward" in name else "forward"
        given = _by_name(func, args)
        q, k = given["query"], given["key"]
        heads, length = math.prod(q.shape[:-2]), math.sqrt(q.shape[-2] * k.shape[-2])
        mask = "" if given.get("is_causal") else FULL_MASK
        operation = f"attention sdpa{mask} {direction} {self._kind(q, 'fp32')}"
        return operation, (heads, length, q.shape[-1]), 1


# The place of the first factor.
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
LOSSES = {
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
    """Runs the phases so many times under the trace, which keeps the last."""
    with trace, trace.watching(module, units):
        for _ in range(steps):
            for name, phase in phases.items():
                with trace.phase(name):
                    phase()


def _is_timed_by_its_call(terms: list[Term]) -> bool:
    """Whether passes over memory are in it, or products that stand for a convolution: all else `calibrate`
    has at the sizes of a step.
    """
    return any(
        term.operation == TRAFFIC or term.nbytes or term.name in CONVOLUTIONS for term in terms
    )


def _shares(terms: list[Term], call: str, *, is_rough: bool) -> list[Term]:
    """With the call that they are parts of, each by its bytes, or of products by its operations."""
    works = [_work(term) for term in terms]
    whole = sum(works)
    if not whole:
        return terms
    return [
        dataclasses.replace(term, operator=call, share=work / whole, is_rough=is_rough)
        for term, work in zip(terms, works, strict=True)
    ]


def _work(term: Term) -> float:
    """Norms, which passes stand beside, read and write values of four bytes."""
    if term.operation == TRAFFIC or term.is_product:
        return math.prod(term.sizes)
    return term.nbytes or 8 * math.prod(term.sizes)


def _by_name(func: Any, args: Any) -> dict[str, Any]:
    return {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}


def _differentiable(values: Any) -> list[Tensor]:
    return [x for x in tensors_in(values) if x.requires_grad]


def _is_free(func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether nothing runs on the device: a view, memory without values, or no values at all."""
    if name.startswith(FREE) or (not outputs and not func._schema.is_mutable):
        return True
    if outputs and not any(tensor.numel() for tensor in outputs):
        return True
    if func._schema.is_mutable:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in known for tensor in outputs)


def _is_unpriced(name: str) -> bool:
    if name in BUT_PRICED:
        return False
    return any(part in name for part in UNPRICED) or not UNPRICED_WORDS.isdisjoint(name.split("_"))


def _layout(a: Tensor, b: Tensor) -> str:
    """Which of the factors is read by columns: t, else n, as BLAS says of row-major ones."""
    return {(False, True): "nt", (True, False): "tn"}.get((_turned(a), _turned(b)), "nn")


def _turned(x: Tensor) -> bool:
    """Whether a matrix is read by columns."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _bytes(x: Tensor) -> int:
    """Of the values that there are: an expanded tensor has fewer than its shape says."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


def _read(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Of what an operator looks up in its first input no more than it writes."""
    return [*outputs, *inputs[1:]] if name in GATHERS else inputs


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    written = sum(map(_bytes, outputs))
    if name in GATHERS:
        return 2 * written
    if name == "_embedding_bag":  # a row of its first input for each index
        weight, indices, *_ = inputs
        return written + _bytes(indices) + indices.numel() * _bytes(weight[0])
    if not outputs:  # lists that are changed in place are read and written
        return 2 * sum(map(_bytes, inputs))
    return written + sum(map(_bytes, inputs))


def _cast(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """The calibrated cast, or "" for another copy, and for one that no calibration is as small as."""
    if outputs[0].numel() < SMALLEST_CAST:
        return ""
    pair = tuple("bf16" if t.dtype in KINDS else str(t.dtype) for t in (inputs[0], outputs[0]))
    known = {
        ("torch.float32", "bf16"): "cast fp32 bf16",
        ("bf16", "torch.float32"): "cast bf16 fp32",
    }
    return known.get(pair, "")  # type: ignore[arg-type]
