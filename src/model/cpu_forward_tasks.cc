// SPDX-License-Identifier: Apache-2.0
//
// The tasks of fa2's forward on a CPU: cpu/fa2/matrix/forward.cc, cpu/fa2/simd/forward.cc.
#include <algorithm>

#include "core/split.hpp"
#include "model/cpu.hpp"
#include "model/cpu_tasks.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

using schedule::ceil_div;

// Up to this many keys, the scores of a step on a matrix unit (32 queries) fit the L1 cache. With more keys the softmax
// is slower by kSpilled (bench/results/cpu/rounds_95001_xeon16.jsonl).
constexpr std::int64_t kKeysInCache = 384;
constexpr double kSpilled = 1.15;

/// The tasks of the forward, each with some panels of queries and all keys or one chunk of them.
class ForwardTasks {
 public:
    ForwardTasks(const schedule::Workload& w, const CpuWorkSplit& work_split)
        : p_(w.problem), w_(w), work_split_(work_split), heads_(p_.batch * p_.heads_kv) {
        if (work_split.on_matrix_unit) cut_for_matrix_unit();
        else cut_for_simd();
    }

    double count() const {
        return static_cast<double>(heads_) * static_cast<double>(ceil_div(panels_, per_task_)) *
               static_cast<double>(split_ ? chunks_ : 1);
    }

    Loop loop() const {
        Loop loop;
        for (const auto& [len_q, len_kv] : lengths_of(w_)) {
            const std::vector<Amounts> own = tasks_of_head(len_q, len_kv);
            const auto n = static_cast<std::int64_t>(own.size());
            const auto heads = p_.heads_kv;
            if (p_.mask.trivial() || split_) {
                for (std::int64_t h = 0; h < heads; ++h) loop.tasks.insert(loop.tasks.end(), own.begin(), own.end());
            } else {  // the last panels of all heads first
                for (std::int64_t i = n; i-- > 0;)
                    loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(heads),
                                      own[static_cast<std::size_t>(i)]);
            }
        }
        return loop;
    }

 private:
    std::int64_t tasks(std::int64_t per_task) const {
        return heads_ * ceil_div(panels_, per_task) * (split_ ? chunks_ : 1);
    }

    /// cpu/fa2/matrix/memory.hpp
    void cut_for_matrix_unit() {
        using namespace matrix_split;
        block_q_ = kMatrixPanel;
        count_panels();
        per_task_ = kMaxPanels;
        const auto too_few = [&](std::int64_t of_thread) {
            return work_split_.threads > 1 && tasks(per_task_) < of_thread * work_split_.threads;
        };
        split_ = chunks_ > 1 && too_few(kTasksPerThread);
        if (chunks_ <= 1) {
            while (per_task_ > 1 && too_few(kTasksOfShortRows)) per_task_ /= 2;
            const auto time = [&](std::int64_t n) { return ceil_div(tasks(n), work_split_.threads) * n; };
            while (per_task_ < kMaxPanels && time(2 * per_task_) <= time(per_task_)) per_task_ *= 2;
        }
        while (chunks_ > 1 && per_task_ > 1 && too_few(kTasksPerThread)) per_task_ /= 2;
        per_task_ = std::clamp<std::int64_t>(panels_, 1, per_task_);
    }

    /// cpu/fa2/simd/forward.cc
    void cut_for_simd() {
        using namespace simd_split;
        block_q_ = std::min(w_.tile.block_q, round_up(std::max<std::int64_t>(p_.len_q, 1), kLanes));
        count_panels();
        const std::int64_t query_heads = p_.batch * p_.heads_q;
        while (block_q_ >= 2 * kLanes && 2 * query_heads * (panels_ / p_.group()) * chunks_ <= work_split_.threads) {
            block_q_ = ceil_div(block_q_, 2 * kLanes) * kLanes;
            count_panels();
        }
        per_task_ = kMaxPanels;
        while (per_task_ > 1 && heads_ * panels_ < per_task_ * work_split_.threads * kTasksPerThread) per_task_ /= 2;
        split_ = work_split_.threads > 1 && chunks_ > 1 && heads_ * panels_ < 2 * work_split_.threads;
    }

    void count_panels() {
        panels_ = p_.group() * std::max<std::int64_t>(1, ceil_div(p_.len_q, block_q_));
        chunks_ = std::max<std::int64_t>(1, ceil_div(p_.len_kv, kSplitKeys));
    }

    std::vector<Amounts> tasks_of_head(std::int64_t len_q, std::int64_t len_kv) const {
        const Band band = p_.mask.bind(len_q, len_kv);
        const std::int64_t of_query_head = ceil_div(len_q, block_q_);
        const std::int64_t all = p_.group() * of_query_head;
        std::vector<Amounts> result;
        for (std::int64_t first = 0; first < all; first += per_task_) {
            const Range panels{first, std::min(all, first + per_task_)};
            for (std::int64_t key = 0; key < len_kv; key += split_ ? kSplitKeys : len_kv) {
                const Range keys{key, split_ ? std::min(len_kv, key + kSplitKeys) : len_kv};
                result.push_back(task(band, panels, of_query_head, keys));
            }
        }
        return result;
    }

    Amounts task(const Band& band, const Range& panels, std::int64_t of_query_head, const Range& keys) const {
        Amounts sum;
        Range seen_by_any{keys.end, keys.begin};
        for (std::int64_t i = panels.begin; i < panels.end; ++i) {
            const std::int64_t q = i % of_query_head * block_q_;
            const Range queries{q, std::min(band.len_q, q + block_q_)};
            const Range seen = overlap(band.kv_range(queries.begin, queries.end), keys);
            if (work_split_.on_matrix_unit)  // Q goes in, O comes out
                sum.packed += static_cast<double>(queries.size() * (p_.head_dim + p_.head_dim_v));
            if (seen.begin >= seen.end) continue;
            seen_by_any = {std::min(seen_by_any.begin, seen.begin), std::max(seen_by_any.end, seen.end)};
            add_panel(band, queries, seen, sum);
        }
        if (!work_split_.on_matrix_unit || seen_by_any.begin >= seen_by_any.end) return sum;
        const Range packed{seen_by_any.begin / kSplitKeys * kSplitKeys,
                           std::min(keys.end, round_up(seen_by_any.end, kSplitKeys))};
        sum.packed += static_cast<double>(packed.size() * ((keys_in_place() ? 0 : p_.head_dim) + p_.head_dim_v));
        return sum;
    }

    void add_panel(const Band& band, const Range& queries, const Range& seen, Amounts& sum) const {
        const std::int64_t lanes = round_up(queries.size(), kLanes);
        if (!work_split_.on_matrix_unit) {
            const std::int64_t elements = lanes * (seen.end - seen.begin / w_.tile.block_kv * w_.tile.block_kv);
            sum.exps += static_cast<double>(elements);
            sum.flop += static_cast<double>(elements * 2 * (p_.head_dim + p_.head_dim_v));
            return;
        }
        for (std::int64_t block = seen.begin / kSplitKeys * kSplitKeys; block < seen.end; block += kSplitKeys) {
            const Range keys{std::max(block, seen.begin / kStrip * kStrip), std::min(block + kSplitKeys, seen.end)};
            const std::int64_t elements = lanes * round_up(keys.size(), kStrip);
            const bool plain = keys.size() % kStrip == 0 &&
                               band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::full;
            sum.exps += static_cast<double>(elements) * (keys.size() > kKeysInCache ? kSpilled : 1);
            sum.masked += plain ? 0 : static_cast<double>(elements);
            // In bf16 the sum of the rounded weights takes one more tile of O.
            const std::int64_t columns =
                round_up(p_.head_dim, kDeep) + round_up(p_.head_dim_v, kRows) + (work_split_.parts == 1 ? kRows : 0);
            sum.flop += static_cast<double>(elements * 2 * columns);
        }
    }

    /// Does the kernel read the rows of K in place instead of packing them (cpu/steps/matrix/layout.hpp)?
    bool keys_in_place() const {
        constexpr std::int64_t kFarthest = 512;
        return work_split_.parts == 1 && p_.head_dim % kDeep == 0 && p_.heads_kv * p_.head_dim <= kFarthest;
    }

    static constexpr std::int64_t kStrip = 32, kDeep = 32, kRows = 16;  // tiles of the matrix unit
    const Problem& p_;
    const schedule::Workload& w_;
    CpuWorkSplit work_split_;
    std::int64_t heads_;  // kv heads of all sequences
    std::int64_t block_q_ = 1, panels_ = 1, chunks_ = 1, per_task_ = 1;
    bool split_ = false;
};

}  // namespace

std::vector<Loop> forward_loops(const schedule::Workload& workload, const CpuWorkSplit& work_split) {
    const ForwardTasks tasks(workload, work_split);
    if (tasks.count() > kMostTasks) return {};
    return {tasks.loop()};
}

}  // namespace tessera::model
