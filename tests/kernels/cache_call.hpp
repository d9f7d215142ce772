// SPDX-License-Identifier: Apache-2.0
//
// A call on a cache of keys with its tensors, for tests: K and V in any layout, whose unused rows hold poison.
#pragma once

#include <fmt/format.h>

#include <array>
#include <random>

#include "check/case_cache.hpp"
#include "kernels/support.hpp"

namespace tessera::check {

/// A call on a cache with its tensors. `pages` and slots that no key needs hold poison.
struct CacheCall {
    Problem problem;
    CacheLayout cache_layout = CacheLayout::separate;
    std::vector<std::int64_t> queries;  ///< of each sequence
    std::vector<std::int64_t> lengths;  ///< keys of each sequence, as the call gives them
    std::vector<std::int64_t> padding;
    std::int64_t spare_rows = 0;  ///< of a ragged q, past the last offset
    std::uint64_t seed = 1;

    Tensor q, o, lse, slopes, sinks, cu_q, kv_lengths, table, slots, left;
    std::vector<std::byte> memory;
    TensorView k, v;

    std::int64_t batch() const { return problem.batch; }
    std::int64_t keys_of(std::int64_t b) const { return end_of(b) - first_of(b); }
    std::int64_t end_of(std::int64_t b) const { return std::clamp<std::int64_t>(at(lengths, b), 0, problem.len_kv); }
    std::int64_t first_of(std::int64_t b) const {
        return problem.left_padding ? std::clamp<std::int64_t>(at(padding, b), 0, end_of(b)) : 0;
    }
    static std::int64_t at(const std::vector<std::int64_t>& list, std::int64_t b) {
        return list[static_cast<std::size_t>(b)];
    }

    void make(std::mt19937_64& random) {
        const Problem& p = problem;
        const auto int32s = [](const std::vector<std::int64_t>& from) {
            Tensor t(DType::int32, {static_cast<std::int64_t>(from.size())});
            for (std::size_t i = 0; i < from.size(); ++i)
                *t.view.at<std::int32_t>(static_cast<std::int64_t>(i)) = static_cast<std::int32_t>(from[i]);
            return t;
        };
        kv_lengths = int32s(lengths);
        if (p.left_padding) left = int32s(padding);
        if (p.ragged) {
            cu_q = detail::cu_seqlens(queries);
            q = Tensor(p.dtype, {p.total_q, p.heads_q, p.head_dim});
            o = Tensor(p.dtype, {p.total_q, p.heads_q, p.head_dim_v});
            lse = Tensor(DType::fp32, {p.heads_q, p.total_q});
        } else {
            q = Tensor(p.dtype, {p.batch, p.len_q, p.heads_q, p.head_dim});
            o = Tensor(p.dtype, {p.batch, p.len_q, p.heads_q, p.head_dim_v});
            lse = Tensor(DType::fp32, {p.batch, p.heads_q, p.len_q});
        }
        fill(q.view, Fill::normal, seed);
        if (p.alibi) {
            slopes = Tensor(DType::fp32, {p.heads_q});
            for (std::int64_t h = 0; h < p.heads_q; ++h) slopes.set(0.03 * static_cast<double>(h + 1), h);
        }
        if (p.sinks) {
            sinks = Tensor(DType::fp32, {p.heads_q});
            fill(sinks.view, Fill::normal, seed + 1);
            if (random() % 3 == 0) sinks.set(-std::numeric_limits<double>::infinity(), 0);
        }
        make_cache(random);
        fill_keys(random);
    }

    /// Views of K and V over memory that is all poison, and the table or the slots.
    void make_cache(std::mt19937_64& random) {
        const Problem& p = problem;
        const std::int64_t rows = p.page_size > 0 ? p.page_size : p.len_kv;
        const std::int64_t needed = p.page_size > 0 ? p.batch * (p.len_kv / p.page_size) : p.batch;
        const bool any_count = p.page_size > 0 || p.cache_batch_index;
        const std::int64_t count = needed + (any_count ? static_cast<std::int64_t>(random() % 3) : 0);
        const CacheStrides s = strides_of(cache_layout, count, rows, p.heads_kv, p.head_dim, p.head_dim_v);
        const std::int64_t elements = s.elements;
        memory.assign(static_cast<std::size_t>((elements + 64) * size_of(p.dtype)), std::byte{});
        const std::array<double, 3> poisons{std::nan(""), std::numeric_limits<double>::infinity(), 3e38};
        const double poison = poisons[random() % poisons.size()];
        for (std::int64_t i = 0; i < elements + 64; ++i)
            store_from_double(memory.data() + i * size_of(p.dtype), p.dtype, poison);
        const auto view = [&](std::int64_t first, std::int64_t columns, std::array<std::int64_t, 4> strides) {
            TensorView t =
                dense_view(memory.data() + first * size_of(p.dtype), p.dtype, {count, rows, p.heads_kv, columns});
            for (std::size_t d = 0; d < 3; ++d)
                if (t.shape[d] == 1) strides[d] = static_cast<std::int64_t>(random() % 3) * 1'234'567;
            std::copy(strides.begin(), strides.end(), t.strides.begin());
            return t;
        };
        k = view(s.first_k, p.head_dim, s.k);
        v = view(s.first_v, p.head_dim_v, s.v);
        std::vector<std::int32_t> order(static_cast<std::size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        if (p.page_size > 0) make_table(order, random);
        if (!p.cache_batch_index) return;
        slots = Tensor(DType::int32, {p.batch});
        for (std::int64_t b = 0; b < p.batch; ++b) *slots.view.at<std::int32_t>(b) = order[static_cast<std::size_t>(b)];
    }

    /// Pages for the keys of each sequence, and junk after them and for pages that no query sees.
    void make_table(const std::vector<std::int32_t>& order, std::mt19937_64& random) {
        const Problem& p = problem;
        const std::array<std::int32_t, 3> junk{-1, 1'000'000, std::numeric_limits<std::int32_t>::min()};
        const std::int64_t width = p.len_kv / p.page_size;
        table = Tensor(DType::int32, {p.batch, width});
        std::size_t next = 0;
        for (std::int64_t b = 0; b < p.batch; ++b) {
            const Range seen = p.mask.bind(at(queries, b), keys_of(b)).kv_range(0, at(queries, b));
            for (std::int64_t n = 0; n < width; ++n) {
                const std::int64_t first = n * p.page_size - first_of(b);
                const bool needed = !seen.empty() && first < seen.end && first + p.page_size > seen.begin;
                *table.view.at<std::int32_t>(b, n) = needed ? order[next++] : junk[random() % junk.size()];
            }
        }
    }

    /// The element of row `row` of the cache of sequence b; null if its page is junk.
    void* element(const TensorView& t, std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) const {
        std::int64_t index = problem.cache_batch_index ? *slots.view.at<const std::int32_t>(b) : b;
        if (problem.page_size > 0) {
            index = *table.view.at<const std::int32_t>(b, row / problem.page_size);
            row %= problem.page_size;
            if (index < 0 || index >= t.shape[0]) return nullptr;
        }
        const std::int64_t offset = index * (t.shape[0] == 1 ? 0 : t.strides[0]) +
                                    row * (t.shape[1] == 1 ? 0 : t.strides[1]) +
                                    head * (t.shape[2] == 1 ? 0 : t.strides[2]) + column * t.strides[3];
        return static_cast<std::byte*>(t.data) + offset * size_of(t.dtype);
    }

    void fill_keys(std::mt19937_64& random) {
        std::normal_distribution<double> normal;
        for (std::int64_t b = 0; b < batch(); ++b) {
            const Range seen = problem.mask.bind(at(queries, b), keys_of(b)).kv_range(0, at(queries, b));
            for (std::int64_t j = seen.begin; j < seen.end; ++j) {
                for (std::int64_t h = 0; h < problem.heads_kv; ++h) {
                    for (const TensorView* t : {&k, &v}) {
                        for (std::int64_t c = 0; c < t->shape[3]; ++c)
                            store_from_double(element(*t, b, first_of(b) + j, h, c), problem.dtype, normal(random));
                    }
                }
            }
        }
    }

    ForwardArgs args() const {
        return {.q = q.view,
                .k = k,
                .v = v,
                .alibi_slopes = slopes.view,
                .cu_seqlens_q = cu_q.view,
                .o = o.view,
                .lse = lse.view,
                .sinks = sinks.view,
                .kv_lengths = kv_lengths.view,
                .page_table = table.view,
                .cache_batch_index = slots.view,
                .left_padding = left.view};
    }

    void run(const std::string& kernel, int threads) {
        o.fill_value(7);
        lse.fill_value(7);
        const Plan how = plan(problem, {.kernel = kernel, .threads = threads});
        const Workspace workspace(how);
        std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xFF});
        forward(how, args(), workspace);
    }

    /// A dense call on the keys of sequence b alone.
    Attention alone(std::int64_t b) const {
        Problem p = problem;
        p.batch = 1;
        p.len_q = at(queries, b);
        p.len_kv = keys_of(b);
        p.ragged = p.kv_lengths = p.cache_batch_index = p.left_padding = false;
        p.total_q = p.page_size = 0;
        Attention result(p);
        for (std::int64_t i = 0; i < p.len_q; ++i) {
            for (std::int64_t h = 0; h < p.heads_q; ++h) {
                for (std::int64_t c = 0; c < p.head_dim; ++c) result.q.set(row(q, b, i, h, c), 0, i, h, c);
            }
        }
        const Range seen = p.mask.bind(p.len_q, p.len_kv).kv_range(0, p.len_q);
        for (std::int64_t j = seen.begin; j < seen.end; ++j) {
            for (std::int64_t h = 0; h < p.heads_kv; ++h) {
                const auto copy = [&](const TensorView& from, Tensor& to) {
                    for (std::int64_t c = 0; c < from.shape[3]; ++c)
                        to.set(load_as_double(element(from, b, first_of(b) + j, h, c), p.dtype), 0, j, h, c);
                };
                copy(k, result.k);
                copy(v, result.v);
            }
        }
        result.slopes = slopes;
        result.sinks = sinks;
        return result;
    }

    std::int64_t first_row(std::int64_t b) const {
        return std::accumulate(queries.begin(), queries.begin() + b, std::int64_t{0});
    }
    double row(const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t c) const {
        return problem.ragged ? t.get(first_row(b) + i, h, c) : t.get(b, i, h, c);
    }
    double row_lse(std::int64_t b, std::int64_t h, std::int64_t i) const {
        return problem.ragged ? lse.get(h, first_row(b) + i) : lse.get(b, h, i);
    }

    std::string describe() const {
        std::string text =
            problem.describe() + " cache layout " + std::to_string(static_cast<int>(cache_layout)) + ", sequences";
        for (std::int64_t b = 0; b < batch(); ++b)
            text += fmt::format(" {}x{}..{}", at(queries, b), first_of(b), at(lengths, b));
        return text;
    }
};

}  // namespace tessera::check
