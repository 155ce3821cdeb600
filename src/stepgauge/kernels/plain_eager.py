"""Whether a call is plain eager PyTorch: then kernels may be launched by address, without an
operator that compilers, dispatch modes and subclasses would see.

The only file that asks torch for its private count of dispatch modes and transforms. The way out: a
public function that says whether any is active (torch.utils._python_dispatch has private ones).
"""

import torch
from torch import Tensor, nn

PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain_eager(*tensors: Tensor) -> bool:
    """Whether nothing but eager autograd looks at a call with these tensors."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in PLAIN_TYPES for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )
