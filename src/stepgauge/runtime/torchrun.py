"""What torchrun tells a process in its environment. Needs no torch, so that help stays quick."""

import os

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def torchrun_numbers() -> tuple[int, int, int, int] | None:
    """Rank, world size, local rank and local world size; None in a process of another program.

    Shells in a cluster often have a part of the variables, RANK say: only the full set counts.
    """
    if not all(os.environ.get(name) for name in _ADDRESS):
        return None
    texts = [os.environ.get(name, "") for name in _NUMBERS]
    if not all(text.isdecimal() for text in texts):
        return None
    rank, size, local_rank, local_size = map(int, texts)
    return rank, size, local_rank, local_size


def is_first_process() -> bool:
    """Whether this process speaks for all: it does unless torchrun has made it another rank than 0."""
    numbers = torchrun_numbers()
    return numbers is None or numbers[0] == 0
