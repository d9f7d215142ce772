// SPDX-License-Identifier: Apache-2.0
//
// The C ABI calls the C++ API: it reads the structs, and turns exceptions into a status and a message.
#include "tessera/tessera.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "c_api.hpp"
#include "c_api_fields.hpp"
#include "check_call.hpp"
#include "core/append_tensors.hpp"
#include "core/arguments.hpp"
#include "core/decode_block_fields.hpp"
#include "core/decode_block_tensors.hpp"
#include "core/problem_fields.hpp"

namespace tessera {
namespace {

static_assert(TESSERA_OK == int(ErrorCode::ok) && TESSERA_INVALID_ARGUMENT == int(ErrorCode::invalid_argument) &&
              TESSERA_UNSUPPORTED == int(ErrorCode::unsupported) && TESSERA_CANCELLED == int(ErrorCode::cancelled) &&
              TESSERA_WORKSPACE_TOO_SMALL == int(ErrorCode::workspace_too_small) &&
              TESSERA_OUT_OF_MEMORY == int(ErrorCode::out_of_memory) &&
              TESSERA_CANNOT_OPEN == int(ErrorCode::cannot_open) && TESSERA_BAD_DATA == int(ErrorCode::bad_data) &&
              TESSERA_CANNOT_WRITE == int(ErrorCode::cannot_write) && TESSERA_INTERNAL == int(ErrorCode::internal) &&
              TESSERA_DEVICE_UNAVAILABLE == int(ErrorCode::device_unavailable));
static_assert(TESSERA_FP64 == int(DType::fp64) && TESSERA_FP32 == int(DType::fp32) &&
              TESSERA_FP16 == int(DType::fp16) && TESSERA_BF16 == int(DType::bf16) &&
              TESSERA_INT32 == int(DType::int32) && TESSERA_INT64 == int(DType::int64) &&
              TESSERA_INT8 == int(DType::int8));
static_assert(TESSERA_CPU == int(DeviceType::cpu) && TESSERA_CUDA == int(DeviceType::cuda));
static_assert(TESSERA_FORWARD == int(Pass::forward) && TESSERA_BACKWARD == int(Pass::backward));
static_assert(TESSERA_CAUSAL_NONE == int(Causal::none) && TESSERA_CAUSAL_TOP_LEFT == int(Causal::top_left) &&
              TESSERA_CAUSAL_BOTTOM_RIGHT == int(Causal::bottom_right));
// Backend and schedule are one higher in C, where 0 stands for "any".
static_assert(TESSERA_BACKEND_CPU == int(Backend::cpu) + 1 && TESSERA_BACKEND_CUDA == int(Backend::cuda) + 1 &&
              TESSERA_BACKEND_REFERENCE == int(Backend::reference) + 1);
static_assert(TESSERA_SCHEDULE_STANDARD == int(Schedule::standard) + 1 &&
              TESSERA_SCHEDULE_FA1 == int(Schedule::fa1) + 1 && TESSERA_SCHEDULE_FA2 == int(Schedule::fa2) + 1 &&
              TESSERA_SCHEDULE_FA3 == int(Schedule::fa3) + 1);
static_assert(TESSERA_MAX_RANK == TensorView::kMaxRank && TESSERA_UNBOUNDED == unbounded &&
              TESSERA_WORKSPACE_ALIGNMENT == Plan::kWorkspaceAlignment);

/// Fixed memory, so that running out of memory can be reported too.
struct LastError {
    char message[4096];
    char argument[64];
};
thread_local LastError last_error{};

Problem read_problem(const tessera_problem* from) {
    const tessera_problem p = read_struct("problem", from);
    Problem problem;
#define TESSERA_READ(kind, field, member) problem.member = read_##kind(#field, p.field);
    TESSERA_PROBLEM_FIELDS(TESSERA_READ)
#undef TESSERA_READ
    return problem;
}

tessera_options options_of(const tessera_options* from) {
    if (from == nullptr) return {.struct_size = sizeof(tessera_options)};
    const tessera_options options = read_struct("options", from);
    if (options.reserved != 0) invalid("reserved", fmt::format("expected 0, got {}", options.reserved));
    return options;
}

Plan plan_of(const tessera_problem* problem, const tessera_options& o, Pass pass, std::optional<Device> device = {}) {
    PlanOptions options{.pass = pass, .threads = o.threads, .device = device};
    if (o.backend != TESSERA_ANY_BACKEND) options.backend = enum_value("backend", o.backend, Backend::reference, 1);
    if (o.schedule != TESSERA_ANY_SCHEDULE)
        options.schedule = enum_value("schedule", o.schedule, *std::rbegin(kSchedules), 1);
    if (o.kernel != nullptr) options.kernel = o.kernel;
    if (o.block_q != 0 || o.block_kv != 0) options.tile = Tile{o.block_q, o.block_kv};
    return plan(read_problem(problem), options);
}

ForwardArgs args_of(const tessera_forward_args* from) {
    const tessera_forward_args a = read_struct("args", from);
    ForwardArgs args;
#define TESSERA_READ(member, name, ...) args.member = tensor_of(name, a.member);
    TESSERA_FORWARD_TENSORS(TESSERA_READ)
    return args;
}

BackwardArgs args_of(const tessera_backward_args* from) {
    const tessera_backward_args a = read_struct("args", from);
    BackwardArgs args;
    TESSERA_BACKWARD_TENSORS(TESSERA_READ)
#undef TESSERA_READ
    return args;
}

template <class Args, class From>
constexpr bool kAllTensorsListed = sizeof(From) ==
                                   sizeof(std::size_t) + std::size(kTensors<Args>) * sizeof(tessera_tensor);
static_assert(kAllTensorsListed<ForwardArgs, tessera_forward_args>);
static_assert(kAllTensorsListed<BackwardArgs, tessera_backward_args>);

/// The device of a call with TESSERA_BACKEND_CUDA, which is that of q. Nothing for the host, or when q is elsewhere or
/// wrong.
template <class Args>
std::optional<Device> device_of(const tessera_options& options, const Args* args) {
    if (options.backend != TESSERA_BACKEND_CUDA || args == nullptr || args->struct_size < kFirstSize<Args>) return {};
    if (args->q.device_type != TESSERA_CUDA || args->q.device_index < 0) return {};
    return Device{DeviceType::cuda, args->q.device_index};
}

/// One parallel loop handed to the caller's parallel_for. Exceptions of the body stop here and are rethrown after it.
class CallerLoop {
 public:
    CallerLoop(std::int64_t tasks, int workers, const TaskBody& body) : tasks_(tasks), workers_(workers), body_(body) {}

    void run(tessera_parallel_for parallel_for, void* context) {
        parallel_for(
            context, tasks_, workers_,
            [](void* self, std::int64_t task, std::int32_t worker) {
                static_cast<CallerLoop*>(self)->run_task(task, worker);
            },
            this);
        if (exception_) std::rethrow_exception(exception_);
        if (done_ != tasks_)
            invalid("parallel_for", fmt::format("expected a function that runs all {} tasks, got one that ran {}",
                                                tasks_, done_.load()));
    }

 private:
    void run_task(std::int64_t task, std::int32_t worker) noexcept {
        try {
            if (task < 0 || task >= tasks_)
                invalid("parallel_for", fmt::format("expected tasks under {}, got {}", tasks_, task));
            if (worker < 0 || worker >= workers_) {
                invalid("parallel_for", fmt::format("expected workers under {}, got {}", workers_, worker));
            }
            body_(task, worker);
            ++done_;
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!exception_) exception_ = std::current_exception();
        }
    }

    std::int64_t tasks_;
    int workers_;
    const TaskBody& body_;
    std::atomic<std::int64_t> done_{0};
    std::mutex mutex_;
    std::exception_ptr exception_;
};

std::span<std::byte> bytes_of(void* workspace, std::size_t bytes) {
    if (workspace == nullptr && bytes > 0) expect_address("workspace", workspace);
    return {static_cast<std::byte*>(workspace), bytes};
}

}  // namespace

tessera_status fail(ErrorCode code, const char* message, const char* argument) noexcept {
    // Two fields of the struct are one field of the C++ Problem. The message begins with the argument's name.
    const bool dropout = std::string_view(argument) == "dropout";
    const char* const named = dropout ? "dropout_probability" : argument;
    copy_text(last_error.message, message);
    if (dropout && std::string_view(message).starts_with("dropout:")) {
        std::snprintf(last_error.message, sizeof last_error.message, "%s%s", named, message + std::strlen(argument));
    }
    copy_text(last_error.argument, named);
    return static_cast<tessera_status>(code);
}

Plan plan_of(const tessera_problem* problem, const tessera_options* options, std::int32_t pass) {
    return plan_of(problem, options_of(options), enum_value("pass", pass, Pass::backward));
}

Problem problem_of(const tessera_problem* problem) { return read_problem(problem); }

tessera_options read_options(const tessera_options* options) { return options_of(options); }

TensorView tensor_of(const char* name, const tessera_tensor& t) {
    if (t.rank == 0) return {};
    if (t.rank < 0 || t.rank > TESSERA_MAX_RANK) {
        invalid(name, fmt::format("expected rank 0..{}, got {}", TESSERA_MAX_RANK, t.rank));
    }
    TensorView view{.data = t.data,
                    .dtype = enum_value(name, t.dtype, DType::int8, 0, "dtype "),
                    .rank = t.rank,
                    .device = {enum_value(name, t.device_type, DeviceType::cuda, 0, "device_type "), t.device_index}};
    std::copy_n(t.shape, t.rank, view.shape.begin());
    std::copy_n(t.strides, t.rank, view.strides.begin());
    return view;
}

Execution execution_of(const tessera_options& options, void* stream) {
    Execution how{.stream = stream};
    if (options.parallel_for != nullptr) {
        how.parallel_for = [parallel_for = options.parallel_for, context = options.parallel_for_context](
                               std::int64_t tasks, int workers, const TaskBody& body) {
            CallerLoop(tasks, workers, body).run(parallel_for, context);
        };
    }
    return how;
}

}  // namespace tessera

using namespace tessera;

const char* tessera_version(void) { return TESSERA_VERSION; }

const char* tessera_last_error(void) { return last_error.message; }
const char* tessera_last_error_argument(void) { return last_error.argument; }

const char* tessera_struct_fields(const char* name) {
    // The kinds of TESSERA_PROBLEM_FIELDS, and of the other structs' fields, as the names of C types.
#define TESSERA_TYPE_dtype "int32"
#define TESSERA_TYPE_causal "int32"
#define TESSERA_TYPE_flag "int32"
#define TESSERA_TYPE_size "int64"
#define TESSERA_TYPE_number "double"
#define TESSERA_TYPE_scale "double"
#define TESSERA_TYPE_seed "uint64"
#define TESSERA_FIELD(kind, field, ...) " " #field ":" TESSERA_TYPE_##kind
#define TESSERA_TENSOR(member, ...) " " #member ":tensor"
    constexpr std::pair<std::string_view, const char*> kStructs[] = {
        {"tessera_problem", "struct_size:size_t" TESSERA_PROBLEM_FIELDS(TESSERA_FIELD)},
        {"tessera_forward_args", "struct_size:size_t" TESSERA_FORWARD_TENSORS(TESSERA_TENSOR)},
        {"tessera_backward_args", "struct_size:size_t" TESSERA_BACKWARD_TENSORS(TESSERA_TENSOR)},
        {"tessera_append_args", "struct_size:size_t rotary_interleaved:int32 reserved:int32 norm_eps:double"  //
         TESSERA_APPEND_TENSORS(TESSERA_TENSOR)},
        {"tessera_decode_block_problem", "struct_size:size_t" TESSERA_DECODE_BLOCK_FIELDS(
                                             TESSERA_FIELD) " way:int32 early_weights:int32 reserved:int32"},
        {"tessera_decode_block_args", "struct_size:size_t" TESSERA_DECODE_BLOCK_TENSORS(TESSERA_TENSOR)}};
    for (const auto& [known, fields] : kStructs) {
        if (name != nullptr && known == name) return fields;
    }
    return nullptr;
}

size_t tessera_kernel_count(void) {
    std::size_t count = 0;
    guarded([&] { count = kernels().size(); });
    return count;
}

const char* tessera_kernel_name(size_t index) {
    const char* name = nullptr;
    guarded([&] { name = index < kernels().size() ? kernels()[index].name.c_str() : nullptr; });
    return name;
}

tessera_status tessera_problem_init(tessera_problem* problem, size_t struct_size) {
    return guarded([&] {
        expect_address("problem", problem);
        expect_struct_size<tessera_problem>("", struct_size);
        const Problem defaults;
        tessera_problem result{};
        result.struct_size = struct_size;
#define TESSERA_WRITE(kind, field, member) result.field = write_##kind(defaults.member);
        TESSERA_PROBLEM_FIELDS(TESSERA_WRITE)
#undef TESSERA_WRITE
        std::memset(static_cast<void*>(problem), 0, struct_size);
        std::memcpy(static_cast<void*>(problem), &result, std::min(struct_size, sizeof result));
    });
}

tessera_status tessera_workspace_bytes(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                       size_t* bytes) {
    return guarded([&] {
        expect_address("bytes", bytes);
        *bytes = plan_of(problem, options_of(options), enum_value("pass", pass, Pass::backward)).workspace_bytes;
    });
}

tessera_status tessera_plan_describe(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                     char* buffer, size_t size, size_t* needed) {
    return guarded([&] {
        if (size > 0) expect_address("buffer", buffer);
        const std::string text =
            plan_of(problem, options_of(options), enum_value("pass", pass, Pass::backward)).describe();
        if (size > 0) {
            const std::size_t length = std::min(text.size(), size - 1);
            std::memcpy(buffer, text.data(), length);
            buffer[length] = '\0';
        }
        if (needed != nullptr) *needed = text.size() + 1;
    });
}

tessera_status tessera_check_forward(const tessera_problem* problem, const tessera_options* options,
                                     const tessera_forward_args* args) {
    return guarded([&] {
        const tessera_options how = options_of(options);
        check_forward(plan_of(problem, how, Pass::forward, device_of(how, args)), args_of(args));
    });
}

tessera_status tessera_forward(const tessera_problem* problem, const tessera_options* options,
                               const tessera_forward_args* args, void* workspace, size_t workspace_bytes,
                               void* stream) {
    return guarded([&] {
        const tessera_options how = options_of(options);
        const Plan chosen = plan_of(problem, how, Pass::forward, device_of(how, args));
        const ForwardArgs tensors = args_of(args);
        forward(chosen, tensors, bytes_of(workspace, workspace_bytes), execution_of(how, stream));
    });
}

tessera_status tessera_backward(const tessera_problem* problem, const tessera_options* options,
                                const tessera_backward_args* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
    return guarded([&] {
        const tessera_options how = options_of(options);
        const Plan chosen = plan_of(problem, how, Pass::backward, device_of(how, args));
        const BackwardArgs tensors = args_of(args);
        backward(chosen, tensors, bytes_of(workspace, workspace_bytes), execution_of(how, stream));
    });
}
