"""The weights of means over parts of a batch."""

import torch

from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
from stepgauge.parallel.counted_mean import CountedMean, weighted

MEAN = CountedMean(lambda targets_T: (targets_T != -100).sum())
CPU = torch.device("cpu")


def test_parts_weigh_by_what_counts():
    parts = [(torch.tensor([1, 2, 0]),), (torch.tensor([-100, 1]),), (torch.tensor([-100]),)]
    assert MEAN.weights(parts, CPU).tolist() == [0.75, 0.25, 0.0]


def test_where_nothing_counts_no_gradient_is_nan():
    """A loss whose backward multiplies by what comes in gives NaN for a weight of NaN."""
    targets_T = torch.full((4,), -100)
    x_TD, weight_VD = (torch.randn(n, 8, requires_grad=True) for n in (4, 5))
    (weight,) = MEAN.weights([(targets_T,)], CPU)
    loss = weighted(linear_cross_entropy(x_TD, weight_VD, targets_T), weight)
    loss.backward()
    assert loss.isnan(), "the mean of nothing, as in one process"
    for gradient in (x_TD.grad, weight_VD.grad):
        assert torch.equal(gradient, torch.zeros_like(gradient))
