"""Progress messages of a process arrive at its caller before the answer."""

import types
from unittest import mock

import pytest

from stepgauge.runtime import progress
from stepgauge.runtime.workers import Workers


def reports(value):
    begun = progress._last + 10  # after all earlier messages of this process

    def report_after(seconds, text, **how):
        clock = types.SimpleNamespace(monotonic=lambda: begun + seconds)
        with mock.patch.object(progress, "time", clock):
            progress.report_progress(text, **how)

    report_after(0.0, "builds")
    for number in range(3):
        report_after(0.3 * number * progress.EVERY_S, f"warm-up {number}", count=True)  # too soon
    report_after(1.1 * progress.EVERY_S, "timed 1", count=True)
    return value


@pytest.mark.parametrize("ranks", [None, 2])
def test_messages_arrive_once_and_in_order(ranks):
    messages = []
    with Workers(messages.append) as workers:
        values = [workers.call(reports, value, ranks=ranks, share="one") for value in (1, 2)]
    assert values == [1, 2]
    assert messages == ["builds", "timed 1"] * 2


def test_a_listener_is_optional():
    assert reports(3) == 3
    with Workers() as workers:
        assert workers.call(reports, 4) == 4
