"""Short names of kernels, and the kinds of all rules."""

from stepgauge.report.kernel_names import short_name
from stepgauge.spec.analysis import KINDS
from stepgauge.trace import rules


def test_every_rule_gives_a_known_kind():
    for table in (rules.OPERATORS, rules.KERNELS, rules.COMPOSITES):
        assert {rule.kind for rule in table} <= set(KINDS)


def test_shortened_cpp_names_have_closed_templates():
    functor = "BinaryFunctor<c10::BFloat16, c10::BFloat16, binary_internal::MulFunctor<float> >"
    name = f"vectorized_elementwise_kernel<4, {functor}, at::detail::Array<char*, 3> >"
    assert short_name(name, 200) == name
    short = short_name(name, 72)
    assert short == "vectorized_elementwise_kernel<BinaryFunctor<…>, …>"
    copy = "elementwise_kernel<128, 4, gpu_kernel_impl<direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>"
    assert short_name(copy, 72) == "elementwise_kernel<gpu_kernel_impl<direct_copy_kernel_cuda>, …>"
    assert short_name("x" * 100, 72) == f"{'x' * 71}…"
