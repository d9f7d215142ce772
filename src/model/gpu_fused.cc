// SPDX-License-Identifier: Apache-2.0
//
// Fused kernels on a GPU: units of work (tiles of queries; in the backward tiles of keys) with an inner loop each,
// dealt to the multiprocessors.
#include <algorithm>
#include <cmath>

#include "model/gpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {

/// flash-attention's decoding: the query heads of a group share a tile when each has one query, and the keys of a unit
/// are dealt to several multiprocessors when units are few. Returns the kernels to launch.
int Gpu::split_keys() {
    if (q.pass != Pass::forward || family.by != std::string_view("flash-attention")) return c.launches;
    if (const std::int64_t group = q.problem.group(); q.problem.len_q == 1 && group > 1) {
        units.count /= group;
        units.tiles /= group;
        account.note("one query each", "{} heads of a group in one tile", group);
    }
    if (units.count == 0 || static_cast<double>(units.count) > sms / 2 || units.longest < 2) return c.launches;
    const auto splits = std::min<std::int64_t>(static_cast<std::int64_t>(sms) / units.count, units.longest);
    account.note("keys are split", "{} units for {:.0f} multiprocessors: each in {} parts", units.count, sms, splits);
    units.count *= splits;
    units.longest = schedule::ceil_div(units.longest, splits);
    units.shortest = std::min(units.longest, schedule::ceil_div(units.shortest, splits));
    return c.launches + 1;
}

/// Clocks until the last multiprocessor is done, beyond an equal share for each.
double Gpu::waiting(double share, double ends) const {
    const auto count = static_cast<double>(units.count);
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    const double shortest = static_cast<double>(units.shortest) * t.step + ends;
    if (units.count == 0) return 0;
    if (q.schedule == Schedule::fa1) {  // one block for each head, no more
        const auto heads = static_cast<double>(q.problem.batch * q.problem.heads_q);
        return std::ceil(heads / sms) * sms * share / heads - share;
    }
    if (count <= sms) return longest - share;
    if (units.longest == units.shortest) return std::ceil(count / sms) * longest - share;
    // Longest first ends within a shortest unit, on average half of it. As they lie, long ones come last, too: a
    // quarter of a longest one is what the Records show.
    const double tail = family.order == Order::longest_first ? 0.5 * shortest : 0.25 * longest;
    return std::max(longest - share, tail);
}

/// D = rowsum(dO * O), dQ = 0 before; dQ from fp32 to the dtype after: two kernels bound by memory.
void Gpu::add_gradient_passes() {
    if (q.pass != Pass::backward) return;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double bytes = rows * (2 * dv * e + 4 + 4 * d + 4 * d + d * e);
    account.note("before and after", "O, dO, D, dQ: {:.4g} B / {:.4g} GB/s = {:.4g} ms", bytes, copy_rate() * 1e-6,
                 bytes / copy_rate());
    account.part("before and after", bytes / copy_rate());
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
    account.note("ends of a unit", "{:.0f} + {:.3g} * {:.0f} + {:.2f} * {:.0f} = {:.0f} clk", c.end_cycles,
                 c.end_cycles_per_dim, d, cut_tiles, t.step, ends);
    account.note("units of work", "{} tiles of {}; {} inner tiles together, {} to {} each", units.count,
                 q.pass == Pass::forward ? "queries" : "keys", units.tiles, units.shortest, units.longest);
    account.note("share of a multiprocessor", "({} * {:.0f} + {} * {:.0f}) / {:.0f} = {:.0f} clk", units.tiles, t.step,
                 units.count, ends, sms, share);
    const char* why = q.schedule == Schedule::fa1            ? "whole heads"
                      : count <= sms                         ? "the longest unit"
                      : units.longest == units.shortest      ? "whole rounds of equal units"
                      : family.order == Order::longest_first ? "half of the shortest unit"
                                                             : "a quarter of the longest unit";
    account.note("until the last one is done", "{:.0f} clk more ({})", idle, why);

    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("ends of tiles", count * ends / sms / per_ms);
    account.part("idle cores", idle / per_ms);
    account.note("main kernel", "({:.0f} + {:.0f}) clk / {:.3f} GHz = {:.4g} ms", share, idle, out.clock_ghz,
                 (share + idle) / per_ms);
    add_gradient_passes();
    const double tensors = static_cast<double>(out.cost.work.bytes.dram) / read_rate();
    if (c.dram_exposed > 0) {
        account.note("tensors from DRAM", "{} B / {:.4g} GB/s = {:.4g} ms, {:.2f} of it exposed = {:.4g} ms",
                     out.cost.work.bytes.dram, read_rate() * 1e-6, tensors, c.dram_exposed, c.dram_exposed * tensors);
        account.part("DRAM", c.dram_exposed * tensors);
    }
    add_launches(launches);
}

}  // namespace tessera::model
