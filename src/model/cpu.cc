// SPDX-License-Identifier: Apache-2.0
//
// The predicted time of tessera's CPU kernels: GEMMs at the multiply-add rate, the softmax, the load imbalance of
// threads, cold memory, and the start of parallel loops.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/split.hpp"
#include "core/stack_heads.hpp"
#include "model/cpu.hpp"
#include "model/cpu_tasks.hpp"
#include "model/dropout.hpp"
#include "model/parts.hpp"
#include "schedule/grid.hpp"

namespace tessera::model {
namespace {

constexpr double kGradientCopies = 1.2;  // copies of Q, dO, dQ, dK, dV in fp32, relative to all tensors
constexpr double kMiB = 1048576;
constexpr double kSecondLevelBytes = 2 * kMiB;  // L2 cache of a core, which holds a part of its packed tensors
// The cost of dropout, in times of exponentials. 16 patches of 2 queries x 16 keys share a vector. Three blocks of
// Philox are drawn first, further ones while some word equals the threshold's bits (cpu/simd/dropout.cc). The values
// fit calls with probabilities of 0.1 and 0.5 on two cores of an AMD EPYC.
constexpr PhiloxDraws kPhiloxDraws{.weights = 32, .words = 512, .first = 3, .further = 1, .skips_unused = true};
constexpr double kExpsOfBlock = 10;
constexpr double kExpsOfFactor = 0.8;  // the factor of an element of P is stored, read and multiplied by
constexpr double kCoreReads = 0.12;    // fraction of the memory's rate that one core reaches alone

constexpr Tile kCpuTile{64, 64};  // cpu/backend.cc
constexpr double kTileDepth = 32, kTileRows = 16;
constexpr double kPackingOfRows = 0.4, kPackingOfRowsInParts = 0.8;  // fraction of the packing cost with few queries

/// Clocks of a task, or of all tasks.
struct Clocks {
    double gemms, softmax, masks, dropout, packing;
    double total() const { return gemms + softmax + masks + dropout + packing; }
};

struct Cpu {
    const Question& q;
    const CpuConstants& c;
    Prediction& out;
    Account account;
    Tile tile;
    double threads;
    schedule::Workload workload{};
    Units units{};
    std::vector<Loop> loops{};  ///< loops of tasks; empty if unknown or very many
    double busy = 1;            ///< threads that have work
    double contention = 0;      ///< log2(busy) / log2(cores): 0 with one busy thread, 1 with all cores
    double per_ms = 0;          ///< clocks per millisecond

    Cpu(const Question& question, const CpuConstants& constants, Prediction& prediction)
        : q(question),
          c(constants),
          out(prediction),
          account(prediction, question.options.worksheet),
          tile(question.options.tile.value_or(kCpuTile)),
          threads(question.options.threads > 0 ? question.options.threads : question.machine.cores.value) {
        threads = std::min({threads, q.machine.cores.value, std::max(1.0, std::floor(worthwhile_threads()))});
        prediction.by = "tessera";
        const MeasuredKernels* own = measured_of(q);
        prediction.measured = own != nullptr;
        prediction.fitted_on = own != nullptr                ? own->source
                               : few()                       ? kFewQueriesRecords
                               : q.schedule == Schedule::fa2 ? kMatrixRecords
                               : is_standard_or_fa1(q)       ? kSchedulesRecords
                                                             : "";
        prediction.tile = tile;
        workload = workload_of(q, tile, static_cast<std::int64_t>(threads));
        units = units_of(workload);
        out.cost = cost_of(q, workload);
        out.memory = schedule::footprint(workload);
        count_bias(q, out);
        if (q.schedule == Schedule::fa2 && !few())
            loops = loops_of(workload, {static_cast<int>(threads), on_matrix_unit(), in_bf16_parts() ? 3 : 1});
        busy = std::min(threads, std::max(1.0, tasks()));
        const Machine& m = q.machine;
        contention = busy > 1 ? std::log2(busy) / std::log2(m.cores) : 0.0;
        out.clock_ghz = m.clock_ghz - (m.clock_ghz - m.loaded_clock_ghz) * contention;
        per_ms = out.clock_ghz * 1e6 * std::pow(c.contended_speed, std::sqrt(contention));
    }

    bool forward() const { return q.pass == Pass::forward; }
    bool bf16() const { return q.problem.dtype == DType::bf16; }
    bool in_bf16_parts() const { return in_parts(q); }
    bool few() const { return runs_few_queries(q); }
    bool on_matrix_unit() const { return runs_on_matrix_unit(q); }
    /// The peak FLOP/clk of one thread.
    double peak() const {
        if (!on_matrix_unit()) return q.machine.fma_flop;
        return in_bf16_parts() ? q.machine.matrix_flop / kMmasPerFp32 : q.machine.matrix_flop;
    }
    double gemm_rate() const { return peak() * c.gemm_share; }
    /// Nanoseconds per packed element. With few queries, Q is kept in rows and V is not transposed
    /// (cpu/fa2/matrix/decode.cc).
    double pack_ns() const {
        const bool in_rows = on_matrix_unit() && forward() && q.problem.group() == 1 && q.problem.len_q <= kLanes;
        return c.pack_ns * (in_rows ? in_bf16_parts() ? kPackingOfRowsInParts : kPackingOfRows : 1);
    }
    /// The backward in 16 bits computes delta over all pairs first.
    bool sums_deltas() const { return on_matrix_unit() && !forward() && bf16(); }
    Amounts amounts() const;
    Clocks clocks_of(const Amounts& what) const;
    std::pair<double, std::string> idle_clocks(double total) const;
    double packed_elements() const;
    double packed_bytes() const;
    bool in_stripes() const;
    double worthwhile_threads() const;
    double tasks() const;
    double flop_per_pair() const;
    double clocks_of_dropout(double elements) const;
    void note_speed();
    void add_arithmetic();
    void add_memory();
    void add_loops();
    void add_roofs();
};

/// The number of threads that the work is worth, by FLOP of all pairs or bytes of K and V (src/cpu/steps/head.hpp).
double Cpu::worthwhile_threads() const {
    const Problem& p = q.problem;
    const auto dims = static_cast<double>(p.head_dim + p.head_dim_v);
    const auto sequences = static_cast<double>(p.batch);
    const double pairs =
        sequences * static_cast<double>(p.heads_q) * static_cast<double>(p.len_q) * static_cast<double>(p.len_kv);
    const double bytes =
        sequences * static_cast<double>(p.heads_kv * p.len_kv) * dims * static_cast<double>(size_of(p.dtype));
    return std::max(2 * (forward() ? 1 : 2.5) * pairs * dims / (bf16() ? 6e5 : 3e5), bytes / 2e5);
}

/// The number of tasks that the kernels can split the problem into.
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
    const auto chunks = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_kv, 1), kSplitKeys));
    const double lanes = std::clamp(static_cast<double>(std::min(tile.block_q, p.len_q)) / kLanes, 1.0, 4.0);
    return heads * rows * chunks * lanes;
}

void Cpu::add_roofs() {
    const Machine& m = q.machine;
    const auto& work = out.cost.work;
    const double rated = threads * m.rated_clock_ghz * 1e6;  // clocks a millisecond
    account.roof(on_matrix_unit() ? "matrix" : "FMA", static_cast<double>(work.flop) / (peak() * rated));
    account.roof("exp", static_cast<double>(work.exps) / (m.exp_rate * rated));
    account.roof("cache", static_cast<double>(work.bytes.l2) / (m.l2_bytes * rated));
    account.roof("DRAM", static_cast<double>(work.bytes.dram) / (m.dram_gbs * 1e6));
}

/// Notes the clock, and the speed of a thread beside other busy threads.
void Cpu::note_speed() {
    const Machine& m = q.machine;
    if (busy > 1)
        account.note("contention", "doublings of threads: log2({:.0f}) / log2({:.0f} cores) = {:.4g}", busy,
                     m.cores.value, contention);
    account.note("clock", "{:.4g} - ({:.4g} - {:.4g}) * {:.4g} = {:.5g} GHz", m.clock_ghz.value, m.clock_ghz.value,
                 m.loaded_clock_ghz.value, contention, out.clock_ghz);
    account.note("speed of a thread", "{:.5g} * {:.4g} ^ ({:.4g} ^ 0.5) = {:.5g} GHz", out.clock_ghz, c.contended_speed,
                 contention, per_ms * 1e-6);
}

/// On a matrix unit head_dim is padded to tiles: 32 deep in S and dP, 16 rows of O, dQ, dK and dV (cpu/README.md).
double Cpu::flop_per_pair() const {
    const auto padded = [&](std::int64_t dim, double to) {
        const auto size = static_cast<double>(dim);
        return on_matrix_unit() ? std::ceil(size / to) * to : size;
    };
    const Problem& p = q.problem;
    const double deep = padded(p.head_dim, kTileDepth), deep_v = padded(p.head_dim_v, kTileDepth);
    const double rows = padded(p.head_dim, kTileRows), rows_v = padded(p.head_dim_v, kTileRows);
    const double sums = on_matrix_unit() && !in_bf16_parts() ? kTileRows : 0;  // row sums of the rounded P
    if (forward()) return 2 * (deep + rows_v + sums);
    const double five_gemms = 2 * (deep + deep_v + rows_v + 2 * rows) + (sums_deltas() ? 2 * (deep + deep_v) : 0);
    return on_matrix_unit() && !in_stripes() ? five_gemms + 2 * (deep + deep_v)
                                             : five_gemms;  // dK, dV and dQ in separate tasks: seven GEMMs
}

double Cpu::clocks_of_dropout(double elements) const {
    const double p = q.problem.dropout.probability;
    if (p <= 0) return 0;
    const double exps = kExpsOfFactor + kExpsOfBlock * philox_blocks(p, kPhiloxDraws) / kPhiloxDraws.weights;
    return elements * exps / q.machine.exp_rate;
}

/// The amounts that the call computes, summed over its tasks if they are known.
Amounts Cpu::amounts() const {
    if (!loops.empty()) {
        Amounts sum;
        for (const Loop& loop : loops) sum += loop.sum();
        return sum;
    }
    if (few()) {
        const auto computed = static_cast<double>(elements_of_few_queries(q.problem, workload));
        return {.flop = computed * flop_per_pair(), .exps = computed};
    }
    const double times = sums_deltas() ? 2 : 1;  // how often scores are computed
    const auto elements = static_cast<double>(computed_elements(workload, on_matrix_unit()));
    return {.flop = elements * flop_per_pair(),
            .exps = elements * times,
            .masked = on_matrix_unit() ? static_cast<double>(masked_elements(workload)) * times : 0,
            .packed = on_matrix_unit() ? packed_elements() : 0};
}

/// The clocks by which the last thread exceeds the mean of the threads, and their explanation.
std::pair<double, std::string> Cpu::idle_clocks(double total) const {
    if (busy <= 1) return {0, ""};
    if (!loops.empty()) {
        const auto cost = [&](const Amounts& task) { return clocks_of(task).total(); };
        double last = 0;
        for (const Loop& loop : loops) last += loop.done(static_cast<int>(threads), cost);
        if (last < (1 + 1e-9) * total / busy) return {0, ""};  // sums in another order differ by less
        return {last - total / busy,
                fmt::format("each task goes to the first free thread: ({:.9g} clk - {:.9g} clk / {:.0f})", last, total,
                            busy)};
    }
    const auto tiles = static_cast<double>(units.tiles);
    const auto kv_heads = static_cast<double>(q.problem.batch * q.problem.heads_kv);
    if (!forward() && q.schedule == Schedule::fa1 && kv_heads > 0) {  // whole heads
        const double rounds = std::ceil(kv_heads / busy);
        return {(rounds - kv_heads / busy) / kv_heads * total,
                fmt::format("whole heads: ({:.0f} - {:.0f} / {:.0f}) / {:.0f} * {:.6g} clk", rounds, kv_heads, busy,
                            kv_heads, total)};
    }
    if (tiles <= 0 || q.schedule == Schedule::fa2) return {0, ""};  // with many tasks all threads are equally busy
    const double side = forward() ? static_cast<double>(units.shortest) : 0.5 * static_cast<double>(units.longest);
    return {c.extra_tiles * side * total / tiles,
            fmt::format("tiles by which it is later: {:.4g} * {:.4g} * {:.6g} clk / {:.0f}", c.extra_tiles, side, total,
                        tiles)};
}

/// Adds GEMMs, softmax, masks and packing of all tasks, spread over the threads.
void Cpu::add_arithmetic() {
    const Machine& m = q.machine;
    const Amounts all = amounts();
    const Clocks clocks = clocks_of(all);
    const double per_pair = all.exps > 0 ? all.flop / all.exps : 0;
    account.note("elements", "of {} tiles, {}: {} * {:.6g} = {:.6g}", units.tiles,
                 on_matrix_unit() ? "padded to tiles of the matrix unit" : "padded to 16 lanes at the end of rows",
                 out.cost.elements, out.cost.elements > 0 ? all.exps / static_cast<double>(out.cost.elements) : 1.0,
                 all.exps);
    account.note("GEMMs", "{:.6g} * {:.6g} FLOP / ({:.5g} FLOP/clk * {:.4g} reached) = {:.5g} clk", all.exps, per_pair,
                 peak(), c.gemm_share, clocks.gemms);
    account.note("softmax", "{:.6g} / {:.4g} exp/clk * {:.4g} = {:.5g} clk", all.exps, m.exp_rate.value, c.exp_share,
                 clocks.softmax);
    if (clocks.masks > 0)
        account.note("masks", "{:.6g} elements of partial tiles / {:.4g} exp/clk * {:.4g} = {:.5g} clk", all.masked,
                     m.exp_rate.value, c.mask_share, clocks.masks);
    if (clocks.dropout > 0)
        account.note("dropout",
                     "{:.6g} * ({:.3g} + {:.3g} * {:.4g} blocks of Philox / {:.0f}) / {:.4g} exp/clk = {:.5g} clk",
                     all.exps, kExpsOfFactor, kExpsOfBlock, philox_blocks(q.problem.dropout.probability, kPhiloxDraws),
                     kPhiloxDraws.weights, m.exp_rate.value, clocks.dropout);
    if (clocks.packing > 0)
        account.note("packing", "{:.6g} elements * {:.4g} ns * {:.4g} GHz = {:.5g} clk", all.packed, pack_ns(),
                     m.clock_ghz.value, clocks.packing);
    note_speed();
    const auto add = [&](const char* name, double all_clocks) {
        account.part(name, all_clocks / busy / per_ms, "{:.5g} clk / {:.0f} threads / {:.5g} GHz", all_clocks, busy,
                     per_ms * 1e-6);
    };
    add("GEMMs", clocks.gemms), add("softmax", clocks.softmax), add("masks", clocks.masks);
    add("dropout", clocks.dropout), add("packing", clocks.packing);
    const auto [idle, text] = idle_clocks(clocks.total());
    account.part("idle cores", idle / per_ms, "until the last thread is done, {} / {:.5g} GHz", text, per_ms * 1e-6);
}

/// Clocks of one thread for these amounts.
Clocks Cpu::clocks_of(const Amounts& what) const {
    const double exps = what.exps / q.machine.exp_rate;
    return {.gemms = what.flop / gemm_rate(),
            .softmax = exps * c.exp_share,
            .masks = what.masked / q.machine.exp_rate * c.mask_share,
            .dropout = clocks_of_dropout(what.exps),
            .packing = what.packed * pack_ns() * q.machine.clock_ghz};
}

/// Packed elements of a call with too many tasks to list. Each matrix_split::kMaxPanels panels pack all keys for
/// themselves, half of them under a causal mask (cpu/fa2/matrix/memory.hpp).
double Cpu::packed_elements() const {
    const Problem& p = q.problem;
    const auto d = static_cast<double>(p.head_dim);
    const auto dv = static_cast<double>(p.head_dim_v);
    const auto queries = static_cast<double>(p.rows_q() * p.heads_q),
               keys = static_cast<double>(p.rows_kv() * p.heads_kv);
    if (!forward()) return queries * 2 * (d + dv) + keys * (2 * d + dv);
    const auto panels =
        static_cast<double>(p.group() * schedule::ceil_div(std::max<std::int64_t>(p.len_q, 1), kMatrixPanel));
    const double seen = p.mask.causal != Causal::none && p.len_kv > kSplitKeys ? 0.5 : 1;
    return queries * (d + dv) +
           keys * (d + dv) * std::ceil(panels / static_cast<double>(matrix_split::kMaxPanels)) * seen;
}

/// Does the backward on a matrix unit run in stripes of queries (cpu/fa2/matrix/backward.cc)?
bool Cpu::in_stripes() const {
    const Problem& p = q.problem;
    const auto heads = std::max(1.0, static_cast<double>(p.batch * p.heads_q));
    const auto blocks = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_kv, 1), 256));
    const auto tiles = static_cast<double>(schedule::ceil_div(std::max<std::int64_t>(p.len_q, 1), 128));
    const double stripes = threads <= 1 ? 1 : std::min({std::ceil(4 * threads / heads), blocks, tiles});
    const double queries = static_cast<double>(p.batch * p.heads_q * p.len_q);
    const double sums = static_cast<double>(p.batch * p.heads_q * p.len_kv);  // dK and dV sums of each query head
    const double bytes = 4 * static_cast<double>(p.head_dim + p.head_dim_v);
    if (p.heads_q != p.heads_kv && sums * bytes > std::max(0x1p28, queries * bytes)) return false;
    return heads >= threads || heads * stripes >= 4 * threads;
}

/// The bytes of packed Q, dO, K and V, some of them packed twice, and of dQ, in the backward on a matrix unit
/// (cpu/steps/matrix/gradient.cc).
double Cpu::packed_bytes() const {
    const Problem& p = q.problem;
    const double element = 2 * (in_bf16_parts() ? 3.0 : 1.0);
    const auto d = static_cast<double>(p.head_dim), dv = static_cast<double>(p.head_dim_v);
    return static_cast<double>(p.rows_q() * p.heads_q) * (2 * (d + dv) * element + 4 * d) +
           static_cast<double>(p.rows_kv() * p.heads_kv) * (2 * d + dv) * element;
}

/// Adds the reads of tensors that are not cached at the start, and the matrices of standard.
void Cpu::add_memory() {
    const Machine& m = q.machine;
    const Problem& p = q.problem;
    const double core_fraction = std::max(kCoreReads, 1.5 / m.cores);
    const double read = m.dram_gbs * m.dram_read_share * std::min(1.0, core_fraction * busy) * c.read_share * 1e6;
    account.note("memory rate", "{:.4g} GB/s * {:.3g} * min(1, {:.4g} * {:.0f}) * {:.4g} = {:.5g} GB/s of reading",
                 m.dram_gbs.value, m.dram_read_share.value, core_fraction, busy, c.read_share, read * 1e-6);
    double bytes = static_cast<double>(p.rows_q() * p.heads_q + p.rows_kv() * p.heads_kv) *
                   static_cast<double>((p.head_dim + p.head_dim_v) * size_of(p.dtype));
    if (!forward()) bytes *= 2;
    account.part("DRAM", bytes / read, "cold tensors: {:.6g} B / {:.5g} GB/s", bytes, read * 1e-6);
    if (few()) return;
    if (!forward() && on_matrix_unit()) {
        const double own = packed_bytes(), kept = std::min(own, busy * kSecondLevelBytes), copies = 2 * (own - kept);
        const bool stay = own + bytes <= m.l2_mib * kMiB / 2;  // with the tensors that they are copies of
        const double rate = stay ? m.l2_bytes * busy * per_ms : read;
        account.part("copies", copies / rate,
                     "packed tensors beyond the second-level caches, written and read: 2 * ({:.6g} B - {:.6g} "
                     "B) / {:.5g} GB/s",
                     own, kept, rate * 1e-6);
    } else if (!forward()) {
        const double copies = kGradientCopies * bytes / static_cast<double>(size_of(p.dtype)) * sizeof(float);
        const bool stay = copies <= m.l2_mib * kMiB / 2;
        const double rate = stay ? m.l2_bytes * busy * per_ms : read;
        account.part("copies", copies / rate, "in fp32, {}: {:.6g} B / {:.5g} GB/s",
                     stay ? "within the last-level cache" : "beyond the caches", copies, rate * 1e-6);
    }
    if (q.schedule != Schedule::standard) return;
    // S, P (and dS) are written and read; each overwritten line is fetched first.
    const double matrices = static_cast<double>(out.cost.elements) * (forward() ? 20.0 : 28.0);
    const double rate = workload.residency.scores ? m.l2_bytes * busy * per_ms : read;
    account.part("N x N matrices", matrices / rate, "{:.6g} B / {:.5g} GB/s", matrices, rate * 1e-6);
}

/// Adds the fixed cost of a call and the start of threads.
void Cpu::add_loops() {
    const double starts = threads > 1 ? c.loop_starts : 0;
    const double ms = (c.call_us + starts * q.machine.launch_us + c.start_us * contention) * 1e-3;
    account.part("launch", ms,
                 "a call, parallel loops, waking threads: {:.4g} us + {:.4g} * {:.4g} us + {:.4g} us * {:.4g}",
                 c.call_us, starts, q.machine.launch_us.value, c.start_us, contention);
}

}  // namespace

bool cpu_knows_dropout(const Question&) { return true; }

void predict_cpu(const Question& question, Prediction& prediction) {
    predict_cpu_family(question, shares_of(question), prediction);
}

void predict_cpu_family(const Question& question, const CpuConstants& constants, Prediction& prediction) {
    // fa2 stacks the query heads of a group (cpu/fa2/stack_heads.hpp).
    const bool stacks =
        question.pass == Pass::forward && question.schedule == Schedule::fa2 && stackable(question.problem);
    const Problem problem = stacks ? stacked(question.problem) : question.problem;
    const Question as_run{problem, question.schedule, question.pass, question.machine, question.options};
    Cpu cpu(as_run, constants, prediction);
    cpu.add_arithmetic();
    cpu.add_memory();
    cpu.add_loops();
    cpu.add_roofs();
    cpu.account.close();
}

}  // namespace tessera::model
