// SPDX-License-Identifier: Apache-2.0
#include "append_checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>

#include "core/append_tensors.hpp"
#include "core/batch.hpp"
#include "core/checks.hpp"
#include "core/invalid.hpp"

namespace tessera {
namespace {

void expect_given(const char* name, const TensorView& t, const char* why) {
    if (!t.given()) invalid(name, fmt::format("expected a tensor{}, got nothing", why));
}
void expect_nothing(const char* name, const TensorView& t, const char* why) {
    if (t.given()) invalid(name, fmt::format("expected nothing {}, got {}", why, t.describe()));
}

std::string text_of(const Device& device) {
    return device.type == DeviceType::cpu ? "the CPU" : fmt::format("CUDA device {}", device.index);
}

/// The sizes of new rows of one tensor.
struct Rows {
    std::int64_t count;
    std::int64_t heads;
    std::int64_t dim;
};

Rows rows_of(const char* name, const TensorView& t) {
    if (t.rank != 3 && t.rank != 4) {
        invalid(name, "expected [batch, len, heads, dim] or [total, heads, dim], got " + t.describe());
    }
    if (t.size() == std::numeric_limits<std::int64_t>::max()) {
        invalid(name, "expected fewer than 2^63 elements, got " + t.describe());
    }
    const std::int64_t* const of_heads = t.shape.data() + t.rank - 2;
    return {t.rank == 4 ? t.shape[0] * t.shape[1] : t.shape[0], of_heads[0], of_heads[1]};
}

/// One row of a cache: [heads, dim].
TensorView row_of_cache(const TensorView& cache, const CacheRow& at) {
    TensorView row = cache;
    row.data = static_cast<std::byte*>(cache.data) +
               (at.index * cache.strides[0] + at.row * cache.strides[1]) * size_of(cache.dtype);
    row.rank = 2;
    row.shape = {cache.shape[2], cache.shape[3]};
    row.strides = {cache.strides[2], cache.strides[3]};
    return row;
}

class Checks {
 public:
    explicit Checks(const AppendArgs& args) : a_(args) {}

    void run(const AppendOptions& options) {
        expect_given("k", a_.k, "");
        expect_given("v", a_.v, "");
        for (const AppendTensor& t : kAppendTensors) {
            const TensorView& view = a_.*t.view;
            if (!view.given() || view.device == a_.k.device) continue;
            invalid(t.name, fmt::format("expected a tensor on {}, the device of k, got one on {}", text_of(a_.k.device),
                                        text_of(view.device)));
        }
        check_rows();
        check_targets();
        check_rotary();
        check_queries();
        expect_weights("k_norm", a_.k_norm);
        if (!(options.norm_eps >= 0) || !std::isfinite(options.norm_eps)) {
            invalid("norm_eps", fmt::format("expected a finite number >= 0, got {}", options.norm_eps));
        }
        constexpr int kMostThreads = 1024;
        if (options.threads < 0 || options.threads > kMostThreads) {
            invalid("threads", fmt::format("expected 0..{}, got {}", kMostThreads, options.threads));
        }
        check_memory();
    }

 private:
    void expect(const char* name, const TensorView& t, std::initializer_list<std::int64_t> shape,
                std::initializer_list<DType> dtypes) const {
        expect_tensor(name, t, std::span(shape.begin(), shape.size()), std::span(dtypes.begin(), dtypes.size()));
    }

    void check_rows() {
        if (!is_floating(a_.k.dtype))
            invalid("k", fmt::format("expected fp32, bf16, fp16 or fp64, got {}", name_of(a_.k.dtype)));
        k_ = rows_of("k", a_.k);
        const Rows v = rows_of("v", a_.v);
        if (a_.k.rank == 4) {
            expect("k", a_.k, {a_.k.shape[0], a_.k.shape[1], k_.heads, k_.dim}, {a_.k.dtype});
            expect("v", a_.v, {a_.k.shape[0], a_.k.shape[1], k_.heads, v.dim}, {a_.k.dtype});
        } else {
            expect("k", a_.k, {k_.count, k_.heads, k_.dim}, {a_.k.dtype});
            expect("v", a_.v, {k_.count, k_.heads, v.dim}, {a_.k.dtype});
        }
        const std::int64_t slots = a_.k_cache.shape[0];
        const std::int64_t rows = a_.k_cache.shape[1];
        expect("k_cache", a_.k_cache, {slots, rows, k_.heads, k_.dim}, {a_.k.dtype});
        expect("v_cache", a_.v_cache, {slots, rows, k_.heads, v.dim}, {a_.k.dtype});
    }

    void check_targets() const {
        if (a_.slot_mapping.given() == a_.kv_lengths.given()) {
            invalid(a_.kv_lengths.given() ? "slot_mapping" : "kv_lengths",
                    fmt::format("expected one of slot_mapping and kv_lengths, got {}",
                                a_.kv_lengths.given() ? "both" : "neither"));
        }
        if (a_.slot_mapping.given()) {
            expect("slot_mapping", a_.slot_mapping, {k_.count}, {DType::int64, DType::int32});
            expect_nothing("page_table", a_.page_table, "with slot_mapping");
            expect_nothing("cache_batch_index", a_.cache_batch_index, "with slot_mapping");
            expect_nothing("cu_seqlens_k", a_.cu_seqlens_k, "with slot_mapping");
            return;
        }
        const std::int64_t batch = a_.k.rank == 4 ? a_.k.shape[0] : a_.kv_lengths.shape[0];
        expect("kv_lengths", a_.kv_lengths, {batch}, {DType::int32});
        if (a_.k.rank == 4) {
            expect_nothing("cu_seqlens_k", a_.cu_seqlens_k, "with k [batch, len, heads, head_dim]");
        } else {
            expect("cu_seqlens_k", a_.cu_seqlens_k, {batch + 1}, {DType::int32, DType::int64});
            if (a_.k.device.type == DeviceType::cpu) check_cu_seqlens(batch);
        }
        if (a_.page_table.given()) {
            expect_nothing("cache_batch_index", a_.cache_batch_index, "with page_table");
            expect("page_table", a_.page_table, {batch, a_.page_table.shape[1]}, {DType::int32});
        }
        if (a_.cache_batch_index.given()) expect("cache_batch_index", a_.cache_batch_index, {batch}, {DType::int32});
    }

    void check_cu_seqlens(std::int64_t batch) const {
        std::int64_t before = 0;
        for (std::int64_t b = 0; b <= batch; ++b) {
            const std::int64_t at = cu_seqlen(a_.cu_seqlens_k, b);
            if (at < before || at > k_.count || (b == 0 && at != 0)) {
                invalid(
                    "cu_seqlens_k",
                    fmt::format("expected values that rise from 0 to {} at most, got {} at index {}", k_.count, at, b));
            }
            before = at;
        }
    }

    void check_rotary() const {
        if (!a_.rotary_cos.given()) {
            expect_nothing("rotary_sin", a_.rotary_sin, "without rotary_cos");
            expect_nothing("positions", a_.positions, "without rotary_cos");
            expect_nothing("q_positions", a_.q_positions, "without rotary_cos");
            return;
        }
        const std::int64_t pairs = a_.rotary_cos.shape[1];
        expect("rotary_cos", a_.rotary_cos, {a_.rotary_cos.shape[0], pairs}, {DType::fp32, a_.k.dtype});
        expect("rotary_sin", a_.rotary_sin, {a_.rotary_cos.shape[0], pairs}, {DType::fp32, a_.k.dtype});
        if (a_.rotary_cos.shape[0] == 0) invalid("rotary_cos", "expected 1 position or more, got 0");
        if (pairs < 1 || pairs > k_.dim / 2) {
            invalid("rotary_cos", fmt::format("expected 1 to {} columns, half of head_dim, got {}", k_.dim / 2, pairs));
        }
        if (a_.positions.given()) expect("positions", a_.positions, {k_.count}, {DType::int64, DType::int32});
        else if (a_.slot_mapping.given()) expect_given("positions", a_.positions, " with slot_mapping and rotary_cos");
    }

    void check_queries() const {
        if (!a_.q.given()) {
            expect_nothing("q_out", a_.q_out, "without q");
            expect_nothing("q_positions", a_.q_positions, "without q");
            expect_nothing("q_norm", a_.q_norm, "without q");
            return;
        }
        const Rows q = rows_of("q", a_.q);
        for (const auto& [name, t] : {std::pair("q", &a_.q), std::pair("q_out", &a_.q_out)}) {
            if (a_.q.rank == 4) expect(name, *t, {a_.q.shape[0], a_.q.shape[1], q.heads, k_.dim}, {a_.k.dtype});
            else expect(name, *t, {q.count, q.heads, k_.dim}, {a_.k.dtype});
        }
        if (a_.q_positions.given()) {
            expect("q_positions", a_.q_positions, {q.count}, {DType::int64, DType::int32});
        } else if (a_.rotary_cos.given() && q.count != k_.count) {
            invalid("q_positions", fmt::format("expected a tensor [{}], since q has not the {} rows of k, got nothing",
                                               q.count, k_.count));
        }
        expect_weights("q_norm", a_.q_norm);
    }

    void expect_weights(const char* name, const TensorView& t) const {
        if (t.given()) expect(name, t, {k_.dim}, {DType::fp32, a_.k.dtype});
    }

    /// The caches of K and V may share an allocation if the rows that a call writes are distinct. No input may overlap
    /// them.
    void check_memory() const {
        const auto is_output = [](const TensorView AppendArgs::*view) {
            return view == &AppendArgs::k_cache || view == &AppendArgs::v_cache || view == &AppendArgs::q_out;
        };
        for (const AppendTensor& out : kAppendTensors) {
            if (!is_output(out.view) || !(a_.*out.view).given()) continue;
            if (overlaps_itself(a_.*out.view)) {
                invalid(out.name,
                        "expected an output whose elements are all distinct, got " + (a_.*out.view).describe());
            }
            for (const AppendTensor& in : kAppendTensors) {
                const bool both_caches =
                    is_output(in.view) && (in.view == &AppendArgs::q_out) == (out.view == &AppendArgs::q_out);
                const bool in_place = out.view == &AppendArgs::q_out && in.view == &AppendArgs::q &&
                                      a_.q.data == a_.q_out.data && a_.q.strides == a_.q_out.strides;
                if (both_caches || in_place || !(a_.*in.view).given()) continue;
                if (may_overlap(a_.*out.view, a_.*in.view))
                    invalid(out.name, fmt::format("expected memory of its own, got memory that overlaps {}", in.name));
            }
        }
        if (has_rows(a_.k_cache) && has_rows(a_.v_cache) &&
            may_overlap(row_of_cache(a_.k_cache, {0, 0}), row_of_cache(a_.v_cache, {0, 0})))
            invalid("v_cache", "expected rows that share no memory with those of k_cache, got rows that overlap them");
    }

    static bool has_rows(const TensorView& cache) { return cache.shape[0] > 0 && cache.shape[1] > 0; }

    const AppendArgs& a_;
    Rows k_{};
};

/// The row of the cache that is slot `slot` (counted over all pages or slots of the cache); none if there is no such
/// slot.
CacheRow row_of_slot(const TensorView& cache, std::int64_t slot) {
    const std::int64_t rows = cache.shape[1];
    if (rows == 0 || slot < 0 || slot / rows >= cache.shape[0]) return {};
    return {slot / rows, slot % rows};
}

/// The row of the cache for a position of sequence `b`; none if there is no such position.
CacheRow row_of_position(const AppendArgs& a, std::int64_t b, std::int64_t position) {
    const std::int64_t rows = a.k_cache.shape[1];
    if (position < 0 || rows == 0) return {};
    if (a.page_table.given()) {
        if (position / rows >= a.page_table.shape[1]) return {};
        const std::int32_t page = *a.page_table.at<const std::int32_t>(b, position / rows);
        if (page < 0 || page >= a.k_cache.shape[0]) return {};
        return {page, position % rows};
    }
    const std::int64_t slot = a.cache_batch_index.given() ? *a.cache_batch_index.at<const std::int32_t>(b) : b;
    if (slot < 0 || slot >= a.k_cache.shape[0] || position >= rows) return {};
    return {slot, position};
}

/// Calls body(row, sequence, index in it) for the rows of k of every sequence.
template <class Body>
void for_each_row(const AppendArgs& a, const Body& body) {
    for (std::int64_t b = 0; b < a.kv_lengths.shape[0]; ++b) {
        const std::int64_t first = a.k.rank == 4 ? b * a.k.shape[1] : cu_seqlen(a.cu_seqlens_k, b);
        const std::int64_t end = a.k.rank == 4 ? first + a.k.shape[1] : cu_seqlen(a.cu_seqlens_k, b + 1);
        for (std::int64_t row = first; row < end; ++row) body(row, b, row - first);
    }
}

void expect_position(const AppendArgs& a, const char* name, std::int64_t row, std::int64_t position) {
    if (!a.rotary_cos.given() || (position >= 0 && position < a.rotary_cos.shape[0])) return;
    invalid(name, fmt::format("expected positions from 0 to {}, those of rotary_cos, got {} for row {}",
                              a.rotary_cos.shape[0] - 1, position, row));
}

/// Refuses a call in which a new row of K and a new row of V have common memory. K and V of a cache may be overlapping
/// views of one storage, as long as the rows that the call writes are distinct.
void expect_distinct_rows(const AppendArgs& a, const std::vector<CacheRow>& rows_of_cache) {
    if (!may_overlap(a.k_cache, a.v_cache)) return;
    struct Row {
        std::int64_t lowest, highest;
        bool of_v;
        TensorView view;
        std::size_t row;
    };
    std::vector<Row> rows;
    for (std::size_t r = 0; r < rows_of_cache.size(); ++r) {
        if (!rows_of_cache[r].exists()) continue;
        for (const TensorView* cache : {&a.k_cache, &a.v_cache}) {
            const TensorView view = row_of_cache(*cache, rows_of_cache[r]);
            const auto begin = reinterpret_cast<std::intptr_t>(view.data);
            std::int64_t lowest = begin, highest = begin;
            for (std::size_t d = 0; d < 2; ++d) {
                const std::int64_t reach = (view.shape[d] - 1) * view.strides[d] * size_of(view.dtype);
                (reach < 0 ? lowest : highest) += reach;
            }
            rows.push_back({lowest, highest, cache == &a.v_cache, view, r});
        }
    }
    std::sort(rows.begin(), rows.end(), [](const Row& x, const Row& y) { return x.lowest < y.lowest; });
    for (std::size_t i = 0; i < rows.size(); ++i) {
        for (std::size_t j = i + 1; j < rows.size() && rows[j].lowest <= rows[i].highest; ++j) {
            if (rows[i].of_v == rows[j].of_v || !may_overlap(rows[i].view, rows[j].view)) continue;
            const Row& of_k = rows[i].of_v ? rows[j] : rows[i];
            const Row& of_v = rows[i].of_v ? rows[i] : rows[j];
            invalid("v_cache",
                    fmt::format("expected memory of its own for each new row, got row {} of v in the memory of "
                                "row {} of k",
                                of_v.row, of_k.row));
        }
    }
}

}  // namespace

void check_append(const AppendArgs& args, const AppendOptions& options) { Checks(args).run(options); }

AppendedRows checked_rows(const AppendArgs& args, const AppendOptions& options) {
    check_append(args, options);
    AppendedRows rows;
    rows.of_keys.resize(static_cast<std::size_t>(rows_of("k", args.k).count));
    const auto to = [&](std::int64_t row) -> CacheRow& { return rows.of_keys[static_cast<std::size_t>(row)]; };
    if (args.slot_mapping.given()) {
        for (std::int64_t row = 0; row < args.slot_mapping.shape[0]; ++row)
            to(row) = row_of_slot(args.k_cache, cu_seqlen(args.slot_mapping, row));
    } else {
        for_each_row(args, [&](std::int64_t row, std::int64_t b, std::int64_t index) {
            const std::int64_t position = *args.kv_lengths.at<const std::int32_t>(b) + index;
            to(row) = row_of_position(args, b, position);
            to(row).position = position;
        });
    }
    for (std::size_t r = 0; r < rows.of_keys.size(); ++r) {
        const auto row = static_cast<std::int64_t>(r);
        if (args.positions.given()) to(row).position = cu_seqlen(args.positions, row);
        if (to(row).exists()) {
            expect_position(args, args.positions.given() ? "positions" : "kv_lengths", row, to(row).position);
        }
    }
    expect_distinct_rows(args, rows.of_keys);
    if (!args.q.given()) return rows;
    rows.of_queries.resize(static_cast<std::size_t>(rows_of("q", args.q).count));
    for (std::size_t r = 0; r < rows.of_queries.size() && args.rotary_cos.given(); ++r) {
        const auto row = static_cast<std::int64_t>(r);
        if (args.q_positions.given()) {
            rows.of_queries[r] = cu_seqlen(args.q_positions, row);
        } else {  // that of a key which is not written may be anything
            const std::int64_t last = std::max<std::int64_t>(args.rotary_cos.shape[0] - 1, 0);
            rows.of_queries[r] = std::clamp<std::int64_t>(rows.of_keys[r].position, 0, last);
        }
        expect_position(args, args.q_positions.given() ? "q_positions" : "rotary_cos", row, rows.of_queries[r]);
    }
    return rows;
}

}  // namespace tessera
