"""What a process says of its progress comes to whoever called it, before its answer."""

import types
from unittest import mock

import pytest

from stepgauge.runtime import progress
from stepgauge.runtime.workers import Workers


def speaks(value):
    begun = progress._last + 10  # after all that this process has told

    def tell_after(seconds, text, **how):
        clock = types.SimpleNamespace(monotonic=lambda: begun + seconds)
        with mock.patch.object(progress, "time", clock):
            progress.report_progress(text, **how)

    tell_after(0.0, "builds")
    for number in range(3):
        tell_after(0.3 * number * progress.EVERY_S, f"warm-up {number}", count=True)  # too soon
    tell_after(1.1 * progress.EVERY_S, "timed 1", count=True)
    return value


@pytest.mark.parametrize("ranks", [None, 2])
def test_it_is_heard_once_and_in_order(ranks):
    heard = []
    with Workers(heard.append) as workers:
        values = [workers.call(speaks, value, ranks=ranks, share="one") for value in (1, 2)]
    assert values == [1, 2]
    assert heard == ["builds", "timed 1"] * 2


def test_nobody_needs_to_listen():
    assert speaks(3) == 3
    with Workers() as workers:
        assert workers.call(speaks, 4) == 4
