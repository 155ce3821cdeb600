"""What a pipeline schedule is made of: an action is (stage, kind, micro-batch), a schedule a list
of actions a rank. The names are those of torch.distributed.pipelining.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
SENDS, RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
UNSHARD, RESHARD, REDUCE = "UNSHARD", "RESHARD", "REDUCE_GRAD"
OF_STAGES = (UNSHARD, RESHARD, REDUCE)  # of a stage, whatever the micro-batch
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *OF_STAGES)


class Channel(NamedTuple):
    """One direction of the edge between two neighbouring stages; it has a communicator of its own."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"stage {self.sender} to {self.receiver}"


class Action(NamedTuple):
    """What one rank does next.

    kind  F forward, B whole backward, I gradient of the stage's input, W gradient of its weights;
          SEND_F, RECV_F of activations and SEND_B, RECV_B of their gradients; UNSHARD, RESHARD,
          REDUCE_GRAD of a stage's weights, which have no micro-batch (-1)
    """

    stage: int
    kind: str
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @property
    def channel(self) -> Channel:
        """Where a SEND or RECV travels."""
        after, before = self.stage + 1, self.stage - 1
        if self.kind in SENDS:
            return Channel(self.stage, after if self.kind == SEND_F else before)
        assert self.kind in RECEIVES, f"{self} does not travel"
        return Channel(before if self.kind == RECV_F else after, self.stage)

    @property
    def sent(self) -> Self:
        """The SEND that a RECV takes, and a SEND itself."""
        kind = {RECV_F: SEND_F, RECV_B: SEND_B}.get(self.kind, self.kind)
        return self._replace(stage=self.channel.sender, kind=kind)

    @property
    def received(self) -> Self:
        """The RECV that takes a SEND, and a RECV itself."""
        kind = {SEND_F: RECV_F, SEND_B: RECV_B}.get(self.kind, self.kind)
        return self._replace(stage=self.channel.receiver, kind=kind)


class ScheduleError(ValueError):
    """A schedule that cannot run; `actions` are those that prove it."""

    def __init__(self, message: str, actions: Sequence[Action] = ()):
        super().__init__(message)
        self.actions = tuple(actions)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in the order in which it runs them.

    Raises ScheduleError where there is nothing to run, or a stage is on two ranks.
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        for rank, actions in enumerate(self.ranks):
            if not any(action.is_compute for action in actions):
                raise ScheduleError(f"rank {rank} of {len(self.ranks)} has nothing to compute")
        self.rank_of  # noqa: B018 - raises where a stage is on two ranks

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, a rank after the other."""
        return ((rank, action) for rank, row in enumerate(self.ranks) for action in row)

    @functools.cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank that each stage is on."""
        found: dict[int, tuple[int, Action]] = {}
        for rank, action in self:
            other, first = found.setdefault(action.stage, (rank, action))
            if other != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on rank {other} ({first}) and on rank {rank} ({action})",
                    (first, action),
                )
        return {stage: rank for stage, (rank, _) in sorted(found.items())}

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def num_stages(self) -> int:
        return max(self.rank_of) + 1

    @functools.cached_property
    def num_micro_batches(self) -> int:
        return max(action.micro_batch for _, action in self) + 1

    @functools.cached_property
    def is_lowered(self) -> bool:
        """Whether sends, receives and the like are in it."""
        return any(not action.is_compute for _, action in self)

    @property
    def compute(self) -> Self:
        """The schedule without what lowering adds."""
        rows = tuple(tuple(action for action in row if action.is_compute) for row in self.ranks)
        return dataclasses.replace(self, ranks=rows)

    def stages(self, rank: int) -> list[int]:
        """The stages of a rank, the first one first."""
        return [stage for stage, owner in self.rank_of.items() if owner == rank]

    def splits(self, stage: int) -> bool:
        """Whether a backward of the stage is run in two parts, I and W."""
        return any(
            action.stage == stage and action.kind == INPUT
            for action in self.ranks[self.rank_of[stage]]
        )

    def in_flight(self, stage: int) -> int:
        """The most micro-batches of a stage that are between their F and the end of their backward."""
        row = [action for action in self.ranks[self.rank_of[stage]] if action.stage == stage]
        ends = {action.micro_batch: action for action in row if action.kind in (BACKWARD, WEIGHT)}
        live = most = 0
        for action in row:
            live += (action.kind == FORWARD) - (action == ends.get(action.micro_batch))
            most = max(most, live)
        return most

    def crosses(self, stage: int, other: int) -> bool:
        """Whether both stages exist and are on different ranks."""
        ranks = self.rank_of
        return stage in ranks and other in ranks and ranks[stage] != ranks[other]
