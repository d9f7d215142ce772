// SPDX-License-Identifier: Apache-2.0
#include "cpu/steps/matrix/gradient_step.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/steps/sinks.hpp"

namespace tessera::cpu::matrix {
namespace {

constexpr std::int64_t kGroup = kTileDepth;

Range rounded(const Range& range) { return {range.begin / kGroup * kGroup, round_up(range.end, kGroup)}; }

/// Calls f(row, column, value) for the special elements (packed as 0) of rows of x.
template <class F>
void for_each_special(const HeadRows& x, const Range& rows, std::int64_t dim, const F& f) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
        for (std::int64_t column = 0; column < dim; ++column) {
            const float value = element(x, row, column);
            if (special(x, value)) f(row, column, value);
        }
    }
}

/// One strip: its 32 keys (fewer at the end) and the queries that see some of them, a multiple of 32 of lanes.
class Strip {
 public:
    Strip(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const BackwardArgs& args,
          const Range& queries, const Range& keys)
        : g_(memory.geometry()),
          scratch_(scratch),
          primitives_(*primitives_of_unit()),
          work_(work),
          args_(args),
          queries_(queries),
          keys_{keys},
          q_(memory.queries(work.head, queries.begin)),
          kv_(memory.keys(work.head.sequence, work.head.kv_head, keys.begin)) {
        work_.panel.first = queries.begin;
        work_.panel.queries = std::min(queries.end, work.head.sequence.len_q) - queries.begin;
        work_.panel.lanes = queries.size();
    }

    std::int64_t lanes() const { return work_.panel.lanes; }
    bool full() const { return all_visible(work_, keys_.keys); }
    simd::TilePosition position() const { return {work_.head.band, queries_.begin, keys_.keys.begin}; }

    void scores() const {
        product(kv_.k_rows, q_.q_pairs, g_.depth_tiles, scratch_.s);
        if (!packable(*kv_.k_finite, q_.q_finite)) {
            redo_special_products(work_.head.k, keys_.keys, work_.head.q, present(), g_.head_dim, work_.query_scale(),
                                  scratch_.s, lanes());
        }
        transform_and_mask(work_, keys_, scratch_.s, scratch_.bias_or_dropout, scratch_.cap_slope);
    }

    /// Computes P and dS, packed; dS also as pair tiles at `ds_pairs`. Infinite dS of fp32 are packed as 0 and listed.
    void gradient(const Tiles& ds_pairs) {
        GradientJob job = scores_and_dp();
        job.p_rows = rows(scratch_.p_rows);
        job.ds_rows = rows(scratch_.ds_rows);
        job.ds_pairs = ds_pairs;
        primitives_.gradient(job);
        if (g_.parts > 1 && may_be_infinite()) take_infinite(ds_pairs);
    }

    /// Adds what the infinite dS contribute to dK (of the strip's keys) and to dQ. Products of their parts would be
    /// inf * 0 = NaN.
    void add_infinite(float* dk, bool to_keys, bool to_queries) const {
        for (const InfiniteDs& ds : infinite_) {
            const std::int64_t query = queries_.begin + ds.lane;
            for (std::int64_t c = 0; c < g_.head_dim; ++c) {
                if (to_keys) dk[ds.key * g_.dim_tiles * kTileRows + c] += ds.value * element(work_.head.q, query, c);
                if (!to_queries) continue;
                float* const dq_t = q_.dq_t + ds.lane / kGroup * (g_.dim_tiles * kTileRows * kGroup);
                dq_t[c * kGroup + ds.lane % kGroup] += ds.value * element(work_.head.k, keys_.keys.begin + ds.key, c);
            }
        }
    }

    /// Adds the sums of P and P * dP over the strip's keys; both [lanes].
    void add_weighted_sums(double* weights, double* products) const {
        primitives_.add_weighted_sums(scores_and_dp(), weights, products);
    }

    /// Computes the scores and dP. Returns a job with all its inputs set.
    GradientJob scores_and_dp() const {
        scores();
        product(kv_.v_rows, q_.do_pairs, g_.depth_tiles_v, scratch_.dp);
        if (!packable(*kv_.v_finite, q_.do_finite)) {
            redo_special_products(work_.head.v, keys_.keys, d_o(), present(), g_.head_dim_v, 1, scratch_.dp, lanes());
        }
        GradientJob job{.s = scratch_.s,
                        .dp = scratch_.dp,
                        .keys = keys_.keys.size(),
                        .lanes = lanes(),
                        .scale = work_.weight_scale(),
                        .lse = q_.lse,
                        .delta = q_.delta,
                        .parts = g_.parts};
        for (std::int64_t group = 0; group < lanes() / kGroup; ++group) {
            if (q_.has_norm[group] != 0) job.norm = q_.norm;
        }
        if (work_.head.dropout.active) {
            simd::DropoutRule rule = work_.head.dropout;
            rule.kept = 1;
            simd::dropout_factors(rule, position(), keys_.keys.size(), scratch_.factors, lanes());
            job.factors = scratch_.factors;
            job.kept = work_.head.dropout.kept;
        }
        if (work_.rule.softcap > 0) job.cap_slope = scratch_.cap_slope;
        if (!full() || work_.panel.queries < lanes()) {
            mark_visible();
            job.visible = scratch_.visible;
        }
        return job;
    }

    /// dV += P^T dO, dK += dS^T Q, for the strip's keys. dv: [32, 16 * dim_tiles_v], dk: [32, 16 * dim_tiles]
    void add_to_keys(float* dk, float* dv) const {
        primitives_.multiply({g_.parts, 2, g_.dim_tiles_v, lanes() / kGroup, rows(scratch_.p_rows), q_.do_rows, dv,
                              g_.dim_tiles_v * kTileRows, true});
        primitives_.multiply({g_.parts, 2, g_.dim_tiles, lanes() / kGroup, rows(scratch_.ds_rows), q_.q_rows, dk,
                              g_.dim_tiles * kTileRows, true});
        for (std::int64_t group = 0; group < lanes() / kGroup; ++group) {
            const std::int64_t first = queries_.begin + group * kGroup;
            const Range of_group{first, std::min(first + kGroup, work_.head.sequence.len_q)};
            if (q_.do_finite[group] == 0) {
                add_special(d_o(), of_group, g_.head_dim_v, scratch_.p_rows, dv, g_.dim_tiles_v * kTileRows);
            }
            if (q_.q_finite[group] == 0) {
                add_special(work_.head.q, of_group, g_.head_dim, scratch_.ds_rows, dk, g_.dim_tiles * kTileRows);
            }
        }
    }

 private:
    /// dS of a key and a lane of the strip.
    struct InfiniteDs {
        std::int64_t key;
        std::int64_t lane;
        float value;
    };

    /// Can dS be infinite? It is so where V, dO or a row's delta are.
    bool may_be_infinite() const {
        bool finite = packable(*kv_.v_finite, q_.do_finite);
        for (std::int64_t lane = 0; lane < lanes(); ++lane) finite = finite && std::isfinite(q_.delta[lane]);
        return !finite;
    }
    /// Lists the infinite dS and sets them to 0 where they are packed. The first of an infinity's parts is infinite.
    void take_infinite(const Tiles& ds_pairs) {
        for (std::int64_t key = 0; key < keys_.keys.size(); ++key) {
            for (std::int64_t lane = 0; lane < lanes(); ++lane) {
                Bf16* const row = scratch_.ds_rows +
                                  (key / kTileRows * (lanes() / kGroup) + lane / kGroup) * g_.tile_elements() +
                                  key % kTileRows * kGroup + lane % kGroup;
                const float value = to_float(*row);
                if (!std::isinf(value)) continue;
                infinite_.push_back({key, lane, value});
                Bf16* const pair = ds_pairs.data + lane / kTileRows * ds_pairs.column_step + key / 2 * kGroup +
                                   lane % kTileRows * 2 + key % 2;
                for (int part = 0; part < g_.parts; ++part) row[part * kTileElements] = pair[part * kTileElements] = {};
            }
        }
    }

    Tiles rows(Bf16* data) const { return {data, lanes() / kGroup * g_.tile_elements(), g_.tile_elements()}; }
    Range present() const { return {queries_.begin, queries_.begin + work_.panel.queries}; }
    HeadRows d_o() const {
        return head_rows(args_.d_o, work_.head.sequence, work_.head.sequence.first_q, work_.head.query_head);
    }
    /// Can these keys and queries be computed from packed operands only? bf16 packs NaN and infinity here.
    bool packable(char keys_finite, const char* queries_finite) const {
        if (g_.parts == 1) return true;
        bool all = keys_finite != 0;
        for (std::int64_t group = 0; group < lanes() / kGroup; ++group) all = all && queries_finite[group] != 0;
        return all;
    }
    void product(const Tiles& a, const Tiles& b, std::int64_t depth, float* c) const {
        primitives_.multiply({.parts = g_.parts,
                              .m = 2,
                              .n = lanes() / kTileRows,
                              .k = depth,
                              .a = a,
                              .b = b,
                              .c = c,
                              .c_stride = lanes(),
                              .small_first = true});
    }

    /// visible = 1 if a query sees a key, else 0. Lanes beyond the last query see none, whatever the band says.
    void mark_visible() const {
        for (std::int64_t j = 0; j < keys_.keys.size(); ++j) {
            float* row = scratch_.visible + j * lanes();
            std::fill_n(row, work_.panel.queries, 1.0F);
            std::fill(row + work_.panel.queries, row + lanes(), 0.0F);
        }
        if (!full()) simd::fill_masked(position(), keys_.keys.size(), scratch_.visible, lanes(), 0.0F);
    }

    /// sums[key, c] += weight[key, i] * x[i, c] for the special x that the key's query i sees.
    void add_special(const HeadRows& x, const Range& of_group, std::int64_t dim, const Bf16* weights, float* sums,
                     std::int64_t stride) const {
        for_each_special(x, of_group, dim, [&](std::int64_t query, std::int64_t column, float value) {
            for (std::int64_t j = 0; j < keys_.keys.size(); ++j) {
                if (!work_.head.band.visible(query, keys_.keys.begin + j)) continue;
                const std::int64_t lane = query - queries_.begin;
                const Bf16* tile = weights + (j / kTileRows * (lanes() / kGroup) + lane / kGroup) * g_.tile_elements();
                sums[j * stride + column] += row_tile_element(tile, g_.parts, j % kTileRows, lane % kGroup) * value;
            }
        });
    }

    const Layout& g_;
    const GradientScratch& scratch_;
    const Primitives& primitives_;
    TilePanel& work_;
    const BackwardArgs& args_;
    Range queries_;
    SeenKeys keys_;
    GradientMemory::Queries q_;
    GradientMemory::Keys kv_;
    std::vector<InfiniteDs> infinite_;
};

/// dQ^T += K^T dS^T for 32 queries, over the strips of `keys` that they see.
void add_to_queries(const GradientMemory& memory, TilePanel& work, std::int64_t query, const Range& keys,
                    const Tiles& ds_pairs) {
    const Layout& g = memory.geometry();
    const std::int64_t end = std::min(query + kGroup, work.head.sequence.len_q);
    const Range all = work.head.band.kv_range(query, end);
    const Range seen = common(rounded(common(all, keys)), rounded(keys));
    if (seen.empty()) return;
    const GradientMemory::Keys kv = memory.keys(work.head.sequence, work.head.kv_head, seen.begin);
    Tiles pairs = ds_pairs;
    pairs.data += (seen.begin - keys.begin) / kGroup * ds_pairs.row_step;
    const GradientMemory::Queries to = memory.queries(work.head, query);
    float* dq_t = to.dq_t;
    if (begins_part(keys.begin, all, g.parts)) simd::move_to_total(dq_t, to.dq_total, g.dim_tiles * kTileRows, kGroup);
    primitives_of_unit()->multiply(
        {g.parts, g.dim_tiles, 2, seen.size() / kGroup, kv.k_columns, pairs, dq_t, kGroup, true});
    work.panel = Panel(0, kGroup, end - query);
    work.panel.first = query;
    work.panel.lanes = kGroup;
    for (std::int64_t strip = 0; strip < seen.size() / kGroup; ++strip) {
        if (kv.k_finite[strip] != 0) continue;
        const std::int64_t first = seen.begin + strip * kGroup;
        const SeenKeys of_strip{{first, std::min(first + kGroup, work.head.sequence.len_kv)}};
        // Two lane tiles of 32 keys lie together in one row of the pairs.
        add_special_keys(work, of_strip, work.head.k, g.head_dim, pairs.data + strip * pairs.row_step,
                         {dq_t, work.panel.lanes, 1});
    }
}

}  // namespace

GradientScratch::GradientScratch(Arena& arena, const Layout& g, std::int64_t block_q, std::int64_t block_kv)
    : s(arena.take<float>(kGroup, block_q)),
      dp(arena.take<float>(kGroup, block_q)),
      bias_or_dropout(arena.take<float>(kGroup, block_q)),
      factors(arena.take<float>(kGroup, block_q)),
      cap_slope(arena.take<float>(kGroup, block_q)),
      visible(arena.take<float>(kGroup, block_q)),
      sums(arena.take<double>(2 * block_q)),
      p_rows(arena.take<Bf16>(kGroup, block_q * g.parts)),
      ds_rows(arena.take<Bf16>(kGroup, block_q * g.parts)),
      ds_pairs(arena.take<Bf16>(block_kv, block_q * g.parts)),
      dk(arena.take<float>(block_kv, g.dim_tiles * kTileRows)),
      dv(arena.take<float>(block_kv, g.dim_tiles_v * kTileRows)) {}

void backward_tile(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const Range& queries,
                   const Range& keys, const BackwardArgs& args, Wanted wanted) {
    const Layout& g = memory.geometry();
    const std::int64_t lane_tiles = round_up(queries.size(), kGroup) / kTileRows;
    const Tiles ds_pairs{scratch.ds_pairs, lane_tiles * g.tile_elements(), g.tile_elements()};
    for (std::int64_t key = keys.begin; key < keys.end; key += kGroup) {
        const Range strip_keys{key, std::min(key + kGroup, work.head.sequence.len_kv)};
        const Range seen = common(rounded(common(work.head.band.q_range(strip_keys.begin, strip_keys.end), queries)),
                                  rounded(queries));
        if (seen.empty()) continue;
        Strip strip(memory, scratch, work, args, seen, strip_keys);
        Tiles pairs = ds_pairs;
        pairs.data += (key - keys.begin) / kGroup * ds_pairs.row_step +
                      (seen.begin - queries.begin) / kTileRows * ds_pairs.column_step;
        strip.gradient(pairs);
        float* const dk = scratch.dk + (key - keys.begin) * g.dim_tiles * kTileRows;
        if (wanted.keys) strip.add_to_keys(dk, scratch.dv + (key - keys.begin) * g.dim_tiles_v * kTileRows);
        strip.add_infinite(dk, wanted.keys, wanted.queries);
    }
    if (!wanted.queries) return;
    for (std::int64_t query = queries.begin; query < queries.end; query += kGroup) {
        Tiles pairs = ds_pairs;
        pairs.data += (query - queries.begin) / kTileRows * ds_pairs.column_step;
        add_to_queries(memory, work, query, keys, pairs);
    }
}

void sum_delta(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const BackwardArgs& args,
               const Range& queries) {
    const std::int64_t lanes = round_up(queries.size(), kGroup);
    double* weights = scratch.sums;
    double* products = scratch.sums + lanes;
    std::fill_n(scratch.sums, 2 * lanes, 0.0);
    const Range keys = work.head.band.kv_range(queries.begin, queries.end);
    for (std::int64_t key = keys.begin / kGroup * kGroup; key < keys.end; key += kGroup) {
        const Range strip_keys{key, std::min(key + kGroup, work.head.sequence.len_kv)};
        const Range seen = common(rounded(common(work.head.band.q_range(strip_keys.begin, strip_keys.end), queries)),
                                  rounded(queries));
        if (seen.empty()) continue;
        const std::int64_t lane = seen.begin - queries.begin;
        const Strip strip(memory, scratch, work, args, seen, strip_keys);
        strip.add_weighted_sums(weights + lane, products + lane);
    }
    const GradientMemory::Queries q = memory.queries(work.head, queries.begin);
    float* delta = q.delta;
    for (std::int64_t i = 0; i < queries.size(); ++i) {
        weights[i] += sink_weight(work.head, queries.begin + i, q.lse[i]) * static_cast<double>(q.norm[i]);
        delta[i] = static_cast<float>(delta[i] + products[i] / (weights[i] == 0 ? 1 : weights[i]));
    }
}

void fill_norm(const GradientMemory& memory, const GradientScratch& scratch, TilePanel& work, const BackwardArgs& args,
               std::int64_t first) {
    const GradientMemory::Queries q = memory.queries(work.head, first);
    const auto inexact = [&](std::int64_t i) { return inexact_lse(q.lse[i]); };
    bool any = false;
    for (std::int64_t i = 0; i < kGroup; ++i) any = any || inexact(i);
    if (!any) return;
    float maxima[kGroup];
    std::fill_n(maxima, kGroup, -std::numeric_limits<float>::infinity());
    double sums[kGroup] = {};
    const std::int64_t end = std::min(first + kGroup, work.head.sequence.len_q);
    for (std::int64_t i = 0; work.head.sinks.data != nullptr && i < end - first; ++i)
        maxima[i] = *static_cast<const float*>(work.head.sinks.at(first + i, 0));
    const Range keys = work.head.band.kv_range(first, end);
    const auto for_each_score = [&](const auto& f) {
        for (std::int64_t key = keys.begin / kGroup * kGroup; key < keys.end; key += kGroup) {
            const Range strip_keys{key, std::min(key + kGroup, work.head.sequence.len_kv)};
            const Strip strip(memory, scratch, work, args, {first, first + kGroup}, strip_keys);
            strip.scores();
            for (std::int64_t j = 0; j < strip_keys.size(); ++j) {
                for (std::int64_t i = 0; i < kGroup; ++i) f(i, scratch.s[j * kGroup + i] * work.weight_scale());
            }
        }
    };
    // Uses the maximum of these scores, not of the forward's: one unit in the last place of 1e10 is a thousand.
    for_each_score([&](std::int64_t i, float s) { maxima[i] = std::max(maxima[i], s); });
    for_each_score([&](std::int64_t i, float s) { sums[i] += std::exp(s - maxima[i]); });
    for (std::int64_t i = 0; i < end - first; ++i) sums[i] += sink_weight(work.head, first + i, maxima[i]);
    for (std::int64_t i = 0; i < kGroup; ++i) {
        q.norm[i] = inexact(i) ? static_cast<float>(1 / sums[i]) : 1.0F;
        if (inexact(i)) q.lse[i] = maxima[i];
    }
    *q.has_norm = 1;
}

}  // namespace tessera::cpu::matrix
