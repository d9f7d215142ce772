// SPDX-License-Identifier: Apache-2.0
//
// The predicted time of fa1's forward, whose inner loop reads and writes O, and of standard attention, three passes
// over the N x N matrix.
#include <algorithm>
#include <cmath>

#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/standard/host/config.h"
#include "model/dropout.hpp"
#include "model/gpu.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

// The softmax of tessera's standard kernel assigns a row to a thread block and keeps it in shared memory, so that few
// long rows are resident.
constexpr double kMostRows = 16;          // blocks of 128 threads on a multiprocessor
constexpr double kRowsForFullRate = 4.1;  // fitted on tessera's standard on H200

}  // namespace

/// One pass over the matrix.
struct MatrixPass {
    const char* name;
    const char* part;   ///< name of its part of the time
    double bytes;       ///< bytes read or written per element
    double rate;        ///< bytes a millisecond
    double gemm_share;  ///< fraction of the FLOP of all passes
};

/// The stage of fa1. A thread block goes through the keys of a head with several tiles of queries at once. If heads are
/// fewer than multiprocessors, a head has several blocks (parts_of in cuda/fa1/kernels.cc).
Stage Gpu::stage_of_fa1() const {
    const Problem& p = q.problem;
    const std::int64_t interleaved = cuda::fa1::config_of(p).groups;
    const std::int64_t tiles = schedule::ceil_div(p.len_q, tile.block_q);
    const std::int64_t heads = std::max<std::int64_t>(p.batch * p.heads_q, 1);
    Stage stage = this->stage();
    stage.whole_heads = true;
    stage.interleaved = interleaved;
    stage.blocks_per_head = std::clamp<std::int64_t>(static_cast<std::int64_t>(sms) / heads, 1,
                                                     std::max<std::int64_t>(tiles / interleaved, 1));
    return stage;
}

void Gpu::fa1() {
    const auto [share, idle, cut] = schedule_blocks(stage_of_fa1(), units);
    const auto tiles = static_cast<double>(units.tiles);
    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("idle cores", idle / per_ms, "{} clk / {:.4f} GHz", clocks_text(idle), out.clock_ghz);
    account.note("main loop", "({} + {}) clk / {:.4f} GHz = {:.4g} ms", clocks_text(share), clocks_text(idle),
                 out.clock_ghz, (share + idle) / per_ms);
    // O, m and l are prefetched between blocks, but nothing hides the first and the last pass over them.
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double bytes = rows * (2 * (4 * dv + 8) + dv * e);
    account.part("first and last pass", c.dram_exposed * bytes / copy_rate(),
                 "over O: {:.3g} * {:.0f} rows * {:.0f} B / {:.5g} GB/s", c.dram_exposed, rows,
                 2 * (4 * dv + 8) + dv * e, copy_rate() * 1e-6);
    add_launches(c.launches);
}

/// Adds the pass over rows: S to P, or S and dP to P and dS in the backward. While few rows fit a multiprocessor at
/// once, they bound the rate.
void Gpu::add_rows(double elements) {
    const bool forward = q.pass == Pass::forward;
    const char* name = forward ? "softmax" : "rows";
    const double matrices = forward ? 1 : 2;
    const double most = forward ? cuda::standard::kKeysCached : cuda::standard::kGradientKeysCached;  // keys per matrix
    const double held = 4 * matrices * std::min(static_cast<double>(q.problem.len_kv), most) + 64;
    const double blocks = std::clamp(std::floor(q.machine.shared_kib * 1024 / held), 1.0, kMostRows);
    const double slowed = std::max(1.0, kRowsForFullRate / blocks);
    const double traffic = elements * matrices * (4 / read_rate() + e / copy_rate()) * slowed;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double row_time = c.row_cycles * rows / sms / (q.machine.clock_ghz * 1e6);
    account.note(forward ? "pass 2: traffic of S and P" : "pass 3: traffic of S, dP, P and dS",
                 "{:.0f} rows at once, full rate from {:.2g} on: {} * {:.0f} * (4 B / {:.5g} GB/s + {:.0f} B / {:.5g} "
                 "GB/s) * {:.4g} = {:.5g} ms",
                 blocks, kRowsForFullRate, out.cost.elements, matrices, read_rate() * 1e-6, e, copy_rate() * 1e-6,
                 slowed, traffic);
    account.note(forward ? "pass 2: rows" : "pass 3: rows", "{:.0f} * {:.0f} clk / {:.0f} / {:.4g} GHz = {:.5g} ms",
                 rows, c.row_cycles, sms, q.machine.clock_ghz.value, row_time);
    account.part(name, std::max(traffic, row_time + c.row_exposed * traffic), "max({:.5g}, {:.5g} + {:.3g} * {:.5g})",
                 traffic, row_time, c.row_exposed, traffic);
    if (const double draws = clocks_of_draws(elements); draws > 0) {
        const PhiloxDraws philox = philox_draws_of(family, q.problem);
        const double drawn = philox_blocks(q.problem.dropout.probability, philox);
        account.part("dropout", c.dropout_exposed * draws / sms / (q.machine.clock_ghz * 1e6),
                     "{:.3g} * {} / {:.0f} weights * {:.4g} blocks * {:.0f} / {:.4g} per clk / {:.0f} / {:.4g} GHz",
                     c.dropout_exposed, out.cost.elements, philox.weights, drawn, kBlockInstructions,
                     kInstructionsPerExp * q.machine.exp_rate, sms, q.machine.clock_ghz.value);
    }
}

/// Adds a GEMM pass: the longer one of traffic and GEMM, and `pass_exposed` of the other.
void Gpu::add_pass(const MatrixPass& pass, double elements, double gemm_ms) {
    const double traffic = elements * pass.bytes / pass.rate, own = gemm_ms * pass.gemm_share;
    account.note(pass.name,
                 "traffic of S and P: {} * {:.0f} B / {:.5g} GB/s = {:.5g} ms; GEMM: {:.3g} * {:.5g} = {:.5g} ms",
                 out.cost.elements, pass.bytes, pass.rate * 1e-6, traffic, pass.gemm_share, gemm_ms, own);
    account.part(pass.part, std::max(traffic, own) + c.pass_exposed * std::min(traffic, own),
                 "the longer and a share of the shorter: {:.5g} + {:.3g} * {:.5g}", std::max(traffic, own),
                 c.pass_exposed, std::min(traffic, own));
}

/// Corrects the bytes of the backward. The schedule counts Algorithm 3, 20 bytes an element. The kernels
/// (src/cuda/standard) write S and dP, read both to write P and dS in 16 bits, and read dS twice and P once.
void Gpu::count_gradient_matrices() {
    constexpr std::int64_t kCounted = 20;
    const std::int64_t moved = 4 * 4 + 2 * size_of(q.problem.dtype) + 3 * size_of(q.problem.dtype);
    const std::int64_t more = (moved - kCounted) * out.cost.elements;
    out.cost.work.bytes.l2 += more;
    if (!workload.residency.scores) out.cost.work.bytes.dram += more;
}

void Gpu::standard() {
    const auto tiles = static_cast<double>(units.tiles);
    const auto elements = static_cast<double>(out.cost.elements);
    const double per_ms = set_clock(tiles, tiles * t.step / sms);
    // Each tile of queries has one block for its whole row.
    const auto longest = static_cast<double>(units.longest);
    const double gemm_ms = std::max(tiles / sms, longest) * (t.gemms + c.shared_exposed * t.shared) / per_ms;
    account.note("GEMMs of all passes",
                 "max({} / {:.0f}, {}) * ({:.0f} + {:.3g} * {:.6g}) clk / {:.4f} GHz = {:.5g} ms", units.tiles, sms,
                 units.longest, t.gemms, c.shared_exposed, t.shared, out.clock_ghz, gemm_ms);
    const double write = copy_rate(), read = read_rate();
    if (q.pass == Pass::forward) {
        add_pass({"pass 1: S = Q K^T", "scores", 4, write, 0.5}, elements, gemm_ms);
        add_rows(elements);
        add_pass({"pass 3: O = P V", "values", e, read, 0.5}, elements, gemm_ms);
    } else {
        const double all = 3 * d + 2 * dv;  // columns of the five GEMMs
        add_pass({"pass 1: S = Q K^T", "scores", 4, write, d / all}, elements, gemm_ms);
        add_pass({"pass 2: dP = dO V^T", "dP", 4, write, dv / all}, elements, gemm_ms);
        add_rows(elements);
        add_pass({"pass 4: dQ = dS K", "dQ", e, read, d / all}, elements, gemm_ms);
        add_pass({"pass 5: dV = P^T dO", "dV", e, read, dv / all}, elements, gemm_ms);
        add_pass({"pass 6: dK = dS^T Q", "dK", e, read, d / all}, elements, gemm_ms);
        count_gradient_matrices();
    }
    add_launches(c.launches);
}

}  // namespace tessera::model
