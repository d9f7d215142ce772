// SPDX-License-Identifier: Apache-2.0
//
// A pool of keys and values of more than 2^31 elements on each of its halves: reads through pages and slots on both
// sides of that offset, and new rows in them. The pool exists on the device only (large.cuh).
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "cuda/large.cuh"
#include "tessera/append.hpp"

namespace tessera::cuda::test {
namespace {

/// Counts the elements that are not those of fill_kernel().
__global__ void count_changed(const __nv_bfloat16* data, std::size_t count, std::uint64_t which,
                              unsigned long long* found) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    unsigned long long mine = 0;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        mine += static_cast<float>(data[i]) != element(i, which);
    }
    if (mine > 0) atomicAdd(found, mine);
}

/// Pages of 16 rows of 8 heads, K and V of a row side by side. 65,536 pages have 2^31 elements.
class LargePool : public OnDevice {
 protected:
    using Bf16 = __nv_bfloat16;
    static constexpr std::int64_t kPageSize = 16, kHeads = 8, kQueryHeads = 32, kDim = 128;
    static constexpr std::int64_t kRow = kHeads * 2 * kDim, kPage = kPageSize * kRow;
    static constexpr std::int64_t kFar = kPast31Bits / kPage;  ///< the first page past 2^31 elements
    static constexpr std::int64_t kPages = kFar + 300;
    static constexpr std::int64_t kSlotRows = 1000, kSlotStride = kPast31Bits / 4 + 64, kSlots = 5;
    static constexpr std::size_t kBytes = static_cast<std::size_t>(kPages * kPage) * sizeof(Bf16);
    static constexpr std::uint64_t kOfPool = 2;
    static_assert((kSlots - 1) * kSlotStride + kSlotRows * kRow <= kPages * kPage);

    void SetUp() override {
        OnDevice::SetUp();
        if (IsSkipped()) return;
        std::size_t free = 0, total = 0;
        ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
        constexpr std::size_t kOther = std::size_t{1} << 30;
        if (free < kBytes + kOther) GTEST_SKIP() << "needs " << kBytes + kOther << " bytes of memory, has " << free;
        pool_ = std::make_unique<Memory>(kBytes);
        ASSERT_NE(pool_->data(), nullptr);
        fill<Bf16>(*pool_, kOfPool);
    }

    /// K (0) or V (1) of the pool as pages or as slots.
    TensorView view(int which, bool pages) const {
        auto* first = static_cast<Bf16*>(pool_->data()) + which * kDim;
        if (pages)
            return strided_view(first, DType::bf16, {kPages, kPageSize, kHeads, kDim}, {kPage, kRow, 2 * kDim, 1},
                                kDevice);
        return strided_view(first, DType::bf16, {kSlots, kSlotRows, kHeads, kDim}, {kSlotStride, kRow, 2 * kDim, 1},
                            kDevice);
    }

    std::size_t changed() const {
        const Mirror<unsigned long long> found(1);
        count_changed<<<4096, 256>>>(static_cast<const Bf16*>(pool_->data()), kBytes / sizeof(Bf16), kOfPool,
                                     found.device());
        unsigned long long count = 0;
        const cudaError_t status = cudaMemcpy(&count, found.device(), sizeof(count), cudaMemcpyDeviceToHost);
        EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
        return count;
    }

    std::unique_ptr<Memory> pool_;
};

/// A call of `queries` queries for each sequence. Key j of sequence b begins at element first_of(b, j) of the pool.
template <class FirstOf>
void expect_rows_right(const Problem& p, ForwardArgs args, const std::vector<std::int32_t>& lengths,
                       const FirstOf& first_of) {
    using Bf16 = __nv_bfloat16;
    const std::int64_t rows = p.batch * p.len_q;
    const Memory q(bytes_of(rows, p.heads_q, p.head_dim * 2)), o(bytes_of(rows, p.heads_q, p.head_dim * 2));
    const Memory lse(bytes_of(rows, p.heads_q, 4));
    fill<Bf16>(q, 1);
    const Mirror<std::int32_t> lengths_on_device(lengths);
    args.kv_lengths = dense_view(lengths_on_device.device(), DType::int32, {p.batch}, kDevice);
    args.q = large_view(p, q, true, p.head_dim, p.dtype);
    args.o = large_view(p, o, true, p.head_dim, p.dtype);
    args.lse = large_lse_view(p, lse);
    int ran = 0;
    for (const Plan& how : plans_without_scores(p)) {
        SCOPED_TRACE(how.kernel->name);
        const Memory workspace(std::max<std::size_t>(how.workspace_bytes, 1));
        cudaMemset(workspace.data(), 0xFF, workspace.bytes());
        cudaMemset(o.data(), 0xFF, o.bytes());
        forward(how, args, {static_cast<std::byte*>(workspace.data()), how.workspace_bytes});
        ++ran;
        std::vector<Bf16> got(static_cast<std::size_t>(rows * p.heads_q * p.head_dim));
        std::vector<float> got_lse(static_cast<std::size_t>(rows * p.heads_q));
        cudaMemcpy(got.data(), o.data(), o.bytes(), cudaMemcpyDeviceToHost);
        const cudaError_t status = cudaMemcpy(got_lse.data(), lse.data(), lse.bytes(), cudaMemcpyDeviceToHost);
        ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
        for (std::int64_t b = 0; b < p.batch; ++b) {
            for (const std::int64_t head : {std::int64_t{0}, p.heads_q - 1}) {
                const std::int64_t i = p.len_q - 1, kv_head = head / p.group();
                const auto row = static_cast<std::size_t>(((b * p.len_q + i) * p.heads_q + head) * p.head_dim);
                double sum = 0;
                std::vector<double> sums(static_cast<std::size_t>(p.head_dim));
                for (std::int64_t j = 0; j < lengths[static_cast<std::size_t>(b)]; ++j) {  // the last query sees all
                    const auto key = static_cast<std::uint64_t>(first_of(b, j) + kv_head * 2 * p.head_dim);
                    const auto value = key + static_cast<std::uint64_t>(p.head_dim);
                    double score = 0;
                    for (std::size_t d = 0; d < sums.size(); ++d)
                        score += static_cast<double>(element(row + d, 1)) * static_cast<double>(element(key + d, 2));
                    const double weight = std::exp(score * p.effective_scale());  // scores are small
                    sum += weight;
                    for (std::size_t d = 0; d < sums.size(); ++d)
                        sums[d] += weight * static_cast<double>(element(value + d, 2));
                }
                const auto at = static_cast<std::size_t>((b * p.heads_q + head) * p.len_q + i);
                EXPECT_NEAR(got_lse[at], std::log(sum), 1e-5) << "sequence " << b << ", head " << head;
                for (std::size_t d = 0; d < sums.size(); ++d) {
                    ASSERT_NEAR(as_double(got[row + d]), sums[d] / sum, 1e-2)
                        << "sequence " << b << ", head " << head << ", column " << d;
                }
            }
        }
    }
    EXPECT_GT(ran, 0);
}

Problem of_pool(std::int64_t batch, std::int64_t queries, std::int64_t capacity, std::int64_t heads_q,
                std::int64_t heads_kv, std::int64_t dim) {
    Problem p = check::make_problem(batch, queries, capacity, heads_q, heads_kv, dim, DType::bf16);
    p.kv_lengths = true;
    p.mask.causal = Causal::bottom_right;
    return p;
}

/// A sequence in the last pages, one in the first, one on both sides of 2^31 elements in turns.
TEST_F(LargePool, pages_past_2_to_the_31_elements) {
    constexpr std::int64_t kWidth = 64;
    Problem p = of_pool(3, 2, kWidth * kPageSize, kQueryHeads, kHeads, kDim);
    p.page_size = kPageSize;
    std::vector<std::int32_t> table;
    for (std::int64_t b = 0; b < 3; ++b) {
        for (std::int64_t n = 0; n < kWidth; ++n) {
            const std::int64_t page = b == 0 ? kPages - 1 - n : b == 1 ? n : n % 2 == 0 ? kFar + 100 + n : kFar - n;
            table.push_back(static_cast<std::int32_t>(page));
        }
    }
    const Mirror<std::int32_t> on_device(table);
    ForwardArgs args;
    args.k = view(0, true);
    args.v = view(1, true);
    args.page_table = dense_view(on_device.device(), DType::int32, {3, kWidth}, kDevice);
    expect_rows_right(p, args, {1000, 700, 1024}, [&](std::int64_t b, std::int64_t j) {
        return table[static_cast<std::size_t>(b * kWidth + j / kPageSize)] * kPage + j % kPageSize * kRow;
    });
}

TEST_F(LargePool, slots_past_2_to_the_31_elements) {
    Problem p = of_pool(3, 1, kSlotRows, kQueryHeads, kHeads, kDim);
    p.cache_batch_index = true;
    const std::vector<std::int32_t> slots{4, 0, 3};
    const Mirror<std::int32_t> on_device(slots);
    ForwardArgs args;
    args.k = view(0, false);
    args.v = view(1, false);
    args.cache_batch_index = dense_view(on_device.device(), DType::int32, {3}, kDevice);
    expect_rows_right(p, args, {1000, 513, 40}, [&](std::int64_t b, std::int64_t j) {
        return slots[static_cast<std::size_t>(b)] * kSlotStride + j * kRow;
    });
}

/// New rows change their own places and no other, by a batch index, and by slot numbers of the pages.
TEST_F(LargePool, new_rows_past_2_to_the_31_elements_bug_s4) {
    constexpr std::int64_t kNew = 2;
    constexpr auto kElements = static_cast<std::size_t>(kNew * kHeads * kDim);
    const Memory k(kElements * sizeof(Bf16)), v(kElements * sizeof(Bf16));
    fill<Bf16>(k, 8);
    fill<Bf16>(v, 9);
    ASSERT_EQ(changed(), 0U);
    using Integers = std::vector<std::int32_t>;
    const Mirror<std::int32_t> lengths(Integers{999, 7}), slots(Integers{4, 1}), offsets(Integers{0, 1, 2});
    const std::int64_t far_row = (kPages - 1) * kPageSize + 3;
    const Mirror<std::int64_t> rows(std::vector<std::int64_t>{far_row, 5});
    for (const bool pages : {false, true}) {
        SCOPED_TRACE(pages ? "by slots in pages" : "at lengths in slots");
        AppendArgs args{.k = dense_view(k.data(), DType::bf16, {kNew, kHeads, kDim}, kDevice),
                        .v = dense_view(v.data(), DType::bf16, {kNew, kHeads, kDim}, kDevice),
                        .k_cache = view(0, pages),
                        .v_cache = view(1, pages)};
        if (pages) {
            args.slot_mapping = dense_view(rows.device(), DType::int64, {kNew}, kDevice);
        } else {
            args.kv_lengths = dense_view(lengths.device(), DType::int32, {kNew}, kDevice);
            args.cache_batch_index = dense_view(slots.device(), DType::int32, {kNew}, kDevice);
            args.cu_seqlens_k = dense_view(offsets.device(), DType::int32, {kNew + 1}, kDevice);
        }
        append(args);
        const std::array<std::int64_t, 2> firsts{pages ? far_row * kRow : 4 * kSlotStride + 999 * kRow,
                                                 pages ? 5 * kRow : kSlotStride + 7 * kRow};
        std::vector<Bf16> got(static_cast<std::size_t>(kRow)), old(got.size());
        for (std::size_t i = 0; i < firsts.size(); ++i) {
            Bf16* const place = static_cast<Bf16*>(pool_->data()) + firsts[i];
            const cudaError_t status = cudaMemcpy(got.data(), place, got.size() * sizeof(Bf16), cudaMemcpyDeviceToHost);
            ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
            for (std::size_t c = 0; c < got.size(); ++c) {
                const std::size_t head = c / (2 * kDim), column = c % (2 * kDim);
                const std::size_t from = (i * kHeads + head) * kDim + column % kDim;
                ASSERT_EQ(as_double(got[c]), static_cast<double>(element(from, column < kDim ? 8 : 9)))
                    << "row " << i << ", column " << c;
                old[c] = static_cast<Bf16>(element(static_cast<std::uint64_t>(firsts[i]) + c, kOfPool));
            }
            cudaMemcpy(place, old.data(), old.size() * sizeof(Bf16), cudaMemcpyHostToDevice);
        }
        EXPECT_EQ(changed(), 0U) << "elements elsewhere were written";
    }
}

}  // namespace
}  // namespace tessera::cuda::test
