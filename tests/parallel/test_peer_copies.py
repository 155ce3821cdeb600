"""Averages by copies into the peers' memory, over ranks on CPUs; on GPUs the parity tests run over
them.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from stepgauge.parallel import peer_copies
from stepgauge.parallel.data_parallel import NaiveDataParallel
from stepgauge.parallel.mean import mean_with
from stepgauge.runtime.launch import launch

# Of 16 bits: one rounding of the scaled parts and one of the sum a rank.
TOLERANCES = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 0.03, torch.float16: 0.004}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mean_of_every_rank(ranks):
    for found in launch(worst_errors, ranks=ranks):
        assert found == []


def worst_errors():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # several pieces of the largest message, more than there are slots
    peer_copies.STAGING_BYTES = {"cpu": 2**16}
    copies = peer_copies.PeerCopies(None, torch.device("cpu"))
    wrong = []
    for dtype, tolerance in TOLERANCES.items():
        for numel in (1, 2, 1001, 70_003):
            parts = torch.randn(ranks, numel, generator=torch.Generator().manual_seed(numel)).to(
                dtype
            )
            for owner in (None, *range(ranks)):
                message = parts[rank].clone()
                copies.launch(message, owner=owner).wait()
                error = (message.double() - parts.double().mean(0)).abs().max().item()
                if owner in (None, rank) and not error <= tolerance:
                    wrong.append((dtype, numel, owner, error))
    return wrong


def test_sixteen_bits_do_not_overflow():
    mine = torch.full((4,), 60000.0, dtype=torch.float16)
    mean_with(mine, [mine.clone(), mine.clone()])
    assert (mine - 60000).abs().max() <= 64  # two roundings


def test_the_kernel_gives_the_mean_too():
    """In Triton's interpreter, which truncates bf16: the other types."""
    pytest.importorskip("triton")
    script = """if True:
        import torch
        from stepgauge.parallel.mean import _in_one_pass
        for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.float16, 2e-3)):
            for parts in (1, 3):
                rows = torch.randn(1 + parts, 2500).to(dtype)
                mine, boxes = rows[0].clone(), list(rows[1:].contiguous())
                _in_one_pass(mine, boxes)
                error = (mine.double() - rows.double().mean(0)).abs().max().item()
                assert error <= tolerance, (dtype, parts, error)
        print("equal")
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr


def test_what_is_asked_for_wrongly():
    assert launch(refusals, ranks=2) == [[
        "transport is 'pigeons'; choose collectives or peer-copies",
        "peer-copies takes parameters on one device; these are on 0",
        "ranks are on the machines host0, host1; peer copies stay within one",
    ]] * 2  # fmt: skip


def refusals():
    from stepgauge.parallel import peer_memory

    peer_memory.platform = type(
        "Elsewhere", (), {"node": staticmethod(lambda: f"host{dist.get_rank()}")}
    )
    attempts = [
        (torch.nn.Linear(1, 1), "pigeons"),
        (torch.nn.Identity(), "peer-copies"),
        (torch.nn.Linear(1, 1), "peer-copies"),
    ]
    said = []
    for module, transport in attempts:
        with pytest.raises(ValueError) as error:
            NaiveDataParallel(module, transport=transport)
        said.append(str(error.value))
    return said
