// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "length_distribution.hpp"
#include "parse.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kProblem = "What to compute";
constexpr const char* kHow = "How";

CLI::Option* add_text(CLI::App& command, const char* group, const char* name, std::string& value, const char* type,
                      const std::string& description) {
    return command.add_option(name, value, description)->type_name(type)->group(group);
}

Causal parse_causal(const std::string& text) {
    return parse_choice<Causal>(
        "--causal", text,
        {{"none", Causal::none}, {"bottom-right", Causal::bottom_right}, {"top-left", Causal::top_left}});
}

std::int64_t parse_window_side(const std::string& window, std::string_view side) {
    if (side == "unbounded" || side == "inf") return unbounded;
    constexpr const char* kExpected = "LEFT,RIGHT, each a number of keys >= 0 or \"unbounded\"";
    if (!side.empty() && side.front() == '-') {  // flash-attn reads -1 as "no limit"; here it is an error
        throw UsageError("--window",
                         fmt::format("expected {}, got the negative {} in \"{}\"", kExpected, side, window));
    }
    if (side.empty() || side.find_first_not_of("0123456789") != std::string_view::npos)
        unexpected("--window", kExpected, window);
    return parse_size("--window", side);
}

void parse_window(const std::string& text, Mask& mask) {
    const std::size_t comma = text.find(',');
    mask.window_left = parse_window_side(text, std::string_view(text).substr(0, comma));
    mask.window_right =
        parse_window_side(text, comma == std::string::npos ? "" : std::string_view(text).substr(comma + 1));
}

std::vector<std::int64_t> parse_sizes(const std::string& option, const std::string& text) {
    expect_no_thousands(option, text);
    std::vector<std::int64_t> sizes;
    for (const std::string& part : parse_list(option, text)) sizes.push_back(parse_size(option, part));
    expect_each_once(option, text, sizes);
    return sizes;
}

/// Rethrows the library's error. If an option set the argument, the error names that option.
[[noreturn]] void rethrow(const Error& error) {
    const std::string option = option_of(error.argument());
    const std::string message = error.what();
    if (option.empty()) throw Error(error);
    const std::string text = message.substr(error.argument().size() + 2);  // what() is "argument: message"
    if (error.code() == ErrorCode::invalid_argument) throw UsageError(option, text);
    throw Error(error.code(), option, text);
}

/// Reports in one line a backend or schedule that this build lacks; plan() would list every kernel.
void require_available(const PlanOptions& options) {
    const auto all = kernels();
    const auto any = [&](auto&& wanted) { return std::any_of(all.begin(), all.end(), wanted); };
    if (options.backend && !any([&](const KernelInfo& k) { return k.backend == *options.backend; })) {
        throw Error(
            ErrorCode::device_unavailable, "--backend",
            fmt::format("this build has no {} kernels (tessera list shows those it has)", name_of(*options.backend)));
    }
    const auto of_schedule = [&](const KernelInfo& k) {
        return k.schedule == *options.schedule && k.pass == options.pass;
    };
    if (options.schedule && !any(of_schedule)) {
        throw Error(ErrorCode::unsupported, "--schedule",
                    fmt::format("this build has no {} kernel of schedule {} (tessera list shows those it has)",
                                name_of(options.pass), name_of(*options.schedule)));
    }
}

}  // namespace

const char* name_of(Layout layout) { return layout == Layout::bshd ? "bshd" : "bhsd"; }

Layout parse_layout(const std::string& text) {
    return parse_choice<Layout>("--layout", text, {{"bshd", Layout::bshd}, {"bhsd", Layout::bhsd}});
}

DType parse_dtype(const std::string& text) {
    return parse_choice<DType>(
        "--dtype", text, {{"fp32", DType::fp32}, {"bf16", DType::bf16}, {"fp16", DType::fp16}, {"fp64", DType::fp64}});
}

std::string option_of(const std::string& argument) {
    static const std::map<std::string, std::string> options = {
        {"batch", "--batch"},    {"len_q", "--len-q"},       {"len_kv", "--len-kv"},       {"heads_q", "--heads"},
        {"heads_kv", "--heads"}, {"head_dim", "--head-dim"}, {"head_dim_v", "--head-dim"}, {"dtype", "--dtype"},
        {"total_q", "--ragged"}, {"total_kv", "--ragged"},   {"window_left", "--window"},  {"window_right", "--window"},
        {"scale", "--scale"},    {"softcap", "--softcap"},   {"dropout", "--dropout"},     {"threads", "--threads"},
        {"block_q", "--tile"},   {"block_kv", "--tile"},     {"backend", "--backend"},     {"page_size", "--pages"},
        {"bias", "--bias"},
    };
    const auto found = options.find(argument);
    return found == options.end() ? "" : found->second;
}

void ScoreOptions::declare(CLI::App& command) {
    add_text(command, kProblem, "--causal", causal, "ALIGN",
             "none (default), bottom-right (the last query sees the last key) or top-left");
    add_text(command, kProblem, "--window", window, "LEFT,RIGHT",
             "Keys seen left and right of the bottom-right diagonal; a side may be unbounded");
    add_text(command, kProblem, "--scale", scale, "X", "Factor of the scores; default 1/sqrt(head_dim)");
    add_text(command, kProblem, "--softcap", softcap, "X", "Scores become X tanh(score / X)");
    add_text(command, kProblem, "--dropout", dropout, "P", "Drop each weight with probability P, 0 <= P < 1");
    add_text(command, kProblem, "--seed", seed, "N", "Seed of the random numbers; default 0");
}

void ScoreOptions::apply(Problem& problem) const {
    problem.mask.causal = parse_causal(causal);
    if (!window.empty()) parse_window(window, problem.mask);
    if (!scale.empty()) problem.scale = parse_number("--scale", scale);
    if (!softcap.empty()) problem.softcap = parse_number("--softcap", softcap);
    if (!dropout.empty()) problem.dropout.probability = parse_number("--dropout", dropout);
    if (!seed.empty()) problem.dropout.seed = parse_seed("--seed", seed);
    if (!seed.empty() && !seed_makes_inputs && problem.dropout.probability == 0)
        throw UsageError("--seed", "has no effect without --dropout");
}

void ShapeOptions::declare(CLI::App& command, bool lists) {
    const std::string also_list = lists ? "; a list gives several problems" : "";
    add_text(command, kProblem, "--batch", batch, "N", "Sequences; default 1");
    add_text(command, kProblem, "--len", len, "N", "Queries and keys per sequence; default 1024" + also_list);
    add_text(command, kProblem, "--len-q", len_q, "N", "Queries, when they are not as many as keys" + also_list);
    add_text(command, kProblem, "--len-kv", len_kv, "N", "Keys, when they are not as many as queries" + also_list);
    add_text(command, kProblem, "--heads", heads, "Q[/KV]",
             "Query heads, and key heads that groups of them share: 32/8; default 8" +
                 std::string(lists ? "; a list gives several problems: 8,32" : ""));
    add_text(command, kProblem, "--head-dim", head_dim, "D[/DV]",
             "Width of q and k, and of v; 1..256, default 64" + also_list);
    add_text(command, kProblem, "--dtype", dtype, "TYPE",
             "fp32 (default), bf16, fp16, or fp64 (reference only)" + also_list);
    add_text(command, kProblem, "--ragged", ragged, "LENS",
             "Lengths of the sequences of a ragged batch, LEN or QxKV: 100,37,1x512; or exp:MEAN:TOTAL, "
             "uniform:MEAN:TOTAL: those of a distribution that add up to TOTAL rows");
    add_text(command, kProblem, "--kv-lengths", kv_lengths, "LENS",
             "K and V are a cache, and the sequences have so many keys: 4000,17,512; --len-kv is its capacity");
    add_text(command, kProblem, "--pages", pages, "N",
             "K and V are a cache in pages of N keys; 0: a slot for each sequence");
    command.add_flag("--alibi", alibi, "With ALiBi slopes")->group(kProblem);
    command.add_flag("--sinks", sinks, "With a sink for each query head")->group(kProblem);
    command.add_flag("--bias", bias, "With an additive bias tensor")->group(kProblem);
}

void ShapeOptions::declare_sizes(CLI::App& command) {
    constexpr const char* kSizes = "Sizes, without a file";
    add_text(command, kSizes, "--len", len, "N", "Queries and keys; default 256");
    add_text(command, kSizes, "--len-q", len_q, "N", "Queries, when they are not as many as keys");
    add_text(command, kSizes, "--len-kv", len_kv, "N", "Keys, when they are not as many as queries");
    add_text(command, kSizes, "--heads", heads, "Q[/KV]", "Query heads, and key heads that groups share; default 1");
    add_text(command, kSizes, "--head-dim", head_dim, "D[/DV]", "Width of q and k, and of v; 1..256, default 64");
}

std::vector<std::pair<std::int64_t, std::int64_t>> ShapeOptions::sequences() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> result;
    if (!kv_lengths.empty()) {
        const std::int64_t queries = len_q.empty() ? 1 : parse_size("--len-q", len_q);
        for (const std::string& part : parse_list("--kv-lengths", kv_lengths))
            result.emplace_back(queries, parse_size("--kv-lengths", part));
        return result;
    }
    if (ragged.empty()) return result;
    if (is_distribution(ragged)) {
        for (const std::int64_t rows : lengths_of_distribution("--ragged", ragged)) result.emplace_back(rows, rows);
        return result;
    }
    for (const std::string& part : parse_list("--ragged", ragged)) result.push_back(parse_pair("--ragged", part, 'x'));
    return result;
}

std::vector<std::pair<std::int64_t, std::int64_t>> ShapeOptions::lengths() const {
    if (!len.empty() && !len_q.empty() && !len_kv.empty())
        throw UsageError("--len", "has no effect beside --len-q and --len-kv; leave it out");
    const std::string both = len.empty() ? "1024" : len;
    const auto of_q = len_q.empty() ? parse_sizes("--len", both) : parse_sizes("--len-q", len_q);
    const auto of_kv = len_kv.empty() ? parse_sizes("--len", both) : parse_sizes("--len-kv", len_kv);
    const bool square = len_q.empty() && len_kv.empty();
    std::vector<std::pair<std::int64_t, std::int64_t>> result;
    for (const std::int64_t q : of_q) {
        if (square) {
            result.emplace_back(q, q);
            continue;
        }
        for (const std::int64_t kv : of_kv) result.emplace_back(q, kv);
    }
    return result;
}

Problem ShapeOptions::sized(std::int64_t len_of_q, std::int64_t len_of_kv) const {
    Problem problem;
    problem.batch = batch.empty() ? 1 : parse_size("--batch", batch);
    problem.len_q = len_of_q;
    problem.len_kv = len_of_kv;
    problem.alibi = alibi;
    problem.sinks = sinks;
    problem.bias = bias;
    return problem;
}

Problem ShapeOptions::ragged_shape() const {
    if (!batch.empty() || !len.empty() || !len_q.empty() || !len_kv.empty()) {
        throw UsageError("--ragged",
                         "gives the batch and all lengths: expected none of --batch, --len, --len-q, --len-kv with it");
    }
    Problem problem = sized(0, 0);
    problem.ragged = true;
    problem.batch = 0;
    for (const auto& [q, kv] : sequences()) {
        ++problem.batch;
        problem.len_q = std::max(problem.len_q, q);
        problem.len_kv = std::max(problem.len_kv, kv);
        if (__builtin_add_overflow(problem.total_q, q, &problem.total_q) ||
            __builtin_add_overflow(problem.total_kv, kv, &problem.total_kv)) {
            unexpected("--ragged", "lengths whose sum is below 2^63", ragged);
        }
    }
    return problem;
}

std::vector<Problem> ShapeOptions::shapes() const {
    if (!kv_lengths.empty()) return cache_shapes();
    std::vector<Problem> result;
    if (!ragged.empty()) result = {ragged_shape()};
    else
        for (const auto& [q, kv] : lengths()) result.push_back(sized(q, kv));
    for (Problem& problem : result) {
        if (pages.empty()) break;
        set_cache(problem);
        if (problem.ragged && problem.page_size > 0)
            problem.len_kv += (problem.page_size - problem.len_kv % problem.page_size) % problem.page_size;
    }
    return result;
}

/// Crosses each Problem with each value of the comma-separated list `values`.
template <class Parse, class Set>
static std::vector<Problem> crossed(const std::string& option, const std::string& values,
                                    const std::vector<Problem>& problems, Parse&& parse, Set&& set) {
    std::vector<decltype(parse(option, values))> parsed;
    for (const std::string& text : parse_list(option, values)) parsed.push_back(parse(option, text));
    expect_each_once(option, values, parsed);
    std::vector<Problem> result;
    for (const auto& value : parsed) {
        for (Problem problem : problems) {
            set(problem, value);
            result.push_back(problem);
        }
    }
    return result;
}

std::vector<Problem> ShapeOptions::problems(const ScoreOptions& scores) const {
    const auto pair = [](const std::string& option, const std::string& text) { return parse_pair(option, text, '/'); };
    const auto name = [](const std::string&, const std::string& text) { return text; };
    std::vector<Problem> result =
        crossed("--causal", scores.causal, shapes(), name, [&](Problem& p, const std::string& text) {
            ScoreOptions one = scores;
            one.causal = text;
            one.apply(p);
        });
    expect_no_grouped_heads("--heads", heads);
    result = crossed("--heads", heads, result, pair,
                     [](Problem& p, const auto& value) { std::tie(p.heads_q, p.heads_kv) = value; });
    result = crossed("--head-dim", head_dim, result, pair,
                     [](Problem& p, const auto& value) { std::tie(p.head_dim, p.head_dim_v) = value; });
    result = crossed("--dtype", dtype, result, name,
                     [](Problem& p, const std::string& text) { p.dtype = parse_dtype(text); });
    for (const Problem& problem : result) validate_options(problem);
    return result;
}

Problem ShapeOptions::problem(const ScoreOptions& scores) const {
    expect_no_grouped_heads("--heads", heads);
    for (const auto& [option, text] : {std::pair{"--len", len},
                                       {"--len-q", len_q},
                                       {"--len-kv", len_kv},
                                       {"--heads", heads},
                                       {"--head-dim", head_dim},
                                       {"--dtype", dtype},
                                       {"--causal", scores.causal}}) {
        if (text.find(',') != std::string::npos) unexpected(option, "one value", text);
    }
    return problems(scores).front();
}

void HowOptions::declare(CLI::App& command, bool lists) {
    add_text(command, kHow, "--backend", backend, "NAME", "auto (default), cpu, cuda or reference");
    add_text(command, kHow, "--schedule", schedule, "NAME",
             "auto (default), " + schedule_names() + (lists ? "; a list measures several, all measures each" : ""));
    add_text(command, kHow, "--tile", tile, "Q,KV", "Queries and keys per tile; default: the kernel's own");
    add_text(command, kHow, "--threads", threads, "N", "Threads; default: one per core that this process may use");
}

void HowOptions::declare_order(CLI::App& command) {
    add_text(command, kHow, "--schedule", schedule, "NAME", "auto (default), " + schedule_names(Backend::cpu));
    add_text(command, kHow, "--tile", tile, "Q,KV", "Queries and keys per tile; default: the kernel's own");
}

void PassOptions::declare(CLI::App& command, const std::string& names, const std::string& backward_description,
                          const char* group) {
    CLI::Option* options[] = {command.add_option("--pass", text, names)->type_name("NAME"),
                              command.add_flag("--backward", backward, backward_description)};
    for (CLI::Option* option : options) {
        if (*group != '\0') option->group(group);
    }
}

std::vector<Pass> PassOptions::list() const {
    if (backward && !text.empty())
        throw UsageError("--backward", fmt::format("stands for --pass backward: expected without --pass {}", text));
    if (backward) return {Pass::backward};
    if (text.empty()) return {Pass::forward};
    std::vector<Pass> passes;
    for (const std::string& name : parse_list("--pass", text)) {
        const auto some = parse_choice<std::vector<Pass>>(
            "--pass", name,
            {{"forward", {Pass::forward}}, {"backward", {Pass::backward}}, {"both", {Pass::forward, Pass::backward}}});
        passes.insert(passes.end(), some.begin(), some.end());
    }
    expect_each_once("--pass", text, passes);
    return passes;
}

Pass PassOptions::one() const {
    const std::vector<Pass> passes = list();
    if (passes.size() != 1) unexpected("--pass", "one of forward, backward", text);
    return passes.front();
}

PlanOptions HowOptions::plan_options(Pass pass, const std::string& schedule_name) const {
    PlanOptions options{.pass = pass};
    options.backend = parse_choice<std::optional<Backend>>(
        "--backend", backend,
        {{"auto", {}}, {"cpu", Backend::cpu}, {"cuda", Backend::cuda}, {"reference", Backend::reference}});
    options.schedule = parse_schedule<std::optional<Schedule>>("--schedule", schedule_name, {{"auto", {}}});
    if (!tile.empty()) {
        const auto parts = parse_list("--tile", tile);
        if (parts.size() != 2) unexpected("--tile", "Q,KV, two whole numbers", tile);
        options.tile = Tile{parse_size("--tile", parts[0]), parse_size("--tile", parts[1])};
    }
    if (!threads.empty()) {
        constexpr std::int64_t kMostThreads = 1024;  // bounds PlanOptions::threads
        const std::int64_t count = parse_size("--threads", threads);
        if (count < 1 || count > kMostThreads) unexpected("--threads", fmt::format("1..{}", kMostThreads), threads);
        options.threads = static_cast<int>(count);
    }
    return options;
}

void validate_options(const Problem& problem) {
    try {
        problem.validate();
    } catch (const Error& error) {
        rethrow(error);
    }
}

Plan plan_with(const Problem& problem, const PlanOptions& options) {
    require_available(options);
    try {
        return plan(problem, options);
    } catch (const Error& error) {
        rethrow(error);
    }
}

PlanOn plan_on_with(const model::Machine& machine, const Problem& problem, const PlanOptions& options,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences) {
    try {
        return plan_on(machine, problem, options, sequences);
    } catch (const Error& error) {
        rethrow(error);
    }
}

}  // namespace tessera::cli
