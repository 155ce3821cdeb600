"""One training step in its three phases. `bench step` times the same step that `train` uses."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.counted_mean import weighted
from stepgauge.parallel.training import Parallel
from stepgauge.train.precision import Precision


class TrainingStep:
    """Forward, backward and update of a module that returns its loss: `module(*batch)` -> scalar.

    Gradients accumulate, so `forward` and `backward` may be called several times before `update`.

    parallel          how the step is distributed over ranks
    brings_optimizer  True if the optimizer comes from a user's file
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        device: torch.device,
        *,
        max_gradient_norm: float | None = None,
        compute_loss: Callable[..., Tensor] | None = None,
        parallel: Parallel | None = None,
        brings_optimizer: bool = False,
    ):
        self.module = module
        self.optimizer = optimizer
        self.precision = precision
        self.device = device
        self.max_gradient_norm = max_gradient_norm
        self.parallel = parallel or Parallel(module=module, optimizer=optimizer)
        self.compute_loss = self.parallel.module if compute_loss is None else compute_loss
        self.brings_optimizer = brings_optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)

    @property
    def optimizer_name(self) -> str:
        """The optimizer's class, after "user" if the user's file brought it."""
        return f"{'user ' if self.brings_optimizer else ''}{type(self.optimizer).__name__}"

    def phases(self, batch: Sequence[Any], *, until: str = "step") -> dict[str, Callable[[], None]]:
        """Returns the phases of a step by name, in the order in which they are called. Backward ends
        when `.grad` has the gradient reduced over all ranks.

        until  "forward": only forward, without gradients; "backward": forward and backward, from
               gradients that are None; "step": also the optimizer. If a pipeline schedule mixes
               forward and backward, they are one phase
        """
        loss: list[Tensor] = []

        def zero() -> None:
            if until == "backward":
                self.optimizer.zero_grad(set_to_none=True)

        def forward() -> None:
            zero()
            loss.append(self.forward(*batch))

        def forward_alone() -> None:
            self.evaluate(batch)

        def backward() -> None:
            self.backward(loss.pop())

        def mixed() -> None:
            zero()
            self.gradients(batch)

        if until == "forward":
            return {"forward": forward_alone}
        phases = {"forward": forward, "backward": backward}
        if self.parallel.forward_backward is not None:
            phases = {"forward_and_backward": mixed}
        if until == "step":
            phases["optimizer"] = self.update
        return phases

    def gradients(self, batch: Sequence[Any], *, batches: int = 1) -> Tensor:
        """Runs forward and backward of one of `batches` micro-batches whose gradients accumulate.

        Returns its loss divided by `batches`, or zero if another rank has the loss.
        """
        if self.parallel.forward_backward is not None:
            return self.parallel.forward_backward(batch, batches)
        loss = self.forward(*batch) / batches
        self.backward(loss)
        return loss.detach()

    def accumulate(self, batches: Iterable[Sequence[Any]], *, count: int) -> Tensor:
        """Runs forward and backward of `count` micro-batches and returns their mean loss."""
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if number == count else self.parallel.no_sync():
                total += self.gradients(batch, batches=count)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Any]) -> Tensor:
        """Returns the loss of a batch, without gradients; zero if another rank has the loss."""
        if self.parallel.evaluate is not None:
            return self.parallel.evaluate(batch)
        return self.forward(*batch)

    def forward(self, *batch: Any) -> Tensor:
        """Returns the loss of a batch; for the Transformer presets (tokens_BT, targets_BT)."""
        weight = None if self.parallel.weight is None else self.parallel.weight(batch)
        with self.precision.autocasting(self.device):
            loss = self.compute_loss(*batch)
        return loss if weight is None else weighted(loss, weight)

    def backward(self, loss: Tensor) -> None:
        """Runs backward from the loss, scaled if the precision needs it."""
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """Clips the gradients, steps the optimizer and frees the gradients."""
        if self.max_gradient_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.parallel.clip_gradients(self.max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
