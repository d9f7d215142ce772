// SPDX-License-Identifier: Apache-2.0
#include "model/predict.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/host/kernel_table.hpp"
#include "model/error_bar.hpp"
#include "model/family.hpp"
#include "model/gpu.hpp"
#include "model/live_keys.hpp"
#include "model/parts.hpp"
#include "schedule/grid.hpp"
#include "tessera/error.hpp"

namespace tessera::model {
namespace {

/// The share of the L2 that is available to a kernel's tensors; other traffic passes through it too.
constexpr double kL2Usable = 0.8;

std::optional<std::string> refusal_of_machine(const Problem& problem, Schedule schedule, const Machine& machine) {
    if (!machine.supports(problem.dtype))
        return fmt::format("{} does not compute {}", machine.name, name_of(problem.dtype));
    if (schedule == Schedule::fa3 && machine.kind == MachineKind::cpu)
        return "fa3 is a schedule for GPUs with asynchronous MMA (wgmma)";
    return std::nullopt;
}

/// The reason why another library's family has no kernel with this tile for a Problem that it takes, or nothing.
std::optional<std::string> refusal_of_tile(const Family& family, const Problem& problem, const Machine& machine,
                                           const Tile& tile) {
    const Tile own = tile_of(family, problem, machine);
    if (tile == own) return std::nullopt;
    return fmt::format("expected its tile for this problem, {} x {}, got {} x {}", own.block_q, own.block_kv,
                       tile.block_q, tile.block_kv);
}

}  // namespace

std::string not_modelled(const Problem& p, bool knows_dropout) {
    std::string text;
    const auto add = [&](const char* name) { text += (text.empty() ? "" : ", ") + std::string(name); };
    if (p.softcap > 0) add("softcap");
    if (p.alibi) add("ALiBi");
    if (p.bias) add("bias except its bytes");
    if (p.dropout.probability > 0 && !knows_dropout) add("dropout");
    return text;
}

Units units_of(const schedule::Workload& w, bool ends) {
    Units units;
    bool any = false;
    const bool rows_outer = w.pass == Pass::forward;
    for (const auto& [lengths, times] : schedule::distinct_sequences(w)) {
        const schedule::Grid grid{w.problem.mask.bind(lengths.first, lengths.second), w.tile, rows_outer};
        const std::int64_t heads = times * w.problem.heads_q;
        if (heads == 0) continue;
        units.count += heads * (rows_outer ? grid.rows() : grid.columns());
        const auto add = [&](std::int64_t n, std::int64_t repeats) {
            const std::int64_t inner = (rows_outer ? grid.columns_of(n) : grid.rows_of(n)).size();
            const std::int64_t uncut = (rows_outer ? grid.uncut_columns(n, ends) : grid.uncut_rows(n, ends)).size();
            units.tiles += heads * repeats * inner;
            units.cut += heads * repeats * (inner - uncut);
            units.longest = std::max(units.longest, inner);
            units.shortest = any ? std::min(units.shortest, inner) : inner;
            any = true;
        };
        if (rows_outer) schedule::for_each_run_of_rows(grid, add);
        else schedule::for_each_run_of_columns(grid, add);
    }
    return units;
}

/// The fraction of each tensor that the L2 holds, among all data that is read again.
struct L2Fractions {
    double keys = 1, queries = 1, scores = 1;
};

static L2Fractions fractions_in_l2(const Question& q, const Tile& tile, std::int64_t at_once) {
    const Problem& p = q.problem;
    const double usable = kL2Usable * q.machine.l2_mib * 1048576.0;
    const double e = static_cast<double>(size_of(p.dtype));
    const auto len_q = static_cast<double>(p.len_q);
    const auto len_kv = static_cast<double>(p.len_kv);
    // Fractional tiles, so that the working set does not jump with the length.
    const double outer = q.pass == Pass::forward ? std::max(1.0, len_q / static_cast<double>(tile.block_q)) *
                                                       static_cast<double>(std::max<std::int64_t>(p.group(), 1))
                                                 : std::max(1.0, len_kv / static_cast<double>(tile.block_kv));
    const auto heads = static_cast<double>(p.batch * (q.pass == Pass::forward ? p.heads_kv : p.heads_q));
    // Heads whose tiles run at the same time.
    const double active = std::min(heads, std::max(1.0, static_cast<double>(at_once) / outer));
    const double keys = active * len_kv * static_cast<double>(p.head_dim + p.head_dim_v) * e;
    double per_query = static_cast<double>(p.head_dim + p.head_dim_v) * e + 4.0 * static_cast<double>(p.head_dim);
    double query_heads = active;
    if (q.schedule == Schedule::fa1) {  // one block per head, all heads at the same time
        query_heads = std::min(static_cast<double>(p.batch * p.heads_q), static_cast<double>(at_once));
        per_query = static_cast<double>(p.head_dim) * e + 4.0 * static_cast<double>(p.head_dim_v) + 8;
    }
    // If each head of a group has one tile, these start together and read the same keys in step, so each key is fetched
    // once. Neighbouring thread blocks of cuda.decode.forward have the same keys.
    const bool in_step = q.pass == Pass::forward && p.len_q <= tile.block_q && p.group() > 1 && p.group() <= at_once;
    // Cyclic reads evict data before its reuse: at twice the capacity no data is reused.
    const auto fraction = [&](double bytes) { return std::clamp(2 - bytes / usable, 0.0, 1.0); };
    return {
        .keys = in_step || q.options.kernel == kDecodeKernel ? 1.0 : fraction(keys),
        .queries = fraction(query_heads * len_q * per_query),
        .scores = fraction(static_cast<double>(p.batch * p.heads_q) * len_q * len_kv * 4)};  // written as a whole first
}

schedule::Workload workload_of(const Question& q, const Tile& tile, std::int64_t at_once) {
    schedule::Workload w{
        .problem = q.problem, .schedule = q.schedule, .pass = q.pass, .tile = tile, .sequences = q.options.sequences};
    w.residency = {.keys = true, .queries = true, .scores = true, .tiles_at_once = std::max<std::int64_t>(1, at_once)};
    return w;
}

schedule::Cost cost_of(const Question& q, const schedule::Workload& resident) {
    const L2Fractions held = fractions_in_l2(q, resident.tile, resident.residency.tiles_at_once);
    schedule::Cost cost = schedule::cost(resident);
    const std::int64_t least = cost.work.bytes.dram;
    const auto add = [&](double fraction, bool schedule::Residency::*resident_part) {
        if (fraction >= 1) return;
        schedule::Workload evicted = resident;
        evicted.residency.*resident_part = false;
        const auto more = static_cast<double>(schedule::cost(evicted).work.bytes.dram - least);
        cost.work.bytes.dram += std::llround((1 - fraction) * more);
    };
    add(held.keys, &schedule::Residency::keys);
    add(held.queries, &schedule::Residency::queries);
    add(held.scores, &schedule::Residency::scores);
    return cost;
}

/// A dense Problem as a ragged one, if its sequences have unequal numbers of keys.
static void make_ragged_if_unequal(Problem& p, const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences) {
    const auto longer = [](const auto& a, const auto& b) { return a.second < b.second; };
    const auto [least, most] = std::minmax_element(sequences.begin(), sequences.end(), longer);
    if (p.ragged || sequences.empty() || least->second == most->second) return;
    p.ragged = true;
    p.len_kv = most->second;
    p.total_q = p.total_kv = 0;
    for (const auto& [queries, keys] : sequences) p.total_q += queries, p.total_kv += keys;
}

Question question_of(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                     const PredictOptions& options) {
    Question q{on_live_keys(problem, options.sequences),
               schedule,
               pass,
               machine,
               options,
               problem.kv_lengths,
               problem.page_size};
    q.options.kernel.clear();
    if (machine.kind == MachineKind::gpu) {
        const Family* family = find_family(schedule, pass, options.by);
        if (family != nullptr && is_ours(*family)) {
            const cuda::KernelEntry& kernel = our_kernel(problem, schedule, pass, machine, options);
            q.options.kernel = kernel.name;
            if (q.cached) {
                make_ragged_if_unequal(q.problem, options.sequences);
                // Shapes for a cache have tiles of their own, which the Problem without it does not tell.
                if (kernel.name != kDecodeKernel && !q.options.tile)
                    q.options.tile = kernel.tile_of(problem, limits_of(machine));
            }
        }
    }
    // Other kernels are chosen as for a dense batch, if the sequences of a cache have as many queries each.
    if (problem.kv_lengths && !q.problem.ragged) q.options.sequences.clear();
    return q;
}

void count_bias(const Question& q, Prediction& prediction) {
    if (!q.problem.bias) return;
    const auto bytes = 4 * prediction.cost.elements;  // fp32, for the tiles that run, once a head
    prediction.cost.work.bytes.l2 += bytes;
    prediction.cost.work.bytes.dram += bytes;
    prediction.memory.tensors += 4 * q.problem.heads_q * q.problem.len_q * q.problem.len_kv;
}

void Account::at_least(const char* name, double ms) {
    double sum = 0;
    for (const Part& part : prediction_.parts) sum += part.ms;
    if (ms <= sum) return;
    note("lower bound", "{}: {:.4g} ms, more than the parts' {:.4g} ms", name, ms, sum);
    const std::string waiting = std::string("waiting for ") + name;
    prediction_.parts.push_back({waiting, ms - sum});
    note(waiting.c_str(), "{:.8g} - {:.8g} = {:.4g} ms", ms, sum, ms - sum);
}

void Account::close() {
    Prediction& p = prediction_;
    const auto highest =
        std::max_element(p.roofs.begin(), p.roofs.end(), [](const Roof& a, const Roof& b) { return a.ms < b.ms; });
    if (highest != p.roofs.end()) at_least(highest->name.c_str(), highest->ms);
    p.ms = 0;
    std::string sum;
    for (const Part& part : p.parts) {
        p.ms += part.ms;
        sum += fmt::format("{}{} {:.4g}", sum.empty() ? "" : " + ", part.name, part.ms);
    }
    for (Roof& roof : p.roofs) roof.percent = p.ms > 0 ? 100 * roof.ms / p.ms : 0;
    if (highest != p.roofs.end()) {
        p.bound = highest->name;
        p.percent_of_bound = highest->percent;
    }
    constexpr double kMost = 0.5;
    for (const Part& part : p.parts) {
        const bool is_none = part.name == "launch" || part.name == "idle cores";  // no unit is busy then
        if (is_none && part.ms > kMost * p.ms) p.bound = part.name, p.percent_of_bound = 100 * part.ms / p.ms;
    }
    const auto flop = static_cast<double>(p.cost.work.flop);
    const auto dram = static_cast<double>(p.cost.work.bytes.dram);
    p.tflops = p.ms > 0 ? flop * 1e-9 / p.ms : 0;
    p.intensity = dram > 0 ? flop / dram : 0;
    note("time", "{} = {:.4g} ms", sum, p.ms);
    note("rate", "{} visible pairs: {} FLOP / {:.4g} ms / 1e9 = {:.4g} TFLOP/s", p.cost.pairs, p.cost.work.flop, p.ms,
         p.tflops);
}

/// predict(), with or without the blocks of predict_with_empty_blocks().
static Prediction predict_call(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                               const PredictOptions& options, bool empty_blocks) {
    problem.validate();
    if (const auto reason = refusal(problem, schedule, pass, machine, options))
        throw Error(ErrorCode::unsupported, "schedule",
                    fmt::format("{} {}: {}", name_of(schedule), name_of(pass), *reason));
    Prediction prediction{.schedule = schedule, .pass = pass};
    Question question = question_of(problem, schedule, pass, machine, options);
    question.empty_blocks = empty_blocks;
    const bool on_gpu = machine.kind == MachineKind::gpu;
    prediction.not_modelled = not_modelled(problem, on_gpu ? gpu_knows_dropout(question) : cpu_knows_dropout(question));
    if (on_gpu) predict_gpu(question, prediction);
    else predict_cpu(question, prediction);
    if (problem.kv_lengths) prediction.memory.tensors += bytes_of_free_slots(problem, question.problem);
    if (question.options.kernel == kDecodeKernel) prediction.memory.workspace = decode_workspace(problem);
    prediction.error = error_bar(problem, prediction, machine);
    return prediction;
}

Prediction predict_with_empty_blocks(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                     const PredictOptions& options) {
    return predict_call(problem, schedule, pass, machine, options, true);
}

}  // namespace tessera::model

namespace tessera {

std::optional<std::string> refusal(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                   const PredictOptions& options) {
    if (problem.kv_lengths && pass == Pass::backward) return "a cache of keys has no gradient";
    if (auto reason = model::refusal_of_machine(problem, schedule, machine)) return reason;
    if (options.tile && (options.tile->block_q < 1 || options.tile->block_kv < 1))
        return fmt::format("expected a tile of at least 1 x 1, got {} x {}", options.tile->block_q,
                           options.tile->block_kv);
    if (machine.kind == MachineKind::cpu) {
        constexpr std::int64_t kMostOnCpu = 1024;  // cpu/backend.cc
        if (options.tile && std::max(options.tile->block_q, options.tile->block_kv) > kMostOnCpu)
            return fmt::format("expected a tile of at most {0} x {0}, got {1} x {2}", kMostOnCpu, options.tile->block_q,
                               options.tile->block_kv);
        if (options.by.empty() || options.by == "tessera") return std::nullopt;
        return fmt::format("expected tessera, whose kernels alone are known on CPUs, got {}", options.by);
    }
    if (const model::Family* family = model::find_family(schedule, pass, options.by)) {
        if (model::is_ours(*family)) {
            const auto all = cuda::kernel_entries();
            if (!options.kernel.empty() && std::none_of(all.begin(), all.end(), [&](const cuda::KernelEntry& entry) {
                    return options.kernel == entry.name;
                }))
                return fmt::format("expected a CUDA kernel of tessera, got {}", options.kernel);
            const cuda::KernelEntry& kernel = model::our_kernel(problem, schedule, pass, machine, options);
            if (kernel.schedule != schedule || kernel.pass != pass)
                return fmt::format("expected a kernel of {} {}, got {}", name_of(schedule), name_of(pass), kernel.name);
            return cuda::refusal(kernel, problem, options.tile, model::limits_of(machine));
        }
        if (auto reason = model::refusal_of(*family, problem, machine)) return reason;
        return options.tile ? model::refusal_of_tile(*family, problem, machine, *options.tile) : std::nullopt;
    }
    return fmt::format("no {} {} kernel of {} is known", name_of(schedule), name_of(pass),
                       options.by.empty() ? "anyone" : options.by);
}

Prediction predict(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                   const PredictOptions& options) {
    return model::predict_call(problem, schedule, pass, machine, options, false);
}

std::int64_t longest_that_fits(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine) {
    const double capacity = std::min(machine.memory_gib * 1073741824.0, 0x1p56);
    const bool square = problem.len_q == problem.len_kv;
    const auto fits = [&](std::int64_t len) {
        Problem p = model::on_live_keys(problem, {});
        p.ragged = false;
        p.total_q = p.total_kv = 0;
        p.len_kv = len;
        if (square) p.len_q = len;
        // Checked in double first, because a value that is too large may not fit an int64.
        const auto sequences = static_cast<double>(p.batch);
        const double queries = sequences * static_cast<double>(p.heads_q) * static_cast<double>(p.len_q);
        const double keys = sequences * static_cast<double>(p.heads_kv) * static_cast<double>(p.len_kv);
        if ((queries + keys) * static_cast<double>(p.head_dim + p.head_dim_v) > capacity) return false;
        if (schedule == Schedule::standard && 4 * queries * static_cast<double>(p.len_kv) > capacity) return false;
        const auto bytes = schedule::footprint({.problem = p, .schedule = schedule, .pass = pass, .tile = {1, 1}});
        return static_cast<double>(bytes.total()) <= capacity;
    };
    std::int64_t low = 0;
    std::int64_t high = std::int64_t{1} << 32;
    if (fits(high)) return high;
    while (high - low > 1) {
        const std::int64_t middle = low + (high - low) / 2;
        (fits(middle) ? low : high) = middle;
    }
    return low;
}

}  // namespace tessera
