// SPDX-License-Identifier: Apache-2.0
//
// The tasks of fa2's backward on a CPU.
#include <algorithm>

#include "core/split.hpp"
#include "model/cpu.hpp"
#include "model/cpu_tasks.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

using schedule::ceil_div;

/// The backward on a matrix unit: cpu/fa2/matrix/backward.cc.
class MatrixBackward {
 public:
    MatrixBackward(const schedule::Workload& w, const CpuWorkSplit& work_split)
        : p_(w.problem), w_(w), work_split_(work_split), heads_(p_.batch * p_.heads_q) {
        const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p_.len_kv, kBlockKv));
        const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(p_.len_q, kBlockQ));
        const std::int64_t wanted =
            ceil_div(matrix_split::kStripesPerThread * work_split.threads, std::max<std::int64_t>(1, heads_));
        stripes_ = work_split.threads == 1 ? 1 : std::min({wanted, blocks, tiles});
        striped_ = (heads_ >= work_split.threads ||
                    heads_ * stripes_ >= matrix_split::kStripesPerThread * work_split.threads) &&
                   sums_fit();
    }

    double count() const {
        const std::int64_t strips = ceil_div(p_.len_kv, kTile) * ceil_div(p_.len_q, kBlockQ);
        return static_cast<double>(heads_) * static_cast<double>(std::max<std::int64_t>(1, strips)) / 16;
    }

    std::vector<Loop> loops() const {
        std::vector<Loop> all;
        all.push_back({.tasks = {packing()}, .even = true});
        if (work_split_.parts == 1) all.push_back(deltas());
        if (striped_) all.push_back(stripes());
        else all.push_back(separate_passes());
        return all;
    }

 private:
    static constexpr std::int64_t kBlockQ = matrix_split::kBlockQ, kBlockKv = matrix_split::kBlockKv;
    static constexpr std::int64_t kTile = 32, kRows = 16;
    enum class Gradients { all, keys, queries, delta };

    bool sums_fit() const {
        const double dims = 4 * static_cast<double>(p_.head_dim + p_.head_dim_v);
        const double queries = static_cast<double>(heads_ * p_.len_q) * dims;
        return p_.heads_q == p_.heads_kv || static_cast<double>(heads_ * p_.len_kv) * dims <= std::max(0x1p28, queries);
    }

    double flop_of(Gradients what) const {
        const auto d = static_cast<double>(round_up(p_.head_dim, kRows)),
                   dv = static_cast<double>(round_up(p_.head_dim_v, kRows));
        const auto scores = static_cast<double>(round_up(p_.head_dim, kTile) + round_up(p_.head_dim_v, kTile));
        switch (what) {
            case Gradients::all: return 2 * (scores + dv + 2 * d);
            case Gradients::keys: return 2 * (scores + dv + d);
            case Gradients::queries: return 2 * (scores + d);
            case Gradients::delta: return 2 * scores;
        }
        return 0;
    }

    /// Amounts of a head's queries and keys, by strips of 32 keys, each with the queries of a tile that see a key of
    /// it.
    Amounts amounts(const Band& band, const Range& queries, const Range& keys, Gradients what) const {
        Amounts sum;
        for (std::int64_t key = keys.begin; key < keys.end; key += kTile) {
            const Range strip{key, std::min(key + kTile, band.len_kv)};
            const Range seen = overlap(band.q_range(strip.begin, strip.end), queries);
            for (std::int64_t q = std::max(seen.begin, queries.begin) / kBlockQ * kBlockQ; q < seen.end; q += kBlockQ) {
                const Range own = overlap(seen, {std::max(q, queries.begin), std::min(q + kBlockQ, queries.end)});
                if (own.begin >= own.end) continue;
                const Range tiles{own.begin / kTile * kTile, round_up(own.end, kTile)};
                const auto elements = static_cast<double>(kTile * tiles.size());
                const std::int64_t last = std::min(tiles.end, band.len_q);
                const bool plain =
                    last == tiles.end && band.coverage(tiles.begin, last, strip.begin, strip.end) == Coverage::full;
                sum.exps += elements;
                sum.masked += plain ? 0 : elements;
            }
        }
        sum.flop = sum.exps * flop_of(what);
        return sum;
    }

    Amounts packing() const {
        const auto queries = static_cast<double>(p_.rows_q() * p_.heads_q),
                   keys = static_cast<double>(p_.rows_kv() * p_.heads_kv);
        const auto d = static_cast<double>(p_.head_dim), dv = static_cast<double>(p_.head_dim_v);
        return {.packed = queries * 2 * (d + dv) + keys * (2 * d + dv)};
    }

    std::int64_t rows_per_task(std::int64_t heads, std::int64_t len, std::int64_t most, std::int64_t tasks) const {
        while (most > kTile && heads * ceil_div(len, most) < tasks * work_split_.threads) most /= 2;
        return most;
    }

    /// Adds tasks of `rows` queries each, the last ones of all heads first.
    void add_queries(std::int64_t rows, Gradients what, std::vector<Amounts>& tasks) const {
        for (const auto& [len_q, len_kv] : lengths_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            for (std::int64_t i = ceil_div(len_q, rows); i-- > 0;) {
                const Range queries{i * rows, std::min(len_q, (i + 1) * rows)};
                tasks.insert(tasks.end(), static_cast<std::size_t>(p_.heads_q),
                             amounts(band, queries, {0, len_kv}, what));
            }
        }
    }

    Loop deltas() const {
        Loop loop;
        add_queries(rows_per_task(heads_, p_.len_q, kBlockQ, 2), Gradients::delta, loop.tasks);
        return loop;
    }

    Loop stripes() const {
        Loop loop;
        const bool whole = stripes_ == 1 && (work_split_.threads == 1 ||
                                             heads_ >= matrix_split::kStripesPerThread * work_split_.threads);
        for (const auto& [len_q, len_kv] : lengths_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            if (whole) {
                loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(p_.heads_q),
                                  amounts(band, {0, len_q}, {0, len_kv}, Gradients::all));
                continue;
            }
            const std::int64_t tiles = ceil_div(len_q, kBlockQ);
            std::vector<std::vector<Amounts>> head;
            for (std::int64_t s = 0; s < stripes_; ++s) {
                const Range queries{tiles * s / stripes_ * kBlockQ,
                                    std::min(len_q, tiles * (s + 1) / stripes_ * kBlockQ)};
                std::vector<Amounts> blocks;
                for (std::int64_t key = 0; key < std::max<std::int64_t>(len_kv, 1); key += kBlockKv)
                    blocks.push_back(amounts(band, queries, {key, std::min(len_kv, key + kBlockKv)}, Gradients::all));
                head.push_back(std::move(blocks));
            }
            loop.stripes.insert(loop.stripes.end(), static_cast<std::size_t>(p_.heads_q), head);
        }
        return loop;
    }

    /// The loop of two kinds of tasks: dK and dV of some keys over all queries, then dQ of some queries over all keys.
    Loop separate_passes() const {
        Loop loop;
        const std::int64_t rows = rows_per_task(p_.batch * p_.heads_kv, p_.len_kv, kBlockKv, 1);
        for (const auto& [len_q, len_kv] : lengths_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            for (std::int64_t key = 0; key < len_kv; key += rows) {
                const Amounts of_head = amounts(band, {0, len_q}, {key, std::min(len_kv, key + rows)}, Gradients::keys);
                Amounts group;
                for (std::int64_t i = 0; i < p_.group(); ++i) group += of_head;
                loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(p_.heads_kv), group);
            }
        }
        add_queries(rows_per_task(heads_, p_.len_q, kBlockQ, 2), Gradients::queries, loop.tasks);
        return loop;
    }

    const Problem& p_;
    const schedule::Workload& w_;
    CpuWorkSplit work_split_;
    std::int64_t heads_;  // query heads of all sequences
    std::int64_t stripes_ = 1;
    bool striped_ = true;
};

/// The backward on the SIMD path: whole heads, or the cells of a Latin square round by round
/// (cpu/fa2/simd/backward.cc).
class SimdBackward {
 public:
    SimdBackward(const schedule::Workload& w, const CpuWorkSplit& work_split)
        : p_(w.problem), w_(w), threads_(work_split.threads), heads_(p_.batch * p_.heads_kv) {}

    double count() const {
        const double sequences = w_.sequences.empty() ? 1 : static_cast<double>(p_.batch);
        return sequences * static_cast<double>(ceil_div(p_.len_q, w_.tile.block_q)) *
               static_cast<double>(ceil_div(p_.len_kv, w_.tile.block_kv));
    }

    std::vector<Loop> loops() const {
        return heads_fill_threads(heads_, threads_) ? std::vector<Loop>{whole_heads()} : rounds();
    }

 private:
    static constexpr std::int64_t kColumns = simd_split::kColumns;
    static constexpr std::int64_t kSquaresPerThread = simd_split::kSquaresPerThread;

    /// Amounts of a tile of a head; nothing if the mask hides all of it.
    Amounts tile(const Band& band, std::int64_t i, std::int64_t j) const {
        const Range queries{i * w_.tile.block_q, std::min(band.len_q, (i + 1) * w_.tile.block_q)};
        const Range keys{j * w_.tile.block_kv, std::min(band.len_kv, (j + 1) * w_.tile.block_kv)};
        if (band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::empty) return {};
        const auto elements = static_cast<double>(round_up(queries.size(), kLanes) * keys.size());
        return {.flop = elements * static_cast<double>(2 * (3 * p_.head_dim + 2 * p_.head_dim_v)), .exps = elements};
    }
    std::int64_t panels(const Band& band) const { return ceil_div(band.len_q, w_.tile.block_q); }
    std::int64_t key_tiles(const Band& band) const { return ceil_div(band.len_kv, w_.tile.block_kv); }

    Loop whole_heads() const {
        Loop loop;
        Lengths before;
        Amounts group;
        for (const auto& lengths : lengths_of(w_)) {
            if (before.empty() || before.front() != lengths) {
                const Band band = p_.mask.bind(lengths.first, lengths.second);
                Amounts head;
                for (std::int64_t i = 0; i < panels(band); ++i)
                    for (std::int64_t j = 0; j < key_tiles(band); ++j) head += tile(band, i, j);
                group = {};
                for (std::int64_t i = 0; i < p_.group(); ++i) group += head;
                before = {lengths};
            }
            loop.tasks.insert(loop.tasks.end(), static_cast<std::size_t>(p_.heads_kv), group);
        }
        return loop;
    }

    std::vector<Loop> rounds() const {
        std::int64_t pairs = 0;
        for (const auto& [len_q, len_kv] : lengths_of(w_)) {
            const Band band = p_.mask.bind(len_q, len_kv);
            pairs = std::max(pairs, std::min(panels(band), key_tiles(band)));
        }
        std::int64_t side = kColumns;
        while (side > 1 && heads_ * ceil_div(pairs, side) < kSquaresPerThread * threads_) side /= 2;
        std::vector<Loop> of_head;
        for (const auto& [len_q, len_kv] : lengths_of(w_)) add_rounds(p_.mask.bind(len_q, len_kv), side, of_head);
        std::vector<Loop> loops;  // one query head of each group after another
        for (std::int64_t i = 0; i < p_.group(); ++i) loops.insert(loops.end(), of_head.begin(), of_head.end());
        return loops;
    }

    /// Adds the squares of a sequence's heads to the loop of their round.
    void add_rounds(const Band& band, std::int64_t side, std::vector<Loop>& loops) const {
        const std::int64_t rows = ceil_div(panels(band), side), columns = ceil_div(key_tiles(band), side);
        const std::int64_t n = std::max(rows, columns);
        const auto at = [](std::int64_t index) { return static_cast<std::size_t>(index); };
        if (loops.size() < at(n + 1)) loops.resize(at(n + 1));
        std::vector<std::vector<Amounts>> squares(at(n + 1), std::vector<Amounts>(at(std::min(rows, columns))));
        for (std::int64_t i = 0; i < panels(band); ++i) {
            for (std::int64_t j = 0; j < key_tiles(band); ++j) {
                const std::int64_t row = i / side, column = j / side;
                const std::int64_t round = row != column ? (row - column + n) % n : i >= j ? 0 : n;
                squares[at(round)][at(columns <= rows ? column : row)] += tile(band, i, j);
            }
        }
        for (std::int64_t round = 0; round <= n; ++round) {
            auto& tasks = loops[at(round)].tasks;
            for (const Amounts& square : squares[at(round)]) tasks.insert(tasks.end(), at(p_.heads_kv), square);
        }
    }

    const Problem& p_;
    const schedule::Workload& w_;
    int threads_;
    std::int64_t heads_;  // kv heads of all sequences
};

}  // namespace

std::vector<Loop> backward_loops(const schedule::Workload& workload, const CpuWorkSplit& work_split) {
    if (work_split.on_matrix_unit) {
        const MatrixBackward tasks(workload, work_split);
        return tasks.count() > kMostTasks ? std::vector<Loop>{} : tasks.loops();
    }
    const SimdBackward tasks(workload, work_split);
    return tasks.count() > kMostTasks ? std::vector<Loop>{} : tasks.loops();
}

}  // namespace tessera::model
