// SPDX-License-Identifier: Apache-2.0
//
// fa1's forward, whose inner loop reads and writes O, and standard attention, three passes over the N x N matrix.
#include <algorithm>
#include <cmath>

#include "cuda/fa1/shapes.hpp"
#include "model/gpu.hpp"

namespace tessera::model {
namespace {

// The softmax of tessera's standard kernel (src/cuda/standard/config.h): a row is a block of threads and stays in
// shared memory, so that long rows leave room for few of them.
constexpr double kMostRows = 16;          // blocks of 128 threads on a multiprocessor
constexpr double kKeysHeld = 16384;       // of a row
constexpr double kRowsForFullRate = 4.1;  // fitted on tessera's standard on H200

/// One pass over the matrix.
struct MatrixPass {
    const char* name;
    double bytes;  ///< of an element, read or written
    double rate;   ///< bytes a millisecond
    double share;  ///< of all products
};

}  // namespace

void Gpu::fa1() {
    const auto tiles = static_cast<double>(units.tiles);
    const double share = tiles * t.step / sms;
    // A thread block takes so many tiles of queries through the keys side by side.
    const int together = cuda::fa1::config_of(q.problem).groups;
    const double longest = static_cast<double>(together * units.longest) * t.step;
    const double idle = std::max(0.0, longest - share);
    account.note("share of a multiprocessor", "{} tiles * {:.1f} clk / {:.0f} = {:.0f} clk", units.tiles, t.step, sms,
                 share);
    if (idle > 0)
        account.note("until the last one is done",
                     "a block of {} tiles of queries: {} * {} * {:.1f} - {:.0f} = {:.0f} clk", together, together,
                     units.longest, t.step, share, idle);
    const double per_ms = set_clock(tiles, share + idle);
    add_tile_parts(tiles, per_ms);
    account.part("idle cores", idle / per_ms, "{:.0f} clk / {:.4f} GHz", idle, out.clock_ghz);
    account.note("main loop", "({:.0f} + {:.0f}) clk / {:.4f} GHz = {:.4g} ms", share, idle, out.clock_ghz,
                 (share + idle) / per_ms);
    // O, m and l are prefetched between blocks; the first and the last pass over them have nothing to hide behind.
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double bytes = rows * (2 * (4 * dv + 8) + dv * e);
    account.part("first and last pass", c.dram_exposed * bytes / copy_rate(),
                 "over O: {:.3g} * {:.0f} rows * {:.0f} B / {:.5g} GB/s", c.dram_exposed, rows,
                 2 * (4 * dv + 8) + dv * e, copy_rate() * 1e-6);
    add_launches(c.launches);
}

/// Pass 2 of the forward: rows that are read and written, while few of them fit a multiprocessor at once.
void Gpu::add_softmax(double elements) {
    const double held = 4 * std::min(static_cast<double>(q.problem.len_kv), kKeysHeld) + 64;
    const double blocks = std::clamp(std::floor(q.machine.shared_kib * 1024 / held), 1.0, kMostRows);
    const double slowed = std::max(1.0, kRowsForFullRate / blocks);
    const double traffic = elements * (4 / read_rate() + e / copy_rate()) * slowed;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double row_time = c.row_cycles * rows / sms / (q.machine.clock_ghz * 1e6);
    account.note("pass 2: traffic of S and P",
                 "{:.0f} rows at once, full rate from {:.2g} on: {} * (4 B / {:.5g} GB/s + {:.0f} B / {:.5g} GB/s) * "
                 "{:.4g} = {:.5g} ms",
                 blocks, kRowsForFullRate, out.cost.elements, read_rate() * 1e-6, e, copy_rate() * 1e-6, slowed,
                 traffic);
    account.note("pass 2: rows", "{:.0f} * {:.0f} clk / {:.0f} / {:.4g} GHz = {:.5g} ms", rows, c.row_cycles, sms,
                 q.machine.clock_ghz.value, row_time);
    account.part("softmax", std::max(traffic, row_time + c.row_exposed * traffic),
                 "max({:.5g}, {:.5g} + {:.3g} * {:.5g})", traffic, row_time, c.row_exposed, traffic);
}

void Gpu::standard() {
    const bool forward = q.pass == Pass::forward;
    const auto tiles = static_cast<double>(units.tiles);
    const auto elements = static_cast<double>(out.cost.elements);
    const double per_ms = set_clock(tiles, tiles * t.step / sms);
    const double products = tiles * (t.products + c.shared_exposed * t.shared) / sms / per_ms;
    account.note("products of all passes", "{} * ({:.0f} + {:.3g} * {:.1f}) clk / {:.0f} / {:.4f} GHz = {:.5g} ms",
                 units.tiles, t.products, c.shared_exposed, t.shared, sms, out.clock_ghz, products);
    // Two of the five products of the backward make P and dS, one dQ, two dV and dK.
    const MatrixPass first{forward ? "pass 1: S = Q K^T" : "pass 1: P and dS", forward ? 4.0 : 8.0, copy_rate(),
                           forward ? 0.5 : 0.4};
    const MatrixPass last{forward ? "pass 3: O = P V" : "pass 3: dV and dK", forward ? e : 8.0, read_rate(),
                          forward ? 0.5 : 0.4};
    const auto add = [&](const MatrixPass& pass, const char* part) {
        const double traffic = elements * pass.bytes / pass.rate, own = products * pass.share;
        account.note(
            pass.name,
            "traffic of S and P: {} * {:.0f} B / {:.5g} GB/s = {:.5g} ms; products: {:.3g} * {:.5g} = {:.5g} ms",
            out.cost.elements, pass.bytes, pass.rate * 1e-6, traffic, pass.share, products, own);
        account.part(part, std::max(traffic, own) + c.pass_exposed * std::min(traffic, own),
                     "the longer and a share of the shorter: {:.5g} + {:.3g} * {:.5g}", std::max(traffic, own),
                     c.pass_exposed, std::min(traffic, own));
    };
    add(first, forward ? "scores" : "P and dS");
    if (forward) {
        add_softmax(elements);
    } else {
        add({"pass 2: dQ", 4.0, read_rate(), 0.2}, "dQ");
    }
    add(last, forward ? "values" : "dV and dK");
    add_launches(c.launches);
}

}  // namespace tessera::model
