"""Compares a module that is cut by a table with the whole module."""

import copy
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stepgauge.parallel.named_state import plain_name
from stepgauge.parallel.replicas import device_of, prepare_replicas
from stepgauge.parallel.tensor_parallel.partial_gradients import listed
from stepgauge.parallel.tensor_parallel.tensor_parallel import TensorParallel, parallelize_tensor
from stepgauge.runtime.world import gathered_objects
from stepgauge.spec.plan.tensor import Table


def check_tensor_parallel(
    module: nn.Module, table: Table | None, compute_loss: Callable[[nn.Module], Tensor], *,
    group: dist.ProcessGroup | None = None, by_sequence: bool | None = None,
    by_token: bool | None = None,
) -> None:  # fmt: skip
    """Compares the loss and gradients of a module with those of a copy that is cut by the table, both
    eagerly. All ranks of the group must call it. It changes neither the module nor random numbers.

    compute_loss  called with the whole copy and with the cut one, with the same random numbers on
                  every rank; returns the loss

    Raises ValueError, on every rank, if a difference is larger than the rounding of the coarsest dtype
    that the whole copy computes in, and what parallelize_tensor raises. Also raises it if the cut copy
    fails, with the name of the module that fails. Small float64 networks show small differences best,
    with several sequences if the table cuts by token.
    """
    whole = copy.deepcopy(module)
    whole.zero_grad()
    prepare_replicas(whole, group)
    parallel = parallelize_tensor(
        copy.deepcopy(whole), table, group=group, by_sequence=by_sequence, by_token=by_token
    )
    with _CoarsestType() as coarsest:
        expected_loss = _backward(whole, compute_loss)
    loss = _backward_of_cut(parallel.module, compute_loss)
    results = gathered_objects(
        (
            _differs(loss, expected_loss, coarsest.eps),
            _differing_gradients(parallel, whole, coarsest.eps),
        ),
        group,
    )
    differing = ["the loss"] if any(loss_differs for loss_differs, _ in results) else []
    if different_names := {name for _, names in results for name in names}:
        differing.append(f"the gradients of {listed(different_names)}")
    if differing:
        raise ValueError(
            f"with this table {' and '.join(differing)} differ from those of the whole module by more "
            f"than rounding (docs/tensor-parallel.md)"
        )


class _CoarsestType(TorchFunctionMode):
    """Finds the largest rounding error among results that depend on parameters: autocast and norms
    compute in other dtypes than that of the parameters.
    """

    eps = 0.0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for each in results if isinstance(results, tuple | list) else (results,):
            if isinstance(each, Tensor) and each.requires_grad:
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return results


def _differing_gradients(parallel: TensorParallel, whole: nn.Module, eps: float) -> list[str]:
    """Returns the names of parameters with different gradients on this rank."""
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    largest = max((each.norm().item() for each in gradients.values()), default=0.0)
    names = []
    for name, parameter in parallel.module.named_parameters():
        expected = gradients.get(name)
        if expected is None or parameter.grad is None:
            is_different = expected is not parameter.grad
        else:
            is_different = _differs(parameter.grad, parallel.part(name, expected), eps, largest)
        names += [plain_name(name)] if is_different else []
    return names


def _backward(module: nn.Module, compute_loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """Returns the loss, after its backward. The random numbers are the same in every call."""
    device = device_of(module)
    eager = torch.compiler.set_stance("force_eager")  # torch.compile would trace the mode
    with eager, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        loss = compute_loss(module)
        loss.backward()
    return loss.detach()


def _backward_of_cut(module: nn.Module, compute_loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """Does the same as `_backward`. Raises ValueError at once if the cut module fails: other ranks may
    have failed too, and would not take part in a collective.
    """
    try:
        return _backward(module, compute_loss)
    except Exception as error:
        name, reason = _failed_module(module, error), str(error).partition("\n")[0]
        message = f"with this table {name} fails: {type(error).__name__}: {reason}"
        raise ValueError(message) from error


def _failed_module(module: nn.Module, error: Exception) -> str:
    """Returns the name of the innermost module whose code raised the error."""
    names = {id(each): plain_name(name) for name, each in module.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    failed = [names.get(id(frame.f_locals.get("self")), "") for frame in frames]
    return next(filter(None, reversed(failed)), "the network")


def _differs(value: Tensor, expected: Tensor, eps: float, largest: float = 0.0) -> bool:
    """True if the difference is larger than rounding.

    eps      the relative rounding error of a single operation
    largest  the norm of the largest gradient: a gradient that is zero up to rounding has rounding
             errors of the size of others
    """
    tolerance = eps**0.5 * expected.norm() + 100 * eps * largest
    return not bool((value - expected).norm() <= tolerance)  # True for NaN
