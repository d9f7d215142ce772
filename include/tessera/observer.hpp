// SPDX-License-Identifier: Apache-2.0
//
// Observing a CPU kernel: what it reports after each step, for programs that show or check the algorithm.
#pragma once

#include <cstdint>

#include "tessera/kernel.hpp"
#include "tessera/mask.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// A step that a kernel has just done with a tile of queries x keys.
enum class TileStep : std::uint8_t {
    scores,     ///< standard: S of the tile was written to memory
    softmax,    ///< standard: all keys of the queries at once, S became P, normalised
    values,     ///< O += P V; in fa1 and fa2 the online softmax came with it
    merge,      ///< fa2: the sums of a chunk of keys went into those of the keys before it
    finish,     ///< O is final
    weights,    ///< standard backward: P and dS of the tile were written to memory
    gradients,  ///< fa1, fa2 backward: dV, dK and dQ of the tile were added
    dq,         ///< standard backward: dQ of the tile was added
    dk_and_dv,  ///< standard backward: dV and dK of the tile were added
};

/// One step, with the kernel's own numbers. The arrays are the kernel's working memory in fp32 and are valid during the
/// call only. An array [n, lanes] has the value of query i at n * lanes + i. Arrays that the step does not use are
/// null.
struct TileReport {
    TileStep step = TileStep::values;
    Pass pass = Pass::forward;
    std::int64_t batch = 0;
    std::int64_t query_head = 0;
    Range queries;  ///< queries of the tile, counted in its sequence
    Range keys;     ///< keys of the tile, up to the last one that a query sees; for `merge` those of the chunk
    Coverage coverage = Coverage::full;
    std::int64_t lanes = 0;

    const float* s = nullptr;        ///< [keys, lanes] scores, -inf where hidden
    const float* p = nullptr;        ///< [keys, lanes] exp(s - m); after dropout, and / l in standard, fa1, backward
    const float* m = nullptr;        ///< [lanes] running maximum
    const float* l = nullptr;        ///< [lanes] running sum of exp(s - m)
    const float* rescale = nullptr;  ///< [lanes] the factor by which O was multiplied before the tile was added
    const float* o = nullptr;        ///< [head_dim_v, lanes] O so far; / l in fa1, standard, and at `finish`

    const float* ds = nullptr;     ///< [keys, lanes] gradient of the scores
    const float* dq = nullptr;     ///< [head_dim, lanes] sum of K^T dS so far; the scale comes at the end
    const float* dk = nullptr;     ///< [keys, dk_stride] sum of dS^T Q so far, like dv; without the scale
    std::int64_t dk_stride = 0;    ///< floats
    const float* dv = nullptr;     ///< [keys, dv_stride] sum of P^T dO so far, or of the last 256 tiles at most
    std::int64_t dv_stride = 0;    ///< floats
    const float* lse = nullptr;    ///< [lanes] LSE of the forward, +inf for rows that see no key
    const float* delta = nullptr;  ///< [lanes] rowsum(dO * O) - dLSE
};

/// Execution::observer is called for every tile that a CPU kernel runs, and not for tiles that the mask skips. A call
/// with an observer runs in fp32 with queries in the lanes. Its bits therefore differ from those of kernels that
/// otherwise use a matrix unit (Plan::matrix_unit) or stack the heads of a group.
class TileObserver {
 public:
    virtual ~TileObserver() = default;

    /// Called by the thread that ran the tile: by several threads at once when the plan has several. A plan with one
    /// thread reports the steps in the order of the algorithm. An exception ends the call.
    virtual void saw(const TileReport& report) = 0;
};

}  // namespace tessera
#pragma GCC visibility pop
