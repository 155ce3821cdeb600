"""Kinds of work of names from real traces."""

import pytest

from stepgauge.trace.kinds import Kinds
from stepgauge.trace.names import readable

# kind: (operator, kernel) from public traces; "" for an unknown operator
REAL = {
    "communication": [
        ("", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL"),
        ("", "dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>"),
        ("", "deep_ep::intranode::dispatch<8, 768>"),
        ("", "vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>"),
        ("symm_mem::multimem_all_reduce_", "multimem_all_reduce_kernel<c10::BFloat16, 16>"),
    ],
    "matmul": [
        ("aiter::fused_moe_", "ck_moe_stage1_kernel<BF16, 128, 128>"),
        ("", "triton__moe_fused_kernel_0d1d2d3d4d5d"),
        ("", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x192x64_MI16x16x1_SN"),
        ("", "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu"),
        ("vllm::moe_forward", "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16"),
        ("", "cutlass::device_kernel<dpsk::grouped_gemm::cuda::m_grouped_fp8_ptp128c::GemmKernel>"),
        ("aten::mm", "reduce_kernel<512, 1, ReduceOp<float>>"),
        ("", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"),
        ("vllm::fused_experts", "fused_moe_kernel"),
    ],
    "attention": [
        ("Torch-Compiled Region: 0/0", "sage_fwd"),
        ("", "attn_fwd"),
        ("RopeLoraFlashAttnVarlenFunc", "flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128>>"),
        ("vllm::unified_attention_with_output", "kernel_unified_attention_2d"),
        ("FlashAttentionTriton", "forward_kernel"),
        ("aten::_scaled_dot_product_flash_attention", "pytorch_flash::flash_fwd_kernel<Traits>"),
    ],
    "convolution": [
        ("aten::cudnn_convolution", "cudnn::ops::nchwToNhwcKernel<float, float, float, false>"),
        ("aten::convolution_backward", "cudnn::detail::dgrad_engine<float, 512, 6, 5, 3>"),
        ("aten::miopen_convolution", "Cijk_Ailk_Bljk_BBS_BH_MT128x64x64_MI32x32x8x1"),
        ("", "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc"),
    ],
    "routing": [
        ("sgl_kernel::moe_fused_gate", "moe_fused_gate_kernel<float, 8>"),
        ("vllm::moe_forward", "moe::dev::routing::routingIndicesHistogramKernel<Params>"),
        ("", "_sum_bitmatrix_rows"),
        ("", "dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>"),
        ("", "cuda::expand_to_fused_with_scales_impl"),
    ],
    "quantisation": [
        ("", "cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128>"),
        ("_C::static_scaled_fp8_quant", "vllm::scaled_fp8_quant_kernel_strided<BFloat16>"),
        ("fbgemm::FloatToFP8RowwiseQuantized", "fbgemm_gpu::_float_to_FP8rowwise_cuda_kernel"),
        ("Torch-Compiled Region: 0/0", "sage_quant_kernel"),
    ],
    "embedding": [
        ("fbgemm::bounds_check_indices", "fbgemm_gpu::bounds_check_indices_kernel<long>"),
        ("", "split_embedding_codegen_forward_unweighted_kernel<float>"),
        ("aten::embedding", "indexSelectLargeIndex<float, long, unsigned int, 2>"),
        ("aten::embedding_dense_backward", "embedding_backward_feature_kernel<float>"),
    ],
    "norm": [
        ("aten::cudnn_batch_norm_backward", "cudnn::bn_bw_1C11_kernel_new<float, float>"),
        ("aten::native_batch_norm", "batch_norm_transform_input_kernel<float>"),
        ("", "batch_norm_collect_statistics_reduce"),
        ("CompiledFunction", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3"),
    ],
    "pooling": [
        ("", "max_pool_forward_nchw<c10::BFloat16>"),
        ("aten::_adaptive_avg_pool2d", "adaptive_average_pool<float>"),
    ],
    "sort": [
        ("aten::topk", "sbtopk::gatherTopK<float, unsigned int, 2, false>"),
        ("", "cub::DeviceRadixSortOnesweepKernel<Policy>"),
        ("aten::cumsum", "tensor_kernel_scan_innermost_dim<float>"),
    ],
    "copy": [
        ("_C_cache_ops::reshape_and_cache_flash", "vllm::reshape_and_cache_flash_kernel<bf16>"),
        ("sglang::store_cache", "store_kvcache<2048l, 4, false, long>"),
        ("aten::copy_", "unrolled_elementwise_kernel<direct_copy_kernel_cuda>"),
        ("", "batched_transpose_16x64_pack_1x4_ediv_1x2_half"),
    ],
    "elementwise": [
        ("aten::add", "unrolled_elementwise_kernel<CUDAFunctor_add<float>>"),
        ("stepgauge::swiglu_backward", "triton_kernel"),
        ("stepgauge::rotary_backward", "triton_kernel"),
        ("sgl_kernel::silu_and_mul", "_ZN7sgl_hip10activation18act_and_mul_kernel"),
        ("RopeLoraFlashAttnVarlenFuncBackward", "rotary_kernel"),
        ("", "triton_poi_fused_mul_silu_4"),
        ("aten::scatter", "_scatter_gather_elementwise_kernel<128>"),
        ("aten::_native_multi_head_attention", "transform_bias_rescale_qkv_kernel<c10::BFloat16, float, true>"),
    ],
    "softmax": [("aten::_softmax", "cunn_SoftMaxForward<4, float>"), ("", "softmax_warp_forward<float>")],
    "reduction": [("aten::sum", "reduce_kernel<128, 4>"), ("aten::max", "reduce_kernel<512, 1>")],
    "other": [("", "at::cuda::spin_kernel"), ("", "mystery")],
}  # fmt: skip


@pytest.mark.parametrize("kind", REAL)
def test_real_names_have_the_right_kind(kind):
    kinds = Kinds()
    found = {
        names: kinds.of_kernel(names[1], "kernel", names[0], False).kind for names in REAL[kind]
    }
    assert found == dict.fromkeys(REAL[kind], kind)


def test_the_text_of_a_rule_stays_short():
    operator = "torch::autograd::CppNode<" + 40 * "fbgemm_gpu::Permute" + ">"
    assert len(Kinds().of_kernel("mystery", "kernel", operator, False).rule) < 130


def test_a_kernels_name_ends_at_its_parameters():
    names = {
        "void at::native::(anonymous namespace)::cunn_SoftMax<4, float>(float*, int)": "cunn_SoftMax<4, float>",
        "void f<std::enable_if<(M > 1), int>::type>(int)": "f<std::enable_if<(M > 1), int>::type>",
        "void g<decltype(a->b)>(int)": "g<decltype(a->b)>",
        "Memcpy DtoH (Device -> Pinned)": "Memcpy DtoH",
        "nvjet_sm90_tst": "nvjet_sm90_tst",
    }
    assert {name: readable(name) for name in names} == names
