// SPDX-License-Identifier: Apache-2.0
#include "measure/accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <optional>

#include "measure/machine_file.hpp"
#include "model/baseline.hpp"
#include "model/family.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

std::int64_t side_of(const std::string& text) {
    if (text == "unbounded") return unbounded;
    try {
        return std::stoll(text);
    } catch (const std::exception&) {
        throw Error(ErrorCode::bad_data, "mask", fmt::format("expected a number of keys, got \"{}\"", text));
    }
}

/// Splits a text such as "ragged, dropout 0.1" into its parts.
std::vector<std::string> parts_of(const std::string& text) {
    std::vector<std::string> parts;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find(", ", at), text.size());
        parts.push_back(text.substr(at, end - at));
        at = end + 2;
    }
    return parts;
}

constexpr std::string_view kDropout = "dropout ";  // prefix of a feature of a Record; the probability follows
constexpr std::string_view kCache = "cache";       // a feature; " in pages of 16" may follow
constexpr std::string_view kPages = "cache in pages of ";

/// Parses a text of mask_text().
Mask mask_of(const std::string& text) {
    Mask mask;
    for (const std::string& part : parts_of(text)) {
        if (part == "none") continue;
        if (part == "causal" || part == "causal bottom-right") {
            mask.causal = Causal::bottom_right;
        } else if (part == "causal top-left") {
            mask.causal = Causal::top_left;
        } else if (const std::size_t comma = part.find(',');
                   part.starts_with("window ") && comma != std::string::npos) {
            mask.window_left = side_of(part.substr(7, comma - 7));
            mask.window_right = side_of(part.substr(comma + 1));
        } else {
            throw Error(ErrorCode::bad_data, "mask", fmt::format("expected causal or window, got \"{}\"", part));
        }
    }
    return mask;
}

DType dtype_of(const std::string& text) {
    for (const DType dtype : {DType::fp64, DType::fp32, DType::fp16, DType::bf16}) {
        if (text == name_of(dtype)) return dtype;
    }
    throw Error(ErrorCode::bad_data, "dtype", fmt::format("expected fp64, fp32, fp16 or bf16, got \"{}\"", text));
}

std::optional<Schedule> schedule_of(const Record& record, const model::Machine* machine) {
    if (record.by == "cudnn") {  // fa3: asynchronous MMAs, producers and consumers
        const bool has_them = machine == nullptr || machine->capability == 9.0 || model::has_tcgen05(*machine);
        return has_them ? Schedule::fa3 : Schedule::fa2;
    }
    if (model::baseline_of_records(record.by)) return Schedule::standard;
    for (const Schedule s : kSchedules) {
        if (record.schedule == name_of(s)) return s;
    }
    return std::nullopt;
}

/// Returns the library that a Record's `by` belongs to.
std::string family_of(const std::string& by, const model::Machine& machine) {
    const bool fa4 = by == "fa4" && model::has_tcgen05(machine);
    return by == "fa2" || by == "fa3" || fa4 ? "flash-attention" : by;
}

std::string file_name(const Record& record) { return record.file.substr(record.file.find_last_of('/') + 1); }

/// Commits whose H200 kernels differ from the current ones. bench/fit/refit.py adds to the list.
struct Retired {
    Schedule schedule;
    Pass pass;
    std::string_view commits;    ///< seven digits each
    std::int64_t up_to_dim = 0;  ///< if set, only the kernel of head_dims up to this differs
    bool ragged = false;         ///< if set, only the kernel of ragged calls differs
};
constexpr Retired kRetired[] = {
    {Schedule::fa3, Pass::forward, "43f4a9d 6007569 a91e94a ad9c3d7 1f4ce20 4598982 4ce25a9 4d67f78 df61913"},
    {Schedule::fa3, Pass::forward, "125af0c 31498b7 b7d205b", 128, true},
    {Schedule::fa3, Pass::backward, "43f4a9d 6007569 a91e94a ad9c3d7 1f4ce20 4598982 4ce25a9 4d67f78 df61913"},
    {Schedule::fa3, Pass::backward, "125af0c", 64},
    {Schedule::fa2, Pass::forward, ""},
    {Schedule::fa2, Pass::backward,
     "43f4a9d 6007569 a91e94a ad9c3d7 1f4ce20 4598982 4d67f78 4ce25a9 df61913 125af0c 31498b7 b7d205b"},
    {Schedule::fa1, Pass::forward, ""},
    {Schedule::fa1, Pass::backward, ""},
};

bool is_of_older_kernel(const Record& record, Schedule schedule, const model::Machine& machine) {
    constexpr std::size_t kDigits = 7;
    if (record.by != "tessera" || machine.name != "h200" || record.commit.size() < kDigits) return false;
    if (record.kernel == model::kDecodeKernel) return false;  // refit_decode.py replaces its Records
    return std::any_of(std::begin(kRetired), std::end(kRetired), [&](const Retired& one) {
        const bool of_dim = one.up_to_dim == 0 || std::max(record.head_dim, record.head_dim_v) <= one.up_to_dim;
        return one.schedule == schedule && record.pass == name_of(one.pass) && of_dim &&
               (!one.ragged || !record.lens_kv.empty()) &&
               one.commits.find(record.commit.substr(0, kDigits)) != std::string_view::npos;
    });
}

/// True for rows of up to eight queries on a CPU without AMX, of a commit without the kernels that run them.
bool is_before_few_queries(const Record& record, Schedule schedule, const model::Machine& machine) {
    constexpr std::int64_t kFewQueries = 8;
    const std::int64_t queries =
        record.len_q == 1 ? record.heads_q / std::max<std::int64_t>(1, record.heads_kv) : record.len_q;
    return record.by == "tessera" && schedule == Schedule::fa2 && machine.kind == model::MachineKind::cpu &&
           queries <= kFewQueries && record.commit.starts_with("4911953");
}

/// True for rows of few heads at head_dim 64 that these commits cut into tiles of 192 queries. A model of the queue may
/// choose another tile (src/cuda/fa3/host/forward_dispatch.hpp).
bool had_another_tile(const Record& record, const Prediction& prediction) {
    constexpr std::string_view kBefore[] = {"4598982", "4d67f78"};
    constexpr std::int64_t kLongRow = 2048, kTile = 192, kHeadDim = 64;
    const auto was_built_of = [&](std::string_view commit) { return record.commit.starts_with(commit); };
    return record.by == "tessera" && record.schedule == "fa3" && record.pass == "forward" &&
           record.head_dim <= kHeadDim && std::min(record.len_q, record.len_kv) >= kLongRow &&
           prediction.tile.block_q != kTile && std::any_of(std::begin(kBefore), std::end(kBefore), was_built_of);
}

/// True for causal backwards of grouped or few heads of these commits: the order of their sums went by the heads of the
/// call, and was another one than the current kernels' (src/cuda/backward/host/head_split.hpp).
bool had_another_order(const Record& record) {
    constexpr std::string_view kBefore =
        "0d3e86a 125af0c 1f4ce20 31498b7 4598982 4ce25a9 4d67f78 73da0db "
        "a91e94a ad9c3d7 b7d205b c16a9b2 d9a928e df61913 dfbcc5f";
    constexpr std::size_t kDigits = 7;
    constexpr std::int64_t kManyHeads = 16;
    const bool by_heads = record.schedule == "fa2" || record.schedule == "fa3";
    return record.by == "tessera" && by_heads && record.pass == "backward" && record.mask.starts_with("causal") &&
           (record.heads_q != record.heads_kv || record.heads_kv < kManyHeads) && record.commit.size() >= kDigits &&
           kBefore.find(record.commit.substr(0, kDigits)) != std::string_view::npos;
}

/// True if no constant was fitted to the Record. Constants were fitted, or chosen, on the shapes of these files on
/// these devices; such a shape is not held out in any file. Among drawn shapes (drawn*), an odd number of keys is held
/// out. Records of other devices always are.
bool is_held_out(const Record& record, const model::Machine& machine) {
    const std::string name = file_name(record);
    const auto is = [&](const char* fitted) { return name.starts_with(fitted); };
    if (is("drawn")) return record.len_kv % 2 == 1;
    if (is("fitted") || is("schedules") || is("probes") || is("decode_fitted")) return false;
    if (machine.name != "h200" && machine.name != "xeon-16") return true;
    return !is("forward") && !is("backward") && !is("peers") && !is("seen");
}

/// True for CUDA backwards of tessera that sum delta over all pairs, which takes two GEMMs more than the model counts.
/// With the residual of O, a memory-bound kernel computes delta; `standard` has no other.
bool sums_delta(const Record& record, Schedule schedule, const model::Machine& machine) {
    return record.by == "tessera" && record.pass == "backward" && machine.kind == model::MachineKind::gpu &&
           schedule != Schedule::standard && record.features.find("residual of O") == std::string::npos;
}

/// True if a prediction covers all features: a ragged batch with known sequence lengths, a cache, the residual of O,
/// and, for some kernels, dropout.
bool is_modelled(const Record& record) {
    const std::vector<std::string> parts = parts_of(record.features);
    return std::all_of(parts.begin(), parts.end(), [&](const std::string& part) {
        const bool ragged = part.starts_with("ragged") && !record.lens_q.empty();
        const bool cache = part == kCache || part.starts_with(kPages);
        return ragged || cache || part == "residual of O" || part.starts_with(kDropout);
    });
}

/// True if tessera's dropout drew all 32 bits of every word: Records before this date (core/dropout.hpp).
bool drew_whole_words(const Record& record) {
    return record.by == "tessera" && record.features.find(kDropout) != std::string::npos && record.date < "2026-11-26";
}

/// Returns the kernel of a Record of tessera's. Records without a name are of the schedule's own kernel on a GPU.
std::string kernel_of(const Record& record, Schedule schedule) {
    if (record.by != "tessera" || !record.kernel.empty()) return record.kernel;
    return fmt::format("cuda.{}.{}", name_of(schedule), record.pass);
}

/// Returns the reason why a Record cannot be compared, or nothing and its comparison in `result`.
std::optional<std::string> try_compare(const Record& record, const model::Machine* machine, Comparison& result) {
    if (machine == nullptr) machine = model::machine_of_device(record.device);
    const auto schedule = schedule_of(record, machine);
    if (record.what != "measured") return "predictions";
    if (record.pass != "forward" && record.pass != "backward") return "neither forward nor backward";
    if (!schedule) return fmt::format("unknown schedule of {}", record.by);
    if (record.kernel.starts_with("reference.")) return "the reference, which is not modelled";
    if (record.versions.contains("ncu")) return "timed under a profiler";
    if (!is_modelled(record)) return "features that are not modelled";
    if (!(record.ms > 0)) return "no time";
    const bool backward = record.pass == "backward";
    if (backward && record.deterministic && record.by != "tessera")
        return "deterministic backward of a peer: another kernel";
    if (machine == nullptr) return fmt::format("the model has no machine for \"{}\"", record.device);
    if (!is_of_kind(record, machine->kind))
        return fmt::format("measured on another kind of machine than {}", machine->name);
    if (is_of_older_kernel(record, *schedule, *machine) || is_before_few_queries(record, *schedule, *machine) ||
        (machine->kind == model::MachineKind::gpu && had_another_order(record)))
        return "measured with a kernel that has been replaced";
    if (drew_whole_words(record)) return "dropout drew whole words, unlike the current kernels";
    if (sums_delta(record, *schedule, *machine))
        return "delta is summed over all pairs: two GEMMs more than are modelled";
    const Problem problem = problem_of(record);
    const Pass pass = backward ? Pass::backward : Pass::forward;
    const auto baseline = model::baseline_of_records(record.by);
    const model::PredictOptions options{.by = family_of(record.by, *machine),
                                        .threads = record.threads,
                                        .sequences = sequences_of(record),
                                        .kernel = kernel_of(record, *schedule),
                                        .o_residual = writes_residual(record)};
    const auto reason = baseline ? model::refusal(problem, *baseline, pass, *machine)
                                 : model::refusal(problem, *schedule, pass, *machine, options);
    if (reason) return reason;
    result.record = record;
    const bool decode = machine->kind == model::MachineKind::gpu && options.kernel == model::kDecodeKernel;
    result.kernels =
        fmt::format("{} {}", options.by,
                    decode                                                               ? "decode"
                    : record.by == "cudnn" || record.by == model::kEfficient || baseline ? ""
                                                                                         : name_of(*schedule));
    if (result.kernels.back() == ' ') result.kernels.pop_back();
    result.kernel = options.kernel;
    const auto predicted = had_empty_blocks(record) ? model::predict_with_empty_blocks : tessera::predict;
    result.prediction = baseline ? model::predict(problem, *baseline, pass, *machine)
                                 : predicted(problem, *schedule, pass, *machine, options);
    if (!result.prediction.not_modelled.empty()) return "features that are not modelled";
    if (had_another_tile(record, result.prediction)) return "measured with another tile than the current kernel's";
    result.predicted_ms = result.prediction.ms;
    result.kind = kind_of(problem);
    if (baseline || record.by == model::kEfficient) result.device = "PyTorch on " + result.device;
    else if (machine->name == "h200" && record.versions.contains("source"))
        result.device = "others on " + result.device;
    result.held_out = is_held_out(record, *machine);
    result.blind = result.held_out && file_name(record).starts_with("blind");
    return std::nullopt;
}

Accuracy accuracy_of(std::span<const Comparison* const> rows) {
    Accuracy a;
    a.rows = static_cast<int>(rows.size());
    std::vector<double> errors;
    for (const Comparison* row : rows) {
        const double error = std::abs(row->error());
        errors.push_back(error);
        a.mean += error / static_cast<double>(rows.size());
        constexpr double kGood = 0.15;
        if (error <= kGood) a.within += 1 / static_cast<double>(rows.size());
        if (error >= a.worst) a.worst = error, a.worst_row = row;
    }
    std::sort(errors.begin(), errors.end());
    const std::size_t half = errors.size() / 2;
    a.median = errors.size() % 2 == 1 ? errors[half] : (errors[half - 1] + errors[half]) / 2;
    return a;
}

}  // namespace

bool had_empty_blocks(const Record& record) {
    return record.by == "tessera" && record.pass == "backward" && !record.lens_q.empty() && record.date < "2026-11-29";
}

bool writes_residual(const Record& record) {
    return record.pass == "forward" && record.features.find("residual of O") != std::string::npos;
}

bool is_of_kind(const Record& record, model::MachineKind kind) {
    return !record.kernel.starts_with(kind == model::MachineKind::gpu ? "cpu." : "cuda.");
}

std::vector<std::pair<std::int64_t, std::int64_t>> sequences_of(const Record& record) {
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences;
    for (std::size_t i = 0; i < record.lens_q.size(); ++i) sequences.emplace_back(record.lens_q[i], record.lens_kv[i]);
    return sequences;
}

Problem problem_of(const Record& record) {
    Problem p;
    p.dtype = dtype_of(record.dtype);
    p.batch = record.batch;
    p.len_q = record.len_q;
    p.len_kv = record.len_kv;
    p.heads_q = record.heads_q;
    p.heads_kv = record.heads_kv;
    p.head_dim = record.head_dim;
    p.head_dim_v = record.head_dim_v;
    p.mask = mask_of(record.mask);
    p.ragged = record.features.find("ragged") != std::string::npos;
    if (p.ragged) {
        const auto sequences = static_cast<std::size_t>(std::max<std::int64_t>(record.batch, 1));
        if (record.lens_q.size() != sequences || record.lens_kv.size() != sequences)
            throw Error(ErrorCode::bad_data, "lens_q",
                        fmt::format("expected lengths of {} sequences, got {} and {}", sequences, record.lens_q.size(),
                                    record.lens_kv.size()));
        p.total_q = std::accumulate(record.lens_q.begin(), record.lens_q.end(), std::int64_t{0});
        p.total_kv = std::accumulate(record.lens_kv.begin(), record.lens_kv.end(), std::int64_t{0});
    }
    for (const std::string& part : parts_of(record.features)) {
        if (part.starts_with(kDropout)) p.dropout.probability = std::strtod(part.c_str() + kDropout.size(), nullptr);
        if (part.starts_with(kCache)) p.kv_lengths = true;
        if (part.starts_with(kPages)) p.page_size = std::strtoll(part.c_str() + kPages.size(), nullptr, 10);
    }
    if (p.kv_lengths) p.total_kv = 0;
    try {
        p.validate();
    } catch (const Error& error) {
        throw Error(ErrorCode::bad_data, error.argument(), error.what());
    }
    return p;
}

Comparisons compare(std::span<const Record> records, const model::Machine* machine) {
    Comparisons result;
    std::map<std::string, std::optional<model::Machine>> beside;
    for (const Record& record : records) {
        Comparison row{.device = record.device};
        if (machine == nullptr) {
            const auto [found, is_new] = beside.try_emplace(record.file);
            if (is_new) found->second = machine_beside(record.file);
            if (found->second) {
                if (!measured_kernels(*found->second).empty()) row.device += ", calibrated";
                if (const auto reason = try_compare(record, &*found->second, row)) ++result.left_out[*reason];
                else result.rows.push_back(std::move(row));
                continue;
            }
        }
        if (const auto reason = try_compare(record, machine, row)) ++result.left_out[*reason];
        else result.rows.push_back(std::move(row));
    }
    return result;
}

namespace {

/// Returns one entry for each (device, pass, name_of(row)), and one more for all rows of a device.
template <class Name>
std::vector<Accuracy> grouped(const std::vector<const Comparison*>& all_rows, const Name& name_of_row) {
    using Key = std::array<std::string, 3>;
    std::map<Key, std::vector<const Comparison*>> groups;
    std::map<std::string, std::vector<const Comparison*>> devices;
    for (const Comparison* row : all_rows) {
        groups[{row->device, row->record.pass, name_of_row(*row)}].push_back(row);
        devices[row->device].push_back(row);
    }
    std::vector<Accuracy> result;
    for (const auto& [device, all] : devices) {
        for (const auto& [key, rows] : groups) {
            if (key[0] != device) continue;
            Accuracy a = accuracy_of(rows);
            a.device = device, a.pass = key[1], a.kernels = key[2];
            result.push_back(a);
        }
        Accuracy a = accuracy_of(all);
        a.device = device;
        result.push_back(a);
    }
    // Forward before backward.
    std::stable_sort(result.begin(), result.end(), [](const Accuracy& a, const Accuracy& b) {
        const auto rank = [](const Accuracy& x) { return x.kernels.empty() ? 2 : x.pass == "forward" ? 0 : 1; };
        return a.device == b.device && rank(a) < rank(b);
    });
    return result;
}

}  // namespace

std::vector<Accuracy> summarise(const Comparisons& comparisons) {
    std::vector<const Comparison*> rows;
    for (const Comparison& row : comparisons.rows) rows.push_back(&row);
    return grouped(rows, [](const Comparison& row) { return row.kernels; });
}

std::vector<Accuracy> summarise_held_out(const Comparisons& comparisons, bool blind) {
    std::vector<const Comparison*> rows;
    for (const Comparison& row : comparisons.rows) {
        if (blind ? row.blind : row.held_out) rows.push_back(&row);
    }
    return grouped(rows, [](const Comparison& row) { return row.kind; });
}

}  // namespace tessera::measure
