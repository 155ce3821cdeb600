"""What kind of work a kernel or an operation is, and the rule that says so.

The first rule that holds decides. Device kernels go by their own name, then by the operation that
launched them, for a kernel named `forward_kernel` says nothing; on a CPU there is the operation
alone.
"""

import functools
import re
from typing import NamedTuple


class Placed(NamedTuple):
    kind: str
    rule: str


def _rules(*rows: tuple[str, str]) -> list[tuple[str, re.Pattern[str]]]:
    return [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in rows]


# Order matters: a fused kernel carries the names of all that it does, the most telling first.
_KERNELS = _rules(
    (
        "communication",
        r"^nccl|^rccl|nccl.*kernel|nvshmem|one_shot_all_|two_shot_all_|multimem_|symm_mem",
    ),
    (
        "copy",
        r"^mem(cpy|set)|^dma|direct_copy_kernel|copy_device_to_device|CatArrayBatchedCopy|float\d+_copy",
    ),
    ("attention", r"flash|fmha|sdpa|_attn_|attention|dkdv|(^|_)dq_kernel|mha_"),
    ("optimizer", r"adam|FusedOptimizer|multi_tensor_apply.*(sgd|lamb)"),
    ("softmax", r"softmax|triton_.*fused.*_(amax|max)_.*exp"),
    (
        "matmul",
        r"gemm|gemv|cutlass.*(tensorop|simt|wgmma|Kernel)|cublas|xmma|nvjet|splitk|triton_(tem|mm)|dot_kernel",
    ),
    (
        "norm",
        r"(layer|rms|batch|group)_?norm|RowwiseMoments|GammaBeta|triton_.*fused.*(rsqrt|var_mean)",
    ),
    (
        "reduction",
        r"reduce|nll_loss|argm(ax|in)|cross_entropy|cub::.*(scan|sum|sort)|triton_(red|per)_|l2_?norm",
    ),
    (
        "elementwise",
        r"elementwise|triton_poi_|index|gather|scatter|embedding|roll|fill|tri(l|u)_|arange|random|philox",
    ),
    ("elementwise", r"multi_tensor_apply"),
)
# What the driver calls a copy to the memory of another GPU.
_BETWEEN_GPUS = re.compile(r"PtoP|Peer", re.IGNORECASE)
_OPERATIONS = _rules(
    ("communication", r"^(c10d|gloo|nccl|_c10d_functional)"),
    ("attention", r"scaled_dot_product|flash_?attention|flex_attention|efficient_attention"),
    ("optimizer", r"^Optimizer|_fused_(adam|sgd)|::(fused_)?adamw"),
    ("softmax", r"softmax"),
    ("matmul", r"^aten::(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|dot|mv|addmv|einsum)$|mkldnn_linear|mkl_linear"),
    ("matmul", r"linear_?cross_?entropy"),
    ("norm", r"(layer|rms|batch|group)_?norm"),
    ("copy", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_cat|stack|pin_memory|_local_scalar_dense|item)$"),
    ("reduction", r"^aten::_?(sum|mean|amax|amin|max|min|prod|norm|var|std|logsumexp|all|any|cumsum|nll_loss|"
     r"cross_entropy|linalg_vector_norm|foreach_norm|argmax|isnan|isinf)"),
    ("host", r"^aten::(empty|t$|transpose|view|_?reshape|as_strided|expand|slice|select|narrow|split|chunk|unsqueeze|"
     r"squeeze|flatten|unflatten|permute|detach|alias|_unsafe_view|resize|set_|result_type|lift|numpy_T|unbind|"
     r"_has_compatible|is_)"),
    ("elementwise", r"^aten::_?(abs|add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|square|recip|tanh|sigmoid|silu|gelu|"
     r"relu|erf|sin|cos|sign|lerp|clamp|where|masked_fill|fill|zero|ones|full|new_|embedding|index|gather|scatter|take|"
     r"roll|arange|triu|tril|lt|gt|le|ge|eq|ne|bitwise|logical|dropout|native_dropout|bernoulli|normal|uniform|rand|"
     r"foreach|maximum|minimum|softplus|pad|threshold|amp_|round|floor|ceil|trunc|remainder|flip|repeat|constant_pad)"),
)  # fmt: skip


_AUTOGRAD = re.compile(r"^autograd::|AccumulateGrad|Backward\d*$|^detach")
_COMPILER = re.compile(
    r"^(Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|CompiledFunction|CompiledF)"
)
# around code that the compiler wrote for a CPU, which records nothing itself
GENERATED = "## Call Compiled"
_COMPOSITE = ("attention", "softmax", "norm")


@functools.cache
def _named_kind(operation: str) -> tuple[str, str]:
    """The kind that the operation's name says, and the words that say it."""
    for kind, pattern in _OPERATIONS:
        if found := pattern.search(operation):
            return kind, found[0]
    return "other", ""


def is_composite(operation: str) -> bool:
    """Whether what the operation calls is of the operation's kind, a mean inside a norm say."""
    return _named_kind(operation)[0] in _COMPOSITE


@functools.cache
def of_kernel(name: str, category: str, operation: str, in_optimizer: bool) -> Placed:
    """Of something that ran on a device; `operation` launched it."""
    if category == "copy":
        if found := _BETWEEN_GPUS.search(name):
            return Placed("communication", f"a transfer whose name has {found[0]!r}")
        return Placed("copy", "a transfer or fill of the driver")
    for kind, pattern in _KERNELS[:2]:
        if found := pattern.search(name):
            return Placed(kind, f"kernel name has {found[0]!r}")
    if in_optimizer:
        return Placed("optimizer", "launched inside Optimizer.step")
    for kind, pattern in _KERNELS[2:]:
        if found := pattern.search(name):
            return Placed(kind, f"kernel name has {found[0]!r}")
    kind, words = _named_kind(operation)
    if words and kind != "host":
        return Placed(kind, f"launched by {operation}")
    return Placed("other", f"no rule for this name, launched by {operation or 'nothing known'}")


@functools.cache
def of_operation(name: str, category: str, in_optimizer: bool, composite: str = "") -> Placed:
    """Of something that ran on the host by itself, without the calls inside it; inside of a
    composite operation.
    """
    if name.startswith(GENERATED):
        return Placed("other", "code that torch.compile wrote: many operations in one")
    if _COMPILER.match(name):
        return Placed("host", "torch.compile's own work")
    if category in ("annotation", "python"):
        return Placed("host", "Python between the operations")
    if category == "runtime":
        return Placed("host", "a call of the driver")
    if _AUTOGRAD.search(name):
        return Placed("host", "autograd's own work")
    kind, words = _named_kind(name)
    if kind == "host":
        return Placed(kind, "views and allocation")
    if kind == "communication":
        return Placed(kind, f"operation is {name}")
    if in_optimizer:
        return Placed("optimizer", "called inside Optimizer.step")
    if composite and composite != name:
        return Placed(_named_kind(composite)[0], f"called inside {composite}")
    return Placed(kind, f"operation has {words!r}" if words else f"no rule for {name}")
