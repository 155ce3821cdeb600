"""A process that must not outlive the one that started it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """From now on this process ends when its multiprocessing parent does, however that was ended."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
