"""Memory of devices."""

import torch

from stepgauge.measure import devices


def test_memory_kept_by_cuda_graphs_is_that_of_their_pools_without_allocated_tensors(monkeypatch):
    def segment(pool, total, allocated, device=0):
        sizes = {"total_size": total, "allocated_size": allocated}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [
        segment((0, 0), 100, 30),
        segment((0, 7), 50, 20),
        segment((3, 0), 40, 0),
        segment((0, 7), 1000, 0, device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert devices.kept_by_graphs(torch.device("cuda:0")) == 70
    assert devices.kept_by_graphs(torch.device("cpu")) == 0
