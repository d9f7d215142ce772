# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant in the CUDA kernels, for tools/planted_bugs.py: name, file, old text, new text, commands in the build
folder that ought to fail. Each schedule has some in its forward and its backward. They need a GPU."""

# Sanity of a schedule: all corner cases, or one of them. tools/gpu_check runs kernels_test whole.
CASES = "tests/kernels_test --gtest_filter=*CudaCases.corners*:*CudaRandomCases*"
FEATURES = "tests/kernels_test --gtest_filter=AllKernels/FeatureCases.*cuda_"
LARGE = "tests/kernels_test --gtest_filter=*weights_of_large_scores_are_normalised*"
SPECIAL = "tests/kernels_test --gtest_filter=*SpecialValues*"
GRADIENTS = "tests/kernels_test --gtest_filter=*CudaGradients*:*CudaHeldGradients*"
HOST = "tests/cuda_host_test --gtest_filter="
STRESS = "tests/cuda/cuda_stress_test"
BOUNDS = "tests/kernels_test --gtest_filter=*CudaRaggedBounds*"
SINKS = "tests/kernels_test --gtest_filter=Sinks.*"
BLOCK = "tests/kernels_test --gtest_filter=*DecodeBlock*/cuda"
DECODE = "tests/kernels_test --gtest_filter=*CudaDecode*"


def case(schedule: str, *names: str) -> tuple:
    return tuple(f"./tessera check --backend cuda --schedule {schedule} --case {name}" for name in names)


P = "src/cuda/"

BUGS = [
    # fa3, forward.
    ("fa3_l_not_rescaled", P + "fa3/forward/softmax.cuh",
     "row_sum[r] = __fmul_rn(row_sum[r], factor[r]);", "row_sum[r] = __fmul_rn(row_sum[r], 1.0F);", (CASES,)),
    ("fa3_mask_one_key_more", P + "fa3/forward/softmax.cuh",
     "columns_before(band.last(query[r]) + 1 - key)", "columns_before(band.last(query[r]) + 2 - key)", (CASES,)),
    ("fa3_lse_without_exponent_offset", P + "fa3/forward/softmax.cuh",
     "ptx::log2_approx(row_sum[r] * kExponentOffsetFactor<T, kRescaleThreshold>)", "ptx::log2_approx(row_sum[r])",
     (CASES,)),
    ("fa3_maximum_of_one_thread", P + "fa3/forward/softmax.cuh",
     "block_max[r] = quad_max(fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3])));",
     "block_max[r] = fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3]));", (CASES,)),
    ("fa3_alibi_distance_of_other_row", P + "fa3/forward/score_mod.cuh",
     "static_cast<float>(diagonal + 8 - first_key)};",
     "static_cast<float>(diagonal - first_key)};", (FEATURES + "alibi",)),
    ("fa3_softcap_far_branch_sign", P + "fa3/forward/score_mod.cuh",
     "return fmaf(ptx::reciprocal_approx(e + 1.0F), -softcap.twice_cap, softcap.cap);",
     "return fmaf(ptx::reciprocal_approx(e + 1.0F), softcap.twice_cap, -softcap.cap);", (FEATURES + "softcap",)),
    ("fa3_packed_heads_of_ragged_tile", P + "fa3/forward/tile_scheduler.cuh",
     "tile.head = at.head << launch.pack.shift;", "tile.head = at.head;", (FEATURES + "stacked_heads",)),
    ("fa3_residual_of_empty_rows_unwritten", P + "fa3/forward/epilogue.cuh",
     "if (launch.o_residual.data != nullptr) {\n                *element<char>",
     "if (launch.o_residual.data != nullptr && lane < 0) {\n                *element<char>",
     ("tests/kernels_test --gtest_filter=*CudaResidual*", CASES)),
    ("fa3_nonfinite_of_v_not_restored", P + "fa3/forward/epilogue.cuh",
     "if (!isfinite(v)) o = T(static_cast<float>(o) + v);",
     "if (isnan(v)) o = T(static_cast<float>(o) + v);", (SPECIAL,)),
    # fa3, backward.
    ("fa3_delta_without_keep_scale", P + "fa3/backward/before/delta.cuh",
     "delta = static_cast<float>(sum_p_dp[r] / sum_p[r]) * launch.params.forward.keep_scale;",
     "delta = static_cast<float>(sum_p_dp[r] / sum_p[r]);", (FEATURES + "dropout",)),
    ("fa3_dlse_ignored", P + "fa3/backward/before/delta.cuh",
     "if (launch.params.dlse.data != nullptr) delta -= of_row(launch.params.dlse, r);", "", (FEATURES + "dlse",)),
    ("fa3_first_split_of_dk_twice", P + "fa3/backward/after/dkdv_reduce.cuh",
     "const std::int64_t head = std::int64_t{split} * heads_kv + keys.kv_head;",
     "const std::int64_t head = std::int64_t{split / 2 * 2} * heads_kv + keys.kv_head;", (GRADIENTS,)),
    ("fa3_hidden_pairs_keep_ds", P + "fa3/backward/main/consumer.cuh",
     "if (!mask.sees(i)) s[i] = dp[i] = 0;", "if (!mask.sees(i)) s[i] = 0;", (CASES,)),
    ("fa3_dq_order_forgotten", P + "fa3/backward/main/dq_accumulate.cuh",
     "if (!may_add) wait_until(semaphore.position, [&] { return semaphore.may_add<kHalf>(launch); });",
     "if (!may_add && semaphore.position < 0) wait_until(0, [&] { return semaphore.may_add<kHalf>(launch); });",
     (STRESS, GRADIENTS)),
    ("fa3_masked_dp_of_delta", P + "fa3/backward/before/delta.cuh",
     "if (!full) apply_mask(dp, first_key, 0);", "", (SPECIAL,)),
    # fa2, forward and backward (the backward of fa1 is the same kernels).
    ("fa2_o_not_rescaled", P + "fa2/mainloop.cuh",
     "if (any_lane(rescaling[m].any())) out.rescale(m, rescaling[m]);", "", (CASES,)),
    ("fa2_second_stage_of_v_is_old", P + "fa2/mainloop.cuh",
     "inputs.load_v(first_key(index + 1), 1 - stage);", "inputs.load_v(first_key(index), 1 - stage);", (CASES,)),
    ("fa2_large_rows_subtract_twice", P + "tile/softmax.cuh",
     "            rescaling.offset[r] = kExponentOffset<T>;\n", "", (SPECIAL, LARGE)),
    ("fa2_bias_row_of_padding", P + "tile/score.cuh",
     "std::int64_t at = min(query + 8 * r, last_query) * params.bias.row",
     "std::int64_t at = min(query, last_query) * params.bias.row", (FEATURES + "bias",)),
    ("fa2_dropout_of_next_keys", P + "tile/score.cuh",
     "kept.bits >>= 1;  // the next 16 keys", "kept.bits >>= 2;  // the next 16 keys", (FEATURES + "dropout",)),
    ("fa2_fp32_causal_by_one", P + "fa2/forward_fp32.cuh",
     "else scores.template transform<true>(s, work.band, query(), column);",
     "else scores.template transform<true>(s, work.band, query() + 1, column);",
     (FEATURES + "causal*", *case("fa2", "causal_square", "one_key"))),
    ("gradient_delta_not_rescaled", P + "gradient/before/delta.cuh",
     "sum_p_dp[r] = fma(sum_p_dp[r], double{rescale[r]}, double{part[r]});",
     "sum_p_dp[r] = double{fmaf(static_cast<float>(sum_p_dp[r]), 1.0F, part[r])};", (CASES, GRADIENTS)),
    ("gradient_norm_of_large_rows_skipped", P + "gradient/before/delta.cuh",
     "if (fabsf(offset) < kOrdinaryOffset) return;", "if (fabsf(offset) < INFINITY) return;", (LARGE,)),
    ("gradient_softcap_slope", P + "gradient/main/transposed_scores.cuh",
     "out.slope = 4 * r * (1 - r);", "out.slope = 1;", (FEATURES + "softcap",)),
    ("gradient_hidden_pairs_keep_ds", P + "gradient/main/warp_tile.cuh",
     "            p[e] = 0;\n            ds[e] = 0;", "            p[e] = 0;", (SPECIAL,)),
    ("gradient_predecessor_of_dq", P + "gradient/host/dq_order.hpp",
     "return next.adds_to(accumulator, tile) ? block + 1 : earlier;",
     "return next.adds_to(accumulator, tile) ? block + 1 : -1;", (HOST + "*DqOrder*", STRESS)),
    ("gradient_dbias_of_one_head", P + "gradient/after/bias.cuh",
     "for (int head = task.heads.begin; head < task.heads.end; ++head) {",
     "for (int head = task.heads.begin; head < task.heads.begin + 1; ++head) {",
     (FEATURES + "bias_gradient", *case("fa2", "bias_gradient_of_all_heads_bf16"))),
    ("gradient_part_of_dbias_lost", P + "gradient/after/bias_task.cuh",
     "total[i][j] += part[i][j];", "total[i][j] = part[i][j];",
     ("tests/kernels_test --gtest_filter=*CudaLongSums*bias_gradient*",)),
    ("gradient_fp16_key_scale", P + "gradient/main/key_scale.cuh",
     "power_of_two(exponent[m][1] - before[m][1])};",
     "power_of_two(exponent[m][0] - before[m][0])};", (CASES, GRADIENTS)),
    # fa1.
    ("fa1_old_l_not_decayed", P + "fa1/state.cuh",
     "const float old_l = decay(old.x, larger) * old.y;", "const float old_l = old.y;", (CASES,)),
    ("fa1_partner_of_a_warp", P + "fa1/combine.cuh",
     "add(sum, shared.part(u, shared.warp, distance, t), rows, distance);",
     "add(sum, shared.part(u, shared.warp, distance, t), rows, distance ^ 1);", (CASES,)),
    # standard.
    ("standard_keys_of_next_head", P + "standard/scores.cuh",
     "head_offset(p.k, head.batch, sequence.first_kv, head.head / p.group, sizeof(T));",
     "head_offset(p.k, head.batch, sequence.first_kv, head.head % (p.heads_q / p.group), sizeof(T));", (CASES,)),
    ("standard_dropped_weights_leave_the_sum", P + "standard/softmax.cuh",
     "                sum += p[i];\n            }\n            if (params.drops()) drop(p, params, head, query, key);",
     "            }\n            if (params.drops()) drop(p, params, head, query, key);\n"
     "            for (int i = 0; i < kKeysPerThread; ++i) sum += p[i];", (FEATURES + "dropout",)),
    ("standard_delta_not_divided", P + "standard/row_gradients.cuh",
     "factors.delta = p_dp / all - dlse;", "factors.delta = p_dp - dlse;", (CASES,)),
    ("sinks_not_in_the_sum_of_delta", P + "gradient/before/delta.cuh",
     "if (sink != -INFINITY) sum =", "if (false) sum =", (SINKS, CASES)),
    # Host choices, ragged batches and what the kernels share.
    ("cuda_blocks_end_one_short", P + "host/block_range.hpp",
     "end = static_cast<int>((keys.end + block_kv - 1) / block_kv);", "end = static_cast<int>(keys.end / block_kv);",
     (HOST + "*BlockRange*", CASES)),
    ("cuda_pack_gqa_of_masks_by_head", P + "fa3/host/pack_gqa.hpp",
     "if (c.scores != Scores::plain && c.scores != Scores::capped) return {};",
     "", (HOST + "*PackGqa*", FEATURES + "alibi")),
    ("cuda_ragged_keys_of_queries", P + "tile/sequence.cuh",
     "const std::int64_t begin_kv = cu_seqlens_at(p.cu_seqlens_kv, batch * p.cu_stride_kv,",
     "const std::int64_t begin_kv = cu_seqlens_at(p.cu_seqlens_q, batch * p.cu_stride_kv,", (FEATURES + "ragged",)),
    ("cuda_ragged_tile_of_sequence", P + "host/query_tiles.hpp",
     "if (first_of(middle) <= index) sequence = middle;", "if (first_of(middle) < index) sequence = middle;",
     (HOST + "*QueryTiles*", FEATURES + "ragged")),
    ("cuda_dropout_lane_exchange", P + "tile/dropout_mask.cuh",
     "bits[i] = swap_with_lane<2, 4>(bits[i], lane);", "bits[i] = swap_with_lane<2, 3>(bits[i], lane);",
     (FEATURES + "dropout",)),
    ("cuda_residual_of_upper_element", P + "tile/residual.cuh",
     "const std::uint32_t lower = __byte_perm(x, y, 0x5410);", "const std::uint32_t lower = __byte_perm(x, y, 0x1010);",
     ("tests/kernels_test --gtest_filter=*CudaResidual*",)),

    # The list of a ragged call.
    ("list_last_segment_is_full", P + "backward/host/placed_key_block.hpp",
     "const int own_size = std::min(size, count - segment * size);", "const int own_size = size;",
     (HOST + "*GradientDqOrder*",)),
    ("list_items_of_a_class_overlap", P + "tile/work_list.cuh",
     "if (exists) items[first + lane] = begin - sum;", "if (exists) items[first + lane] = begin - sum / 2;", (BOUNDS,)),
    ("list_lacks_the_last_tile_of_queries", P + "fa3/instances/tile_queue.cu",
     "launch.tile_queries.quotient(sequence.len_q + queries - 1)", "launch.tile_queries.quotient(sequence.len_q)",
     (BOUNDS,)),
    ("list_query_blocks_of_the_sequence_before", P + "fa3/backward/before/key_block_list.cuh",
     "begin, begin - first);", "begin, begin - first + 1);", (BOUNDS,)),

    # The attention block of a decode step, append() and decode. No bug leaves a word unwritten that a CTA waits for: the
    # launch would wait for ever.
    ("block_launch_number_0_not_skipped", P + "block/block.cuh",
     "const unsigned number = before + 1 == 0 ? 1 : before + 1;", "const unsigned number = before + 1;",
     (STRESS + " --gtest_filter=DecodeBlocks*",)),
    ("block_new_key_in_two_splits", P + "block/items.cuh",
     "item.newest = from_last == 0 && of_sequence.new_row.slot >= 0;",
     "item.newest = from_last <= 1 && of_sequence.new_row.slot >= 0;", (BLOCK,)),
    ("block_new_value_not_in_its_tile", P + "block/attention.cuh",
     "if (new_key >= key && new_key < key + kKeys)\n                put_value", "if (new_key == INT_MAX)\n                put_value",
     (BLOCK,)),
    ("block_heads_of_the_first_tile", P + "block/attention.cuh",
     "if (i < rows()) return item.kv_head * p.group + item.first_row + i;",
     "if (i < rows()) return item.kv_head * p.group + i;", (BLOCK,)),
    ("block_bias_twice", P + "block/gemm.cuh",
     "return {__fadd_rn(sum.x, first), __fadd_rn(sum.y, second)};",
     "return {__fadd_rn(sum.x, 2 * first), __fadd_rn(sum.y, 2 * second)};", (BLOCK,)),
    ("block_rotary_of_the_next_position", P + "block/items.cuh",
     "append_rows::rotary_row(append, block.shared.sequences[b].new_row.position);",
     "append_rows::rotary_row(append, block.shared.sequences[b].new_row.position + 1);", (BLOCK,)),
    ("block_last_split_of_a_segment_left_out", P + "block/combine.cuh",
     "for (int i = 0; i < kSplits; ++i) {\n                const int source", "for (int i = 0; i < kSplits - 1; ++i) {\n"
     "                const int source", (BLOCK,)),
    ("block_segments_in_reverse", P + "block/combine.cuh",
     "for (int i = 0; i < Lanes::kSegments && (base + i) * of_segment < splits; ++i) {",
     "for (int i = Lanes::kSegments - 1; i >= 0; --i) {", (BLOCK,)),
    ("append_negative_length_is_0", P + "append/append.cuh",
     "const std::int64_t position = read(launch.kv_lengths, sequence) + index;",
     "const std::int64_t position = max(read(launch.kv_lengths, sequence) + index, std::int64_t{0});", (BLOCK,)),
    ("append_positions_ignored", P + "append/append.cuh",
     "if (launch.positions.data != nullptr) to.position = read(launch.positions, row);", "", (BLOCK,)),
    ("decode_sink_of_the_first_head", P + "decode/combine.cuh",
     "with_sink_of(launch.params, head, softmax.lse(0, scale))", "with_sink_of(launch.params, 0, softmax.lse(0, scale))",
     (DECODE, BLOCK)),
    ("decode_page_numbers_one_tile_late", P + "decode/load.cuh",
     "read_pages(work, key_ + Config::kKeys);", "read_pages(work, key_);", (DECODE, BLOCK)),
    ("decode_mask_one_key_more", P + "decode/scores.cuh",
     "if (at < row.first || at > row.last) s[", "if (at < row.first || at > row.last + 1) s[", (DECODE, BLOCK)),
    ("decode_sum_of_a_slice_left_out", P + "decode/scores.cuh",
     "return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));",
     "return __fadd_rn(__fadd_rn(sums[0], sums[1]), sums[2]);", (DECODE, BLOCK)),
]
