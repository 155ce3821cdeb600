"""Predicted steps: properties that hold for any machine, and comparisons with stored measurements."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import AUTOCAST, PRECISION
from stepgauge.cost.rates.estimate import CALIBRATED, EXTRAPOLATED, INTERPOLATED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.step import predict
from stepgauge.report.prediction_tables import error_table
from stepgauge.spec.calibration import Contention, OperationTable
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.links import Link, Piece
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.predictions import pair_steps
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.train.precision import PRECISIONS

ROOT = Path(__file__).parents[2]
H100, H200, DGX = (
    CalibratedMachine(HardwareFile.read(ROOT / "hardware" / f"{name}.json"))
    for name in ("h100-sxm", "h200-sxm", "dgx-h100")
)


def step(size="2.7b", **changes):
    model = changes.pop("model", None) or ModelSpec.preset(size)
    return StepSpec(model=model, size=size, device="cuda", **changes)


def machine(*, product_us, traffic_us):
    """A machine on which all products take equally long, and all bytes, too."""
    tables = {
        "matmul nt bf16": OperationTable(("m", "n", "k"), ((512, 512, 512, product_us),)),
        "traffic": OperationTable(("bytes",), ((1e6, traffic_us), (1e9, 1e3 * traffic_us))),
    }
    return CalibratedMachine(HardwareFile(name="made", device="none", operations=tables))


def test_a_calibrated_shape_is_looked_up_and_others_have_another_source():
    table = OperationTable(("m", "n", "k"), ((64, 64, 64, 1.0), (128, 64, 64, 1.0)))
    passes = OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3)))
    tables = {"matmul nt bf16": table, "traffic": passes}
    made = CalibratedMachine(HardwareFile(name="made", operations=tables))
    assert made.time("matmul nt bf16", 128, 64, 64).source == CALIBRATED
    between = made.time("matmul nt bf16", 96, 64, 64)
    assert between.source == INTERPOLATED and 0.75 < between.us < 1.5
    outside = made.time("matmul nt bf16", 256, 64, 64)  # the rate of the nearest shape holds
    assert outside.source == EXTRAPOLATED and outside.us == pytest.approx(2.0)
    thin = made.time("matmul nt bf16", 2**20, 64, 1)  # 128 MiB written for 0.1 GFLOP
    assert thin.us == pytest.approx(2 * 2**20 * 65 / 1e6, rel=0.02)


def test_products_take_longer_the_larger_their_share_of_the_step():
    """All were timed alternating with other work, half of the time, and some back to back at a lower
    clock. With less than half, they take no less.
    """
    axes, large = ("m", "n", "k"), (512, 512, 512)
    tables = {
        "matmul nt bf16": OperationTable(axes, ((*large, 10.0), (512, 512, 1024, 22.0))),
        "matmul nt bf16 alone": OperationTable(axes, ((*large, 12.0),)),
    }
    half = CalibratedMachine(HardwareFile(name="made", operations=tables))
    assert half.time("matmul nt bf16", *large).us == 10.0
    assert half.at_product_share(1.0).time("matmul nt bf16", *large).us == pytest.approx(12.0)
    assert half.at_product_share(0.3).time("matmul nt bf16", *large).us == 10.0
    other = half.at_product_share(0.75).time("matmul nt bf16", 512, 512, 1024)
    assert other.us == pytest.approx(
        22.0 * 1.1
    )  # slower by the same factor as the nearest timed shape


def test_a_window_as_long_as_the_context_is_none():
    def predicted(**fields):
        model = ModelSpec.preset("medium", context_length=512, **fields)
        return predict(StepSpec(model=model, batch=2, precision="bf16", device="cuda"), H100)

    assert predicted(window=512).metrics == predicted().metrics
    with pytest.raises(ValueError, match="window is 511, which has no cost model yet"):
        predicted(window=511)


@pytest.mark.parametrize("loss", ["cross-entropy", "fused"])
def test_head_and_loss_beside_compiled_blocks_are_eager(loss):
    def ends(compile):
        model = ModelSpec.preset("2.7b", context_length=512, loss=loss)
        spec = StepSpec(model=model, batch=4, precision="bf16", compile=compile, device="cuda")
        operations = StepOperations(spec)
        before, _, after = operations.forward_parts()
        return [*before, *after, *operations.backward_parts()[0]]

    assert ends("blocks") == ends("off") != ends("on")


@pytest.mark.parametrize(
    "rows", [((1e6, 5.0),), ((1e6, 5.0), (4e6, 5.0)), ((1e6, 9.0), (4e6, 5.0))]
)
def test_a_calibration_without_a_rate_of_traffic_is_refused(rows):
    table = OperationTable(axes=("bytes",), rows=rows)
    machine = CalibratedMachine(HardwareFile(name="mine", operations={"traffic": table}))
    with pytest.raises(ValueError, match="'traffic' of the hardware file mine gives no rate"):
        machine.traffic(1e6)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 10**9))
def test_more_bandwidth_is_never_slower(slow_us, ratio, nbytes):
    fast = machine(product_us=1, traffic_us=slow_us * min(ratio, 1 / ratio))
    slow = machine(product_us=1, traffic_us=slow_us)
    assert fast.traffic(nbytes).us <= slow.traffic(nbytes).us * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["fp32", "tf32", "bf16", "bf16-pure"]), st.sampled_from(["off", "on"]))
def test_terms_add_up_and_all_blocks_cost_the_same(precision, compile):
    spec = step(precision=precision, compile=compile)
    record = predict(spec, H100)
    head, *rows = record.tables["terms"]
    total = sum(row[head.index("us")] for row in rows if row[1] != "host") / 1e3
    assert total == pytest.approx(record.median("device_ms"))
    twice = dataclasses.replace(spec.model, num_layers=2 * spec.model.num_layers)
    deeper = predict(dataclasses.replace(spec, model=twice), H100)
    assert 1.8 < deeper.median("step_ms") / record.median("step_ms") < 2.05


def test_what_is_not_modelled_is_refused():
    for changes, said in (
        ({"optimizer": "sgd"}, "optimizer is 'sgd'"),
        ({"compile": "max-autotune"}, "compile is 'max-autotune'; predicted are off, on"),
    ):
        with pytest.raises(ValueError, match=said):
            predict(step(**changes), H100)
    with pytest.raises(ValueError, match="run stepgauge calibrate"):
        CalibratedMachine(HardwareFile(name="empty"))


def test_gpu_bound_steps_are_predicted_within_five_percent():
    """The rows were measured on another day than the calibration, which has not used them."""
    path = ROOT / "benchmarks" / "results" / "2026-11-21-h100-study.jsonl"
    measured = [Record.from_json(line) for line in path.read_text().splitlines()]
    asked = {"fp32": ("off",), "tf32": ("off",), "bf16": ("off", "on"), "bf16-pure": ("off",)}
    rows = [
        (record, predict(step(precision=record.spec["precision"], compile=mode), H100))
        for record in measured
        if record.kind == "step" and record.spec["size"] == "2.7b" and record.spec["batch"] == 4
        if record.spec["model"]["context_length"] == 512 and record.status == "ok"
        if (mode := record.spec["compile"]) in asked.get(record.spec["precision"], ())
    ]
    assert len(rows) >= 5
    for found, modelled in rows:
        assert abs(modelled.median("step_ms") / found.median("step_ms") - 1) < 0.05, found.spec


def test_a_prediction_is_paired_with_its_own_measurement_only():
    modelled = predict(step(precision="bf16"), H100)
    measured = dataclasses.replace(modelled, provenance="measured", environment={})
    other = dataclasses.replace(measured, spec={**measured.spec, "batch": 8})
    table = error_table([modelled, other, measured])
    assert (
        len(table.rows) == 1 and table.rows[0][3] == 0 and "over 1 rows: mean 0.0%" in table.caption
    )


def test_predictions_of_two_devices_are_paired_separately():
    """A folder may have rows of two GPUs, each with its own prediction."""
    modelled = predict(step(precision="bf16"), H100)
    here = dataclasses.replace(modelled, provenance="measured", environment=modelled.environment)
    there = dataclasses.replace(here, environment={"device": "NVIDIA H200"})
    rows = pair_steps([modelled, here, there])
    assert [row.prediction for row in rows] == [modelled, None]
    assert [row.record for row in pair_steps([modelled, there])] == [modelled, there]


def test_the_fused_loss_computes_its_gradients_in_forward():
    """It has the same three products, in chunks; backward has none."""
    model = ModelSpec.preset("2.7b", context_length=512, vocab_size=128_256)
    fused, plain = (
        StepOperations(
            step(model=dataclasses.replace(model, loss=loss), batch=16, precision="bf16")
        )
        for loss in ("fused", "cross-entropy")
    )

    def flops(terms):
        head = [t for t in terms if t.name.startswith("head") and t.operation.startswith("matmul")]
        return sum(t.count * math.prod(t.sizes) for t in head)

    assert flops(fused.backward()) == 0 and flops(plain.backward()) == 2 * flops(plain.forward())
    assert flops(fused.forward()) == pytest.approx(3 * flops(plain.forward()), rel=1e-3)
    for operations in (fused, plain):
        gradients = sum(t.gradient * t.count for t in operations.backward())
        assert gradients > 0.99 * operations.num_parameters


@pytest.mark.parametrize(("batch", "chunks"), [(16, 1), (32, 8)])
def test_only_many_tokens_are_divided_into_chunks(batch, chunks):
    """8192 tokens of 128,256 words are 2.1 GB in bf16, which 2560 columns hold whole; of 16,384 a
    chunk takes 512 MiB.
    """
    model = ModelSpec.preset("2.7b", context_length=512, vocab_size=128_256, loss="fused")
    operations = StepOperations(step(model=model, batch=batch, precision="bf16"))
    assert next(t for t in operations.forward() if t.name == "loss").count == chunks


def two_ranks(wrapper="bucketed", **changes):
    model = ModelSpec.preset("2.7b", context_length=128)
    return DataParallelSpec(
        model=model, size="2.7b", wrapper=wrapper, batch=16, device="cuda", **changes
    )


def linked(bytes_per_s):
    """The H100 with links of this speed."""
    links = [
        Link(settings={"op": op, "backend": "nccl", "ranks": 2}, pieces=[Piece(0.02, bytes_per_s)],
             range_bytes=(1, 2**30), fitted={}, held_out={}, measured={})
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    ]  # fmt: skip
    return CalibratedMachine(dataclasses.replace(H100.hardware, links=links))


def test_wrappers_hide_communication():
    machine = linked(300e9)
    step_ms = {
        wrapper: predict_data_parallel(two_ranks(wrapper), machine).median("step_ms")
        for wrapper in ("none", "naive", "flat", "overlapped", "bucketed")
    }
    assert step_ms["none"] < step_ms["bucketed"] <= step_ms["overlapped"] * 1.001
    assert step_ms["overlapped"] < step_ms["flat"] <= step_ms["naive"]
    narrow = predict_data_parallel(two_ranks(reduce_dtype="bf16"), machine)
    whole = predict_data_parallel(two_ranks(), machine)
    assert narrow.median("communication_ms") < 0.6 * whole.median("communication_ms")


@settings(max_examples=10, deadline=None)
@given(st.floats(1e9, 1e12), st.floats(1.0, 10.0), st.sampled_from(["bucketed", "zero1", "zero3"]))
def test_faster_links_are_never_slower(bytes_per_s, ratio, wrapper):
    slow, fast = (
        predict_data_parallel(two_ranks(wrapper), linked(rate)).median("step_ms")
        for rate in (bytes_per_s, ratio * bytes_per_s)
    )
    assert fast <= slow * (1 + 1e-9)


def test_unknown_links_and_wrappers_are_refused():
    with pytest.raises(ValueError, match="has no all_reduce between 2 ranks"):
        predict_data_parallel(two_ranks(), H100)
    with pytest.raises(ValueError, match="of torch-ddp only own is predicted"):
        predict_data_parallel(two_ranks("torch-ddp", reduce_dtype="bf16"), linked(1e9))


def test_torchs_wrappers_copy_weights_and_broadcast_them_one_rank_after_another():
    """fully_shard copies each weight out of its buffer, in forward and in backward; the redundancy
    optimizer broadcasts half of the weights after the other half.
    """
    on = {name: predict_data_parallel(two_ranks(name, precision="bf16"), H200)
        for name in ("zero3", "torch-fsdp", "torch-ddp", "torch-zero1")}  # fmt: skip
    ours, torchs = on["zero3"].median("forward_ms"), on["torch-fsdp"].median("forward_ms")
    weights = two_ranks().model.num_parameters
    copies = H200.traffic(2 * 2 * weights).us / 1e3
    assert 0 < torchs - ours < copies, "some copies are hidden, and our wrapper has hooks"
    assert on["torch-fsdp"].median("peak_bytes") < on["torch-ddp"].median("peak_bytes")
    whole, shared = (on[name].median("optimizer_ms") for name in ("torch-ddp", "torch-zero1"))
    prices = Prices(H200, two_ranks().parsed_layout)
    sent = prices.collective("broadcast", 4 * weights, "data").us / 1e3
    assert shared == pytest.approx(whole / 2 + sent, rel=0.1)
    by_wires = predict_data_parallel(two_ranks("torch-zero1", precision="bf16"), DGX)
    assert by_wires.median("optimizer_ms") > whole / 2, "a fabric has no time of a broadcast"


def test_a_compiled_graph_returns_all_its_gradients_at_its_end():
    """Compiled blocks return theirs as each ends. A whole network returns all at the end, so that all
    communication is exposed.
    """
    machine = linked(300e9)
    waits = {
        mode: predict_data_parallel(two_ranks(compile=mode), machine).median("exposed_ms")
        for mode in ("off", "blocks", "on")
    }
    sent = predict_data_parallel(two_ranks(compile="on"), machine).median("communication_ms")
    assert waits["off"] <= waits["blocks"] < waits["on"] == pytest.approx(sent)


def test_the_machines_own_contention_is_used():
    rows = [Contention(kind, "all_reduce", 1.0, 1.0) for kind in ("matmul", "attention", "traffic")]
    machine = linked(300e9)
    quiet = CalibratedMachine(machine.hardware.with_contention(rows))
    free, usual = (predict_data_parallel(two_ranks(), m) for m in (quiet, machine))
    alone = predict(step(batch=16, model=two_ranks().model), H100)
    assert free.median("backward_ms") - free.median("exposed_ms") == pytest.approx(
        alone.median("backward_ms")
    )
    assert usual.median("backward_ms") > 1.02 * free.median("backward_ms")
    assert "slowed by collectives" not in str(free.tables["terms"])


def test_contention_depends_on_the_number_of_ranks():
    rows = [Contention("matmul", "all_reduce", 1.0 + n / 10, 1.5, n) for n in (2, 8)]
    hardware = linked(300e9).hardware.with_contention(rows)
    prices = Prices(CalibratedMachine(hardware), Layout.parse("dp8 tp2"))
    beside = [prices.contention.of("matmul nt bf16", "all_reduce", axis).kernel
              for axis in ("data", "tensor")]  # fmt: skip
    assert beside == [1.8, 1.2]


@pytest.mark.parametrize("wrapper", ["bucketed", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layout_of_one_rank_equals_the_single_gpu(wrapper, precision):
    spec = two_ranks(wrapper, precision=precision, ranks=1)
    spread = predict_data_parallel(spec, H100)
    single = step(precision=precision, batch=16, model=spec.model)
    alone = predict(single, H100)
    for phase in ("forward", "backward", "optimizer", "step"):
        assert spread.median(f"{phase}_ms") == pytest.approx(alone.median(f"{phase}_ms"))
    assert spread.median("communication_ms") == spread.median("exposed_ms") == 0


def test_launch_bound_times_are_not_extrapolated():
    """64 heads take as long for 128 tokens as for 512, which gives no rate for 1024 heads."""
    rows = ((64, 128, 64, 100.0), (64, 512, 64, 110.0), (64, 4096, 64, 2000.0))
    table = OperationTable(("h", "t", "d"), rows)
    tables = {
        "attention sdpa forward fp32": table,
        "traffic": OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3))),
    }
    made = CalibratedMachine(HardwareFile(name="made", operations=tables))

    def us(heads):
        return made.time("attention sdpa forward fp32", heads, 128, 64).us

    of_its_bytes = 4 * 4 * 1024 * 128 * 64 / 1e3  # 1 GB in a millisecond
    assert us(1024) == pytest.approx(of_its_bytes / 1e3, rel=0.05)
    assert us(65) == us(64) == 100.0  # but more heads do not take less


def test_far_larger_products_have_the_best_rate_that_was_timed_also_in_another_layout():
    """Few shapes were timed of nn: at the rate of its nearest, a large product would take twice as long."""
    rows = ((64, 64, 64, 2.0), (64, 256, 64, 4.0))
    axes = ("m", "n", "k")
    few = OperationTable(axes, rows, left_out=10)
    many = OperationTable(axes, ((64, 64, 64, 10.0), (2048, 2048, 2048, 1e4)))
    traffic = OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3)))

    def us(*sizes, **tables):
        operations = {f"matmul {layout} fp32": table for layout, table in tables.items()}
        file = HardwareFile(name="made", operations={**operations, "traffic": traffic})
        return CalibratedMachine(file).time("matmul nn fp32", *sizes).us

    assert us(512, 64, 64, nn=few) == pytest.approx(8 * 2.0)  # near: the rate of the nearest
    assert us(64 * 24, 64, 64, nn=few) == pytest.approx(8 * 2.0 + 16 * 4.0 / 4)
    times = [us(64 * factor, 64, 64, nn=few) for factor in range(1, 40)]
    assert times == sorted(times), "more work takes longer"
    assert us(2048, 2048, 2048, nn=few, nt=many) == 1e4
    whole = dataclasses.replace(few, left_out=0)
    assert us(2048, 2048, 2048, nn=whole, nt=many) != 1e4


def test_attention_without_a_mask_takes_twice_the_causal_time_unless_it_was_timed():
    axes, sizes = ("h", "t", "d"), (64, 4096, 64)
    tables = {
        "attention sdpa forward bf16": OperationTable(axes, ((*sizes, 2000.0),)),
        "traffic": OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3))),
    }

    def us(tables):
        made = CalibratedMachine(HardwareFile(name="made", operations=tables))
        found = made.time("attention sdpa-full forward bf16", *sizes).us
        assert ("attention sdpa-full forward bf16", sizes) in made.requested
        return found

    assert us(tables) == 4000
    own = OperationTable(axes, ((*sizes, 3100.0),))
    assert us({**tables, "attention sdpa-full forward bf16 exact": own}) == 3100


def test_products_outside_of_the_grid_depend_on_their_share_of_the_step_too():
    axes = ("m", "n", "k")
    tables = {
        "matmul nt bf16": OperationTable(axes, ((512, 512, 512, 10.0),)),
        "matmul nt bf16 alone": OperationTable(axes, ((512, 512, 512, 12.0),)),
        "traffic": OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3))),
    }
    made = CalibratedMachine(HardwareFile(name="made", operations=tables))
    inside, outside = (
        [
            made.at_product_share(share).time("matmul nt bf16", 512, n, 512).us
            for share in (0.5, 1.0)
        ]
        for n in (512, 1024)
    )
    assert inside == pytest.approx([10.0, 12.0]) and outside == pytest.approx([20.0, 24.0])


def test_attention_depends_on_the_share_of_products_as_they_do():
    name, axes, sizes = "attention sdpa forward bf16", ("h", "t", "d"), (32, 8192, 128)
    tables = {
        name: OperationTable(axes, ((*sizes, 900.0),)),
        f"{name} alone": OperationTable(axes, ((*sizes, 1170.0),)),
        "traffic": OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3))),
    }
    made = CalibratedMachine(HardwareFile(name="made", operations=tables))
    found = [made.at_product_share(share).time(name, *sizes).us for share in (0.5, 0.75, 1.0)]
    assert found == pytest.approx([900.0, 1035.0, 1170.0])
    del tables[f"{name} alone"]  # an older file
    older = CalibratedMachine(HardwareFile(name="made", operations=tables))
    assert older.at_product_share(1.0).time(name, *sizes).us == 900.0


def test_batched_products_take_at_least_the_time_of_their_bytes_unless_they_were_timed():
    """One product with all rows would reuse a factor that each product of a batch reads separately."""
    sizes = (128, 1024, 1024, 64)
    tables = {
        "matmul nn bf16": OperationTable(("m", "n", "k"), ((128 * 1024, 1024, 64, 30.0),)),
        "traffic": OperationTable(("bytes",), ((1e6, 1.0), (1e9, 1e3))),
    }

    def us(tables):
        made = CalibratedMachine(HardwareFile(name="made", operations=tables))
        found = made.time("matmul batched nn bf16", *sizes).us
        assert ("matmul batched nn bf16", sizes) in made.requested
        return found

    assert us(tables) == pytest.approx(2 * 128 * (2 * 1024 * 64 + 1024 * 1024) / 1e6, rel=0.01)
    own = OperationTable(("b", "m", "n", "k"), ((*sizes, 150.0),))
    assert us({**tables, "matmul batched nn bf16": own}) == 150
    slow = OperationTable(("m", "n", "k"), ((128 * 1024, 1024, 64, 900.0),))
    assert us({**tables, "matmul nn bf16": slow}) == 900


def test_a_captured_backward_is_used_at_any_size():
    """Short backward times of older files may be launch overhead, and are left out."""
    name = "rmsnorm backward bf16"
    rows = ((512, 512, 30.0), (512, 4096, 31.0), (8192, 512, 31.0), (8192, 4096, 200.0))
    for captured, source in ((True, CALIBRATED), (False, EXTRAPOLATED)):
        operations = {**H100.hardware.operations, name: OperationTable(("m", "n"), rows, captured)}
        machine = CalibratedMachine(dataclasses.replace(H100.hardware, operations=operations))
        assert machine.time(name, 512, 512).source == source


def heads_us(kv_heads, phase):
    model = ModelSpec.preset("medium", context_length=2048, num_kv_heads=kv_heads)
    spec = StepSpec(model=model, batch=2, precision="bf16", device="cuda")
    terms = getattr(StepOperations(spec), phase)()
    return next(H200.time(t.operation, *t.sizes).us for t in terms if ".rotation" in t.name)


def test_grouped_key_heads_are_priced_like_a_narrower_network():
    """16 query and 4 + 4 key and value heads are as wide as half of 48 heads."""
    for phase, part in (("forward", 20 / 32), ("backward", 24 / 48)):
        assert heads_us(4, phase) == pytest.approx(part * heads_us(16, phase), rel=0.1)


@pytest.mark.parametrize(("compile", "last"), [("off", []), ("blocks", ["down"]), ("on", [])])
def test_a_checkpointed_block_is_recomputed_as_far_as_backward_needs_it(compile, last):
    """torch stops before the last product, except in a separately compiled block, which is one call."""
    spec = StepSpec(model=ModelSpec.preset("medium"), precision="bf16", device="cuda",
                    checkpointing="blocks", compile=compile)  # fmt: skip
    again = [t for t in StepOperations(spec).backward() if t.name.startswith("recomputed.")]
    assert [t.name.split(".")[2] for t in again if t.operation.startswith("matmul")] == [
        "input", "output", "up", *last,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "sent"),
    [
        (NetworkPart(batch=1, tensor=2), ["all_gather", "all_gather"]),
        (NetworkPart(batch=1, tensor=2, overlap=True), []),
        (NetworkPart(batch=1, context=2), []),
        (NetworkPart(batch=1, context=2, ulysses=True), []),
    ],
)
def test_selective_checkpointing_repeats_the_all_gathers_before_products(share, sent):
    model = ModelSpec.preset("xl", context_length=32_768, attention="triton")
    spec = StepSpec(model=model, precision="bf16", device="cuda", checkpointing="selective")
    again = [t for t in StepOperations(spec, share).backward() if t.name.startswith("recomputed.")]
    assert [term.operation for term in again if term.axis] == sent
    assert not [term for term in again if term.is_product]


def test_the_precisions_that_are_priced_are_those_that_train():
    """Bytes and casts of a precision stand in two tables, because the cost model needs no torch."""
    trained = {name: PRECISIONS[name] for name in PRECISION}
    assert set(AUTOCAST) == {name for name, each in trained.items() if each.autocast is not None}
    assert {name: weight for name, (_, _, weight) in PRECISION.items()} == {
        name: each.parameters.itemsize for name, each in trained.items()
    }
