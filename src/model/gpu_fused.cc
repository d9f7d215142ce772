// SPDX-License-Identifier: Apache-2.0
//
// Fused kernels on a GPU: units of work (tiles of queries; in the backward tiles of keys) with an inner loop each,
// dealt to the multiprocessors.
#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "cuda/fa3/backward/shapes.hpp"
#include "model/gpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {

/// Queries up to which cuDNN deals out keys, too.
static constexpr std::int64_t kFewQueries = 16;

/// flash-attention's decoding: the keys of a unit are dealt to several multiprocessors when units are few. Returns the
/// kernels to launch.
int Gpu::split_keys() {
    const bool theirs = family.by == std::string_view("flash-attention") ||
                        (family.by == std::string_view("cudnn") && q.problem.len_q <= kFewQueries);
    if (q.pass != Pass::forward || !theirs) return c.launches;
    if (units.count == 0 || static_cast<double>(units.count) > sms / 2 || units.longest < 2) return c.launches;
    const auto splits = std::min<std::int64_t>(static_cast<std::int64_t>(sms) / units.count, units.longest);
    account.note("keys are split", "{} units for {:.0f} multiprocessors: each in {} parts", units.count, sms, splits);
    units.count *= splits;
    units.longest = schedule::ceil_div(units.longest, splits);
    units.shortest = std::min(units.longest, schedule::ceil_div(units.shortest, splits));
    return c.launches + 1;
}

/// tessera's backward: blocks of keys by batch member and kv head, the last keys first, each to the first
/// multiprocessor that is free. Returns the clocks until the last one is done; nothing for more blocks than are worth
/// going through, or where that is not how work is dealt out.
std::optional<double> Gpu::last_block_done(double ends) const {
    constexpr std::int64_t kWorthIt = 1 << 16;
    if (q.pass == Pass::forward || !is_ours(family) || q.schedule == Schedule::fa1) return std::nullopt;
    if (units.count == 0 || units.count > kWorthIt) return std::nullopt;
    const Problem& p = q.problem;
    std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
    for (int i = 0; i < static_cast<int>(sms); ++i) free_at.push(0);
    double last = 0;
    for (std::int64_t member = 0; member < p.batch; ++member) {
        const bool own = !q.options.members.empty();
        const auto [len_q, len_kv] =
            own ? q.options.members[static_cast<std::size_t>(member)] : std::pair{p.len_q, p.len_kv};
        const schedule::Grid grid{p.mask.bind(len_q, len_kv), tile, false};
        for (std::int64_t head = 0; head < p.heads_kv; ++head) {
            for (std::int64_t block = grid.columns() - 1; block >= 0; --block) {
                const auto inner = static_cast<double>(grid.rows_of(block).size() * p.group());
                const double done = free_at.top() + inner * t.step + ends;
                free_at.pop();
                free_at.push(done);
                last = std::max(last, done);
            }
        }
    }
    return last;
}

/// Clocks until the last multiprocessor is done, beyond an equal share for each.
double Gpu::waiting(double share, double ends) const {
    const auto count = static_cast<double>(units.count);
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    const double shortest = static_cast<double>(units.shortest) * t.step + ends;
    if (units.count == 0) return 0;
    if (q.schedule == Schedule::fa1) {  // one block for each kv head, no more
        const auto heads = static_cast<double>(q.problem.batch * q.problem.heads_kv);
        return std::ceil(heads / sms) * sms * share / heads - share;
    }
    if (const auto last = last_block_done(ends)) return std::max(0.0, *last - share);
    if (one_wave()) return c.alone * longest - share;
    if (units.longest == units.shortest) return std::ceil(count / sms) * longest - share;
    // Longest first ends within a shortest unit, on average half of it. As they lie, long ones come last, too: a
    // quarter of a longest one is what the Records show.
    const double tail = family.order == Order::longest_first ? 0.5 * shortest : 0.25 * longest;
    return std::max(longest - share, tail);
}

/// The calculation of waiting().
std::string Gpu::waiting_text(double share, double ends) const {
    const auto count = static_cast<double>(units.count);
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    const double shortest = static_cast<double>(units.shortest) * t.step + ends;
    if (units.count == 0) return "no units: 0";
    if (q.schedule == Schedule::fa1) {
        const auto heads = static_cast<double>(q.problem.batch * q.problem.heads_kv);
        return fmt::format("whole heads: {:.0f} * {:.0f} * {:.0f} / {:.0f} - {:.0f}", std::ceil(heads / sms), sms,
                           share, heads, share);
    }
    if (const auto last = last_block_done(ends))
        return fmt::format("blocks one after the other to who is free, until the last one ends: {:.0f} - {:.0f}",
                           std::max(*last, share), share);
    if (one_wave()) return fmt::format("the longest unit: {:.3g} * {:.0f} - {:.0f}", c.alone, longest, share);
    if (units.longest == units.shortest)
        return fmt::format("whole rounds of equal units: {:.0f} * {:.0f} - {:.0f}", std::ceil(count / sms), longest,
                           share);
    const bool first = family.order == Order::longest_first;
    return fmt::format("{}, or what the longest unit has left: max({} * {:.0f}, {:.0f} - {:.0f})",
                       first ? "half of the shortest unit" : "a quarter of the longest unit", first ? 0.5 : 0.25,
                       first ? shortest : longest, longest, share);
}

/// Kernels before and after the main one, bound by memory. Others': D = rowsum(dO * O), dQ = 0; dQ to the dtype.
/// tessera's: delta = dO . (O + rest), and dQ from its sums, which the first to add writes; fa1 has one.
void Gpu::add_gradient_passes() {
    if (q.pass != Pass::backward) return;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    double row = 2 * dv * e + 4 + 4 * d + 4 * d + d * e;
    if (is_ours(family)) {
        const int sums = q.schedule == Schedule::fa3   ? cuda::fa3::backward::sums_of_dq(q.problem)
                         : q.schedule == Schedule::fa2 ? 2
                                                       : 1;
        row = dv * (2 * e + 1) + 4 + sums * 4 * d + d * e;
    }
    const double bytes = rows * row;
    account.part("before and after", bytes / copy_rate(), "O, dO, D, dQ: {:.0f} * {:.0f} B / {:.5g} GB/s", rows, row,
                 copy_rate() * 1e-6);
}

/// How the bytes of the forward come about, when every tensor moves once.
void Gpu::note_dram() {
    const Problem& p = q.problem;
    const std::int64_t row = (p.head_dim + p.head_dim_v) * size_of(p.dtype);
    const std::int64_t queries = p.rows_q() * p.heads_q;
    const std::int64_t keys = p.rows_kv() * p.heads_kv;
    if (q.pass == Pass::forward && queries * (row + 4) + keys * row == out.cost.work.bytes.dram)
        account.note("bytes of DRAM", "Q, O and LSE, K and V: {} * ({} + 4) + {} * {} = {} B", queries, row, keys, row,
                     out.cost.work.bytes.dram);
    else account.note("bytes of DRAM", "{} B, counted by the schedule (docs/model.md)", out.cost.work.bytes.dram);
}

void Gpu::fused() {
    const int launches = split_keys();
    const bool cut = out.cost.partial > 0 && !q.problem.mask.trivial();
    const double cut_tiles = cut ? c.cut_tiles : 0;
    const double ends = c.end_cycles + c.end_cycles_per_dim * d + cut_tiles * t.step;
    const auto count = static_cast<double>(units.count);
    const auto tiles = static_cast<double>(units.tiles);
    const double share = (tiles * t.step + count * ends) / sms;
    const double idle = waiting(share, ends);
    account.note("ends of a unit", "{:.0f} + {:.3g} * {:.0f} + {:.3g} * {:.1f} = {:.1f} clk", c.end_cycles,
                 c.end_cycles_per_dim, d, cut_tiles, t.step, ends);
    account.note("units of work",
                 "{} tiles of {}, each head in rows of {}; the mask leaves {} inner tiles, {} to {} each", units.count,
                 q.pass == Pass::forward ? "queries" : "keys", q.pass == Pass::forward ? tile.block_q : tile.block_kv,
                 units.tiles, units.shortest, units.longest);
    account.note("share of a multiprocessor", "({} * {:.1f} + {} * {:.1f}) / {:.0f} = {:.0f} clk", units.tiles, t.step,
                 units.count, ends, sms, share);
    account.note("until the last one is done", "{} = {:.0f} clk more", waiting_text(share, ends), idle);

    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("ends of tiles", count * ends / sms / per_ms, "{:.0f} * {:.1f} clk / {:.0f} / {:.4f} GHz", count, ends,
                 sms, out.clock_ghz);
    account.part("idle cores", idle / per_ms, "{:.0f} clk / {:.4f} GHz", idle, out.clock_ghz);
    account.note("main kernel", "({:.0f} + {:.0f}) clk / {:.4f} GHz = {:.4g} ms", share, idle, out.clock_ghz,
                 (share + idle) / per_ms);
    add_gradient_passes();
    const double tensors = static_cast<double>(out.cost.work.bytes.dram) / read_rate();
    if (c.dram_exposed > 0) {
        note_dram();
        account.part("DRAM", c.dram_exposed * tensors, "exposed of the tensors' traffic: {:.3g} * {} B / {:.5g} GB/s",
                     c.dram_exposed, out.cost.work.bytes.dram, read_rate() * 1e-6);
    }
    if (q.pass == Pass::forward && one_wave())
        account.part("cold start", kColdStart * 1e-3, "of one wave of units: {:.3g} us", kColdStart);
    add_launches(launches);
}

}  // namespace tessera::model
