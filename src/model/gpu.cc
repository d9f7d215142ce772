// SPDX-License-Identifier: Apache-2.0
//
// Time on a GPU. Three shapes of kernel: fused ones, whose units of work are tiles of queries (backward: of keys) with
// an inner loop; fa1, whose inner loop reads and writes O; and standard, three passes over the N x N matrix.
#include <algorithm>
#include <cmath>

#include "model/family.hpp"
#include "model/parts.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

/// Clocks of one inner tile, by unit.
struct TileCycles {
    double products = 0;
    double exps = 0;
    double shared = 0;
    double adds = 0;
    double loads = 0;  ///< from the L2: a tile can't be faster than its operands come
    double step = 0;   ///< all together

    TileCycles over(double n) const { return {products / n, exps / n, shared / n, adds / n, loads / n, step / n}; }
};

struct Gpu {
    const Question& q;
    const Family& family;
    const Constants& c;
    Prediction& out;
    Account account;
    Tile tile;
    double d, dv, e;  ///< padded head_dims, bytes of an element
    double m, n;      ///< tile
    double sms;

    Gpu(const Question& question, const Family& f, Prediction& prediction)
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
          sms(question.machine.cores) {
        prediction.by = f.by;
        prediction.fitted_on = f.fitted_on;
        prediction.tile = tile;
    }

    double product_rate() const { return q.machine.product_flop(q.problem.dtype, family.warp_wide); }
    double flop_per_pair() const { return q.pass == Pass::forward ? 2 * (d + dv) : 2 * (3 * d + 2 * dv); }

    double shared_bytes() const;
    TileCycles tile_cycles();
    double clock_for(double tiles, double cycles);
    void add_roofs();
    void fused();
    void fa1();
    void standard();
    void note_tile(const TileCycles& t);
};

/// Bytes through shared memory for one inner tile: what is loaded is written once, and read by each reader.
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

TileCycles Gpu::tile_cycles() {
    const Machine& machine = q.machine;
    TileCycles t;
    t.products = m * n * flop_per_pair() / product_rate();
    t.exps = m * n / machine.exp_rate;
    t.shared = shared_bytes() / machine.shared_bytes;
    const double dq_bytes = q.schedule == Schedule::fa1 ? 8 : 4;
    if (q.pass == Pass::backward && machine.reduce_bytes > 0) t.adds = dq_bytes * m * d / machine.reduce_bytes;
    t.loads = (q.pass == Pass::forward ? n : m) * (d + dv) * e / machine.l2_bytes;
    t.step =
        t.products + c.exp_exposed * t.exps + c.shared_exposed * t.shared + c.adds_exposed * t.adds + c.step_cycles;
    t.step = std::max(t.step, t.loads);
    return t;
}

void Gpu::note_tile(const TileCycles& t) {
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
    account.note("one tile of keys", "sum = {:.0f} clk (its operands come from the L2 in {:.0f})", t.step, t.loads);
}

/// The clock falls with the load of the product units, from clock_ghz (none) to loaded_clock_ghz (all of the time).
double Gpu::clock_for(double tiles, double cycles) {
    const Machine& machine = q.machine;
    const double most = machine.product_flop(q.problem.dtype, false);
    const double load = cycles > 0 ? std::min(1.0, tiles * m * n * flop_per_pair() / (cycles * sms * most)) : 0;
    out.clock_ghz = machine.clock_ghz - (machine.clock_ghz - machine.loaded_clock_ghz) * load;
    account.note("clock", "products use {:.2f} of the units: {:.3g} - ({:.3g} - {:.3g}) * {:.2f} = {:.3f} GHz", load,
                 machine.clock_ghz.value, machine.clock_ghz.value, machine.loaded_clock_ghz.value, load, out.clock_ghz);
    return out.clock_ghz;
}

void Gpu::add_roofs() {
    const Machine& machine = q.machine;
    const auto& work = out.cost.work;
    const double per_ms = sms * machine.rated_clock_ghz * 1e6;  // clocks of all multiprocessors
    account.roof("tensor", static_cast<double>(work.flop) / (product_rate() * per_ms));
    account.roof("exp unit", static_cast<double>(work.exps) / (machine.exp_rate * per_ms));
    account.roof("shared memory", static_cast<double>(work.bytes.shared) / (machine.shared_bytes * per_ms));
    account.roof("L2", static_cast<double>(work.bytes.l2) / (machine.l2_bytes * per_ms));
    account.roof("DRAM", static_cast<double>(work.bytes.dram) / (machine.dram_gbs * 1e6));
    account.roof("launch", c.launches * machine.launch_us * 1e-3);
}

/// Clocks until the last multiprocessor is done, beyond an equal share for each.
double waiting(const Units& units, double sms, double longest, double shortest, double share, Order order) {
    const auto count = static_cast<double>(units.count);
    if (count <= sms) return longest - share;
    if (longest == shortest) return std::ceil(count / sms) * longest - share;
    // Longest first ends within a shortest unit, on average half of it; as they lie, long ones come last too: a
    // quarter of a longest one is what the Records show.
    const double tail = order == Order::longest_first ? 0.5 * shortest : 0.25 * longest;
    return std::max(longest - share, tail);
}

void Gpu::fused() {
    const Machine& machine = q.machine;
    const schedule::Workload w = workload_of(q, tile, static_cast<std::int64_t>(sms));
    out.cost = schedule::cost(w);
    out.memory = schedule::footprint(w);
    Units units = units_of(w);
    const TileCycles t = tile_cycles();
    note_tile(t);
    const bool cut = out.cost.partial > 0 && !q.problem.mask.trivial();
    const double ends = c.end_cycles + c.end_cycles_per_dim * d + (cut ? c.cut_tiles * t.step : 0);
    int launches = c.launches;
    if (q.pass == Pass::forward && family.by == std::string_view("flash-attention") &&
        static_cast<double>(units.count) <= sms / 2 && units.longest > 1) {
        // Its decoding entry deals the keys of a tile to several multiprocessors, and merges.
        const auto splits = std::min<std::int64_t>(static_cast<std::int64_t>(sms) / units.count, units.longest);
        account.note("split keys", "{} units for {:.0f} multiprocessors: each in {} parts", units.count, sms, splits);
        units.count *= splits;
        units.longest = schedule::ceil_div(units.longest, splits);
        units.shortest = std::min(units.longest, schedule::ceil_div(units.shortest, splits));
        ++launches;
    }
    const auto count = static_cast<double>(units.count);
    const auto tiles = static_cast<double>(units.tiles);
    const double share = (tiles * t.step + count * ends) / sms;
    const double longest = static_cast<double>(units.longest) * t.step + ends;
    const double shortest = static_cast<double>(units.shortest) * t.step + ends;
    double idle = units.count > 0 ? waiting(units, sms, longest, shortest, share, family.order) : 0;
    if (q.schedule == Schedule::fa1 && q.problem.batch * q.problem.heads_q > 0) {  // one block for each head, no more
        const auto heads = static_cast<double>(q.problem.batch * q.problem.heads_q);
        idle = std::ceil(heads / sms) * sms * share / heads - share;
    }
    const char* unit = q.pass == Pass::forward ? "tiles of queries" : "tiles of keys";
    account.note("ends of a unit", "{:.0f} + {:.0f} * {:.0f} + {:.2f} * {:.0f} = {:.0f} clk", c.end_cycles,
                 c.end_cycles_per_dim, d, cut ? c.cut_tiles : 0.0, t.step, ends);
    account.note("units", "{} {}, with {} inner tiles together, {} to {} each", units.count, unit, units.tiles,
                 units.shortest, units.longest);
    account.note("share of a multiprocessor", "({} * {:.0f} + {} * {:.0f}) / {:.0f} = {:.0f} clk", units.tiles, t.step,
                 units.count, ends, sms, share);
    account.note("until the last is done", "{:.0f} clk more ({})", idle,
                 count <= sms                           ? "one unit each: the longest"
                 : longest == shortest                  ? "whole rounds of equal units"
                 : family.order == Order::longest_first ? "half of the shortest"
                                                        : "a quarter of the longest");
    const double per_ms = clock_for(tiles, share + idle) * 1e6;
    const auto add = [&](const char* name, double cycles) { account.part(name, cycles / per_ms); };
    add("products", tiles * t.products / sms);
    add("exponentials", tiles * c.exp_exposed * t.exps / sms);
    add("shared memory", tiles * c.shared_exposed * t.shared / sms);
    add("adding dQ", tiles * c.adds_exposed * t.adds / sms);
    const double summed =
        t.products + c.exp_exposed * t.exps + c.shared_exposed * t.shared + c.adds_exposed * t.adds + c.step_cycles;
    add("operands from the L2", tiles * (t.step - summed) / sms);
    add("ends of tiles", count * ends / sms);
    add("idle cores", idle);
    account.note("main kernel", "({:.0f} + {:.0f}) clk / {:.3f} GHz = {:.4g} ms", share, idle, out.clock_ghz,
                 (share + idle) / per_ms);
    if (q.pass == Pass::backward) {
        const auto values = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
        const double bytes = values * (2 * dv * e + 4 + 4 * d + 4 * d + d * e);
        const double rate = machine.dram_gbs * machine.dram_copy_share * 1e6;
        account.note("before and after", "D, dQ = 0, dQ to the dtype: {:.4g} B / {:.4g} GB/s = {:.4g} ms", bytes,
                     rate * 1e-6, bytes / rate);
        account.part("before and after", bytes / rate);
    }
    const double tensors =
        static_cast<double>(out.cost.work.bytes.dram) / (machine.dram_gbs * machine.dram_read_share * 1e6);
    account.note("tensors from DRAM", "{} B / {:.4g} GB/s = {:.4g} ms, {:.2f} of it exposed = {:.4g} ms",
                 out.cost.work.bytes.dram, machine.dram_gbs * machine.dram_read_share, tensors, c.dram_exposed,
                 c.dram_exposed * tensors);
    account.part("DRAM", c.dram_exposed * tensors);
    account.note("launches", "{} * {:.3g} us = {:.3g} ms", launches, machine.launch_us.value,
                 launches * machine.launch_us * 1e-3);
    account.part("launch", launches * machine.launch_us * 1e-3);
}

void Gpu::fa1() {
    const Machine& machine = q.machine;
    const schedule::Workload w = workload_of(q, tile, static_cast<std::int64_t>(sms));
    out.cost = schedule::cost(w);
    out.memory = schedule::footprint(w);
    const Units units = units_of(w);
    const TileCycles t = tile_cycles();
    note_tile(t);
    const auto tiles = static_cast<double>(units.tiles);
    const double share = tiles * t.step / sms;
    const double idle = std::max(0.0, static_cast<double>(units.longest) * t.step - share);
    account.note("share of a multiprocessor", "{} tiles * {:.0f} / {:.0f} = {:.0f} clk", units.tiles, t.step, sms,
                 share);
    const double per_ms = clock_for(tiles, share + idle) * 1e6;
    const auto add = [&](const char* name, double cycles) { account.part(name, cycles / per_ms); };
    add("products", tiles * t.products / sms);
    add("exponentials", tiles * c.exp_exposed * t.exps / sms);
    add("shared memory", tiles * c.shared_exposed * t.shared / sms);
    add("meetings of warps", tiles * c.step_cycles / sms);
    add("idle cores", idle);
    // O, m and l: read and written for every block of keys, and once more at the beginning and the end.
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double rate = machine.dram_gbs * machine.dram_copy_share * 1e6;
    const double between = tiles * m * (8 * dv + 16);
    const double ends = rows * (2 * (4 * dv + 8) + dv * e);
    const bool far = !w.residency.queries;
    account.note("O, m, l between blocks",
                 "{} * {:.0f} rows * {:.0f} B / {:.4g} GB/s = {:.4g} ms, {:.2f} of it exposed", units.tiles, m,
                 8 * dv + 16, rate * 1e-6, between / rate, far ? c.state_exposed : 0.0);
    if (far) account.part("O, m, l in DRAM", c.state_exposed * between / rate);
    account.note("first and last pass over O", "{:.4g} B / {:.4g} GB/s = {:.4g} ms", ends, rate * 1e-6, ends / rate);
    account.part("first and last pass", c.dram_exposed * ends / rate);
    account.note("launches", "{} * {:.3g} us", c.launches, machine.launch_us.value);
    account.part("launch", c.launches * machine.launch_us * 1e-3);
}

/// Passes over the N x N matrix: products and traffic of a pass overlap but for pass_exposed of the shorter one.
void Gpu::standard() {
    const Machine& machine = q.machine;
    const schedule::Workload w = workload_of(q, tile, static_cast<std::int64_t>(sms));
    out.cost = schedule::cost(w);
    out.memory = schedule::footprint(w);
    const Units units = units_of(w);
    const TileCycles t = tile_cycles();
    note_tile(t);
    const auto tiles = static_cast<double>(units.tiles);
    const double per_ms = clock_for(tiles, tiles * t.step / sms) * 1e6;
    const double products = tiles * (t.products + c.shared_exposed * t.shared) / sms / per_ms;
    const double read = machine.dram_gbs * machine.dram_read_share * 1e6;
    const double write = machine.dram_gbs * machine.dram_copy_share * 1e6;
    const double elements = tiles * m * n;
    const double p_bytes = q.pass == Pass::forward ? e : 4;
    // Forward: S written; S read and P written; P read. Backward: P and dS written; dS read; P and dS read.
    const double first = elements * (q.pass == Pass::forward ? 4.0 : 8.0) / write;
    const double middle = q.pass == Pass::forward ? elements * (4 / read + p_bytes / write) : elements * 4 / read;
    const double last = elements * (q.pass == Pass::forward ? p_bytes : 8.0) / read;
    // A row of the softmax stays in shared memory: few rows at once when they are long.
    constexpr double kThreadsRows = 16;
    constexpr double kBlocksForFullRate = 4.1;
    constexpr double kKeysHeld = 16384;
    const double held = 4 * std::min(static_cast<double>(q.problem.len_kv), kKeysHeld) + 64;
    const double blocks = std::clamp(std::floor(machine.shared_kib * 1024 / held), 1.0, kThreadsRows);
    const double slowed = q.pass == Pass::forward ? std::max(1.0, kBlocksForFullRate / blocks) : 1.0;
    const auto rows = static_cast<double>(q.problem.rows_q() * q.problem.heads_q);
    const double row_time = c.row_cycles * rows / sms / (machine.clock_ghz * 1e6);
    const double softmax = std::max(middle * slowed, row_time + c.row_exposed * middle * slowed);
    const auto pass = [&](double traffic, double work) {
        return std::max(traffic, work) + c.pass_exposed * std::min(traffic, work);
    };
    const bool forward = q.pass == Pass::forward;
    const double share_first = forward ? 0.5 : 0.4;
    account.note("elements in whole tiles", "{} * {:.0f} * {:.0f} = {:.4g}", units.tiles, m, n, elements);
    account.note("products of all passes", "{} * ({:.0f} + {:.2f} * {:.0f}) clk / {:.0f} / {:.3f} GHz = {:.4g} ms",
                 units.tiles, t.products, c.shared_exposed, t.shared, sms, out.clock_ghz, products);
    account.note(forward ? "pass 1: S = Q K^T" : "pass 1: P and dS",
                 "writes in {:.4g} ms, products {:.4g} ms: the longer one + {:.2f} of the other = {:.4g} ms", first,
                 share_first * products, c.pass_exposed, pass(first, share_first * products));
    account.part("pass 1", pass(first, share_first * products));
    if (forward) {
        account.note("pass 2: softmax",
                     "traffic {:.4g} ms * {:.2f}; rows {:.0f} * {:.0f} clk / {:.0f} = {:.4g} ms: {:.4g} ms", middle,
                     slowed, rows, c.row_cycles, sms, row_time, softmax);
        account.part("pass 2", softmax);
    } else {
        account.part("pass 2", pass(middle, 0.2 * products));
        account.note("pass 2: dQ", "reads in {:.4g} ms, products {:.4g} ms: {:.4g} ms", middle, 0.2 * products,
                     pass(middle, 0.2 * products));
    }
    const double share_last = forward ? 0.5 : 0.4;
    account.note(forward ? "pass 3: O = P V" : "pass 3: dV, dK", "reads in {:.4g} ms, products {:.4g} ms: {:.4g} ms",
                 last, share_last * products, pass(last, share_last * products));
    account.part("pass 3", pass(last, share_last * products));
    account.note("launches", "{} * {:.3g} us", c.launches, machine.launch_us.value);
    account.part("launch", c.launches * machine.launch_us * 1e-3);
}

}  // namespace

void predict_gpu(const Question& question, Prediction& prediction) {
    const Family* family = find_family(question.schedule, question.pass, question.options.by);
    Gpu gpu(question, *family, prediction);
    if (question.schedule == Schedule::standard) gpu.standard();
    else if (question.schedule == Schedule::fa1 && question.pass == Pass::forward) gpu.fa1();
    else gpu.fused();
    gpu.add_roofs();
    gpu.account.close();
    gpu.account.note("time", "sum of the parts = {:.4g} ms, {:.4g} TFLOP/s of visible pairs", prediction.ms,
                     prediction.tflops);
}

}  // namespace tessera::model
