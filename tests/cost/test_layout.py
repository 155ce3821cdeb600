"""Steps under any layout: what a layout of one rank is, what faster wires do, and rows measured on
2 and 4 GPUs that no calibration has seen.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.pipeline.step import predict_pipeline
from stepgauge.cost.rates.contention import RING_SLOWDOWN
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.network import Axis, Links, axes_of
from stepgauge.cost.rates.prices import MESSAGE_OVERHEAD_US
from stepgauge.cost.step import predict
from stepgauge.cost.streams.outcome import exposed_ms
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec

ROOT = Path(__file__).parents[2]
H100 = HardwareFile.read(ROOT / "hardware" / "h100-sxm.json")
H200 = HardwareFile.read(ROOT / "hardware" / "h200-nvlink.json")
MODEL = ModelSpec.preset("2.7b", context_length=512)


def wired(within=450e9, between=50e9):
    def wire(rate):
        return {"bytes_per_s": rate, "latency_us": 20.0, "efficiency": 1.0, "source": "made"}

    fabric = {"gpus_per_node": 8, "within": wire(within), "between": wire(between)}
    return CalibratedMachine(dataclasses.replace(H100, other={"fabric": fabric}))


def step(layout, machine, **changes):
    asked = {"model": MODEL, "size": "2.7b", "layout": layout, "batch": 16, "precision": "bf16"}
    return predict_layout(LayoutSpec(device="cuda", **{**asked, **changes}), machine)


def test_a_layout_of_one_rank_is_the_single_gpu():
    alone = StepSpec(model=MODEL, size="2.7b", batch=16, precision="bf16", device="cuda")
    spread, single = step("none", wired()), predict(alone, wired())
    for metric in ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "mfu", "peak_bytes"):
        assert spread.median(metric) == pytest.approx(single.median(metric)), metric


def test_the_time_of_a_ring_by_hand():
    """Eight ranks of a node: 2 · 7/8 of 1 GB at 450 GB/s. Over two nodes of eight the ring leaves a
    node eight times over, at 8 · 50 GB/s; alone on its node a rank has one wire.
    """
    network = Links(wired().hardware)
    within = network.collective("all_reduce", 1e9, Axis(8, 8)).us
    assert within == pytest.approx(20 + 2 * 7 / 8 * 1e9 / 450e9 * 1e6)
    across = network.collective("all_gather", 1e9, Axis(16, 8)).us
    assert across == pytest.approx(20 + 20 + 15 / 16 * 1e9 / 400e9 * 1e6)
    single = network.collective("reduce_scatter", 1e9, Axis(2, 1)).us
    assert single == pytest.approx(20 + 20 + 1 / 2 * 1e9 / 50e9 * 1e6)
    axes = axes_of(Layout.parse("tp4 dp4 pp2 1f1b m4"), 8)
    assert axes["tensor"] == Axis(4, 4) and axes["data"] == Axis(4, 2)
    assert axes["pipeline"] == Axis(2, 1)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["dp4 zero2 tp2", "tp4", "pp2 1f1b m4 dp2", "dp8 zero3", "pp4 1f1b m8 tp4"]),
    st.floats(1e9, 1e11),
    st.floats(1.0, 10.0),
)
def test_more_bandwidth_is_never_slower(layout, rate, ratio):
    slow, fast = (
        step(layout, wired(8 * each, each)).median("step_ms") for each in (rate, ratio * rate)
    )
    assert fast <= slow * (1 + 1e-9)


def test_sharded_stages_are_gathered_once_per_step_and_stay_unsharded():
    """The number of micro-batches does not matter. The unsharded weights count in the peak."""
    exposed = {}
    for micro_batches in (2, 8):
        found = step(f"pp2 1f1b m{micro_batches} dp2 zero3", wired(within=20e9))
        exposed[micro_batches] = found.median("data_exposed_ms")
        parts = {row[0]: row[1] for row in found.tables["memory"]}
        assert parts["unsharded weights"] == pytest.approx(2 * parts["parameters"], rel=0.02)
    assert 0.75 < exposed[8] / exposed[2] < 1.25, "not four times"
    assert exposed[2] > 100, "both ways at 20 GB/s"


def test_overlapped_collectives_expose_what_products_do_not_hide(monkeypatch):
    """Over fast wires, that is the latency; over slow ones, the rest after the products are done. With
    overlap, backward gathers twice more per block: ten collectives instead of eight.

    Small messages are not overlapped. Overlap needs buffers.
    """
    monkeypatch.setattr("stepgauge.spec.plan.tensor.LEAST_OVERLAPPED_BYTES", 16 * 2**20)
    plain, beside = step("tp2", wired()), step("tp2 overlap", wired())
    layouts = ("tp2", "tp2 overlap")
    rows = zip(layouts, (plain, beside), strict=True)
    exposed = {name: row.median("tensor_exposed_ms") for name, row in rows}
    assert 0 < exposed["tp2 overlap"] < 0.4 * exposed["tp2"]
    slow = {name: step(name, wired(5e9)).median("tensor_exposed_ms") for name in layouts}
    products = plain.median("forward_ms") + plain.median("backward_ms")
    more = 10 / 8 * slow["tp2"]
    assert more - products < slow["tp2 overlap"] < more
    short = ModelSpec.preset("2.7b", context_length=64)
    few = [step(name, wired(), model=short, batch=2).median("step_ms") for name in layouts]
    assert few[0] == few[1]
    buffers = [
        row for row in beside.tables["memory"] if row[0].startswith("buffers for other ranks")
    ]
    assert buffers[0][1] == 4 * 16 * 512 * 2560 * 2


@pytest.mark.parametrize("layout", ["pp2 1f1b m4", "pp4 1f1b m4"])
def test_stages_are_balanced_by_the_times_of_the_hardware_file(layout):
    """Small products are slow for their FLOPs, and the loss for its own."""
    narrow = {"num_layers": 24, "d_model": 512, "d_ff": 2048, "num_heads": 8}
    small = ModelSpec.preset("small", context_length=4096, vocab_size=60_000, **narrow)
    by_flops, by_time = (
        step(layout, wired(), model=small, balance=balance) for balance in ("flops", "time")
    )
    assert by_time.median("busiest_rank_ms") < by_flops.median("busiest_rank_ms")
    assert by_time.note.endswith("blocks, by predicted time") and not by_flops.note


def test_half_blocks_are_balanced_by_the_times_of_the_hardware_file():
    wide = {"num_layers": 12, "d_model": 1024, "d_ff": 4096, "num_heads": 16}
    model = ModelSpec.preset("small", context_length=1024, vocab_size=150_000, **wide)
    asked = {"model": model, "ranks": 2, "micro_batches": 4, "batch": 8, "precision": "bf16"}
    by_flops, by_time = (
        predict_pipeline(PipelineSpec(**asked, device="cuda", balance=balance), wired())
        for balance in ("flops", "time")
    )
    assert by_time.median("over_ideal") < by_flops.median("over_ideal")
    assert by_time.note.endswith("parts, by predicted time") and not by_flops.note


def test_accumulation_repeats_forward_and_backward_and_adds_gradients():
    once, thrice = (step("dp2", wired(), accumulation=n) for n in (1, 3))
    longer = thrice.median("step_ms") - once.median("step_ms")
    both = step("none", wired(), batch=8)
    passes = 2 * (both.median("forward_ms") + both.median("backward_ms"))
    added = 2 * wired().traffic(12 * MODEL.num_parameters).us / 1e3
    assert longer == pytest.approx(
        passes + added, rel=0.01
    )  # after the first pass, the host is ahead


def test_sharded_weights_are_gathered_in_each_pass():
    """Gradients are reduced in each pass, too, because no rank can hold whole ones. Other wrappers
    reduce them once.
    """
    slow = wired(within=20e9)
    exposed = {
        (wrapper, n): step(f"dp2 {wrapper}", slow, accumulation=n).median("data_exposed_ms")
        for wrapper in ("zero3", "bucketed")
        for n in (1, 3)
    }
    assert exposed["zero3", 3] > 2.5 * exposed["zero3", 1]
    assert exposed["bucketed", 3] == pytest.approx(exposed["bucketed", 1], rel=0.02)


def test_exposed_communication_is_never_negative():
    assert exposed_ms(7.0, 5.0) == 2.0
    assert exposed_ms(5.0, 7.0) == exposed_ms(5.0, 5.0 + 1e-12) == 0.0


@pytest.mark.parametrize("layout", ["pp2 1f1b m16", "pp2 zbv m16 dp2"])
def test_a_shortened_simulation_gives_the_same_step(layout):
    """Repeated micro-batches are extrapolated."""
    asked = {"model": MODEL, "size": "2.7b", "layout": layout, "precision": "bf16-pure"}
    spec = LayoutSpec(device="cuda", batch=64, accumulation=4, **asked)
    whole, shortened = (
        predict_layout(spec, wired(), shortened=how).median("step_ms") for how in (False, True)
    )
    assert shortened == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 gpipe m40",
        "pp2 1f1b m40",
        "pp2 1f1b m40 dp2 zero3",
        "pp4 interleaved m40",
        "pp4 zbv m40",
    ],
)
def test_a_shortened_pipeline_has_the_metrics_of_the_whole_one(layout):
    """A host a little slower than the devices catches up with them after dozens of micro-batches, and gpipe
    holds the activations of all of them.
    """
    model = ModelSpec(
        d_model=1024, d_ff=4096, num_layers=16, num_heads=16, context_length=1024, vocab_size=32_000
    )
    for compile, batch in (("off", 160), ("blocks", 80), ("blocks", 160)):
        spec = LayoutSpec(
            model=model,
            layout=layout,
            batch=batch,
            precision="bf16",
            device="cuda",
            compile=compile,
        )
        whole, shortened = (predict_layout(spec, wired(), shortened=how) for how in (False, True))
        for metric in ("step_ms", "peak_bytes"):
            assert shortened.median(metric) == pytest.approx(whole.median(metric), rel=0.015)
        assert shortened.median("bubble") == pytest.approx(whole.median("bubble"), abs=0.07)


@pytest.mark.parametrize("shortened", [False, True])
@pytest.mark.parametrize(
    "layout", ["none", "dp4 bucketed", "dp4 zero1", "dp4 zero3", "dp2 zero3 tp2", "pp2 1f1b m8 tp2"]
)
def test_a_step_is_the_sum_of_its_terms(layout, shortened):
    """No rest is negative, so nothing counts twice."""
    asked = {"model": MODEL, "size": "2.7b", "layout": layout, "precision": "bf16"}
    for accumulation in (1, 3):
        spec = LayoutSpec(device="cuda", batch=64, accumulation=accumulation, **asked)
        record = predict_layout(spec, wired(), shortened=shortened)
        head, *rows = record.tables["terms"]
        us = [row[head.index("us")] for row in rows]
        assert sum(us) / 1e3 == pytest.approx(record.median("step_ms"), rel=1e-4)
        assert min(us) >= 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_pipelines_measured_on_four_gpus(schedule):
    """Operations are calibrated on another device, an H100. The time that the schedule adds is compared,
    too.
    """
    path = ROOT / "benchmarks" / "results" / "2026-11-22-h200-pipeline.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(r for r in rows if (r["part"], r.get("schedule")) == ("measured", schedule))
    ideal = next(r["ms"] for r in rows if r["part"] == "ideal")
    record = Record.from_json(json.dumps(row["record"]))
    spec = PipelineSpec(**{**record.spec, "model": ModelSpec(**record.spec["model"])})
    found = predict_pipeline(spec, CalibratedMachine(H100.with_links(H200.links)))
    assert abs(found.median("step_ms") / record.median("step_ms") - 1) < 0.10
    over = record.median("step_ms") / ideal
    assert abs(found.median("over_ideal") / over - 1) < 0.05


def test_accumulation_adds_gradients():
    """Three of four passes read two fp32 gradients of every parameter and write one."""
    machine = wired()

    def added(layout, **changes):
        rows = step(layout, machine, **changes).tables["terms"][1:]
        return [(float(row[3]) * row[4]) for row in rows if row[1] == "gradients.add"]

    assert not added("none") and not added("dp2 zero3", accumulation=2)
    assert sum(added("none", accumulation=4)) == pytest.approx(
        3 * 12 * MODEL.num_parameters, rel=1e-3
    )
    of_a_stage = sum(added("pp2 1f1b m4"))
    assert of_a_stage == pytest.approx(3 * 12 * MODEL.num_parameters / 2, rel=0.02)


def copies_of_several_sequences(spec, machine):
    """Returns what tensor parallelism took more until ranks cut the batch by token (2026-11-29), by
    metric. A strided copy came before each collective, and another after an all-gather, also without
    communication. The loss held the gathered input twice.
    """
    model, tensor = spec.network, Layout.parse(spec.layout).tensor
    numel = spec.batch * model.context_length * model.d_model
    times = (machine.time("strided copy bf16", n) for n in (numel / tensor, numel))
    piece, whole = (time.us / 1e3 for time in times)
    sent, received = 2 * piece + 2 * whole, 2 * whole  # in a block, in each direction
    blocks = model.num_layers * (sent + received)
    return {
        "forward_ms": blocks + piece + whole,  # and the head's
        "step_ms": 2 * blocks + 2 * piece + 3 * whole,  # and the first split's
        "tensor_exposed_ms": 2 * model.num_layers * sent,
    }


def test_measured_tensor_parallel_rows_of_several_sequences():
    """Rotation's backward had a copy more until ac25dd3: of rows before it forward is compared, steps of the
    two in bf16 after it that the GPU bounds. Peaks are not: the loss held more in its forward then. Neither is
    exposed communication: steps without it had infinite values, which draw less power
    (docs/log/2026-11-30-collectives-wait.md).
    """
    machine = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "h200-sxm.json"))

    def check(name, sizes, copies_of=copies_of_several_sequences, **tolerances):
        lines = (ROOT / f"benchmarks/results/2026-11-23-h200-{name}.jsonl").read_text().splitlines()
        rows = [row for row in map(Record.from_json, lines) if row.spec.get("layout") == "tp2"]
        measured = {
            (row.spec["size"], row.spec["batch"]): row
            for row in rows
            if row.provenance == "measured" and (row.spec["size"], row.spec["batch"]) in sizes
        }
        assert len(measured) == len(sizes)
        for row in measured.values():
            own = {k: v for k, v in row.spec.items() if k in LayoutSpec.__dataclass_fields__}
            spec = LayoutSpec(**{**own, "model": ModelSpec(**row.spec["model"])})
            found, copies = predict_layout(spec, machine), copies_of(spec, machine)
            for metric, most in tolerances.items():
                value = found.median(metric) + copies[metric]
                assert value == pytest.approx(row.median(metric), rel=most), metric

    before = {("2.7b", 16), ("custom", 4), ("large", 16)}
    check("validation", before, forward_ms=0.02)
    check("validation-now", {("custom", 8), ("large", 2)}, step_ms=0.025)
    host = {("medium", 12)}  # bound by the host, which launches less without communication
    check("validation-now", host, lambda *_: {"tensor_exposed_ms": 0.0}, tensor_exposed_ms=0.1)


def test_peaks_of_measured_tensor_parallel_rows_are_those_of_their_loss():
    """Rows of 2026-11-30, the first with the loss that keeps the logits."""
    machine = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "h200-sxm.json"))
    lines = (ROOT / "benchmarks/results/2026-11-30-h200-validation-fresh.jsonl").read_text()
    rows = [
        row
        for row in map(Record.from_json, lines.splitlines())
        if row.provenance == "measured" and row.spec.get("layout", "").startswith("tp2")
    ]
    assert len(rows) == 2
    for row in rows:
        own = {k: v for k, v in row.spec.items() if k in LayoutSpec.__dataclass_fields__}
        spec = LayoutSpec(**{**own, "model": ModelSpec(**row.spec["model"])})
        found = predict_layout(spec, machine)
        assert found.median("peak_bytes") == pytest.approx(row.median("peak_bytes"), rel=0.001)
        assert found.median("step_ms") == pytest.approx(row.median("step_ms"), rel=0.04)


def test_two_ranks_in_a_ring_each_have_half_of_everything_but_the_keys():
    """Of two ranks each has half of the tokens; its attention is that of half the length twice, of
    the quarter of pairs that each rank has. Keys and their gradients travel beside it where wires
    are fast.
    """
    model = dataclasses.replace(MODEL, context_length=4096, attention="triton")
    asked = {"model": model, "batch": 2}
    alone = step("none", wired(), **asked)
    shared, slow = (step("cp2 bucketed", wired(rate), **asked) for rate in (450e9, 5e9))
    assert 0.45 < shared.median("forward_ms") / alone.median("forward_ms") < 0.6
    assert shared.median("peak_bytes") < alone.median("peak_bytes")
    block = [row for row in shared.tables["terms"] if row[1] == "attention"]
    assert [row[3] for row in block] == [
        f"{heads} × 2048 × 80" for heads in (64, 64, 32, 64, 32)
    ]  # in backward, half of the own heads comes before the other rank's keys, and half after
    least = 32 * 3 * MESSAGE_OVERHEAD_US / 1e3
    attention_ms = sum(row[5] for row in block) / 1e3
    lengthened = least + (RING_SLOWDOWN.kernel - 1) * attention_ms
    # and a little more: buckets wait for products, and then share the links with keys
    assert least <= shared.median("context_exposed_ms") < 1.3 * lengthened
    assert slow.median("context_exposed_ms") > 100 * least
    assert shared.median("data_exposed_ms") > 0, "gradients are averaged over both ranks"
    one_key_head = dataclasses.replace(model, num_kv_heads=1)  # both tensor ranks have it
    cut = step("cp2 bucketed tp2", wired(), model=one_key_head, batch=2)
    block = [row for row in cut.tables["terms"] if row[1] == "attention"]
    assert [row[3] for row in block] == ["32 × 2048 × 80"] * 4


def test_ranks_that_exchange_heads_compute_some_heads_over_all_tokens():
    """They do it in two groups: one is sent while the other is computed."""
    asked = {"model": dataclasses.replace(MODEL, context_length=4096), "batch": 2}
    alone = step("none", wired(), **asked)
    shared, slow = (step("cp2 ulysses bucketed", wired(rate), **asked) for rate in (450e9, 5e9))
    assert 0.45 < shared.median("forward_ms") / alone.median("forward_ms") < 0.6
    block = [row for row in shared.tables["terms"] if row[1] == "attention"]
    assert [row[3] for row in block] == ["16 × 4096 × 80"] * 4
    sent = 4 * (2 * 2048 * 2560) * 2 / 2  # half of q, k, v and o, in bf16
    waits_ms = MODEL.num_layers * sent / 5e9 * 1e3
    longer = slow.median("forward_ms") - shared.median("forward_ms")
    assert 0.95 * waits_ms < longer < waits_ms, "some of it overlaps with attention in both cases"
    half = {**asked, "model": dataclasses.replace(MODEL, context_length=2048)}
    as_many_tokens = step("none", wired(), **half)
    held, held_alone = (
        {row[0]: row[1] for row in rows.tables["memory"]} for rows in (shared, as_many_tokens)
    )
    output = 2 * 2048 * 2560 * 2  # kept before and after it is sent back
    rotated = 2 * output  # queries and keys, of which only those that are exchanged are kept
    more = MODEL.num_layers * (output - rotated)
    assert held["activations"] - held_alone["activations"] == more
    assert held["buffers for other ranks (outside)"] == 2 * 3 * output / 2 / 2, "of one group"


def test_a_pipelines_record_notes_its_stages_and_missing_host_times():
    cut = step("pp2 1f1b m2 dp2 bucketed", wired(), batch=4, balance="time").note
    assert cut.startswith("stages of 16, 16 blocks, by predicted time; host cost assumed")


def test_gpipe_has_no_gradients_at_its_peak():
    """Gradients of an earlier pass do exist. 1f1b runs forwards while it has gradients."""
    model = ModelSpec.preset("medium", context_length=1024)
    held = {}
    for layout, accumulation in (("gpipe m8", 1), ("gpipe m8", 2), ("1f1b m8", 1)):
        found = step(f"pp2 {layout}", wired(), model=model, accumulation=accumulation)
        held[layout, accumulation] = {row[0] for row in found.tables["memory"]}
    assert "gradients" not in held["gpipe m8", 1]
    assert "gradients" in held["gpipe m8", 2] & held["1f1b m8", 1]


@pytest.mark.parametrize("layout", ["none", "dp2 zero3", "tp2 overlap", "pp2 zbv m4"])
def test_a_larger_batch_takes_longer_and_recomputed_activations_are_not_held(layout):
    asked = {"model": dataclasses.replace(MODEL, num_layers=4), "compile": "blocks"}
    once = step(layout, wired(), **asked)
    longer = step(layout, wired(), **asked, batch=32)
    assert longer.median("step_ms") > once.median("step_ms")
    assert longer.median("peak_bytes") > once.median("peak_bytes")
    for name in ("selective", "feed-forward", "blocks"):
        again = step(layout, wired(), **asked, checkpointing=name)
        assert again.median("peak_bytes") < once.median("peak_bytes"), name
        assert again.median("step_ms") > once.median("step_ms"), name
