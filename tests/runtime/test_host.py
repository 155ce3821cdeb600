"""Facts found without importing torch agree with torch."""

import pytest
import torch

from stepgauge.runtime import host


def test_version_and_build_are_those_of_torch():
    installed = host.installed_torch()
    assert (installed["__version__"], installed["cuda"]) == (torch.__version__, torch.version.cuda)


def test_has_only_cpu_only_if_torch_finds_no_accelerator():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert not (host.has_only_cpu() and accelerator)
    assert host.has_only_cpu() or torch.version.cuda


def test_thread_settings_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    settings = host.thread_settings().split()
    assert "OMP_NUM_THREADS=3" in settings and "MKL_DYNAMIC=FALSE" in settings


@pytest.mark.parametrize(
    ("setting", "threads"), [("", 4), ("3", 3), ("2,1", 2), ("0", 4), ("many", 4)]
)
def test_threads_per_rank_are_those_of_omp_num_threads_or_a_share_of_the_cores(
    monkeypatch, setting, threads
):
    monkeypatch.setattr(host, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert host.threads_per_rank(2) == threads
