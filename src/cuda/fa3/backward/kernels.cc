// SPDX-License-Identifier: Apache-2.0
#include "cuda/fa3/backward/kernels.hpp"

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/arena.hpp"
#include "cuda/device.hpp"
#include "cuda/fa3/backward/launch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/dq_order.hpp"
#include "cuda/shared/arguments.hpp"
#include "cuda/shared/tensor_map.hpp"

namespace tessera::cuda::fa3 {
namespace {

using backward::Launch;

constexpr int kStoredRows = 16;  // of dK and dV, by one warp

backward::Config config_of(const Problem& p) { return backward::Shapes::kConfigs[*backward::shape_of(p)]; }

/// Blocks of queries of one head, over all sequences (backward::first_block_q).
std::int64_t blocks_q(const Problem& p, std::int64_t block) {
    return p.ragged ? p.total_q / block + p.batch : p.batch * ((p.len_q + block - 1) / block);
}

/// The same of keys (backward::first_block_kv).
std::int64_t all_blocks_kv(const Problem& p, std::int64_t block) {
    return p.ragged ? p.total_kv / block + p.batch : p.batch * ((p.len_kv + block - 1) / block);
}

/// Blocks of keys of one head of one sequence, at most.
std::int64_t blocks_kv(const Problem& p, std::int64_t block) { return (p.len_kv + block - 1) / block; }

std::optional<std::string> refuse(const Problem& problem, const std::optional<Tile>& tile, const Device& device) {
    return refusal(Schedule::fa3, Pass::backward, problem, tile, limits(device));
}

/// What a call's workspace is cut into.
struct Memory {
    backward::Workspace workspace;
    backward::Limits* limits;  // [batch, heads_kv, shares], in fp16
    std::size_t cleared;       // bytes that are 0 before the first kernel
};

Memory lay_out(Arena& arena, const Problem& p) {
    const backward::Config c = config_of(p);
    const std::int64_t blocks = p.heads_q * blocks_q(p, c.block_q);
    const std::int64_t sums = backward::sums_of_dq(p);
    const std::int64_t shares = backward::shares_of_groups(p);
    backward::Workspace w{};
    w.start = arena.take<backward::Start>(1);
    backward::Limits* const limits =
        p.dtype == DType::fp16 ? arena.take<backward::Limits>(p.batch, p.heads_kv, shares) : nullptr;
    const std::size_t cleared = arena.used();
    w.stats = arena.take<backward::RowStats>(blocks, c.row_stats());
    w.counters = arena.take<int>(sums, blocks, backward::Config::kConsumers);
    w.dq = arena.take<float>(sums, blocks, std::int64_t{c.block_q}, std::int64_t{c.head_dim});
    if (shares > 1) {
        const std::int64_t keys = p.heads_kv * all_blocks_kv(p, c.block_kv) * c.block_kv;
        w.dk = arena.take<float>(shares, keys, std::int64_t{c.head_dim});
        w.dv = arena.take<float>(shares, keys, std::int64_t{c.head_dim_v});
    }
    return {w, limits, cleared};
}

bool has_queries(const Problem& p) { return p.rows_q() > 0 && p.heads_q > 0; }
bool has_keys(const Problem& p) { return p.rows_kv() > 0 && p.heads_kv > 0; }

std::size_t workspace_bytes(const Plan& plan) {
    Arena arena;
    lay_out(arena, plan.problem);
    return arena.used();
}

/// With dropout, a row that sees one key has dS = 0 only where delta is summed: O = V / (1 - p) is no number of 16 bits
/// and a byte.
bool uses_o_residual(const Problem& p) { return p.dropout.probability == 0; }

/// From so many blocks of keys on the last of them to add make dQ: a step of theirs takes longer, but it is soon one of
/// many that run beside it, and dq_kernel would read what is not in a cache any more.
constexpr std::int64_t kManyBlocks = 1024;

/// How blocks of keys start: in parts (order.hpp), of some heads at a time.
struct Rounds {
    int parts, part_kv, heads;
};

/// Few blocks without a mask are a part each, so that the heads take turns and few blocks wait for each other at the
/// start; so are those that rise, and those by roles under a causal mask, so that the longest of many heads come first.
/// Heads at a time: as many as the second-level cache holds, and blocks for all multiprocessors some times over, or all
/// of them where they have more blocks than kMostInRounds.
constexpr int kBlocksAtOnce = 512, kMostInRounds = 32;

/// Heads whose rows the second-level cache holds.
std::int64_t cached_heads(const Problem& p) {
    constexpr std::int64_t kBytes = std::int64_t{24} << 20;
    const std::int64_t of_head =
        p.len_q * (4 * p.head_dim + 2 * (p.head_dim + p.head_dim_v)) + p.len_kv * 4 * (p.head_dim + p.head_dim_v);
    return std::max<std::int64_t>(kBytes / std::max<std::int64_t>(of_head, 1), 1);
}

/// And at least so many that there are kBlocksAtOnce, of `blocks` each.
std::int64_t some_heads(const Problem& p, int blocks) {
    return std::max<std::int64_t>(cached_heads(p), kBlocksAtOnce / std::max(blocks, 1));
}

/// Heads whose blocks come by length. The fewer, the more blocks are of one head and have its rows of Q and dO in the
/// second-level cache; the more, the better the longest blocks are dealt out. All of them, where they have few blocks.
int heads_in_turn(int blocks, int heads, bool roles) {
    if (!roles && std::int64_t{heads} * blocks <= backward::kFewestToShare) return heads;
    const int few = roles ? 4 : std::clamp(1024 / std::max(blocks, 1), 4, 8);
    return std::max(few, 128 / std::max(blocks, 1));
}

Rounds rounds_of(const Problem& p, const backward::Config& c, int heads) {
    const int most = static_cast<int>(blocks_kv(p, c.block_kv));
    const auto rounds = [&](int parts, int part_kv, std::int64_t at_once) {
        return Rounds{parts, part_kv, static_cast<int>(std::min<std::int64_t>(at_once, heads))};
    };
    if (backward::goes_by_length(p)) return rounds(most, 1, heads_in_turn(most, heads, c.roles()));
    if (c.roles()) return {1, most, heads};
    if (backward::starts_in_parts(p)) {
        return rounds(backward::kParts, (most + backward::kParts - 1) / backward::kParts,
                      most > kMostInRounds ? heads : some_heads(p, most));
    }
    if (!p.ragged && p.mask.trivial() && p.group() == 1 && most <= backward::kMostStraight) {
        return rounds(most, 1, cached_heads(p));
    }
    return {1, most, heads};
}

Divider divider(std::int64_t by) { return Divider(static_cast<int>(std::max<std::int64_t>(by, 1))); }

/// In which order blocks of keys start, and tiles of queries where these are outer.
void set_order(Launch& launch, const Problem& p, const backward::Config& c) {
    const Rounds rounds = rounds_of(p, c, launch.heads);
    launch.parts = rounds.parts;
    launch.part_kv = rounds.part_kv;
    launch.heads_at_once = rounds.heads;
    launch.round = divider(rounds.heads * std::int64_t{rounds.parts} * rounds.part_kv);
    launch.of_part_kv = divider(rounds.part_kv);
    launch.of_part = divider(rounds.heads * std::int64_t{rounds.part_kv});
    launch.of_last_part = divider(launch.heads % std::max(rounds.heads, 1) * std::int64_t{rounds.part_kv});
    launch.shared_heads = divider(p.heads_kv * launch.shares);
    launch.of_shares = divider(launch.shares);
    const std::int64_t tiles = (p.len_q + 127) / 128;
    const std::int64_t heads_q = p.batch * p.heads_q;
    constexpr int kFewestTiles = 16;  // heads
    const bool by_length = c.roles() && backward::goes_by_length(p);
    const std::int64_t at_once =
        std::min(by_length ? std::max<std::int64_t>(some_heads(p, static_cast<int>(tiles)), kFewestTiles) : 1, heads_q);
    launch.query_heads = divider(at_once);
    launch.last_query_heads = divider(heads_q % std::max<std::int64_t>(at_once, 1));
    launch.of_query_round = divider(at_once * tiles);
}

Launch make_launch(const BackwardCall& call, const Memory& memory) {
    const Problem& p = call.plan.problem;
    const TensorShapes shapes(p);
    Launch launch{};
    launch.params = backward_params(call);
    launch.workspace = memory.workspace;
    launch.limits = memory.limits;
    const backward::Config c = config_of(p);
    launch.scale_log2 = c.general ? kLog2E : launch.params.forward.scale * kLog2E;
    launch.sums = backward::sums_of_dq(p);
    if (has_queries(p)) {
        launch.q = tensor_map(launch.params.forward.q, shapes.q, p.dtype, c.block_q);
        launch.d_o = tensor_map(launch.params.d_o, shapes.o, p.dtype, c.block_q);
    }
    if (has_keys(p)) {
        launch.k = tensor_map(launch.params.forward.k, shapes.k, p.dtype, c.block_kv);
        launch.v = tensor_map(launch.params.forward.v, shapes.v, p.dtype, c.block_kv);
        launch.store_dk_by_tma = launch.params.dk.data && !refuse_tma(launch.params.dk, shapes.k);
        launch.store_dv_by_tma = launch.params.dv.data && !refuse_tma(launch.params.dv, shapes.v);
        if (launch.store_dk_by_tma) launch.dk = tensor_map(launch.params.dk, shapes.k, p.dtype, kStoredRows);
        if (launch.store_dv_by_tma) launch.dv = tensor_map(launch.params.dv, shapes.v, p.dtype, kStoredRows);
    }
    if (c.roles() && has_queries(p) && launch.params.dq.data) {
        launch.store_dq_by_tma = !refuse_tma(launch.params.dq, shapes.q);
        if (launch.store_dq_by_tma) launch.dq = tensor_map(launch.params.dq, shapes.q, p.dtype, kStoredRows);
    }
    launch.only_dq = c.roles() && launch.params.dk.data == nullptr && launch.params.dv.data == nullptr;
    if (uses_o_residual(p)) launch.o_residual = rows_of(call.args.o_residual);
    launch.o_by_vectors = takes_vectors(launch.params.forward.o, static_cast<int>(p.head_dim_v)) &&
                          takes_vectors(launch.params.d_o, static_cast<int>(p.head_dim_v)) &&
                          takes_byte_vectors(launch.o_residual, static_cast<int>(p.head_dim_v));
    launch.dq_by_vectors = takes_vectors(launch.params.dq, static_cast<int>(p.head_dim));
    launch.dk_by_vectors = takes_vectors(launch.params.dk, static_cast<int>(p.head_dim));
    launch.dv_by_vectors = takes_vectors(launch.params.dv, static_cast<int>(p.head_dim_v));
    launch.blocks_q = static_cast<int>(blocks_q(p, c.block_q));
    launch.shares = backward::shares_of_groups(p);
    launch.blocks_kv = static_cast<int>(all_blocks_kv(p, c.block_kv));
    launch.heads = static_cast<int>(p.batch * p.heads_kv) * launch.shares;
    set_order(launch, p, c);
    launch.numbers = static_cast<unsigned>(launch.heads) * static_cast<unsigned>(launch.parts * launch.part_kv);
    launch.blocks = backward::ask_blocks(p, [](const auto& blocks) -> backward::BlockCounts { return blocks; });
    launch.finishes = launch.dq_by_vectors && launch.params.dq.data != nullptr && has_queries(p) && has_keys(p) &&
                      backward::finishes_dq(p);
    if (p.batch * p.heads_kv * blocks_kv(p, c.block_kv) < kManyBlocks || launch.blocks.parted) launch.finishes = false;
    launch.multiprocessors = properties(call.plan.device).multiprocessors;
    return launch;
}

/// Without queries, dK and dV are still set to 0, and without keys dQ.
template <class T, class Shape>
cudaError_t start_all(const Problem& p, const Launch& launch, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    if (has_queries(p) && launch.o_residual.data != nullptr) {
        status = backward::start_delta_of_output<T, Shape>(launch, stream);
    }
    if (status == cudaSuccess && has_queries(p)) status = backward::start_delta<T, Shape>(launch, stream);
    if (status == cudaSuccess && has_keys(p) && !launch.only_dq) {
        status = backward::start_backward<T, Shape>(launch, stream);
        if (status == cudaSuccess && launch.shares > 1) status = backward::start_shares<T, Shape>(launch, stream);
    }
    if (status != cudaSuccess || !has_queries(p) || launch.params.dq.data == nullptr) return status;
    if constexpr (Shape::kConfig.roles()) return backward::start_dq_product<T, Shape>(launch, stream);
    else return launch.finishes ? status : backward::start_dq<T, Shape>(launch, stream);
}

void run(const BackwardCall& call) {
    const Problem& p = call.plan.problem;
    const CurrentDevice current(call.plan.device);
    Arena arena(call.workspace);
    const Memory memory = lay_out(arena, p);
    const Launch launch = make_launch(call, memory);
    check(cudaMemsetAsync(memory.workspace.start, 0, memory.cleared, stream_of(call)), "cudaMemsetAsync");
    const cudaError_t status = backward::Shapes::call(*backward::shape_of(p), [&](auto shape) {
        using Shape = decltype(shape);
        return p.dtype == DType::fp16 ? start_all<__half, Shape>(p, launch, stream_of(call))
                                      : start_all<__nv_bfloat16, Shape>(p, launch, stream_of(call));
    });
    check(status, "cuda.fa3.backward");
}

/// TMA needs aligned rows, which only the call shows.
std::optional<TensorRefusal> refuse_tensors(const Problem& problem, const BackwardArgs& args) {
    const TensorShapes shapes(problem);
    const struct {
        const char* name;
        const TensorView* view;
        const RowsShape* shape;
    } inputs[] = {
        {"q", &args.q, &shapes.q}, {"k", &args.k, &shapes.k}, {"v", &args.v, &shapes.v}, {"do", &args.d_o, &shapes.o}};
    for (const auto& [name, view, shape] : inputs) {
        if (view->size() == 0) continue;
        if (auto reason = refuse_tma(rows_of(*view), *shape)) return TensorRefusal{name, *reason};
    }
    return std::nullopt;
}

}  // namespace

Kernel backward_kernel() {
    return {.info = {.name = "cuda.fa3.backward",
                     .backend = Backend::cuda,
                     .schedule = Schedule::fa3,
                     .pass = Pass::backward,
                     .dtypes = {DType::bf16, DType::fp16},
                     .summary = "K/V blocks outer, dQ added up in a fixed order (at most 4 % dearer) or by its own "
                                "kernel; memory O(len)",
                     .limits =
                         "sm_90; bf16 and fp16; no additive bias; head_dim in multiples of 8, up to 128 with softcap, "
                         "ALiBi, dropout or a scale of 0 and less; 16-byte aligned rows"},
            .refuse = refuse,
            .default_tile = backward::tile_of,
            .workspace_bytes = workspace_bytes,
            .target = target,
            .forward = nullptr,
            .backward = run,
            .refuse_backward_tensors = refuse_tensors,
            .uses_o_residual = uses_o_residual,
            .shapes = backward::Shapes::names(),
            .shape_of = [](const Problem& p) { return *backward::shape_of(p); }};
}

}  // namespace tessera::cuda::fa3
