"""Tests of the state of a running backward: which gradients have arrived."""

import pytest
import torch
from torch import nn

from stepgauge.parallel.data_parallel.readiness import Readiness, TrackedParameter


def test_a_gradient_that_a_hook_set_to_none_before_it_was_averaged_is_refused():
    """An optimizer that steps inside backward would use one rank's gradient: the ranks' weights
    would differ.
    """
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    launch = [TrackedParameter(n, "", p, launch=0) for n, p in enumerate((first, second))]
    readiness = Readiness([launch])
    for tracked in launch:
        tracked.parameter.register_post_accumulate_grad_hook(
            lambda _, tracked=tracked: readiness.arrive(tracked, defers=True)
        )
    first.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    (first * 2).sum().backward()
    with pytest.raises(RuntimeError, match="let optimizers step after backward"):
        (second * 2).sum().backward()
    (first * 2).sum().backward()
    with pytest.raises(RuntimeError, match="let optimizers step after backward"):
        list(readiness.remaining_launches())  # this gradient was the last of its backward
