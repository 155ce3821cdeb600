"""A training loop that runs in one process on the batches of all ranks, or wrapped on this rank's."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stepgauge.parallel.named_state import load_state, state_of
from stepgauge.parallel.training import Parallel, single_process
from stepgauge.parallel.wrappers import Settings, parallelise

ROWS, WIDTH = 3, 6
OURS = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")
TORCHS = ("torch-ddp", "torch-zero1", "torch-fsdp")
WRAPPERS = (*OURS, *TORCHS)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a behaviour is run. Wrapper "none" is the oracle: one process with the batches of all ranks."""

    wrapper: str
    group: dist.ProcessGroup | None = None

    @property
    def batches(self) -> range:
        """Returns the ranks whose batches this process computes."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return range(ranks) if self.wrapper == "none" else range(rank, rank + 1)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


class Training:
    """A module and its optimizer under a wrapper, with the operations of a training loop."""

    def __init__(
        self,
        setup: Setup,
        module: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = SGD,
        *,
        groups: Callable[[nn.Module], list] = lambda module: [{"params": [*module.parameters()]}],
    ):
        self.setup, self.inner = setup, module
        self.parallel = _wrap(setup, module, groups, optimizer)
        self.module, self.optimizer = self.parallel.module, self.parallel.optimizer

    def parameter(self, name: str) -> nn.Parameter:
        return self.inner.get_parameter(name)

    def loss(self, step: int, rank: int, **how) -> torch.Tensor:
        return self.module(batch(step, rank), **how).square().mean()

    def backward(self, step: int, loss: Callable[..., torch.Tensor] | None = None, **how) -> None:
        """Computes the gradients of the mean over ranks of loss(step, rank)."""
        compute = loss or self.loss
        losses = [compute(step, rank, **how) for rank in self.setup.batches]
        (sum(losses) / len(losses)).backward()

    def backward_that_fails(self, step: int, block: int = 1) -> None:
        """Runs a backward on each rank that fails when it reaches the block's matrix."""
        with fails_in_backward(self.inner.blocks[block].linear):
            for rank in self.setup.batches:
                with contextlib.suppress(FailedError):
                    (self.loss(step, rank) / len(self.setup.batches)).backward()

    def step(self) -> None:
        self.optimizer.step()

    def train(self, *steps: int, **how) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step, **how)
            self.step()

    def results(self) -> dict[str, torch.Tensor]:
        """Returns every weight, whole."""
        return {name: whole(weight) for name, weight in self.inner.named_parameters()}

    def gradient_norm(self) -> torch.Tensor:
        return whole(self.parallel.clip_gradients(float("inf")))


class FailedError(Exception):
    """A behaviour raises it inside forward or backward."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _wrap(setup: Setup, module: nn.Module, groups, optimizer) -> Parallel:
    if setup.wrapper == "none":
        return single_process(module, groups, optimizer)
    if setup.wrapper in ("torch-ddp", "torch-zero1"):
        return _torch_ddp(setup, module, groups, optimizer)
    settings = Settings(bucket_mb=0.0005, group=setup.group)
    return parallelise(setup.wrapper, module, groups, optimizer, settings=settings)


def _torch_ddp(setup: Setup, module: nn.Module, groups, optimizer) -> Parallel:
    """Wraps a module in DDP with find_unused_parameters, as torch's documentation recommends."""
    wrapped = DistributedDataParallel(
        module, find_unused_parameters=True, process_group=setup.group
    )
    if setup.wrapper == "torch-ddp":
        built = optimizer(groups(module))
        return Parallel(
            module=wrapped,
            optimizer=built,
            no_sync=wrapped.no_sync,
            state=lambda: state_of(module, built),
            load=lambda state: load_state(module, built, state),
        )
    sharded = ZeroRedundancyOptimizer(groups(module), optimizer, process_group=setup.group)

    def state():
        sharded.consolidate_state_dict(to=0)
        whole = sharded.state_dict() if dist.get_rank() == 0 else None
        return {"model": module.state_dict(), "optimizer": whole}

    def load(state):
        module.load_state_dict(state["model"])
        sharded.load_state_dict(state["optimizer"])

    return Parallel(
        module=wrapped, optimizer=sharded, no_sync=wrapped.no_sync, state=state, load=load
    )


@contextlib.contextmanager
def fails_in_backward(module: nn.Module):
    """Raises FailedError when backward reaches the module's output."""

    def fail(_):
        raise FailedError

    handle = module.register_forward_hook(lambda *call: call[-1].register_hook(fail) and None)
    yield
    handle.remove()
