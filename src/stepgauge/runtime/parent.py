"""Ends a process together with the one that started it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Makes this process exit as soon as its multiprocessing parent ends, even if that is killed."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
