"""Context parallel as data: which tokens each rank has, and which queries meet which keys.

Head exchange (Ulysses): each rank has a contiguous range of the tokens. For attention, ranks
exchange tokens for heads, so that each has all tokens of some heads.

Ring (ring attention, Liu et al. 2023, with pairs of chunks that give causal ranks equal work): the
sequence is cut into 2N chunks, and rank r has chunks r and 2N-1-r. In step s the rank attends to
the keys of rank r-s. With a causal mask, a half is either seen entirely or not at all, so no masked
product is computed: every step after the first costs half of an unmasked one, on every rank.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RingStep:
    """One step of the ring: some of the rank's queries attend to some of the keys of rank `source`.

    queries, keys  "all", "first" or "second" of the two chunks that a rank has
    is_causal      query i of the piece sees keys up to i; otherwise it sees all of them
    """

    source: int
    queries: str = "all"
    keys: str = "all"
    is_causal: bool = False


def ring_positions(length: int, rank: int, ranks: int) -> list[int]:
    """Returns the positions of the rank's tokens in the sequence, for ring attention.

    Raises ValueError if the length is not a multiple of 2N.
    """
    size, rest = divmod(length, 2 * ranks)
    if rest or not size:
        raise ValueError(
            f"the sequence has {length} tokens; context parallel over {ranks} ranks cuts it into "
            f"{2 * ranks} equal chunks: choose a multiple of {2 * ranks}"
        )
    chunks = (rank, 2 * ranks - 1 - rank)
    return [i for chunk in chunks for i in range(chunk * size, (chunk + 1) * size)]


def contiguous_positions(length: int, rank: int, ranks: int) -> range:
    """Returns the positions of the rank's tokens in the sequence, for head exchange.

    Raises ValueError if the length is not a multiple of N.
    """
    size, rest = divmod(length, ranks)
    if rest or not size:
        raise ValueError(
            f"the sequence has {length} tokens; {ranks} ranks that exchange heads have equal parts "
            f"of it: choose a multiple of {ranks}"
        )
    return range(rank * size, (rank + 1) * size)


MAX_HEAD_GROUPS = 2  # four lose: docs/log/2026-11-28-heads-by-copies.md


def num_head_groups(key_heads: int, ranks: int) -> int:
    """Returns in how many groups heads are exchanged. With two, one travels while the other attends."""
    return MAX_HEAD_GROUPS if key_heads % (MAX_HEAD_GROUPS * ranks) == 0 else 1


def chunk_slice(part: str, length: int) -> slice:
    """Returns the slice of a rank's tokens that "all", "first" or "second" stands for."""
    middle = length // 2
    return {
        "all": slice(0, length),
        "first": slice(0, middle),
        "second": slice(middle, length),
    }[part]


def plan_ring(rank: int, ranks: int, *, is_causal: bool) -> list[RingStep]:
    """Returns the steps of the rank; the first is with its own keys."""
    steps = []
    for number in range(ranks):
        source = (rank - number) % ranks
        if not is_causal:
            steps.append(RingStep(source))
        elif source == rank:
            steps.append(RingStep(source, is_causal=True))
        elif source < rank:  # the query chunks lie between the two chunks of the source
            steps.append(RingStep(source, keys="first"))
        else:  # only the second query chunk lies after the chunks of the source
            steps.append(RingStep(source, queries="second"))
    return steps
