"""One training step, in its three phases. What `bench step` times is what `train` trains with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepgauge.parallel.training import Parallel
from stepgauge.train.precision import Precision


class TrainingStep:
    """forward, backward and update of a module that gives its loss: `module(*batch)` -> scalar.

    `forward` may be called several times before `update`, each with its share of the loss:
    gradients add up. `parallel` says what other ranks have to do with it. `brings_optimizer`: the
    optimizer is of a user's own file.
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
        self.compute_loss = module if compute_loss is None else compute_loss
        self.parallel = parallel or Parallel(module=module, optimizer=optimizer)
        self.brings_optimizer = brings_optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)

    @property
    def optimizer_name(self) -> str:
        """The class that steps, and whether the user's file brought it."""
        return f"{'user ' if self.brings_optimizer else ''}{type(self.optimizer).__name__}"

    def phases(
        self, batch: Sequence[Any], *, until: str = "step", synchronize: bool = False
    ) -> dict[str, Callable[[], None]]:
        """The phases of a step by name, in order; each leaves behind only what the next one needs.

        until        "forward": it alone, without gradients; "backward": with its forward, from
                     gradients that are None; "step": with the optimizer
        synchronize  the wait for other ranks is a phase of its own, and not the optimizer's
        """
        loss: list[Tensor] = []

        def forward() -> None:
            if until == "backward":
                self.optimizer.zero_grad(set_to_none=True)
            loss.append(self.forward(*batch))

        def forward_alone() -> None:
            with torch.no_grad():
                self.forward(*batch)

        def backward() -> None:
            self.backward(loss.pop())

        if until == "forward":
            return {"forward": forward_alone}
        phases = {"forward": forward, "backward": backward}
        if until == "step":
            phases |= {"synchronize": self.synchronize} if synchronize else {}
            phases["optimizer"] = self.update
        return phases

    def forward(self, *batch: Any) -> Tensor:
        """The loss of the batch: of ours tokens_BT and targets_BT."""
        with self.precision.autocasting(self.device):
            return self.compute_loss(*batch)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def synchronize(self) -> None:
        """Waits for what other ranks have to do with the gradients."""
        self.parallel.finish()

    def update(self) -> None:
        """Synchronizes if that is not done, clips, steps the optimizer and frees the gradients."""
        self.synchronize()
        if self.max_gradient_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.parallel.clip_gradients(self.max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
