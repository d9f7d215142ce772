// SPDX-License-Identifier: Apache-2.0
//
// The refusals in the table of CUDA kernels, which are known without a GPU. Sizes lie around the limit of the kernels'
// 32-bit counts.
#include "cuda/host/kernel_table.hpp"

#include <gtest/gtest.h>

#include <string>

#include "tessera/error.hpp"

namespace tessera::kernel_table_test {
namespace {

using cuda::kMaxIndex;

const cuda::Limits kDevice{
    .who = "a device", .capability = 90, .shared_bytes = 227 << 10, .memory_bytes = std::int64_t{1} << 62};

/// The Problem for this kernel: the one that serves takes many queries on a cache alone.
Problem asked(const cuda::KernelEntry& entry, Problem p) {
    if (!entry.serves) return p;
    p.kv_lengths = true;
    p.total_kv = 0;
    return p;
}

/// Expects every kernel that takes the dtype to refuse the Problem, since it can't count it.
void expect_refused(const Problem& p) {
    ASSERT_NO_THROW(p.validate()) << p.describe();
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        const auto reason = cuda::refusal(entry, asked(entry, p), {}, kDevice);
        ASSERT_TRUE(reason.has_value()) << entry.name << ": " << p.describe();
        EXPECT_NE(reason->find("count"), std::string::npos) << entry.name << ": " << *reason;
    }
}

TEST(KernelTable, tiles_that_pass_int64_are_refused) {
    // The bounds of a ragged Problem: 2^21 sequences, 2^20 heads and 2^23 tiles of 64 queries are 2^64.
    Problem p = Problem::dense(std::int64_t{1} << 21, std::int64_t{1} << 29, 1 << 20, 64, DType::bf16);
    p.len_kv = 1 << 12;
    p.ragged = true;
    p.total_q = p.total_kv = p.batch;
    expect_refused(p);
    p.heads_q = p.heads_kv = 1 << 19;  // 2^63
    expect_refused(p);
}

TEST(KernelTable, rows_and_tiles_are_taken_up_to_the_limit_and_no_further) {
    Problem p = Problem::dense(1, kMaxIndex, 1, 64, DType::bf16);
    p.mask = {.window_left = 100, .window_right = 100};
    expect_refused(p);
    --p.len_q, --p.len_kv;
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        if (entry.schedule == Schedule::standard) continue;  // its matrix has 2^60 numbers
        if (entry.serves) continue;                          // it counts the splits of all tiles, which are 2^45
        EXPECT_EQ(cuda::refusal(entry, p, {}, kDevice), std::nullopt) << entry.name;
    }
}

TEST(KernelTable, a_kernel_without_a_row_is_an_error_that_names_it) {
    EXPECT_STREQ(cuda::kernel_entry(Schedule::fa2, Pass::backward).name, "cuda.fa2.backward");
    try {
        cuda::kernel_entry(static_cast<Schedule>(std::size(kSchedules)), Pass::backward);
        ADD_FAILURE() << "a schedule that does not exist has an entry";
    } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::internal);
        EXPECT_STREQ(e.what(),
                     "expected an entry for cuda.?.backward in the table of CUDA kernels (kernel_table.cc), got none");
    }
}

}  // namespace
}  // namespace tessera::kernel_table_test
