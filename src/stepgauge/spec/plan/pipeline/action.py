"""The parts of a pipeline schedule: an action is (stage, kind, micro-batch), and a schedule has one
list of actions per rank. Kinds are named as in torch.distributed.pipelining.
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
STAGE_WORK = (UNSHARD, RESHARD, REDUCE)  # done once per stage, without a micro-batch
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *STAGE_WORK)


class Channel(NamedTuple):
    """One direction between two neighbouring stages. Each channel has its own communicator."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"stage {self.sender} to {self.receiver}"


class Action(NamedTuple):
    """One step of a rank's work.

    kind         F: forward; B: whole backward; I: gradient of the stage's input; W: gradients of
                 its weights; SEND_F, RECV_F: activations; SEND_B, RECV_B: gradients of activations;
                 UNSHARD, RESHARD, REDUCE_GRAD: work on the stage's weights and gradients
    micro_batch  -1 for UNSHARD, RESHARD and REDUCE_GRAD, which have none
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
        """The channel of a SEND or RECV."""
        after, before = self.stage + 1, self.stage - 1
        if self.kind in SENDS:
            return Channel(self.stage, after if self.kind == SEND_F else before)
        assert self.kind in RECEIVES, f"{self} is neither a send nor a receive"
        return Channel(before if self.kind == RECV_F else after, self.stage)

    @property
    def as_send(self) -> Self:
        """The SEND that matches this RECV; a SEND returns itself."""
        kind = {RECV_F: SEND_F, RECV_B: SEND_B}.get(self.kind, self.kind)
        return self._replace(stage=self.channel.sender, kind=kind)

    @property
    def as_receive(self) -> Self:
        """The RECV that matches this SEND; a RECV returns itself."""
        kind = {SEND_F: RECV_F, SEND_B: RECV_B}.get(self.kind, self.kind)
        return self._replace(stage=self.channel.receiver, kind=kind)


class ScheduleError(ValueError):
    """A schedule cannot run. `actions` are the ones that show why."""

    def __init__(self, message: str, actions: Sequence[Action] = ()):
        super().__init__(message)
        self.actions = tuple(actions)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in the order in which it runs them.

    Raises ScheduleError if a rank has nothing to compute or a stage is on two ranks.
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        for rank, actions in enumerate(self.ranks):
            if not any(action.is_compute for action in actions):
                raise ScheduleError(f"rank {rank} of {len(self.ranks)} has nothing to compute")
        self.rank_of  # noqa: B018 - raises if a stage is on two ranks

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Yields every action with its rank, one rank after the other."""
        return ((rank, action) for rank, row in enumerate(self.ranks) for action in row)

    @functools.cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank that each stage is on."""
        owners: dict[int, tuple[int, Action]] = {}
        for rank, action in self:
            other, first = owners.setdefault(action.stage, (rank, action))
            if other != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on rank {other} ({first}) and on rank {rank} ({action})",
                    (first, action),
                )
        return {stage: rank for stage, (rank, _) in sorted(owners.items())}

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
        """True if the schedule has actions that `lower` adds, such as sends and receives."""
        return any(not action.is_compute for _, action in self)

    @property
    def compute(self) -> Self:
        """The schedule without the actions that `lower` adds."""
        rows = tuple(tuple(action for action in row if action.is_compute) for row in self.ranks)
        return dataclasses.replace(self, ranks=rows)

    def stages(self, rank: int) -> list[int]:
        """The stages of a rank, in ascending order."""
        return list(self._stages_by_rank[rank])

    @functools.cached_property
    def _stages_by_rank(self) -> Sequence[Sequence[int]]:
        stages: list[list[int]] = [[] for _ in self.ranks]
        for stage, rank in self.rank_of.items():
            stages[rank].append(stage)
        return stages

    def splits(self, stage: int) -> bool:
        """True if the stage runs any backward in two parts, I and W."""
        return any(
            action.stage == stage and action.kind == INPUT
            for action in self.ranks[self.rank_of[stage]]
        )

    def in_flight(self, stage: int) -> int:
        """The largest number of the stage's micro-batches between F and the end of backward."""
        row = [action for action in self.ranks[self.rank_of[stage]] if action.stage == stage]
        ends = {action.micro_batch: action for action in row if action.kind in (BACKWARD, WEIGHT)}
        live = most = 0
        for action in row:
            live += (action.kind == FORWARD) - (action == ends.get(action.micro_batch))
            most = max(most, live)
        return most

    def crosses(self, stage: int, other: int) -> bool:
        """True if both stages exist and are on different ranks."""
        ranks = self.rank_of
        return stage in ranks and other in ranks and ranks[stage] != ranks[other]
