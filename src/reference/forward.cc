// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "core/arena.hpp"
#include "reference/backend.hpp"
#include "reference/head.hpp"

namespace tessera::reference {
namespace {

constexpr std::int64_t kRowsPerTask = 256;

/// Memory of one worker, all fp64.
struct Scratch {
    double* k;        // [len_kv, head_dim]
    double* v;        // [len_kv, head_dim_v]
    double* weights;  // [len_kv]
    double* q_row;    // [head_dim]

    Scratch(Arena& arena, const Problem& p)
        : k(arena.take<double>(p.len_kv * p.head_dim)),
          v(arena.take<double>(p.len_kv * p.head_dim_v)),
          weights(arena.take<double>(p.len_kv)),
          q_row(arena.take<double>(p.head_dim)) {}
};

/// O[i] = sum_j dropout(P[i, j]) V[j], LSE[i] = log (sum_j exp(S[i, j]) + exp(sink)).
void forward_row(const Head& head, std::int64_t i, const Scratch& scratch, const HeadRows& o, const HeadRows& lse) {
    const Problem& p = head.problem;
    head.load_query(i, scratch.q_row);
    const double row_lse = head.softmax(i, scratch.q_row, scratch.weights, nullptr);
    const Range keys = head.band.row(i);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) scratch.weights[j] *= head.dropout_factor(i, j);
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        double sum = 0;
        for (std::int64_t j = keys.begin; j < keys.end; ++j) sum += scratch.weights[j] * head.v[j * p.head_dim_v + c];
        store_from_double(o.at(i, c), o.dtype, sum);
    }
    if (lse.data != nullptr) store_from_double(lse.at(i, 0), lse.dtype, row_lse);
}

}  // namespace

std::size_t forward_workspace(const Plan& plan) {
    Arena arena;
    for (int worker = 0; worker < plan.threads; ++worker) Scratch(arena, plan.problem);
    return arena.used();
}

void forward(const ForwardCall& call) {
    const Problem& p = call.plan.problem;
    const ForwardArgs& args = call.args;
    std::vector<Scratch> scratch;
    Arena arena(call.workspace);
    for (int worker = 0; worker < call.plan.threads; ++worker) scratch.emplace_back(arena, p);

    const std::int64_t blocks = (p.len_q + kRowsPerTask - 1) / kRowsPerTask;
    call.parallel_for(p.batch * p.heads_q * blocks, call.plan.threads, [&](std::int64_t task, int worker) {
        const Scratch& mine = scratch[static_cast<std::size_t>(worker)];
        const std::int64_t block = task % blocks;
        const std::int64_t query_head = task / blocks % p.heads_q;
        const Sequence sequence = sequence_of(p, args, task / blocks / p.heads_q);
        const std::int64_t end = std::min(sequence.len_q, (block + 1) * kRowsPerTask);
        if (block * kRowsPerTask >= end) return;
        const Head head(p, args, sequence, query_head, mine.k, mine.v);
        const HeadRows o = head_rows(args.o, sequence, sequence.first_q, query_head);
        const HeadRows lse = lse_rows(args.lse, sequence, query_head);
        for (std::int64_t i = block * kRowsPerTask; i < end; ++i) forward_row(head, i, mine, o, lse);
    });
}

}  // namespace tessera::reference
