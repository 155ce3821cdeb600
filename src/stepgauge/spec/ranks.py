"""What the traces of several ranks say together: who waited in which collective, and for whom."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCollective:
    """Calls of one collective of one group, matched across its ranks in order.

    A call can move data only once its last rank has come: `transfer_us` is the last rank's time in
    it, `waiting_us` what the others spent beyond that, the mean over all ranks. Both are of all
    calls. No clocks are compared.

    bus_bytes_per_s  of the transfer alone, as nccl-tests derives it; 0 where size or group is unknown
    last, last_calls  the rank that made the others wait longest, and in how many calls it came last
    """

    name: str
    range: str
    group_size: int
    dtype: str
    bytes: int
    calls: int
    transfer_us: float
    waiting_us: float
    bus_bytes_per_s: float
    last: int
    last_calls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """One rank, over all calls: how long it waited, how long it made the others wait (their mean),
    and in what it spent most beyond the other ranks' mean: a kind of work in a range, or idle time.
    """

    rank: int
    waited_us: float
    made_wait_us: float
    calls_last: int
    most_in: str
    excess_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossRanks:
    collectives: list[SharedCollective]
    stragglers: list[Straggler]
    notes: list[str]
