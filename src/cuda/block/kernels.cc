// SPDX-License-Identifier: Apache-2.0
#include "cuda/block/kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/arena.hpp"
#include "core/batch.hpp"
#include "core/decode_block_tensors.hpp"
#include "cuda/append/append.hpp"
#include "cuda/block/launch.hpp"
#include "cuda/decode/host/dispatch.hpp"
#include "cuda/decode/kernels.hpp"
#include "cuda/device.hpp"
#include "cuda/shared/arguments.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda::block {
namespace {

constexpr int kHopper = 90;
constexpr std::int64_t kMostWords = std::int64_t{1} << 40;  ///< more than any device has memory for

std::int64_t columns_of_output(const DecodeBlockProblem& p) { return p.heads_q * p.head_dim; }

/// The index in Shapes of the shape whose kernels run a Problem. Those of the chain take other head_dims too.
std::size_t shape_of(const DecodeBlockProblem& p) { return p.head_dim == HeadDim64::kConfig.head_dim ? 0 : 1; }
static_assert(Shapes::kConfigs.size() == 2);

/// Shared memory of a kernel that keeps rows of this many columns, and has up to `groups` groups of warps for splits.
SharedLayout layout_of(const DecodeBlockProblem& p, std::int64_t columns, int groups, int most_bytes) {
    const std::size_t shape = shape_of(p);
    const FixedBytes bytes = Shapes::call(shape, [](auto s) { return fixed_bytes<decltype(s)>(); });
    return {Shapes::kConfigs[shape], bytes.fixed, bytes.of_group, groups, p.batch, columns, most_bytes};
}
SharedLayout chain_layout(const DecodeBlockProblem& p, std::int64_t columns, int most_bytes) {
    return layout_of(p, columns, 0, most_bytes);
}

SharedLayout one_launch_layout(const DecodeBlockProblem& p, int most_bytes) {
    return layout_of(p, std::max(p.hidden, columns_of_output(p)), Shapes::kConfigs[shape_of(p)].groups(), most_bytes);
}

std::optional<std::string> refuse(const DecodeBlockProblem& p, const Device& device) {
    const DeviceProperties& properties = cuda::properties(device);
    if (capability(properties) < kHopper) {
        return fmt::format("needs compute capability 9.0 or later, device {} has {}.{}", device.index, properties.major,
                           properties.minor);
    }
    if (p.dtype != DType::bf16) return fmt::format("takes bf16 on CUDA, got {}", name_of(p.dtype));
    if (p.batch > Config::kMostBatch) {
        return fmt::format("takes up to {} sequences on CUDA, got {}", Config::kMostBatch, p.batch);
    }
    if (p.hidden % Config::kChunk != 0) {
        return fmt::format("takes hidden sizes that are multiples of {} on CUDA, got {}", Config::kChunk, p.hidden);
    }
    if (p.head_dim % Config::kUnitRows != 0 || columns_of_output(p) % Config::kChunk != 0) {
        return fmt::format(
            "takes head_dim that is a multiple of {}, and heads_q * head_dim that is one of {}, on "
            "CUDA; got {} and {}",
            Config::kUnitRows, Config::kChunk, p.head_dim, columns_of_output(p));
    }
    if (p.qkv_rows() > std::numeric_limits<int>::max() / 4) return fmt::format("got {} rows of w_qkv", p.qkv_rows());
    for (const std::int64_t columns : {p.hidden, columns_of_output(p)}) {
        if (chain_layout(p, columns, properties.shared_bytes).stages < Config::kLeastStagesOfProduct) {
            return fmt::format("{} rows of {} numbers leave too little of {} bytes of shared memory", p.batch, columns,
                               properties.shared_bytes);
        }
    }
    return std::nullopt;
}

/// The workspace of the one launch.
struct Words {
    Header* header;
    Word* qkv;
    Word* o;
    Word* ml_partial;
    Word* o_partial;

    Words(Arena& arena, const DecodeBlockProblem& p)
        : header(arena.take<Header>(1)),
          qkv(arena.take<Word>(p.batch, p.qkv_rows() / 2)),
          o(arena.take<Word>(p.batch, columns_of_output(p) / 2)),
          ml_partial(arena.take<Word>(p.batch, p.heads_q, decode::max_splits(p.attention()), 2)),
          o_partial(arena.take<Word>(p.batch, p.heads_q, decode::max_splits(p.attention()), p.head_dim)) {}
};

std::size_t workspace_bytes(const DecodeBlockProblem& p, const Device& /*device*/) {
    Arena arena;
    Words(arena, p);
    return arena.used();
}

std::optional<std::string> refuse_one_launch(const DecodeBlockProblem& p, const Device& device) {
    if (Shapes::kConfigs[shape_of(p)].head_dim != p.head_dim) {
        return fmt::format("it takes a head_dim of 64 or 128, got {}", p.head_dim);
    }
    const DeviceProperties& properties = cuda::properties(device);
    if (one_launch_layout(p, properties.shared_bytes).stages < Config::kLeastStages) {
        return fmt::format("{} rows leave too little of {} bytes of shared memory", p.batch, properties.shared_bytes);
    }
    const std::int64_t tiles = (p.heads_q / p.heads_kv + Config::kRowsOfTile - 1) / Config::kRowsOfTile;
    const std::int64_t items = saturating_product(decode::most_items(p.attention()), tiles);
    if (items > std::numeric_limits<int>::max() / 2) return fmt::format("its keys have {} splits", items);
    if (workspace_bytes(p, device) / sizeof(Word) > static_cast<std::size_t>(kMostWords)) {
        return "it would need more workspace than a device has";
    }
    return std::nullopt;
}

/// Why 16 bytes of a row can't be read at once; empty if they can.
std::string refuse_rows(const TensorView& t, int bytes) {
    const std::int64_t elements = bytes / static_cast<std::int64_t>(size_of(t.dtype));
    if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(bytes) != 0) {
        return fmt::format("expected an address that is a multiple of {} bytes on CUDA, got {}", bytes,
                           static_cast<const void*>(t.data));
    }
    if (t.rank == 2 && step(t, 0) % elements != 0) {
        return fmt::format("expected rows at multiples of {} elements on CUDA, got {}", elements, t.strides[0]);
    }
    const auto last = static_cast<std::size_t>(t.rank - 1);
    if (t.shape[last] > 1 && t.strides[last] != 1) {
        return fmt::format("expected a last stride of 1 on CUDA, got {}", t.strides[last]);
    }
    return "";
}

std::optional<TensorRefusal> refuse_tensors(const DecodeBlockProblem& /*problem*/, const DecodeBlockArgs& args) {
    struct Aligned {
        const char* name;
        const TensorView* tensor;
        int bytes;
    };
    for (const Aligned& a :
         {Aligned{"x", &args.x, 16}, Aligned{"norm", &args.norm, 16}, Aligned{"w_qkv", &args.w_qkv, 16},
          Aligned{"w_o", &args.w_o, 16}, Aligned{"residual", &args.residual, 4}, Aligned{"out", &args.out, 4},
          Aligned{"o", &args.o, 16}}) {
        if (!a.tensor->given() || a.tensor->size() == 0) continue;
        if (std::string reason = refuse_rows(*a.tensor, a.bytes); !reason.empty()) {
            return TensorRefusal{a.name, std::move(reason)};
        }
    }
    return std::nullopt;
}

void expect_memory(const DecodeBlockArgs& a, std::span<std::byte> workspace, const Device& device) {
    if (!workspace.empty()) expect_device_memory("workspace", workspace.data(), device);
    for (const DecodeBlockTensor& t : kDecodeBlockTensors) expect_device_memory(t.name, a.*t.view, device);
}

Activations rows_of_matrix(const TensorView& t) {
    return {static_cast<char*>(t.data), step(t, 0) * static_cast<std::int64_t>(size_of(t.dtype))};
}

Matrix matrix_of(const TensorView& weights, const TensorView& bias) {
    Matrix matrix{.data = static_cast<const char*>(weights.data),
                  .row_bytes = step(weights, 0) * 2,
                  .rows = static_cast<int>(weights.shape[0]),
                  .columns = static_cast<int>(weights.shape[1])};
    if (bias.given()) {
        matrix.bias = static_cast<const char*>(bias.data);
        matrix.bias_step = step(bias, 0);
    }
    return matrix;
}

/// The arguments that all ways share.
Launch products_of(const DecodeBlockCall& call) {
    const DecodeBlockArgs& a = call.args;
    return {.batch = static_cast<int>(call.problem.batch),
            .x = rows_of_matrix(a.x),
            .norm = static_cast<const char*>(a.norm.data),
            .norm_fp32 = a.norm.dtype == DType::fp32,
            .norm_eps = static_cast<float>(call.problem.norm_eps),
            .qkv = matrix_of(a.w_qkv, a.b_qkv),
            .output = matrix_of(a.w_o, a.b_o),
            .residual = rows_of_matrix(a.residual),
            .result = rows_of_matrix(a.out)};
}

/// Heads of a row of qkv that lies nowhere: the one launch has it in words.
TensorView heads_in_words(const DecodeBlockProblem& p, std::int64_t heads, const Device& device) {
    return strided_view(nullptr, p.dtype, {p.batch, 1, heads, p.head_dim}, {p.qkv_rows(), p.qkv_rows(), p.head_dim, 1},
                        device);
}

append_rows::Launch append_of(const DecodeBlockCall& call) {
    const DecodeBlockProblem& p = call.problem;
    const DecodeBlockArgs& a = call.args;
    const TensorView q = heads_in_words(p, p.heads_q, call.device), kv = heads_in_words(p, p.heads_kv, call.device);
    const AppendArgs args{.k = kv,
                          .v = kv,
                          .k_cache = a.k_cache,
                          .v_cache = a.v_cache,
                          .kv_lengths = a.kv_lengths,
                          .page_table = a.page_table,
                          .cache_batch_index = a.cache_batch_index,
                          .rotary_cos = a.rotary_cos,
                          .rotary_sin = a.rotary_sin,
                          .positions = a.positions,
                          .q = q,
                          .q_out = q,
                          .k_norm = a.k_norm,
                          .q_norm = a.q_norm};
    return append_rows::launch_of(args, {.rotary_interleaved = p.rotary_interleaved, .norm_eps = p.norm_eps});
}

decode::Launch attention_of(const DecodeBlockCall& call) {
    const DecodeBlockArgs& a = call.args;
    Plan plan;
    plan.problem = call.problem.attention();
    plan.device = call.device;
    TensorView o = a.o, lse = a.lse;
    if (o.given()) {
        o.rank = 4;
        o.shape = {call.problem.batch, 1, call.problem.heads_q, call.problem.head_dim};
        o.strides = {a.o.strides[0], a.o.strides[0], a.o.strides[1], a.o.strides[2]};
    }
    if (lse.given()) lse.rank = 3, lse.shape[2] = 1, lse.strides[2] = 1;
    const ForwardArgs args{.q = heads_in_words(call.problem, call.problem.heads_q, call.device),
                           .k = a.k_cache,
                           .v = a.v_cache,
                           .o = o,
                           .lse = lse,
                           .sinks = a.sinks,
                           .kv_lengths = a.kv_lengths,
                           .page_table = a.page_table,
                           .cache_batch_index = a.cache_batch_index,
                           .left_padding = a.left_padding};
    const ForwardCall forward{.plan = plan,
                              .args = args,
                              .workspace = {},
                              .parallel_for = {},
                              .counters = nullptr,
                              .stream = call.stream,
                              .observer = nullptr,
                              .skip_memory_check = true};
    return decode::launch_of(forward, forward_params(forward));
}

/// The number of thread blocks: one for each unit of rows, at most one a multiprocessor.
int chain_blocks(const Matrix& matrix, const Device& device) {
    return std::min(matrix.rows / Config::kUnitRows, properties(device).multiprocessors);
}

void norm_and_qkv(const DecodeBlockCall& call, const TensorView& qkv, const TensorView& lengths) {
    Launch launch = products_of(call);
    launch.qkv_rows = rows_of_matrix(qkv);
    launch.kv_lengths = static_cast<const std::int32_t*>(call.args.kv_lengths.data);
    launch.kv_lengths_step = step(call.args.kv_lengths, 0);
    launch.lengths = static_cast<std::int32_t*>(lengths.data);
    launch.layout = chain_layout(call.problem, call.problem.hidden, properties(call.device).shared_bytes);
    const CurrentDevice current(call.device);
    const cudaError_t status = Shapes::call(shape_of(call.problem), [&](auto shape) {
        return start_qkv<decltype(shape)>(launch, chain_blocks(launch.qkv, call.device),
                                          static_cast<cudaStream_t>(call.stream));
    });
    check(status, "decode_block, norm and GEMM");
}

void output(const DecodeBlockCall& call, const TensorView& o) {
    Launch launch = products_of(call);
    launch.o_rows = rows_of_matrix(o);
    launch.layout = chain_layout(call.problem, launch.output.columns, properties(call.device).shared_bytes);
    const CurrentDevice current(call.device);
    const cudaError_t status = Shapes::call(shape_of(call.problem), [&](auto shape) {
        return start_output<decltype(shape)>(launch, chain_blocks(launch.output, call.device),
                                             static_cast<cudaStream_t>(call.stream));
    });
    check(status, "decode_block, output GEMM");
}

void one_launch_of_call(const DecodeBlockCall& call, std::span<std::byte> workspace) {
    one_launch(call, workspace, {});
}

}  // namespace

std::int64_t marks_of_launch(const Device& device) {
    return properties(device).multiprocessors * static_cast<std::int64_t>(Mark::count);
}

void one_launch(const DecodeBlockCall& call, std::span<std::byte> workspace, const Options& options) {
    const DecodeBlockProblem& p = call.problem;
    Launch launch = products_of(call);
    launch.attention = attention_of(call);
    launch.append = append_of(call);
    Arena arena(workspace);
    const Words words(arena, p);
    launch.header = words.header;
    launch.qkv_words = words.qkv;
    launch.o_words = words.o;
    launch.ml_partial = words.ml_partial;
    launch.o_partial = words.o_partial;
    launch.max_splits = launch.attention.max_splits;
    launch.marks = options.marks;
    const DeviceProperties& device = properties(call.device);
    launch.layout = one_launch_layout(p, options.shared_bytes > 0 ? options.shared_bytes : device.shared_bytes);
    const int blocks = options.blocks > 0 ? options.blocks : device.multiprocessors;
    const CurrentDevice current(call.device);
    const cudaError_t status = Shapes::call(shape_of(p), [&](auto shape) {
        return start_block<decltype(shape)>(launch, blocks, call.early_weights, static_cast<cudaStream_t>(call.stream));
    });
    check(status, "decode_block");
}

const DecodeBlockKernels& kernels() {
    static const DecodeBlockKernels all{.refuse = refuse,
                                        .refuse_tensors = refuse_tensors,
                                        .expect_memory = expect_memory,
                                        .norm_and_qkv = norm_and_qkv,
                                        .output = output,
                                        .refuse_one_launch = refuse_one_launch,
                                        .counter_bytes = workspace_bytes,
                                        .workspace_bytes = workspace_bytes,
                                        .one_launch = one_launch_of_call};
    return all;
}

}  // namespace tessera::cuda::block
