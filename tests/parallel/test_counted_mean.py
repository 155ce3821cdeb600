"""Tests the weights of mean losses over parts of a batch."""

import pytest
import torch

from stepgauge.kernels.linear_cross_entropy import linear_cross_entropy
from stepgauge.parallel.counted_mean import CountedMean, weighted

MEAN = CountedMean(lambda targets_T: (targets_T != -100).sum())
CPU = torch.device("cpu")


def test_parts_are_weighed_by_their_counted_targets():
    parts = [(torch.tensor([1, 2, 0]),), (torch.tensor([-100, 1]),), (torch.tensor([-100]),)]
    assert MEAN.weights(parts, CPU).tolist() == [0.75, 0.25, 0.0]


def test_a_count_in_total_and_one_per_sequence_give_the_same_weights():
    targets_BT = torch.tensor([[1, 2, 0], [-100, 1, 2], [-100, 1, -100], [-100, -100, -100]])
    each = CountedMean(lambda targets_BT: (targets_BT != -100).sum(1))
    for mean in (MEAN, each):
        assert mean.weights_of_equal([targets_BT], 2, CPU).tolist() == pytest.approx([5 / 6, 1 / 6])
        parts = [[targets_BT[:1]], [targets_BT[1:]]]
        assert mean.weights(parts, CPU).tolist() == [0.5, 0.5]


def test_gradients_are_zero_if_no_target_counts():
    """A weight of NaN would become gradients of NaN in a loss that multiplies by its incoming one."""
    targets_T = torch.full((4,), -100)
    x_TD, weight_VD = (torch.randn(n, 8, requires_grad=True) for n in (4, 5))
    (weight,) = MEAN.weights([(targets_T,)], CPU)
    loss = weighted(linear_cross_entropy(x_TD, weight_VD, targets_T), weight)
    loss.backward()
    assert loss.isnan(), "the mean over no targets, as in one process"
    for gradient in (x_TD.grad, weight_VD.grad):
        assert torch.equal(gradient, torch.zeros_like(gradient))
