// SPDX-License-Identifier: Apache-2.0
//
// Time on a GPU: what the three shapes of kernel share. gpu_fused.cc and gpu_passes.cc have the shapes.
#include "model/gpu.hpp"

#include <algorithm>

namespace tessera::model {
namespace {

void add_roofs(Gpu& gpu) {
    const Machine& machine = gpu.q.machine;
    const auto& work = gpu.out.cost.work;
    const double per_ms = gpu.sms * machine.rated_clock_ghz * 1e6;  // clocks of all multiprocessors
    const double products = machine.product_flop(gpu.q.problem.dtype, gpu.family.warp_wide);
    gpu.account.roof("tensor", static_cast<double>(work.flop) / (products * per_ms));
    gpu.account.roof("exp unit", static_cast<double>(work.exps) / (machine.exp_rate * per_ms));
    gpu.account.roof("shared memory", static_cast<double>(work.bytes.shared) / (machine.shared_bytes * per_ms));
    gpu.account.roof("L2", static_cast<double>(work.bytes.l2) / (machine.l2_bytes * per_ms));
    gpu.account.roof("DRAM", static_cast<double>(work.bytes.dram) / (machine.dram_gbs * 1e6));
    gpu.account.roof("launch", gpu.c.launches * machine.launch_us * 1e-3);
}

}  // namespace

Gpu::Gpu(const Question& question, const Family& f, Prediction& prediction)
    : q(question),
      family(f),
      c(f.constants),
      out(prediction),
      account(prediction, question.options.worksheet),
      tile(question.options.tile.value_or(tile_of(f, question.problem, question.machine))),
      d(static_cast<double>(padded_dim(f, question.problem.head_dim))),
      dv(static_cast<double>(padded_dim(f, question.problem.head_dim_v))),
      e(static_cast<double>(size_of(question.problem.dtype))),
      m(static_cast<double>(tile.block_q)),
      n(static_cast<double>(tile.block_kv)),
      sms(question.machine.cores),
      workload(workload_of(question, tile, static_cast<std::int64_t>(sms))),
      units(units_of(workload)),
      t(tile_cycles()) {
    out.by = f.by;
    out.fitted_on = f.fitted_on;
    out.tile = tile;
    out.cost = schedule::cost(workload);
    out.memory = schedule::footprint(workload);
    note_tile();
}

double Gpu::product_rate() const {
    const bool stretched = family.warp_wide && q.machine.warp_matrix_share < 1 && size_of(q.problem.dtype) <= 2;
    return q.machine.product_flop(q.problem.dtype, family.warp_wide) / (stretched ? kWarpStretch : 1);
}

double Gpu::shared_bytes() const {
    const auto rows = static_cast<double>(rows_per_reader(family, q.problem.head_dim));
    if (q.schedule == Schedule::fa1 && q.pass == Pass::forward) {
        // Four warps have a quarter of the keys each: all read Q, and three quarters of O go both ways (fp32).
        constexpr double kWarps = 4;
        return n * (d + dv) * e + kWarps * m * d * e + m * d * e + 2 * (kWarps - 1) * m * dv * 4;
    }
    if (q.pass == Pass::forward) return (1 + m / rows) * n * (d + dv) * e;
    const double readers = n / rows;  // src/schedule/backward.cc: S, dP, dV, dK, dQ, dS, dQ in fp32, Q and dO
    return n * (2 * d + dv) * e + readers * m * (2 * d + 2 * dv) * e + m * n * e * (1 + readers) + 8 * m * d +
           m * (d + dv) * e;
}

TileCycles Gpu::tile_cycles() const {
    const Machine& machine = q.machine;
    TileCycles cycles;
    cycles.products = m * n * flop_per_pair() / product_rate();
    cycles.exps = m * n / machine.exp_rate;
    cycles.shared = shared_bytes() / machine.shared_bytes;
    const double dq_bytes = q.schedule == Schedule::fa1 ? 8 : 4;  // fa1 reads it, too
    if (q.pass == Pass::backward && machine.reduce_bytes > 0) cycles.adds = dq_bytes * m * d / machine.reduce_bytes;
    cycles.loads = (q.pass == Pass::forward ? n : m) * (d + dv) * e / machine.l2_bytes;
    const double sum = cycles.products + c.exp_exposed * cycles.exps + c.shared_exposed * cycles.shared +
                       c.adds_exposed * cycles.adds + c.step_cycles;
    cycles.step = std::max(sum, cycles.loads);
    return cycles;
}

void Gpu::note_tile() {
    account.note("tile", "{} queries x {} keys, head_dim {:.0f} and {:.0f} as computed", tile.block_q, tile.block_kv, d,
                 dv);
    account.note("products of a tile", "{:.0f} * {:.0f} * {:.0f} FLOP / {:.0f} FLOP/clk = {:.0f} clk", m, n,
                 flop_per_pair(), product_rate(), t.products);
    account.note("exponentials", "{:.0f} * {:.0f} / {:.0f} per clk = {:.0f} clk, {:.2f} of it exposed = {:.0f} clk", m,
                 n, q.machine.exp_rate.value, t.exps, c.exp_exposed, c.exp_exposed * t.exps);
    if (c.shared_exposed > 0) {
        account.note("shared memory", "{:.0f} B / {:.0f} B/clk = {:.0f} clk, {:.2f} of it exposed = {:.0f} clk",
                     shared_bytes(), q.machine.shared_bytes.value, t.shared, c.shared_exposed,
                     c.shared_exposed * t.shared);
    }
    if (t.adds > 0) {
        account.note("adding dQ", "{:.0f} B / {:.0f} B/clk = {:.0f} clk, {:.2f} of it exposed = {:.0f} clk",
                     t.adds * q.machine.reduce_bytes, q.machine.reduce_bytes.value, t.adds, c.adds_exposed,
                     c.adds_exposed * t.adds);
    }
    if (c.step_cycles > 0) account.note("meeting of the warps", "{:.0f} clk", c.step_cycles);
    account.note("one inner tile", "sum = {:.0f} clk, not less than the {:.0f} in which its operands come", t.step,
                 t.loads);
}

/// The clock falls with the load of the product units, from clock_ghz (none) to loaded_clock_ghz (all of the time).
double Gpu::set_clock(double tiles, double cycles) {
    const Machine& machine = q.machine;
    const double most = machine.product_flop(q.problem.dtype, false);
    const double load = cycles > 0 ? std::min(1.0, tiles * m * n * flop_per_pair() / (cycles * sms * most)) : 0;
    out.clock_ghz = machine.clock_ghz - (machine.clock_ghz - machine.loaded_clock_ghz) * load;
    account.note("load of the product units",
                 "{:.0f} * {:.0f} * {:.0f} * {:.0f} FLOP / ({:.0f} clk * {:.0f} * {:.0f}) = {:.3f}", tiles, m, n,
                 flop_per_pair(), cycles, sms, most, load);
    account.note("clock under it", "{:.3g} - ({:.3g} - {:.3g}) * {:.3f} = {:.3f} GHz", machine.clock_ghz.value,
                 machine.clock_ghz.value, machine.loaded_clock_ghz.value, load, out.clock_ghz);
    return out.clock_ghz * 1e6;
}

void Gpu::add_tile_parts(double tiles, double clocks_per_ms) {
    const auto add = [&](const char* name, double cycles) { account.part(name, tiles * cycles / sms / clocks_per_ms); };
    add("products", t.products);
    add("exponentials", c.exp_exposed * t.exps);
    add("shared memory", c.shared_exposed * t.shared);
    add("adding dQ", c.adds_exposed * t.adds);
    add("meetings of warps", c.step_cycles);
    const double sum =
        t.products + c.exp_exposed * t.exps + c.shared_exposed * t.shared + c.adds_exposed * t.adds + c.step_cycles;
    if (t.step - sum > 1e-9 * sum) add("operands from L2", t.step - sum);
}

void Gpu::add_launches(int launches) {
    const double ms = launches * q.machine.launch_us * 1e-3;
    account.note("launches", "{} * {:.3g} us = {:.4g} ms", launches, q.machine.launch_us.value, ms);
    account.part("launch", ms);
}

void predict_gpu(const Question& question, Prediction& prediction) {
    const Family* family = find_family(question.schedule, question.pass, question.options.by);
    Gpu gpu(question, *family, prediction);
    if (question.schedule == Schedule::standard) gpu.standard();
    else if (question.schedule == Schedule::fa1 && question.pass == Pass::forward) gpu.fa1();
    else gpu.fused();
    add_roofs(gpu);
    const double dram = static_cast<double>(prediction.cost.work.bytes.dram) / gpu.read_rate();
    gpu.account.at_least("DRAM", dram);
    gpu.account.close();
}

}  // namespace tessera::model
