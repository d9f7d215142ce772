// SPDX-License-Identifier: Apache-2.0
//
// Compares may_overlap() and overlaps_itself() with the set of bytes that views touch.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/checks.hpp"
#include "core/property.hpp"
#include "core/tensors.hpp"

namespace tessera::overlap_test {
namespace {

using test::for_each_index;
using test::Index;

std::int64_t byte_of(const TensorView& t, const Index& i) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < i.size(); ++d) offset += i[d] * t.strides[d];
    return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(t.data)) + offset * size_of(t.dtype);
}

std::set<std::int64_t> bytes_of(const TensorView& t) {
    std::set<std::int64_t> bytes;
    for_each_index(t, [&](const Index& i) {
        for (std::int64_t b = 0; b < size_of(t.dtype); ++b) bytes.insert(byte_of(t, i) + b);
    });
    return bytes;
}

bool overlap_by_brute_force(const TensorView& a, const TensorView& b) {
    const auto bytes = bytes_of(a);
    const auto others = bytes_of(b);
    return std::any_of(others.begin(), others.end(), [&](std::int64_t byte) { return bytes.count(byte) > 0; });
}

bool folds_by_brute_force(const TensorView& t) {
    std::set<std::int64_t> elements;
    bool twice = false;
    for_each_index(t, [&](const Index& i) { twice = !elements.insert(byte_of(t, i)).second || twice; });
    return twice;
}

/// A view of made-up addresses; nothing is ever read through it.
TensorView fake(std::int64_t element, DType dtype, std::initializer_list<std::int64_t> shape,
                std::initializer_list<std::int64_t> strides) {
    return strided_view(reinterpret_cast<const void*>(0x100000 + element * size_of(dtype)), dtype, shape, strides);
}

TensorView arbitrary(int rank, DType dtype, std::int64_t furthest_stride) {
    TensorView t{.dtype = dtype, .rank = rank};
    for (std::size_t d = 0; d < static_cast<std::size_t>(rank); ++d) {
        t.shape[d] = *rc::gen::inRange<std::int64_t>(1, 5);
        t.strides[d] = *rc::gen::inRange<std::int64_t>(-furthest_stride, furthest_stride + 1);
    }
    t.data = reinterpret_cast<void*>(0x100000 + *rc::gen::inRange<std::int64_t>(-40, 41) * size_of(dtype));
    return t;
}

DType arbitrary_dtype() { return *rc::gen::element(DType::fp64, DType::fp32, DType::bf16); }

/// Expects may_overlap() to agree with the bytes.
void check_pair(const TensorView& a, const TensorView& b) {
    RC_LOG() << a.describe() << " at " << a.data << ", " << b.describe() << " at " << b.data << std::endl;
    const bool shared = overlap_by_brute_force(a, b);
    RC_ASSERT(may_overlap(a, b) == shared);
    RC_ASSERT(may_overlap(b, a) == shared);
}

TEST(Overlap, any_two_small_views) {
    EXPECT_TRUE(test::holds(3000, [] {
        check_pair(arbitrary(*rc::gen::inRange(1, 5), arbitrary_dtype(), 12),
                   arbitrary(*rc::gen::inRange(1, 5), arbitrary_dtype(), 12));
    }));
}

/// The strides leave space for other views. A shared byte is never missed, and hardly any pair without one is refused.
TEST(Overlap, two_wide_views) {
    std::int64_t apart = 0;
    std::int64_t refused = 0;
    EXPECT_TRUE(test::holds(5000, [&] {
        const std::int64_t furthest = *rc::gen::element<std::int64_t>(30, 100, 400);
        const TensorView a = arbitrary(*rc::gen::inRange(2, 5), arbitrary_dtype(), furthest);
        const TensorView b = arbitrary(*rc::gen::inRange(2, 5), arbitrary_dtype(), furthest);
        RC_LOG() << a.describe() << " at " << a.data << ", " << b.describe() << " at " << b.data << std::endl;
        const bool shared = overlap_by_brute_force(a, b);
        const bool claimed = may_overlap(a, b);
        RC_ASSERT(claimed || !shared);
        apart += shared ? 0 : 1;
        refused += !shared && claimed ? 1 : 0;
    }));
    EXPECT_GT(apart, 1000);
    EXPECT_LE(1000 * refused, apart) << refused << " of " << apart;
}

TEST(Overlap, two_views_of_one_buffer_exactly) {
    EXPECT_TRUE(test::holds(3000, [] {
        const TensorView a = arbitrary(*rc::gen::inRange(1, 5), arbitrary_dtype(), 30);
        TensorView b = arbitrary(a.rank, a.dtype, 30);
        b.strides = a.strides;
        check_pair(a, b);
    }));
}

TEST(Overlap, memory_from_the_last_byte_of_an_element_on) {
    std::array<std::byte, 32> bytes{};
    const TensorView view = dense_view(bytes.data() + 8, DType::fp32, {2});
    for (std::size_t begin = 0; begin < bytes.size(); ++begin) {
        for (std::size_t size = 1; begin + size <= bytes.size(); ++size) {
            EXPECT_EQ(may_touch(view, std::span(bytes).subspan(begin, size)), begin < 16 && begin + size > 8)
                << begin << " " << size;
        }
    }
}

TEST(Overlap, addresses_between_elements) {
    EXPECT_TRUE(test::holds(2000, [] {
        const TensorView a = arbitrary(*rc::gen::inRange(1, 4), DType::fp32, 10);
        TensorView b = a;
        b.data = static_cast<std::byte*>(a.data) + *rc::gen::inRange(-60, 61);
        check_pair(a, b);
    }));
}

TEST(Overlap, with_itself_exactly) {
    EXPECT_TRUE(test::holds(3000, [] {
        const TensorView t = arbitrary(*rc::gen::inRange(1, 5), arbitrary_dtype(), *rc::gen::element(4, 12, 60));
        RC_LOG() << t.describe() << std::endl;
        RC_ASSERT(overlaps_itself(t) == folds_by_brute_force(t));
    }));
}

TEST(Overlap, packed_qkv_parts_are_apart) {
    // [batch, len, 3, heads, dim] in one buffer, and [total, heads_q + 2 heads_kv, dim] with GQA.
    constexpr std::int64_t kHeads = 4, kDim = 8, kRow = 3 * kHeads * kDim, kLen = 5;
    const auto part = [&](std::int64_t n) {
        return fake(n * kHeads * kDim, DType::bf16, {2, kLen, kHeads, kDim}, {kLen * kRow, kRow, kDim, 1});
    };
    for (std::int64_t a = 0; a < 3; ++a) {
        EXPECT_FALSE(overlaps_itself(part(a)));
        for (std::int64_t b = 0; b < 3; ++b) EXPECT_EQ(may_overlap(part(a), part(b)), a == b);
    }
    const TensorView q = fake(0, DType::fp32, {9, 4, 8}, {64, 8, 1});
    const TensorView k = fake(32, DType::fp32, {9, 2, 8}, {64, 8, 1});
    const TensorView v = fake(48, DType::fp32, {9, 2, 8}, {64, 8, 1});
    EXPECT_FALSE(may_overlap(q, k) || may_overlap(k, v) || may_overlap(q, v));
    const TensorView one_more_head = fake(0, DType::fp32, {9, 5, 8}, {64, 8, 1});
    EXPECT_TRUE(may_overlap(one_more_head, k));
}

/// Outputs of one buffer whose strides differ: dq and dk have rows of 192, dv of 128, all in one row of the buffer.
TEST(Overlap, packed_gradients_of_unlike_head_dims_are_apart) {
    constexpr std::int64_t kLen = 9, kRow = 4 * 192 + 2 * 192 + 2 * 128;
    const TensorView dq = fake(0, DType::fp32, {2, kLen, 4, 192}, {kLen * kRow, kRow, 192, 1});
    const TensorView dk = fake(768, DType::fp32, {2, kLen, 2, 192}, {kLen * kRow, kRow, 192, 1});
    const TensorView dv = fake(1152, DType::fp32, {2, kLen, 2, 128}, {kLen * kRow, kRow, 128, 1});
    EXPECT_FALSE(may_overlap(dq, dk) || may_overlap(dk, dv) || may_overlap(dq, dv) || may_overlap(dv, dq));
    const TensorView early = fake(1151, DType::fp32, {2, kLen, 2, 128}, {kLen * kRow, kRow, 128, 1});
    EXPECT_TRUE(may_overlap(dk, early));
    const TensorView wide = fake(1152, DType::fp32, {2, kLen, 2, 129}, {kLen * kRow, kRow, 128, 1});
    EXPECT_TRUE(may_overlap(dq, wide));  // the last element is the next row's first
}

/// [batch, len, heads, head_dim_v + 1]: the last number of each record is LSE, which has its dimensions in other order.
TEST(Overlap, o_and_lse_in_one_record_are_apart) {
    for (const std::int64_t len : {std::int64_t{7}, std::int64_t{1} << 20}) {
        constexpr std::int64_t kHeads = 5, kDim = 16, kRecord = kDim + 1;
        const std::int64_t row = kHeads * kRecord;
        const TensorView o = fake(0, DType::fp32, {3, len, kHeads, kDim}, {len * row, row, kRecord, 1});
        const TensorView lse = fake(kDim, DType::fp32, {3, kHeads, len}, {len * row, kRecord, row});
        EXPECT_FALSE(may_overlap(o, lse) || may_overlap(lse, o) || overlaps_itself(lse));
        EXPECT_TRUE(may_overlap(o, fake(kDim + 1, DType::fp32, {3, kHeads, len}, {len * row, kRecord, row})));
    }
}

TEST(Overlap, interleaved_halves_and_rows) {
    const TensorView even = fake(0, DType::fp32, {4, 8}, {16, 2});
    const TensorView odd = fake(1, DType::fp32, {4, 8}, {16, 2});
    EXPECT_FALSE(may_overlap(even, odd));
    const TensorView backwards = fake(63, DType::fp32, {4, 8}, {-16, -2});  // elements 63, 61, ...
    const TensorView shifted = fake(62, DType::fp32, {4, 8}, {-16, -2});
    EXPECT_FALSE(may_overlap(backwards, shifted));
    EXPECT_TRUE(may_overlap(backwards, backwards));
}

TEST(Overlap, expanded_and_folded_outputs) {
    EXPECT_TRUE(overlaps_itself(fake(0, DType::fp32, {2, 3, 4}, {0, 4, 1})));
    EXPECT_TRUE(overlaps_itself(fake(0, DType::fp32, {3, 4}, {3, 1})));
    EXPECT_FALSE(overlaps_itself(fake(0, DType::fp32, {1, 3, 4}, {0, 4, 1})));
    for (const std::int64_t last : {11, 12, 13}) {  // the last element of the two inner axes is 11
        EXPECT_EQ(overlaps_itself(fake(0, DType::fp32, {2, 3, 4}, {last, 4, 1})), last == 11);
        EXPECT_EQ(overlaps_itself(fake(0, DType::fp32, {4, 2, 3}, {1, -last, 4})), last == 11);
    }
    EXPECT_FALSE(overlaps_itself(fake(20, DType::fp32, {3, 4}, {-4, -1})));
    EXPECT_FALSE(overlaps_itself(fake(0, DType::fp32, {2, 3}, {3, 2})));  // {0,2,4} and {3,5,7}: distinct, interleaved
}

TEST(Overlap, empty_and_absent_views_share_nothing) {
    const TensorView empty = fake(0, DType::fp32, {0, 4}, {4, 1});
    const TensorView full = fake(0, DType::fp32, {4, 4}, {4, 1});
    EXPECT_FALSE(may_overlap(empty, full) || may_overlap(full, empty) || overlaps_itself(empty));
    TensorView switched_off = full;
    switched_off.rank = 0;  // not given, whatever address is left in it
    EXPECT_FALSE(may_overlap(full, switched_off) || may_overlap(switched_off, full));
}

TEST(Overlap, large_views_are_quick) {
    // Millions of elements: the answer comes from strides, not from a walk.
    constexpr std::int64_t kLen = 1 << 20;
    const TensorView a = fake(0, DType::bf16, {64, kLen, 32, 128}, {kLen * 3 * 4096, 3 * 4096, 128, 1});
    const TensorView b = fake(4096, DType::bf16, {64, kLen, 32, 128}, {kLen * 3 * 4096, 3 * 4096, 128, 1});
    EXPECT_FALSE(may_overlap(a, b) || overlaps_itself(a));
    // The first two indices of one element are kLen and kLen - 1 steps apart.
    EXPECT_FALSE(overlaps_itself(fake(0, DType::fp32, {kLen, kLen - 1}, {kLen - 1, kLen})));
    EXPECT_TRUE(overlaps_itself(fake(0, DType::fp32, {kLen + 1, kLen}, {kLen - 1, kLen})));
}

}  // namespace
}  // namespace tessera::overlap_test
