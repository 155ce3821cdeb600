"""The timeline of traces: what the page is given to draw."""

import dataclasses
import json
import re

from stepgauge.report.kernel_names import shortened
from stepgauge.report.trace_timeline import trace_timeline
from stepgauge.spec.analysis import KINDS, Timeline
from stepgauge.trace import rules

ONE = Timeline(
    names=[["gemm", "matmul"]], tracks=[["stream 7", [0, 40, 0, 1]]], marks=[], origin_us=100.0
)


def shifts(*origins):
    ranks = [("", dataclasses.replace(ONE, origin_us=origin)) for origin in origins]
    data = re.search(r'json">(.*?)</script>', trace_timeline(ranks))[1]
    return [rank["shift"] for rank in json.loads(data)["ranks"]]


def test_every_rule_gives_a_kind_that_has_a_colour():
    for table in (rules.OPERATORS, rules.KERNELS, rules.COMPOSITES):
        assert {rule.kind for rule in table} <= set(KINDS)


def test_ranks_lie_on_one_clock_where_they_have_one():
    assert shifts(100.0, 102.5) == [0, 25]
    assert shifts(100.0, 9e9) == [0, 0]


def test_names_of_cpp_are_shortened_with_their_templates_closed():
    functor = "BinaryFunctor<c10::BFloat16, c10::BFloat16, binary_internal::MulFunctor<float> >"
    name = f"vectorized_elementwise_kernel<4, {functor}, at::detail::Array<char*, 3> >"
    assert shortened(name, 200) == name
    short = shortened(name, 72)
    assert short == "vectorized_elementwise_kernel<BinaryFunctor<…>, …>"
    copy = "elementwise_kernel<128, 4, gpu_kernel_impl<direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>"
    assert shortened(copy, 72) == "elementwise_kernel<gpu_kernel_impl<direct_copy_kernel_cuda>, …>"
    assert shortened("x" * 100, 72) == f"{'x' * 71}…"
