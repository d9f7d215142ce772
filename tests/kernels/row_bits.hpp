// SPDX-License-Identifier: Apache-2.0
//
// Parts of a call, for tests of two promises of docs/numerics.md: a row of O and LSE has the same bits in every call
// that computes it, and the gradients of a kv head and its query heads have the same bits among any other heads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check {

/// Queries [first, first + queries) of a dense call of one sequence, on its first `keys` keys.
struct Part {
    std::int64_t first, queries, keys;
};

/// The parts of a causal call of `len` tokens: the last queries alone (decode), the first tokens alone (a shorter
/// prompt), and the call in chunks (chunked prefill). Every size is cut to the length.
inline std::vector<Part> causal_parts(std::int64_t len, const std::vector<std::int64_t>& sizes) {
    std::vector<Part> parts;
    for (const std::int64_t size : sizes) {
        const std::int64_t n = std::min(size, len);
        parts.push_back({len - n, n, len});
        parts.push_back({0, n, n});
        if (n < 32) continue;  // chunks of few queries would be many
        for (std::int64_t first = 0; first < len; first += n) {
            const std::int64_t queries = std::min(n, len - first);
            parts.push_back({first, queries, first + queries});
        }
    }
    return parts;
}

namespace detail {

/// Copies rows [first, first + rows) of sequence 0 of `from` to the beginning of sequence `to_sequence` of `to`.
inline void copy_rows(const Tensor& from, std::int64_t first, std::int64_t rows, Tensor& to, std::int64_t to_sequence) {
    const std::int64_t row_bytes = from.view.shape[2] * from.view.shape[3] * size_of(from.view.dtype);
    const auto source = from.memory.begin() + first * row_bytes;
    std::copy(source, source + rows * row_bytes, to.memory.begin() + to_sequence * to.view.shape[1] * row_bytes);
}

}  // namespace detail

/// The first row of sequence `sequence` of `part` that has other bits than in `whole`, or -1.
inline std::int64_t first_other_row(const Attention& whole, const Part& cut, const Attention& part,
                                    std::int64_t sequence) {
    const Problem& p = whole.problem;
    const std::int64_t row_bytes = p.heads_q * p.head_dim_v * size_of(p.dtype);
    for (std::int64_t row = 0; row < cut.queries; ++row) {
        const auto in_whole = whole.o.memory.begin() + (cut.first + row) * row_bytes;
        const auto in_part = part.o.memory.begin() + (sequence * cut.queries + row) * row_bytes;
        bool same = std::equal(in_whole, in_whole + row_bytes, in_part);
        for (std::int64_t h = 0; h < p.heads_q; ++h)
            same = same && whole.lse.get(0, h, cut.first + row) == part.lse.get(sequence, h, row);
        if (!same) return row;
    }
    return -1;
}

/// A call of the part alone (`batch` 1), or in the middle of a batch of other sequences.
inline Attention call_of(const Attention& whole, const Part& cut, std::int64_t batch = 1) {
    Problem p = whole.problem;
    p.batch = batch;
    p.len_q = cut.queries;
    p.len_kv = cut.keys;
    Attention part(p, 7);
    detail::copy_rows(whole.q, cut.first, cut.queries, part.q, batch / 2);
    detail::copy_rows(whole.k, 0, cut.keys, part.k, batch / 2);
    detail::copy_rows(whole.v, 0, cut.keys, part.v, batch / 2);
    return part;
}

/// Runs a part with the kernel that computed `whole`: every row of O and LSE has the bits that it has there. The kernel
/// must take the part.
inline void expect_same_rows(const Attention& whole, const KernelInfo& kernel, const Part& cut, std::int64_t batch = 1,
                             int threads = 1) {
    Attention part = call_of(whole, cut, batch);
    SCOPED_TRACE(whole.problem.describe() + ", queries " + std::to_string(cut.first) + " + " +
                 std::to_string(cut.queries) + " on " + std::to_string(cut.keys) + " keys, batch " +
                 std::to_string(batch) + ", " + std::to_string(threads) + " threads");
    ASSERT_TRUE(part.forward(kernel, {.threads = threads})) << kernel.name;
    EXPECT_EQ(first_other_row(whole, cut, part, batch / 2), -1) << kernel.name << ": a row with other bits";
}

/// A backward of `heads_kv` kv heads, of which number `head` has the inputs of `alone`, a backward of one kv head.
inline Attention among_heads(const Attention& alone, std::int64_t heads_kv, std::int64_t head) {
    const std::int64_t group = alone.problem.group();
    Problem p = alone.problem;
    p.heads_kv = heads_kv;
    p.heads_q = heads_kv * group;
    Attention among(p, 9);
    const auto copy = [&](const Tensor& from, Tensor& to) {
        const std::int64_t heads = from.view.shape[2];
        const std::int64_t bytes = heads * from.view.shape[3] * size_of(from.view.dtype);
        for (std::int64_t row = 0; row < from.view.shape[1]; ++row) {
            const auto source = from.memory.begin() + row * bytes;
            std::copy(source, source + bytes, to.memory.begin() + (row * heads_kv + head) * bytes);
        }
    };
    for (auto which : {&Attention::q, &Attention::k, &Attention::v, &Attention::d_o, &Attention::o})
        copy(alone.*which, among.*which);
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
        for (std::int64_t row = 0; row < p.len_q; ++row) {
            among.lse.set(alone.lse.get(0, h % group, row), 0, h, row);
            if (alone.dlse.view.given()) among.dlse.set(alone.dlse.get(0, h % group, row), 0, h, row);
        }
    }
    return among;
}

/// Runs the backwards of `alone` and of among_heads(): the gradients of `head` and its query heads have the same bits.
/// Returns false if the kernel does not take the call.
inline bool expect_same_gradients(Attention& alone, const KernelInfo& kernel, std::int64_t heads_kv,
                                  std::int64_t head) {
    if (!alone.backward(kernel)) return false;
    Attention among = among_heads(alone, heads_kv, head);
    SCOPED_TRACE(among.problem.describe());
    EXPECT_TRUE(among.backward(kernel)) << kernel.name;
    for (auto which : {&Attention::dq, &Attention::dk, &Attention::dv}) {
        const Tensor& own = alone.*which;
        const std::int64_t bytes = own.view.shape[2] * own.view.shape[3] * size_of(own.view.dtype);
        for (std::int64_t row = 0; row < own.view.shape[1]; ++row) {
            const auto expected = own.memory.begin() + row * bytes;
            const auto got = (among.*which).memory.begin() + (row * heads_kv + head) * bytes;
            if (std::equal(expected, expected + bytes, got)) continue;
            ADD_FAILURE() << kernel.name << ": row " << row << " of " << (which == &Attention::dq ? "dQ" : "dK or dV")
                          << " has other bits";
            break;
        }
    }
    return true;
}

}  // namespace tessera::check
