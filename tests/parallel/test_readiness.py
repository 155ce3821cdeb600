"""Which bucket is complete."""

import pytest
import torch
from torch import nn

from stepgauge.parallel.data_parallel.readiness import Averaged, Readiness


def test_a_gradient_that_a_hook_took_before_it_was_averaged_is_refused():
    """An optimizer inside of backward steps with one rank's gradient, and ranks part."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    members = [Averaged(n, "", p, launch=0) for n, p in enumerate((first, second))]
    readiness = Readiness([members])
    for member in members:
        member.parameter.register_post_accumulate_grad_hook(
            lambda _, member=member: readiness.arrive(member, counts=False)
        )
    first.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    (first * 2).sum().backward()
    with pytest.raises(RuntimeError, match="let optimizers step after backward"):
        (second * 2).sum().backward()
    (first * 2).sum().backward()
    with pytest.raises(RuntimeError, match="let optimizers step after backward"):
        list(readiness.next_launches(rest=True))  # it was the last of this backward
