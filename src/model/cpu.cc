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
    }

    double tasks(const schedule::Workload& w) const;
    void add_roofs();
    void run();
};

/// How many tasks the kernels can make of the problem.
double Cpu::tasks(const schedule::Workload& w) const {
    const Problem& p = q.problem;
    const auto heads = static_cast<double>(p.batch * p.heads_q);
    const auto rows = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_q, 1), w.tile.block_q));
    if (q.pass == Pass::backward) {
        const auto kv_heads = static_cast<double>(p.batch * p.heads_kv);
        if (q.schedule == Schedule::fa1) return kv_heads;
        return heads * std::max(rows, 1.0);
    }
    if (q.schedule != Schedule::fa2) return heads * rows;
    const auto chunks = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_kv, 1), kChunk));
    const double lanes = std::clamp(static_cast<double>(std::min(w.tile.block_q, p.len_q)) / kLanes, 1.0, 4.0);
    return heads * rows * chunks * lanes;
}

void Cpu::add_roofs() {
    const Machine& m = q.machine;
    const auto& work = out.cost.work;
    const double per_ms = threads * m.rated_clock_ghz * 1e6;
    account.roof("FMA", static_cast<double>(work.flop) / (m.matrix_flop * per_ms));
    account.roof("exp", static_cast<double>(work.exps) / (m.exp_rate * per_ms));
    account.roof("cache", static_cast<double>(work.bytes.l2) / (m.l2_bytes * per_ms));
    account.roof("DRAM", static_cast<double>(work.bytes.dram) / (m.dram_gbs * 1e6));
}

void Cpu::run() {
    const Machine& m = q.machine;
    const schedule::Workload w = workload_of(q, tile, static_cast<std::int64_t>(threads));
    out.cost = schedule::cost(w);
    out.memory = schedule::footprint(w);
    const Units units = units_of(w);
    const bool forward = q.pass == Pass::forward;
    const auto d = static_cast<double>(q.problem.head_dim);
    const auto dv = static_cast<double>(q.problem.head_dim_v);
    const double per_pair = forward ? 2 * (d + dv) : 2 * (3 * d + 2 * dv);
    const auto rows = static_cast<double>(std::min(tile.block_q, std::max<std::int64_t>(q.problem.len_q, 1)));
    const double padding = std::ceil(rows / kLanes) * kLanes / rows;  // lanes beyond the last query are computed
    const double elements = static_cast<double>(out.cost.elements) * padding;
    const auto tiles = static_cast<double>(units.tiles);

    const double busy = std::min(threads, std::max(1.0, tasks(w)));
    out.clock_ghz = m.clock_ghz - (m.clock_ghz - m.loaded_clock_ghz) * (busy > 1 ? (busy - 1) / (m.cores - 1) : 0.0);
    const double per_ms = out.clock_ghz * 1e6;
    const double products = elements * per_pair / m.matrix_flop;
    const double softmax = elements / m.exp_rate * (forward ? kSoftmaxForward : kSoftmaxBackward);
    const double calls = tiles * kStepCycles;
    account.note("elements", "{} pairs in {} tiles, with padded lanes {:.4g}", out.cost.elements, units.tiles,
                 elements);
    account.note("products", "{:.4g} * {:.0f} FLOP / {:.0f} FLOP/clk = {:.4g} clk", elements, per_pair,
                 m.matrix_flop.value, products);
    account.note("softmax", "{:.4g} / {:.3g} exp/clk * {:.2g} = {:.4g} clk", elements, m.exp_rate.value,
                 forward ? kSoftmaxForward : kSoftmaxBackward, softmax);
    account.note("calls", "{} * {:.0f} = {:.4g} clk", units.tiles, kStepCycles, calls);
    account.note("clock", "{:.0f} of {:.0f} cores busy: {:.3f} GHz", busy, m.cores.value, out.clock_ghz);

    const double total = products + softmax + calls;
    const double share = total / busy;
    double idle = 0;
    const auto kv_heads = static_cast<double>(q.problem.batch * q.problem.heads_kv);
    const bool rounds = !forward && q.schedule == Schedule::fa2 && threads > 1 &&
                        !(kv_heads >= threads && (std::fmod(kv_heads, threads) == 0 || kv_heads >= 4 * threads));
    if (!forward && q.schedule == Schedule::fa1 && kv_heads > 0)
        idle = std::ceil(kv_heads / busy) / kv_heads * total - share;
    if (forward && busy > 1 && tiles > 0) idle = 0.5 * static_cast<double>(units.shortest) * total / tiles;
    account.note("share of a thread", "{:.4g} / {:.0f} = {:.4g} clk, {:.4g} more until the last is done", total, busy,
                 share, idle);
    account.part("products", products / busy / per_ms);
    account.part("softmax", softmax / busy / per_ms);
    account.part("calls", calls / busy / per_ms);
    account.part("idle cores", idle / per_ms);

    const double read = m.dram_gbs * m.dram_read_share * 1e6;
    double bytes = static_cast<double>(q.problem.rows_q() * q.problem.heads_q) * (d + dv) +
                   static_cast<double>(q.problem.rows_kv() * q.problem.heads_kv) * (d + dv);
    bytes *= static_cast<double>(size_of(q.problem.dtype));
    if (!forward) bytes *= 2 * kGradientTensors;
    account.note("cold memory", "{:.4g} B / {:.4g} GB/s = {:.4g} ms", bytes, read * 1e-6, bytes / read);
    account.part("DRAM", bytes / read);
    if (q.schedule == Schedule::standard) {
        // S, P (and dS) written and read, and each line that is written first comes to the cache.
        const double matrices = static_cast<double>(out.cost.elements) * (forward ? 20.0 : 28.0);
        const double rate = w.residency.scores ? m.l2_bytes * busy * per_ms : read;
        account.note("N x N matrices", "{:.4g} B / {:.4g} GB/s = {:.4g} ms", matrices, rate * 1e-6, matrices / rate);
        account.part("N x N matrices", matrices / rate);
    }
    double loops = forward ? 1 : 3;
    if (rounds)
        loops += static_cast<double>(std::max(schedule::ceil_div(q.problem.len_q, tile.block_q),
                                              schedule::ceil_div(q.problem.len_kv, tile.block_kv)) *
                                     q.problem.group());
    if (threads > 1) {
        account.note("parallel loops", "{:.0f} * {:.3g} us = {:.4g} ms", loops, m.launch_us.value,
                     loops * m.launch_us * 1e-3);
        account.part("launch", loops * m.launch_us * 1e-3);
    }
}

}  // namespace

void predict_cpu(const Question& question, Prediction& prediction) {
    Cpu cpu(question, prediction);
    cpu.run();
    cpu.add_roofs();
    cpu.account.close();
}

}  // namespace tessera::model
