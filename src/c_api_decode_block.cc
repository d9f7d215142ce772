// SPDX-License-Identifier: Apache-2.0
//
// The C ABI of decode_block().
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "c_api.hpp"
#include "c_api_fields.hpp"
#include "core/decode_block_fields.hpp"
#include "core/decode_block_tensors.hpp"
#include "tessera/decode_block.h"

namespace tessera {
namespace {

static_assert(sizeof(tessera_decode_block_args) ==
              offsetof(tessera_decode_block_args, x) + kDecodeBlockTensors.size() * sizeof(tessera_tensor));
// A way is one higher in C, where 0 stands for "any".
static_assert(TESSERA_ONE_LAUNCH == int(DecodeBlockWay::one_launch) + 1 &&
              TESSERA_CHAIN == int(DecodeBlockWay::chain) + 1);

DecodeBlockPlan plan_of_block(const tessera_decode_block_problem* from, const tessera_options& run,
                              const Device& device) {
    const tessera_decode_block_problem p = read_struct("problem", from);
    DecodeBlockProblem problem;
#define TESSERA_READ(kind, field) problem.field = read_##kind(#field, p.field);
    TESSERA_DECODE_BLOCK_FIELDS(TESSERA_READ)
#undef TESSERA_READ
    if (p.reserved != 0) invalid("reserved", fmt::format("expected 0, got {}", p.reserved));
    DecodeBlockOptions options{
        .device = device, .threads = run.threads, .early_weights = read_flag("early_weights", p.early_weights)};
    if (p.way != TESSERA_ANY_WAY) options.way = enum_value("way", p.way, DecodeBlockWay::chain, 1);
    return decode_block_plan(problem, options);
}

}  // namespace
}  // namespace tessera

using namespace tessera;

tessera_status tessera_decode_block_problem_init(tessera_decode_block_problem* problem, size_t struct_size) {
    return guarded([&] {
        expect_address("problem", problem);
        expect_struct_size<tessera_decode_block_problem>("", struct_size);
        const DecodeBlockProblem defaults;
        tessera_decode_block_problem result{};
        result.struct_size = struct_size;
#define TESSERA_WRITE(kind, field) result.field = write_##kind(defaults.field);
        TESSERA_DECODE_BLOCK_FIELDS(TESSERA_WRITE)
#undef TESSERA_WRITE
        std::memset(static_cast<void*>(problem), 0, struct_size);
        std::memcpy(static_cast<void*>(problem), &result, std::min(struct_size, sizeof result));
    });
}

tessera_status tessera_decode_block_query(const tessera_decode_block_problem* problem, const tessera_options* options,
                                          int32_t device_type, int32_t device_index, tessera_decode_block_info* info) {
    return guarded([&] {
        expect_address("info", info);
        expect_struct_size<tessera_decode_block_info>("info", info->struct_size);
        const Device device{enum_value("device_type", device_type, DeviceType::cuda), device_index};
        const DecodeBlockPlan plan = plan_of_block(problem, read_options(options), device);
        clear_struct("info", info);
        info->workspace_bytes = plan.workspace_bytes;
        info->counter_bytes = plan.counter_bytes;
        info->attention = plan.attention.kernel->name.c_str();
        info->way = static_cast<std::int32_t>(plan.way) + 1;
        info->threads = plan.threads;
        copy_text(info->refused, plan.refused);
    });
}

tessera_status tessera_decode_block(const tessera_decode_block_problem* problem, const tessera_options* options,
                                    const tessera_decode_block_args* args, void* workspace, size_t workspace_bytes,
                                    void* stream) {
    return guarded([&] {
        const tessera_decode_block_args a = read_struct("args", args);
        DecodeBlockArgs tensors;
#define TESSERA_READ(member) tensors.member = tensor_of(#member, a.member);
        TESSERA_DECODE_BLOCK_TENSORS(TESSERA_READ)
#undef TESSERA_READ
        const tessera_options run = read_options(options);
        const DecodeBlockPlan plan = plan_of_block(problem, run, tensors.x.device);
        if (workspace == nullptr && workspace_bytes > 0) expect_address("workspace", workspace);
        decode_block(plan, tensors, {static_cast<std::byte*>(workspace), workspace_bytes}, execution_of(run, stream));
    });
}
