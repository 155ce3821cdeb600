"""Fake tensors on a device that this machine may not have.

torch's fake tensors own no memory: they run the shape rules of operators, but no kernels. Without a
GPU, fake CUDA tensors need cuda_without_gpu.py. torch chooses the backend of attention by querying the
GPU; attention_backend.py makes the same choice without one.
"""

import contextlib
import logging
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
from stepgauge.measure.memory.missing_rules import RULES, SIZE_BY_VALUES, NotPredictableError
from stepgauge.measure.memory.recurrent import cudnn_recurrent_layers, layers_that_raise
from stepgauge.measure.memory.storage_tracker import program_line

MOST_READS = 50_000  # consecutive reads of values by one line of the program
WITHOUT_RULE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# On fake tensors torch decomposes the layers, which keeps only half as much.
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
    """Yields a device on which tensors are fake inside the context.

    architecture  cpu, or sm80 or sm90 for CUDA
    left_out      gets a sentence for each operator whose memory is not known completely

    Raises ValueError if there is neither a GPU nor a C++ compiler, and NotPredictableError for an
    operator without a shape rule.
    """
    is_simulated = architecture != "cpu" and not torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        # torch logs the traceback of an operator that raises; whoever catches the error reports it.
        logger = logging.getLogger(FakeTensorMode.__module__)
        stack.enter_context(mock.patch.object(logger, "disabled", True))
        if is_simulated:
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
        stack.enter_context(mock.patch("torch.utils.swap_tensors", _replace_data))
        stack.enter_context(mock.patch.object(FakeTensorMode, "__deepcopy__", _itself, create=True))
        # If an operator has no rule, torch runs it on zeros, which needs the real device.
        stack.enter_context(
            FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=not is_simulated)
        )
        values = stack.enter_context(FakeValues())
        stack.enter_context(values.explaining_errors())
        yield torch.device("cpu" if architecture == "cpu" else "cuda:0")


def _replace_data(tensor: Any, other: Any) -> None:
    """Replaces torch.utils.swap_tensors for Module.to, which does not use `other` afterwards. torch
    cannot swap fake tensors, because FakeTensorMode holds weak references to them (pytorch pull
    request 196558).
    """
    tensor.data = other.data
    tensor.fake_device = other.fake_device


def _itself(mode: FakeTensorMode, memo: Any) -> FakeTensorMode:
    """Deep-copies a mode as itself. Otherwise a copied tensor would belong to another mode and get a
    new storage in every operator (nn.TransformerEncoder copies its layer). A subclass with this
    method would not work: torch looks up the rules of higher-order operators, such as Triton
    kernels, by the mode's exact type.
    """
    return mode


class FakeValues(TorchDispatchMode):
    """Returns values when the program reads them from fake tensors, and names operators that need
    real values.

    torch keeps the values of small CPU tensors written out in Python; these are used. `any` is false,
    so that nothing is infinite and nothing is drawn again, and loss scaling finds no infinity. Every
    other value is 1, also in comparisons.
    """

    def __init__(self) -> None:
        super().__init__()
        self._false: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._line = ""
        self._num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._false.add(args[1].untyped_storage())
        # `constant` has the values that torch has kept of a fake tensor.
        if func is aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            self._count_read()
            value = args[0].untyped_storage() not in self._false
            return float(value) if args[0].is_floating_point() else int(value)
        if func is aten.equal.default:
            return True
        try:
            result = RULES.get(func, func)(*args, **(kwargs or {}))
        except WITHOUT_RULE as error:
            raise NotPredictableError(f"{func} {_reason(error)}") from None
        if func.overloadpacket is aten.any or self._is_false(func, args):
            self._false.add(result.untyped_storage())
        return result

    def _is_false(self, func: Any, args: Any) -> bool:
        """True for a comparison that does not hold for ones, and for `all` of something false."""
        if func.overloadpacket is aten.all:
            return args[0].untyped_storage() in self._false
        compare = COMPARISONS.get(func.overloadpacket)
        return compare is not None and not compare(
            *(1 if isinstance(value, Tensor) else value for value in args[:2])
        )

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """If an error follows a read value, the value may be its cause: adds the line that read it."""
        try:
            yield
        except NotPredictableError:
            raise
        except Exception as error:
            if not self._line:
                raise
            first_line = next(iter(str(error).strip().splitlines()), "no message")
            raise NotPredictableError(
                f"{self._line} reads a tensor's value, which a prediction does not have; then came "
                f"{type(error).__name__}: {first_line}"
            ) from error

    def _count_read(self) -> None:
        """Raises NotPredictableError if one line reads values endlessly: a loop waits for a value."""
        line = program_line()
        self._num_reads = self._num_reads + 1 if line == self._line else 1
        self._line = line
        if self._num_reads > MOST_READS:
            raise NotPredictableError(
                f"{line} reads values of tensors in an endless loop, and a prediction has none"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, DynamicOutputShapeException):
        return SIZE_BY_VALUES
    if isinstance(error, DataDependentOutputException):
        return "returns a value to the host that depends on the values of its input"
    return "has no rule for the shape of its result"
