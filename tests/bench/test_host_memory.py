"""Steps on a CPU that are refused because they cannot fit into memory."""

import dataclasses

import pytest

from stepgauge.bench.host_memory import needed_bytes, require_memory
from stepgauge.bench.step import run
from stepgauge.bench.storage_tracking import predict
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.units import GIB


def long_context(**fields):
    """Returns a step whose logits alone take 30.5 GiB, three times; its weights take 5 MiB."""
    model = ModelSpec.preset("nano", context_length=12_800)
    return StepSpec(**{"model": model, "size": "nano", "batch": 64, **fields})


@pytest.fixture
def free_gib(monkeypatch):
    """free_gib(amount) sets the memory that the machine seems to have."""

    def set_free(gib):
        free = lambda: int(gib * GIB)  # noqa: E731
        monkeypatch.setattr("stepgauge.measure.devices.available_host_bytes", free)

    return set_free


def test_a_step_is_refused_by_its_logits_before_it_is_built(monkeypatch, free_gib):
    monkeypatch.setattr("stepgauge.bench.step.build", None)
    free_gib(24)
    with pytest.raises(MemoryError) as refused:
        run(long_context())
    assert str(refused.value) == (
        "needs at least 101.7 GiB of memory, 24.0 GiB are free; "
        "at least 10.2 GiB with --loss fused, 12.7 GiB with --batch 8"
    )


@pytest.mark.parametrize(
    ("gib", "fields", "advice"),
    [
        (100, {}, "free; at least 10.2 GiB with --loss fused, 50.9 GiB with --batch 32"),
        (4, {}, "free; at least 1.6 GiB with --batch 1"),
        (0.5, {}, "free"),
        (24, {"phases": "forward"}, ", 15.3 GiB with --batch 32"),
    ],
)  # fmt: skip
def test_the_message_names_the_options_with_which_the_step_fits(free_gib, gib, fields, advice):
    free_gib(gib)
    with pytest.raises(MemoryError) as refused:
        require_memory(long_context(**fields))
    assert str(refused.value).endswith(advice)


def test_a_step_that_may_fit_is_not_refused(free_gib):
    spec = long_context()
    free_gib(needed_bytes(spec) / GIB)
    require_memory(spec)
    free_gib(needed_bytes(spec) / GIB - 0.1)
    require_memory(dataclasses.replace(spec, device="cuda"))  # a GPU has memory of its own
    with pytest.raises(MemoryError):
        require_memory(spec)


@pytest.mark.parametrize("vocab_size", [100, 10_000])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ({}, {}),
        ({"loss": "fused"}, {}),
        ({"norm": "layernorm", "feed_forward": "gelu"}, {"optimizer": "sgd"}),
        ({"qk_norm": True, "num_kv_heads": 1}, {"checkpointing": "selective"}),
        ({}, {"checkpointing": "nested"}),
    ],
)
def test_no_step_needs_more_than_it_takes(vocab_size, precision, model, fields):
    """The bound is compared with every storage of a run on fake tensors."""
    network = ModelSpec.preset("nano", context_length=512, vocab_size=vocab_size, **model)
    spec = MemorySpec(model=network, batch=8, precision=precision, predict="cpu", **fields)
    tracked, needed = predict(spec), needed_bytes(spec)
    taken = tracked.step.peak.total
    assert needed <= 1.001 * taken
    if precision == "fp32" and network.loss != "fused":  # autocast and kernels hold copies, too
        assert needed >= 0.75 * taken
    forward = StepSpec(model=network, batch=8, precision=precision, phases="forward")
    assert needed_bytes(forward) <= 1.001 * tracked.forward_only_bytes
