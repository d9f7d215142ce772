// SPDX-License-Identifier: Apache-2.0
//
// A family of kernels in the model: its tiles, and constants for the share of each unit's time that is not overlapped.
// They hold for every device; devices differ only in their Machine.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cuda/host/kernel_table.hpp"
#include "model/machine.hpp"
#include "tessera/kernel.hpp"
#include "tessera/predict.hpp"
#include "tessera/problem.hpp"

namespace tessera::model {

/// The order in which a kernel's work starts.
enum class Order {
    longest_first,  ///< tiles of most work first, each to the first free multiprocessor
    grid_order,     ///< by head, then sequence, then tile
    descending,     ///< by sequence, then head, then tile from the last
    ascending,      ///< by sequence, then head, then tile from the first
};

/// The constants of a family. Time of a tile = GEMMs + the exposed parts of the other units' time. A member `x_exposed`
/// is a factor on a unit's time: 0 is perfect overlap, 1 none.
struct Constants {
    double call_us = 0;             ///< microseconds of a call of any size: all is cold, kernels begin and end
    double exp_exposed = 0;         ///< the exponentials' time (the maximum, sums and rescaling run with them)
    double uneven_exposed = 0;      ///< added to exp_exposed if the keys don't fill tiles of 128 (a separate kernel)
    double padded_exposed = 0;      ///< added to exp_exposed if head_dim is padded, which predicates each element
    double shared_exposed = 0;      ///< the shared memory's time
    double adds_exposed = 0;        ///< the time of adding dQ in the L2
    double step_cycles = 0;         ///< clocks added per tile of keys: fa1's warps synchronise and exchange O
    double dq_add_cycles = 0;       ///< clocks from one key block's addition to a dQ tile to the next one's
    double end_cycles = 0;          ///< prologue and epilogue of a tile of queries (backward: keys)
    double end_cycles_per_dim = 0;  ///< clocks added to end_cycles per head_dim column
    double small_end_cycles = 0;    ///< instead of end_cycles, if a multiprocessor holds two tiles of 64 queries
    double empty_cycles = 0;        ///< a thread block without keys, which backwards of older Records started
    double list_us = 0;          ///< microseconds in which a ragged backward lists its key blocks, by one thread block
    double sequence_cycles = 0;  ///< clocks of a head of a ragged sequence, whose last tiles are not full
    double combine_cycles = 0;   ///< a block of the kernel that combines splits, in which no row has any
    double residual_cycles = 0;  ///< clocks of an element of the residual of O that a forward writes
    double mask_exposed = 0;     ///< the time of exponentials at kMaskRate, added for a partial tile
    double dram_exposed = 0;     ///< the DRAM traffic of Q and O; fa1: the first and last pass over O
    double dropout_exposed = 0;  ///< the time of drawing dropout's mask; 0: not measured, and not predicted
    double dq_exp_exposed = 0;   ///< exp_exposed of the separate dQ kernel, queries outer
    double dq_end_cycles = 0;    ///< end_cycles of the separate dQ kernel
    double state_exposed = 0;    ///< fa1: the traffic of O, m, l between blocks
    double row_cycles = 0;       ///< standard: clocks of a row of the softmax
    double row_exposed = 0;      ///< standard: the softmax's traffic when rows dominate
    double pass_exposed = 0;     ///< standard: the shorter one of a pass' GEMM and traffic
    double lone_exposed = 0;     ///< instead of exp_exposed, if only one warpgroup of a tile has rows
    double stream_exposed = 0;   ///< the shorter one of work and traffic, if each key is read by one tile
    double split_us = 0;         ///< microseconds per split of the keys of a row
    double gemm_stretch = 0;     ///< decode: clocks of a tile, in those of its GEMMs: a warp waits for itself
    double page_us = 0;          ///< decode: microseconds until the first page number of a split is there
    double single_block_factor = 1;  ///< factor on the time of a block that is alone on a multiprocessor
    int launches = 1;
};

/// Microseconds until the first tiles arrive from cold memory, while no other unit runs. This and
/// Constants::single_block_factor were chosen with bench/results/h200/seen.jsonl in view.
inline constexpr double kColdStart = 4;

/// A call starts with an L2 full of dirty lines. For each byte read, kWrittenShare of a byte is written back first, up
/// to kWrittenOfL2 of the L2. Observed in calls that mostly read (bench/results/h200/now/drawn_241124.jsonl).
inline constexpr double kWrittenShare = 0.4;
inline constexpr double kWrittenOfL2 = 0.9;

/// The time of fa3's main kernel on pages, divided by its time on the same keys without a cache (slots: equal).
struct PagesTime {
    double boxes;  ///< TMA boxes that load a block of keys: block_kv / gcd(page_size, block_kv)
    double factor;
};
/// In ascending order; the time is linear between two rows, and beyond the last two. One H200, 32/8 heads of 128,
/// causal, bf16 (bench/compare/cuda_decode.py --set prefill): pages of 256 took 1.07 to 1.18 times as long as no cache,
/// pages of 16 took 1.36 to 1.80 times as long.
inline constexpr PagesTime kPagesInFa3[] = {{1, 1.10}, {8, 1.69}};

/// The factor of kPagesInFa3 for so many boxes.
double pages_factor(double boxes);

/// The slowdown of kernels that fetch mma.sync operands by ldmatrix if mma.sync is not the native MMA instruction
/// (Hopper, Blackwell). Fitted on flash-attention's fa2 in bench/results/h200/forward.jsonl and peers.jsonl.
inline constexpr double kMmaSyncSlowdown = 1.45;

/// The slowdown of tessera's fp32 kernels by six MMAs of bf16 parts (cuda/tile/parts.cuh): numbers are split beside the
/// MMAs, and no kernel has a warp that only loads. Fitted on the
/// first six cases of bench/results/h200/fp32/features.jsonl and the one of head_dim 256.
inline constexpr double kPartsSlowdownForward = 1.82;
inline constexpr double kPartsSlowdownWide = 6.3;  ///< of the forward over head_dim 128
inline constexpr double kPartsSlowdownBackward = 2.5;
/// The slowdown of the fp32 backward by multiply-adds, over head_dim 128.
inline constexpr double kMultiplyAddSlowdown = 4.6;

struct Family;

/// Does the family compute fp32 as three bf16 parts on tensor cores?
bool computes_in_parts(const Family& family, const Problem& problem);

/// FLOP in a clock of a multiprocessor by the unit that runs the family's GEMMs, at its peak.
double gemm_flop(const Family& family, const Problem& problem, const Machine& machine);

struct Family {
    const char* by;
    Schedule schedule;
    Pass pass;
    const char* fitted_on;  ///< Records behind the constants; "": none
    bool warp_wide;         ///< MMA by mma.sync, not by wgmma
    Order order;
    Constants constants;
    bool masks_windows = false;  ///< under a window, every tile goes through the mask
    std::int64_t over_dim = 0;   ///< for head_dims over this, if a schedule has two kinds of kernel
    bool few_queries = false;    ///< for calls whose keys are split (splits_keys); tessera's: cuda.decode.forward
    bool tcgen05 = false;        ///< for GPUs of compute capability 10, whose MMA instruction is tcgen05
};

/// The library of PyTorch's memory-efficient kernels, and what tessera/predict.hpp calls it.
inline constexpr std::string_view kEfficient = "memory-efficient";

/// Does the GPU have tcgen05, the MMA instruction of compute capability 10?
bool has_tcgen05(const Machine& machine);

std::span<const Family> gpu_families();

/// The kernel of tessera whose family has few_queries.
inline constexpr std::string_view kDecodeKernel = "cuda.decode.forward";

/// Is it a family of tessera's kernels?
bool is_ours(const Family& family);

/// The kernel of tessera that a family describes.
const cuda::KernelEntry& entry_of(const Family& family);

/// Does the family describe cuda.decode.forward?
bool is_decode(const Family& family);

/// The kernel of tessera that runs a Problem by a schedule: options.kernel, or the first one in plan()'s order that
/// takes the Problem and the tile. If none does: the one whose refusal is reported.
const cuda::KernelEntry& our_kernel(const Problem& problem, Schedule schedule, Pass pass, const Machine& machine,
                                    const PredictOptions& options);

/// Finds the family of a schedule and pass. With `by` empty: tessera's if fitted, otherwise any fitted one, otherwise
/// any. Null: none. If a schedule has two kinds of kernel, returns that of small head_dims.
const Family* find_family(Schedule schedule, Pass pass, const std::string& by);

/// The variant of the family that runs a Problem with stacked groups (predict_gpu). `kernel`: PredictOptions::kernel.
const Family& family_for(const Family& family, const Problem& problem, const Machine& machine,
                         std::string_view kernel = {});

/// The reason why the kernels of a family of another library can't run a Problem on a machine, or nothing, by its
/// release's documentation. tessera's kernels decide by their own checks (cuda/host/kernel_table.hpp).
std::optional<std::string> refusal_of(const Family& family, const Problem& problem, const Machine& machine);

/// The tile that a family's kernel has for a Problem on a machine.
Tile tile_of(const Family& family, const Problem& problem, const Machine& machine);

/// Resident thread blocks of a family per multiprocessor.
int blocks_at_a_time(const Family& family, const Problem& problem, const Machine& machine);

/// Does the family use a split-KV kernel for these few queries?
bool splits_keys(const Family& family, const Problem& problem, const Machine& machine);

/// The number of splits of the keys in flash-attention's fa2: num_splits_heuristic() of csrc/flash_attn/flash_api.cpp.
/// 1: no split.
std::int64_t flash2_splits(const Problem& problem, const Machine& machine);

/// The splits of the keys for which flash-attention's fa3 compiles the forward of a ragged call: get_num_splits() of
/// hopper/flash_api.cpp, by the longest sequence. 1: none.
std::int64_t flash3_ragged_splits(const Problem& problem, const Machine& machine);

/// head_dim padded with zeros to the next compiled size; `cached`: of the shapes for keys in a cache.
std::int64_t padded_dim(const Family& family, std::int64_t head_dim, bool cached = false);

/// Queries (backward: keys) per reader of shared memory.
std::int64_t rows_per_reader(const Family& family, std::int64_t head_dim);

}  // namespace tessera::model
