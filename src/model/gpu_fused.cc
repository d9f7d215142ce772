// SPDX-License-Identifier: Apache-2.0
//
// Fused kernels on a GPU: units of work (tiles of queries; in the backward tiles of keys) with an inner loop each,
// dealt to the multiprocessors.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "cuda/fa3/backward/order.hpp"
#include "cuda/fa3/backward/shapes.hpp"
#include "model/deal.hpp"
#include "model/gpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {

/// Queries up to which cuDNN deals out keys, too.
static constexpr std::int64_t kFewQueries = 16;

/// The keys of a unit are dealt to several multiprocessors when units are few. Returns the kernels to launch.
int Gpu::split_keys() {
    const bool by_flash = family.by == std::string_view("flash-attention");
    const bool theirs = by_flash || (family.by == std::string_view("cudnn") && q.problem.len_q <= kFewQueries);
    if (q.pass != Pass::forward || !theirs || units.count == 0 || units.longest < 2) return c.launches;
    if (by_flash && q.schedule == Schedule::fa2) {
        splits_ = flash2_splits(q.problem, q.machine);
    } else if (static_cast<double>(units.count) <= sms / 2) {
        splits_ = std::min<std::int64_t>(static_cast<std::int64_t>(sms) / units.count, units.longest);
    }
    if (splits_ == 1) return c.launches;
    account.note("keys are split", "{} units for {:.0f} multiprocessors: each in {} parts", units.count, sms, splits_);
    units.count *= splits_;
    units.longest = schedule::ceil_div(units.longest, splits_);
    units.shortest = std::min(units.longest, schedule::ceil_div(units.shortest, splits_));
    return c.launches + 1;
}

/// Does tessera's fa3 backward begin with the first blocks of keys of such a member?
bool Gpu::first_keys_first(std::int64_t len_q, std::int64_t len_kv) const {
    if (!is_ours(family) || q.schedule != Schedule::fa3 || q.pass != Pass::backward) return false;
    cuda::fa3::backward::Blocks<64, 128> blocks{};
    blocks.set(q.problem.mask, static_cast<int>(len_q), static_cast<int>(len_kv), static_cast<int>(q.problem.group()));
    return by_roles() || blocks.rising;
}

/// Inner tiles of each thread block of a member's head, in the order of the tiles of queries (backward: of keys), or,
/// for Order::last_first, from the last one that begins.
std::vector<std::int64_t> Gpu::blocks_of_head(std::int64_t len_q, std::int64_t len_kv) const {
    const bool rows_outer = q.pass == Pass::forward;
    const schedule::Grid grid{q.problem.mask.bind(len_q, len_kv), tile, rows_outer};
    std::vector<std::int64_t> blocks;
    const std::int64_t most = schedule::ceil_div(grid.columns(), splits_);  // inner tiles of a part
    for (std::int64_t i = 0; i < (rows_outer ? grid.rows() : grid.columns()); ++i) {
        const std::int64_t inner = (rows_outer ? grid.columns_of(i) : grid.rows_of(i)).size();
        if (splits_ == 1) blocks.push_back(inner);
        else
            for (std::int64_t part = 0; part < splits_; ++part)
                blocks.push_back(std::clamp<std::int64_t>(inner - part * most, 0, most));
    }
    if (!rows_outer && is_ours(family)) {  // all heads of a group by one block
        for (std::int64_t& inner : blocks) inner *= q.problem.group();
    }
    if (first_keys_first(len_q, len_kv)) std::reverse(blocks.begin(), blocks.end());
    return blocks;
}

/// Clocks of all thread blocks in the order in which they begin.
std::vector<double> Gpu::blocks_in_order(double ends) const {
    const Problem& p = q.problem;
    const bool ours_backward = is_ours(family) && q.pass == Pass::backward;
    const std::int64_t heads = ours_backward ? p.heads_kv : p.heads_q;
    std::vector<std::vector<std::int64_t>> members;
    for (const auto& [len_q, len_kv] : q.options.members) members.push_back(blocks_of_head(len_q, len_kv));
    if (members.empty()) members.assign(static_cast<std::size_t>(p.batch), blocks_of_head(p.len_q, p.len_kv));
    std::vector<double> order;
    if (q.schedule == Schedule::fa1) {  // of the backward: one block for each kv head, no more
        for (const auto& member : members) {
            const auto inner = static_cast<double>(std::accumulate(member.begin(), member.end(), std::int64_t{0}));
            const double clocks = inner * t.step + static_cast<double>(member.size()) * ends;
            order.insert(order.end(), static_cast<std::size_t>(heads), clocks);
        }
        return order;
    }
    const auto add = [&](std::int64_t inner) { order.push_back(static_cast<double>(inner) * t.step + ends); };
    switch (family.order) {
        case Order::last_first:
            for (const auto& member : members) {
                for (std::int64_t head = 0; head < heads; ++head) std::for_each(member.rbegin(), member.rend(), add);
            }
            break;
        case Order::as_they_lie:
            for (std::int64_t head = 0; head < heads; ++head) {
                for (const auto& member : members) std::for_each(member.begin(), member.end(), add);
            }
            break;
        case Order::longest_first:
            for (const auto& member : members) {
                for (std::int64_t head = 0; head < heads; ++head) std::for_each(member.begin(), member.end(), add);
            }
            std::stable_sort(order.begin(), order.end(), std::greater<>());
            break;
    }
    return order;
}

/// Clocks until the last block is done that is dealt to whoever is free; nothing for more blocks than are worth going
/// through, whose end does not matter.
std::optional<double> Gpu::last_done(double ends) const {
    constexpr std::int64_t kWorthIt = 1 << 15;
    if (units.count > kWorthIt) return std::nullopt;
    const int each = blocks_at_a_time(family, q.problem);
    return dealt(blocks_in_order(ends), {static_cast<int>(sms), each, each > 1 ? c.alone : 1});
}

/// tessera's backward: blocks of keys add to a tile of dQ in turn. Where a head has many of them and few queries, its
/// blocks wait for each other: clocks of all turns of the heads that come one after another.
double Gpu::turns() const {
    if (q.pass == Pass::forward || by_roles() || c.turn_cycles <= 0) return 0;
    const double turn = static_cast<double>(q.problem.group()) * c.turn_cycles;
    const auto heads = static_cast<double>(q.problem.heads_kv);
    double sum = 0, longest = 0;
    const auto add = [&](std::int64_t len_kv, double members) {
        const auto blocks = static_cast<double>(schedule::ceil_div(len_kv, tile.block_kv));
        longest = std::max(longest, blocks * turn);
        sum += members * heads * blocks * turn * std::min(1.0, blocks / sms);  // heads side by side
    };
    for (const auto& [len_q, len_kv] : q.options.members) add(len_kv, 1);
    if (q.options.members.empty()) add(q.problem.len_kv, static_cast<double>(q.problem.batch));
    return std::max(sum, longest);
}

/// Clocks until the last multiprocessor is done, beyond an equal share for each.
double Gpu::waiting(double share, double ends) const {
    const auto count = static_cast<double>(units.count);
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    if (units.count == 0) return 0;
    if (const auto last = last_done(ends)) return std::max(0.0, *last - share);
    return units.longest == units.shortest ? std::ceil(count / sms) * longest - share : std::max(longest - share, 0.0);
}

/// The calculation of waiting().
std::string Gpu::waiting_text(double share, double ends) const {
    const auto count = static_cast<double>(units.count);
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    if (units.count == 0) return "no units: 0";
    const auto last = last_done(ends);
    const bool rounds = units.longest == units.shortest && blocks_at_a_time(family, q.problem) == 1 && splits_ == 1;
    if (last && !(rounds && q.schedule != Schedule::fa1))
        return fmt::format("blocks one after the other to who is free, until the last one ends: {:.0f} - {:.0f}",
                           std::max(*last, share), share);
    if (units.longest == units.shortest)
        return fmt::format("whole rounds of equal units: {:.0f} * {:.0f} - {:.0f}", std::ceil(count / sms), longest,
                           share);
    return fmt::format("the longest unit: max({:.0f} - {:.0f}, 0)", longest, share);
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

/// Edges of the mask that cut tiles: a window has two.
static int diagonals(const Problem& p) {
    const bool both = p.mask.window_left != unbounded && p.mask.window_left < p.len_kv / 2 &&
                      (p.mask.window_right != unbounded || p.mask.causal != Causal::none);
    return both ? 2 : 1;
}

void Gpu::fused() {
    const int launches = split_keys();
    const bool cut = out.cost.partial > 0 && !q.problem.mask.trivial();
    const double cut_tiles = cut ? c.cut_tiles * (c.window_exposed > 0 ? 1 : diagonals(q.problem)) : 0;
    const double ends = c.end_cycles + c.end_cycles_per_dim * d + cut_tiles * t.step;
    const auto count = static_cast<double>(units.count);
    const auto tiles = static_cast<double>(units.tiles);
    const double share = (tiles * t.step + count * ends) / sms;
    const double idle = std::max(waiting(share, ends), turns() - share);
    account.note("ends of a unit", "{:.0f} + {:.3g} * {:.0f} + {:.3g} * {:.6g} = {:.6g} clk", c.end_cycles,
                 c.end_cycles_per_dim, d, cut_tiles, t.step, ends);
    account.note("units of work",
                 "{} tiles of {}, each head in rows of {}; the mask leaves {} inner tiles, {} to {} each", units.count,
                 q.pass == Pass::forward ? "queries" : "keys", q.pass == Pass::forward ? tile.block_q : tile.block_kv,
                 units.tiles, units.shortest, units.longest);
    account.note("share of a multiprocessor", "({} * {:.6g} + {} * {:.6g}) / {:.0f} = {:.0f} clk", units.tiles, t.step,
                 units.count, ends, sms, share);
    if (turns() - share >= idle && idle > 0)
        account.note("until the last one is done", "turns at dQ: {:.0f} - {:.0f} = {:.0f} clk more", turns(), share,
                     idle);
    else account.note("until the last one is done", "{} = {:.0f} clk more", waiting_text(share, ends), idle);

    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("ends of tiles", count * ends / sms / per_ms, "{:.0f} * {:.6g} clk / {:.0f} / {:.4f} GHz", count, ends,
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
