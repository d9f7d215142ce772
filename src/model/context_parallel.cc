// SPDX-License-Identifier: Apache-2.0
//
// A call over several GPUs: what the busiest of them computes, receives and keeps (docs/context-parallel.md).
#include "model/context_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "schedule/grid.hpp"
#include "schedule/schedule.hpp"
#include "tessera/error.hpp"

namespace tessera::model {
namespace {

constexpr int kMostRanks = 1 << 16;
constexpr int kMostSteps = 1 << 10;
constexpr double kGiB = 1073741824;

/// How far off the time of an exchange may be: on links that were measured, and on others.
constexpr double kExchangeError = 0.3, kLinkError = 1;

/// The question of a prediction.
struct Ranks {
    const Problem& problem;
    Schedule schedule;
    Pass pass;
    const Machine& machine;
    const PredictContextParallelOptions& options;

    double ranks() const { return options.ranks; }
    double rows() const { return static_cast<double>(problem.batch * problem.len_q) / ranks(); }
    double size() const { return static_cast<double>(size_of(problem.dtype)); }
    double key_width() const { return static_cast<double>(problem.head_dim + problem.head_dim_v) * size(); }
    /// Milliseconds in which so many bytes are read and written once.
    double copy_ms(double bytes) const { return 2 * bytes / copy_rate() + machine.launch_us * 1e-3; }
    double copy_rate() const { return machine.dram_gbs * machine.dram_copy_share * 1e6; }
};

bool is_masked(const Mask& mask) {
    return mask.causal != Causal::none || mask.window_left != unbounded || mask.window_right != unbounded;
}

bool is_zigzag(const Mask& mask) {
    return mask.causal != Causal::none && mask.window_left == unbounded && mask.window_right == unbounded;
}

/// Rows of one GPU that follow each other, with the keys that a call gets for them.
struct Run {
    std::int64_t rows = 0, keys = 0;
};

std::vector<Run> runs_of(const Problem& p, int ranks, int rank) {
    std::vector<Run> runs;
    if (is_zigzag(p.mask)) {
        const std::int64_t chunk = p.len_q / (2 * ranks);
        runs = {{chunk, (rank + 1) * chunk}, {chunk, (2 * ranks - rank) * chunk}};
    } else {
        const std::int64_t rows = p.len_q / ranks;
        runs = {{rows, is_masked(p.mask) ? (rank + 1) * rows : p.len_kv}};
    }
    const std::vector<Run> of_one = runs;
    for (std::int64_t b = 1; b < p.batch; ++b) runs.insert(runs.end(), of_one.begin(), of_one.end());
    return runs;
}

std::int64_t keys_in(const std::vector<Run>& runs) {
    std::int64_t keys = 0;
    for (const Run& run : runs) keys += run.keys;
    return keys;
}

/// A ragged call of runs with some of the heads.
Prediction predict_runs(const Ranks& q, const std::vector<Run>& runs, std::int64_t heads_kv) {
    Problem p = q.problem;
    PredictOptions options = q.options.kernels;
    p.ragged = true;
    p.batch = static_cast<std::int64_t>(runs.size());
    p.heads_q = heads_kv * q.problem.group();
    p.heads_kv = heads_kv;
    p.len_q = p.len_kv = p.total_q = p.total_kv = 0;
    for (const Run& run : runs) {
        p.len_q = std::max(p.len_q, run.rows);
        p.len_kv = std::max(p.len_kv, run.keys);
        p.total_q += run.rows;
        p.total_kv += run.keys;
        options.sequences.emplace_back(run.rows, run.keys);
    }
    return predict(p, q.schedule, q.pass, q.machine, options);
}

/// The step's kernels on the GPU that needs longest for them.
Prediction slowest(const Ranks& q, std::int64_t heads_kv) {
    const int last = q.options.ranks - 1;
    Prediction found = predict_runs(q, runs_of(q.problem, q.options.ranks, last), heads_kv);
    if (!is_zigzag(q.problem.mask) || last == 0) return found;
    Prediction first = predict_runs(q, runs_of(q.problem, q.options.ranks, 0), heads_kv);
    return first.ms > found.ms ? first : found;
}

/// The hosts of so many GPUs.
int hosts_of(const Link& link, int ranks) {
    return link.gpus_of_host > 0 ? (ranks + link.gpus_of_host - 1) / link.gpus_of_host : 1;
}

/// Milliseconds of an all_gather in which each GPU receives `bytes`. The GPUs of a host receive the same bytes from
/// other hosts, so each of its adapters carries a part of them.
double gather_ms(const Link& link, int ranks, double bytes) {
    if (ranks < 2) return 0;
    const int hosts = hosts_of(link, ranks);
    double ms = bytes / (link.gather_gbs * 1e6);
    if (hosts > 1) {
        const double from_others = bytes * (ranks - link.gpus_of_host) / (ranks - 1);
        ms = std::max(ms, from_others / (link.between_gbs * link.gpus_of_host * 1e6));
    }
    const double hops = link.hop_us * (ranks - 1 - hosts) + link.between_hop_us * (hosts - 1);
    return ms + (link.gather_us + hops) * 1e-3;
}

/// Milliseconds in which each GPU receives `bytes` of its own from `peers` other ones.
double sends_ms(const Link& link, int ranks, double bytes, int peers) {
    if (ranks < 2) return 0;
    double ms = bytes / (link.send_gbs * 1e6), hop = link.hop_us;
    if (hosts_of(link, ranks) > 1) {
        const double from_others = peers == 1 ? bytes : bytes * (ranks - link.gpus_of_host) / (ranks - 1);
        ms = std::max(ms, from_others / (link.between_gbs * 1e6));
        hop = link.between_hop_us;
    }
    return ms + (link.send_us + hop * (peers - 1)) * 1e-3;
}

/// Do the GPUs copy from each other?
bool copies(const Ranks& q) {
    const Link& link = q.options.link;
    return link.copy_gbs > 0 && (link.gpus_of_host == 0 || q.options.ranks <= link.gpus_of_host);
}

/// Groups of key heads by the MiB of K and V of a GPU's rows: _STEPS of tessera.torch.
int steps_of(const Ranks& q) {
    struct Steps {
        double mib;
        int forward, backward;
    };
    constexpr Steps kSteps[] = {{512, 8, 8}, {256, 8, 4}, {64, 4, 1}, {16, 2, 1}, {0, 1, 1}};
    const double mib = q.rows() * static_cast<double>(q.problem.heads_kv) * q.key_width() / 1048576.0;
    const Steps& own =
        *std::find_if(std::begin(kSteps), std::end(kSteps), [&](const Steps& s) { return mib >= s.mib; });
    const int wanted = q.options.steps > 0 ? q.options.steps : q.pass == Pass::forward ? own.forward : own.backward;
    return static_cast<int>(std::min<std::int64_t>(wanted, q.problem.heads_kv));
}

/// A step with some of the heads. `first`: the one that packs, where the GPUs copy from each other.
RankStep step_of(const Ranks& q, std::int64_t heads_kv, const std::vector<Run>& runs, bool first) {
    RankStep step;
    const Link& link = q.options.link;
    const double row = static_cast<double>(heads_kv) * q.key_width();
    const double own = q.rows() * row, others = (q.ranks() - 1) * own;
    const double keys = static_cast<double>(keys_in(runs)) * row;
    const bool backward = q.pass == Pass::backward;
    if (copies(q)) {
        // A run of zig-zag is copied chunk by chunk; what is of this GPU is copied within it.
        const double pieces = is_zigzag(q.problem.mask) ? 2 * q.ranks() + 1 : q.ranks();
        const auto copied = [&](double received) {
            return received / (link.copy_gbs * 1e6) + pieces * link.copy_us * 1e-3;
        };
        const double meeting = link.meet_us * 1e-3;
        if (first) step.pack = q.copy_ms(q.rows() * static_cast<double>(q.problem.heads_kv) * q.key_width()) + meeting;
        step.copy = copied(others) + std::max(0.0, keys - others) * 2 / q.copy_rate();
        if (backward) step.scatter = meeting + copied(others);
    } else {
        step.pack = q.copy_ms(own);
        step.gather = gather_ms(link, q.options.ranks, others);
        step.copy = q.copy_ms(keys);
        if (backward) {
            step.parts = q.copy_ms(keys);
            step.scatter = sends_ms(link, q.options.ranks, others, q.options.ranks - 1);
        }
    }
    // One launch reads all parts and writes the sums.
    if (backward) step.sum = q.copy_ms((q.ranks() + 1) * own / 2);
    return step;
}

/// Bytes beside the tensors: received rows, keys of the runs for two steps, and in the backward what is sent and
/// received of dK and dV.
std::int64_t memory_of(const Ranks& q, int steps, std::int64_t keys) {
    const std::int64_t most = (q.problem.heads_kv + steps - 1) / steps * (q.problem.head_dim + q.problem.head_dim_v) *
                              static_cast<std::int64_t>(size_of(q.problem.dtype));
    const std::int64_t whole = q.problem.batch * q.problem.len_q;
    std::int64_t rows = whole + std::min(steps, 2) * keys;
    if (q.pass == Pass::backward) rows += 2 * keys + (q.options.ranks > 1 ? whole : 0);
    return rows * most;
}

void add_ring(const Ranks& q, ContextParallelPrediction& out) {
    const Problem& p = q.problem;
    const bool backward = q.pass == Pass::backward;
    if (q.options.ranks == 1 || (is_masked(p.mask) && !is_zigzag(p.mask))) return;
    const std::int64_t rows = p.len_q / q.options.ranks, half = rows / 2;
    const auto kernels = [&](const std::vector<Run>& of_one, bool masked) {
        std::vector<Run> runs;
        for (std::int64_t b = 0; b < p.batch; ++b) runs.insert(runs.end(), of_one.begin(), of_one.end());
        Problem open = p;
        if (!masked) open.mask = {};
        return predict_runs({open, q.schedule, q.pass, q.machine, q.options}, runs, p.heads_kv).ms;
    };
    RingTimes times;
    times.own = kernels({{rows, rows}}, true);
    times.other = is_zigzag(p.mask) ? std::max(kernels({{rows, half}}, false), kernels({{half, rows}}, false))
                                    : kernels({{rows, rows}}, false);
    const double keys = q.rows() * static_cast<double>(p.heads_kv) * q.key_width(), in_fp32 = keys * 4 / q.size();
    const double result = q.rows() * static_cast<double>(p.heads_q * (backward ? p.head_dim : p.head_dim_v));
    times.merge = q.copy_ms(result * (4 + q.size() / 2));
    times.exchange = sends_ms(q.options.link, q.options.ranks, keys + (backward ? in_fp32 : 0), 1);
    out.ring_ms = ring_in_time(times, q.options.ranks, q.pass);
    out.ring_memory = std::llround(2 * keys + (backward ? 2 * in_fp32 : 0) + 4 * result);
}

/// The steps, and the larger error of their kernels. By copies the calls run on two streams in turn, so that one fills
/// the multiprocessors that another leaves idle: together they take as long as one call with all heads. By NCCL they
/// run one after another, and calls of equally many heads take equally long.
std::vector<RankStep> steps_on(const Ranks& q, int count, const std::vector<Run>& runs, double& error) {
    std::vector<RankStep> steps;
    std::map<std::int64_t, double> kernels;  // by heads
    for (int s = 0; s < count; ++s) {
        const std::int64_t all = q.problem.heads_kv, heads = all * (s + 1) / count - all * s / count;
        const std::int64_t together = copies(q) ? all : heads;
        auto found = kernels.find(together);
        if (found == kernels.end()) {
            const Prediction one = slowest(q, together);
            error = std::max(error, one.error);
            found = kernels.emplace(together, one.ms).first;
        }
        steps.push_back(step_of(q, heads, runs, s == 0));
        steps.back().kernels = found->second * static_cast<double>(heads) / static_cast<double>(together);
    }
    return steps;
}

/// The time and memory of one GPU on the whole sequence.
struct OneGpu {
    double ms = 0, error = 0, memory = 0;
};

/// A sequence whose FLOP exceed 2^62 is predicted at a shorter length, and scaled: its time by the visible scores, its
/// memory by the rows.
OneGpu on_one_gpu(const Ranks& q) {
    Problem part = q.problem;
    while (!schedule::countable(part) && part.len_q % 2 == 0) part.len_q = part.len_kv /= 2;
    const auto scores = [](const Problem& p) {
        return static_cast<double>(schedule::visible_pairs(p.mask.bind(p.len_q, p.len_kv)));
    };
    const double longer = static_cast<double>(q.problem.len_q) / static_cast<double>(part.len_q);
    const Prediction found = predict(part, q.schedule, q.pass, q.machine, q.options.kernels);
    return {found.ms * scores(q.problem) / scores(part), found.error,
            static_cast<double>(found.memory.total()) * longer};
}

void check_options(const Problem& problem, const PredictContextParallelOptions& options) {
    const auto out_of_range = [](const char* argument, const std::string& expected, auto got) {
        throw Error(ErrorCode::invalid_argument, argument, fmt::format("expected {}, got {}", expected, got));
    };
    if (options.ranks < 1 || options.ranks > kMostRanks)
        out_of_range("ranks", fmt::format("1..{}", kMostRanks), options.ranks);
    if (options.steps < 0 || options.steps > kMostSteps)
        out_of_range("steps", fmt::format("0..{}", kMostSteps), options.steps);
    if (!options.kernels.sequences.empty())
        out_of_range("kernels.sequences", "none, since all sequences are equal", options.kernels.sequences.size());
    const Link& link = options.link;
    const std::pair<const char*, double> rates[] = {{"link.gather_gbs", link.gather_gbs},
                                                    {"link.send_gbs", link.send_gbs},
                                                    {"link.between_gbs", link.gpus_of_host > 0 ? link.between_gbs : 1}};
    for (const auto& [name, rate] : rates)
        if (options.ranks > 1 && !(rate > 0 && rate < 1e9)) out_of_range(name, "GB/s over 0", rate);
    const std::int64_t pieces = std::int64_t{options.ranks} * (is_zigzag(problem.mask) ? 2 : 1);
    if (problem.len_q % pieces != 0 || problem.len_q == 0)
        out_of_range("len", fmt::format("a multiple of {} rows, {} for each GPU", pieces, pieces / options.ranks),
                     problem.len_q);
}

}  // namespace
}  // namespace tessera::model

namespace tessera {

std::optional<std::string> context_parallel_refusal(const Problem& problem, Schedule schedule, Pass pass,
                                                    const Machine& machine,
                                                    const PredictContextParallelOptions& options) {
    if (machine.kind != MachineKind::gpu) return fmt::format("expected GPUs, {} is a CPU", machine.name);
    if (problem.kv_lengths) return "expected K and V of the whole sequence, got a cache";
    if (problem.ragged) return "expected sequences of one length: packed documents are not modelled";
    if (problem.len_q != problem.len_kv)
        return fmt::format("expected as many queries as keys, got {} and {}", problem.len_q, problem.len_kv);
    if (problem.mask.causal == Causal::none && problem.mask.window_right != problem.mask.window_left)
        return "expected a causal mask, a window of equal sides or none";
    if (problem.alibi || problem.bias || problem.dropout.probability > 0)
        return "context parallelism has no ALiBi, bias or dropout";
    return refusal(problem, schedule, pass, machine, options.kernels);
}

ContextParallelPrediction predict_context_parallel(const Problem& problem, Schedule schedule, Pass pass,
                                                   const Machine& machine,
                                                   const PredictContextParallelOptions& options) {
    problem.validate();
    PredictContextParallelOptions known = options;
    if (known.kernels.by.empty()) known.kernels.by = "tessera";
    model::check_options(problem, known);
    if (const auto reason = context_parallel_refusal(problem, schedule, pass, machine, known))
        throw Error(ErrorCode::unsupported, "schedule",
                    fmt::format("{} {}: {}", name_of(schedule), name_of(pass), *reason));
    const model::Ranks q{problem, schedule, pass, machine, known};
    const model::OneGpu alone = model::on_one_gpu(q);
    ContextParallelPrediction out;
    out.pass = pass, out.ranks = known.ranks;
    out.order = model::is_zigzag(problem.mask) ? "zigzag" : "contiguous";
    out.one_gpu_ms = alone.ms;
    out.fits_one_gpu = alone.memory <= machine.memory_gib * model::kGiB;
    out.measured = known.ranks <= known.link.measured_gpus;
    if (known.ranks == 1) {
        out.ms = out.kernel_ms = alone.ms, out.error = alone.error, out.share = 1, out.measured = true;
        out.parts = {{"kernels", alone.ms}};
        return out;
    }
    out.steps = model::steps_of(q);
    const std::vector<model::Run> runs = model::runs_of(problem, known.ranks, known.ranks - 1);
    double error = 0;
    const std::vector<model::RankStep> steps = model::steps_on(q, out.steps, runs, error);
    model::RanksInTime time = model::in_time(steps, pass);
    for (const model::RankStep& step : steps) {
        out.kernel_ms += step.kernels;
        out.exchange_ms += step.exchange();
    }
    out.ms = time.ms, out.hidden_ms = time.hidden_ms, out.parts = std::move(time.parts);
    out.share = alone.ms / (known.ranks * out.ms);
    out.error = error + (out.measured ? model::kExchangeError : model::kLinkError) *
                            std::max(0.0, out.ms - out.kernel_ms) / out.ms;
    const double received = (q.ranks() - 1) * q.rows() * static_cast<double>(problem.heads_kv) * q.key_width();
    out.bytes_received = std::llround(pass == Pass::backward ? 2 * received : received);
    out.memory = model::memory_of(q, out.steps, model::keys_in(runs));
    model::add_ring(q, out);
    return out;
}

}  // namespace tessera
