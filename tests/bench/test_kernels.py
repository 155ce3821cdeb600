"""Operations beside their peers: a wrong result has no time, and nobody's failure costs the others'
figures.
"""

import dataclasses
import functools

import pytest
import torch

from stepgauge.bench.kernels import OPERATIONS, comparison
from stepgauge.bench.kernels.operation import Implementation
from stepgauge.spec import grids
from stepgauge.spec.kernel import (
    KERNELS,
    AdamWSpec,
    AttentionSpec,
    LinearCrossEntropySpec,
    RmsNormSpec,
)

QUICK = {"dtype": "fp32", "seconds": 0.0}
ROWS = [
    RmsNormSpec(rows=100, width=64, peers="eager torch layer_norm", passes="backward", **QUICK),
    AttentionSpec(batch=1, heads=2, sequence=100, width=16, peers="eager math", **QUICK),
    AttentionSpec(
        batch=1,
        heads=2,
        sequence=100,
        width=16,
        causal=False,
        peers="eager",
        passes="forward",
        **QUICK,
    ),
    LinearCrossEntropySpec(tokens=50, width=32, vocabulary=100, peers="eager", **QUICK),
    AdamWSpec(layers=1, width=32, **QUICK),
]


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.kind)
def test_every_operation_is_right_and_timed_here(spec):
    record = comparison.run(spec)
    assert record.status == "ok", record.note
    assert set(record.environment["outcomes"].values()) == {"ok"}
    best = min(
        record.median(f"{n}_ms")
        for n in record.environment["outcomes"]
        if n not in ("ours", "layer_norm")
    )
    assert record.median("ratio_to_best_peer") == pytest.approx(best / record.median("ours_ms"))


@pytest.fixture
def among(monkeypatch):
    """Puts an implementation of RMSNorm beside the others, under the name given."""

    def put(name, function):
        operation = OPERATIONS["rms-norm"]
        more = {**operation.implementations, name: Implementation(lambda spec: function)}
        changed = dataclasses.replace(operation, implementations=more)
        monkeypatch.setattr(comparison, "OPERATIONS", {**OPERATIONS, "rms-norm": changed})
        comparison._held.clear()
        return comparison.run(RmsNormSpec(rows=100, width=64, peers=f"eager {name}", **QUICK))

    yield put
    comparison._held.clear()


def out_of_memory(x, w):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (
            lambda x, w: 1.001 * torch.nn.functional.rms_norm(x, (64,), w, 1e-5),
            "wrong: error 1.0e-03",
        ),
        (lambda x, w: x * w * float("nan"), "wrong: error nan"),
        (out_of_memory, "oom: memory ran out at 2.50 GiB more"),
    ],
    ids=["wrong", "nan", "oom"],
)
def test_a_peer_without_a_right_result_has_no_time_and_the_others_have(among, function, outcome):
    record = among("bad", function)
    assert record.status == "ok"
    assert record.environment["outcomes"]["bad"].startswith(outcome)
    assert "bad_ms" not in record.metrics
    assert {"ours_ms", "eager_ms"} <= set(record.metrics)
    assert "bad" in record.note


def test_ours_wrong_fails_the_row(among):
    record = among("ours", lambda x, w: x * w)
    assert record.status == "failed"
    assert "ours_ms" not in record.metrics


def test_grids_are_rows():
    for kind, named in grids.GRIDS.items():
        for points in named.values():
            specs = [KERNELS[kind](**point) for point in points]
            assert len(set(specs)) == len(specs) > 0
    assert len(grids.ATTENTION_HEADS) == 10 * 4 * 2 * 3
    assert len(grids.ATTENTION_BATCH) == 4 * 5 * 2


def test_exact_attention_is_the_equation():
    from stepgauge.bench.kernels.attention import attention_output, exact_results

    q, k, v, grad = (torch.randn(1, 2, 37, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_output(*leaves, is_causal=True)
    wanted = [o, *torch.autograd.grad(o, leaves, grad)]
    for rows in (2**27, 5 * 74):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stepgauge.bench.kernels.attention.SCORES_AT_A_TIME", rows)
            found = functools.partial(exact_results, is_causal=True)(q, k, v, grad)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
