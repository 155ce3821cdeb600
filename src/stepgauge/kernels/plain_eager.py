"""Detects plain eager calls, in which kernels may be launched directly, without an operator for
compilers, dispatch modes and tensor subclasses.

This file uses torch's private counts of dispatch modes and transforms. The way out: a public
function that says whether any is active (torch.utils._python_dispatch has only private ones).
"""

import torch
from torch import Tensor, nn

PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain_eager(*tensors: Tensor) -> bool:
    """Returns True if only eager autograd sees a call with these tensors: no compiler, dispatch
    mode, functorch transform or tensor subclass.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in PLAIN_TYPES for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )
