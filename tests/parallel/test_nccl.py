"""Compares every wrapper and the sharded optimizers with one process, on GPUs over NCCL."""

import os

import pytest
import torch
from tests.parallel import test_data_parallel, test_fsdp, test_zero

from stepgauge.runtime.launch import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4])
def test_parity_over_nccl(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; this machine has {torch.cuda.device_count()}")
    for rank in launch(checks, ranks == 2, ranks=ranks, device="cuda"):
        for case, difference in rank.items():
            # The fully sharded cases train in fp32 and 16 bits, all others in fp64.
            assert difference <= (1e-4 if case[0] == "fsdp" else 1e-10), case


def checks(all_of_them):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_default_device(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    found = test_data_parallel.parity(test_data_parallel.CASES)
    if not all_of_them:
        return found
    for case in test_zero.CASES:
        found["zero", *case] = test_zero.difference_from_one_process(*case)
    for case in test_fsdp.CASES:
        found["fsdp", *case] = test_fsdp.difference_from_one_process(*case)
    return found
