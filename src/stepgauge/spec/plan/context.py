"""Context parallel as data: which tokens each rank has, and which of its queries meet which keys.


Where ranks exchange heads (Ulysses), each has a run of tokens, and all tokens of some heads meanwhile.

In a ring (ring attention, Liu et al. 2023; cut in pairs of chunks so that causal ranks have equal
work) the sequence is cut into 2N chunks, and rank r has chunks r and 2N-1-r. In step s it meets the
keys of rank r-s. With a causal mask whole halves are seen or not, so no product is computed in vain:
each step but the first is half of a full one, on every rank.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Meeting:
    """One step of the ring: the rank's queries and the keys of rank `source`, by halves.

    queries, keys  "all", "first" or "second" of the two chunks that a rank has
    is_causal      query i of the piece sees keys up to i; otherwise all of them
    """

    source: int
    queries: str = "all"
    keys: str = "all"
    is_causal: bool = False


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2N chunks of the sequence that the rank has, in their order."""
    return rank, 2 * ranks - 1 - rank


def positions_of(length: int, rank: int, ranks: int) -> list[int]:
    """The positions of the rank's tokens in a sequence of that length. Raises ValueError for one
    that 2N chunks do not divide.
    """
    size, rest = divmod(length, 2 * ranks)
    if rest or not size:
        raise ValueError(
            f"the sequence has {length} tokens; context parallel over {ranks} ranks cuts it into "
            f"{2 * ranks} equal chunks: choose a multiple of {2 * ranks}"
        )
    return [i for chunk in chunks_of(rank, ranks) for i in range(chunk * size, (chunk + 1) * size)]


def run_of(length: int, rank: int, ranks: int) -> range:
    """The positions of the rank's tokens where each has a run of them. Raises ValueError for a
    length that N does not divide.
    """
    size, rest = divmod(length, ranks)
    if rest or not size:
        raise ValueError(
            f"the sequence has {length} tokens; {ranks} ranks that exchange heads have equal runs "
            f"of them: choose a multiple of {ranks}"
        )
    return range(rank * size, (rank + 1) * size)


MOST_HEAD_GROUPS = 2


def num_head_groups(key_heads: int, ranks: int) -> int:
    """Groups in which heads are exchanged: one travels while another attends."""
    return MOST_HEAD_GROUPS if key_heads % (MOST_HEAD_GROUPS * ranks) == 0 else 1


def half(part: str, length: int) -> slice:
    """What "all", "first" or "second" is of a rank's tokens."""
    middle = length // 2
    return {
        "all": slice(0, length),
        "first": slice(0, middle),
        "second": slice(middle, length),
    }[part]


def plan_ring(rank: int, ranks: int, *, is_causal: bool) -> list[Meeting]:
    """The steps of the rank, its own keys first."""
    meetings = []
    for step in range(ranks):
        source = (rank - step) % ranks
        if not is_causal:
            meetings.append(Meeting(source))
        elif source == rank:
            meetings.append(Meeting(source, is_causal=True))
        elif source < rank:  # both chunks of the queries come after its first, before its second
            meetings.append(Meeting(source, keys="first"))
        else:  # only the second chunk of the queries comes after its chunks
            meetings.append(Meeting(source, queries="second"))
    return meetings
