// SPDX-License-Identifier: Apache-2.0
//
// append(): where new rows go in a cache, the rotary embedding and the norm on the way, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "core/tensors.hpp"
#include "kernels/sparse_memory.hpp"
#include "tessera/append.hpp"
#include "tessera/error.hpp"

namespace tessera::append_test {
namespace {

using test::Tensor;

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kDim = 8;
constexpr std::int64_t kDimV = 6;

Tensor numbers(const std::vector<std::int64_t>& values, DType dtype) {
    Tensor t(dtype, {static_cast<std::int64_t>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i) {
        const auto n = static_cast<std::int64_t>(i);
        if (dtype == DType::int64) *t.view().at<std::int64_t>(n) = values[i];
        else *t.view().at<std::int32_t>(n) = static_cast<std::int32_t>(values[i]);
    }
    return t;
}

/// New rows and a cache of which every element is -1.
struct Rows {
    Tensor k, v, k_cache, v_cache;

    Rows(std::initializer_list<std::int64_t> places, std::int64_t rows, DType dtype = DType::bf16)
        : k(dtype, {rows, kHeads, kDim}), v(dtype, {rows, kHeads, kDimV}) {
        const std::vector<std::int64_t> sizes(places);
        k_cache = Tensor(dtype, {sizes[0], sizes[1], kHeads, kDim});
        v_cache = Tensor(dtype, {sizes[0], sizes[1], kHeads, kDimV});
        std::mt19937_64 random(11);
        fill_normal(k, random);
        fill_normal(v, random);
        fill(k_cache, -1);
        fill(v_cache, -1);
    }
    AppendArgs args() const { return {.k = k, .v = v, .k_cache = k_cache, .v_cache = v_cache}; }
};

/// The cache holds row places[n] in its row n (counted over all pages), and nothing new where that is -1.
void expect_cache(const Rows& r, const std::vector<std::int64_t>& places) {
    const std::int64_t page = r.k_cache.view().shape[1];
    for (std::size_t n = 0; n < places.size(); ++n) {
        const auto at = static_cast<std::int64_t>(n);
        for (std::int64_t h = 0; h < kHeads; ++h) {
            for (std::int64_t c = 0; c < kDim; ++c) {
                const double expected = places[n] < 0 ? -1 : r.k.at(places[n], h, c);
                ASSERT_EQ(r.k_cache.at(at / page, at % page, h, c), expected) << "row " << n;
            }
            for (std::int64_t c = 0; c < kDimV; ++c) {
                const double expected = places[n] < 0 ? -1 : r.v.at(places[n], h, c);
                ASSERT_EQ(r.v_cache.at(at / page, at % page, h, c), expected) << "row " << n;
            }
        }
    }
}

TEST(Append, by_slots_in_pages_of_any_size) {
    for (const DType dtype : {DType::int64, DType::int32}) {
        for (const std::int64_t page : {1, 2, 3, 6}) {
            for (const int threads : {1, 0}) {
                Rows r({6 / page, page}, 5);
                AppendArgs args = r.args();
                const Tensor slots = numbers({4, -1, 0, 6, 5}, dtype);  // there is no slot 6
                args.slot_mapping = slots;
                append(args, {.threads = threads});
                expect_cache(r, {2, -1, -1, -1, 0, 4});
            }
        }
    }
}

TEST(Append, at_lengths_in_pages) {
    for (const bool ragged : {false, true}) {
        Rows r({4, 2}, 6);
        AppendArgs args = r.args();
        Tensor table(DType::int32, {3, 2});
        const std::vector<std::int32_t> pages{3, 1, -1, 0, 2, 99};
        std::copy(pages.begin(), pages.end(), table.view().at<std::int32_t>(0));
        // Sequence 0 fills row 1 of page 3 and row 0 of page 1; sequence 1 begins before its first key, and has no page
        // for that; sequence 2 fills the last row of page 2, then has no page.
        const Tensor lengths = numbers({1, -1, 1}, DType::int32), offsets = numbers({0, 2, 4, 6}, DType::int64);
        args.kv_lengths = lengths;
        args.page_table = table;
        args.cu_seqlens_k = offsets;
        if (!ragged) {
            args.k = strided_view(args.k.data, args.k.dtype, {3, 2, kHeads, kDim},
                                  {2 * kHeads * kDim, kHeads * kDim, kDim, 1});
            args.v = strided_view(args.v.data, args.v.dtype, {3, 2, kHeads, kDimV},
                                  {2 * kHeads * kDimV, kHeads * kDimV, kDimV, 1});
            args.cu_seqlens_k = {};
        }
        append(args);
        expect_cache(r, {-1, -1, 1, -1, -1, 4, -1, 0});
    }
}

TEST(Append, at_lengths_in_slots) {
    Rows r({2, 3}, 4);
    AppendArgs args = r.args();
    const Tensor lengths = numbers({1, 2}, DType::int32), offsets = numbers({0, 1, 3}, DType::int32);
    args.kv_lengths = lengths;
    args.cu_seqlens_k = offsets;  // the last row belongs to no sequence
    append(args);
    expect_cache(r, {-1, 0, -1, -1, -1, 1});
    const Tensor slots = numbers({1, 0}, DType::int32);
    args.cache_batch_index = slots;
    append(args);
    expect_cache(r, {-1, 0, 1, -1, 0, 1});
}

/// Slots that lie more than 2^31 elements apart: an offset of 32 bits would write to another slot.
TEST(Append, to_slots_that_lie_2_to_the_31_elements_apart_bug_s4) {
    constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 2 * kHeads * kDim, kRows = 4;
    constexpr std::int64_t kElements = 2 * kStride + 2 * kRows * kHeads * kDim;
    const check::SparseMemory memory(static_cast<std::size_t>(kElements * size_of(DType::bf16)));
    if (memory.data() == nullptr) GTEST_SKIP() << "no address space for " << kElements << " elements";
    Rows r({1, kRows}, 2);
    AppendArgs args = r.args();
    const auto view = [&](std::int64_t from, std::int64_t dim) {
        return strided_view(static_cast<std::byte*>(memory.data()) + from * size_of(DType::bf16), DType::bf16,
                            {3, kRows, kHeads, dim}, {kStride, 2 * kHeads * kDim, 2 * kDim, 1});
    };
    args.k_cache = view(0, kDim);
    args.v_cache = view(kDim, kDimV);
    const Tensor lengths = numbers({3, 1}, DType::int32), slots = numbers({2, 1}, DType::int32),
                 offsets = numbers({0, 1, 2}, DType::int32);
    args.kv_lengths = lengths;
    args.cache_batch_index = slots;
    args.cu_seqlens_k = offsets;
    append(args);
    for (std::int64_t slot = 0; slot < 3; ++slot) {
        for (std::int64_t row = 0; row < kRows; ++row) {
            const std::int64_t from = slot == 2 && row == 3 ? 0 : slot == 1 && row == 1 ? 1 : -1;
            for (std::int64_t h = 0; h < kHeads; ++h) {
                for (std::int64_t c = 0; c < kDim; ++c) {
                    const double got = load_as_double(args.k_cache.at<Bf16>(slot, row, h, c), DType::bf16);
                    ASSERT_EQ(got, from < 0 ? 0 : r.k.at(from, h, c)) << "slot " << slot << ", row " << row;
                }
                const double got = load_as_double(args.v_cache.at<Bf16>(slot, row, h, 5), DType::bf16);
                ASSERT_EQ(got, from < 0 ? 0 : r.v.at(from, h, 5)) << "slot " << slot << ", row " << row;
            }
        }
    }
}

/// K and V side by side in the last dimension, and in turns: page p of V is page p + 1 of K's memory.
TEST(Append, k_and_v_in_one_memory) {
    for (const bool side_by_side : {true, false}) {
        Rows r({3, 2}, 3, DType::fp32);
        Tensor both(DType::fp32, {3 * 2 * 2 * kHeads * kDim});
        fill(both, -1);
        const std::int64_t wide = side_by_side ? 2 * kDim : kDim;
        const auto view = [&](std::int64_t first, std::int64_t dim) {
            return strided_view(both.view().at<float>(first), DType::fp32, {3, 2, kHeads, dim},
                                {2 * 2 * kHeads * kDim, kHeads * wide, wide, 1});
        };
        AppendArgs args = r.args();
        args.k_cache = view(0, kDim);
        args.v_cache = view(side_by_side ? kDim : 2 * kHeads * kDim, kDimV);
        const Tensor slots = numbers({5, 0, -1}, DType::int64);
        args.slot_mapping = slots;
        append(args);
        for (std::int64_t h = 0; h < kHeads; ++h) {
            EXPECT_EQ(*args.k_cache.at<float>(2, 1, h, 3), r.k.at(0, h, 3));
            EXPECT_EQ(*args.v_cache.at<float>(2, 1, h, 3), r.v.at(0, h, 3));
            EXPECT_EQ(*args.k_cache.at<float>(0, 0, h, 7), r.k.at(1, h, 7));
            EXPECT_EQ(*args.v_cache.at<float>(1, 0, h, 3), -1);
        }
    }
}

/// The rotary embedding by its definition, on one row.
std::vector<double> turned(const std::vector<double>& x, std::int64_t pairs, bool interleaved, double position) {
    std::vector<double> y = x;
    for (std::int64_t n = 0; n < pairs; ++n) {
        const auto a = static_cast<std::size_t>(interleaved ? 2 * n : n);
        const std::size_t b = interleaved ? a + 1 : a + static_cast<std::size_t>(pairs);
        const double angle = position * std::pow(100.0, -static_cast<double>(n) / static_cast<double>(pairs));
        y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
        y[b] = x[a] * std::sin(angle) + x[b] * std::cos(angle);
    }
    return y;
}

struct Rotary {
    Tensor cos, sin;
    Rotary(std::int64_t positions, std::int64_t pairs)
        : cos(DType::fp32, {positions, pairs}), sin(DType::fp32, {positions, pairs}) {
        for (std::int64_t p = 0; p < positions; ++p) {
            for (std::int64_t n = 0; n < pairs; ++n) {
                const double angle =
                    static_cast<double>(p) * std::pow(100.0, -static_cast<double>(n) / static_cast<double>(pairs));
                cos.set(std::cos(angle), p, n);
                sin.set(std::sin(angle), p, n);
            }
        }
    }
};

double rounding_of(DType dtype) { return dtype == DType::fp32 ? 1e-6 : dtype == DType::fp16 ? 1e-3 : 8e-3; }

TEST(Append, with_rotary_and_norm) {
    for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
        for (const std::int64_t pairs : {kDim / 2, kDim / 4}) {
            for (const bool interleaved : {false, true}) {
                for (const bool norm : {false, true}) {
                    Rows r({2, 4}, 2, dtype);
                    Tensor q(dtype, {2, 3 * kHeads, kDim}), weights(DType::fp32, {kDim});
                    std::mt19937_64 random(5);
                    fill_normal(q, random);
                    fill_normal(weights, random);
                    const Tensor before = q;
                    const Rotary rotary(9, pairs);
                    const Tensor slots = numbers({3, 6}, DType::int64), positions = numbers({8, 2}, DType::int64);
                    AppendArgs args = r.args();
                    args.slot_mapping = slots;
                    args.rotary_cos = rotary.cos;
                    args.rotary_sin = rotary.sin;
                    args.positions = positions;
                    args.q = args.q_out = q;  // in place
                    if (norm) args.k_norm = args.q_norm = weights;
                    append(args, {.rotary_interleaved = interleaved, .norm_eps = 1e-3});
                    const auto expected = [&](const Tensor& from, std::int64_t row, std::int64_t h, double position) {
                        std::vector<double> x;
                        double squares = 0;
                        for (std::int64_t c = 0; c < kDim; ++c) {
                            x.push_back(from.at(row, h, c));
                            squares += x.back() * x.back() / kDim;
                        }
                        for (std::int64_t c = 0; norm && c < kDim; ++c)
                            x[static_cast<std::size_t>(c)] *= weights.at(c) / std::sqrt(squares + 1e-3);
                        return turned(x, pairs, interleaved, position);
                    };
                    for (std::int64_t row = 0; row < 2; ++row) {
                        const std::int64_t slot = row == 0 ? 3 : 6;
                        const double position = row == 0 ? 8 : 2;
                        for (std::int64_t c = 0; c < kDim; ++c) {
                            const auto n = static_cast<std::size_t>(c);
                            const double k = expected(r.k, row, 1, position)[n];
                            ASSERT_NEAR(r.k_cache.at(slot / 4, slot % 4, 1, c), k,
                                        rounding_of(dtype) * (1 + std::abs(k)));
                            const double turned_q = expected(before, row, 4, position)[n];
                            ASSERT_NEAR(q.at(row, 4, c), turned_q, rounding_of(dtype) * (1 + std::abs(turned_q)));
                        }
                        ASSERT_EQ(r.v_cache.at(slot / 4, slot % 4, 1, 2), r.v.at(row, 1, 2));
                    }
                }
            }
        }
    }
}

/// Which argument the error names; "" when the call runs.
std::string refused(const AppendArgs& args, const AppendOptions& options = {}) {
    try {
        append(args, options);
    } catch (const Error& e) {
        return e.argument();
    }
    return "";
}

TEST(Append, an_error_names_the_argument_and_nothing_is_written) {
    Rows r({2, 4}, 2);
    const Tensor slots = numbers({3, 6}, DType::int64), lengths = numbers({1, 2}, DType::int32),
                 late = numbers({8, 9}, DType::int64), three = numbers({1, 2, 3}, DType::int64),
                 table(DType::int32, {2, 2}), wide(DType::fp32, {9, kDim}), no_positions(DType::fp32, {0, kDim / 2}),
                 short_v(DType::bf16, {2, kHeads, 3}), fewer_pages(DType::bf16, {1, 4, kHeads, kDimV}),
                 floats(DType::fp32, {2, kHeads, kDim});
    const Rotary rotary(9, kDim / 2);
    AppendArgs good = r.args();
    good.slot_mapping = slots;
    const struct {
        const char* argument;
        std::function<void(AppendArgs&)> change;
    } wrong[] = {
        {"k", [](AppendArgs& a) { a.k = {}; }},
        {"k", [&](AppendArgs& a) { a.k = lengths; }},
        {"v", [&](AppendArgs& a) { a.v = {}; }},
        {"v", [&](AppendArgs& a) { a.v = floats; }},
        {"v_cache", [&](AppendArgs& a) { a.v = short_v; }},
        {"k_cache", [](AppendArgs& a) { a.k_cache = {}; }},
        {"k_cache", [&](AppendArgs& a) { a.k_cache = a.v_cache; }},
        {"v_cache", [&](AppendArgs& a) { a.v_cache = fewer_pages; }},
        {"kv_lengths", [](AppendArgs& a) { a.slot_mapping = {}; }},
        {"slot_mapping", [&](AppendArgs& a) { a.kv_lengths = lengths; }},
        {"slot_mapping", [&](AppendArgs& a) { a.slot_mapping = three; }},
        {"slot_mapping", [&](AppendArgs& a) { a.slot_mapping = floats; }},
        {"page_table", [&](AppendArgs& a) { a.page_table = table; }},
        {"cu_seqlens_k",
         [&](AppendArgs& a) {
             a.slot_mapping = {};
             a.kv_lengths = lengths;
         }},
        {"cu_seqlens_k",
         [&](AppendArgs& a) {
             a.slot_mapping = {};
             a.kv_lengths = lengths;
             a.cu_seqlens_k = three;  // does not begin at 0
         }},
        {"rotary_sin",
         [&](AppendArgs& a) {
             a.rotary_cos = rotary.cos;
             a.positions = slots;
         }},
        {"positions",
         [&](AppendArgs& a) {
             a.rotary_cos = rotary.cos;
             a.rotary_sin = rotary.sin;
         }},
        {"positions",
         [&](AppendArgs& a) {
             a.rotary_cos = rotary.cos;
             a.rotary_sin = rotary.sin;
             a.positions = late;  // 9 is past the table
         }},
        {"rotary_cos",
         [&](AppendArgs& a) {
             a.rotary_cos = a.rotary_sin = wide;
             a.positions = slots;
         }},
        {"rotary_cos",
         [&](AppendArgs& a) {
             a.rotary_cos = a.rotary_sin = no_positions;
             a.positions = slots;
         }},
        {"q_out", [&](AppendArgs& a) { a.q = a.k; }},
        {"q_norm", [&](AppendArgs& a) { a.q_norm = three; }},
        {"k_norm", [&](AppendArgs& a) { a.k_norm = three; }},
        {"k_cache",
         [](AppendArgs& a) {
             a.k = strided_view(a.k_cache.data, a.k.dtype, {2, kHeads, kDim}, {16, 8, 1});
         }},
        {"k_cache", [](AppendArgs& a) { a.k_cache.strides[1] = 0; }},
        {"v",
         [](AppendArgs& a) {
             a.v.device = {DeviceType::cuda, 0};
         }},
    };
    for (const auto& [argument, change] : wrong) {
        AppendArgs args = good;
        change(args);
        EXPECT_EQ(refused(args), argument);
    }
    EXPECT_EQ(refused(good, {.norm_eps = -1}), "norm_eps");
    EXPECT_EQ(refused(good, {.threads = -1}), "threads");
    expect_cache(r, {-1, -1, -1, -1, -1, -1, -1, -1});
    EXPECT_EQ(refused(good), "");
    expect_cache(r, {-1, -1, -1, 0, -1, -1, 1, -1});
}

TEST(Append, nothing_to_append_is_no_error) {
    Rows r({0, 4}, 0);
    AppendArgs args = r.args();
    const Tensor slots(DType::int64, {0});
    args.slot_mapping = slots;
    EXPECT_EQ(refused(args), "");
}

}  // namespace
}  // namespace tessera::append_test
