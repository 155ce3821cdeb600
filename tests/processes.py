"""Helpers for tests that start other processes."""

import os
import time


def alive(process):
    """Returns True if a process with this id exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, seconds=300):
    """Waits until condition() is true and returns its value, or None after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    return None
