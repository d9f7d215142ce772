// SPDX-License-Identifier: Apache-2.0
//
// Gradients of tensors of more than 2^31 elements (large.cuh), by every kernel whose workspace fits beside them. All
// elements are written, and some rows are checked.
#include <cmath>

#include "cuda/large.cuh"

namespace tessera::cuda::test {
namespace {

/// One sequence, with as many rows of k as of q. A query sees the keys from `left` before it to `right` after it.
struct LargeSequence {
    std::int64_t begin, end, left, right;

    std::int64_t first_key(std::int64_t query) const { return std::max(begin, query - left); }
    std::int64_t key_end(std::int64_t query) const { return std::min(end, query + right + 1); }
    std::int64_t first_query(std::int64_t key) const { return std::max(begin, key - right); }
    std::int64_t query_end(std::int64_t key) const { return std::min(end, key + left + 1); }
};

/// A row of q and dq, or of k, v, dk and dv; `head` is a query head.
struct LargeRow {
    std::int64_t row, head;
    LargeSequence sequence;
};

template <class T>
class LargeGradients {
 public:
    explicit LargeGradients(const Problem& problem) : problem_(problem) {
        const Memory* const filled[] = {&q_, &k_, &v_, &d_o_};
        for (std::uint64_t i = 0; i < 4; ++i) fill<T>(*filled[i], i + 1);
    }

    void expect_right(const std::vector<LargeRow>& rows, const TensorView& cu_seqlens = {}) {
        ASSERT_GT(problem_.rows_q() * problem_.heads_q * problem_.head_dim, kPast31Bits);
        const BackwardArgs args = arguments(cu_seqlens);
        ASSERT_NO_FATAL_FAILURE(run_forward(args));
        int ran = 0;
        for (const Plan& how : plans_without_scores(problem_, Pass::backward)) {
            std::size_t free = 0;
            std::size_t total = 0;
            cudaMemGetInfo(&free, &total);
            if (how.workspace_bytes + (std::size_t{1} << 30) > free) continue;
            SCOPED_TRACE(how.kernel->name);
            const Memory workspace(std::max<std::size_t>(how.workspace_bytes, 1));
            for (const Memory* out : {&dq_, &dk_, &dv_}) cudaMemset(out->data(), 0xFF, out->bytes());
            BackwardArgs own = args;
            if (!how.o_residual) own.o_residual = {};
            backward(how, own, {static_cast<std::byte*>(workspace.data()), how.workspace_bytes});
            for (const Memory* out : {&dq_, &dk_, &dv_}) expect_written<T>(*out);
            for (const LargeRow& row : rows) expect_row_right(row);
            ++ran;
        }
        EXPECT_GT(ran, 1);
    }

 private:
    static constexpr std::size_t kSize = sizeof(T);
    using Numbers = std::vector<double>;

    static T* of(const Memory& memory) { return static_cast<T*>(memory.data()); }
    std::int64_t row_bytes() const { return problem_.head_dim * static_cast<std::int64_t>(kSize); }

    BackwardArgs arguments(const TensorView& cu_seqlens) const {
        const Problem& p = problem_;
        const auto view = [&](const Memory& memory, bool of_queries, DType dtype) {
            return large_view(p, memory, of_queries, p.head_dim, dtype);
        };
        return {.q = view(q_, true, p.dtype),
                .k = view(k_, false, p.dtype),
                .v = view(v_, false, p.dtype),
                .cu_seqlens_q = cu_seqlens,
                .cu_seqlens_kv = cu_seqlens,
                .o = view(o_, true, p.dtype),
                .lse = large_lse_view(p, lse_),
                .d_o = view(d_o_, true, p.dtype),
                .dq = view(dq_, true, p.dtype),
                .dk = view(dk_, false, p.dtype),
                .dv = view(dv_, false, p.dtype),
                .o_residual = view(rest_, true, DType::int8)};
    }

    /// Runs the first forward that keeps the residual of O. large_stress.cu checks these kernels.
    void run_forward(const BackwardArgs& args) const {
        for (const Plan& how : plans_without_scores(problem_)) {
            if (!how.o_residual) continue;
            const Memory workspace(std::max<std::size_t>(how.workspace_bytes, 1));
            forward(how,
                    {.q = args.q,
                     .k = args.k,
                     .v = args.v,
                     .cu_seqlens_q = args.cu_seqlens_q,
                     .cu_seqlens_kv = args.cu_seqlens_kv,
                     .o = args.o,
                     .lse = args.lse,
                     .o_residual = args.o_residual},
                    {static_cast<std::byte*>(workspace.data()), how.workspace_bytes});
            return;
        }
        FAIL() << "no forward keeps the residual of O";
    }

    /// Row `row` of `which`: q, k, v, dO are 1 to 4.
    Numbers numbers(std::uint64_t which, std::int64_t row, std::int64_t head) const {
        const bool of_queries = which == 1 || which == 4;
        const std::int64_t heads = of_queries ? problem_.heads_q : problem_.heads_kv;
        const auto first = static_cast<std::uint64_t>((row * heads + (of_queries ? head : head / problem_.group())) *
                                                      problem_.head_dim);
        Numbers out(static_cast<std::size_t>(problem_.head_dim));
        for (std::size_t d = 0; d < out.size(); ++d) out[d] = static_cast<double>(element(first + d, which));
        return out;
    }
    static double dot(const Numbers& a, const Numbers& b) {
        double sum = 0;
        for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
        return sum;
    }
    static void add(Numbers& sum, double factor, const Numbers& x) {
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += factor * x[d];
    }

    /// P and dS of a query against the keys that it sees.
    struct Weights {
        Numbers p, ds;
    };
    Weights weights(std::int64_t query, std::int64_t head, const LargeSequence& sequence) const {
        const Numbers q = numbers(1, query, head);
        const Numbers d_o = numbers(4, query, head);
        Weights out;
        double sum = 0;
        double products = 0;
        for (std::int64_t j = sequence.first_key(query); j < sequence.key_end(query); ++j) {
            out.p.push_back(std::exp(dot(q, numbers(2, j, head)) * problem_.effective_scale()));  // scores are small
            out.ds.push_back(dot(d_o, numbers(3, j, head)));
            sum += out.p.back();
            products += out.p.back() * out.ds.back();
        }
        for (std::size_t i = 0; i < out.p.size(); ++i) {
            out.p[i] /= sum;
            out.ds[i] = out.p[i] * (out.ds[i] - products / sum);
        }
        return out;
    }

    void expect_row_right(const LargeRow& row) const {
        const Problem& p = problem_;
        const auto zeros = Numbers(static_cast<std::size_t>(p.head_dim));
        Numbers dq = zeros;
        const Weights own = weights(row.row, row.head, row.sequence);
        const std::int64_t first_key = row.sequence.first_key(row.row);
        for (std::int64_t j = first_key; j < row.sequence.key_end(row.row); ++j) {
            add(dq, own.ds[static_cast<std::size_t>(j - first_key)] * p.effective_scale(), numbers(2, j, row.head));
        }
        expect_near("dQ", dq_, row, p.heads_q, row.head, dq);
        Numbers dk = zeros;
        Numbers dv = zeros;
        const std::int64_t kv_head = row.head / p.group();
        for (std::int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
            for (std::int64_t i = row.sequence.first_query(row.row); i < row.sequence.query_end(row.row); ++i) {
                const Weights of_query = weights(i, head, row.sequence);
                const auto at = static_cast<std::size_t>(row.row - row.sequence.first_key(i));
                add(dk, of_query.ds[at] * p.effective_scale(), numbers(1, i, head));
                add(dv, of_query.p[at], numbers(4, i, head));
            }
        }
        expect_near("dK", dk_, row, p.heads_kv, kv_head, dk);
        expect_near("dV", dv_, row, p.heads_kv, kv_head, dv);
    }

    /// Expects a row to be right within 1 % of its norm.
    void expect_near(const char* what, const Memory& memory, const LargeRow& row, std::int64_t heads, std::int64_t head,
                     const Numbers& right) const {
        std::vector<T> got(right.size());
        cudaMemcpy(got.data(), of(memory) + (row.row * heads + head) * problem_.head_dim, got.size() * kSize,
                   cudaMemcpyDeviceToHost);
        double error = 0;
        for (std::size_t d = 0; d < right.size(); ++d) error += std::pow(as_double(got[d]) - right[d], 2);
        EXPECT_LT(std::sqrt(error), 0.01 * std::sqrt(dot(right, right)))
            << what << " of row " << row.row << ", head " << row.head;
    }

    Problem problem_;
    Memory q_{bytes_of(problem_.rows_q(), problem_.heads_q, row_bytes())};
    Memory k_{bytes_of(problem_.rows_kv(), problem_.heads_kv, row_bytes())};
    Memory v_{bytes_of(problem_.rows_kv(), problem_.heads_kv, row_bytes())};
    Memory d_o_{q_.bytes()}, o_{q_.bytes()}, rest_{q_.bytes() / kSize}, dq_{q_.bytes()};
    Memory dk_{k_.bytes()}, dv_{v_.bytes()};
    Memory lse_{bytes_of(problem_.rows_q(), problem_.heads_q, 4)};
};

/// Skipped where the device has less memory left than eight tensors and the sums of dQ take.
class LargeBackward : public OnDevice {
 protected:
    void SetUp() override {
        OnDevice::SetUp();
        if (IsSkipped()) return;
        constexpr std::size_t kNeeded = std::size_t{72} << 30;
        std::size_t free = 0;
        std::size_t total = 0;
        cudaMemGetInfo(&free, &total);
        if (free < kNeeded) GTEST_SKIP() << "needs " << (kNeeded >> 30) << " GiB, free are " << (free >> 30);
    }
};

TEST_F(LargeBackward, rows_past_2_to_the_31_elements) {
    constexpr std::int64_t kLen = (std::int64_t{1} << 20) + 77;
    constexpr std::int64_t kWindow = 100;
    Problem p = check::make_problem(1, kLen, kLen, 16, 16, 128, DType::bf16);
    p.mask = {.causal = Causal::bottom_right, .window_left = kWindow};
    std::vector<LargeRow> rows;
    for (const std::int64_t i : {kLen - 1, kLen - 60, kLen / 2 + 13, std::int64_t{3}}) {
        for (const std::int64_t head : {0, 15}) rows.push_back({i, head, {0, kLen, kWindow, 0}});
    }
    LargeGradients<__nv_bfloat16>(p).expect_right(rows);
}

TEST_F(LargeBackward, sequences_past_2_to_the_31_elements) {
    constexpr std::int64_t kBatch = 70'000, kLen = 62, kHeads = 8;
    const Problem p = check::make_problem(kBatch, kLen, kLen, kHeads, kHeads, 64, DType::fp16);
    std::vector<LargeRow> rows;
    for (const std::int64_t b : {kBatch - 1, std::int64_t{65'536}, std::int64_t{0}}) {
        for (const std::int64_t i : {kLen - 1, std::int64_t{0}}) {
            rows.push_back({b * kLen + i, 7, {b * kLen, (b + 1) * kLen, kLen, kLen}});
        }
    }
    LargeGradients<__half>(p).expect_right(rows);
}

TEST_F(LargeBackward, ragged_rows_past_2_to_the_31_elements) {
    constexpr std::int64_t kShort = 130, kLong = (std::int64_t{1} << 21) - 77, kTotal = kLong + 2 * kShort;
    constexpr std::int64_t kWindow = 70, kHeads = 9, kKvHeads = 3;
    Problem p =
        check::make_ragged({kShort, kLong, kShort}, {kShort, kLong, kShort}, kHeads, kKvHeads, 128, DType::bf16);
    p.mask = {.window_left = kWindow, .window_right = 0};
    const Mirror<std::int64_t> cu_seqlens({0, kShort, kShort + kLong, kTotal});
    std::vector<LargeRow> rows;
    for (const auto& [begin, end] :
         {std::pair{std::int64_t{0}, kShort}, std::pair{kShort, kShort + kLong}, std::pair{kShort + kLong, kTotal}}) {
        rows.push_back({begin + 110, 8, {begin, end, kWindow, 0}});
        rows.push_back({end - 5, 4, {begin, end, kWindow, 0}});
    }
    LargeGradients<__nv_bfloat16>(p).expect_right(rows, dense_view(cu_seqlens.device(), DType::int64, {4}, kDevice));
}

}  // namespace
}  // namespace tessera::cuda::test
