// SPDX-License-Identifier: Apache-2.0
#include "model/baseline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "model/error_bar.hpp"
#include "model/family.hpp"
#include "model/live_keys.hpp"
#include "model/parts.hpp"
#include "schedule/schedule.hpp"
#include "tessera/error.hpp"

namespace tessera::model {
namespace {

/// The constants of a chain of operators.
struct Operators {
    double traffic;          ///< share of the rate of a copy that operators over the matrix reach
    double masked;           ///< an addition whose second operand is broadcast takes that many times as long
    double products;         ///< share of the peak that batched products reach
    double exposed;          ///< share of the shorter time (traffic or GEMM) that is added to the longer one
    double copies;           ///< times that Q, K, V or O is read or written beside the products, in the forward
    double gradient_copies;  ///< the same in the backward
};
// Fitted to bench/results/published/fitted_eager.jsonl (512, 2,048 and 8,192 keys), with eager.jsonl in view, and to
// bench/results/h200/peers_pytorch.jsonl, which has no backward of math.
constexpr Operators kEager{0.82, 2.0, 0.65, 0.28, 12, 32};
constexpr Operators kMath{0.7, 1.2, 0.85, 0.4, 30, 80};

constexpr double kEagerError = 0.5;           ///< runs of the same calls by others differ by as much
constexpr double kEagerErrorOfTcgen05 = 1.6;  ///< the one table of a B200, of an early PyTorch
// The math path on an H200: nine of ten held-out rows, which take 3 ms and more, and calls of profilers' traces.
constexpr double kMathError = 0.1;
constexpr double kMeasuredMath = 2.5;                         ///< milliseconds
constexpr double kLongMath = 0.5, kLongMathError = 0.3;       ///< traces: 0.9 to 1.26 times the prediction
constexpr double kShortMath = 0.1, kShortestMathError = 1.5;  ///< traces: over twice the prediction at 0.07 ms

/// One kernel that goes over the whole matrix of scores.
struct MatrixStep {
    const char* name;
    double bytes;       ///< read and written for an element
    double flop = 0;    ///< of a product, for an element
    double slowed = 1;  ///< times that the traffic takes longer
};

/// Do sequences end before the rows and columns of their matrix, so that PyTorch needs a mask for their lengths?
bool pads(const Problem& p) { return p.ragged || p.kv_lengths; }

std::vector<MatrixStep> steps_of(const Problem& p, Pass pass, double e, double masked, bool safe_softmax) {
    const auto d = static_cast<double>(p.head_dim), dv = static_cast<double>(p.head_dim_v);
    const bool drops = p.dropout.probability > 0;
    std::vector<MatrixStep> steps;
    if (pass == Pass::forward) {
        steps.push_back({"scores", e, 2 * d});
        if (!p.mask.trivial() || pads(p)) steps.push_back({"mask", 2 * e, 0, masked});
        steps.push_back({"softmax", 2 * e});
        if (safe_softmax) steps.push_back({"rows without keys", 3 * e + 2});
        if (drops) steps.push_back({"dropout", 2 * e + 1});
        steps.push_back({"values", e, 2 * dv});
        return steps;
    }
    steps.push_back({"dV", e, 2 * dv});
    steps.push_back({"dP", e, 2 * dv});
    if (drops) steps.push_back({"dropout", 2 * e + 1});
    if (safe_softmax) steps.push_back({"rows without keys", 2 * e + 1});
    steps.push_back({"gradient of softmax", 3 * e});
    steps.push_back({"dQ", e, 2 * d});
    steps.push_back({"dK", e, 2 * d});
    return steps;
}

/// A batch as PyTorch's operators take it: sequences padded to the longest, a head of keys for each head of queries.
Problem padded_batch(const Problem& of_call) {
    Problem p = of_call;
    p.ragged = false;
    p.total_q = p.total_kv = 0;
    p.kv_lengths = false;
    p.heads_kv = p.heads_q;
    return p;
}

double repeated_bytes(const Problem& of_call) {
    const auto keys = static_cast<double>(of_call.batch) * static_cast<double>(of_call.len_kv);
    const auto row = static_cast<double>((of_call.head_dim + of_call.head_dim_v) * size_of(of_call.dtype));
    return of_call.heads_q == of_call.heads_kv ? 0
                                               : keys * row * static_cast<double>(of_call.heads_q + of_call.heads_kv);
}

/// The schedule's own count of visible pairs and FLOP; PyTorch computes hidden pairs, too.
schedule::Cost visible_cost(const Problem& problem, Pass pass, const PredictOptions& options) {
    constexpr Tile kTile{128, 128};
    schedule::Workload w{.problem = on_live_keys(problem, options.sequences),
                         .schedule = Schedule::standard,
                         .pass = pass,
                         .tile = kTile,
                         .residency = {},
                         .sequences = {}};
    if (w.problem.ragged) w.sequences = options.sequences;
    return schedule::cost(w);
}

void predict_operators(const Problem& of_call, Baseline baseline, const Machine& machine, const PredictOptions& options,
                       Prediction& out) {
    const Problem p = padded_batch(of_call);
    const bool math = baseline == Baseline::math;
    const Operators& c = math ? kMath : kEager;
    const bool widens = math && size_of(p.dtype) <= 2;
    const double e = math ? 4 : static_cast<double>(size_of(p.dtype));
    const double elements =
        static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.len_q) * static_cast<double>(p.len_kv);
    Account account(out, options.worksheet);
    const double copy = machine.dram_gbs * machine.dram_copy_share * 1e6;  // bytes a millisecond
    constexpr double kHeld = 0.5;                                          // of the L2, by two matrices
    const bool in_l2 = 2 * e * elements <= kHeld * machine.l2_mib * 1048576.0;
    const double rate = in_l2 ? machine.l2_bytes * machine.cores * machine.rated_clock_ghz * 1e6 : c.traffic * copy;
    const double products = machine.gemm_flop(math ? DType::fp32 : p.dtype, false) * machine.cores *
                            machine.rated_clock_ghz * 1e6 * c.products;  // FLOP a millisecond
    account.note("matrix", "{} * {} heads * {} * {} = {:.0f} elements of {:.0f} B, {}", p.batch, p.heads_q, p.len_q,
                 p.len_kv, elements, e, in_l2 ? "in the L2" : "in memory");
    int launches = 0;
    double traffic_bytes = 0;
    const auto add_step = [&](const MatrixStep& step) {
        const double traffic = elements * step.bytes * step.slowed / rate, product = elements * step.flop / products;
        account.part(step.name, std::max(traffic, product) + c.exposed * std::min(traffic, product),
                     "{:.0f} elements: {:.0f} B{} / {:.5g} GB/s = {:.4g} ms, {:.0f} FLOP / {:.4g} TFLOP/s = {:.4g} ms; "
                     "the longer and {:.3g} of the shorter",
                     elements, step.bytes, step.slowed > 1 ? fmt::format(" * {:.3g}", step.slowed) : "", rate * 1e-6,
                     traffic, step.flop, products * 1e-9, product, c.exposed);
        traffic_bytes += elements * step.bytes;
        ++launches;
    };
    for (const MatrixStep& step : steps_of(of_call, out.pass, e, c.masked, math)) add_step(step);
    const double tokens = static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.len_q + p.len_kv);
    const double row = 0.25 * static_cast<double>(p.head_dim + p.head_dim_v) * (widens ? 4 : e);
    const double times = out.pass == Pass::forward ? c.copies : c.gradient_copies;
    account.part("Q, K, V, O", times * tokens * row / copy,
                 "read or written {:.0f} times: {:.0f} * {:.0f} B / {:.5g} GB/s", times, tokens, row, copy * 1e-6);
    traffic_bytes += times * tokens * row;
    if (const double bytes = repeated_bytes(of_call); bytes > 0) {
        account.part("repeated K and V", bytes / copy, "{:.0f} B / {:.5g} GB/s", bytes, copy * 1e-6);
        traffic_bytes += bytes;
    }
    constexpr int kCopyLaunches = 4;
    launches += kCopyLaunches;
    account.part("launch", launches * machine.launch_us * 1e-3, "{} * {:.4g} us", launches, machine.launch_us.value);
    out.cost = visible_cost(of_call, out.pass, options);
    out.cost.work.bytes.dram = static_cast<std::int64_t>(in_l2 ? times * tokens * row : traffic_bytes);
    out.memory.tensors =
        static_cast<std::int64_t>(tokens * static_cast<double>(p.head_dim + p.head_dim_v) * (widens ? 4 : e));
    const double matrices = out.pass == Pass::forward ? 2 : 3;  // S and P; P, dP and dS
    out.memory.workspace = static_cast<std::int64_t>(matrices * e * elements);
    account.roof("DRAM",
                 in_l2 ? times * tokens * row / (machine.dram_gbs * 1e6) : traffic_bytes / (machine.dram_gbs * 1e6));
    account.close();
}

/// memory-efficient has no heads that share keys, no window and no ragged batch: PyTorch repeats K and V, reads a mask
/// of all pairs, and pads. All heads share the mask, sequences share it if they have the same length. It is a bool
/// tensor, from which PyTorch makes one of the dtype; a kernel reads it for each head, from memory if the L2 is small.
void predict_efficient(const Problem& of_call, const Machine& machine, const PredictOptions& options, Prediction& out) {
    Problem p = padded_batch(of_call);
    const bool mask_matrix =
        pads(of_call) || of_call.mask.window_left != unbounded || of_call.mask.window_right != unbounded;
    if (mask_matrix) p.mask = {};
    PredictOptions own = options;
    own.by = kEfficient;
    own.sequences.clear();
    own.tile.reset();
    own.kernel.clear();
    out = predict(p, Schedule::fa2, out.pass, machine, own);
    const auto add = [&](const char* name, double bytes, double rate) {
        if (!(bytes > 0)) return;
        const double ms = bytes / rate;
        out.parts.push_back({name, ms});
        out.ms += ms;
        if (options.worksheet)
            out.worksheet.push_back({name, fmt::format("{:.0f} B / {:.5g} GB/s = {:.4g} ms", bytes, rate * 1e-6, ms)});
    };
    double dram = repeated_bytes(of_call);
    out.memory.workspace += static_cast<std::int64_t>(dram / 2);  // it is written and read
    add("repeated K and V", dram, machine.dram_gbs * machine.dram_copy_share * 1e6);
    if (mask_matrix) {
        const auto e = static_cast<double>(size_of(p.dtype));
        const double mask = static_cast<double>(pads(of_call) ? p.batch : 1) * static_cast<double>(p.len_q) *
                            static_cast<double>(p.len_kv);
        const MaskReads reads = reads_of_mask(p, mask, machine);
        add("mask of all pairs", reads.bytes, reads.rate);
        out.memory.workspace += static_cast<std::int64_t>(mask * (1 + e));
        dram += reads.bytes_of_dram;
    }
    const schedule::Bytes bytes = out.cost.work.bytes;
    out.cost = visible_cost(of_call, out.pass, options);
    out.cost.work.bytes = bytes;
    out.cost.work.bytes.dram += static_cast<std::int64_t>(dram);
    for (Roof& roof : out.roofs) {
        if (roof.name == "DRAM") roof.ms += dram / (machine.dram_gbs * 1e6);
        roof.percent = out.ms > 0 ? 100 * roof.ms / out.ms : 0;
        if (out.percent_of_bound < roof.percent || out.bound == roof.name)
            out.bound = roof.name, out.percent_of_bound = roof.percent;
    }
    const auto flop = static_cast<double>(out.cost.work.flop);
    out.tflops = out.ms > 0 ? flop * 1e-9 / out.ms : 0;
    out.intensity = flop / static_cast<double>(std::max<std::int64_t>(1, out.cost.work.bytes.dram));
    if (!like_rows_of_pytorch(of_call)) out.error = std::max(out.error, kErrorWithoutRows);
}

double error_of_operators(const Problem& problem, Baseline baseline, const Machine& machine, const Prediction& out) {
    if (baseline == Baseline::eager) return has_tcgen05(machine) ? kEagerErrorOfTcgen05 : kEagerError;
    if (out.ms < kShortMath) return kShortestMathError;
    const bool measured = machine.name == "h200" && out.pass == Pass::forward && like_rows_of_pytorch(problem);
    if (!measured || out.ms < kLongMath) return kErrorWithoutRows;
    return out.ms < kMeasuredMath ? kLongMathError : kMathError;
}

/// Do PyTorch's memory-efficient kernels take the call's head_dims, whose rows are a multiple of 16 bytes? Otherwise it
/// runs math.
bool takes_efficient(const Problem& p) {
    const std::int64_t multiple = 16 / size_of(p.dtype);
    return p.head_dim % multiple == 0 && p.head_dim_v % multiple == 0;
}

}  // namespace

const char* name_of(Baseline baseline) {
    switch (baseline) {
        case Baseline::standard: return "standard";
        case Baseline::eager: return "eager";
        case Baseline::math: return "math";
        case Baseline::efficient: break;
    }
    return "efficient";
}

std::string title_of(Baseline baseline, const Problem& problem) {
    const char* repeated = problem.heads_q == problem.heads_kv ? "" : ", with K and V repeated for each head";
    switch (baseline) {
        case Baseline::standard: return "tessera's standard attention (S in fp32)";
        case Baseline::eager:
            return fmt::format("PyTorch's eager operators in {}{}", tessera::name_of(problem.dtype), repeated);
        case Baseline::math: return fmt::format("SDPA's math path of PyTorch (fp32 copies){}", repeated);
        case Baseline::efficient: break;
    }
    return fmt::format("SDPA's memory-efficient kernels of PyTorch{}", repeated);
}

Baseline without_flash(const Problem& problem, const Machine& machine) {
    if (machine.kind == MachineKind::cpu) return Baseline::standard;
    return takes_efficient(problem) ? Baseline::efficient : Baseline::math;
}

std::optional<std::string> refusal(const Problem& problem, Baseline baseline, Pass pass, const Machine& machine,
                                   const PredictOptions& options) {
    if (baseline == Baseline::standard)
        return tessera::refusal(problem, Schedule::standard, pass, machine,
                                {.by = "tessera", .threads = options.threads, .sequences = options.sequences});
    if (machine.kind == MachineKind::cpu)
        return fmt::format("PyTorch's kernels on CPUs are not modelled, and {} is a CPU", machine.name);
    if (!machine.supports(problem.dtype))
        return fmt::format("{} does not compute {}", machine.name, tessera::name_of(problem.dtype));
    if (problem.kv_lengths && pass == Pass::backward) return "a cache of keys has no gradient";
    if (problem.page_size > 0) return "PyTorch's attention reads no pages of a cache";
    if (problem.sinks) return "PyTorch's attention takes no sinks";
    if (baseline != Baseline::efficient) return std::nullopt;
    PredictOptions own;
    own.by = kEfficient;
    return tessera::refusal(padded_batch(problem), Schedule::fa2, pass, machine, own);
}

Prediction predict(const Problem& problem, Baseline baseline, Pass pass, const Machine& machine,
                   const PredictOptions& options) {
    problem.validate();
    if (const auto reason = refusal(problem, baseline, pass, machine, options))
        throw Error(ErrorCode::unsupported, "baseline", fmt::format("{}: {}", name_of(baseline), *reason));
    if (baseline == Baseline::standard) {
        PredictOptions own = options;
        own.by = "tessera";
        own.tile.reset();
        own.kernel.clear();
        return tessera::predict(problem, Schedule::standard, pass, machine, own);
    }
    Prediction out{.schedule = Schedule::standard, .pass = pass};
    if (baseline == Baseline::efficient) {
        predict_efficient(problem, machine, options, out);
        out.not_modelled = not_modelled(problem, false);
        return out;
    }
    out.by = baseline == Baseline::math ? "PyTorch math" : "PyTorch eager";
    out.fitted_on = baseline == Baseline::math ? "bench/results/h200/peers_pytorch.jsonl"
                                               : "bench/results/published/fitted_eager.jsonl";
    out.not_modelled = not_modelled(problem, true);
    predict_operators(problem, baseline, machine, options, out);
    out.error = error_of_operators(problem, baseline, machine, out);
    return out;
}

MaskReads reads_of_mask(const Problem& problem, double elements, const Machine& machine) {
    constexpr double kHeld = 0.5;  // of the L2
    const auto e = static_cast<double>(size_of(problem.dtype));
    const double reads = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.len_q) *
                         static_cast<double>(problem.len_kv) * e;
    const bool in_l2 = elements * e <= kHeld * machine.l2_mib * 1048576.0;
    return {.bytes = reads,
            .bytes_of_dram = in_l2 ? elements * e : reads,
            .rate = in_l2 ? machine.l2_bytes * machine.cores * machine.rated_clock_ghz * 1e6
                          : machine.dram_gbs * machine.dram_copy_share * 1e6};
}

std::optional<Baseline> baseline_of_records(std::string_view by) {
    if (by == "eager") return Baseline::eager;
    if (by == "math") return Baseline::math;
    return std::nullopt;
}

}  // namespace tessera::model
