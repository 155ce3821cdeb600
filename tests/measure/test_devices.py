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


def test_files_that_a_control_group_has_read_leave_room_for_a_step(monkeypatch, tmp_path):
    """The kernel drops them. A container that had read its data refused steps that fit."""
    monkeypatch.setattr(devices, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 150000\nactive_file 100000\ninactive_file 600000\n")
    assert devices.available_host_bytes() == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.available_host_bytes() > 2**20
