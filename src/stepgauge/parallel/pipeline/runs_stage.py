"""What runs a stage of a rank: eagerly (Stage), or from CUDA graphs (GraphedStage)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from stepgauge.parallel.pipeline.between import Given, Meta


class RunsStage(ABC):
    """F, I, W and B of a stage's micro-batches, and what goes before and after them.

    splits     whether its backward is run in two parts
    num_slots  how many micro-batches there is room for between forward and backward; None: any
    """

    module: nn.Module
    splits: bool
    num_slots: int | None = None

    @abstractmethod
    def prepare(
        self, inputs: Sequence[Tensor], trained: Sequence[bool], targets: Sequence[Tensor] = ()
    ) -> tuple[Given, list[Tensor]]:
        """What the stage gives of the inputs, before the first step; `trained` says which of them
        depend on trained weights.
        """

    def record(
        self, inputs: Sequence[Meta], outputs: Sequence[Meta], targets: Sequence[Tensor]
    ) -> None:
        """After `prepare`, when it is known what all stages give each other."""
        return

    def begin(self) -> None:
        """Before a step."""
        return

    def finish(self) -> None:
        """When the gradients of a step are there."""
        return

    @abstractmethod
    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        trained: Sequence[bool],
        targets: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """F. `trained` says which inputs get a gradient; the last stage gets the targets."""

    @abstractmethod
    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """I: the gradients of the inputs, by position.

        gradients  of the outputs; None where nothing came back
        """

    @abstractmethod
    def backward_weight(self, micro_batch: int) -> None:
        """W. Nothing is left of the micro-batch afterwards."""

    @abstractmethod
    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor | None]:
        """B."""

    @abstractmethod
    def evaluate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """What the stage gives, of which nothing is kept."""

    @abstractmethod
    def close(self) -> None:
        """Gives the module back as it was."""
