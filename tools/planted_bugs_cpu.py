# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant in src/cpu, for tools/planted_bugs.py: name, file, old text, new text, commands in the build folder."""

CHECK = "./tessera check --backend cpu"


def case(*names: str) -> tuple:
    return tuple(f"{CHECK} --case {name}" for name in names)


def gtest(name: str) -> str:
    return f"tests/kernels_test --gtest_filter={name}"


P = "src/cpu/"

BUGS = [
    ("cpu_weights_over_1", P + "simd/softmax.cc",
     "hn::Store(exp_of_nonpositive(at_most_zero(x)), d, at);", "hn::Store(exp_of_nonpositive(x), d, at);",
     (gtest("*weights_from_lse_are_at_most_1*"),)),
    ("cpu_matrix_weights_over_1", P + "matrix/inl/softmax-inl.hpp",
     "_mm512_min_ps(_mm512_setzero_ps(), _mm512_sub_ps(s, _mm512_loadu_ps(job.lse + lane)));",
     "_mm512_sub_ps(s, _mm512_loadu_ps(job.lse + lane));", (gtest("*gradient_of_the_scores*"),)),
    ("cpu_shared_dbias_twice_in_last_head", P + "steps/simd/bias_gradient.cc",
     "for (std::int64_t h = heads.begin; h < heads.end; ++h) {",
     "for (std::int64_t i = heads.begin, h = i; i < heads.end + (heads.size() > 1 && batches.size() > 1 ? 1 : 0);\n"
     "                 h = std::min(++i, heads.end - 1)) {", case("bias_gradient_of_all_heads")),
    ("cpu_dbias_of_padding_lanes", P + "steps/simd/bias_gradient.cc",
     "for (std::int64_t lane = 0; lane < panel.queries; ++lane) to[lane] += ds[lane];",
     "for (std::int64_t lane = 0; lane < panel.lanes; ++lane) to[lane] += ds[lane];", case("infinite_key_of_weight_0")),
    ("cpu_norm_skipped", P + "steps/simd/gradient.cc",
     "    if (!any) return;\n    double* weights", "    if (!any || g_.lanes > 0) return;\n    double* weights",
     (gtest("*weights_of_large_scores_are_normalised*"),)),
    ("cpu_matrix_norm_skipped", P + "steps/matrix/gradient_step.cc",
     "    if (!any) return;\n    float maxima", "    if (!any || kGroup > 0) return;\n    float maxima",
     (gtest("*weights_of_large_scores_are_normalised*"),)),
    ("cpu_overflow_not_mended", P + "steps/simd/step.cc",
     "if (!all_finite(sums.o, panel.lanes, g.head_dim_v, panel.lanes))",
     "if (panel.lanes == 0 && !all_finite(sums.o, panel.lanes, g.head_dim_v, panel.lanes))",
     case("sum_over_largest_fp32", "sum_over_largest_fp32_bf16")),
    ("cpu_matrix_infinite_ds_in_parts", P + "steps/matrix/gradient_step.cc",
     "if (g_.parts > 1 && may_be_infinite()) take_infinite(ds_pairs);",
     "if (g_.parts > 9 && may_be_infinite()) take_infinite(ds_pairs);", (gtest("*an_infinite_value*"),)),
    ("cpu_dropout_missing_in_dp", P + "steps/simd/gradient_step.cc",
     "        multiply(scratch.ds, scratch.bias_or_dropout, kv.keys, panel.lanes);\n    }\n}\n\nvoid score_gradient",
     "    }\n}\n\nvoid score_gradient", case("dropout_half")),
    ("cpu_softcap_slope_missing", P + "steps/simd/gradient_step.cc",
     "if (head.rule.softcap > 0) multiply(", "if (head.rule.softcap < 0) multiply(", case("softcap_causal_gqa")),
    ("cpu_scale_twice_in_dk", P + "steps/simd/gradient.cc",
     "store_rows(dk(sequence, kv_head, first), g_.k_stride, rows, g_.head_dim, scale,",
     "store_rows(dk(sequence, kv_head, first), g_.k_stride, rows, g_.head_dim, scale * scale,", case("causal_square")),
    ("cpu_merge_without_the_factor_of_l", P + "simd/softmax.cc",
     "hn::MulAdd(hn::Load(d, into.l + lane), a, hn::Mul(hn::Load(d, state.l + lane), b));",
     "hn::MulAdd(hn::Load(d, into.l + lane), a, hn::Load(d, state.l + lane));", (CHECK + " --cases 0",)),
    ("cpu_lse_of_base_2", P + "simd/softmax.cc",
     "static_cast<double>(state.m[i]) + std::log(", "static_cast<double>(state.m[i]) + std::log2(",
     case("causal_square")),
    ("cpu_block_norm_not_rounded", P + "block/kernels.cc",
     "out[i] = rounded(element(call.args.x, r, i) * factor * element(call.args.norm, i), p.dtype);",
     "out[i] = rounded(element(call.args.x, r, i) * factor * element(call.args.norm, i), DType::fp32);",
     (gtest("*DecodeBlock.is_right_for_drawn*"),)),
    ("cpu_block_bias_behind_the_rounding", P + "block/kernels.cc",
     "store_rounded(qkv, r, o, sum + bias_of(call.args.b_qkv, o));",
     "store_rounded(qkv, r, o, rounded(sum, call.problem.dtype) + bias_of(call.args.b_qkv, o));",
     (gtest("*DecodeBlock.is_right_for_drawn*"),)),
    ("cpu_block_residual_is_x", P + "block/kernels.cc",
     "element(call.args.residual, r, c)", "element(call.args.x, r, c)", (gtest("*DecodeBlock.is_right_for_drawn*"),)),
    ("cpu_block_rest_of_the_columns_left_out", P + "simd/row_products.cc",
     "    if (i < inputs) {", "    if (i + width / 2 < inputs) {", (gtest("*DecodeBlock.is_right_for_drawn*"),)),
    ("cpu_block_without_the_new_key", "src/decode_block.cc",
     "? before + 1 : before;", "? before : before;", (gtest("*DecodeBlock*"),)),
]
