// SPDX-License-Identifier: Apache-2.0
//
// The refusals in the table of CUDA kernels, which are known without a GPU. Sizes lie around the limit of the kernels'
// 32-bit counts.
#include "cuda/host/kernel_table.hpp"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "check/feature_cases.hpp"
#include "check/limits.hpp"
#include "tessera/error.hpp"

namespace tessera::kernel_table_test {
namespace {

using cuda::kMaxIndex;

const cuda::Limits kDevice{
    .who = "a device", .capability = 90, .shared_bytes = 227 << 10, .memory_bytes = std::int64_t{1} << 62};

/// The Problem for this kernel, on a cache if it takes one: without, cuda.decode.forward refuses many queries.
Problem asked(const cuda::KernelEntry& entry, Problem p) {
    if (!entry.takes_cache) return p;
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
        if (entry.schedule == Schedule::standard) continue;                   // its matrix has 2^60 numbers
        if (entry.name == std::string_view("cuda.decode.forward")) continue;  // it counts splits of tiles: 2^45
        EXPECT_EQ(cuda::refusal(entry, p, {}, kDevice), std::nullopt) << entry.name;
        EXPECT_EQ(cuda::refusal(entry, asked(entry, p), {}, kDevice), std::nullopt) << entry.name;
    }
}

/// How many cases of caches cuda.fa3.forward takes, of all.
struct Taken {
    int by_fa3 = 0, all = 0;
};

/// Expects each kernel to refuse the case for the reason in check/limits.hpp, or to take it if that has none.
void expect_as_in_limits(const check::Case& c, Taken& caches) {
    const Problem& p = c.problem;
    if (p.dtype == DType::fp64) return;
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        const KernelInfo kernel{entry.name, Backend::cuda, entry.schedule, entry.pass, entry.dtypes};
        if (p.kv_lengths && entry.pass == Pass::backward) continue;  // plan() refuses it
        const std::string expected = check::expected_refusal(kernel, p);
        const std::string reason = cuda::refusal(entry, p, {}, kDevice).value_or("");
        EXPECT_EQ(reason.empty(), expected.empty()) << entry.name << ": " << c.describe() << "\n" << reason;
        EXPECT_TRUE(reason.starts_with(expected)) << entry.name << ": " << reason << "; expected " << expected;
        if (!p.kv_lengths || entry.name != std::string_view("cuda.fa3.forward")) continue;
        ++caches.all;
        if (reason.empty()) ++caches.by_fa3;
    }
}

TEST(KernelTable, refusals_are_those_of_limits_hpp) {
    Taken caches;
    for (const check::Case& c : check::corner_cases()) expect_as_in_limits(c, caches);
    for (const check::FeatureCase& c : check::feature_cases(20261201)) expect_as_in_limits(c.which, caches);
    for (std::uint64_t i = 0; i < 2000; ++i) expect_as_in_limits(check::random_case(20261201, i), caches);
    EXPECT_GT(caches.by_fa3, 50);
    EXPECT_GT(caches.all, caches.by_fa3 + 50);
}

/// Shared memory of a thread block: H200, A100 and RTX 4090.
cuda::Limits with_shared(int capability, std::int64_t kibibytes) {
    return {.who = "a device", .capability = capability, .shared_bytes = kibibytes << 10, .memory_bytes = 1 << 30};
}
const cuda::Limits kHopper = with_shared(90, 227), kAmpere = with_shared(80, 163), kAda = with_shared(89, 99);

TEST(KernelTable, tiles_of_fp32_follow_the_shared_memory) {
    const cuda::KernelEntry& forward = cuda::kernel_entry("cuda.fa2.forward");
    const cuda::KernelEntry& backward = cuda::kernel_entry("cuda.fa2.backward");
    const Problem p = Problem::dense(1, 512, 2, 64, DType::fp32);
    EXPECT_EQ(backward.tile_of(p, kHopper), (Tile{64, 128}));
    EXPECT_EQ(backward.tile_of(p, kAmpere), (Tile{64, 64}));
    EXPECT_EQ(cuda::refusal(backward, p, {}, kAmpere), std::nullopt);
    for (const std::int64_t block_kv : {64, 128})
        EXPECT_EQ(cuda::refusal(backward, p, Tile{64, block_kv}, kHopper), std::nullopt) << block_kv;
    EXPECT_EQ(cuda::refusal(backward, p, Tile{64, 32}, kHopper), "is compiled for tiles of 64 x 128");
    EXPECT_TRUE(cuda::refusal(backward, p, Tile{64, 128}, kAmpere).has_value());
    for (const std::int64_t head_dim : {64, 128, 256}) {
        const Problem wide = Problem::dense(1, 512, 2, head_dim, DType::fp32);
        EXPECT_EQ(cuda::refusal(forward, wide, {}, kAda), std::nullopt) << head_dim;
    }
}

TEST(KernelTable, a_forward_of_fa2_without_room_is_refused) {
    const cuda::KernelEntry& forward = cuda::kernel_entry("cuda.fa2.forward");
    const Problem p = Problem::dense(1, 512, 2, 256, DType::bf16);
    EXPECT_EQ(cuda::refusal(forward, p, {}, kHopper), std::nullopt);
    EXPECT_EQ(cuda::refusal(forward, p, {}, kAmpere),
              "needs 197632 bytes of shared memory for head_dim 256, a device has 166912");
    for (const std::int64_t head_dim : {64, 128}) {  // at 128 by the general shape
        EXPECT_EQ(cuda::refusal(forward, Problem::dense(1, 512, 2, head_dim, DType::bf16), {}, kAda), std::nullopt);
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
