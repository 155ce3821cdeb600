"""Simulated streams, compared with timelines computed by hand."""

import math

import pytest

from stepgauge.cost.rates.contention import ContentionTable, Slowdown
from stepgauge.cost.rates.network import Axis
from stepgauge.cost.streams.events import (
    COMPUTE,
    HOST,
    StreamWork,
    WorkSpan,
    alone_us,
    busy,
    simulate,
)
from stepgauge.spec.hardware import HardwareFile


class Fixed:
    """During a collective, every kernel takes 2 times as long, and the collective 1.5 times."""

    def of(self, operation, collective, axis, us=math.inf):
        return Slowdown(2.0, 1.5, "assumed")

    def share_links(self, axis, other):
        return True

    def occupies(self, operation, collective):
        return operation.startswith("matmul")


class NoContention:
    """Kernels and collectives do not slow each other down."""

    def of(self, operation, collective, axis, us=math.inf):
        return Slowdown(1.0, 1.0, "assumed")

    def share_links(self, axis, other):
        return axis == other

    def occupies(self, operation, collective):
        return False


def ends(works, contention=None):
    return [round(ran.end, 6) for ran in simulate(works, contention or NoContention())]


def test_streams_run_in_order_and_wait_for_other_streams():
    works = [
        StreamWork("host", HOST, 4.0),
        StreamWork("first", COMPUTE, 10.0, "matmul", (0,)),
        StreamWork("bucket", "data", 5.0, "all_reduce", (1,)),
        StreamWork("second", COMPUTE, 10.0, "matmul"),
        StreamWork("late", "data", 30.0, "all_reduce", (3,)),
        StreamWork("update", COMPUTE, 1.0, "traffic", (2, 4)),
    ]
    assert ends(works) == [4, 14, 19, 24, 54, 55]
    ran = simulate(works, NoContention())
    assert busy(ran, COMPUTE) == [(4, 24), (54, 55)]
    assert math.isclose(alone_us(ran, "data"), 30.0)


def test_contention_slows_both_while_they_overlap():
    """During 10 us of computation, a collective of 6 us takes 9, in which 4.5 us of the kernel are done."""
    works = [
        StreamWork("kernel", COMPUTE, 10.0, "traffic"),
        StreamWork("bucket", "data", 6.0, "all_reduce"),
    ]
    assert ends(works, Fixed()) == [14.5, 9.0]
    # the kernel ends first, after 4 us with overlap; then the rest of the collective runs alone
    works = [
        StreamWork("kernel", COMPUTE, 2.0, "traffic"),
        StreamWork("bucket", "data", 6.0, "all_reduce"),
    ]
    assert ends(works, Fixed()) == [4.0, pytest.approx(4.0 + 6.0 - 4.0 / 1.5)]


def test_collectives_that_share_links_get_equal_shares():
    """Two of 6 us both take 12. One that starts 4 us later shares from then until the first one ends."""
    both = [StreamWork(axis, axis, 6.0, "all_reduce") for axis in ("data", "tensor")]
    assert ends(both, Fixed()) == [12.0, 12.0]
    assert ends(both, NoContention()) == [6.0, 6.0]
    later = [
        StreamWork("host", HOST, 4.0),
        StreamWork("tensor", "tensor", 6.0, "all_reduce"),
        StreamWork("data", "data", 3.0, "all_reduce", (0,)),
    ]
    assert ends(later, Fixed()) == [4.0, 4.0 + 2 * 2.0, 4.0 + 2 * 2.0 + 1.0]
    beside = [*both, StreamWork("kernel", COMPUTE, 2.0, "traffic")]
    assert ends(beside, Fixed())[2] == 4.0, "a kernel is slowed down once"


def test_axes_share_links_within_a_node_or_between_nodes():
    axes = {"tensor": Axis(8, 8), "data": Axis(4, 1), "context": Axis(2, 2)}
    table = ContentionTable(HardwareFile(name="made up"), axes)
    assert table.share_links("tensor", "context") and table.share_links("data", "data")
    assert not table.share_links("tensor", "data")


def test_a_product_shares_multiprocessors_with_the_collective_that_runs_when_it_starts():
    """It runs at half its speed, but loses no more than it would during collectives all along."""

    def product_beside(collective_us, product_us=10.0):
        works = [
            StreamWork("bucket", "data", collective_us, "all_reduce"),
            StreamWork("product", COMPUTE, product_us, "matmul nn bf16"),
        ]
        return ends(works, Fixed())

    assert product_beside(2.0) == [3.0, 11.5]
    assert product_beside(60.0, 10.0)[1] == 20.0


def test_a_collective_waits_for_a_product_that_has_all_multiprocessors():
    first = [
        StreamWork("product", COMPUTE, 10.0, "matmul nn bf16"),
        StreamWork("before", HOST, 4.0),
        StreamWork("bucket", "data", 2.0, "all_reduce", (1,)),
    ]
    assert ends(first, Fixed()) == [10.0, 4.0, 12.0]
    product, host = first[:2]
    bucket = StreamWork("bucket", "data", 2.0, "all_reduce", (2,))
    before_the_next = {"product": 10.0, "next": 21.5, "before": 4.0, "bucket": 13.0}
    for order in ((0, 1, 2, 3), (3, 2, 0, 1), (2, 3, 0, 1)):
        works = [product, product._replace(name="next"), host, bucket]
        moved = [
            works[n]._replace(after=tuple(order.index(a) for a in works[n].after)) for n in order
        ]
        assert {ran.work.name: ran.end for ran in simulate(moved, Fixed())} == before_the_next
    two = [StreamWork(f"bucket {us}", "data", us, "all_reduce") for us in (2.0, 20.0)]
    product = StreamWork("product", COMPUTE, 10.0, "matmul nn bf16")
    assert ends([*two, product], Fixed()) == [3.0, 31.5, 11.5]


def test_communication_is_exposed_while_nothing_is_computed():
    spans = [("data", 0, 4), ("data", 6, 9), ("data", 12, 20), (COMPUTE, 1, 3), (COMPUTE, 2, 7)]
    spans += [(COMPUTE, 8, 15), (COMPUTE, 19, 25)]
    ran = [WorkSpan(StreamWork(stream, stream, 0.0), start, end) for stream, start, end in spans]
    # 1 before any computation, 1 between two, and 4 of the last between two
    assert alone_us(ran, "data") == 1 + 1 + 4


def test_a_cycle_is_reported():
    works = [StreamWork("a", COMPUTE, 1.0, after=(1,)), StreamWork("b", "data", 1.0, after=(0,))]
    with pytest.raises(ValueError, match="a waits for what never ends"):
        simulate(works, NoContention())


def test_only_collectives_of_multiprocessors_wait_for_products_of_a_gpu():
    table = ContentionTable(HardwareFile(name="box", device="NVIDIA H200"), {})
    for operation in ("matmul nt bf16", "attention sdpa forward bf16"):
        assert table.occupies(operation, "all_reduce")
        assert not table.occupies(operation, "copied all_gather")
    assert not table.occupies("rmsnorm forward fp32", "all_reduce")
    cpu = ContentionTable(HardwareFile(name="cpu", device="cpu", threads=2), {})
    assert not cpu.occupies("matmul nt fp32", "all_reduce")
