"""Ranked layouts: which fit, and in which order."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.planning import overlap_ratios, screen
from stepgauge.cost.planning.doubling import longest_of_all
from stepgauge.cost.planning.hiding import overlaps
from stepgauge.cost.planning.planner import (
    candidate_of,
    device_bytes,
    layout_spec,
    memory_limit,
    plan,
)
from stepgauge.cost.planning.screen import Screen, candidates
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.report.plan import overlap_sentence
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import ACCELERATORS, CUDA_CONTEXT, NOT_FOR_TENSORS, HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.planning import PlanSpec

ROOT = Path(__file__).parents[2]
DGX_H100 = HardwareFile.read(ROOT / "hardware" / "dgx-h100.json")
MODEL = ModelSpec.preset("10b", context_length=4096)


def plan_spec(**changes):
    usual = {"model": MODEL, "size": "10b", "gpus": 16, "global_batch": 32, "precision": "bf16"}
    return PlanSpec(**{**usual, **changes})


def test_rows_fit_into_memory_are_ranked_and_use_all_gpus():
    machine = CalibratedMachine(DGX_H100)
    found = plan(plan_spec(tokens="1B"), machine, top=2)
    times = [row.median("step_ms") for row in found.rows]
    assert times == sorted(times) and len(times) == 2
    every, fitting = found.counted
    assert every > fitting > 50  # 10b does not fit everywhere
    for row in found.rows:
        spec = LayoutSpec(**{**row.spec, "model": ModelSpec(**row.spec["model"])})
        assert spec.ranks == 16 and spec.batch * spec.accumulation == 32
        assert device_bytes(row) <= memory_limit(machine)
        hours = 1e9 / spec.tokens_per_step * row.median("step_ms") / 3.6e6
        assert row.median("gpu_hours") == pytest.approx(hours * 16)
    best = LayoutSpec(**{**found.rows[0].spec, "model": MODEL})
    assert all(o.ratio > 0 for o in overlaps(best, machine))
    for (
        by_name
    ) in found.fastest.values():  # simulated like the rows, so never faster than the first
        assert next(iter(by_name.values())) == found.rows[0]
        steps = [row.median("step_ms") for row in by_name.values()]
        assert len(steps) > 1 and steps == sorted(steps)


def test_the_first_row_does_not_depend_on_the_number_of_rows():
    model = ModelSpec.preset("2.7b", num_layers=8)
    spec = plan_spec(model=model, size="2.7b", gpus=8, global_batch=64)
    machine = CalibratedMachine(DGX_H100)
    few, many = (plan(spec, machine, top=top).rows[0] for top in (1, 20))
    assert few == many


def test_progress_counts_the_layouts_that_are_screened_and_simulated():
    heard = []
    spec = plan_spec(model=ModelSpec.preset("nano"), gpus=2, global_batch=8)
    machine = CalibratedMachine(DGX_H100)
    found = plan(spec, machine, top=2, hear=lambda *progress: heard.append(progress))
    simulated = min(30, found.counted[1])
    totals = {
        "screening": found.counted[0],
        "simulating": simulated,
        "finding exposed communication of": 2,
    }
    assert heard == [(name, n, total) for name, total in totals.items() for n in range(total)]


def test_rows_have_exposed_communication():
    """Only rows that are returned have it, because it takes one more simulation per axis."""
    spec = plan_spec(model=ModelSpec.preset("nano"), gpus=2, global_batch=8)
    found = plan(spec, CalibratedMachine(DGX_H100), top=2)
    assert all(any("exposed_ms" in name for name in row.metrics) for row in found.rows)


def test_overlapped_tensor_collectives_do_not_make_computation_wait():
    waits = [
        overlaps(
            LayoutSpec(model=MODEL, layout=layout, batch=batch, precision="bf16", device="cuda"),
            CalibratedMachine(DGX_H100),
        )[0].waits
        for layout, batch in (("tp2", 4), ("tp2 overlap", 4), ("tp4 overlap", 1))
    ]
    assert waits == [True, False, True]  # messages of the last are too small to overlap


def test_candidates_overlap_large_tensor_parallel_messages():
    found = {
        (candidate.micro_batch, candidate.layout.overlap)
        for candidate in candidates(plan_spec(gpus=2, global_batch=4), 8)
        if candidate.layout.tensor == 2
    }
    # a piece is half of micro_batch x 4096 tokens x 4608 x 2 bytes, 18 MiB for one sequence;
    # 32 MiB are needed
    assert MODEL.d_model == 4608 and found == {(1, False), (2, True), (4, True)}
    small = plan_spec(model=ModelSpec.preset("nano"), gpus=2, global_batch=4)
    assert not any(c.layout.overlap for c in candidates(small, 8))


@pytest.mark.parametrize("settings", [{}, {"compile": "on"}, {"precision": "fp16"}])
def test_candidates_are_the_layouts_that_predict_allows(settings):
    spec = plan_spec(model=ModelSpec.preset("tiny"), gpus=4, global_batch=8, **settings)

    def is_allowed(candidate):
        batch = candidate.layout.data * candidate.micro_batch * candidate.layout.microbatches
        options = {"batch": batch, "checkpointing": candidate.checkpointing, "device": "cuda"}
        try:
            LayoutSpec(model=spec.network, layout=str(candidate.layout), **options, **settings)
        except ValueError:
            return False
        return True

    found, dividing = set(candidates(spec, 8)), list(screen._dividing(spec, 8))
    assert found == {each for each in dividing if is_allowed(each)}
    assert found and (len(found) < len(dividing)) == bool(settings)


def test_micro_batches_are_all_divisors_of_a_ranks_batch():
    """25 sequences per rank in one pass of zero3 are 1.6 times as fast as any pipeline of 16."""
    per_rank_25 = plan_spec(model=ModelSpec.preset("10b"), global_batch=100)
    sizes = {
        (c.micro_batch, c.accumulation)
        for c in candidates(per_rank_25, 8)
        if c.layout.wrapper == "zero3" and c.layout.sizes == {"data": 4, "tensor": 4}
    }
    assert sizes == {(1, 25), (5, 5), (25, 1)}
    cpu_spec = plan_spec(model=ModelSpec.preset("nano"), gpus=1, global_batch=192, device="cpu")
    assert max(c.micro_batch for c in candidates(cpu_spec, 1)) == 64
    row = plan(per_rank_25, CalibratedMachine(DGX_H100), top=1).rows[0]
    assert row.spec["layout"] == "dp4 zero3 tp4"
    alone = predict_layout(layout_spec(candidate_of(row), per_rank_25), CalibratedMachine(DGX_H100))
    assert row.median("step_ms") == pytest.approx(alone.median("step_ms"), rel=0.01)


def test_the_cuda_context_is_counted_once():
    """An H100 of 80 GB has 79.2 GiB for programs, of which the CUDA context takes a part."""
    spec = LayoutSpec(model=MODEL, layout="dp16 zero3", batch=16, precision="bf16", device="cuda")
    row = predict_layout(spec, CalibratedMachine(DGX_H100))
    outside = sum(size for name, size, _ in row.tables["memory"][1:] if "(outside)" in name)
    left = memory_limit(CalibratedMachine(DGX_H100)) - CUDA_CONTEXT
    assert outside > CUDA_CONTEXT and left == 80 * 2**30 - NOT_FOR_TENSORS


def test_screening_includes_the_head_of_the_last_stage():
    """The last stage of a small network takes several times as long as its blocks. If screening left it
    out, pipelines would displace faster layouts.
    """
    model = ModelSpec.preset("nano", vocab_size=100_000, context_length=1024)
    machine, spec = CalibratedMachine(DGX_H100), plan_spec(model=model, gpus=2, global_batch=8)
    row = plan(spec, machine, top=1).rows[0]
    screen = Screen(spec, machine)
    for candidate in candidates(spec, 8):
        if candidate.layout.pipeline == 2 and candidate.layout.schedule == "1f1b":
            formula = screen.of(candidate).step_us / 1e3
            simulated = predict_layout(layout_spec(candidate, spec), machine).median("step_ms")
            assert formula == pytest.approx(simulated, rel=0.35)
    assert "dp2" in row.spec["layout"]


def test_sequences_are_shared_only_if_there_are_too_few_for_all_ranks():
    """A ring needs this package's attention."""
    model = dataclasses.replace(MODEL, context_length=131_072)
    spec = plan_spec(model=model, global_batch=8)
    exchanged = {c.layout for c in candidates(spec, 8) if c.layout.context > 1}
    assert exchanged and all(layout.ulysses for layout in exchanged)
    ours = plan_spec(model=dataclasses.replace(model, attention="triton"), global_batch=8)
    found = list(candidates(ours, 8))
    assert all(c.layout.ranks == 16 for c in found)
    assert {c.layout.ulysses for c in found if c.layout.context > 1} == {True, False}
    assert all(math.gcd(c.micro_batch, c.layout.context) == 1 for c in found)
    short = plan_spec(model=ModelSpec.preset("10b", context_length=2048), global_batch=8)
    assert not any(c.layout.context > 1 for c in candidates(short, 8))


def test_long_sequences_are_planned_with_a_context_axis():
    """One sequence of 128k tokens on 16 GPUs, with a tensor axis of at most four."""
    model = dataclasses.replace(MODEL, num_layers=8, context_length=131_072, attention="triton")
    spec, machine = plan_spec(model=model, global_batch=1), CalibratedMachine(DGX_H100)
    found = plan(spec, machine, top=2)
    best = found.rows[0]
    assert "cp" in best.spec["layout"]
    assert "context_exposed_ms" in best.metrics
    screen = Screen(spec, machine)
    for row in found.rows:
        formula = screen.of(candidate_of(row))
        assert formula.step_us / 1e3 == pytest.approx(row.median("step_ms"), rel=0.1)
        assert formula.memory.device_bytes == pytest.approx(device_bytes(row), rel=0.02)
    few_tokens = dataclasses.replace(spec, tokens="200K")  # they do not limit the context
    longest, candidate = longest_of_all(few_tokens, machine, candidate_of(best))
    assert longest >= 131_072 and candidate.layout.context > 1
    longer = dataclasses.replace(spec, model=dataclasses.replace(model, context_length=2 * longest))
    with pytest.raises(ValueError, match="nothing fits"):
        plan(longer, machine, top=1)


def test_the_longest_context_of_a_network_that_fits_only_without_recomputation():
    """Recomputing a single block needs more memory than keeping it."""
    model = dataclasses.replace(
        ModelSpec.preset("small"), num_layers=1, vocab_size=100, context_length=1_325_524
    )
    spec = plan_spec(model=model, gpus=1, global_batch=1, precision="bf16")
    machine = CalibratedMachine(HardwareFile.read(ROOT / "hardware" / "dgx-a100.json"))
    best = candidate_of(plan(spec, machine, top=1).rows[0])
    assert longest_of_all(spec, machine, best) == (1_325_524, best)


def test_the_error_that_nothing_fits_names_the_needed_memory():
    with pytest.raises(ValueError, match=r"every layout needs at least \d+\.\d GiB per GPU"):
        plan(plan_spec(gpus=1, global_batch=1), CalibratedMachine(DGX_H100))
    with pytest.raises(ValueError, match="no layout divides 3 sequences among 64 GPUs"):
        plan(plan_spec(global_batch=3, gpus=64), CalibratedMachine(DGX_H100))
    unknown = dataclasses.replace(DGX_H100, device="", base=DGX_H100.base)
    with pytest.raises(ValueError, match="published peaks"):
        plan(plan_spec(), CalibratedMachine(unknown))


def test_the_device_without_peaks_is_named_with_what_to_write():
    unknown = HardwareFile(name="mine", device="NVIDIA B200", base=DGX_H100.base)
    for text in ("file mine has no peaks", "'NVIDIA B200' is not one of NVIDIA H200, ",
                 '"peaks": {"flops": {"fp32": '):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(text)):
            CalibratedMachine(unknown)
    peaks = dataclasses.asdict(ACCELERATORS["NVIDIA H200"])
    some = dataclasses.replace(unknown, other={"peaks": peaks | {"flops": {"bf16": 1e15}}})
    assert CalibratedMachine(some).time("matmul nt bf16", 512, 512, 512).us > 0
    with pytest.raises(ValueError, match=r"file mine: peaks\.flops has no fp32; it has bf16"):
        CalibratedMachine(some).time("matmul nt fp32", 512, 512, 512)
    no_memory = dataclasses.replace(unknown, other={"peaks": peaks | {"memory_gb": 0}})
    with pytest.raises(
        ValueError, match=r"file mine: peaks\.memory_gb is 0; .*in GB, of 'NVIDIA B200'"
    ):
        plan(plan_spec(), CalibratedMachine(no_memory))


def test_a_file_with_own_tables_keeps_those_of_its_base():
    """`validate --now` adds the host's times, and single shapes, to a file that describes a machine."""
    a100 = HardwareFile.read(ROOT / "hardware" / "dgx-a100.json")
    before = CalibratedMachine(a100.on_ranks(2))
    rows = tuple((blocks, phase, 100.0 * blocks) for blocks in (1, 4) for phase in range(3))
    host = {"host eager bf16": OperationTable(("blocks", "phase"), rows)}
    product = {"matmul nt bf16 exact": OperationTable(("m", "n", "k"), ((512, 512, 512, 7.0),))}
    on_two = dataclasses.replace(a100, by_ranks={2: host}).on_ranks(2)
    alone = dataclasses.replace(a100, operations={**host, **product}).on_ranks(1)
    for file in (on_two, alone):
        machine = CalibratedMachine(file)
        assert machine.is_transferred and machine.traffic(1e9) == before.traffic(1e9)
        assert machine.time("matmul nn bf16", 64, 64, 64) == before.time(
            "matmul nn bf16", 64, 64, 64
        )
        assert machine.table("host eager bf16") == host["host eager bf16"]
        assert machine.table("host eager fp32") == before.table("host eager fp32")
    measured = CalibratedMachine(alone).time("matmul nt bf16", 512, 512, 512)
    assert (measured.us, measured.source) == (7.0, "calibrated")  # timed here, so not scaled


def test_a_calibrated_file_is_not_scaled_like_its_base():
    calibrated = HardwareFile.read(ROOT / "hardware" / "h200-sxm.json")
    machine = CalibratedMachine(dataclasses.replace(calibrated, base=DGX_H100.base))
    assert not machine.is_transferred
    alone = CalibratedMachine(calibrated)
    assert machine.time("matmul nt bf16", 64, 64, 64) == alone.time("matmul nt bf16", 64, 64, 64)
    assert machine.table("matmul nt bf16 exact") is None


def test_a_row_stays_if_only_its_exposed_communication_cannot_be_predicted():
    """A step without its tensor axis needs the host's times of a single process."""
    h200 = HardwareFile.read(ROOT / "hardware" / "h200-sxm.json")
    partial = {name: t for name, t in h200.operations.items() if name != "host eager fp32"}
    machine = CalibratedMachine(dataclasses.replace(h200, operations=partial).on_ranks(2))
    model = ModelSpec.preset("2.7b", context_length=2048)  # one sequence: only tp2 shares it
    spec = plan_spec(model=model, gpus=2, global_batch=1, precision="fp32")
    (row, *_) = plan(spec, machine, top=1).rows
    assert row.median("step_ms") > 0 and "tensor_exposed_ms" not in row.metrics
    assert "exposed communication is not known: the hardware file h200-sxm has no host" in row.note


def test_1024_gpus_are_planned_without_torch():
    code = (
        "import sys; from stepgauge.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    command = ["plan", "--size", "10b", "--gpus", "1024", "--context", "4096", "--global-batch"]
    command += ["1024", "--precision", "bf16", "--tokens", "300B", "--top", "1", "--hardware"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, str(ROOT / "hardware" / "dgx-h100.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        "Communication compared with computation",
        "dp1024 zero3",
        "largest micro-batch",
        "stepgauge bench layout",
    ):
        assert words in done.stdout


def test_overlap_ratios_by_hand():
    """With 1000 tokens at 4 PFLOP/s, backward takes 1 ns per weight; 2 · 1/2 · 4 bytes at 8 GB/s half
    of that.
    """
    data = overlap_ratios.data_parallel(
        ranks=2, tokens=1000, gradient_bytes=4, flops_per_s=4e12, bytes_per_s=8e9
    )
    assert data.ratio == pytest.approx(0.5 / 1.0)
    said = overlap_sentence(data)
    assert "communication takes 0.5000 times as long as computation, and can be hidden" in said
    short = overlap_sentence(dataclasses.replace(data, ratio=0.00123))
    assert "takes 0.001230 times" in short
    forward, backward = overlap_ratios.sharded(
        ranks=2, tokens=1000, weight_bytes=2, flops_per_s=4e12, bytes_per_s=1e9
    )
    assert forward.ratio == backward.ratio == pytest.approx(1e-9 / 0.5e-9)
    assert not forward.hides and "too long to be hidden" in overlap_sentence(forward)
    given = {"value_bytes": 2, "flops_per_s": 1e12, "bytes_per_s": 1e11}
    one, twice = (
        overlap_ratios.tensor(ranks=4, width=w, block_weights=12 * w**2, waits=True, **given).ratio
        for w in (1024, 2048)
    )
    assert one == pytest.approx(
        2 * twice
    )  # communication of a wider network is shorter relative to its block
    waits = overlap_ratios.tensor(
        ranks=4, width=8192, block_weights=12 * 8192**2, waits=True, **given
    )
    assert (
        waits.ratio < 1
        and not waits.hides
        and "computation waits for it" in overlap_sentence(waits)
    )
    shallow, deep = (
        overlap_ratios.pipeline(blocks=n, width=1024, block_weights=12 * 1024**2, **given).ratio
        for n in (1, 4)
    )
    assert shallow == pytest.approx(4 * deep)
    scales = overlap_ratios.typical_scales(
        tokens=8, width=4, blocks=2, block_weights=12 * 16, vocabulary=10
    )
    assert scales["forward FLOPs"] == 2 * 8 * (2 * 192 + 40)
