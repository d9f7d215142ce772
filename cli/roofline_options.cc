// SPDX-License-Identifier: Apache-2.0
#include "roofline_options.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "device_option.hpp"
#include "parse.hpp"

namespace tessera::cli {
namespace {

/// Expands "512:65536" to "512,1024,...,65536"; a text without a colon stays unchanged.
std::string expanded(const std::string& option, const std::string& text) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos) return text;
    const std::int64_t first = parse_size(option, std::string_view(text).substr(0, colon));
    const std::int64_t last = parse_size(option, std::string_view(text).substr(colon + 1));
    constexpr std::int64_t kMost = std::int64_t{1} << 32;
    if (first < 1 || last < first || last > kMost)
        unexpected(option, "FIRST:LAST with 1 <= FIRST <= LAST <= 2^32", text);
    std::string list;
    for (std::int64_t len = first; len <= last; len *= 2) list += (list.empty() ? "" : ",") + std::to_string(len);
    return list;
}

/// Throws for sizes of 0: a call without work has no time to predict.
void expect_work(const Problem& problem) {
    const std::pair<const char*, std::int64_t> sizes[] = {
        {"--batch", problem.batch}, {"--len", std::min(problem.len_q, problem.len_kv)}, {"--heads", problem.heads_q}};
    for (const auto& [option, size] : sizes)
        if (size == 0) unexpected(option, "1 or more, since a call without work takes no time", "0");
}

}  // namespace

void RooflineOptions::declare(CLI::App& command) {
    shape.declare(command, true);
    scores.declare(command);
    command.get_option("--dtype")->description(fmt::format("{}; a list gives several problems", kDefaultDtype));
    const auto add = [&](const char* name, std::string& value, const char* type, const std::string& text) {
        command.add_option(name, value, text)->type_name(type);
    };
    add(kDeviceOption, device, "NAME",
        "Machine: a file of tessera machine or calibrate, or " + machine_names() + "; default h200");
    add("--compare", compare, "NAMES", "Several machines in one table, the first as the measure: h100,h200,b200");
    add("--model", model, "FILE",
        "config.json of a model (Hugging Face): attention in a prefill, a training step and a decode step of it");
    add("--gpus", gpus, "N",
        "One sequence whose rows are spread over N GPUs (context parallelism), by tessera's kernels; a list gives a "
        "line for each");
    add("--link", link, "NAME",
        "With --gpus: nvlink (default), pcie, ib, or GB/s[,us] that each GPU receives, and the start of an exchange");
    add("--rows", rows_of_gpu, "N", "With --gpus: rows of each GPU in place of --len; a list gives several lines");
    command.add_flag(
        "--nccl", nccl,
        "With --gpus: exchange by NCCL (TESSERA_PEER_COPIES=0, and in C++); default: GPUs of one host copy "
        "from each other");
    add("--schedule", schedules, "NAME", "all (default), or a list of " + schedule_names());
    pass.declare(command, "forward (default), backward, or both: their sum", "Short for --pass backward");
    add("--by", by, "NAME",
        "Library of the kernels: published (default: flash-attention's fa2 and fa3, tessera's standard and fa1), "
        "tessera, "
        "flash-attention or cudnn");
    add("--baseline", baseline, "NAME",
        "What `win` is counted from: pytorch (default: what PyTorch runs without FlashAttention and cuDNN, efficient "
        "or "
        "math), eager (PyTorch's operators in the dtype), math (SDPA's fp32 path), efficient (SDPA's memory-efficient "
        "kernels), or standard (tessera's own schedule)");
    add("--threads", threads, "N", "Threads of a CPU; default: all of the machine");
    add("--tokens", tokens, "N", "Set the batch so that batch * len is N, as in published tables");
    command.add_flag("--worksheet", worksheet, "Show the prediction as a calculation that can be redone by hand");
    add("--svg", svg, "FILE", "Draw the log-log roofline, with schedules as points that move with the length");
    add("--png", png, "FILE", "Draw the roofline as PNG");
    add("--tile", tile, "Q,KV",
        "Show the memory of a tile of these queries and keys, and the largest tile that fits; with --timeline: the "
        "tile");
    command.add_flag(
        "--timeline", timeline,
        "Show the steps of a schedule (default fa3, on CPUs fa2) in time: one head on one core, a lane for each unit");
    add("--amdahl", amdahl, "X",
        "Show the speed-up of a model in which attention by the baseline takes this fraction of the time (0..1)");
    command.add_flag("--accuracy", accuracy, "Show the errors of the model on the Records that the project keeps");
    command.add_option("--records", records, "With --accuracy: these files of Records instead")->type_name("FILE");
}

std::vector<Schedule> RooflineOptions::schedule_list() const {
    if (schedules == "all") return {std::begin(kSchedules), std::end(kSchedules)};
    std::vector<Schedule> list;
    for (const std::string& name : parse_list("--schedule", schedules)) {
        list.push_back(parse_schedule<Schedule>("--schedule", name));
    }
    expect_each_once("--schedule", schedules, list);
    return list;
}

std::vector<Pass> RooflineOptions::passes() const { return pass.list(); }

model::PredictOptions RooflineOptions::predict_options(const model::Machine& machine) const {
    model::PredictOptions options;
    options.by = parse_choice<std::string>("--by", by,
                                           {{"published", "published"},
                                            {"tessera", "tessera"},
                                            {"flash-attention", "flash-attention"},
                                            {"cudnn", "cudnn"}});
    if (by_given && by != "tessera" && machine.kind == model::MachineKind::cpu)
        unexpected("--by", fmt::format("tessera: {} is a CPU", machine.name), by);
    options.sequences = shape.sequences();
    options.worksheet = worksheet;
    if (!threads.empty()) {
        const std::int64_t count = parse_size("--threads", threads);
        if (machine.kind == model::MachineKind::gpu)
            throw UsageError("--threads", fmt::format("expected a CPU as --device, {} is a GPU", machine.name));
        const auto most = static_cast<std::int64_t>(machine.cores.value);
        if (count < 1 || count > most)
            unexpected("--threads", fmt::format("1..{}, the cores of {}", most, machine.name), threads);
        options.threads = static_cast<int>(count);
    }
    return options;
}

std::optional<model::Baseline> RooflineOptions::baseline_kind() const {
    using model::Baseline;
    return parse_choice<std::optional<Baseline>>("--baseline", baseline,
                                                 {{"pytorch", std::nullopt},
                                                  {"standard", Baseline::standard},
                                                  {"eager", Baseline::eager},
                                                  {"math", Baseline::math},
                                                  {"efficient", Baseline::efficient}});
}

std::optional<Tile> RooflineOptions::own_tile() const {
    if (tile.empty()) return std::nullopt;
    const auto parts = parse_list("--tile", tile);
    if (parts.size() != 2) unexpected("--tile", "Q,KV, two whole numbers", tile);
    const Tile own{parse_size("--tile", parts[0]), parse_size("--tile", parts[1])};
    constexpr std::int64_t kMost = 4096;
    for (const std::int64_t size : {own.block_q, own.block_kv}) {
        if (size < 1 || size > kMost) unexpected("--tile", fmt::format("1..{}", kMost), std::to_string(size));
    }
    return own;
}

std::optional<double> RooflineOptions::attention_fraction() const {
    if (amdahl.empty()) return std::nullopt;
    const double fraction = parse_number("--amdahl", amdahl);
    if (!(fraction >= 0 && fraction <= 1)) unexpected("--amdahl", "a fraction between 0 and 1", amdahl);
    return fraction;
}

std::vector<std::int64_t> RooflineOptions::model_lengths() const {
    const std::string text = expanded("--len", shape.len.empty() ? "1024" : shape.len);
    expect_no_thousands("--len", text);
    std::vector<std::int64_t> lengths;
    for (const std::string& part : parse_list("--len", text)) lengths.push_back(parse_size("--len", part));
    expect_each_once("--len", text, lengths);
    constexpr std::int64_t kMost = std::int64_t{1} << 24;
    for (const std::int64_t len : lengths)
        if (len < 1 || len > kMost) unexpected("--len", "1..2^24", std::to_string(len));
    return lengths;
}

std::vector<std::int64_t> RooflineOptions::rows_list() const {
    const std::string text = expanded("--rows", rows_of_gpu);
    expect_no_thousands("--rows", text);
    std::vector<std::int64_t> list;
    constexpr std::int64_t kMost = std::int64_t{1} << 24;
    for (const std::string& part : parse_list("--rows", text)) {
        list.push_back(parse_size("--rows", part));
        if (list.back() < 1 || list.back() > kMost) unexpected("--rows", "1..2^24", part);
    }
    expect_each_once("--rows", text, list);
    return list;
}

std::vector<Problem> RooflineOptions::problems(const model::Machine& machine) const {
    ShapeOptions asked = shape;
    asked.len = expanded("--len", shape.len);
    asked.len_q = expanded("--len-q", shape.len_q);
    asked.len_kv = expanded("--len-kv", shape.len_kv);
    if (!dtype_given) asked.dtype = default_dtype(machine);
    std::vector<Problem> list = asked.problems(scores);
    for (const Problem& problem : list) expect_work(problem);
    if (tokens.empty()) return list;
    if (!shape.batch.empty() || !shape.ragged.empty() || !shape.kv_lengths.empty())
        throw UsageError("--tokens", "gives the batch: expected none of --batch, --ragged, --kv-lengths with it");
    const std::int64_t count = parse_size("--tokens", tokens);
    if (count < 1) unexpected("--tokens", "1 token or more", tokens);
    for (Problem& problem : list) {
        if (problem.len_q < 1 || count % problem.len_q != 0)
            unexpected("--tokens", fmt::format("a multiple of each length, {} is one of them", problem.len_q), tokens);
        problem.batch = count / problem.len_q;
        validate_options(problem);
    }
    return list;
}

}  // namespace tessera::cli
