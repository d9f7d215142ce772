// SPDX-License-Identifier: Apache-2.0
//
// fa2 backward for few queries per head, by the primitives of simd/few_queries.hpp, which read K and V in place. The
// rows of a kv head are the queries of all its query heads. A tile of keys is read once for all rows, and its dK and dV
// are complete when it is done. It leaves a sum of dQ, which store_queries() adds to those of the other tiles.
//
// Every sum has the order of backward.cc with one panel: dK and dV over the query heads, dQ over the key tiles 0, n -
// 1, n - 2, ..., 1. In 16 bits a first pass over the keys keeps P and dP, since delta is their sum.
#include "cpu/fa2/simd/few_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/fa2/simd/few_gradients_memory.hpp"
#include "cpu/fa2/simd/task.hpp"
#include "cpu/matrix/primitives.hpp"
#include "cpu/simd/few_queries.hpp"
#include "cpu/simd/masked_matmul.hpp"
#include "cpu/steps/simd/gradient.hpp"
#include "cpu/steps/sinks.hpp"

namespace tessera::cpu::fa2::simd_path {
namespace {

/// One kv head, with the queries of all its query heads as rows.
class FewTask {
 public:
    FewTask(const FewRun& run, std::int64_t kv_head, int worker)
        : run_(run),
          g_(run.layout.g),
          p_(run.call.plan.problem),
          sequence_(sequence_of(run.call, kv_head / p_.heads_kv)),
          kv_head_(kv_head % p_.heads_kv),
          memory_(run.head(run.layout.whole_heads ? worker : kv_head)),
          scratch_(run.scratch(worker)),
          head_(p_, run.call.args, sequence_, kv_head_ * p_.group()),
          panel_(0, g_.block_q, sequence_.len_q),
          rows_(p_.group() * sequence_.len_q) {
        seen_.reserve(static_cast<std::size_t>(run.layout.rows));
    }

    bool few() const { return has_few_rows(p_, sequence_); }
    std::int64_t tiles() const { return ceil_div(sequence_.len_kv, g_.block_kv); }

    /// Loads the rows and fills LSE, delta (without the sum over keys) and norm.
    void prepare() {
        for (std::int64_t i = 0; i < p_.group(); ++i) {
            const Head head(p_, run_.call.args, sequence_, head_.query_head + i);
            const std::int64_t row = i * sequence_.len_q;
            float* q = memory_.q + row * g_.k_stride;
            float* d_o = memory_.d_o + row * g_.v_stride;
            simd::load_rows(head.q, 0, sequence_.len_q, g_.head_dim, q, g_.k_stride);
            const HeadRows scaled{reinterpret_cast<char*>(memory_.q_scaled + row * g_.k_stride), DType::fp32,
                                  g_.k_stride, 1};
            simd::store_rows(q, g_.k_stride, sequence_.len_q, g_.head_dim, head.query_scale, scaled, 0);
            simd::load_rows(head_rows(run_.call.args.d_o, sequence_, sequence_.first_q, head.query_head), 0,
                            sequence_.len_q, g_.head_dim_v, d_o, g_.v_stride);
            simd::load_lse_and_delta(run_.call.args, head, g_, panel_, d_o, scratch_.o, memory_.lse + row,
                                     memory_.delta + row);
        }
        fill_norm();
    }

    /// Computes P, dP and their sums for tile j, if delta is a sum.
    void keep_weights(std::int64_t j) {
        if (!look_at(j)) return;
        const simd::RowGradients job = weights(j, kept(memory_.p, j), kept(memory_.dp, j));
        simd::row_weighted_sums(job, sums(j), sums(j) + rows_);
    }

    /// Completes delta, as GradientMemory::sum_delta() does.
    void finish_delta() const {
        for (std::int64_t r = 0; r < rows_; ++r) {
            double weights = weight_of_sink(r) * static_cast<double>(norm_of(r));
            double products = 0;
            for (std::int64_t j = 0; j < tiles(); ++j) {
                if (!sees(j)) continue;
                weights += static_cast<double>(sums(j)[r]);
                products += static_cast<double>(sums(j)[rows_ + r]);
            }
            memory_.delta[r] = static_cast<float>(memory_.delta[r] + products / (weights == 0 ? 1 : weights));
        }
    }

    /// Writes dK and dV of tile j, and keeps its sum of dQ.
    void gradients(std::int64_t j) {
        simd::RowGradients job{};
        if (look_at(j)) {
            if (run_.layout.sums_delta) job = job_of(j, kept(memory_.p, j), kept(memory_.dp, j));
            else job = weights(j, scratch_.p, scratch_.dp);
            simd::row_softmax_gradient(job, memory_.delta);
            add_to_queries(j, job);
        }
        const Range keys = keys_of(j);
        for (std::int64_t first = keys.begin; first < keys.end; first += kKeysAtOnce)
            store_keys(job, keys.begin, {first, std::min(keys.end, first + kKeysAtOnce)});
    }

    /// Adds the tiles' sums of dQ and writes dQ.
    void store_queries() const {
        if (!run_.call.args.dq.given()) return;
        const std::int64_t floats = rows_ * g_.k_stride;
        std::fill_n(scratch_.dq, floats, 0.0F);
        if (run_.layout.in_parts) std::fill_n(scratch_.dq_total, floats, 0.0);
        std::int64_t added = 0;
        for (std::int64_t round = 0; round < tiles(); ++round) {
            const std::int64_t j = round == 0 ? 0 : tiles() - round;
            if (!sees(j)) continue;
            simd::add(scratch_.dq, dq_of(j), rows_, g_.k_stride);
            if (!run_.layout.in_parts || ++added < simd::kSumTiles) continue;
            added = 0;
            simd::move_to_total(scratch_.dq, scratch_.dq_total, rows_, g_.k_stride);
        }
        if (run_.layout.in_parts) simd::add_total(scratch_.dq, scratch_.dq_total, rows_, g_.k_stride);
        for (std::int64_t i = 0; i < p_.group(); ++i) {
            simd::store_rows(scratch_.dq + i * sequence_.len_q * g_.k_stride, g_.k_stride, sequence_.len_q, g_.head_dim,
                             scale(), head_rows(run_.call.args.dq, sequence_, sequence_.first_q, head_.query_head + i),
                             0);
        }
    }

    /// Stores the values from which dsinks is computed. delta is complete at this point.
    void keep_sinks() const {
        for (std::int64_t r = 0; run_.sinks != nullptr && r < rows_; ++r) {
            const std::int64_t query_head = head_.query_head + r / sequence_.len_q;
            run_.sinks_of(sequence_.batch, query_head)[r % sequence_.len_q] = {memory_.lse[r], norm_of(r),
                                                                               memory_.delta[r]};
        }
    }

 private:
    float scale() const { return static_cast<float>(p_.effective_scale()); }
    /// The factor of P of a row.
    float norm_of(std::int64_t row) const { return memory_.norm[rows_] == 0 ? 1.0F : memory_.norm[row]; }
    /// The weight of a row's sink, without that factor.
    double weight_of_sink(std::int64_t row) const {
        if (!p_.sinks) return 0;
        const HeadRows sinks = sink_rows(run_.call.args.sinks, head_.query_head + row / sequence_.len_q);
        return sink_weight(sinks, row % sequence_.len_q, memory_.lse[row]);
    }
    float* kept(float* memory, std::int64_t j) const { return memory + j * run_.layout.rows * run_.layout.s_stride; }
    float* sums(std::int64_t j) const { return memory_.sums + j * 2 * run_.layout.rows; }
    float* dq_of(std::int64_t j) const { return memory_.dq + j * run_.layout.rows * g_.k_stride; }
    Range keys_of(std::int64_t j) const { return {j * g_.block_kv, std::min(sequence_.len_kv, (j + 1) * g_.block_kv)}; }
    Coverage coverage(const Range& keys) const { return head_.band.coverage(0, sequence_.len_q, keys.begin, keys.end); }
    /// Does some query see keys of tile j? The query heads of a group have one mask.
    bool sees(std::int64_t j) const { return rows_ > 0 && coverage(keys_of(j)) != Coverage::empty; }

    /// Fills seen_ for tile j. Returns sees(j).
    bool look_at(std::int64_t j) {
        seen_.clear();
        if (!sees(j)) return false;
        const Range keys = keys_of(j);
        for (std::int64_t row = 0; row < rows_; ++row) {
            const std::int64_t i = row % sequence_.len_q;
            const Range seen = common(head_.band.kv_range(i, i + 1), keys);
            seen_.push_back(seen.empty() ? Range{0, 0} : Range{seen.begin - keys.begin, seen.end - keys.begin});
        }
        return true;
    }

    simd::RowGradients job_of(std::int64_t j, float* p, float* dp) const {
        return {.p = p,
                .dp = dp,
                .queries = rows_,
                .stride = run_.layout.s_stride,
                .keys = keys_of(j).size(),
                .seen = seen_.data()};
    }
    simd::ElementRows keys_in(const Range& keys) const {
        return simd::element_rows(head_.k, keys.begin, keys.size(), g_.head_dim, true, scratch_.k, g_.k_stride);
    }
    void scores(const Range& keys, float* s) const {
        simd::row_scores({.q = memory_.q_scaled,
                          .q_stride = g_.k_stride,
                          .queries = rows_,
                          .k = keys_in(keys),
                          .keys = keys.size(),
                          .dim = g_.head_dim,
                          .s = s,
                          .s_stride = run_.layout.s_stride});
    }
    /// P and dP of tile j, to `p` and `dp`.
    simd::RowGradients weights(std::int64_t j, float* p, float* dp) const {
        const Range keys = keys_of(j);
        scores(keys, p);
        simd::row_scores(
            {.q = memory_.d_o,
             .q_stride = g_.v_stride,
             .queries = rows_,
             .k = simd::element_rows(head_.v, keys.begin, keys.size(), g_.head_dim_v, false, scratch_.v, g_.v_stride),
             .keys = keys.size(),
             .dim = g_.head_dim_v,
             .s = dp,
             .s_stride = run_.layout.s_stride});
        const simd::RowGradients job = job_of(j, p, dp);
        simd::row_weights_from_lse(job, memory_.lse, memory_.norm[rows_] == 0 ? nullptr : memory_.norm);
        return job;
    }

    /// Does the work of GradientMemory::fill_norm().
    void fill_norm() {
        memory_.norm[rows_] = 0;
        if (std::none_of(memory_.lse, memory_.lse + rows_, inexact_lse)) return;
        std::vector<double> weights(static_cast<std::size_t>(rows_));
        for (std::int64_t r = 0; r < rows_; ++r) weights[static_cast<std::size_t>(r)] = weight_of_sink(r);
        for (std::int64_t j = 0; j < tiles(); ++j) {
            if (!look_at(j)) continue;
            scores(keys_of(j), scratch_.p);
            const simd::RowGradients job = job_of(j, scratch_.p, scratch_.dp);
            std::fill_n(scratch_.dp, rows_ * run_.layout.s_stride, 0.0F);
            simd::row_weights_from_lse(job, memory_.lse, nullptr);
            simd::row_weighted_sums(job, scratch_.weights, scratch_.products);
            for (std::int64_t r = 0; r < rows_; ++r)
                weights[static_cast<std::size_t>(r)] += static_cast<double>(scratch_.weights[r]);
        }
        for (std::int64_t r = 0; r < rows_; ++r) {
            const double sum = weights[static_cast<std::size_t>(r)];
            memory_.norm[r] = inexact_lse(memory_.lse[r]) ? static_cast<float>(1 / sum) : 1.0F;
        }
        memory_.norm[rows_] = 1;
    }

    void add_to_queries(std::int64_t j, const simd::RowGradients& job) const {
        if (!run_.call.args.dq.given()) return;
        simd::row_values({.p = job.dp,
                          .p_stride = job.stride,
                          .queries = rows_,
                          .seen = job.seen,
                          .v = keys_in(keys_of(j)),
                          .dim = g_.head_dim,
                          .o = dq_of(j),
                          .o_stride = g_.k_stride});
    }

    /// Computes and writes dK and dV of some keys of the tile that begins at `tile`. A job without queries gives 0.
    void store_keys(const simd::RowGradients& job, std::int64_t tile, const Range& keys) const {
        const Coverage seen = job.queries == 0 ? Coverage::empty : coverage(keys);
        const BackwardArgs& args = run_.call.args;
        const auto store = [&](const TensorView& to, const float* weights, const float* rows, std::int64_t dim,
                               std::int64_t stride, float factor, float* sum) {
            if (!to.given()) return;
            if (seen == Coverage::empty) std::fill_n(sum, keys.size() * stride, 0.0F);
            for (std::int64_t i = 0; seen != Coverage::empty && i < p_.group(); ++i) {
                const std::int64_t row = i * sequence_.len_q;
                simd::matmul_over_queries({.m = keys.size(),
                                           .n = stride,
                                           .k = sequence_.len_q,
                                           .a = weights + row * job.stride + keys.begin - tile,
                                           .a_row = 1,
                                           .a_k = job.stride,
                                           .b = rows + row * stride,
                                           .b_stride = stride,
                                           .c = sum,
                                           .c_stride = stride,
                                           .into = i == 0 ? simd::Into::overwrite : simd::Into::add},
                                          {head_.band, 0, keys.begin}, seen);
            }
            simd::store_rows(sum, stride, keys.size(), dim, factor,
                             head_rows(to, sequence_, sequence_.first_kv, kv_head_), keys.begin);
        };
        store(args.dv, job.p, memory_.d_o, g_.head_dim_v, g_.v_stride, 1.0F, scratch_.dv);
        store(args.dk, job.dp, memory_.q, g_.head_dim, g_.k_stride, scale(), scratch_.dk);
    }

    const FewRun& run_;
    const Geometry& g_;
    const Problem& p_;
    Sequence sequence_;
    std::int64_t kv_head_;
    HeadMemory memory_;
    FewScratch scratch_;
    Head head_;    // the first query head
    Panel panel_;  // its queries
    std::int64_t rows_;
    std::vector<Range> seen_;  // of each row, in the current tile
};

/// Calls body(task) for every kv head whose sequence has few queries.
template <class Body>
void for_each_head(const FewRun& run, const Body& body) {
    const Problem& p = run.call.plan.problem;
    run.call.parallel_for(p.batch * p.heads_kv, run.layout.threads, [&](std::int64_t kv_head, int worker) {
        FewTask task(run, kv_head, worker);
        if (task.few()) body(task);
    });
}

/// Calls body(task, tile) for every tile of their keys.
template <class Body>
void for_each_tile(const FewRun& run, const Body& body) {
    const FewLayout& layout = run.layout;
    const HeadTasks tasks(run.call, run.call.plan.problem.heads_kv, run.ends, [&](const Sequence& m) {
        const bool few = has_few_rows(run.call.plan.problem, m);
        const std::int64_t tiles = few ? ceil_div(m.len_kv, layout.g.block_kv) : 0;
        return ceil_div(tiles, layout.tiles_per_task);
    });
    run.call.parallel_for(tasks.total(), layout.threads, [&](std::int64_t index, int worker) {
        const HeadTask at = tasks.by_head(index);
        FewTask task(run, at.head, worker);
        const std::int64_t end = std::min(task.tiles(), (at.index + 1) * layout.tiles_per_task);
        for (std::int64_t j = at.index * layout.tiles_per_task; j < end; ++j) body(task, j);
    });
}

/// Counts the tiles of the plan.
void count(const FewRun& run) {
    TileTally tally(run.call.counters);
    const Problem& p = run.call.plan.problem;
    const std::int64_t block_kv = run.layout.g.block_kv;
    for (std::int64_t head = 0; head < p.batch * p.heads_q; ++head) {
        const Head of = head_of(run.call, head);
        const std::int64_t queries = of.sequence.len_q;
        for (std::int64_t k = 0; queries > 0 && k < of.sequence.len_kv; k += block_kv) {
            const std::int64_t end = std::min(of.sequence.len_kv, k + block_kv);
            const Coverage coverage = of.band.coverage(0, queries, k, end);
            if (coverage == Coverage::empty) tally.skipped(1, 0);
            else tally.ran(coverage, queries * (end - k));
        }
    }
}

}  // namespace

bool takes_few_gradients(const Plan& plan) {
    const Problem& p = plan.problem;
    const bool on_amx = matrix::packing_pays(p.dtype) && matrix::unit() == matrix::Unit::amx;
    const bool scaled_only = p.softcap == 0 && !p.alibi && !p.bias && !p.bias_gradient &&
                             !(p.dropout.probability > 0) && std::abs(p.effective_scale()) <= 1;
    return !on_amx && scaled_only && p.group() > 0 && p.group() <= kMostFewRows &&
           plan.tile.block_q >= std::min(p.len_q, kFewQueries) && plan.tile.block_kv <= simd::kMostRowKeys;
}

bool takes_only_few_gradients(const Plan& plan) {
    const Problem& p = plan.problem;
    return p.len_q <= kFewQueries && p.group() * p.len_q <= kMostFewRows && takes_few_gradients(plan);
}

std::size_t few_gradients_workspace(const Plan& plan) {
    Arena arena;
    FewRun({.plan = plan}, arena);
    return arena.used();
}

void few_gradients(const BackwardCall& call) {
    Arena arena(call.workspace);
    const FewRun run(call, arena);
    if (run.layout.whole_heads) {
        for_each_head(run, [&](FewTask& task) {
            task.prepare();
            for (std::int64_t j = 0; run.layout.sums_delta && j < task.tiles(); ++j) task.keep_weights(j);
            if (run.layout.sums_delta) task.finish_delta();
            for (std::int64_t j = 0; j < task.tiles(); ++j) task.gradients(j);
            task.store_queries();
            task.keep_sinks();
        });
    } else {
        for_each_head(run, [](FewTask& task) { task.prepare(); });
        if (run.layout.sums_delta) {
            for_each_tile(run, [](FewTask& task, std::int64_t j) { task.keep_weights(j); });
            for_each_head(run, [](FewTask& task) { task.finish_delta(); });
        }
        for_each_tile(run, [](FewTask& task, std::int64_t j) { task.gradients(j); });
        for_each_head(run, [](FewTask& task) {
            task.store_queries();
            task.keep_sinks();
        });
    }
    if (run.sinks != nullptr) {
        store_sink_gradients(call, [&](const Head& head, std::int64_t i) {
            return run.sinks_of(head.sequence.batch, head.query_head)[i];
        });
    }
    if (call.counters != nullptr) count(run);
}

}  // namespace tessera::cpu::fa2::simd_path
