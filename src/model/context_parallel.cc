// SPDX-License-Identifier: Apache-2.0
//
// A call over several GPUs: the computation, the received bytes and the memory of the busiest of them
// (docs/context-parallel.md).
#include "model/context_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/invalid.hpp"
#include "model/documents_on_ranks.hpp"
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
    double rows() const { return static_cast<double>(problem.rows_q()) / ranks(); }
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
    options.sequences.clear();
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

/// The calls of the GPUs, and the rows that the GPU that is done last receives.
struct Spread {
    std::string order;
    std::vector<std::vector<Run>> busiest;  ///< of the GPUs that may be done last
    double keys = 0;                        ///< rows of K and V of a GPU's calls
    double received = 0;                    ///< rows of them from others
    double parts_received = 0;              ///< rows of dK and dV that others computed for it
    bool gathered = true;                   ///< all rows go to all GPUs
    int peers = 0;                          ///< GPUs that send to one
};

/// Documents of which GPUs need less than this part of all rows go pair by pair: _GATHERED_FROM of tessera.torch.
constexpr double kGatheredFrom = 0.7;

Spread spread_of(const Ranks& q) {
    const Problem& p = q.problem;
    const int ranks = q.options.ranks;
    if (!p.ragged) {
        const std::vector<Run> last = runs_of(p, ranks, ranks - 1);
        Spread all{is_zigzag(p.mask) ? "zigzag" : "contiguous", {last}};
        if (is_zigzag(p.mask) && ranks > 1) all.busiest.push_back(runs_of(p, ranks, 0));
        all.keys = static_cast<double>(keys_in(last));
        all.received = all.parts_received = (q.ranks() - 1) * q.rows();
        all.peers = ranks - 1;
        return all;
    }
    std::vector<std::int64_t> lengths;
    for (const auto& [queries, keys] : q.options.kernels.sequences) lengths.push_back(queries);
    const DocumentsOnRanks documents = spread_documents(lengths, ranks, is_masked(p.mask));
    Spread all{documents.order, {documents.fullest().runs}};
    if (&documents.most_runs() != &documents.fullest()) all.busiest.push_back(documents.most_runs().runs);
    all.keys = static_cast<double>(keys_in(documents.fullest().runs));
    all.gathered = documents.mean_needed() > kGatheredFrom * static_cast<double>(p.total_q);
    all.received = all.gathered ? (q.ranks() - 1) * q.rows() : static_cast<double>(documents.fullest().others);
    all.parts_received = documents.mean_parts();
    all.peers = documents.peers(documents.fullest().others);
    return all;
}

/// The step's kernels on the GPU that needs longest for them.
Prediction slowest(const Ranks& q, const Spread& spread, std::int64_t heads_kv) {
    Prediction found;
    for (const std::vector<Run>& runs : spread.busiest)
        if (Prediction one = predict_runs(q, runs, heads_kv); one.ms >= found.ms) found = std::move(one);
    return found;
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
    if (ranks < 2 || peers < 1) return 0;
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
    return q.options.copies && link.copy_gbs > 0 && (link.gpus_of_host == 0 || q.options.ranks <= link.gpus_of_host);
}

/// A step with some of the heads. `first`: the one that packs, where the GPUs copy from each other.
RankStep step_of(const Ranks& q, std::int64_t heads_kv, const Spread& spread, bool first) {
    RankStep step;
    const Link& link = q.options.link;
    const double row = static_cast<double>(heads_kv) * q.key_width();
    const double own = q.rows() * row, others = spread.received * row, parts = spread.parts_received * row;
    const double keys = spread.keys * row;
    const bool backward = q.pass == Pass::backward;
    if (copies(q)) {
        // A run of zig-zag is copied chunk by chunk; what is of this GPU is copied within it.
        const auto runs = static_cast<double>(spread.busiest.front().size());
        const double pieces = q.problem.ragged ? runs : spread.order == "zigzag" ? 2 * q.ranks() + 1 : q.ranks();
        const auto copied = [&](double received) {
            return received / (link.copy_gbs * 1e6) + pieces * link.copy_us * 1e-3;
        };
        const double meeting = link.meet_us * 1e-3;
        if (first) step.pack = q.copy_ms(q.rows() * static_cast<double>(q.problem.heads_kv) * q.key_width()) + meeting;
        step.copy = copied(others) + std::max(0.0, keys - others) * 2 / q.copy_rate();
        if (backward) step.scatter = meeting + copied(parts);
    } else {
        step.pack = q.copy_ms(own);
        step.gather = spread.gathered ? gather_ms(link, q.options.ranks, others)
                                      : sends_ms(link, q.options.ranks, others, spread.peers);
        step.copy = q.copy_ms(keys);
        if (backward) {
            step.parts = q.copy_ms(keys);
            step.scatter = sends_ms(link, q.options.ranks, parts, spread.peers);
        }
    }
    // One launch reads all parts and writes the sums.
    if (backward) step.sum = q.copy_ms((parts + 2 * own) / 2);
    return step;
}

/// The bytes that a GPU needs beside the tensors. By NCCL these are the received rows, the keys of the runs for two
/// steps, and in the backward the rows of dK and dV that it sends and receives. By copies they are the keys of the
/// runs, for up to four steps at once, and the memory that the GPUs share: K and V of two calls. The backward by copies
/// adds shared memory for dK and dV of two steps, and the received rows of dK and dV.
std::int64_t memory_of(const Ranks& q, const std::vector<std::int64_t>& steps, const Spread& spread) {
    const std::int64_t head =
        (q.problem.head_dim + q.problem.head_dim_v) * static_cast<std::int64_t>(size_of(q.problem.dtype));
    const std::int64_t most = *std::max_element(steps.begin(), steps.end()) * head;
    const auto keys = std::llround(spread.keys), received = std::llround(spread.received);
    if (copies(q)) {
        const std::int64_t all = q.problem.heads_kv * head;
        const std::int64_t kept = keys * (steps.size() <= 4 ? all : 2 * most) + 2 * std::llround(q.rows()) * all;
        const std::int64_t parts = q.problem.ragged ? std::llround(spread.parts_received) : q.problem.rows_q();
        return q.pass == Pass::forward ? kept : kept + (2 * keys + parts) * most;
    }
    const std::int64_t whole = spread.gathered ? q.problem.rows_q() : received;
    std::int64_t rows = whole + std::min<std::int64_t>(std::ssize(steps), 2) * keys;
    if (q.pass == Pass::backward) rows += 2 * keys + (q.options.ranks > 1 ? q.problem.ragged ? received : whole : 0);
    return rows * most;
}

void add_ring(const Ranks& q, ContextParallelPrediction& out) {
    const Problem& p = q.problem;
    const bool backward = q.pass == Pass::backward;
    if (q.options.ranks == 1 || (is_masked(p.mask) && !is_zigzag(p.mask))) return;
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(p.ragged ? 0 : p.batch), p.len_q);
    for (const auto& [queries, keys] : q.options.kernels.sequences) lengths.push_back(queries);
    // Each sequence or document is cut by itself: a GPU has the same part of all of them.
    const auto kernels = [&](std::int64_t parts_q, std::int64_t parts_kv, bool masked) {
        std::vector<Run> runs;
        for (const std::int64_t length : lengths) {
            const auto part = [&](std::int64_t parts) {
                return std::max<std::int64_t>(1, length / (q.options.ranks * parts));
            };
            runs.push_back({part(parts_q), part(parts_kv)});
        }
        Problem open = p;
        if (!masked) open.mask = {};
        return predict_runs({open, q.schedule, q.pass, q.machine, q.options}, runs, p.heads_kv).ms;
    };
    RingTimes times;
    times.own = kernels(1, 1, true);
    times.other = is_zigzag(p.mask) ? std::max(kernels(1, 2, false), kernels(2, 1, false)) : kernels(1, 1, false);
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
std::vector<RankStep> steps_on(const Ranks& q, const std::vector<std::int64_t>& heads_of_steps, const Spread& spread,
                               double& error) {
    std::vector<RankStep> steps;
    std::map<std::int64_t, double> kernels;  // by heads
    for (const std::int64_t heads : heads_of_steps) {
        const std::int64_t together = copies(q) ? q.problem.heads_kv : heads;
        auto found = kernels.find(together);
        if (found == kernels.end()) {
            const Prediction one = slowest(q, spread, together);
            error = std::max(error, one.error);
            found = kernels.emplace(together, one.ms).first;
        }
        steps.push_back(step_of(q, heads, spread, steps.empty()));
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
    while (!part.ragged && !schedule::countable(part) && part.len_q % 2 == 0) part.len_q = part.len_kv /= 2;
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
        invalid(argument, fmt::format("expected {}, got {}", expected, got));
    };
    if (options.ranks < 1 || options.ranks > kMostRanks)
        out_of_range("ranks", fmt::format("1..{}", kMostRanks), options.ranks);
    if (options.steps < 0 || options.steps > kMostSteps)
        out_of_range("steps", fmt::format("0..{}", kMostSteps), options.steps);
    const auto& documents = options.kernels.sequences;
    if (!problem.ragged && !documents.empty())
        out_of_range("kernels.sequences", "none, since all sequences are equal", documents.size());
    if (problem.ragged && static_cast<std::int64_t>(documents.size()) != problem.batch)
        out_of_range("kernels.sequences", fmt::format("the lengths of {} documents", problem.batch), documents.size());
    for (const auto& [queries, keys] : documents)
        if (queries != keys)
            out_of_range("kernels.sequences", fmt::format("as many keys as queries, {} in a document", queries), keys);
    const Link& link = options.link;
    const std::pair<const char*, double> rates[] = {{"link.gather_gbs", link.gather_gbs},
                                                    {"link.send_gbs", link.send_gbs},
                                                    {"link.between_gbs", link.gpus_of_host > 0 ? link.between_gbs : 1}};
    for (const auto& [name, rate] : rates)
        if (options.ranks > 1 && !(rate > 0 && rate < 1e9)) out_of_range(name, "GB/s over 0", rate);
    const std::int64_t pieces = std::int64_t{options.ranks} * (is_zigzag(problem.mask) && !problem.ragged ? 2 : 1);
    const std::int64_t rows = problem.ragged ? problem.total_q : problem.len_q;
    if (rows % pieces != 0 || rows == 0)
        out_of_range("len", fmt::format("a multiple of {} rows, {} for each GPU", pieces, pieces / options.ranks),
                     rows);
}

}  // namespace
}  // namespace tessera::model

namespace tessera {

std::optional<std::string> context_parallel_refusal(const Problem& problem, Schedule schedule, Pass pass,
                                                    const Machine& machine,
                                                    const PredictContextParallelOptions& options) {
    if (machine.kind != MachineKind::gpu) return fmt::format("expected GPUs, {} is a CPU", machine.name);
    if (problem.kv_lengths) return "expected K and V of the whole sequence, got a cache";
    const Mask& mask = problem.mask;
    if (problem.ragged && (mask.window_left != unbounded || mask.window_right != unbounded))
        return "expected packed documents without a window: those with one are not modelled";
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
    const model::Spread spread = model::spread_of(q);
    out.order = spread.order;
    out.one_gpu_ms = alone.ms;
    out.fits_one_gpu = alone.memory <= machine.memory_gib * model::kGiB;
    out.measured = known.ranks <= known.link.measured_gpus;
    if (known.ranks == 1) {
        out.ms = out.kernel_ms = alone.ms, out.error = alone.error, out.share = 1, out.measured = true;
        out.parts = {{"kernels", alone.ms}};
        return out;
    }
    const double mib = q.rows() * static_cast<double>(problem.heads_kv) * q.key_width() / 1048576.0;
    const std::vector<std::int64_t> heads_of_steps =
        known.steps > 0 ? model::equal_steps(problem.heads_kv, known.steps)
                        : model::steps_of(problem.heads_kv, mib, pass, model::copies(q));
    out.steps = static_cast<int>(heads_of_steps.size());
    double error = 0;
    const std::vector<model::RankStep> steps = model::steps_on(q, heads_of_steps, spread, error);
    model::RanksInTime time = model::in_time(steps, pass, problem.ragged);
    for (const model::RankStep& step : steps) {
        out.kernel_ms += step.kernels;
        out.exchange_ms += step.exchange();
    }
    out.ms = time.ms, out.hidden_ms = time.hidden_ms, out.parts = std::move(time.parts);
    out.share = alone.ms / (known.ranks * out.ms);
    out.error = error + (out.measured ? model::kExchangeError : model::kLinkError) *
                            std::max(0.0, out.ms - out.kernel_ms) / out.ms;
    const double rows = spread.received + (pass == Pass::backward ? spread.parts_received : 0);
    out.bytes_received = std::llround(rows * static_cast<double>(problem.heads_kv) * q.key_width());
    out.memory = model::memory_of(q, heads_of_steps, spread);
    model::add_ring(q, out);
    return out;
}

}  // namespace tessera
