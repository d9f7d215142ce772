// SPDX-License-Identifier: Apache-2.0
//
// append(): new rows of K and V go into a cache, and queries are turned with them. On the CPU; cuda/append for CUDA.
#include "tessera/append.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "append_checks.hpp"
#include "core/float_mode.hpp"
#include "core/numeric.hpp"
#include "parallel.hpp"
#include "registry.hpp"

namespace tessera {
namespace {

/// One head of one row in memory.
struct HeadRow {
    std::byte* data;
    DType dtype;
    std::int64_t stride;

    void* at(std::int64_t c) const { return data + c * stride * size_of(dtype); }
    double load(std::int64_t c) const { return load_as_double(at(c), dtype); }
    void store(std::int64_t c, double value) const { store_from_double(at(c), dtype, value); }
};

/// Row `row` of a dense or ragged tensor; rows are numbered over all sequences.
HeadRow head_row(const TensorView& t, std::int64_t row, std::int64_t head) {
    const bool dense = t.rank == 4;
    const std::int64_t before =
        dense ? row / t.shape[1] * t.strides[0] + row % t.shape[1] * t.strides[1] : row * t.strides[0];
    const std::size_t of_head = dense ? 2 : 1;
    return {static_cast<std::byte*>(t.data) + (before + head * t.strides[of_head]) * size_of(t.dtype), t.dtype,
            t.strides[of_head + 1]};
}

HeadRow cache_row(const TensorView& cache, const CacheRow& to, std::int64_t head) {
    return {
        static_cast<std::byte*>(cache.data) +
            (to.index * cache.strides[0] + to.row * cache.strides[1] + head * cache.strides[2]) * size_of(cache.dtype),
        cache.dtype, cache.strides[3]};
}

/// The norm and the rotary embedding of rows of q or of k.
class Transform {
 public:
    Transform(const AppendArgs& args, const AppendOptions& options, const TensorView& norm, std::int64_t dim)
        : args_(args), options_(options), norm_(norm), dim_(dim) {}

    bool changes() const { return norm_.given() || args_.rotary_cos.given(); }

    /// from and to may be one row. x: memory for a row.
    void apply(const HeadRow& from, const HeadRow& to, std::int64_t position, std::vector<double>& x) const {
        x.resize(static_cast<std::size_t>(dim_));
        for (std::int64_t c = 0; c < dim_; ++c) x[static_cast<std::size_t>(c)] = from.load(c);
        if (norm_.given()) normalise(x);
        if (args_.rotary_cos.given()) rotate(x, position);
        for (std::int64_t c = 0; c < dim_; ++c) to.store(c, x[static_cast<std::size_t>(c)]);
    }

 private:
    static double element(const TensorView& t, std::int64_t a, std::int64_t b = 0) {
        const std::int64_t offset = a * t.strides[0] + (t.rank > 1 ? b * t.strides[1] : 0);
        return load_as_double(static_cast<std::byte*>(t.data) + offset * size_of(t.dtype), t.dtype);
    }

    void normalise(std::vector<double>& x) const {
        double squares = 0;
        for (const double value : x) squares += value * value;
        const double factor = 1 / std::sqrt(squares / static_cast<double>(dim_) + options_.norm_eps);
        for (std::int64_t c = 0; c < dim_; ++c) x[static_cast<std::size_t>(c)] *= factor * element(norm_, c);
    }

    void rotate(std::vector<double>& x, std::int64_t position) const {
        const std::int64_t pairs = args_.rotary_cos.shape[1];
        for (std::int64_t n = 0; n < pairs; ++n) {
            const auto a = static_cast<std::size_t>(options_.rotary_interleaved ? 2 * n : n);
            const std::size_t b = a + static_cast<std::size_t>(options_.rotary_interleaved ? 1 : pairs);
            const double cos = element(args_.rotary_cos, position, n);
            const double sin = element(args_.rotary_sin, position, n);
            const double first = x[a];
            x[a] = first * cos - x[b] * sin;
            x[b] = first * sin + x[b] * cos;
        }
    }

    const AppendArgs& args_;
    const AppendOptions& options_;
    const TensorView& norm_;
    std::int64_t dim_;
};

void copy_row(const HeadRow& from, const HeadRow& to, std::int64_t dim) {
    const auto bytes = static_cast<std::size_t>(size_of(from.dtype));
    if (from.stride == 1 && to.stride == 1) {
        std::memcpy(to.data, from.data, static_cast<std::size_t>(dim) * bytes);
        return;
    }
    for (std::int64_t c = 0; c < dim; ++c) std::memcpy(to.at(c), from.at(c), bytes);
}

/// A call whose tensors are checked. A task is one head of K and V, or one of Q: its rows are written in ascending
/// order.
class Appending {
 public:
    Appending(const AppendArgs& args, const AppendOptions& options, const AppendedRows& rows)
        : args_(args),
          rows_(rows),
          of_k_(args, options, args.k_norm, args.k.shape[static_cast<std::size_t>(args.k.rank) - 1]),
          of_q_(args, options, args.q_norm, args.k.shape[static_cast<std::size_t>(args.k.rank) - 1]) {}

    std::int64_t tasks() const { return key_heads() + query_heads(); }

    void run(std::int64_t task) const {
        if (task < key_heads()) append_head(task);
        else rotate_head(task - key_heads());
    }

 private:
    static std::int64_t heads(const TensorView& t) { return t.shape[t.rank == 4 ? 2 : 1]; }
    std::int64_t key_heads() const { return heads(args_.k); }
    std::int64_t query_heads() const { return args_.q.given() ? heads(args_.q) : 0; }

    void append_head(std::int64_t head) const {
        const std::int64_t dim = args_.k_cache.shape[3];
        std::vector<double> memory;
        for (std::size_t r = 0; r < rows_.of_keys.size(); ++r) {
            const CacheRow& to = rows_.of_keys[r];
            if (!to.exists()) continue;
            const auto row = static_cast<std::int64_t>(r);
            const HeadRow k = head_row(args_.k, row, head);
            if (of_k_.changes()) of_k_.apply(k, cache_row(args_.k_cache, to, head), to.position, memory);
            else copy_row(k, cache_row(args_.k_cache, to, head), dim);
            copy_row(head_row(args_.v, row, head), cache_row(args_.v_cache, to, head), args_.v_cache.shape[3]);
        }
    }

    void rotate_head(std::int64_t head) const {
        std::vector<double> memory;
        for (std::size_t r = 0; r < rows_.of_queries.size(); ++r) {
            const HeadRow from = head_row(args_.q, static_cast<std::int64_t>(r), head);
            const HeadRow to = head_row(args_.q_out, static_cast<std::int64_t>(r), head);
            if (of_q_.changes()) of_q_.apply(from, to, rows_.of_queries[r], memory);
            else copy_row(from, to, args_.k_cache.shape[3]);
        }
    }

    const AppendArgs& args_;
    const AppendedRows& rows_;
    Transform of_k_;
    Transform of_q_;
};

/// Threads that the elements are worth: a thread starts within microseconds, and an element takes some nanoseconds.
int worthwhile_threads(const AppendArgs& args, int most) {
    constexpr std::int64_t kElementsPerThread = 16'384;
    const std::int64_t elements = args.k.size() + args.v.size() + (args.q.given() ? args.q.size() : 0);
    const int threads = most == 0 ? available_threads() : most;
    return static_cast<int>(std::clamp<std::int64_t>(elements / kElementsPerThread, 1, threads));
}

}  // namespace

void append(const AppendArgs& args, const AppendOptions& options, const Execution& how) {
    if (args.k.given() && args.k.device.type == DeviceType::cuda) {
        check_append(args, options);
        append_on_cuda(args, options, how.stream);
        return;
    }
    const DefaultFloatMode mode;
    const AppendedRows rows = checked_rows(args, options);
    const Appending appending(args, options, rows);
    const ParallelFor loop = how.parallel_for ? how.parallel_for : ParallelFor(default_parallel_for);
    loop(appending.tasks(), worthwhile_threads(args, options.threads), [&](std::int64_t task, int) {
        const DefaultFloatMode mode_of_worker;
        appending.run(task);
    });
}

}  // namespace tessera
