// SPDX-License-Identifier: Apache-2.0
//
// tessera walk: follows one tile of queries through the schedule, step by step.
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "commands.hpp"
#include "core/arguments.hpp"
#include "core/batch.hpp"
#include "core/checks.hpp"
#include "generated.hpp"
#include "inputs.hpp"
#include "measure/work.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "schedule/step.hpp"
#include "table.hpp"
#include "tessera/error.hpp"
#include "walk/exact.hpp"
#include "walk_numbers.hpp"
#include "walk_text.hpp"

namespace tessera::cli {
namespace {

struct WalkOptions {
    InputOptions inputs;
    ShapeOptions shape{.heads = "", .head_dim = ""};
    ScoreOptions scores{.seed_makes_inputs = true};
    HowOptions how;
    std::string sequence = "0";
    std::string head = "0";
    std::string row;
    std::string q_tile;
    std::string numbers;
    PassOptions pass;
    bool backward = false;  // set from `pass`
    bool by_hand = false;
    bool all = false;
};

/// The tensors of a call, from files or from the seed, and its results in the canonical layout.
struct WalkTensors {
    Inputs read;
    GeneratedInputs made;
    std::string origin;
    Problem problem;
    ForwardArgs args;
    BackwardArgs gradients;
    TensorView d_o;
    OwnedTensor o, lse, dq, dk, dv;

    void make_results(bool backward) {
        using Shape = std::vector<std::int64_t>;
        const auto like = [&](const char* name, const TensorView& t, std::int64_t dim) {
            Shape shape(t.shape.begin(), t.shape.begin() + t.rank);
            shape.back() = dim;
            return make_tensor(name, problem.dtype, shape);
        };
        o = like("o", args.q, problem.head_dim_v);
        lse = make_tensor("lse", DType::fp32, FileLayout{.ragged = problem.ragged}.lse_in_file(problem));
        args.o = o.view;
        args.lse = lse.view;
        if (!backward) return;
        dq = like("dq", args.q, problem.head_dim);
        dk = like("dk", args.k, problem.head_dim);
        dv = like("dv", args.v, problem.head_dim_v);
        gradients = inputs_of<BackwardArgs>(args);
        gradients.o = o.view;
        gradients.lse = lse.view;
        gradients.d_o = d_o;
        gradients.dlse = read.tensors.dlse;
        gradients.dq = dq.view;
        gradients.dk = dk.view;
        gradients.dv = dv.view;
    }
};

void read_tensors(const WalkOptions& options, WalkTensors& t) {
    for (const auto& [option, text] : {std::pair{"--len", options.shape.len},
                                       {"--len-q", options.shape.len_q},
                                       {"--len-kv", options.shape.len_kv},
                                       {"--heads", options.shape.heads},
                                       {"--head-dim", options.shape.head_dim}}) {
        if (!text.empty()) throw UsageError(option, "expected no sizes with a file, which has its own");
    }
    t.read = read_inputs(options.inputs, options.backward);
    const Inputs& in = t.read;
    t.origin = in.origin();
    t.problem = in.problem;
    validate_problem_of(t.read);
    t.args = in.forward_args();
    t.d_o = in.tensors.d_o;
    ScoreOptions scores = options.scores;
    scores.seed_makes_inputs = false;  // the inputs are read from files
    scores.apply(t.problem);
    validate_options(t.problem);
}

void generate_tensors(const WalkOptions& options, WalkTensors& t) {
    options.inputs.expect_no_names();
    ShapeOptions shape = options.shape;
    if (shape.len.empty() && (shape.len_q.empty() || shape.len_kv.empty())) shape.len = "256";
    if (shape.heads.empty()) shape.heads = "1";
    if (shape.head_dim.empty()) shape.head_dim = "64";
    shape.dtype = options.inputs.dtype == "keep" ? "fp32" : options.inputs.dtype;
    t.problem = shape.problem(options.scores);
    t.made =
        generate_inputs(t.problem, {}, Layout::bshd, check::Fill::normal, t.problem.dropout.seed, options.backward);
    t.args = t.made.forward_args();
    t.d_o = t.made.tensors.d_o;
    t.origin = fmt::format("generated, normal, seed {}", t.problem.dropout.seed);
}

/// The row of the tile that --row or --q-tile select; by default a row of the last tile.
walk::Selection selection_of(const WalkOptions& options, const Plan& plan, std::int64_t len_q) {
    walk::Selection selection{.batch = parse_size("--sequence", options.sequence),
                              .head = parse_size("--head", options.head)};
    const std::int64_t block = std::max<std::int64_t>(1, std::min(plan.tile.block_q, len_q));
    const std::int64_t tiles = (len_q + block - 1) / block;
    if (!options.row.empty()) {
        if (!options.q_tile.empty()) throw UsageError("--q-tile", "expected without --row, which determines the tile");
        selection.row = parse_size("--row", options.row);
    } else if (!options.q_tile.empty()) {
        const std::int64_t tile = parse_size("--q-tile", options.q_tile);
        if (tile >= tiles) unexpected("--q-tile", fmt::format("0..{}", tiles - 1), options.q_tile);
        selection.row = tile * block;
    } else {
        selection.row = (tiles - 1) * block;
    }
    return selection;
}

bool same_bytes(const TensorView& view, const std::vector<std::byte>& bytes) {
    return std::memcmp(view.data, bytes.data(), bytes.size()) == 0;
}

std::vector<std::byte> bytes_of(const TensorView& view) {
    const auto* begin = static_cast<const std::byte*>(view.data);
    return std::vector<std::byte>(begin, begin + view.size() * size_of(view.dtype));
}

/// The trace, and whether its run has the bits of an ordinary run.
struct Walked {
    walk::Trace trace;
    bool same_bits = true;

    /// True if the ordinary run may use another kernel than the traced one.
    bool may_differ() const { return !trace.plan.matrix_unit.empty(); }
};

Walked walk_through(const WalkOptions& options, WalkTensors& t, Progress& progress) {
    HowOptions how = options.how;
    how.backend = "cpu";
    how.threads = "1";
    const Plan plan =
        plan_with(t.problem, how.plan_options(options.backward ? Pass::backward : Pass::forward, how.schedule));
    t.make_results(options.backward);
    try {
        if (options.backward) check_tensors(t.problem, t.gradients, Device{});
        else check_tensors(t.problem, t.args, Device{});
    } catch (const Error& error) {
        rethrow_for_files(error, t.read);
    }
    const auto sequence = parse_size("--sequence", options.sequence);
    const Problem& p = t.problem;
    const bool is_empty = p.batch == 0 || p.heads_q == 0;
    if (!is_empty && sequence >= p.batch) unexpected("--sequence", fmt::format("0..{}", p.batch - 1), options.sequence);
    const auto len_q = is_empty ? 0 : sequence_of(p, t.args, sequence).len_q;
    if (len_q == 0) {
        const char* what = "expected a query to follow, got none";
        if (!options.inputs.files.empty() && (is_empty || !p.ragged)) throw Error(ErrorCode::bad_data, t.origin, what);
        throw UsageError(is_empty ? "--heads" : p.ragged ? "--sequence" : "--len", what);
    }
    const walk::Selection selection = selection_of(options, plan, len_q);
    const Execution counted{.parallel_for = progress.counted_parallel_for()};
    const auto pairs = measure::visible_pairs(t.problem, t.args);
    const std::string takes_long = long_run_text(plan, pairs, !options.inputs.files.empty());
    if (!takes_long.empty()) print_note(takes_long);
    progress.step("run without an observer");
    // The bits do not depend on the number of threads, so it uses all of them.
    how.threads.clear();
    const Plan unobserved_plan =
        plan_with(t.problem, how.plan_options(options.backward ? Pass::backward : Pass::forward, how.schedule));
    Plan before = unobserved_plan;
    if (options.backward) before = plan_with(t.problem, {.backend = Backend::cpu});
    expect_workspace(before);
    forward(before, t.args, Workspace(before), counted);
    std::vector<TensorView> results = {t.o.view, t.lse.view};
    if (options.backward) {
        expect_workspace(unobserved_plan);
        backward(unobserved_plan, t.gradients, Workspace(unobserved_plan), counted);
        results = {t.dq.view, t.dk.view, t.dv.view};
    }
    std::vector<std::vector<std::byte>> unobserved;
    for (const TensorView& view : results) unobserved.push_back(bytes_of(view));
    progress.step("run with the observer");
    Walked walked{options.backward ? walk::trace_backward(plan, t.gradients, selection, counted)
                                   : walk::trace_forward(plan, t.args, selection, counted)};
    for (std::size_t i = 0; i < results.size(); ++i)
        walked.same_bits = walked.same_bits && same_bytes(results[i], unobserved[i]);
    return walked;
}

std::string result_text(const walk::Trace& trace, std::int64_t row) {
    const auto lane = static_cast<std::size_t>(row - trace.queries.begin);
    const walk::Step& last = trace.steps.back();
    if (trace.plan.pass == Pass::backward || last.m.empty()) return "";
    std::string o;
    for (std::int64_t c = 0; c < std::min<std::int64_t>(4, last.o.columns); ++c)
        o += fmt::format("{}{:.7g}", c == 0 ? "" : ", ", last.o.at(static_cast<std::int64_t>(lane), c));
    const double m = static_cast<double>(last.m[lane]), l = static_cast<double>(last.l[lane]);
    if (l == 0) return fmt::format("row {} sees no key: O = 0, LSE = -inf", row);
    return fmt::format("O = ({}{}), LSE = m + ln l = {:.7g} + {:.7g} = {:.7g}", o, last.o.columns > 4 ? ", ..." : "", m,
                       std::log(l), m + std::log(l));
}

/// Formats the terms after the bytes: "load_k 4 x 4.0 KiB, ...".
std::string moved_text(std::span<const walk::Moved> parts) {
    std::string text;
    for (const walk::Moved& part : parts) {
        text += fmt::format("{}{} ", text.empty() ? "" : ", ", schedule::name_of(part.operation));
        if (part.least != part.most) text += fmt::format("{} in {} parts", bytes_text(part.bytes), part.times);
        else text += fmt::format("{} x {}", part.times, bytes_text(part.least));
        if (part.shared_by > 1) text += fmt::format(" (1/{0} each: {0} tiles of queries share it)", part.shared_by);
    }
    return text;
}

std::string bits_text(const Walked& walked) {
    if (walked.same_bits) return "all results are those of a run without an observer, bit for bit";
    if (!walked.may_differ()) return "NOT those of a run without an observer";
    return fmt::format("not those of a run without an observer, which multiplies on {}", walked.trace.plan.matrix_unit);
}

std::string trace_text(const WalkOptions& options, const WalkTensors& t, const Walked& walked) {
    const walk::Trace& trace = walked.trace;
    WalkView view{.all = options.all, .width = terminal_width(STDOUT_FILENO)};
    if (!options.row.empty()) view.row = trace.selection.row;
    const std::string followed = fmt::format(
        "queries {}..{} of {}, head {}{}{}", trace.queries.begin, trace.queries.end - 1, trace.len_q,
        trace.selection.head, t.problem.batch > 1 ? fmt::format(", sequence {}", trace.selection.batch) : "",
        view.row ? fmt::format("; values of row {}", *view.row) : "");
    std::vector<std::pair<std::string, std::string>> before{{"input", t.origin},
                                                            {"problem", t.problem.describe()},
                                                            {"kernel", plan_text(trace.plan)},
                                                            {"shows", walk::describe_run(trace.plan)},
                                                            {"follows", followed}};
    if (t.problem.kv_lengths) before.emplace_back("cache", cache_text(trace, t.args));
    std::string text = facts_text(before, view.width);
    text += "\n" + walk_text(trace, view) + "\n";
    const walk::Traffic moved = trace.steps.empty() ? walk::Traffic{} : trace.steps.back().moved;
    std::vector<std::pair<std::string, std::string>> facts;
    if (view.row && !trace.steps.empty() && !result_text(trace, *view.row).empty())
        facts.emplace_back("result", result_text(trace, *view.row));
    facts.emplace_back("tiles", fmt::format("{} full, {} partial, {} skipped", trace.count(Coverage::full),
                                            trace.count(Coverage::partial), trace.count(Coverage::empty)));
    facts.emplace_back(
        "moved", fmt::format("{}; standard attention {}, {:.2f} times as much", bytes_text(moved.schedule),
                             bytes_text(moved.standard), moved.schedule > 0 ? moved.standard / moved.schedule : 1));
    facts.emplace_back("sum of", moved_text(trace.moved));
    facts.emplace_back("bits", bits_text(walked));
    return text + facts_text(facts, view.width);
}

/// Rethrows errors of the selection in terms of the options.
[[noreturn]] void rethrow_selection(const Error& error) {
    const std::string text = std::string(error.what());
    for (const auto& [argument, option] : {std::pair{"batch", "--sequence"}, {"head", "--head"}, {"row", "--row"}}) {
        if (error.code() == ErrorCode::invalid_argument && error.argument() == argument)
            throw UsageError(option, text.substr(error.argument().size() + 2));
    }
    throw Error(error);
}

/// Adds the row by the definition in fp64, and the error of each step.
void add_exact(Json& json, const WalkTensors& t, const walk::Trace& trace) {
    const walk::ExactRow exact = walk::exact_row(t.problem, t.args, trace.selection);
    json["exact"] = {{"o", exact.o}, {"lse", std::isfinite(exact.lse) ? Json(exact.lse) : Json("-inf")}};
    for (std::size_t i = 0; i < trace.steps.size(); ++i) {
        const std::vector<double> estimate = walk::estimate_of(trace, trace.steps[i]);
        if (estimate.empty()) continue;
        json["steps"][i]["estimate"] = estimate;
        if (const auto error = walk::error_of(estimate, exact)) json["steps"][i]["error"] = *error;
    }
}

void execute_by_hand(const WalkOptions& options, Session& session) {
    Problem problem;
    options.scores.apply(problem);
    const auto schedule =
        options.how.plan_options(Pass::forward, options.how.schedule).schedule.value_or(Schedule::fa2);
    if (schedule == Schedule::fa3)
        throw UsageError("--schedule", "expected standard, fa1 or fa2, got fa3, whose steps by hand are those of fa2");
    const Mask mask{.causal = problem.mask.causal};
    const walk::HandExample example =
        hand_example("--numbers", options.numbers, "--tile", options.how.tile, options.backward);
    walk::Hand hand;
    try {
        hand = walk::work_by_hand(example, schedule, mask);
    } catch (const Error& error) {
        if (error.argument() != "numbers") throw;
        throw UsageError("--numbers", std::string(error.what()).substr(error.argument().size() + 2));
    }
    if (session.json) session.print_json(json_of(hand, options.backward), "by_hand");
    else session.print(hand_text(hand, options.backward, terminal_width(STDOUT_FILENO)));
}

void execute(const WalkOptions& options, Session& session) {
    if (options.by_hand) return execute_by_hand(options, session);
    if (!options.numbers.empty()) throw UsageError("--numbers", "expected --by-hand with it");
    WalkTensors tensors;
    Walked walked;
    {
        Progress progress(3);
        progress.step("reading");
        if (options.inputs.files.empty()) generate_tensors(options, tensors);
        else read_tensors(options, tensors);
        try {
            walked = walk_through(options, tensors, progress);
        } catch (const Error& error) {
            rethrow_selection(error);
        }
    }
    if (!walked.same_bits && !walked.may_differ()) session.exit_code = kCheckFailed;
    if (!session.json) return session.print(trace_text(options, tensors, walked));
    std::optional<std::int64_t> row;
    if (!options.row.empty()) row = walked.trace.selection.row;
    Json json = json_of(walked.trace, row);
    if (row && !options.backward) add_exact(json, tensors, walked.trace);
    json["input"] = tensors.origin;
    json["path"] = "cpu/simd";
    json["path_unobserved"] = walked.may_differ() ? "cpu/matrix" : "cpu/simd";
    json["same_bits_as_unobserved"] = walked.same_bits;
    session.print_json(json);
}

}  // namespace

void add_walk_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "walk",
        "Step through one tile of queries: m, l, rescaling, partial O, tiles and bytes, in the kernel's own numbers",
        {{"tessera walk examples/data/kjv-layer2.safetensors --layout bhsd --causal bottom-right --row 700",
          "query 700 of a real model and its keys, tile by tile"},
         {"tessera walk --len 256 --schedule fa1 --causal bottom-right", "the loops of fa1, on random numbers"},
         {"tessera walk --by-hand --backward", "four queries and four keys in fractions, to redo with a pencil"},
         {"tessera walk --by-hand --numbers 'q 1 0; k 1 0, 3 0; v 4 0, 0 4' --tile 1,1",
          "by hand with your own numbers and tiles"},
         {"tessera walk --len 200 --tile 32,32 --json", "every value of the trace, for programs"}});
    auto options = std::make_shared<WalkOptions>();
    options->inputs.declare(*command, false);
    options->shape.declare_sizes(*command);
    options->scores.declare(*command);
    options->how.declare_order(*command);
    constexpr const char* kWhat = "What to follow";
    const auto add_text = [&](const char* name, std::string& value, const char* description) {
        command->add_option(name, value, description)->type_name("N")->group(kWhat);
    };
    add_text("--row", options->row, "Follow this query: its own m, l, rescale and O");
    add_text("--q-tile", options->q_tile, "Follow this tile of queries as a whole; default: the last");
    add_text("--head", options->head, "Query head; default 0");
    add_text("--sequence", options->sequence, "Batch sequence; default 0");
    options->pass.declare(*command, "forward (default) or backward", "The backward instead of the forward", kWhat);
    command->add_flag("--by-hand", options->by_hand, "A 4 x 4 example in exact fractions instead")->group(kWhat);
    command
        ->add_option("--numbers", options->numbers,
                     "With --by-hand: your own whole numbers, as \"q 1 0, 0 1; k 1 1, 0 2; v 4 0, 0 4; do 1 0, 0 1\"; "
                     "--tile 1,2 sets the tile")
        ->type_name("TEXT")
        ->group(kWhat);
    command->add_flag("--all", options->all, "Show every tile of a long table")->group(kWhat);
    command->callback([options, command, &session] {
        if (options->by_hand)
            expect_only(*command, "--by-hand",
                        {"--backward", "--pass", "--causal", "--schedule", "--numbers", "--tile"});
        else if (options->inputs.files.empty() && command->count("--layout") > 0)
            throw UsageError("--layout", "expected a file with it, whose tensors have that layout");
        options->backward = options->pass.one() == Pass::backward;
        execute(*options, session);
    });
}

}  // namespace tessera::cli
