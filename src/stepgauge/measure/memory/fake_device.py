"""Tensors without memory, on a device that need not be there.

torch's fake tensors run every operator's shape rules and no kernel. Where there is no GPU, fake CUDA
tensors need cuda_without_gpu.py, and the choices that torch makes by looking at the GPU are made by
its rules: which attention (attention_backend.py).
"""

import contextlib
import operator
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.measure.memory.attention_backend import attention_of
from stepgauge.measure.memory.cuda_without_gpu import cuda_without_gpu
from stepgauge.measure.memory.missing_rules import BY_VALUES, RULES, NotPredictableError
from stepgauge.measure.memory.recurrent import cudnn_recurrent_layers, layers_that_raise
from stepgauge.measure.memory.storage_tracker import program_line

MOST_QUESTIONS = 50_000  # of one line of the program, one after another
WITHOUT_RULE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# For tensors without memory torch takes the layers apart, which keeps half as much.
LSTM_ON_A_CPU = (
    "aten.mkldnn_rnn_layer.default, LSTM on a CPU, keeps a workspace whose size only oneDNN knows"
)
aten = torch.ops.aten
COMPARISONS = {
    aten.lt: operator.lt, aten.le: operator.le, aten.gt: operator.gt, aten.ge: operator.ge,
    aten.eq: operator.eq, aten.ne: operator.ne,
}  # fmt: skip


@contextlib.contextmanager
def fake_device(architecture: str, left_out: list[str] | None = None) -> Iterator[torch.device]:
    """Within, tensors made on the device it gives own no memory.

    architecture: cpu, or sm80, sm90 for CUDA. left_out takes a sentence for each operator that needs
    memory which no rule knows. Raises ValueError where there is neither a GPU nor a
    C++ compiler to do without, and NotPredictableError for an operator without a rule.
    """
    is_imagined = architecture != "cpu" and not torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        if is_imagined:
            stack.enter_context(cuda_without_gpu(architecture))
            attend = attention_of(architecture)
            stack.enter_context(
                mock.patch("torch.nn.functional.scaled_dot_product_attention", attend)
            )
        if architecture != "cpu":
            stack.enter_context(cudnn_recurrent_layers([] if left_out is None else left_out))
        elif torch.backends.mkldnn.is_available():
            error = NotPredictableError(LSTM_ON_A_CPU)
            stack.enter_context(layers_that_raise(error, ("lstm",)))
        stack.enter_context(mock.patch("torch.utils.swap_tensors", _take_over))
        stack.enter_context(mock.patch.object(FakeTensorMode, "__deepcopy__", _itself, create=True))
        # Without a rule torch tries an operator on zeros, for which there has to be the device.
        stack.enter_context(
            FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=not is_imagined)
        )
        values = stack.enter_context(FakeValues())
        stack.enter_context(values.explaining())
        yield torch.device("cpu" if architecture == "cpu" else "cuda:0")


def _take_over(tensor: Any, other: Any) -> None:
    """In place of swapping the two, for Module.to, which has no further use for the other: torch does
    not swap fake tensors, since FakeTensorMode holds them weakly (pytorch pull request 196558).
    """
    tensor.data = other.data
    tensor.fake_device = other.fake_device


def _itself(mode: FakeTensorMode, memo: Any) -> FakeTensorMode:
    """A mode's deep copy: a copied tensor of another mode would have a storage of its own for every
    operator (nn.TransformerEncoder copies its layer). Not a subclass with this method: torch looks
    up the rules of higher-order operators, such as Triton kernels, by the mode's exact type.
    """
    return mode


class FakeValues(TorchDispatchMode):
    """Answers the host's question for a value, and says which operator cannot do without.

    A value that torch has kept (of a small tensor written out in Python, on a CPU) is known. `any`
    of something is false (nothing is infinite, nothing has to be drawn again), loss scaling finds no
    infinity, and every other value is one, also where it is compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self._false: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._line = ""
        self._questions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._false.add(args[1].untyped_storage())
        if func is aten._local_scalar_dense.default and _constant(args[0]) is None:
            self._require_progress()
            value = args[0].untyped_storage() not in self._false
            return float(value) if args[0].is_floating_point() else int(value)
        if func is aten.equal.default:
            return True
        try:
            result = RULES.get(func, func)(*args, **(kwargs or {}))
        except WITHOUT_RULE as error:
            raise NotPredictableError(f"{func} {_why(error)}") from None
        if func.overloadpacket is aten.any or self._is_false(func, args):
            self._false.add(result.untyped_storage())
        return result

    def _is_false(self, func: Any, args: Any) -> bool:
        """Whether ones do not compare so, or are said of something false to be all true."""
        if func.overloadpacket is aten.all:
            return args[0].untyped_storage() in self._false
        compare = COMPARISONS.get(func.overloadpacket)
        return compare is not None and not compare(
            *(1 if isinstance(value, Tensor) else value for value in args[:2])
        )

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error that follows an answered question may be the answer's: it names the line."""
        try:
            yield
        except NotPredictableError:
            raise
        except Exception as error:
            if not self._line:
                raise
            raise NotPredictableError(
                f"{self._line} asks for a value, which a prediction does not have; then came "
                f"{type(error).__name__}: {_first_line(error)}"
            ) from error

    def _require_progress(self) -> None:
        """Raises NotPredictableError where a line asks without end: a loop waits for an answer."""
        line = program_line()
        self._questions = self._questions + 1 if line == self._line else 1
        self._line = line
        if self._questions > MOST_QUESTIONS:
            raise NotPredictableError(
                f"{line} asks for values of tensors without end, and a prediction has none"
            )


def _constant(tensor: Tensor) -> Tensor | None:
    """The values that torch has kept of a tensor without memory."""
    return getattr(tensor, "constant", None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _why(error: Exception) -> str:
    if isinstance(error, DynamicOutputShapeException):
        return BY_VALUES
    if isinstance(error, DataDependentOutputException):
        return "gives the host a value that depends on its input's"
    return "has no rule for the shape of its result"
