"""CUDA graph capture, tested without CUDA: arguments of the capture, and failures."""

import contextlib

import pytest
import torch

from stepgauge.runtime import recording

DEVICE = torch.device("cuda", 0)


class Graph:
    def replay(self):
        self.replayed = True


@pytest.fixture
def failed_pools(monkeypatch):
    """Replaces captures by plain runs; returns the list of pools of failed captures."""
    pools = []

    @contextlib.contextmanager
    def capture(graph, *, pool, stream, capture_error_mode):
        assert (stream, capture_error_mode) == ("stream", "thread_local")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(recording, "capture_stream", lambda device: "stream")
    monkeypatch.setattr(recording, "_end_failed_capture", lambda pool, device: pools.append(pool))
    return pools


def test_record_returns_outputs_and_replay(failed_pools):
    outputs, replay = recording.record(lambda: "outputs", DEVICE)
    replay()
    assert outputs == "outputs" and replay.__self__.replayed and not failed_pools


@pytest.mark.parametrize("pool", [None, (0, 9)])
def test_a_failed_capture_is_cleaned_up_and_reported(failed_pools, pool):
    def run():
        raise RuntimeError("operation not permitted\nand a long tail")

    with pytest.raises(recording.CannotRecordError, match="graphs: operation not permitted; run"):
        recording.record(run, DEVICE, pool)
    assert failed_pools == [pool or (0, 7)]
    assert recording.record_repeated(run, 3, DEVICE) is None


def test_out_of_memory_is_raised(failed_pools):
    def run():
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        recording.record_repeated(run, 1, DEVICE)


def test_repeated_calls_are_captured_in_one_graph(failed_pools):
    ran = []
    assert recording.record_repeated(lambda: ran.append(1), 3, DEVICE) is not None
    assert len(ran) == 3


def test_names_of_the_same_device_share_one_capture_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: object())
    recording._stream.cache_clear()
    streams = [
        recording.capture_stream(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:0")
    ]
    recording._stream.cache_clear()
    assert streams[0] is streams[1] and streams[0] is not streams[2]
