"""What stands in for CUDA graphs on a CPU."""

import torch
from torch.utils._pytree import tree_leaves


class RunAgain:
    """A recording writes the memory that its function gave at first, and does nothing before its
    first replay.
    """

    def warm_up(self, run):
        run()

    def record(self, run, slot):
        outputs = run()
        written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for tensor in written:
            if tensor.dtype.is_floating_point:
                tensor.data.fill_(torch.nan)

        def replay():
            with torch.enable_grad():
                again = run()
            found = [leaf for leaf in tree_leaves(again) if isinstance(leaf, torch.Tensor)]
            for static, value in zip(written, found, strict=True):
                static.data.copy_(value)

        return outputs, replay
