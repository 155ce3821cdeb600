"""Kernels compared with their peers: a wrong result gets no time, and a failing implementation does
not affect the others.
"""

import dataclasses

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
def test_every_operation_is_correct_and_timed_on_this_machine(spec):
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
def compare_with(monkeypatch):
    """Returns a function that adds an implementation of RMSNorm and runs the comparison."""

    def run_with(name, function):
        operation = OPERATIONS["rms-norm"]
        more = {**operation.implementations, name: Implementation(lambda spec: function)}
        changed = dataclasses.replace(operation, implementations=more)
        monkeypatch.setattr(comparison, "OPERATIONS", {**OPERATIONS, "rms-norm": changed})
        comparison._latest.clear()
        return comparison.run(RmsNormSpec(rows=100, width=64, peers=f"eager {name}", **QUICK))

    yield run_with
    comparison._latest.clear()


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
def test_a_peer_without_a_correct_result_has_no_time(compare_with, function, outcome):
    record = compare_with("bad", function)
    assert record.status == "ok"
    assert record.environment["outcomes"]["bad"].startswith(outcome)
    assert "bad_ms" not in record.metrics
    assert {"ours_ms", "eager_ms"} <= set(record.metrics)
    assert "bad" in record.note


def test_the_row_fails_if_our_kernel_is_wrong(compare_with):
    record = compare_with("ours", lambda x, w: x * w)
    assert record.status == "failed"
    assert "ours_ms" not in record.metrics


def test_grids_expand_to_distinct_specs():
    for kind, named in grids.GRIDS.items():
        for points in named.values():
            specs = [KERNELS[kind](**point) for point in points]
            assert len(set(specs)) == len(specs) > 0
    assert len(grids.ATTENTION_HEADS) == 10 * 4 * 2 * 3
    assert len(grids.ATTENTION_BATCH) == 4 * 5 * 2


def test_the_oracle_of_attention_agrees_with_autograd():
    from stepgauge.bench.kernels.attention import attention_output, exact_results

    q, k, v, grad = (torch.randn(1, 2, 37, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_output(*leaves, is_causal=True)
    expected = [o, *torch.autograd.grad(o, leaves, grad)]
    for most_scores in (2**27, 5 * 74):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stepgauge.bench.kernels.attention.MOST_SCORES", most_scores)
            results = exact_results(q, k, v, grad, is_causal=True)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b)
