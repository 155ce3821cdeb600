"""What is told of a machine without torch is what torch tells."""

import pytest
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


@pytest.mark.parametrize(
    ("given", "threads"), [("", 4), ("3", 3), ("2,1", 2), ("0", 4), ("many", 4)]
)
def test_ranks_have_the_threads_that_a_user_has_set_or_their_part_of_the_cores(
    monkeypatch, given, threads
):
    monkeypatch.setattr(host, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert host.threads_per_rank(2) == threads
