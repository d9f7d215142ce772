// SPDX-License-Identifier: Apache-2.0
//
// Rows of many keys and of many dims. Sums in parts keep to the limit of fp32, and keep the bits of a row wherever its
// keys begin.
#include <cmath>
#include <functional>
#include <vector>

#include "support.hpp"

namespace tessera::check::long_rows_test {
namespace {

/// O of the only query and head, in fp64.
std::vector<double> exact_o(const Attention& a) {
    const Problem& p = a.problem;
    std::vector<double> o(static_cast<std::size_t>(p.head_dim_v));
    double sum = 0;
    for (std::int64_t j = 0; j < p.len_kv; ++j) {
        double s = 0;
        for (std::int64_t c = 0; c < p.head_dim; ++c) s += a.q.get(0, 0, 0, c) * a.k.get(0, j, 0, c);
        const double weight = std::exp(s * p.effective_scale());
        sum += weight;
        for (std::size_t c = 0; c < o.size(); ++c) o[c] += weight * a.v.get(0, j, 0, static_cast<std::int64_t>(c));
    }
    for (double& x : o) x /= sum;
    return o;
}

/// Values of one sign: no sum cancels, and every rounding of the sum counts.
TEST(LongRows, fp32_stays_within_its_limit) {
    for (const std::int64_t keys : {std::int64_t{1} << 16, std::int64_t{1} << 20}) {
        Attention a(make_problem(1, 1, keys, 1, 1, 8));
        a.q.scale_by(0.5);
        for (std::int64_t j = 0; j < keys; ++j) {
            for (std::int64_t c = 0; c < 8; ++c) a.v.set(c < 4 ? 1 : std::abs(a.v.get(0, j, 0, c)), 0, j, 0, c);
        }
        const std::vector<double> exact = exact_o(a);
        for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
            if (kernel.backend == Backend::reference || !a.forward(kernel, {.threads = 2})) return;
            double squares = 0;
            for (std::size_t c = 0; c < exact.size(); ++c) {
                const double error = a.o.get(0, 0, 0, static_cast<std::int64_t>(c)) / exact[c] - 1;
                squares += error * error;
            }
            EXPECT_LE(std::sqrt(squares / static_cast<double>(exact.size())), 2e-6) << keys;
        });
    }
}

/// Scores whose products are all equal, so that every rounding of a sum goes the same way. Each head has another
/// number, and so other roundings.
TEST(LongRows, lse_of_products_that_are_all_alike) {
    constexpr int kHeads = 64;
    for (const std::int64_t head_dim : {48, 64, 65, 96, 128, 129, 192, 256}) {
        for (const std::int64_t len_q : {1, 70}) {
            Attention a(make_problem(1, len_q, 3, kHeads, kHeads, head_dim));
            const auto fill_heads = [](Tensor& t, const std::function<double(std::int64_t)>& of_head) {
                const std::int64_t columns = t.view.shape[3];
                for_each_element(t.view, [&](std::int64_t flat, std::byte* element) {
                    store_from_double(element, DType::fp32, of_head(flat / columns % kHeads));
                });
            };
            const auto fraction = [](double x) { return x - std::floor(x); };
            fill_heads(a.q, [&](std::int64_t h) { return 1 + fraction(0.6180339887498949 * static_cast<double>(h)); });
            fill_heads(a.k,
                       [&](std::int64_t h) { return 2 + 2 * fraction(0.7548776662466927 * static_cast<double>(h)); });
            expect_forward_right(a);
        }
    }
}

/// Under a left window the keys of a panel of queries begin at another key than those of one query.
TEST(LongRows, a_decoded_row_has_the_bits_of_the_prefill) {
    constexpr std::int64_t kLen = 700;
    for (const std::int64_t block_kv : {64, 37}) {
        for (const DType dtype : kStorageTypes) {
            Problem p = make_problem(1, kLen, kLen, 2, 2, 64, dtype);
            p.mask = {.causal = Causal::bottom_right, .window_left = 200};
            Attention whole(p);
            for_each_kernel(Pass::forward, [&](const KernelInfo& kernel) {
                if (kernel.backend != Backend::cpu) return;
                const check::Run run{.tile = Tile{64, block_kv}};
                if (!whole.forward(kernel, run)) return;
                for (const std::int64_t row : {kLen - 1, kLen - 60}) {
                    Problem one = make_problem(1, 1, row + 1, 2, 2, 64, dtype);
                    one.mask = p.mask;
                    Attention decoded(one);
                    const auto bytes = decoded.q.memory.size();
                    const auto at = static_cast<std::ptrdiff_t>(bytes) * row;
                    std::copy_n(whole.q.memory.begin() + at, bytes, decoded.q.memory.begin());
                    std::copy_n(whole.k.memory.begin(), decoded.k.memory.size(), decoded.k.memory.begin());
                    std::copy_n(whole.v.memory.begin(), decoded.v.memory.size(), decoded.v.memory.begin());
                    ASSERT_TRUE(decoded.forward(kernel, run));
                    EXPECT_TRUE(
                        std::equal(decoded.o.memory.begin(), decoded.o.memory.end(), whole.o.memory.begin() + at))
                        << "row " << row << ", tiles of " << block_kv << " keys";
                }
            });
        }
    }
}

}  // namespace
}  // namespace tessera::check::long_rows_test
