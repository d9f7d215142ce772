// SPDX-License-Identifier: Apache-2.0
//
// A panel of up to 16 queries on a matrix unit, with queries as rows of O = P V. Its callers are decode.cc, and
// few_queries.cc for what its own primitives do not take.
#pragma once

#include <limits>

#include "cpu/fa2/matrix/task.hpp"

namespace tessera::cpu::fa2::matrix_path {

/// A panel of few queries.
class DecodeTask {
 public:
    DecodeTask(const ForwardRun& run, std::int64_t kv_head, std::int64_t panel, int worker)
        : run_(run), g_(run.g), scratch_(run.decode_scratch(worker)), work_(run.panel(kv_head, panel)) {}

    const matrix::TilePanel& work() const { return work_; }
    simd::PanelSums total() const { return {scratch_.total, g_}; }
    simd::PanelSums of_block() const { return {scratch_.block, g_}; }

    const float* offsets() const { return scratch_.offsets; }

    void pack_queries() {
        q_finite_ = run_.primitives.pack({work_.head.q, work_.panel.first, work_.panel.queries, g_.head_dim,
                                          matrix::Form::column_pairs, work_.pairs(scratch_.queries), false,
                                          work_.query_scale()});
        if (g_.parts > 1) return;
        rounding_offsets(work_, scratch_.queries, g_.depth_tiles, scratch_.offsets);
        // A pair tile with ones in the first lane: P times it is the sum of P.
        std::fill_n(scratch_.ones, matrix::kTileElements, Bf16{});
        for (std::int64_t pair = 0; pair < matrix::kTileElements; pair += matrix::kTileDepth) {
            std::fill_n(scratch_.ones + pair, 2, Bf16{0x3F80});
        }
    }

    /// Computes the result of one block of keys alone. Returns false if none of them is seen. Counts its tiles, unless
    /// that is done.
    bool run_block(std::int64_t block, simd::PanelSums& sums, bool counted = false) {
        TileTally tally(counted ? nullptr : run_.call.counters);
        const matrix::SeenKeys keys = keys_seen(run_, work_, block, &tally);
        if (keys.keys.empty()) return false;
        compute_scores(keys);
        const Stage& at = scratch_.stage;
        run_.primitives.weights(weights_job(work_, keys, scratch_.s, scratch_.bias_or_dropout, scratch_.offsets, at));
        add_values(keys, sums.o);
        std::copy_n(at.state.m, g_.lanes, sums.state.m);
        std::copy_n(at.state.l, g_.lanes, sums.state.l);
        return true;
    }

    /// Merges another block's result of some queries into `total`, which becomes the first block's result.
    void merge(simd::PanelSums& total, const simd::PanelSums& next, const Range& queries) const {
        if (total.started) {
            simd::merge_rows(total.state, total.o, next.state, next.o, queries, value_rows(g_));
            return;
        }
        std::copy_n(next.state.m, g_.lanes, total.state.m);
        std::copy_n(next.state.l, g_.lanes, total.state.l);
        std::copy(next.o + queries.begin * value_rows(g_), next.o + queries.end * value_rows(g_),
                  total.o + queries.begin * value_rows(g_));
        total.started = true;
    }

    /// Writes O and LSE of some queries. The panel shrinks to them, so this is the last use of a task.
    void finish(simd::PanelSums& total, const Range& queries) {
        work_.panel.first += queries.begin;
        work_.panel.queries = queries.size();
        if (total.started && queries.begin > 0) {
            std::copy(total.state.m + queries.begin, total.state.m + queries.end, total.state.m);
            std::copy(total.state.l + queries.begin, total.state.l + queries.end, total.state.l);
            std::copy(total.o + queries.begin * value_rows(g_), total.o + queries.end * value_rows(g_), total.o);
        }
        simd::PanelSums columns = total;
        columns.o = scratch_.columns;
        for (std::int64_t row = 0; total.started && row < value_rows(g_); row += matrix::kTileRows) {
            run_.primitives.transpose(total.o + row, value_rows(g_), columns.o + row * g_.lanes, g_.lanes);
        }
        epilogue(run_, work_, scratch_.finish, columns);
    }

 private:
    /// Computes S^T slice by slice; the next slice is prefetched meanwhile.
    void compute_scores(const matrix::SeenKeys& keys) {
        const HeadRows& k = work_.head.k;
        float* maximum = scratch_.stage.maximum;
        std::fill_n(maximum, g_.lanes, -std::numeric_limits<float>::infinity());
        const bool in_place = matrix::tiles_in_place(k, g_.head_dim);
        const bool plain = work_.plain && q_finite_ && matrix::all_visible(work_, keys.keys);
        fetch(k, keys.keys, kSliceKeys, g_.head_dim);
        matrix::SeenKeys slice;
        for (std::int64_t key = keys.keys.begin; key < keys.keys.end; key = slice.keys.end) {
            slice.keys = {key, std::min(keys.keys.end, key + kSliceKeys)};
            const std::int64_t whole = slice.keys.size() / matrix::kTileDepth * matrix::kTileDepth;
            const bool packed = !in_place || whole == 0;
            if (!packed) slice.keys.end = key + whole;  // a last, partial tile of K is packed
            fetch(k, {slice.keys.end, keys.keys.end}, kSliceKeys, g_.head_dim);
            const matrix::Tiles tiles =
                packed ? matrix::key_rows(scratch_.k, g_, g_.depth_tiles, 0) : matrix::rows_in_place(k, key);
            const bool finite =
                !packed || run_.primitives.pack({k, key, slice.keys.size(), g_.head_dim, matrix::Form::rows, tiles});
            float* s = scratch_.s + (key - keys.keys.begin) * g_.lanes;
            matrix::TileProduct product =
                matrix::scores_product(work_, slice, tiles, scratch_.queries, g_.depth_tiles, s);
            if (!packed) product.a_stride = k.row_stride;
            const bool only_maximum = plain && finite && slice.rows() == slice.keys.size();
            if (only_maximum) product.maximum = maximum;
            run_.primitives.multiply(product);
            if (!only_maximum)
                transform_and_mask_some(run_, work_, slice, finite && q_finite_, s, scratch_.bias_or_dropout, maximum);
        }
        fetch(work_.head.v, keys.keys, matrix::kTileDepth, g_.head_dim_v);  // multiply_rows() prefetches the rest
    }

    /// Prefetches the first `count` of `keys`, unless they are in a cache.
    void fetch(const HeadRows& x, const Range& keys, std::int64_t count, std::int64_t dim) const {
        if (!run_.work_split.from_memory || x.column_stride != 1) return;
        matrix::fetch_rows(x, keys.begin, std::min(keys.end, keys.begin + count), dim);
    }

    /// o = P V, and in bf16 the sum of the rounded P. o: [lanes, value_rows]
    void add_values(const matrix::SeenKeys& keys, float* o) {
        Bf16* p = scratch_.stage.p;
        const matrix::PackJob v{.from = work_.head.v,
                                .first = keys.keys.begin,
                                .rows = keys.keys.size(),
                                .dim = g_.head_dim_v,
                                .form = matrix::Form::row_pairs,
                                .to = {scratch_.v, 0, 0},
                                .finite_only = true,
                                .from_memory = run_.work_split.from_memory};
        const bool finite = run_.primitives.multiply_rows({g_.parts, p, v, o, value_rows(g_)});
        const std::int64_t tiles = keys.rows() / matrix::kTileDepth;
        if (g_.parts == 1) {
            run_.primitives.multiply({.m = 1,
                                      .n = 1,
                                      .k = tiles,
                                      .a = {p, 0, matrix::kTileElements},
                                      .b = {scratch_.ones, 0, 0},
                                      .c = o + sum_row(g_),
                                      .c_stride = value_rows(g_)});
        }
        if (g_.parts == 1 && work_.head.dropout.active) {  // dropout reduced that sum
            for (std::int64_t i = 0; i < g_.lanes; ++i)
                o[i * value_rows(g_) + sum_row(g_)] = scratch_.stage.rounded_l[i];
        }
        if (finite) return;
        for (std::int64_t i = 0; i < tiles * g_.parts; ++i) {
            Bf16* tile = p + i * matrix::kTileElements;
            run_.primitives.transpose(tile, matrix::kTileRows, tile, matrix::kTileRows);
        }
        matrix::add_special_keys(work_, keys, work_.head.v, g_.head_dim_v, p, {o, 1, value_rows(g_)});
    }

    const ForwardRun& run_;
    const matrix::Layout& g_;
    DecodeScratch scratch_;
    matrix::TilePanel work_;
    bool q_finite_ = true;
};

}  // namespace tessera::cpu::fa2::matrix_path
