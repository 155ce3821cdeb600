"""What is told of a machine without torch is what torch tells."""

import torch

from stepgauge.runtime import host


def test_the_version_and_the_build_are_those_of_torch():
    found = host.installed_torch()
    assert (found["__version__"], found["cuda"]) == (torch.__version__, torch.version.cuda)


def test_a_machine_is_said_to_have_only_a_cpu_where_torch_finds_no_accelerator():
    there = torch.accelerator.current_accelerator(check_available=True)
    assert not (host.has_only_cpu() and there)
    assert host.has_only_cpu() or torch.version.cuda


def test_what_sets_the_number_of_threads_is_told(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    told = host.thread_settings()
    assert "OMP_NUM_THREADS=3" in told.split() and "MKL_DYNAMIC=FALSE" in told.split()
