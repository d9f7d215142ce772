// SPDX-License-Identifier: Apache-2.0
//
// The C ABI of a Plan as data, and of the cost model.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "c_api.hpp"
#include "cuda/host/kernel_table.hpp"
#include "model/machine.hpp"
#include "tessera/predict.hpp"
#include "tessera/predict_context_parallel.hpp"
#include "tessera/predict_ranks.h"

namespace tessera {
namespace {

/// Kernels that were not chosen, of the plan's pass.
std::vector<const Refusal*> refusals_of(const Plan& plan) {
    std::vector<const Refusal*> result;
    for (const Refusal& r : plan.refused) {
        if (r.kernel->pass == plan.pass) result.push_back(&r);
    }
    return result;
}

const Machine& machine_named(const char* name) {
    if (const Machine* known = find_machine(name)) return *known;
    std::string names;
    for (const Machine& m : machines()) names += (names.empty() ? "" : ", ") + m.name;
    invalid("machine", fmt::format("expected one of {}, got \"{}\"", names, name));
}

/// Its numbers stand in the order of for_each_quantity().
void write_machine(const Machine& from, tessera_machine* to) {
    clear_struct("machine", to);
    to->kind = from.kind == MachineKind::gpu ? TESSERA_MACHINE_GPU : TESSERA_MACHINE_CPU;
    copy_text(to->name, from.name);
    copy_text(to->title, from.title);
    double* next = &to->capability;
    for_each_quantity(from, [&](const char*, const char*, const Quantity& quantity) { *next++ = quantity.value; });
}

std::string text_of(const char* name, std::span<const char> text) {
    const auto end = std::find(text.begin(), text.end(), '\0');
    if (end == text.end() || end == text.begin()) invalid(name, "expected a text that ends with a zero byte");
    return {text.begin(), end};
}

Machine read_machine(const tessera_machine* from) {
    expect_address("machine", from);
    expect_struct_size<tessera_machine>("machine", from->struct_size);
    if (from->kind != TESSERA_MACHINE_GPU && from->kind != TESSERA_MACHINE_CPU)
        invalid("kind", fmt::format("expected 0..1, got {}", from->kind));
    Machine to{.name = text_of("name", from->name), .title = text_of("title", from->title)};
    to.kind = from->kind == TESSERA_MACHINE_GPU ? MachineKind::gpu : MachineKind::cpu;
    const double* next = &from->capability;
    for_each_quantity(to, [&](const char*, const char*, Quantity& quantity) { quantity = {*next++, "the caller"}; });
    validate(to);
    return to;
}

/// The machine that the plan would run on.
const Machine& machine_of(const Plan& plan) {
    if (const Machine* known = machine_of_device(plan.target)) return *known;
    throw Error(ErrorCode::unsupported, "machine",
                fmt::format("the model does not know {}; name a machine that it knows", plan.target));
}

/// The schedule of the kernel that the options name, which must be one for the machine and the pass; nothing when they
/// name none.
std::optional<Schedule> schedule_of_kernel(const tessera_options& options, Pass pass, const Machine& machine) {
    if (options.kernel == nullptr) return std::nullopt;
    const auto all = kernels();
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const KernelInfo& k) { return k.name == options.kernel; });
    if (found == all.end())
        invalid("kernel", fmt::format("expected the name of a kernel of this build, got \"{}\"", options.kernel));
    const Backend backend = machine.kind == MachineKind::gpu ? Backend::cuda : Backend::cpu;
    if (found->pass != pass || found->backend != backend)
        throw Error(ErrorCode::unsupported, "kernel",
                    fmt::format("{} is no {} kernel for {}", found->name, name_of(pass), machine.name));
    return found->schedule;
}

/// The schedule of the kernel that plan() would choose on a GPU for a call on a cache, if the options name no schedule.
/// cuda.fa3.forward comes after the kernel of caches in that order, and runs where it is named.
std::optional<Schedule> schedule_of_cache(const Problem& problem, const tessera_options& options, Pass pass,
                                          const Machine& machine, const PredictOptions& how) {
    if (!problem.kv_lengths || options.schedule != TESSERA_ANY_SCHEDULE || machine.kind != MachineKind::gpu)
        return std::nullopt;
    for (const cuda::KernelEntry& entry : cuda::kernel_entries()) {
        if (entry.pass == pass && !cuda::refusal(entry, problem, how.tile, model::limits_of(machine)))
            return entry.schedule;
    }
    return std::nullopt;
}

/// The fastest prediction of the schedules asked for.
Prediction fastest(const Problem& problem, const tessera_options& options, Pass pass, const Machine& machine) {
    problem.validate();
    if (options.schedule < TESSERA_ANY_SCHEDULE || options.schedule > static_cast<int>(std::size(kSchedules)))
        invalid("schedule", fmt::format("expected 0..{}, got {}", std::size(kSchedules), options.schedule));
    PredictOptions how{.by = "tessera", .threads = options.threads};
    if (options.block_q != 0 || options.block_kv != 0) how.tile = Tile{options.block_q, options.block_kv};
    std::optional<Schedule> of_kernel = schedule_of_kernel(options, pass, machine);
    if (of_kernel && machine.kind == MachineKind::gpu) how.kernel = options.kernel;
    if (!of_kernel) of_kernel = schedule_of_cache(problem, options, pass, machine, how);
    std::optional<Prediction> best;
    std::string reasons;
    for (const Schedule schedule : kSchedules) {
        if (of_kernel && schedule != *of_kernel) continue;
        if (options.schedule != TESSERA_ANY_SCHEDULE && options.schedule != static_cast<int>(schedule) + 1) continue;
        if (const auto reason = refusal(problem, schedule, pass, machine, how)) {
            reasons += fmt::format("\n  {}: {}", name_of(schedule), *reason);
            continue;
        }
        Prediction p = predict(problem, schedule, pass, machine, how);
        if (!best || p.ms < best->ms) best = std::move(p);
    }
    if (!best) throw Error(ErrorCode::unsupported, "", "there is no prediction for this problem:" + reasons);
    return *best;
}

void write_prediction(const Prediction& from, const Machine& on, tessera_prediction* to) {
    clear_struct("prediction", to);
    to->schedule = static_cast<std::int32_t>(from.schedule) + 1;
    to->ms = from.ms;
    to->tflops = from.tflops;
    to->percent_of_bound = from.percent_of_bound;
    copy_text(to->bound, from.bound);
    copy_text(to->machine, on.name);
    if (to->struct_size >= sizeof(*to)) to->error = from.error;
}

template <class T>
void expect_prediction(const T* prediction, std::int32_t pass) {
    expect_address("prediction", prediction);
    expect_struct_size<T>("prediction", prediction->struct_size);
    if (pass != TESSERA_FORWARD && pass != TESSERA_BACKWARD)
        invalid("pass", fmt::format("expected 0..1, got {}", pass));
}

PredictContextParallelOptions read_ranks(const tessera_ranks* from, const Problem& problem) {
    expect_address("ranks", from);
    expect_struct_size<tessera_ranks>("ranks", from->struct_size);
    for (const auto& [name, flag] : {std::pair{"nccl", from->nccl}, std::pair{"o_residual", from->o_residual}})
        if (flag != 0 && flag != 1) invalid(name, fmt::format("expected 0..1, got {}", flag));
    if (problem.ragged != (from->lengths != nullptr))
        invalid("lengths", problem.ragged ? "expected those of the documents of a ragged problem, got null"
                                          : "expected null, since the problem is not ragged");
    if (from->documents < 0 || (from->documents > 0 && from->lengths == nullptr))
        invalid("documents", fmt::format("expected the number of lengths, got {}", from->documents));
    PredictContextParallelOptions to{.ranks = from->ranks, .link = *find_link("nvlink"), .steps = from->steps};
    to.copies = from->nccl == 0;
    to.kernels.by = "tessera";
    to.kernels.o_residual = from->o_residual == 1;
    for (std::int64_t i = 0; i < from->documents; ++i)
        to.kernels.sequences.emplace_back(from->lengths[i], from->lengths[i]);
    return to;
}

/// The newest schedule that the machine has for both passes, as `tessera roofline --gpus` takes it.
Schedule schedule_on_ranks(const Problem& problem, const Machine& machine) {
    const PredictOptions by_tessera{.by = "tessera"};
    for (const Pass pass : {Pass::forward, Pass::backward})
        if (refusal(problem, Schedule::fa3, pass, machine, by_tessera)) return Schedule::fa2;
    return Schedule::fa3;
}

void write_ranks_prediction(const ContextParallelPrediction& from, Schedule schedule, tessera_ranks_prediction* to) {
    clear_struct("prediction", to);
    to->schedule = static_cast<std::int32_t>(schedule) + 1;
    to->steps = from.steps;
    to->ms = from.ms;
    to->error = from.error;
    to->one_gpu_ms = from.one_gpu_ms;
    to->kernel_ms = from.kernel_ms;
    to->exchange_ms = from.exchange_ms;
    to->hidden_ms = from.hidden_ms;
    to->bytes_received = from.bytes_received;
    to->memory = from.memory;
}

}  // namespace
}  // namespace tessera

using namespace tessera;

tessera_status tessera_plan_query(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                  tessera_plan_info* info) {
    return guarded([&] {
        expect_address("info", info);
        expect_struct_size<tessera_plan_info>("info", info->struct_size);
        const Plan plan = plan_of(problem, options, pass);
        clear_struct("info", info);
        info->kernel = plan.kernel->name.c_str();
        info->block_q = plan.tile.block_q;
        info->block_kv = plan.tile.block_kv;
        info->workspace_bytes = plan.workspace_bytes;
        info->threads = plan.threads;
        info->refused = static_cast<std::int32_t>(refusals_of(plan).size());
        copy_text(info->target, plan.target);
        copy_text(info->matrix_unit, plan.matrix_unit);
        if (info->struct_size >= sizeof(*info)) info->o_residual = plan.o_residual ? 1 : 0;
    });
}

tessera_status tessera_plan_refusal(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                    int32_t index, tessera_refusal* refusal) {
    return guarded([&] {
        expect_address("refusal", refusal);
        expect_struct_size<tessera_refusal>("refusal", refusal->struct_size);
        const Plan plan = plan_of(problem, options, pass);
        const auto refused = refusals_of(plan);
        if (index < 0 || index >= static_cast<std::int32_t>(refused.size()))
            invalid("index", fmt::format("expected 0 or more and under {}, got {}", refused.size(), index));
        const Refusal& r = *refused[static_cast<std::size_t>(index)];
        clear_struct("refusal", refusal);
        refusal->kernel = r.kernel->name.c_str();
        refusal->capable = r.capable ? 1 : 0;
        copy_text(refusal->reason, r.reason);
    });
}

tessera_status tessera_predict(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                               const char* machine, tessera_prediction* prediction) {
    return guarded([&] {
        expect_prediction(prediction, pass);
        const Machine on = machine != nullptr ? machine_named(machine) : machine_of(plan_of(problem, options, pass));
        write_prediction(fastest(problem_of(problem), read_options(options), static_cast<Pass>(pass), on), on,
                         prediction);
    });
}

tessera_status tessera_predict_on(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                  const tessera_machine* machine, tessera_prediction* prediction) {
    return guarded([&] {
        expect_prediction(prediction, pass);
        const Machine on = read_machine(machine);
        write_prediction(fastest(problem_of(problem), read_options(options), static_cast<Pass>(pass), on), on,
                         prediction);
    });
}

tessera_status tessera_predict_ranks(const tessera_problem* problem, const tessera_ranks* ranks, int32_t pass,
                                     const char* machine, tessera_ranks_prediction* prediction) {
    return guarded([&] {
        expect_prediction(prediction, pass);
        expect_address("machine", machine);
        const Machine& on = machine_named(machine);
        const Problem whole = problem_of(problem);
        whole.validate();
        const PredictContextParallelOptions options = read_ranks(ranks, whole);
        const Schedule schedule = schedule_on_ranks(whole, on);
        write_ranks_prediction(predict_context_parallel(whole, schedule, static_cast<Pass>(pass), on, options),
                               schedule, prediction);
    });
}

int32_t tessera_machine_count(void) { return static_cast<std::int32_t>(machines().size()); }

tessera_status tessera_machine_at(int32_t index, tessera_machine* machine) {
    return guarded([&] {
        const std::int32_t count = tessera_machine_count();
        if (index < 0 || index >= count) invalid("index", fmt::format("expected 0..{}, got {}", count - 1, index));
        write_machine(machines()[static_cast<std::size_t>(index)], machine);
    });
}

tessera_status tessera_machine_named(const char* name, tessera_machine* machine) {
    return guarded([&] {
        expect_address("name", name);
        write_machine(machine_named(name), machine);
    });
}
