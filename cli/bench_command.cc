// SPDX-License-Identifier: Apache-2.0
//
// tessera bench: time and rate of problems by schedules.
#include <fmt/format.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "bench_table.hpp"
#include "commands.hpp"
#include "commit.hpp"
#include "device/device_copy.hpp"
#include "generated.hpp"
#include "measure/bench.hpp"
#include "measure/host.hpp"
#include "measure/record.hpp"
#include "measure/work.hpp"
#include "options.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

struct BenchOptions {
    ShapeOptions shape;
    ScoreOptions scores;
    HowOptions how;
    std::string passes = "forward";
    std::string repeat = "9";
    std::string output;
};

/// Where and when the measurements are taken.
struct Provenance {
    measure::Host host = measure::describe_host();
    std::string date = measure::utc_date();
};

/// All that a plan reads and writes, for both passes.
struct Operands {
    GeneratedInputs in;
    OwnedTensor o, lse, dq, dk, dv;
    std::vector<TensorView> views;  ///< of every tensor, to be evicted from the caches

    Operands(const Problem& p, const std::vector<std::pair<std::int64_t, std::int64_t>>& members, bool backward)
        : in(generate_inputs(p, members, Layout::bshd, check::Fill::normal, p.dropout.seed, backward)) {
        using Shape = std::vector<std::int64_t>;
        const auto like = [&](const char* name, const TensorView& t, std::int64_t dim) {
            Shape shape(t.shape.begin(), t.shape.begin() + t.rank);
            shape.back() = dim;
            return make_tensor(name, p.dtype, shape);
        };
        o = like("o", in.q.view, p.head_dim_v);
        lse = make_tensor("lse", DType::fp32, in.layout.lse_in_file(p));
        if (backward) {
            dq = like("dq", in.q.view, p.head_dim);
            dk = like("dk", in.k.view, p.head_dim);
            dv = like("dv", in.v.view, p.head_dim_v);
        }
        for (const auto& [name, view] : in.named()) views.push_back(view);
        for (const OwnedTensor* t : {&o, &lse, &dq, &dk, &dv}) {
            if (t->view.given()) views.push_back(t->view);
        }
    }

    ForwardArgs forward() const {
        return {.q = in.q.view,
                .k = in.k.view,
                .v = in.v.view,
                .bias = in.bias.view,
                .alibi_slopes = in.alibi_slopes.view,
                .cu_seqlens_q = in.cu_seqlens_q.view,
                .cu_seqlens_kv = in.cu_seqlens_kv.view,
                .o = o.view,
                .lse = lse.view};
    }
    BackwardArgs backward() const {
        return {.q = in.q.view,
                .k = in.k.view,
                .v = in.v.view,
                .bias = in.bias.view,
                .alibi_slopes = in.alibi_slopes.view,
                .cu_seqlens_q = in.cu_seqlens_q.view,
                .cu_seqlens_kv = in.cu_seqlens_kv.view,
                .o = o.view,
                .lse = lse.view,
                .d_o = in.d_o.view,
                .dq = dq.view,
                .dk = dk.view,
                .dv = dv.view};
    }
};

/// Each schedule that this build has kernels of on the backend, for "all".
std::string schedule_list(const std::string& schedules, Backend backend) {
    if (schedules != "all") return schedules;
    std::string text;
    for (const Schedule s : {Schedule::standard, Schedule::fa1, Schedule::fa2, Schedule::fa3}) {
        for (const KernelInfo& kernel : kernels()) {
            if (kernel.schedule != s || kernel.backend != backend) continue;
            text += (text.empty() ? "" : ",") + std::string(name_of(s));
            break;
        }
    }
    return text.empty() ? "auto" : text;
}

std::vector<Pass> parse_passes(const std::string& text) {
    std::vector<Pass> passes;
    for (const std::string& pass : parse_list("--pass", text)) {
        passes.push_back(
            parse_choice<Pass>("--pass", pass, {{"forward", Pass::forward}, {"backward", Pass::backward}}));
    }
    return passes;
}

/// A plan for each combination; those that no kernel takes are told and left out. Throws the last reason when none is
/// left.
std::vector<Plan> make_plans(const BenchOptions& options) {
    std::vector<Plan> plans;
    std::optional<Error> reason;
    const Backend backend = options.how.plan_options(Pass::forward, "auto").backend.value_or(Backend::cpu);
    const auto schedules = parse_list("--schedule", schedule_list(options.how.schedule, backend));
    const auto passes = parse_passes(options.passes);
    for (const Problem& problem : options.shape.problems(options.scores)) {
        for (const Pass pass : passes) {
            for (const std::string& schedule : schedules) {
                const PlanOptions how = options.how.plan_options(pass, schedule);
                try {
                    plans.push_back(plan_with(problem, how));
                } catch (const Error& error) {
                    if (error.code() != ErrorCode::unsupported) throw;
                    reason = error;
                    print_note(fmt::format("skipped schedule {}, {}, {}", schedule, name_of(pass), problem.describe()));
                }
            }
        }
    }
    if (plans.empty() && reason) throw Error(*reason);
    return plans;
}

/// Times run(tensors, workspace) on tensors where the plan wants them; copies are no part of it.
template <class Args, class Run>
measure::Summary time_plan(const Plan& plan, const Args& host, std::span<const TensorView> views, int repeat,
                           measure::ColdCache& cache, const Run& run) {
    if (plan.device.type == DeviceType::cpu) {
        const Workspace workspace(plan);
        return measure::time_call([&] { run(host, workspace.span()); }, views, cache, repeat);
    }
    device::DeviceCopy copy(plan.device);
    const Args mirrored = copy.add(host);
    const std::span<std::byte> workspace = copy.workspace(plan.workspace_bytes);
    const device::CacheEviction evict(plan.device);
    const auto call = [&] {
        run(mirrored, workspace);
        device::synchronize(plan.device);
    };
    return measure::time_call(call, std::cref(evict), repeat);
}

measure::Record measure_plan(const Plan& plan, const BenchOptions& options, int repeat, measure::ColdCache& cache,
                             const Provenance& provenance, Progress& progress) {
    const Problem& problem = plan.problem;
    const bool is_forward = plan.pass == Pass::forward;
    const Operands operands(problem, options.shape.members(), !is_forward);
    progress.expect(repeat + 1);
    measure::Summary ms;
    if (is_forward) {
        ms = time_plan(plan, operands.forward(), operands.views, repeat, cache, [&](const auto& args, auto workspace) {
            forward(plan, args, workspace);
            progress.done();
        });
    } else {  // starts from the forward's results, whoever computed them
        const Plan before = tessera::plan(problem, {.device = plan.device});
        device::run_on_host_tensors(before, operands.forward(),
                                    [&](const auto& args, auto workspace) { forward(before, args, workspace); });
        ms = time_plan(plan, operands.backward(), operands.views, repeat, cache, [&](const auto& args, auto workspace) {
            backward(plan, args, workspace);
            progress.done();
        });
    }
    const auto pairs = measure::visible_pairs(problem, operands.in.cu_seqlens_q.view, operands.in.cu_seqlens_kv.view);
    measure::Record record = measure::record_of(plan, ms, measure::flop(problem, plan.pass, pairs));
    const bool on_host = plan.device.type == DeviceType::cpu;
    record.device = on_host ? fmt::format("{} ({})", provenance.host.cpu, plan.target) : plan.target;
    if (on_host) record.clock_mhz = measure::clock_mhz();
    record.versions = {{"tessera", TESSERA_VERSION}, {"compiler", TESSERA_COMPILER}};
    record.date = provenance.date;
    record.commit = TESSERA_COMMIT;
    return record;
}

void execute(const BenchOptions& options, const Session& session) {
    constexpr std::int64_t kMostRepeats = 1'000'000;
    const std::int64_t repeat = parse_size("--repeat", options.repeat);
    if (repeat < 1 || repeat > kMostRepeats) unexpected("--repeat", fmt::format("1..{}", kMostRepeats), options.repeat);
    const std::vector<Plan> plans = make_plans(options);
    if (!options.output.empty()) measure::append_records(options.output, {});  // fails now rather than after the work

    const Provenance provenance;
    measure::ColdCache cache(provenance.host.cache_bytes);
    const BenchTable table(plans);
    if (!session.json) session.print(table.head(provenance.host, static_cast<int>(repeat)));
    std::vector<measure::Record> records;
    Progress progress(static_cast<std::int64_t>(plans.size()));
    for (const Plan& plan : plans) {
        progress.step(fmt::format("{}, len {} x {}", plan.kernel->name, plan.problem.len_q, plan.problem.len_kv));
        records.push_back(measure_plan(plan, options, static_cast<int>(repeat), cache, provenance, progress));
        if (!options.output.empty()) measure::append_records(options.output, {records.back()});
        if (!session.json) session.print(table.row(records.back()));
    }
    if (!session.json) return;
    Json document = Json::array();
    for (const measure::Record& record : records) document.push_back(measure::to_json(record));
    session.print_json(document);
}

}  // namespace

void add_bench_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "bench",
                    "Measure time and rate: median and interquartile range, caches cold, only visible pairs counted",
                    {{"tessera bench --len 512,2048,8192 --causal bottom-right", "how time grows with the length"},
                     {"tessera bench --schedule all --pass forward,backward --len 1024", "every schedule, both passes"},
                     {"tessera bench --heads 32/8 --head-dim 128 --dtype fp32,bf16 -o results.jsonl",
                      "append records to a file, one JSON object per line"}});
    auto options = std::make_shared<BenchOptions>();
    options->shape.declare(*command, true);
    options->scores.declare(*command);
    options->how.declare(*command, true);
    command->add_option("--pass", options->passes, "forward (default), backward, or both: forward,backward")
        ->type_name("NAME");
    command->add_option("--repeat", options->repeat, "Measured calls of each, after one that is not counted; default 9")
        ->type_name("N");
    command->add_option("-o,--output", options->output, "Append the records to this file, one line of JSON each")
        ->type_name("FILE");
    command->callback([options, &session] { execute(*options, session); });
}

}  // namespace tessera::cli
