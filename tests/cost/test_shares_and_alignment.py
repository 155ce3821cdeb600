"""Prices that depend on the rest of the step or on a product's alignment: clock, messages, unaligned rows, loss."""

import dataclasses
import math
from pathlib import Path

import pytest

from stepgauge.calibrate.grids import GPU
from stepgauge.calibrate.operations import operations
from stepgauge.cost.operations.cross_entropy import CrossEntropy
from stepgauge.cost.operations.step_operations import NetworkPart, StepOperations
from stepgauge.cost.operations.tensor_overlap import OverlappedLayer
from stepgauge.cost.operations.terms import Arithmetic, Term, padded
from stepgauge.cost.rank import at_step_share
from stepgauge.cost.rates.alignment import with_alignment
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import MESSAGE_OVERHEAD_US, Prices
from stepgauge.cost.step import predict
from stepgauge.measure.fusion import TracedTerm, fuse
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import StepSpec

ROOT = Path(__file__).parents[2]
FILE = HardwareFile.read(ROOT / "hardware" / "h200-sxm.json")
H200 = CalibratedMachine(FILE)
ARITHMETIC = Arithmetic.of("bf16", is_compiled=False)
PRODUCT = ("matmul nt bf16", 8192, 4096, 4096)


def spec(size="2.7b", *, vocab_size=10_000, loss="cross-entropy", **changes):
    model = ModelSpec.preset(size, context_length=1024, vocab_size=vocab_size, loss=loss)
    asked = {"batch": 8, "precision": "bf16", "device": "cuda", "compile": "blocks", **changes}
    return StepSpec(model=model, size=size, **asked)


def product_us(asked, layout=None, **share):
    """The time of one product at the share of products in a step."""
    part = NetworkPart(batch=asked.batch, **share)
    prices = at_step_share(Prices(H200, layout), [StepOperations(asked, part)])
    return prices.machine.time(*PRODUCT).us


def test_products_are_faster_beside_a_longer_update():
    """At the power limit, the optimizer lets the GPU rest: the more of it, the faster are products."""
    whole, alone = product_us(spec()), product_us(spec(phases="backward"))
    assert 1.01 * whole < alone
    often = product_us(spec(), passes=8)  # one update for eight passes
    assert whole < often < alone
    owned = product_us(spec(), Layout(data=8, wrapper="zero1"))  # each rank updates an eighth
    assert whole < owned < alone


def test_waiting_for_other_stages_counts_as_rest():
    stages = [StepOperations(spec(), NetworkPart(batch=8))]
    busy, idle = (
        at_step_share(Prices(H200), stages, busy=busy).machine.time(*PRODUCT).us
        for busy in (1.0, 0.8)
    )
    assert idle < 0.99 * busy


@pytest.mark.parametrize(
    ("operation", "sizes", "name"),
    [
        ("matmul nt bf16", (512, 50_257, 768), "matmul 2-byte nt bf16"),
        ("matmul nn bf16", (512, 768, 50_258), "matmul 4-byte nn bf16"),
        ("matmul tn bf16", (50_260, 768, 512), "matmul 4-byte tn bf16"),
        ("matmul nt bf16", (511, 50_264, 768), "matmul nt bf16"),  # tokens are no length of a row
        ("matmul tn bf16", (768, 768, 511), "matmul tn bf16"),
        ("matmul nt fp32", (512, 50_257, 768), "matmul nt fp32"),
        ("matmul grouped nt bf16", (4, 512, 50_257, 768), "matmul grouped nt bf16"),
        ("traffic", (1e6,), "traffic"),
    ],
)
def test_products_are_named_by_the_alignment_of_their_rows(operation, sizes, name):
    assert with_alignment(operation, sizes) == name


def test_unaligned_products_are_calibrated_under_the_names_that_predictions_use():
    named = {name: timed for name, timed in operations(GPU).items() if "-byte" in name}
    assert len(named) == 6
    for name, timed in named.items():
        _, _, layout, dtype = name.split()
        assert {with_alignment(f"matmul {layout} {dtype}", shape) for shape in timed.grid} == {name}


def test_unaligned_products_are_slow_as_measured_and_without_their_times_like_others():
    """Measured with 8192 tokens, 1600 wide: 13.4 ms with 50,257 words, 4.9 with 50,258, 1.82 with 50,264."""
    odd, even, aligned = (
        H200.time("matmul nt bf16", 8192, words, 1600).us for words in (50_257, 50_258, 50_264)
    )
    assert (odd, even, aligned) == pytest.approx((13_430, 4_902, 1_823), rel=0.06)
    tables = {name: table for name, table in FILE.operations.items() if "-byte" not in name}
    older = CalibratedMachine(dataclasses.replace(FILE, operations=tables))
    assert older.time("matmul nt bf16", 8192, 50_257, 1600).us == pytest.approx(aligned, rel=0.001)
    note = predict(spec("small", vocab_size=50_257), older).note
    assert "slow products: " in note and "which this hardware file does not know" in note


def test_an_exact_time_of_an_unaligned_product_does_not_depend_on_the_clock():
    """It does not reach the power limit, so that the share of products does not matter."""
    size, name = (8192, 50_257, 1600), "matmul nt bf16"
    exact = OperationTable(("m", "n", "k"), ((*size, 13_000.0),))
    tables = {**FILE.operations, f"{name} exact": exact}
    timed = CalibratedMachine(dataclasses.replace(FILE, operations=tables))
    for machine, us in ((timed, 13_000), (H200, H200.time(name, *size).us)):
        assert machine.at_product_share(0.9).time(name, *size).us == pytest.approx(us)


@pytest.mark.parametrize(
    ("vocabulary", "words"), [(50_270, 25_135), (50_271, 25_135), (50_272, 25_136)]
)
def test_tensor_parallel_ranks_wait_for_the_one_with_unaligned_words(vocabulary, words):
    asked = spec("small", vocab_size=vocabulary)
    assert StepOperations(asked, NetworkPart(batch=8, tensor=2)).words == words


def test_compiled_products_are_padded_in_formulas_and_in_traces():
    traced = TracedTerm(Term("mm", "matmul nt bf16", (2048, 50_257, 768)))
    (fused,) = fuse({"forward": [traced]})["forward"]
    asked = spec("small", vocab_size=50_257, compile="on", batch=2)
    (head,) = (term for term in StepOperations(asked).forward() if term.name == "head")
    assert fused.sizes == head.sizes == (2048, 50_264, 768)
    weight = padded(Term("mm", "matmul tn bf16", (50_257, 768, 2047)))
    assert weight.sizes == (50_264, 768, 2047)  # tokens are not padded
    assert padded(Term("mm", "matmul nt fp32", (1, 50_257, 768))).sizes == (1, 50_257, 768)


def test_the_loss_under_autocast_costs_as_many_bytes_as_without_its_table():
    tables = {name: table for name, table in FILE.operations.items() if "autocast" not in name}
    older = CalibratedMachine(dataclasses.replace(FILE, operations=tables))
    for term in (
        *CrossEntropy(ARITHMETIC, autocasts=True, on_gpu=True).forward(8192, 32_000),
        *CrossEntropy(ARITHMETIC, autocasts=True, on_gpu=True).backward(8192, 32_000),
    ):
        assert Prices(older).us(term) == pytest.approx(Prices(H200).us(term), rel=0.05)


def test_a_note_names_slow_products_and_padding_avoids_them():
    slow = predict(spec("small", vocab_size=50_257), H200)
    assert "slow products: " in slow.note and "(head" in slow.note and "50,304" in slow.note
    for asked in (
        spec("small", vocab_size=50_264),
        spec("small", vocab_size=50_257, loss="fused"),  # the kernel pads
        spec("small", vocab_size=50_257, compile="on"),  # torch.compile pads
    ):
        fast = predict(asked, H200)
        assert "slow products" not in fast.note
        assert fast.median("step_ms") < 0.75 * slow.median("step_ms")


def test_small_with_a_large_vocabulary_takes_as_long_as_measured():
    """Measured on an H200, eager, 16 sequences: 60.30 ms with 50,264 words, 85.45 with 50,257."""
    for words, measured_ms in ((50_264, 60.30), (50_257, 85.45)):
        asked = spec("small", vocab_size=words, batch=16, compile="off")
        assert predict(asked, H200).median("step_ms") == pytest.approx(measured_ms, rel=0.06)


def test_waiting_for_messages_of_a_tensor_axis_counts_as_rest():
    layout = Layout(tensor=2)
    stages = [StepOperations(spec(), NetworkPart(batch=8, tensor=2))]
    prices = Prices(H200, layout)
    waiting, not_sent = (
        at_step_share(each, stages).machine.time(*PRODUCT).us
        for each in (prices, prices.without("tensor"))
    )
    assert 1.01 * waiting < not_sent
    again = at_step_share(at_step_share(prices, stages), stages)
    assert again.machine.time(*PRODUCT).us == waiting, (
        "prices of a step do not depend on earlier ones"
    )


def test_each_piece_that_computation_waits_for_has_an_overhead():
    layer, tokens = (3072, 4096), 32_768
    sent = Term("g", "all_gather", (8.0,), axis="tensor")
    for ranks, pieces in ((2, 1), (4, 3)):
        terms = OverlappedLayer(layer, tokens, ranks, "bf16").terms(sent, "forward")
        assert [term.waits for term in terms] == [pieces]
    prices = Prices(H200, Layout(tensor=2))
    more = prices.us(dataclasses.replace(sent, waits=3)) - prices.us(sent)
    assert more == pytest.approx(2 * MESSAGE_OVERHEAD_US)
    assert prices.without("tensor").us(sent) == 0


def sums_over_ranks(model, **share):
    """Name, bytes and count of the messages with gradients of norms, without those of the loss."""
    asked = dataclasses.replace(spec(compile="off"), model=model)
    terms = StepOperations(asked, NetworkPart(batch=8, tensor=2, **share)).backward()
    return [(t.name, t.sizes[0], t.count) for t in terms if t.operation == "all_reduce"]


def test_gradients_of_norms_are_summed_in_one_message_unless_a_data_axis_reads_them():
    model = dataclasses.replace(spec().model, num_layers=4)
    norm = model.d_model * 4
    assert sums_over_ranks(model) == [("gradients.sum", 9 * norm, 1)]
    at_once = {
        name: (nbytes, count) for name, nbytes, count in sums_over_ranks(model, averaged=True)
    }
    of_blocks = dict.fromkeys(("feed_forward.norm.sum", "attention.norm.sum"), (norm, 4))
    assert at_once == {"head.norm.sum": (norm, 1), **of_blocks}
    with_heads = dataclasses.replace(model, qk_norm=True)
    head = model.head_width * 4
    assert sums_over_ranks(with_heads) == [("gradients.sum", 9 * norm + 8 * head, 1)]
    found = sums_over_ranks(with_heads, averaged=True)
    assert ("attention.qk_norm.sum", head, 8) in found
    with_biases = dataclasses.replace(model, attention_bias="all", feed_forward_bias=True)
    bias = model.d_model * 4  # of each of the two row layers of a block
    assert sums_over_ranks(with_biases) == [("gradients.sum", 9 * norm + 8 * bias, 1)]
    assert ("biases.sum", bias, 8) in sums_over_ranks(with_biases, averaged=True)


def test_the_fused_loss_of_a_part_of_the_vocabulary_computes_logits_twice():
    """Four products with half of the words, no pass over all logits, and two numbers per token are sent."""
    asked = spec(vocab_size=128_256, loss="fused", compile="off", batch=16)
    whole, part = (StepOperations(asked, NetworkPart(batch=16, tensor=ranks)) for ranks in (1, 2))

    def head(operations, phase):
        terms = getattr(operations, phase)()
        return [t for t in terms if t.name.startswith(("head", "loss"))]

    def flops(operations, phase):
        products = (t for t in head(operations, phase) if t.is_product)
        return sum(t.count * math.prod(t.sizes) for t in products)

    one = flops(whole, "forward") / 3
    assert flops(part, "forward") == pytest.approx(one / 2, rel=1e-3)
    assert flops(part, "backward") == pytest.approx(3 * one / 2, rel=1e-3)
    chunks = [t.count for t in head(part, "backward") if t.name == "loss"]
    assert chunks == [4], "512 MiB of 2.1 GB each"
    sent = [t.sizes[0] for t in head(part, "forward") if t.name in ("loss.max", "loss.sum")]
    assert sent == [16 * 1024 * 4, 16 * 1024 * 8]
    numel = sum(t.gradient * t.count for t in part.backward())
    assert numel == pytest.approx(part.num_parameters, rel=0.01)
