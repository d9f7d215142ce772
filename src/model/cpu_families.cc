// SPDX-License-Identifier: Apache-2.0
//
// The families of kernels on CPUs with their constants.
#include <iterator>

#include "model/cpu.hpp"

namespace tessera::model {
namespace {

constexpr const char* kFma = "";  // Records that are not kept

// The families, in the order of cpu_family_of(). `bench/fit` refits them: fit_model --cpu, bench/fit/main.cc.
constexpr CpuFamily kCpuFamilies[] = {
    // fp32 multiply-adds: fitted on the Records of commit 5bdbca1 (torch_amx_xeon16.jsonl, with fp32 on the SIMD path).
    // `contended_speed` is from the times of PyTorch's calls in two sets of Records, whose hosts differ.
    {"fp32 forward",
     kFma,
     {.gemm_share = 0.92,
      .exp_share = 1.13,
      .extra_tiles = 0.5,
      .loop_starts = 1,
      .call_us = 23,
      .contended_speed = 0.85}},
    {"fp32 backward",
     kFma,
     {.gemm_share = 0.89,
      .exp_share = 0.95,
      .extra_tiles = 1.3,
      .loop_starts = 0,
      .call_us = 33,
      .contended_speed = 0.85}},
    // Matrix unit: close to the fit of calibrate's calls in 34 rounds, in turn on 1, 4 and 16 threads. With all cores
    // busy a thread has 0.55 to 0.63 of its speed on that shared host; loops in registers keep 0.7 to 0.8.
    {"fp32 in parts forward",
     kMatrixRecords,
     {.gemm_share = 1.0,
      .exp_share = 2.8,
      .extra_tiles = 0,
      .loop_starts = 3.4,
      .call_us = 0,
      .pack_ns = 0.29,
      .contended_speed = 0.6,
      .mask_share = 0.44}},
    {"fp32 in parts backward",
     kMatrixRecords,
     {.gemm_share = 0.85,
      .exp_share = 7.1,
      .extra_tiles = 0,
      .loop_starts = 1.3,
      .call_us = 0,
      .pack_ns = 0.62,
      .contended_speed = 0.6,
      .mask_share = 1.16}},
    {"bf16 forward",
     kMatrixRecords,
     {.gemm_share = 0.56,
      .exp_share = 1.7,
      .extra_tiles = 0,
      .loop_starts = 1.96,
      .call_us = 13.5,
      .pack_ns = 0.15,
      .contended_speed = 0.63,
      .mask_share = 0.76}},
    {"bf16 backward",
     kMatrixRecords,
     {.gemm_share = 0.51,
      .exp_share = 3.1,
      .extra_tiles = 0,
      .loop_starts = 4.1,
      .call_us = 0,
      .pack_ns = 0.31,
      .contended_speed = 0.55,
      .mask_share = 0.94}},
    // standard and fa1 in multiply-adds: GEMMs and exponentials take 1.5 times as long as with fa2's constants.
    {"standard and fa1 forward",
     kSchedulesRecords,
     {.gemm_share = 0.60,
      .exp_share = 1.74,
      .extra_tiles = 0.5,
      .loop_starts = 1,
      .call_us = 23,
      .contended_speed = 0.85}},
    // Few queries without AMX, one thread of an EPYC: GEMMs without padding, cold tensors and a call. The softmax is
    // not
    // counted apart, since the fit does not determine it.
    {"few queries fp32 forward",
     kFewQueriesRecords,
     {.gemm_share = 0.31, .exp_share = 0, .extra_tiles = 0, .loop_starts = 1, .call_us = 21, .read_share = 0.34}},
    {"few queries fp32 backward",
     kFewQueriesRecords,
     {.gemm_share = 0.26, .exp_share = 0, .extra_tiles = 0, .loop_starts = 1, .call_us = 0, .read_share = 0.197}},
    {"few queries bf16 forward",
     kFewQueriesRecords,
     {.gemm_share = 0.22, .exp_share = 0, .extra_tiles = 0, .loop_starts = 1, .call_us = 8, .read_share = 0.386}},
    {"few queries bf16 backward",
     kFewQueriesRecords,
     {.gemm_share = 0.30, .exp_share = 0, .extra_tiles = 0, .loop_starts = 1, .call_us = 0, .read_share = 0.156}},
};
constexpr std::size_t kStandardFamily = 6, kFewQueriesFamily = 7;

}  // namespace

std::span<const CpuFamily> cpu_families() { return kCpuFamilies; }

const CpuFamily& cpu_family_of(const Question& question) {
    if (is_standard_or_fa1(question)) return kCpuFamilies[kStandardFamily];
    const std::size_t pass = question.pass == Pass::forward ? 0 : 1;
    if (runs_few_queries(question))
        return kCpuFamilies[kFewQueriesFamily + pass + (question.problem.dtype == DType::bf16 ? 2 : 0)];
    const std::size_t pair = in_parts(question) ? 1 : runs_on_matrix_unit(question) ? 2 : 0;
    return kCpuFamilies[2 * pair + pass];
}

}  // namespace tessera::model
