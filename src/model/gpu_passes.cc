// SPDX-License-Identifier: Apache-2.0
//
// fa1's forward, whose inner loop reads and writes O, and standard attention, three passes over the N x N matrix.
#include <algorithm>
#include <cmath>

#include "model/gpu.hpp"

namespace tessera::model {
namespace {

// The softmax of tessera's standard kernel (src/cuda/standard/config.h): a row is a block of threads and stays in
// shared memory, so that long rows leave room for few of them.
constexpr double kMostRows = 16;          // blocks of 128 threads on a multiprocessor
constexpr double kKeysHeld = 16384;       // of a row
constexpr double kRowsForFullRate = 4.1;  // fitted on bench/results/h200/schedules.jsonl

/// Times of one pass over the matrix, ms.
struct MatrixPass {
    const char* name;
    double traffic;
    double products;

    /// They overlap but for `exposed` of the shorter one.
    double ms(double exposed) const { return std::max(traffic, products) + exposed * std::min(traffic, products); }
};

}  // namespace

void Gpu::fa1() {
    const auto tiles = static_cast<double>(units.tiles);
    const double share = tiles * t.step / sms;
    const double idle = std::max(0.0, static_cast<double>(units.longest) * t.step - share);
    account.note("share of a multiprocessor", "{} tiles * {:.0f} clk / {:.0f} = {:.0f} clk", units.tiles, t.step, sms,
                 share);
    if (idle > 0) account.note("until the last one is done", "{:.0f} clk more (the longest tile of queries)", idle);
    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("idle cores", idle / per_ms);
    account.note("main loop", "({:.0f} + {:.0f}) clk / {:.3f} GHz = {:.4g} ms", share, idle, out.clock_ghz,
                 (share + idle) / per_ms);
    // O, m and l are prefetched between blocks; the first and the last pass over them have nothing to hide behind.
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double bytes = rows * (2 * (4 * dv + 8) + dv * e);
    account.note("first and last pass over O", "{:.0f} rows * {:.0f} B / {:.4g} GB/s = {:.4g} ms", rows,
                 2 * (4 * dv + 8) + dv * e, copy_rate() * 1e-6, bytes / copy_rate());
    account.part("first and last pass", c.dram_exposed * bytes / copy_rate());
    add_launches(c.launches);
}

void Gpu::standard() {
    const bool forward = q.pass == Pass::forward;
    const auto tiles = static_cast<double>(units.tiles);
    const auto elements = static_cast<double>(out.cost.elements);
    const double per_ms = set_clock(tiles, tiles * t.step / sms);
    const double products = tiles * (t.products + c.shared_exposed * t.shared) / sms / per_ms;
    account.note("products of all passes", "{} * ({:.0f} + {:.2f} * {:.0f}) clk / {:.0f} / {:.3f} GHz = {:.4g} ms",
                 units.tiles, t.products, c.shared_exposed, t.shared, sms, out.clock_ghz, products);
    account.note("elements of S", "{}; reading at {:.4g}, writing at {:.4g} GB/s", out.cost.elements,
                 read_rate() * 1e-6, copy_rate() * 1e-6);
    // Two of the five products of the backward make P and dS, one dQ, two dV and dK.
    const MatrixPass first{forward ? "pass 1: S = Q K^T" : "pass 1: P and dS",
                           elements * (forward ? 4.0 : 8.0) / copy_rate(), products * (forward ? 0.5 : 0.4)};
    const MatrixPass last{forward ? "pass 3: O = P V" : "pass 3: dV and dK",
                          elements * (forward ? e : 8.0) / read_rate(), products * (forward ? 0.5 : 0.4)};
    const auto add = [&](const MatrixPass& pass, const char* part) {
        const double ms = pass.ms(c.pass_exposed);
        account.note(pass.name, "traffic {:.4g} ms, products {:.4g} ms: the longer + {:.2f} of the shorter = {:.4g} ms",
                     pass.traffic, pass.products, c.pass_exposed, ms);
        account.part(part, ms);
    };
    add(first, forward ? "scores" : "P and dS");
    if (forward) {
        const double held = 4 * std::min(static_cast<double>(q.problem.len_kv), kKeysHeld) + 64;
        const double blocks = std::clamp(std::floor(q.machine.shared_kib * 1024 / held), 1.0, kMostRows);
        const double slowed = std::max(1.0, kRowsForFullRate / blocks);
        const double traffic = elements * (4 / read_rate() + e / copy_rate()) * slowed;
        const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
        const double row_time = c.row_cycles * rows / sms / (q.machine.clock_ghz * 1e6);
        const double ms = std::max(traffic, row_time + c.row_exposed * traffic);
        account.note(
            "pass 2: softmax",
            "traffic {:.4g} ms ({:.0f} rows at once); {:.0f} rows * {:.0f} clk / {:.0f} = {:.4g} ms: {:.4g} ms",
            traffic, blocks, rows, c.row_cycles, sms, row_time, ms);
        account.part("softmax", ms);
    } else {
        add({"pass 2: dQ", elements * 4 / read_rate(), products * 0.2}, "dQ");
    }
    add(last, forward ? "values" : "dV and dK");
    add_launches(c.launches);
}

}  // namespace tessera::model
