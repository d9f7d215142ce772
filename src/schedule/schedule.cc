// SPDX-License-Identifier: Apache-2.0
#include "schedule/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/invalid.hpp"
#include "schedule/emit.hpp"

namespace tessera::schedule {
namespace {

void validate(const Workload& w) {
    w.problem.validate();
    if (!countable(w.problem))
        invalid("len_kv",
                fmt::format("expected fewer scores, since their FLOP or bytes exceed 2^62, got {} queries x {} keys",
                            w.problem.len_q, w.problem.len_kv));
    if (w.tile.block_q < 1) invalid("block_q", fmt::format("expected 1 or more, got {}", w.tile.block_q));
    if (w.tile.block_kv < 1) invalid("block_kv", fmt::format("expected 1 or more, got {}", w.tile.block_kv));
    if (w.residency.tiles_at_once < 1)
        invalid("tiles_at_once", fmt::format("expected 1 or more, got {}", w.residency.tiles_at_once));
    if (w.sequences.empty()) return;
    if (!w.problem.ragged)
        invalid("sequences", fmt::format("expected none for a Problem that is not ragged, got {}", w.sequences.size()));
    std::int64_t q = 0;
    std::int64_t kv = 0;
    for (const auto& [len_q, len_kv] : w.sequences) q += len_q, kv += len_kv;
    if (static_cast<std::int64_t>(w.sequences.size()) != w.problem.batch || q != w.problem.total_q ||
        kv != w.problem.total_kv) {
        invalid("sequences",
                fmt::format("expected {} of {} queries and {} keys in all, got {} of {} and {}", w.problem.batch,
                            w.problem.total_q, w.problem.total_kv, w.sequences.size(), q, kv));
    }
}

}  // namespace

bool countable(const Problem& p) {
    // 16 (d + d_v) per pair bounds every count. Sizes of 0 count as 1, since the others may be large.
    const auto at_least_1 = [](std::int64_t n) { return static_cast<double>(std::max<std::int64_t>(n, 1)); };
    const double rows = p.ragged ? at_least_1(p.total_q) : at_least_1(p.batch) * at_least_1(p.len_q);
    const double pairs = rows * at_least_1(std::max(p.heads_q, p.heads_kv)) * at_least_1(p.len_kv);
    return pairs * 16 * static_cast<double>(p.head_dim + p.head_dim_v) <= 4.6e18;
}

std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, std::int64_t>> distinct_sequences(const Workload& w) {
    const Problem& p = w.problem;
    if (!p.ragged) return {{{p.len_q, p.len_kv}, p.batch}};
    if (w.sequences.empty()) {
        if (p.batch == 0) return {};
        return {{{p.total_q / p.batch, p.total_kv / p.batch}, p.batch}};
    }
    std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, std::int64_t>> runs;
    for (const auto& lengths : w.sequences) {
        if (!runs.empty() && runs.back().first == lengths) ++runs.back().second;
        else runs.push_back({lengths, 1});
    }
    return runs;
}

const Order& order_of(Schedule schedule) {
#define TESSERA_ORDER(name) name##_order(),
    static const Order orders[] = {TESSERA_SCHEDULES(TESSERA_ORDER)};
#undef TESSERA_ORDER
    return orders[static_cast<std::size_t>(schedule)];
}

std::int64_t no_workspace(const Workload&) { return 0; }

void for_each_step(const Workload& workload, const Visitor& visit) {
    validate(workload);
    Emitter out(workload, visit);
    const Order& order = order_of(workload.schedule);
    workload.pass == Pass::forward ? order.forward_steps(out) : order.backward_steps(out);
}

Cost sum_of_steps(const Workload& workload) {
    Cost sum;
    for_each_step(workload, [&](const Step& step) {
        sum.work += step.work;
        sum.pairs += step.work.exps;
        if (step.operation != Operation::scores) return;
        ++(step.coverage == Coverage::full ? sum.full : sum.partial);
        sum.elements += step.queries.size() * step.keys.size();
    });
    for_each_kv_head(workload, true,
                     [&](const KvHead& kv) { sum.skipped += kv.group * kv.grid.rows() * kv.grid.columns(); });
    sum.skipped -= sum.full + sum.partial;
    return sum;
}

Cost cost(const Workload& workload) {
    validate(workload);
    const Order& order = order_of(workload.schedule);
    return workload.pass == Pass::forward ? order.forward_cost(workload) : order.backward_cost(workload);
}

Footprint footprint(const Workload& workload) {
    const Problem& p = workload.problem;
    const Sizes z(p);
    const std::int64_t queries = p.rows_q() * p.heads_q;
    const std::int64_t keys = p.rows_kv() * p.heads_kv;
    const bool forward = workload.pass == Pass::forward;
    Footprint bytes;
    bytes.tensors = queries * (z.q + z.v + kSum) + keys * (z.q + z.v);
    if (!forward) bytes.tensors += queries * (z.v + z.q) + keys * (z.q + z.v);  // dO, dQ; dK, dV
    const Order& order = order_of(workload.schedule);
    bytes.workspace = forward ? order.forward_workspace(workload) : order.backward_workspace(workload);
    return bytes;
}

}  // namespace tessera::schedule
