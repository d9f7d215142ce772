// SPDX-License-Identifier: Apache-2.0
//
// Time of tessera's CPU kernels: products at the multiply-add rate, the softmax beside them, an even deal to threads
// with what is left over, cold memory, and the start of parallel loops.
#include <algorithm>
#include <cmath>

#include "model/parts.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

// Fitted on bench/results/cpu/torch_fp32_xeon16.jsonl (tessera's rows: fa2, fp32, 1 and 16 threads, 32 + 32 rows).
constexpr double kSoftmaxForward = 2.3;   // of the exponentials' time: maximum, sum, scale of O
constexpr double kSoftmaxBackward = 4.0;  // P and dS, and their transposes
constexpr double kStepCycles = 2000;      // of a tile: calls, packing of K and V
constexpr double kGradientTensors = 2.2;  // the backward keeps Q, dO, dQ, dK, dV in fp32, too

constexpr Tile kTile{64, 64};         // cpu/backend.cc
constexpr double kLanes = 16;         // tile.hpp: rows of a tile are padded to it
constexpr std::int64_t kChunk = 512;  // fa2: a task is at least a tile of queries and so many keys

struct Cpu {
    const Question& q;
    Prediction& out;
    Account account;
    Tile tile;
    double threads;
    schedule::Workload workload{};
    Units units{};
    double busy = 1;    ///< threads that have work
    double per_ms = 0;  ///< clocks

    Cpu(const Question& question, Prediction& prediction)
        : q(question),
          out(prediction),
          account(prediction, question.options.worksheet),
          tile(question.options.tile.value_or(kTile)),
          threads(question.options.threads > 0 ? question.options.threads : question.machine.cores.value) {
        threads = std::min(threads, q.machine.cores.value);
        prediction.by = "tessera";
        prediction.fitted_on = q.schedule == Schedule::fa2 ? "bench/results/cpu/torch_fp32_xeon16.jsonl" : "";
        prediction.tile = tile;
        workload = workload_of(q, tile, static_cast<std::int64_t>(threads));
        units = units_of(workload);
        out.cost = schedule::cost(workload);
        out.memory = schedule::footprint(workload);
        busy = std::min(threads, std::max(1.0, tasks()));
        const Machine& m = q.machine;
        const double crowd = busy > 1 ? (busy - 1) / (m.cores - 1) : 0.0;
        out.clock_ghz = m.clock_ghz - (m.clock_ghz - m.loaded_clock_ghz) * crowd;
        per_ms = out.clock_ghz * 1e6;
    }

    bool forward() const { return q.pass == Pass::forward; }
    double tasks() const;
    void add_arithmetic();
    void add_memory();
    void add_loops();
    void add_roofs();
};

/// How many tasks the kernels can make of the problem.
double Cpu::tasks() const {
    const Problem& p = q.problem;
    const auto heads = static_cast<double>(p.batch * p.heads_q);
    const auto rows = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_q, 1), tile.block_q));
    if (q.pass == Pass::backward) {
        const auto kv_heads = static_cast<double>(p.batch * p.heads_kv);
        if (q.schedule == Schedule::fa1) return kv_heads;
        return heads * std::max(rows, 1.0);
    }
    if (q.schedule != Schedule::fa2) return heads * rows;
    const auto chunks = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_kv, 1), kChunk));
    const double lanes = std::clamp(static_cast<double>(std::min(tile.block_q, p.len_q)) / kLanes, 1.0, 4.0);
    return heads * rows * chunks * lanes;
}

void Cpu::add_roofs() {
    const Machine& m = q.machine;
    const auto& work = out.cost.work;
    const double rated = threads * m.rated_clock_ghz * 1e6;  // clocks a millisecond
    account.roof("FMA", static_cast<double>(work.flop) / (m.product_flop(q.problem.dtype, false) * rated));
    account.roof("exp", static_cast<double>(work.exps) / (m.exp_rate * rated));
    account.roof("cache", static_cast<double>(work.bytes.l2) / (m.l2_bytes * rated));
    account.roof("DRAM", static_cast<double>(work.bytes.dram) / (m.dram_gbs * 1e6));
}

/// Products, softmax and calls of all tiles, dealt to the threads.
void Cpu::add_arithmetic() {
    const Machine& m = q.machine;
    const auto d = static_cast<double>(q.problem.head_dim);
    const auto dv = static_cast<double>(q.problem.head_dim_v);
    const double per_pair = forward() ? 2 * (d + dv) : 2 * (3 * d + 2 * dv);
    const auto rows = static_cast<double>(std::min(tile.block_q, std::max<std::int64_t>(q.problem.len_q, 1)));
    const double padding = std::ceil(rows / kLanes) * kLanes / rows;  // lanes beyond the last query are computed
    const double elements = static_cast<double>(out.cost.elements) * padding;
    const double share_of_exp = forward() ? kSoftmaxForward : kSoftmaxBackward;
    const auto tiles = static_cast<double>(units.tiles);
    const double products = elements * per_pair / m.product_flop(q.problem.dtype, false);
    const double softmax = elements / m.exp_rate * share_of_exp;
    const double calls = tiles * kStepCycles;
    const double total = products + softmax + calls;
    const double share = total / busy;
    double idle = 0;
    if (forward() && busy > 1 && tiles > 0) idle = 0.5 * static_cast<double>(units.shortest) * total / tiles;
    const auto kv_heads = static_cast<double>(q.problem.batch * q.problem.heads_kv);
    if (!forward() && q.schedule == Schedule::fa1 && kv_heads > 0)  // whole heads
        idle = std::ceil(kv_heads / busy) / kv_heads * total - share;
    account.note("elements", "{} pairs in {} tiles, with padded lanes {:.4g}", out.cost.elements, units.tiles,
                 elements);
    account.note("products", "{:.4g} * {:.0f} FLOP / {:.4g} FLOP/clk = {:.4g} clk", elements, per_pair,
                 m.product_flop(q.problem.dtype, false), products);
    account.note("softmax", "{:.4g} / {:.3g} exp/clk * {:.2g} = {:.4g} clk", elements, m.exp_rate.value, share_of_exp,
                 softmax);
    account.note("calls", "{} * {:.0f} = {:.4g} clk", units.tiles, kStepCycles, calls);
    account.note("clock", "{:.0f} of {:.0f} cores busy: {:.3f} GHz", busy, m.cores.value, out.clock_ghz);
    account.note("share of a thread", "{:.4g} / {:.0f} = {:.4g} clk, {:.4g} more until the last is done", total, busy,
                 share, idle);
    account.part("products", products / busy / per_ms);
    account.part("softmax", softmax / busy / per_ms);
    account.part("calls", calls / busy / per_ms);
    account.part("idle cores", idle / per_ms);
}

/// Tensors that are not in a cache when the call begins, and the matrices of standard.
void Cpu::add_memory() {
    const Machine& m = q.machine;
    const Problem& p = q.problem;
    const double read = m.dram_gbs * m.dram_read_share * 1e6;
    double bytes = static_cast<double>(p.rows_q() * p.heads_q + p.rows_kv() * p.heads_kv) *
                   static_cast<double>((p.head_dim + p.head_dim_v) * size_of(p.dtype));
    if (!forward()) bytes *= 2 * kGradientTensors;
    account.note("cold memory", "{:.4g} B / {:.4g} GB/s = {:.4g} ms", bytes, read * 1e-6, bytes / read);
    account.part("DRAM", bytes / read);
    if (q.schedule != Schedule::standard) return;
    // S, P (and dS) written and read, and each line that is overwritten is fetched first.
    const double matrices = static_cast<double>(out.cost.elements) * (forward() ? 20.0 : 28.0);
    const double rate = workload.residency.scores ? m.l2_bytes * busy * per_ms : read;
    account.note("N x N matrices", "{:.4g} B / {:.4g} GB/s = {:.4g} ms", matrices, rate * 1e-6, matrices / rate);
    account.part("N x N matrices", matrices / rate);
}

/// Parallel loops; fa2's backward has one for each round of its Latin square when heads do not fill the threads.
void Cpu::add_loops() {
    if (threads <= 1) return;
    const Problem& p = q.problem;
    const auto kv_heads = static_cast<double>(p.batch * p.heads_kv);
    const bool heads_fill = kv_heads >= threads && (std::fmod(kv_heads, threads) == 0 || kv_heads >= 4 * threads);
    double loops = forward() ? 1 : 3;
    if (!forward() && q.schedule == Schedule::fa2 && !heads_fill) {
        const std::int64_t rounds =
            std::max(schedule::ceil_div(p.len_q, tile.block_q), schedule::ceil_div(p.len_kv, tile.block_kv));
        loops += static_cast<double>(rounds * p.group());
    }
    const double ms = loops * q.machine.launch_us * 1e-3;
    account.note("parallel loops", "{:.0f} * {:.3g} us = {:.4g} ms", loops, q.machine.launch_us.value, ms);
    account.part("launch", ms);
}

}  // namespace

void predict_cpu(const Question& question, Prediction& prediction) {
    Cpu cpu(question, prediction);
    cpu.add_arithmetic();
    cpu.add_memory();
    cpu.add_loops();
    cpu.add_roofs();
    cpu.account.close();
}

}  // namespace tessera::model
