"""Rules that classify kernels and operators: (kind, pattern), of which the first match counts.

There are three tables, used in this order: operators with one purpose; names of kernels; operators
that do several things, for kernels whose names match no rule. Patterns ignore case and match anywhere
in the name.
"""

import re
from typing import NamedTuple


class Rule(NamedTuple):
    kind: str
    pattern: re.Pattern[str]


Table = tuple[Rule, ...]


def _table(*rows: tuple[str, str]) -> Table:
    return tuple(Rule(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in rows)


# Operators with one purpose: their kernels have that kind whatever their names are.
OPERATORS = _table(
    ("communication", r"^(c10d|gloo|nccl|_?c10d_functional|symm_mem|_dtensor|record_param_comms$)"),
    ("copy", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_cat|stack|pin_memory|_local_scalar_dense|item|"
     r"_foreach_copy_|_chunk_cat|split_with_sizes_copy)$|(reshape|concat)_and_cache|store_(kv_?)?cache|copy_blocks"),
    ("attention", r"^aten::.*(scaled_dot_product|flash_attention|flex_attention|efficient_attention)|"
     r"^(stepgauge|aiter|flash_attn\w*|vllm_flash_attn)::\w*(attention|mha|fmha|flash|_fwd|_bwd)"),
    ("optimizer", r"^Optimizer|^aten::_fused_(adam|sgd|adagrad)|::(fused_)?adamw"),
    ("softmax", r"^aten::_?(log_)?softmax"),
    ("matmul", r"^aten::_?(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|dot|vdot|mv|addmv|einsum|scaled_mm|grouped_mm|"
     r"addmm_activation|scaled_grouped_mm|int_mm|weight_int4pack_mm\w*|mm_plus_mm)$|mkldnn_linear|mkl_linear|"
     r"linear_backward$|linear_?cross_?entropy|^stepgauge::gated_product"),
    ("convolution", r"^aten::.*conv(?!ert)"),
    ("norm", r"^aten::.*(layer|rms|batch|group|instance)_?norm|(^|[:_.])(fused_)?(add_)?(layer|rms|group)_?norm"),
    ("pooling", r"^aten::.*(max|avg)_pool"),
    ("quantisation", r"quant(?!ile)"),
    ("embedding", r"^aten::.*embedding|^fbgemm::.*(emb|bounds_check|permute_|bucketize|recat|cumsum|jagged)|"
     r"SplitLookup|PermutePooledEmbs|embedding_bag"),
    ("sort", r"^aten::_?(sort|argsort|topk|cum(sum|prod|max|min)|unique\d?|bincount|histc|searchsorted|kthvalue|msort|"
     r"nonzero|multinomial|logcumsumexp)"),
    ("routing", r"topk_softmax|moe_(align|sum|permute|unpermute|sort)|grouped_topk"),
    ("reduction", r"^aten::_?(sum|mean|amax|amin|max|min|prod|norm|var|std|logsumexp|all|any|nll_loss|"
     r"cross_entropy|linalg_vector_norm|foreach_norm|argmax|argmin|median|count_nonzero)"),
    ("elementwise", r"^aten::_?(abs|add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|square|recip|tanh|sigmoid|silu|gelu|"
     r"relu|erf|sin|cos|sign|lerp|clamp|where|masked_fill|fill|zero|ones|full|new_|index|gather|scatter|take|"
     r"roll|arange|triu|tril|lt|gt|le|ge|eq|ne|bitwise|logical|dropout|native_dropout|bernoulli|normal|uniform|rand|"
     r"foreach|maximum|minimum|softplus|pad|threshold|amp_|round|floor|ceil|trunc|remainder|flip|repeat|"
     r"constant_pad|mse_loss|upsample|isnan|isinf|nan_to_num|hardtanh|leaky|elu|glu|grid_sampler|exponential|"
     r"random|select_scatter|slice_scatter|masked_s)|rotary_embedding|silu_and_mul|gelu_and_mul|_and_mul$|^stepgauge::(swiglu|rotary)_"),
)  # fmt: skip

# The name of a fused kernel has the names of all its parts, so the most specific rules come first.
KERNELS = _table(
    ("communication", r"^(nccl|rccl|mscclkernel|hccl|oneccl)|nccl\w*kernel|nvshmem|(one|two)_?shot_?all|multimem_|"
     r"symm_mem|deep_ep::(internode|intranode)|::ep::(internode|intranode)|cross_device_reduce|all_?reduce_"
     r"|custom_all_reduce|quickreduce|all_?gather_kernel|reduce_?scatter_kernel|all_?to_?all"),
    ("copy", r"^mem(cpy|set)|^dma|direct_copy_kernel|copy_device_to_device|CatArrayBatchedCopy|float\d+_copy|"
     r"(reshape|concat)_and_cache|kv_?cache|copy_tensor|chunk_cat|split_with_sizes_copy|__amd_rocclr_(copy|fill)"),
    ("attention", r"flash_?(attn|attention|fwd|bwd)|flash::|fmha|sdpa|_attn_|attn_(fwd|bwd)|attention|dkdv|"
     r"(^|_)dq_kernel|(^|[_:])mha_|sage_fwd|mla_(decode|fwd|prefill)|paged_attn|Batch(Prefill|Decode)With|pa_decode"),
    ("convolution", r"(?<![a-z])conv(?!ert)|[a-z]Conv(?!ert)|_conv(?!ert)|fprop|dgrad|wgrad(?!ient)|scudnn|winograd|"
     r"implicit_gemm|im2d?2?col|col2im|igemm_(fwd|bwd|wrw)|cudnn::cnn"),
    ("routing", r"routing|topk_?gating|moe_fused_gate|_topk_(forward|backward)|sum_bitmatrix|"
     r"moe_?(align|sum|permut|unpermut|sort|"
     r"gather|finalize|expand)|expandInputRows|dispatch_layout|count_expert|fused_mapping|expand_to_fused|"
     r"reduce_fused_impl|expert_?(histogram|offset|count)|block_bucketize"),
    ("matmul", r"(?<!fb)gemm|gemv|Cijk_|cublas|xmma|nvjet|split_?k|triton_(tem|mm)|(?<![a-z])dot_kernel|"
     r"(^|_)matmul|(^|_)b?mm_|fused_moe|moe_(fused|stage)|marlin|scaled_mm|cutlass.*(tensorop|simt|wgmma|Kernel)"),
    ("elementwise", r"rotary|(^|_)rope(_|$)|rescale_qkv|swiglu|geglu|_and_mul|act_and_mul|silu"),
    ("quantisation", r"quant(?!ile)|cast_to_fp\d|per_(token|channel|block)_cast|cast_back_impl|downcast|to_mxfp"),
    ("softmax", r"soft_?max|triton_.*fused.*_(amax|max)_.*exp"),
    ("optimizer", r"adam|FusedOptimizer|multi_tensor_apply.*(sgd|lamb|adagrad)"),
    ("norm", r"(layer|rms|batch|group|instance)_?norm|RowwiseMoments|GammaBeta|(^|[^a-z])(bn|ln)_(fw|bw)|"
     r"triton_.*fused.*(rsqrt|var_mean)|l2norm"),
    ("embedding", r"embedding|_embs?_|bounds_check_indices|recat_|lookup"),
    ("pooling", r"(max|avg|average)_?pool|pooling"),
    ("sort", r"sort|(?<!al)(?<!ni)scan(?!dinav)|top_?k|cumsum|unique_by|histogram|bitonic|DeviceSelect|DeviceCompact"),
    ("reduction", r"reduce|nll_loss|argm(ax|in)|cross_?entropy|triton_(red|per)_|l2_?norm|welford"),
    ("elementwise", r"elementwise|triton_poi_|index|gather|scatter|(^|_)roll_|fill|tri(l|u)_|arange|random|philox|"
     r"dropout|distribution_|multi_tensor_apply|upsample|interpolate|SubTensorOp|OpTensor|activation|"
     r"(add|mul|div|sub)_kernel"),
    ("copy", r"transpose|permut|copy|nhwc|nchw|concat"),
)  # fmt: skip

# Operators that call many others: a user's function, or a layer of an inference server.
COMPOSITES = _table(
    ("attention", r"scaled_dot_product|attention|flash_?attn|mha(?![a-z])"),
    ("norm", r"(layer|rms|batch|group|instance)_?norm"),
    ("softmax", r"softmax"),
    ("convolution", r"conv(?!ert)"),
    ("embedding", r"embedding"),
    ("reduction", r"cross_?entropy"),
)  # fmt: skip

# Operators that run only on the host: views and allocation.
VIEWS = re.compile(
    r"^aten::(empty|t$|transpose|view|_?reshape|as_strided|expand|slice|select|narrow|split|chunk|unsqueeze|"
    r"squeeze|flatten|unflatten|permute|detach|alias|_unsafe_view|resize|set_|result_type|lift|numpy_T|unbind|"
    r"_has_compatible|is_)"
)
