"""Other processes as tests see them: whether one lives, and waiting for what one will do."""

import os
import time


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, seconds=90):
    """What the condition gives as soon as it holds; nothing after the seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    return None
