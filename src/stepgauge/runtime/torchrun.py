"""Reads the environment variables of torchrun, without importing torch, so that help is quick."""

import os

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def torchrun_numbers() -> tuple[int, int, int, int] | None:
    """Returns rank, world size, local rank and local world size; None without torchrun.

    Only the full set of variables counts, because shells on clusters often define some, such as RANK.
    """
    if not all(os.environ.get(name) for name in _ADDRESS):
        return None
    texts = [os.environ.get(name, "") for name in _NUMBERS]
    if not all(text.isdecimal() for text in texts):
        return None
    rank, size, local_rank, local_size = map(int, texts)
    return rank, size, local_rank, local_size


def is_first_process() -> bool:
    """Returns True unless torchrun made this process a rank other than 0."""
    numbers = torchrun_numbers()
    return numbers is None or numbers[0] == 0
