// SPDX-License-Identifier: Apache-2.0
//
// The predicted time on a GPU: the functions common to the four shapes of kernel, which are in gpu_fused.cc,
// gpu_passes.cc and gpu_decode.cc.
#include "model/gpu.hpp"

#include <algorithm>
#include <string_view>

#include "core/stack_heads.hpp"
#include "cuda/fa3/host/pack_gqa.hpp"
#include "model/dropout.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

constexpr std::int64_t kOneWarpgroup = 64;  // rows of one warpgroup's MMA

/// Elements in a clock that Constants::mask_exposed counts: masks are the work of ALUs. Exponentials have this rate on
/// all GPUs but those of compute capability 10.3, which have twice as much of it and no more ALUs.
constexpr double kMaskRate = 16;

void add_roofs(Gpu& gpu) {
    const Machine& machine = gpu.q.machine;
    const auto& work = gpu.out.cost.work;
    const double per_ms = gpu.sms * machine.rated_clock_ghz * 1e6;  // clocks of all multiprocessors
    const double flop = gemm_flop(gpu.family, gpu.q.problem, machine);
    gpu.account.roof("tensor", static_cast<double>(work.flop) / (flop * per_ms));
    gpu.account.roof("SFU (exp)", static_cast<double>(work.exps) / (machine.exp_rate * per_ms));
    // An MMA of tcgen05 has 128 rows where wgmma has 64, so that it reads its second operand half as often.
    const double readers = gpu.family.tcgen05 ? 0.5 : 1;
    gpu.account.roof("shared memory",
                     readers * static_cast<double>(work.bytes.shared) / (machine.shared_bytes * per_ms));
    gpu.account.roof("L2", static_cast<double>(work.bytes.l2) / (machine.l2_bytes * per_ms));
    gpu.account.roof("DRAM", static_cast<double>(work.bytes.dram) / (machine.dram_gbs * 1e6));
    gpu.account.roof("launch", gpu.launches() * machine.launch_us * 1e-3);
}

/// The units of a kernel. In tessera's backward, a key block loops over the query heads of a group, or of one of its
/// head splits.
Units units_of_kernel(const schedule::Workload& workload, const Family& family) {
    Units units = units_of(workload, is_ours(family));
    if (workload.pass == Pass::forward || !is_ours(family)) return units;
    const std::int64_t group = std::max<std::int64_t>(workload.problem.group(), 1), splits = head_splits_of(workload);
    units.count = units.count / group * splits;
    units.longest *= schedule::ceil_div(group, splits);
    units.shortest *= schedule::ceil_div(group, splits);
    return units;
}

}  // namespace

std::string clocks_text(double clocks) {
    constexpr double kWhole = 10'000;
    return clocks < kWhole ? fmt::format("{:.5g}", clocks) : fmt::format("{:.0f}", clocks);
}

Gpu::Gpu(const Question& question, const Family& f, Prediction& prediction)
    : q(question),
      family(f),
      c(f.constants),
      out(prediction),
      account(prediction, question.options.worksheet),
      tile(question.options.tile.value_or(tile_of(f, question.problem, question.machine))),
      d(static_cast<double>(padded_dim(f, question.problem.head_dim, question.cached))),
      dv(static_cast<double>(padded_dim(f, question.problem.head_dim_v, question.cached))),
      e(static_cast<double>(size_of(question.problem.dtype))),
      m(rows_at_work()),
      n(static_cast<double>(tile.block_kv)),
      sms(question.machine.cores),
      workload(workload_of(question, tile, static_cast<std::int64_t>(sms))),
      units(units_of_kernel(workload, f)),
      t(tile_cycles()) {
    out.by = f.by;
    out.fitted_on = f.fitted_on;
    out.tile = tile;
    out.cost = cost_of(q, workload);
    out.memory = schedule::footprint(workload);
    count_bias(q, out);
    note_tile();
}

bool Gpu::splits_dv_dk() const {
    return is_ours(family) && q.schedule == Schedule::fa3 && q.pass == Pass::backward && tile.block_kv <= kOneWarpgroup;
}

double Gpu::flop_per_pair() const {
    if (q.pass == Pass::forward) return 2 * (d + dv);
    return splits_dv_dk() ? 2 * (2 * d + 2 * dv) : 2 * (3 * d + 2 * dv);
}

double Gpu::rows_at_work() const {
    const bool skips = is_ours(family) && q.schedule == Schedule::fa3 && q.pass == Pass::forward;
    const bool one =
        skips && c.lone_exposed > 0 && tile.block_q > 2 * kOneWarpgroup && q.problem.len_q <= kOneWarpgroup;
    return static_cast<double>(one ? kOneWarpgroup : tile.block_q);
}

double Gpu::exp_exposed() const {
    if (one_warpgroup()) return c.lone_exposed;
    constexpr std::int64_t kWhole = 128;
    const bool whole = q.problem.len_kv % kWhole == 0;
    return c.exp_exposed + (whole ? 0 : c.uneven_exposed) + (pads_head_dim() ? c.padded_exposed : 0);
}

bool Gpu::in_parts() const { return computes_in_parts(family, q.problem); }

double Gpu::parts_slowdown() const {
    if (q.pass == Pass::backward) return kPartsSlowdownBackward;
    constexpr std::int64_t kMostWithCopies = 128;
    return std::max(q.problem.head_dim, q.problem.head_dim_v) <= kMostWithCopies ? kPartsSlowdownForward
                                                                                 : kPartsSlowdownWide;
}

double Gpu::gemm_rate() const {
    if (in_parts()) return gemm_flop(family, q.problem, q.machine) / parts_slowdown();
    if (q.problem.dtype == DType::fp32) return q.machine.gemm_flop(DType::fp32, false) / kMultiplyAddSlowdown;
    const bool stretched = family.warp_wide && q.machine.warp_matrix_share < 1 && size_of(q.problem.dtype) <= 2;
    return q.machine.gemm_flop(q.problem.dtype, family.warp_wide) / (stretched ? kMmaSyncSlowdown : 1);
}

double Gpu::shared_bytes() const {
    const auto rows = static_cast<double>(rows_per_reader(family, q.problem.head_dim));
    if (q.schedule == Schedule::fa1 && q.pass == Pass::forward) {
        // Four warps take a quarter of the keys each: all read Q, and three quarters of O are exchanged (fp32).
        constexpr double kWarps = 4;
        return n * (d + dv) * e + kWarps * m * d * e + m * d * e + 2 * (kWarps - 1) * m * dv * 4;
    }
    if (q.pass == Pass::forward) return (1 + m / rows) * n * (d + dv) * e;
    if (splits_dv_dk()) {
        // 64 rows at a time: S, dP, dV, dK; P in fp32; Q and dO loaded.
        return (m + n) * (d + dv) * e + m * (d + dv) * e + 8 * m * n + m * (d + dv) * e;
    }
    const double readers = n / rows;  // src/schedule/backward.cc: S, dP, dV, dK, dQ, dS, dQ in fp32, Q and dO
    return n * (2 * d + dv) * e + readers * m * (2 * d + 2 * dv) * e + m * n * e * (1 + readers) + 8 * m * d +
           m * (d + dv) * e;
}

/// The clocks of a multiprocessor that draws dropout's mask for `elements` elements of P and does nothing else.
double Gpu::clocks_of_draws(double elements) const {
    if (q.problem.dropout.probability <= 0 || c.dropout_exposed <= 0) return 0;
    const PhiloxDraws philox = philox_draws_of(family, q.problem);
    return elements / philox.weights * philox_blocks(q.problem.dropout.probability, philox) * kBlockInstructions /
           (kInstructionsPerExp * q.machine.exp_rate);
}

TileCycles Gpu::tile_cycles() const {
    const Machine& machine = q.machine;
    TileCycles cycles;
    cycles.gemms = m * n * flop_per_pair() / gemm_rate();
    cycles.exps = m * n / machine.exp_rate;
    cycles.shared = shared_bytes() / machine.shared_bytes;
    if (q.schedule != Schedule::standard) cycles.draws = clocks_of_draws(m * n);
    const double dq_bytes = q.schedule == Schedule::fa1 ? 8 : 4;  // fa1 reads dQ, too
    if (q.pass == Pass::backward && !splits_dv_dk() && machine.reduce_bytes > 0)
        cycles.adds = dq_bytes * m * d / machine.reduce_bytes;
    const double loaded = q.pass == Pass::forward ? n : m;
    cycles.loads = loaded * (d + dv) * e / machine.l2_bytes;
    if (c.gemm_stretch > 0) cycles.gemms *= c.gemm_stretch;
    const double sum = cycles.gemms + exp_exposed() * cycles.exps + c.shared_exposed * cycles.shared +
                       c.adds_exposed * cycles.adds + c.dropout_exposed * cycles.draws + c.step_cycles;
    cycles.step = std::max(sum, cycles.loads);
    cycles.mask = c.mask_exposed * m * n / kMaskRate;
    return cycles;
}

void Gpu::note_tile() {
    const Machine& machine = q.machine;
    account.note("tile", "{} queries x {} keys, head_dim {:.0f} and {:.0f} as computed", tile.block_q, tile.block_kv, d,
                 dv);
    if (in_parts())
        account.note("FLOP of mma.sync in parts", "{:.0f} * {:.4g} / {:.0f} / {:.4g} = {:.5g} FLOP/clk",
                     machine.matrix_flop.value, machine.warp_matrix_share.value, kMmasPerFp32, parts_slowdown(),
                     gemm_rate());
    if (family.warp_wide && machine.warp_matrix_share < 1 && e <= 2)
        account.note("FLOP of mma.sync", "{:.0f} * {:.4g} / {:.4g} = {:.5g} FLOP/clk", machine.matrix_flop.value,
                     machine.warp_matrix_share.value, kMmaSyncSlowdown, gemm_rate());
    account.note("GEMMs of a tile", "{:.0f} * {:.0f} * {:.0f} FLOP / {:.5g} FLOP/clk = {:.0f} clk", m, n,
                 flop_per_pair(), gemm_rate(), c.gemm_stretch > 0 ? t.gemms / c.gemm_stretch : t.gemms);
    if (c.gemm_stretch > 0)
        account.note("a warp's chain", "each instruction waits for the one before: {:.4g} * {:.0f} = {:.0f} clk",
                     c.gemm_stretch, t.gemms / c.gemm_stretch, t.gemms);
    std::string sum = fmt::format("{:.0f}", t.gemms);
    const auto exposed = [&](const char* what, const std::string& from, double cycles, double share) {
        if (share <= 0 || cycles <= 0) return;
        account.note(what, "{} = {:.6g} clk; exposed of it: {:.3g} * {:.6g} = {:.6g} clk", from, cycles, share, cycles,
                     share * cycles);
        sum += fmt::format(" + {:.6g}", share * cycles);
    };
    if (one_warpgroup())
        account.note("rows of a tile", "{} queries: one warpgroup works, the others have none", q.problem.len_q);
    else if (pads_head_dim() && c.padded_exposed > 0)
        account.note("exponentials exposed", "head_dim {} as {:.0f}: {:.3g} + {:.3g} = {:.3g}", q.problem.head_dim, d,
                     c.exp_exposed, c.padded_exposed, exp_exposed());
    else if (exp_exposed() > c.exp_exposed)
        account.note("exponentials exposed", "keys that do not fill tiles of 128: {:.3g} + {:.3g} = {:.3g}",
                     c.exp_exposed, c.uneven_exposed, exp_exposed());
    exposed("exponentials of a tile", fmt::format("{:.0f} * {:.0f} / {:.4g} per clk", m, n, machine.exp_rate.value),
            t.exps, exp_exposed());
    exposed("shared memory of a tile",
            fmt::format("{:.0f} B / {:.4g} B/clk", shared_bytes(), machine.shared_bytes.value), t.shared,
            c.shared_exposed);
    exposed("dQ accumulation of a tile",
            fmt::format("{:.0f} B / {:.4g} B/clk", t.adds * machine.reduce_bytes, machine.reduce_bytes.value), t.adds,
            c.adds_exposed);
    if (t.draws > 0) {
        const PhiloxDraws philox = philox_draws_of(family, q.problem);
        account.note("blocks of Philox", "{:.4g} for {:.0f} weights, {:.0f} instructions each",
                     philox_blocks(q.problem.dropout.probability, philox), philox.weights, kBlockInstructions);
        exposed("dropout of a tile",
                fmt::format("{:.0f} * {:.0f} / {:.0f} * {:.4g} * {:.0f} / {:.4g} per clk", m, n, philox.weights,
                            philox_blocks(q.problem.dropout.probability, philox), kBlockInstructions,
                            kInstructionsPerExp * machine.exp_rate),
                t.draws, c.dropout_exposed);
    }
    if (c.step_cycles > 0) {
        account.note("warp synchronisation", "{:.0f} clk", c.step_cycles);
        sum += fmt::format(" + {:.0f}", c.step_cycles);
    }
    account.note("operands of a tile", "{:.0f} B / {:.4g} B/clk from L2 = {:.6g} clk", t.loads * machine.l2_bytes,
                 machine.l2_bytes.value, t.loads);
    account.note("one inner tile", "max({}, {:.6g}) = {:.6g} clk", sum, t.loads, t.step);
    if (c.mask_exposed > 0)
        account.note("mask of a partial tile", "of the exponentials{}: {:.3g} * {:.6g} = {:.6g} clk",
                     machine.exp_rate == kMaskRate ? "" : " at 16 per clk", c.mask_exposed, m * n / kMaskRate, t.mask);
}

/// Sets the clock. It falls with the load of the tensor cores, from clock_ghz (none) to loaded_clock_ghz (all of the
/// time).
double Gpu::set_clock(double tiles, double cycles) {
    const Machine& machine = q.machine;
    const double most =
        in_parts() ? machine.gemm_flop(DType::bf16, false) / kMmasPerFp32 : machine.gemm_flop(q.problem.dtype, false);
    const double load = cycles > 0 ? std::min(1.0, tiles * m * n * flop_per_pair() / (cycles * sms * most)) : 0;
    out.clock_ghz = machine.clock_ghz - (machine.clock_ghz - machine.loaded_clock_ghz) * load;
    account.note("load of the tensor cores",
                 "{:.0f} * {:.0f} * {:.0f} * {:.0f} FLOP / ({} clk * {:.0f} * {:.5g}) = {:.4g}", tiles, m, n,
                 flop_per_pair(), clocks_text(cycles), sms, most, load);
    account.note("clock under it", "{:.4g} - ({:.4g} - {:.4g}) * {:.4g} = {:.4f} GHz", machine.clock_ghz.value,
                 machine.clock_ghz.value, machine.loaded_clock_ghz.value, load, out.clock_ghz);
    return out.clock_ghz * 1e6;
}

void Gpu::add_tile_parts(double tiles, double clocks_per_ms) {
    const auto add = [&](const char* name, double cycles) {
        account.part(name, tiles * cycles / sms / clocks_per_ms, "{:.0f} * {:.6g} clk / {:.0f} / {:.4f} GHz", tiles,
                     cycles, sms, clocks_per_ms * 1e-6);
    };
    add("GEMMs", t.gemms);
    add("exponentials", exp_exposed() * t.exps);
    add("shared memory", c.shared_exposed * t.shared);
    add("dQ accumulation", c.adds_exposed * t.adds);
    add("dropout", c.dropout_exposed * t.draws);
    add("warp synchronisation", c.step_cycles);
    const double sum = t.gemms + exp_exposed() * t.exps + c.shared_exposed * t.shared + c.adds_exposed * t.adds +
                       c.dropout_exposed * t.draws + c.step_cycles;
    if (t.step - sum > 1e-9 * sum) add("operands from L2", t.step - sum);
}

void Gpu::add_launches(int launches) {
    account.part("launch", launches * q.machine.launch_us * 1e-3, "{} * {:.4g} us", launches,
                 q.machine.launch_us.value);
    launches_ = launches;
}

/// From this many keys per query on, the pairs that a causal mask hides are negligible.
constexpr std::int64_t kNoDiagonal = 64;

/// The Problem with `heads` query heads of a group as rows of one head.
static Problem with_stacked(const Problem& p, std::int64_t heads) {
    Problem packed = p;
    packed.len_q = p.len_q * heads;
    packed.total_q = p.total_q * heads;
    packed.heads_q = p.heads_q / heads;
    packed.mask = {};
    return packed;
}

/// Applies PackGQA as the family's kernels do, so that K and V are read once. flash-attention's fa2 packs with one
/// query per head (csrc/flash_attn/flash_api.cpp), its fa3 while the heads fit a tile (hopper/heuristics.h,
/// should_pack_gqa), as does tessera's fa3 (cuda/fa3/host/pack_gqa.hpp). cuDNN's rule is not published, but its times
/// with one query per head fit. Rows of which a mask hides much are not packed in the prediction, nor are ragged calls,
/// but for tessera's, whose sequences have fewer keys in place of the mask (visible_keys). Dense calls of tessera that
/// write the residual of O are not packed here either: no Record of packed ones exists.
Problem as_packed(const Problem& p, const Family& family, bool o_residual) {
    if (family.pass != Pass::forward || p.group() == 1) return p;
    const std::string_view by = family.by;
    const bool whole_rows = (!p.ragged || is_decode(family)) && p.mask.window_left == unbounded &&
                            (p.mask.trivial() || p.len_kv >= kNoDiagonal * p.len_q);
    if (is_decode(family)) return whole_rows ? with_stacked(p, p.group()) : p;
    if (is_ours(family)) {
        const bool packs = family.schedule == Schedule::fa3 && (!o_residual || p.ragged);
        const int heads = packs ? cuda::fa3::pack_gqa_of(p).heads() : 1;
        const bool ragged = p.ragged && p.mask.window_left == unbounded;
        return (whole_rows || ragged) && heads > 1 ? with_stacked(p, heads) : p;
    }
    if (stackable(p)) return stacked(p);
    constexpr std::int64_t kTile = 128;  // of queries
    const bool few =
        whole_rows && p.len_q > 1 && p.len_q * p.group() <= kTile && p.len_kv >= kNoDiagonal * p.len_q && !p.alibi;
    return few && family.schedule == Schedule::fa3 && by != "cudnn" ? with_stacked(p, p.group()) : p;
}

/// Keys that a tile of a sequence sees in the mean, under a causal mask over as many queries as keys. `queries`: of the
/// tile.
std::int64_t visible_keys(std::int64_t keys, std::int64_t queries) { return (keys + std::min(keys, queries)) / 2; }

void predict_family(const Question& question, const Family& family, Prediction& prediction) {
    const Problem problem = as_packed(question.problem, family, question.options.o_residual);
    Question as_run = question;
    as_run.problem = problem;
    const std::int64_t packed = problem.heads_q > 0 ? question.problem.heads_q / problem.heads_q : 1;
    if (packed > 1 && is_ours(family) && question.problem.ragged) {
        const Tile tile = tile_of(family, question.problem, question.machine);
        if (!as_run.options.tile) as_run.options.tile = tile;
        if (!question.problem.mask.trivial()) {
            as_run.problem.total_kv = 0;
            for (auto& [queries, keys] : as_run.options.sequences) {
                keys = visible_keys(keys, tile.block_q / packed);
                as_run.problem.total_kv += keys;
            }
        }
    }
    for (auto& [queries, keys] : as_run.options.sequences) queries *= packed;
    Gpu gpu(as_run, family, prediction);
    if (problem.heads_q != question.problem.heads_q)
        gpu.account.note("heads of a group", "{} queries of {} heads share a tile: K and V are read once for them",
                         problem.len_q, packed);
    if (is_decode(family)) gpu.decode(question);
    else if (question.schedule == Schedule::standard) gpu.standard();
    else if (question.schedule == Schedule::fa1 && question.pass == Pass::forward) gpu.fa1();
    else gpu.fused();
    if (family.constants.call_us > 0)
        gpu.account.part("a call", family.constants.call_us * 1e-3, "of any size: {:.3g} us", family.constants.call_us);
    add_roofs(gpu);
    const double dram = static_cast<double>(prediction.cost.work.bytes.dram) / gpu.read_rate();
    gpu.account.at_least("DRAM", dram);
    gpu.account.close();
}

const Family& family_of(const Question& question) {
    const Family& family = *find_family(question.schedule, question.pass, question.options.by);
    return family_for(family, as_packed(question.problem, family, question.options.o_residual), question.machine,
                      question.options.kernel);
}

bool gpu_knows_dropout(const Question& question) { return family_of(question).constants.dropout_exposed > 0; }

void predict_gpu(const Question& question, Prediction& prediction) {
    predict_family(question, family_of(question), prediction);
}

}  // namespace tessera::model
