// SPDX-License-Identifier: Apache-2.0
//
// Tensors of more than 2^31 elements: long ones, many small ones, ragged ones. They exist on the device only; every
// element is a function of its index, so that the rows that are checked can be computed anywhere.
#include <cmath>

#include "cuda/large.cuh"

namespace tessera::cuda::test {
namespace {

/// One query of one head, checked against fp64. Rows count over all sequences.
struct Row {
    std::int64_t query;               // row of q
    std::int64_t first_key, key_end;  // rows of k and v that it sees
    std::int64_t head;
    std::int64_t lse;  // index of its LSE
};

/// A Problem whose tensors are [rows][heads][dim] in memory, dense or ragged.
class LargeCall {
 public:
    explicit LargeCall(const Problem& problem) : problem_(problem) {
        fill<Bf16>(q_, 1);
        fill<Bf16>(k_, 2);
        fill<Bf16>(v_, 3);
    }

    ForwardArgs args(const TensorView& cu_seqlens = {}) const {
        const Problem& p = problem_;
        return {.q = large_view(p, q_, true, p.head_dim, p.dtype),
                .k = large_view(p, k_, false, p.head_dim, p.dtype),
                .v = large_view(p, v_, false, p.head_dim_v, p.dtype),
                .cu_seqlens_q = cu_seqlens,
                .cu_seqlens_kv = cu_seqlens,
                .o = large_view(p, o_, true, p.head_dim_v, p.dtype),
                .lse = large_lse_view(p, lse_)};
    }

    /// Runs every kernel that needs little workspace: all of O is written, and these rows are right.
    void expect_right(const std::vector<Row>& rows, const TensorView& cu_seqlens = {}) {
        ASSERT_GT(problem_.rows_q() * problem_.heads_q * problem_.head_dim, kPast31Bits);
        int ran = 0;
        for (const Plan& how : plans_without_scores(problem_)) {
            if (how.workspace_bytes > std::size_t{16} << 30) continue;
            SCOPED_TRACE(how.kernel->name);
            const Memory workspace(std::max<std::size_t>(how.workspace_bytes, 1));
            cudaMemset(o_.data(), 0xFF, o_.bytes());
            cudaMemset(lse_.data(), 0xFF, lse_.bytes());
            forward(how, args(cu_seqlens), {static_cast<std::byte*>(workspace.data()), how.workspace_bytes});
            expect_written<Bf16>(o_);
            for (const Row& row : rows) expect_row_right(row);
            ++ran;
        }
        EXPECT_GT(ran, 0);
    }

 private:
    using Bf16 = __nv_bfloat16;

    void expect_row_right(const Row& row) const {
        const Problem& p = problem_;
        const std::int64_t kv_head = row.head / p.group();
        const auto at = [](std::int64_t r, std::int64_t heads, std::int64_t head, std::int64_t dim) {
            return static_cast<std::uint64_t>((r * heads + head) * dim);
        };
        const std::uint64_t q = at(row.query, p.heads_q, row.head, p.head_dim);
        double sum = 0;
        std::vector<double> o(static_cast<std::size_t>(p.head_dim_v));
        for (std::int64_t j = row.first_key; j < row.key_end; ++j) {
            const std::uint64_t k = at(j, p.heads_kv, kv_head, p.head_dim);
            const std::uint64_t v = at(j, p.heads_kv, kv_head, p.head_dim_v);
            double score = 0;
            for (std::uint64_t d = 0; d < static_cast<std::uint64_t>(p.head_dim); ++d) {
                score += static_cast<double>(element(q + d, 1)) * static_cast<double>(element(k + d, 2));
            }
            const double weight = std::exp(score * p.effective_scale());  // scores are small
            sum += weight;
            for (std::size_t d = 0; d < o.size(); ++d) o[d] += weight * static_cast<double>(element(v + d, 3));
        }
        std::vector<Bf16> got(o.size());
        float lse = 0;
        cudaMemcpy(got.data(), static_cast<Bf16*>(o_.data()) + at(row.query, p.heads_q, row.head, p.head_dim_v),
                   o.size() * sizeof(Bf16), cudaMemcpyDeviceToHost);
        cudaMemcpy(&lse, static_cast<float*>(lse_.data()) + row.lse, sizeof(lse), cudaMemcpyDeviceToHost);
        EXPECT_NEAR(lse, std::log(sum), 1e-5) << "query " << row.query << " head " << row.head;
        for (std::size_t d = 0; d < o.size(); ++d) {
            ASSERT_NEAR(as_double(got[d]), o[d] / sum, 1e-2) << "query " << row.query << " head " << row.head;
        }
    }

    Problem problem_;
    Memory q_{bytes_of(problem_.rows_q(), problem_.heads_q, problem_.head_dim * 2)};
    Memory k_{bytes_of(problem_.rows_kv(), problem_.heads_kv, problem_.head_dim * 2)};
    Memory v_{bytes_of(problem_.rows_kv(), problem_.heads_kv, problem_.head_dim_v * 2)};
    Memory o_{bytes_of(problem_.rows_q(), problem_.heads_q, problem_.head_dim_v * 2)};
    Memory lse_{bytes_of(problem_.rows_q(), problem_.heads_q, 4)};
};

class Large : public OnDevice {};

TEST_F(Large, rows_past_2_to_the_31_elements) {
    constexpr std::int64_t kLen = (std::int64_t{1} << 20) + 77;
    constexpr std::int64_t kWindow = 200;
    Problem p = check::make_problem(1, kLen, kLen, 16, 16, 128, DType::bf16);
    p.mask = {.causal = Causal::bottom_right, .window_left = kWindow};
    std::vector<Row> rows;
    for (const std::int64_t i : {kLen - 1, kLen - 50, kLen / 2 + 13, std::int64_t{3}}) {
        for (const std::int64_t head : {0, 15}) {
            rows.push_back({i, std::max<std::int64_t>(i - kWindow, 0), i + 1, head, head * kLen + i});
        }
    }
    LargeCall(p).expect_right(rows);
}

TEST_F(Large, sequences_past_2_to_the_31_elements) {
    constexpr std::int64_t kBatch = 70'000, kLen = 62, kHeads = 8;
    const Problem p = check::make_problem(kBatch, kLen, kLen, kHeads, kHeads, 64, DType::bf16);
    std::vector<Row> rows;
    for (const std::int64_t b : {kBatch - 1, std::int64_t{65'536}, std::int64_t{0}}) {
        for (const std::int64_t i : {kLen - 1, std::int64_t{0}}) {
            rows.push_back({b * kLen + i, b * kLen, (b + 1) * kLen, 7, (b * kHeads + 7) * kLen + i});
        }
    }
    LargeCall(p).expect_right(rows);
}

TEST_F(Large, ragged_rows_past_2_to_the_31_elements) {
    // Two short sequences at the ends of a long one, whose window is narrow.
    constexpr std::int64_t kShort = 130, kLong = (std::int64_t{1} << 21) - 77, kTotal = kLong + 2 * kShort;
    constexpr std::int64_t kWindow = 100, kHeads = 9, kKvHeads = 3;
    Problem p =
        check::make_ragged({kShort, kLong, kShort}, {kShort, kLong, kShort}, kHeads, kKvHeads, 128, DType::bf16);
    p.mask = {.window_left = kWindow, .window_right = 0};
    const Mirror<std::int64_t> cu_seqlens({0, kShort, kShort + kLong, kTotal});
    std::vector<Row> rows;
    for (const std::int64_t begin : {std::int64_t{0}, kShort, kShort + kLong}) {
        const std::int64_t i = begin + 110;
        rows.push_back({i, i - kWindow, i + 1, 8, 8 * kTotal + i});
        rows.push_back({begin + 5, begin, begin + 6, 4, 4 * kTotal + begin + 5});
    }
    LargeCall(p).expect_right(rows, dense_view(cu_seqlens.device(), DType::int64, {4}, kDevice));
}

}  // namespace
}  // namespace tessera::cuda::test
