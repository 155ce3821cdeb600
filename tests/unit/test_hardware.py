"""What devices hold."""

import pytest

from stepgauge.spec.hardware import NOT_FOR_TENSORS, fits

GIB = 2**30


@pytest.mark.parametrize(
    ("needed", "architecture", "text"),
    [
        (30 * GIB, "sm80", "A100-SXM4-40GB"),
        (40 * GIB - NOT_FOR_TENSORS, "sm80", "A100-SXM4-40GB"),
        (40 * GIB - NOT_FOR_TENSORS + 1, "sm80", "A100 80GB PCIe"),
        (100 * GIB, "sm80", "no: A100-SXM4-80GB has 80 GB"),
        (100 * GIB, "sm90", "H200"),
        (191.7 * GIB, "sm90", "no: H200 has 141 GB"),
        (GIB, "cpu", ""),
    ],
)
def test_the_smallest_that_holds_it_is_named(needed, architecture, text):
    assert fits(needed, architecture) == text
