"""Prices of what copy engines do within a machine, on a made-up one, worked out by hand."""

import dataclasses

import pytest

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.operations.tensor_overlap import OverlappedLayer
from stepgauge.cost.operations.terms import TRANSFER, Term
from stepgauge.cost.pipeline.step import predict_pipeline
from stepgauge.cost.rates.contention import ContentionTable, Slowdown
from stepgauge.cost.rates.estimate import ASSUMED, CALIBRATED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.network import Axis
from stepgauge.cost.rates.prices import GLOO, MESSAGE_OVERHEAD_US, Prices, exposed_us
from stepgauge.spec.calibration import Contention, OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.hardware_files import file_named
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.links import Link, Piece
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec

NCCL_RATE, COPY_RATE = 100e9, 200e9  # bytes per second
PUSH, PULL = {"backend": "copies", "algorithm": "push"}, {"backend": "copies", "algorithm": "pull"}


def link(op, rate, **settings):
    return Link(settings={"op": op, "ranks": 4, **settings}, pieces=[Piece(0.0, rate)],
                range_bytes=(1, 2**30), fitted={}, held_out={}, measured={})  # fmt: skip


BY_NCCL = [
    link(op, NCCL_RATE, backend="nccl")
    for op in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
]
BY_COPIES = [
    link(op, rate, **how)
    for how, rate in ((PULL, 1.0), (PUSH, COPY_RATE))
    for op in ("all_gather", "all_to_all", "send_recv")
]


def prices(layout, *links, contention=(), backend="nccl", **options):
    products = OperationTable(("m", "n", "k"), ((1024, 1024, 1024, 200.0),))
    hardware = HardwareFile(
        name="box", operations={"matmul nt bf16": products}, links=links, contention=contention
    )
    return Prices(CalibratedMachine(hardware), Layout.parse(layout), backend, **options)


PRODUCT = Term("product", "matmul nt bf16", (1024, 1024, 1024))
GATHER = Term(
    "g", "all_gather", (80e6,), axis="tensor", hidden_by=(PRODUCT,), copied_as="all_gather"
)
SCATTER = dataclasses.replace(GATHER, operation="reduce_scatter", copied_as="all_to_all")
HEADS = Term("heads", TRANSFER, (60e6,), axis="context", copied_as="all_to_all")


def test_a_message_beside_products_by_hand():
    """A product of 100 us takes 110 beside a message, which has done 110 / 1.5 us of its work by then."""
    both = Slowdown(1.1, 1.5, CALIBRATED)
    assert exposed_us(150.0, [(100.0, both)]) == pytest.approx(10 + 150 - 110 / 1.5)
    # 60 us of it beside the product, which does 60 / 1.1 us of its work meanwhile
    assert exposed_us(120.0, [(300.0, both)]) == pytest.approx(180 - 180 / 1.1)
    # the first product all along, and 150 - 73.3 = 76.7 us beside the second at full speed
    quiet = Slowdown(1.0, 1.0, ASSUMED)
    assert exposed_us(150.0, [(100.0, both), (50.0, quiet)]) == pytest.approx(
        10 + 150 - 110 / 1.5 - 50
    )
    assert exposed_us(150.0, [(120.0, quiet)]) == 30.0
    assert exposed_us(150.0, [(151.0, quiet)]) == 0.0


@pytest.mark.parametrize("term", [GATHER, SCATTER])
def test_overlapped_messages_are_copies_if_the_file_has_them(term):
    """80 MB: 400 us by copies, 800 by NCCL, of which the product hides 200."""
    assert prices("tp4 overlap", *BY_NCCL, *BY_COPIES).us(term) == pytest.approx(
        200.0 + MESSAGE_OVERHEAD_US
    )
    assert prices("tp4 overlap", *BY_NCCL).us(term) == pytest.approx(600.0 + MESSAGE_OVERHEAD_US)
    assert prices("tp4 overlap", *BY_NCCL, *BY_COPIES).without("tensor").us(term) == 0
    alone = dataclasses.replace(term, hidden_by=())
    found = prices("tp4 overlap", *BY_NCCL, *BY_COPIES).estimate(alone)
    assert (found.us, found.source) == (pytest.approx(400.0), CALIBRATED)
    plain = dataclasses.replace(alone, copied_as="")
    assert prices("tp4 overlap", *BY_NCCL, *BY_COPIES).us(plain) == pytest.approx(
        800.0 + MESSAGE_OVERHEAD_US
    )


def test_the_files_contention_lengthens_both():
    rows = [Contention("matmul", "copied all_gather", 1.25, 1.6, 4)]
    found = prices("tp4 overlap", *BY_NCCL, *BY_COPIES, contention=rows)
    # the product takes 250 us, in which the copies do 250 / 1.6 us of their work
    assert found.us(GATHER) == pytest.approx(50 + 400 - 250 / 1.6 + MESSAGE_OVERHEAD_US)
    assert found.us(SCATTER) == pytest.approx(200.0 + MESSAGE_OVERHEAD_US), (
        "of which the file says nothing"
    )
    only_nccl = prices("tp4 overlap", *BY_NCCL, contention=rows)
    assert only_nccl.us(GATHER) == pytest.approx(600.0 + MESSAGE_OVERHEAD_US)


def test_copies_do_not_slow_products_down_unless_the_file_says_so():
    table = ContentionTable(HardwareFile(name="box"), {"tensor": Axis(4, 4)})
    copied = table.of("matmul nt bf16", "copied all_gather", "tensor")
    assert (copied.kernel, copied.collective, copied.source) == (1.0, 1.0, ASSUMED)
    assert table.of("matmul nt bf16", "all_gather", "tensor").kernel > 1


@pytest.mark.parametrize(
    ("ranks", "replayed", "rows"),
    [(2, True, 2048), (4, True, 3072), (4, False, 1024)],
    ids=["one other piece", "each piece has a product", "one product for all other pieces"],
)
def test_a_gather_is_hidden_by_the_products_before_its_last_pieces(ranks, replayed, rows):
    layer = OverlappedLayer((1024, 512), 4096, ranks, "bf16", replayed)
    (gather,) = layer.terms(Term("g", "all_gather", (8e6,), axis="tensor"), "forward")
    assert [product.sizes for product in gather.hidden_by] == [(rows, 1024, 512)]


def test_exchanged_heads_are_copies_within_a_machine():
    """A rank sends 60 of 80 MB, three quarters, to the three others."""

    def us(layout, term, *links, **settings):
        return prices(layout, *links, **settings).us(term) - MESSAGE_OVERHEAD_US

    assert us("cp4 ulysses zero1", HEADS, *BY_NCCL, *BY_COPIES) == pytest.approx(400.0)
    assert us("cp4 ulysses zero1", HEADS, *BY_NCCL) == pytest.approx(600.0)
    gloo = [link("send_recv", 10e9, backend="gloo")]
    found = us("cp4 ulysses zero1", HEADS, *gloo, *BY_COPIES, backend=GLOO)
    assert found == pytest.approx(6e3)
    ring = dataclasses.replace(HEADS, copied_as="")
    assert us("cp4 zero1", ring, *BY_NCCL, *BY_COPIES) == pytest.approx(600.0)


def test_pipeline_transfers_are_copies_unless_messages_are_asked_for():
    found = prices("pp4 1f1b m4", *BY_NCCL, *BY_COPIES)
    assert found.transfer(60e6).us == pytest.approx(300.0)
    assert found.without("pipeline").transfer(60e6).us == 0
    assert prices("pp4 1f1b m4", *BY_NCCL).transfer(60e6).us == pytest.approx(600.0)
    messages = prices("pp4 1f1b m4", *BY_NCCL, *BY_COPIES, copies=False)
    assert messages.without("data").transfer(60e6).us == pytest.approx(600.0)
    assert prices("none", *BY_NCCL, *BY_COPIES).transfer(60e6).us == 0


def test_copies_are_not_used_between_machines():
    wire = {"bytes_per_s": 50e9, "latency_us": 0.0, "efficiency": 1.0, "source": "made"}
    fabric = {"gpus_per_node": 1, "within": wire, "between": wire}
    near = prices("pp4 1f1b m4", *BY_NCCL, *BY_COPIES).machine.hardware
    far = CalibratedMachine(dataclasses.replace(near, other={"fabric": fabric}))
    found = Prices(far, Layout.parse("pp4 1f1b m4"))
    assert found.by_copies(TRANSFER, 60e6, "pipeline") is None
    assert found.transfer(60e6).us == pytest.approx(1200.0)


def h200(*links):
    hardware = HardwareFile.read(file_named("h200-sxm"))
    others = [link for link in hardware.links if link.settings["backend"] != "copies"]
    return CalibratedMachine(dataclasses.replace(hardware, links=[*others, *links]))


def test_predicted_steps_use_the_copies_of_their_transport():
    slow = [link(op, 2e9, **PUSH) for op in ("all_gather", "all_to_all", "send_recv")]
    model = ModelSpec.preset("2.7b", context_length=2048)
    asked = {"model": model, "size": "2.7b", "batch": 16, "precision": "bf16", "device": "cuda"}
    for layout, axis in (("tp4 overlap", "tensor"), ("cp4 ulysses bucketed", "context")):
        spec = LayoutSpec(layout=layout, **asked)
        by_nccl, by_copies = (predict_layout(spec, h200(*links)) for links in ((), slow))
        assert by_copies.median("step_ms") > 1.5 * by_nccl.median("step_ms"), layout
        without = f"without_{axis}_ms"
        assert by_copies.median(without) == pytest.approx(by_nccl.median(without)), layout
    transfers = {}
    for transport in ("auto", "messages"):
        spec = PipelineSpec(ranks=4, micro_batches=4, transport=transport, **asked)
        transfers[transport] = predict_pipeline(spec, h200(*slow)).median("transfer_ms")
    assert transfers["auto"] > 10 * transfers["messages"] > 0
