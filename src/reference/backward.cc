// SPDX-License-Identifier: Apache-2.0
//
// The gradients, from their definition (FlashAttention paper, appendix B.2), row by row. P is recomputed in fp64: the
// stored O and LSE are not trusted, so a wrong forward can't hide in a backward that agrees with it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/arena.hpp"
#include "reference/backend.hpp"
#include "reference/head.hpp"

namespace tessera::reference {
namespace {

/// Memory of one worker, all fp64.
struct Scratch {
    double* k;          // [len_kv, head_dim]
    double* v;          // [len_kv, head_dim_v]
    double* dk;         // [len_kv, head_dim]
    double* dv;         // [len_kv, head_dim_v]
    double* weights;    // [len_kv], P
    double* dots;       // [len_kv], scale * q . k
    double* ds;         // [len_kv], gradient of the scores
    double* dbias_row;  // [len_kv]
    double* q_row;      // [head_dim]
    double* do_row;     // [head_dim_v]

    Scratch(Arena& arena, const Problem& p)
        : k(arena.take<double>(p.len_kv * p.head_dim)),
          v(arena.take<double>(p.len_kv * p.head_dim_v)),
          dk(arena.take<double>(p.len_kv * p.head_dim)),
          dv(arena.take<double>(p.len_kv * p.head_dim_v)),
          weights(arena.take<double>(p.len_kv)),
          dots(arena.take<double>(p.len_kv)),
          ds(arena.take<double>(p.len_kv)),
          dbias_row(arena.take<double>(p.len_kv)),
          q_row(arena.take<double>(p.head_dim)),
          do_row(arena.take<double>(p.head_dim_v)) {}
};

/// Gradient of the scores of row i, over its visible keys, and that of its sink, which is returned:
///   dP[j] = dropout[j] * dO . V[j];   dS[j] = P[j] * (dP[j] - sum_k P[k] dP[k] + dLSE)
/// The sink has the weight exp(sink - LSE) and, having no value, dP = 0.
double score_gradient(const Head& head, std::int64_t i, const HeadRows& d_o, const HeadRows& dlse, const Scratch& s) {
    const Problem& p = head.problem;
    head.load_query(i, s.q_row);
    const double row_lse = head.softmax(i, s.q_row, s.weights, s.dots);
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) s.do_row[c] = load_as_double(d_o.at(i, c), d_o.dtype);
    const Range keys = head.band.row(i);
    // A row of scores of -inf has no gradient, whatever came back for its LSE.
    const bool takes_dlse = dlse.data != nullptr && row_lse != -kInfinity;
    double delta = takes_dlse ? -load_as_double(dlse.at(i, 0), dlse.dtype) : 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        double dp = 0;
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) dp += s.do_row[c] * head.v[j * p.head_dim_v + c];
        s.ds[j] = head.dropout_factor(i, j) * dp;
        delta += s.weights[j] * s.ds[j];
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) s.ds[j] = s.weights[j] * (s.ds[j] - delta);
    return head.sink == -kInfinity ? 0 : -std::exp(head.sink - row_lse) * delta;
}

/// Adds row i to dK and dV of its kv head, and stores dQ[i] where it is wanted.
void backward_row(const Head& head, std::int64_t i, const HeadRows& d_o, const HeadRows& dlse, const HeadRows& dq,
                  const Scratch& s) {
    const Problem& p = head.problem;
    const double scale = p.effective_scale();
    score_gradient(head, i, d_o, dlse, s);
    const Range keys = head.band.row(i);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        const double weight = s.weights[j] * head.dropout_factor(i, j);
        const double dx = scale * s.ds[j] * head.score_slope(s.dots[j]);
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) s.dv[j * p.head_dim_v + c] += weight * s.do_row[c];
        for (std::int64_t c = 0; c < p.head_dim; ++c) s.dk[j * p.head_dim + c] += dx * s.q_row[c];
        s.dots[j] = dx;
    }
    if (dq.data == nullptr) return;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
        double sum = 0;
        for (std::int64_t j = keys.begin; j < keys.end; ++j) sum += s.dots[j] * head.k[j * p.head_dim + c];
        store_from_double(dq.at(i, c), dq.dtype, sum);
    }
}

void store_rows(const double* from, std::int64_t len, std::int64_t dim, const HeadRows& to) {
    for (std::int64_t j = 0; j < len; ++j) {
        for (std::int64_t c = 0; c < dim; ++c) store_from_double(to.at(j, c), to.dtype, from[j * dim + c]);
    }
}

/// dQ, dK, dV of one kv head and the query heads that share it, those that are wanted.
void backward_kv_head(const Problem& p, const BackwardArgs& args, const Sequence& sequence, std::int64_t kv_head,
                      const Scratch& s) {
    std::fill_n(s.dk, sequence.len_kv * p.head_dim, 0.0);
    std::fill_n(s.dv, sequence.len_kv * p.head_dim_v, 0.0);
    for (std::int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
        const Head head(p, args, sequence, h, s.k, s.v);
        const HeadRows d_o = head_rows(args.d_o, sequence, sequence.first_q, h);
        const HeadRows dlse = lse_rows(args.dlse, sequence, h);
        const HeadRows dq = args.dq.given() ? head_rows(args.dq, sequence, sequence.first_q, h) : HeadRows{};
        for (std::int64_t i = 0; i < sequence.len_q; ++i) backward_row(head, i, d_o, dlse, dq, s);
    }
    if (args.dk.given()) {
        store_rows(s.dk, sequence.len_kv, p.head_dim, head_rows(args.dk, sequence, sequence.first_kv, kv_head));
    }
    if (args.dv.given()) {
        store_rows(s.dv, sequence.len_kv, p.head_dim_v, head_rows(args.dv, sequence, sequence.first_kv, kv_head));
    }
}

/// One row of dbias: the sum of dS over every (batch, head, query) that reads this row of the bias, then over the keys
/// if the bias has one column only.
void bias_gradient_row(const Problem& p, const BackwardArgs& args, std::int64_t row, const Scratch& s) {
    const TensorView& dbias = args.dbias;
    const std::int64_t i_fixed = row % dbias.shape[2];
    const std::int64_t h_fixed = row / dbias.shape[2] % dbias.shape[1];
    const std::int64_t b_fixed = row / dbias.shape[2] / dbias.shape[1];
    const auto all_or = [](std::int64_t size, std::int64_t full, std::int64_t fixed) {
        return size == 1 ? Range{0, full} : Range{fixed, fixed + 1};
    };
    const Range batches = all_or(dbias.shape[0], p.batch, b_fixed);
    const Range heads = all_or(dbias.shape[1], p.heads_q, h_fixed);
    std::fill_n(s.dbias_row, p.len_kv, 0.0);
    for (std::int64_t b = batches.begin; b < batches.end; ++b) {
        const Sequence sequence = sequence_of(p, args.cu_seqlens_q, args.cu_seqlens_kv, b);
        Range rows = all_or(dbias.shape[2], sequence.len_q, i_fixed);
        rows.end = std::min(rows.end, sequence.len_q);
        for (std::int64_t h = heads.begin; h < heads.end; ++h) {
            if (rows.empty()) continue;
            const Head head(p, args, sequence, h, s.k, s.v);
            for (std::int64_t i = rows.begin; i < rows.end; ++i) {
                score_gradient(head, i, head_rows(args.d_o, sequence, sequence.first_q, h),
                               lse_rows(args.dlse, sequence, h), s);
                const Range keys = head.band.row(i);
                for (std::int64_t j = keys.begin; j < keys.end; ++j) s.dbias_row[j] += s.ds[j];
            }
        }
    }
    const HeadRows out = bias_rows(dbias, b_fixed, h_fixed);
    if (dbias.shape[3] == 1) {
        double sum = 0;
        for (std::int64_t j = 0; j < p.len_kv; ++j) sum += s.dbias_row[j];
        store_from_double(out.at(i_fixed, 0), out.dtype, sum);
        return;
    }
    for (std::int64_t j = 0; j < p.len_kv; ++j) store_from_double(out.at(i_fixed, j), out.dtype, s.dbias_row[j]);
}

/// dsinks of one head: the sum over all sequences and their queries.
void sink_gradient(const Problem& p, const BackwardArgs& args, std::int64_t h, const Scratch& s) {
    double sum = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Sequence sequence = sequence_of(p, args.cu_seqlens_q, args.cu_seqlens_kv, b);
        if (sequence.len_q == 0) continue;
        const Head head(p, args, sequence, h, s.k, s.v);
        const HeadRows d_o = head_rows(args.d_o, sequence, sequence.first_q, h);
        const HeadRows dlse = lse_rows(args.dlse, sequence, h);
        for (std::int64_t i = 0; i < sequence.len_q; ++i) sum += score_gradient(head, i, d_o, dlse, s);
    }
    const HeadRows out = sink_rows(args.dsinks, h);
    store_from_double(out.at(0, 0), out.dtype, sum);
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
    Arena arena;
    for (int worker = 0; worker < plan.threads; ++worker) Scratch(arena, plan.problem);
    return arena.used();
}

void backward(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const BackwardArgs& args = call.args;
    std::vector<Scratch> scratch;
    Arena arena(call.workspace);
    for (int worker = 0; worker < call.plan.threads; ++worker) scratch.emplace_back(arena, p);

    call.parallel_for(p.batch * p.heads_kv, call.plan.threads, [&](std::int64_t task, int worker) {
        const Sequence sequence = sequence_of(p, args.cu_seqlens_q, args.cu_seqlens_kv, task / p.heads_kv);
        backward_kv_head(p, args, sequence, task % p.heads_kv, scratch[static_cast<std::size_t>(worker)]);
    });
    if (args.dsinks.given()) {
        call.parallel_for(p.heads_q, call.plan.threads, [&](std::int64_t head, int worker) {
            sink_gradient(p, args, head, scratch[static_cast<std::size_t>(worker)]);
        });
    }
    if (!p.bias_gradient) return;
    const std::int64_t rows = args.dbias.shape[0] * args.dbias.shape[1] * args.dbias.shape[2];
    call.parallel_for(rows, call.plan.threads, [&](std::int64_t row, int worker) {
        bias_gradient_row(p, args, row, scratch[static_cast<std::size_t>(worker)]);
    });
}

}  // namespace tessera::reference
