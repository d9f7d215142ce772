// SPDX-License-Identifier: Apache-2.0
//
// Fused kernels on a GPU: units of work (tiles of queries; in the backward tiles of keys) with an inner loop each, and
// their assignment to multiprocessors.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/backward/host/head_split.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/host/query_tiles.hpp"
#include "model/dq_order.hpp"
#include "model/gpu.hpp"
#include "model/makespan.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {

/// Splits the keys of each unit over several multiprocessors when units are few. Returns the number of kernel launches.
int Gpu::split_keys() {
    const bool by_flash = family.by == std::string_view("flash-attention");
    const bool theirs = by_flash || splits_keys(family, q.problem, q.machine);
    if (q.pass != Pass::forward || !theirs || units.count == 0 || units.longest < 2) return c.launches;
    if (by_flash && q.schedule == Schedule::fa2) {
        splits_ = flash2_splits(q.problem, q.machine);
    } else if (!by_flash) {  // cuDNN's rule is not published; powers of two reproduce its times
        while (2 * splits_ * units.count <= static_cast<std::int64_t>(sms) && 2 * splits_ <= units.longest)
            splits_ *= 2;
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

bool Gpu::masks_all() const {
    const Mask& mask = q.problem.mask;
    const bool left = mask.window_left != unbounded && mask.window_left < q.problem.len_kv;
    return family.masks_windows && (left || mask.window_right != unbounded);
}

bool Gpu::adds_dq_in_order() const {
    return is_ours(family) && q.pass == Pass::backward && q.schedule != Schedule::fa1 && c.dq_add_cycles > 0;
}

/// Stage::heads_longest_first of fa3's backward over head_dim 128, whose key blocks wait for no other; else 0.
std::int64_t Gpu::heads_longest_first() const {
    const Problem& p = q.problem;
    if (!splits_dv_dk() || !cuda::fa3::backward::starts_longest_first(p)) return 0;
    return cuda::fa3::backward::key_block_rounds(p).heads;
}

std::int64_t head_splits_of(const schedule::Workload& w) {
    const Problem& p = w.problem;
    if (w.pass == Pass::forward || p.group() <= 1 || p.heads_kv == 0 || p.dtype == DType::fp32) return 1;
    if (w.schedule == Schedule::fa3) return cuda::fa3::backward::head_splits(p);
    if (w.schedule != Schedule::fa2) return 1;
    using cuda::HeadSplit;
    const auto group = static_cast<int>(p.group());
    if (p.ragged) return HeadSplit::max_splits(p.mask, p.len_q, p.len_kv, group);
    return HeadSplit::num_splits(p.mask.bind(p.len_q, p.len_kv), group);
}

/// The main kernel.
Stage Gpu::stage() const {
    const bool backward = q.pass == Pass::backward;
    return {.problem = q.problem,
            .sequences = q.options.sequences,
            .tile = tile,
            .rows_outer = !backward,
            .whole_groups = backward && is_ours(family),
            .whole_heads = q.schedule == Schedule::fa1,
            .order = family.order,
            .splits = splits_,
            .step = t.step,
            .mask = t.mask,
            .ends = has_small_tiles() ? c.small_end_cycles : c.end_cycles + c.end_cycles_per_dim * d,
            .masks_all = masks_all(),
            .ends_cut = is_ours(family),
            .dq_add = adds_dq_in_order() ? c.dq_add_cycles : 0,
            .fa3_dq_order = q.schedule == Schedule::fa3,
            .heads_longest_first = heads_longest_first()};
}

/// Clocks until the last block is done.
double Gpu::last_done(const Stage& stage, const Units& work, double share) const {
    constexpr std::int64_t kMostBlocks = 1 << 15,
                           kMostTiles = 1 << 19;  // beyond these a closed formula is close enough
    if (work.count == 0) return 0;
    if (stage.dq_add > 0 && work.tiles <= kMostTiles) return clocks_in_dq_order(stage, static_cast<int>(sms));
    if (work.count <= kMostBlocks) {
        const int each = stage.rows_outer ? blocks_at_a_time(family, q.problem, q.machine) : 1;
        return makespan(blocks_in_order(stage), {static_cast<int>(sms), each, each > 1 ? c.single_block_factor : 1});
    }
    const double longest = stage.clocks(work.longest, 0);
    return work.longest == work.shortest ? std::ceil(static_cast<double>(work.count) / sms) * longest
                                         : std::max(longest, share);
}

std::string Gpu::last_done_text(const Stage& stage, const Units& work, double share, double last) const {
    if (work.count == 0) return "no blocks: 0";
    const double longest = stage.clocks(work.longest, 0);
    const double rounds = std::ceil(static_cast<double>(work.count) / sms);
    if (work.longest == work.shortest && std::abs(rounds * longest - last) < 0.5) {
        const std::string whole = fmt::format("{:.0f} * {:.8g} - {}", rounds, longest, clocks_text(share));
        return fmt::format("whole waves of equal blocks: {}", last < share ? "max(0, " + whole + ")" : whole);
    }
    return fmt::format("{}, until the last one ends: {} - {}",
                       stage.dq_add > 0 ? "blocks that add to dQ in a fixed order"
                                        : "each block goes to the first free multiprocessor",
                       clocks_text(std::max(last, share)), clocks_text(share));
}

/// Assigns a kernel's blocks to the multiprocessors and notes the result in the worksheet.
BlockClocks Gpu::schedule_blocks(const Stage& stage, const Units& work) {
    const auto count = static_cast<double>(work.count), tiles = static_cast<double>(work.tiles);
    const auto cut = static_cast<double>(stage.masks_all ? work.tiles : work.cut);
    const double share = (tiles * stage.step + cut * stage.mask + count * stage.ends) / sms;
    const double last = last_done(stage, work, share);
    account.note("blocks of work",
                 "{} tiles of {}, each head in rows of {}; the mask leaves {} inner tiles, {} to {} each", work.count,
                 stage.rows_outer ? "queries" : "keys", stage.rows_outer ? stage.tile.block_q : stage.tile.block_kv,
                 work.tiles, work.shortest, work.longest);
    account.note("mean per multiprocessor", "({} * {:.6g} + {:.0f} partial * {:.6g} + {} * {:.6g}) / {:.0f} = {} clk",
                 work.tiles, stage.step, cut, stage.mask, work.count, stage.ends, sms, clocks_text(share));
    const double idle = last - share > 1e-9 * share ? last - share : 0;  // sums in another order differ by less
    account.note("until the last one is done", "{} = {} clk more", last_done_text(stage, work, share, last),
                 clocks_text(idle));
    return {share, idle, cut};
}

/// Does the last key block to add to dQ write it, in the main kernel?
bool Gpu::writes_dq() const {
    return is_ours(family) && q.schedule == Schedule::fa3 && q.pass == Pass::backward && !splits_dv_dk() &&
           cuda::fa3::backward::writes_dq(q.problem);
}

/// Adds the kernels before and after the main one, which are bound by memory. Other libraries compute
/// D = rowsum(dO * O) and set dQ to 0 before it, and convert dQ to the dtype after it. tessera computes
/// delta = dO . (O + residual) before it, and dQ from its accumulators after it. The first block to add writes an
/// accumulator; fa1 has a single one.
void Gpu::add_gradient_passes() {
    if (q.pass != Pass::backward) return;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    double row = 2 * dv * e + 4 + 4 * d + 4 * d + d * e;
    if (is_ours(family)) {
        const int sums = q.schedule == Schedule::fa3   ? cuda::fa3::backward::dq_accumulators(q.problem)
                         : q.schedule == Schedule::fa2 ? 2
                                                       : 1;
        row = dv * (2 * e + 1) + 4 + (writes_dq() ? 0 : sums * 4 * d + d * e);
    }
    if (is_ours(family) && q.schedule == Schedule::fa3 && q.problem.ragged && !splits_dv_dk() &&
        !q.options.sequences.empty()) {
        const auto sums = static_cast<double>(accumulator_rows(q.problem, q.options.sequences) * q.problem.heads_q);
        row = dv * (2 * e + 1) + 4 + d * e;
        account.part("preprocess and postprocess", (rows * row + sums * 4 * d) / copy_rate(),
                     "O, dO, D, dQ: ({:.0f} * {:.0f} B + {:.0f} accumulated rows * {:.0f} B) / {:.5g} GB/s", rows, row,
                     sums, 4 * d, copy_rate() * 1e-6);
        return;
    }
    const double bytes = rows * row;
    account.part("preprocess and postprocess", bytes / copy_rate(), "O, dO, D, dQ: {:.0f} * {:.0f} B / {:.5g} GB/s",
                 rows, row, copy_rate() * 1e-6);
}

/// Adds what a ragged call of tessera does besides for its sequences. Their last query tiles take the kernels longer
/// than full ones: a forward stores their rows one by one, a backward looks at the rows past their ends, and converts
/// all rows of a tile of dQ. In a backward one thread block lists the key blocks.
void Gpu::add_sequences(double clocks_per_ms) {
    const auto& sequences = q.options.sequences;
    if (is_ragged_flash3()) add_sequences_of_flash3(clocks_per_ms);
    if (!is_ours(family) || !q.problem.ragged || sequences.empty()) return;
    if (q.pass == Pass::backward && !q.empty_blocks)
        account.part("list", c.list_us * 1e-3, "of key blocks, by one thread block: {:.3g} us", c.list_us);
    const std::int64_t heads = static_cast<std::int64_t>(sequences.size()) * q.problem.heads_q;
    account.part("ends of sequences", static_cast<double>(heads) * c.sequence_cycles / sms / clocks_per_ms,
                 "{} sequences of {} heads: {} * {:.0f} clk / {:.0f} / {:.4f} GHz", sequences.size(), q.problem.heads_q,
                 heads, c.sequence_cycles, sms, out.clock_ghz);
}

/// Does a multiprocessor hold two tiles of 64 queries (cuda::fa3::wants_small_tiles)?
bool Gpu::has_small_tiles() const {
    constexpr int kTileOfTwoWarpgroups = 128;
    return is_ours(family) && q.schedule == Schedule::fa3 && q.pass == Pass::forward && c.small_end_cycles > 0 &&
           tile.block_q < kTileOfTwoWarpgroups;
}

bool Gpu::is_ragged_flash3() const {
    return family.by == std::string_view("flash-attention") && !family.tcgen05 && q.schedule == Schedule::fa3 &&
           q.pass == Pass::forward && q.problem.ragged && c.sequence_cycles > 0;
}

/// Adds what a ragged forward of flash-attention's fa3 does besides. The heads of a group are rows of one tile, so a
/// sequence has ends for each kv head. If its rule splits the keys of the longest sequence, a combine kernel runs too.
/// Its grid has blocks of 8 or 16 rows, as if every sequence had the longest length; nearly all find no splits and
/// exit.
void Gpu::add_sequences_of_flash3(double clocks_per_ms) {
    const Problem& p = q.problem;
    const std::int64_t heads = p.batch * p.heads_kv;
    account.part("ends of sequences", static_cast<double>(heads) * c.sequence_cycles / sms / clocks_per_ms,
                 "{} sequences of {} kv heads: {} * {:.0f} clk / {:.0f} / {:.4f} GHz", p.batch, p.heads_kv, heads,
                 c.sequence_cycles, sms, out.clock_ghz);
    const std::int64_t splits = flash3_ragged_splits(p, q.machine);
    if (splits == 1) return;
    const std::int64_t columns = p.head_dim_v <= 64 ? 64 : 128, rows = columns == 64 ? 16 : 8;
    const std::int64_t blocks =
        p.batch * schedule::ceil_div(p.len_q * p.heads_q, rows) * schedule::ceil_div(p.head_dim_v, columns);
    account.part("combine", static_cast<double>(blocks) * c.combine_cycles / sms / clocks_per_ms,
                 "compiled for {} splits of the longest sequence: {} blocks * {:.0f} clk / {:.0f} / {:.4f} GHz", splits,
                 blocks, c.combine_cycles, sms, out.clock_ghz);
}

/// Adds the kernel that sums dK and dV of the head splits, which the main kernel writes in fp32.
void Gpu::add_head_splits(std::int64_t splits) {
    const auto rows = static_cast<double>(q.problem.rows_kv() * q.problem.heads_kv);
    const double row = (d + dv) * (4 * static_cast<double>(splits) + e);
    account.part("head splits", rows * row / copy_rate(),
                 "dK and dV of {} splits of a group: {:.0f} * {:.0f} B / {:.5g} GB/s", splits, rows, row,
                 copy_rate() * 1e-6);
}

/// Adds the sums of dK and dV over the query heads of a group, which flash-attention's fa2 writes head by head: one
/// torch.sum each (csrc/flash_attn/flash_api.cpp). Returns their launches.
int Gpu::add_group_sums() {
    const Problem& p = q.problem;
    const bool by_head = family.by == std::string_view("flash-attention") && q.schedule == Schedule::fa2;
    if (!by_head || q.pass != Pass::backward || p.group() <= 1) return 0;
    const auto rows = static_cast<double>(p.rows_kv());
    const double row = (d + dv) * e * static_cast<double>(p.heads_q + p.heads_kv);
    account.part("sums over groups", rows * row / copy_rate(),
                 "dK and dV of {} query heads, summed in {}: {:.0f} * {:.0f} B / {:.5g} GB/s", p.heads_q, p.heads_kv,
                 rows, row, copy_rate() * 1e-6);
    return 2;
}

/// Adds the thread blocks of a ragged call that have no keys, which kernels of Records started
/// (predict_with_empty_blocks).
void Gpu::add_empty_blocks(std::int64_t splits) {
    const auto& sequences = q.options.sequences;
    if (!q.empty_blocks || sequences.empty() || c.empty_cycles <= 0) return;
    const std::int64_t heads = q.problem.heads_kv * splits;
    const std::int64_t all =
        static_cast<std::int64_t>(sequences.size()) * heads * schedule::ceil_div(q.problem.len_kv, tile.block_kv);
    std::int64_t own = 0;
    for (const auto& [queries, keys] : sequences) own += heads * schedule::ceil_div(keys, tile.block_kv);
    account.part("empty blocks", static_cast<double>(all - own) * c.empty_cycles / sms / (out.clock_ghz * 1e6),
                 "({} - {}) blocks that sequences lack * {:.0f} clk / {:.0f} / {:.4f} GHz", all, own, c.empty_cycles,
                 sms, out.clock_ghz);
}

/// Adds the residual of O that a forward writes for the backward: one byte of each element, rounded apart.
void Gpu::add_residual(double clocks_per_ms) {
    if (!is_ours(family) || q.pass != Pass::forward || !q.options.o_residual || c.residual_cycles <= 0) return;
    const auto elements = static_cast<double>(q.problem.rows_q() * q.problem.heads_q) * dv;
    account.part("residual of O", elements * c.residual_cycles / sms / clocks_per_ms,
                 "{:.0f} elements * {:.3g} clk / {:.0f} / {:.4f} GHz", elements, c.residual_cycles, sms, out.clock_ghz);
}

/// Adds what fa3's producer takes to load blocks of keys from pages, box by box.
void Gpu::add_pages(double main_ms) {
    if (!is_ours(family) || q.page_size == 0) return;
    const double boxes = static_cast<double>(tile.block_kv / std::gcd(q.page_size, tile.block_kv));
    const double factor = pages_factor(boxes);
    account.part("pages", (factor - 1) * main_ms, "a block of keys comes in {:.0f} boxes: ({:.4g} - 1) * {:.6g} ms",
                 boxes, factor, main_ms);
}

/// Notes the DRAM bytes and their time: tensor by tensor in a forward that moves each tensor once.
void Gpu::note_dram() {
    const Problem& p = q.problem;
    const std::int64_t row = (p.head_dim + p.head_dim_v) * size_of(p.dtype);
    const std::int64_t queries = p.rows_q() * p.heads_q;
    const std::int64_t keys = p.rows_kv() * p.heads_kv;
    const std::int64_t bytes = out.cost.work.bytes.dram;
    const double read_alone_ms = static_cast<double>(bytes) / read_rate();
    const std::string at_rate = fmt::format("{} B / {:.5g} GB/s = {:.5g} ms", bytes, read_rate() * 1e-6, read_alone_ms);
    if (q.pass == Pass::forward && queries * (row + 4) + keys * row == bytes)
        account.note("DRAM alone", "Q, O and LSE, K and V: {} * ({} + 4) + {} * {} = {} B; {}", queries, row, keys, row,
                     bytes, at_rate);
    else account.note("DRAM alone", "bytes counted by the schedule (docs/model.md): {}", at_rate);
}

/// The dQ kernel of shapes whose key blocks don't add it up (cuda/fa3/backward/after/dq_kernel.cuh): S and dP once
/// more, and dQ += dS K, by query tiles.
void Gpu::add_dq_kernel() {
    constexpr Tile kTile{128, 64};
    constexpr double kElements = 128 * 64;
    schedule::Workload rows = workload;
    rows.pass = Pass::forward;
    rows.tile = kTile;
    const Units work = units_of(rows);
    const double mma = kElements * 2 * (2 * d + dv) / gemm_rate();
    const double exps = kElements / q.machine.exp_rate;
    Stage stage = this->stage();
    stage.tile = kTile, stage.rows_outer = true, stage.whole_groups = false, stage.order = Order::grid_order;
    stage.step = mma + c.dq_exp_exposed * exps;  // shapes with dropout have no dQ kernel
    stage.mask = c.mask_exposed * exps, stage.ends = c.dq_end_cycles;
    if (stage.heads_longest_first > 0) {
        stage.heads_longest_first = cuda::fa3::backward::query_heads_per_round(q.problem);
    }
    account.note("a tile of dQ", "{:.0f} * {:.0f} FLOP / {:.5g} FLOP/clk + {:.3g} * {:.0f} = {:.6g} clk", kElements,
                 2 * (2 * d + dv), gemm_rate(), c.dq_exp_exposed, exps, stage.step);
    const BlockClocks blocks = schedule_blocks(stage, work);
    account.part("dQ", (blocks.share + blocks.idle) / (out.clock_ghz * 1e6), "({} + {}) clk / {:.4f} GHz",
                 clocks_text(blocks.share), clocks_text(blocks.idle), out.clock_ghz);
}

/// Adds the DRAM time of keys that only one tile reads. Work and traffic overlap except for `stream_exposed` of the
/// shorter one.
void Gpu::add_stream(double main_ms) {
    const auto bytes = static_cast<double>(out.cost.work.bytes.dram);
    const double l2 = q.machine.l2_mib * 1048576.0;
    const double written = std::min(kWrittenShare * bytes, kWrittenOfL2 * l2);
    account.note("write-back",
                 "dirty lines of earlier work in the cache: min({:.3g} * {:.0f} B, {:.3g} * {:.0f} B) = {:.0f} B",
                 kWrittenShare, bytes, kWrittenOfL2, l2, written);
    const double dram = (bytes + written) / read_rate();
    account.note("memory alone", "({:.0f} + {:.0f}) B / {:.5g} GB/s = {:.5g} ms", bytes, written, read_rate() * 1e-6,
                 dram);
    const double longer = std::max(dram - main_ms, 0.0), shorter = c.stream_exposed * std::min(dram, main_ms);
    account.part("K and V from DRAM", longer + shorter,
                 "beside the kernel's work: max({0:.8g} - {1:.8g}, 0) + {2:.3g} * min({0:.8g}, {1:.8g})", dram, main_ms,
                 c.stream_exposed);
}

/// Adds the second kernel, which combines the splits of each row.
void Gpu::add_combine() {
    if (splits_ > 1 && c.split_us > 0)
        account.part("combine", static_cast<double>(splits_) * c.split_us * 1e-3, "splits of the keys: {} * {:.3g} us",
                     splits_, c.split_us);
}

/// Does a call of one wave wait for cold memory besides what a call takes? cuDNN's calls of one wave take no longer
/// than its call_us says.
bool Gpu::begins_cold() const {
    const bool counted = family.by == std::string_view("cudnn") && !family.tcgen05 && c.call_us > 0;
    return one_wave() && !counted;
}

void Gpu::add_cold_start() {
    account.part("cold start", kColdStart * 1e-3, "of the first tiles: {:.3g} us", kColdStart);
}

void Gpu::fused() {
    int launches = split_keys();
    if (is_ours(family) && q.schedule == Schedule::fa3 && q.pass == Pass::forward &&
        cuda::fa3::dynamic_scheduling(q.problem, static_cast<std::int64_t>(sms)))
        ++launches;  // one sets the tile scheduler's counter to 0
    if (writes_dq()) --launches;
    if (is_ragged_flash3()) launches += flash3_ragged_splits(q.problem, q.machine) > 1 ? 2 : 1;  // one counts the tiles
    const Stage main = stage();
    if (has_small_tiles()) account.note("prologue and epilogue", "of small tiles: {:.6g} clk", main.ends);
    else
        account.note("prologue and epilogue", "{:.0f} + {:.3g} * {:.0f} = {:.6g} clk", c.end_cycles,
                     c.end_cycles_per_dim, d, main.ends);
    const auto [share, idle, cut] = schedule_blocks(main, units);
    const auto count = static_cast<double>(units.count);
    const auto tiles = static_cast<double>(units.tiles);

    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("partial tiles", cut * main.mask / sms / per_ms, "{:.0f} * {:.6g} clk / {:.0f} / {:.4f} GHz", cut,
                 main.mask, sms, out.clock_ghz);
    account.part("prologues and epilogues", count * main.ends / sms / per_ms,
                 "{:.0f} * {:.6g} clk / {:.0f} / {:.4f} GHz", count, main.ends, sms, out.clock_ghz);
    account.part("idle cores", idle / per_ms, "{} clk / {:.4f} GHz", clocks_text(idle), out.clock_ghz);
    account.note("main kernel", "({} + {}) clk / {:.4f} GHz = {:.4g} ms", clocks_text(share), clocks_text(idle),
                 out.clock_ghz, (share + idle) / per_ms);
    add_pages((share + idle) / per_ms);
    add_residual(per_ms);
    if (splits_dv_dk()) add_dq_kernel();
    const std::int64_t head_splits = is_ours(family) ? head_splits_of(workload) : 1;
    if (head_splits > 1) add_head_splits(head_splits), ++launches;
    launches += add_group_sums();
    add_empty_blocks(head_splits);
    add_sequences(per_ms);
    add_gradient_passes();
    note_dram();
    if (c.dram_exposed > 0) {
        const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
        const double row = (d + dv) * e + 4;
        account.part("DRAM", c.dram_exposed * rows * row / read_rate(),
                     "exposed of Q, O and LSE: {:.3g} * {:.0f} * {:.0f} B / {:.5g} GB/s", c.dram_exposed, rows, row,
                     read_rate() * 1e-6);
    }
    if (streams()) add_stream((share + idle) / per_ms);
    add_combine();
    if (q.pass == Pass::forward && (begins_cold() || streams())) add_cold_start();
    add_launches(launches);
}

}  // namespace tessera::model
