// SPDX-License-Identifier: Apache-2.0
//
// What the model knows of a family of kernels: its tiles, and a few constants that say how much of each unit's time the
// kernel leaves exposed. They hold for every device; a device differs in its Machine only.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "model/machine.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::model {

/// How the work of a kernel is dealt out.
enum class Order {
    longest_first,  ///< tiles of most work first, to whoever is free
    as_they_lie,    ///< heads, in them sequences, in them tiles
    last_first,     ///< sequences, in them heads, in them the last tiles first
    first_first,    ///< the same, the first tiles first
};

/// Time of a tile = products + the shares below of the other units' time: 0 is perfect overlap, 1 none.
struct Constants {
    double call_us = 0;         ///< microseconds of a call, whatever its size: all is cold, kernels begin and end
    double exp_exposed = 0;     ///< of the exponentials' time (the maximum, sums and rescaling run with them)
    double uneven_exposed = 0;  ///< as exp_exposed, more where the keys don't fill tiles of 128: a kernel of its own
    double padded_exposed = 0;  ///< the same, where head_dim is none of the kernel's own: each element is asked for
    double shared_exposed = 0;  ///< of the near memory's time
    double adds_exposed = 0;    ///< of the time of adding dQ in the L2
    double step_cycles = 0;     ///< of a tile of keys beside that: fa1's warps meet and exchange O
    double turn_cycles = 0;     ///< from one block of keys that adds to a tile of dQ to the next
    double end_cycles = 0;      ///< of a tile of queries (backward: keys), beside its tiles: filling and emptying
    double end_cycles_per_dim = 0;  ///< the same, for each of the head_dim columns
    double empty_cycles = 0;        ///< of a tile of keys that a ragged sequence does not have, but its grid
    double mask_exposed = 0;        ///< of the exponentials' time, more in a tile that the mask or an end cuts
    double dram_exposed = 0;        ///< of the DRAM traffic of Q and O; fa1: of the first and last pass over O
    double dropout_exposed = 0;     ///< of the time of drawing dropout's mask; 0: never measured, and not in the time
    double dq_exp_exposed = 0;      ///< as exp_exposed, of a kernel of its own that makes dQ, queries outer
    double dq_end_cycles = 0;       ///< as end_cycles, of that
    double state_exposed = 0;       ///< fa1: of the traffic of O, m, l between blocks
    double row_cycles = 0;          ///< standard: of a row of the softmax
    double row_exposed = 0;         ///< standard: of the softmax's traffic when rows dominate
    double pass_exposed = 0;        ///< standard: of the shorter one of a pass' products and traffic
    double lone_exposed = 0;        ///< instead of exp_exposed, where one warpgroup of a tile has rows, the others none
    double stream_exposed = 0;      ///< of the shorter one of work and traffic, where a key is read by one tile
    double split_us = 0;            ///< microseconds for each part that the keys of a row are dealt out in
    double alone = 1;  ///< how much longer a unit takes with a multiprocessor to itself than its share says
    int launches = 1;
};

/// Microseconds until the first tiles have come from a cold memory, where no other unit runs meanwhile. This and
/// Constants::alone were chosen with bench/results/h200/seen.jsonl in view.
inline constexpr double kColdStart = 4;

/// A call begins in an L2 full of what others wrote: for each byte that is read, this share of one is written first, up
/// to this share of the L2. Seen in calls that do little but read (bench/results/h200/now/drawn_241124.jsonl).
inline constexpr double kWrittenShare = 0.4;
inline constexpr double kWrittenOfL2 = 0.9;

/// Where mma.sync is not the native product instruction (Hopper, Blackwell), kernels that fetch its operands by
/// ldmatrix take so much longer than the instruction alone needs. Fitted on flash-attention's fa2 in
/// bench/results/h200/forward.jsonl and peers.jsonl; where mma.sync is native, there is nothing to stretch.
inline constexpr double kWarpStretch = 1.45;

struct Family {
    const char* by;
    Schedule schedule;
    Pass pass;
    const char* fitted_on;  ///< Records behind the constants; "": none
    bool warp_wide;         ///< products by mma.sync, not by wgmma
    Order order;
    Constants constants;
    bool masks_windows = false;  ///< under a window, every tile goes through the mask
    std::int64_t over_dim = 0;   ///< for head_dims over this: where a schedule has two kinds of kernel
    bool few_queries = false;    ///< for calls whose keys are dealt out (deals_keys)
};

std::span<const Family> gpu_families();

/// Is it a family of tessera's kernels?
bool is_ours(const Family& family);

/// The family for these; `by` empty: tessera's if fitted, else the fitted one, else any. Null: none. Where a schedule
/// has two kinds of kernel, that of small head_dims.
const Family* find_family(Schedule schedule, Pass pass, const std::string& by);

/// The one of its kinds that runs a Problem, whose groups are stacked already (predict_gpu).
const Family& family_for(const Family& family, const Problem& problem, const Machine& machine);

/// Why the kernels of a family can't run a Problem on a machine, or nothing. tessera's are asked by their own rows
/// (cuda/rows), the others by what their releases say of themselves.
std::optional<std::string> refusal_of(const Family& family, const Problem& problem, const Machine& machine);

/// The tile that a family's kernel has for a Problem on a machine.
Tile tile_of(const Family& family, const Problem& problem, const Machine& machine);

/// Thread blocks of a family that a multiprocessor works on at a time.
int blocks_at_a_time(const Family& family, const Problem& problem, const Machine& machine);

/// Has a family a kernel of its own for so few queries, which deals out their keys?
bool deals_keys(const Family& family, const Problem& problem, const Machine& machine);

/// Parts into which flash-attention's fa2 deals the keys of a tile of queries: num_splits_heuristic() of
/// csrc/flash_attn/flash_api.cpp. 1: it does not.
std::int64_t flash2_splits(const Problem& problem, const Machine& machine);

/// head_dim as the kernel computes it: padded with zeros to the next compiled size.
std::int64_t padded_dim(const Family& family, std::int64_t head_dim);

/// Queries (backward: keys) of one reader of shared memory.
std::int64_t rows_per_reader(const Family& family, std::int64_t head_dim);

}  // namespace tessera::model
