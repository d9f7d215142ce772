// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the kernels of a decode step's attention block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/append/launch.hpp"
#include "cuda/block/host/config.h"
#include "cuda/decode/launch.hpp"

namespace tessera::cuda::block {

/// A matrix of weights [rows, columns] and its bias.
struct Matrix {
    const char* data = nullptr;
    std::int64_t row_bytes = 0;  ///< from a row to the next: a multiple of 16
    int rows = 0;                ///< a multiple of Config::kUnitRows
    int columns = 0;             ///< a multiple of Config::kChunk
    const char* bias = nullptr;  ///< [rows] bf16; null: none
    std::int64_t bias_step = 0;  ///< in elements
};

/// A matrix [batch, columns] of bf16 whose rows are contiguous. Rows of x are at multiples of 16 bytes.
struct Activations {
    char* data = nullptr;
    std::int64_t row_bytes = 0;
};

/// 4 bytes of data in the lower half, and the number of the launch that wrote them in the upper one. CTAs exchange all
/// results in such words (as NCCL's LL protocol does): a word with the number of this launch has this launch's data.
using Word = std::uint64_t;

/// The first bytes of the workspace. They are 0 before its first use.
struct alignas(128) Header {
    unsigned launches;  ///< that used this workspace
    unsigned arrived;   ///< CTAs that have read `launches` in this launch
};

/// The moments of a launch that a CTA can record, in nanoseconds of %globaltimer.
enum class Mark : int {
    start,           ///< the first instruction
    inputs,          ///< the previous launch has ended: x may be read
    normed,          ///< the norm of x is in shared memory
    qkv_done,        ///< the CTA's rows of Q, K and V are written
    queries,         ///< Q of the CTA's first split is there
    attention_done,  ///< the partial results of the CTA's splits are written
    partials,        ///< the partial results of the first warp's row are there
    combined,        ///< the CTA's rows of O are written
    output_ready,    ///< all rows of O are in shared memory
    end,             ///< the CTA's columns of the result are written
    loads_qkv,       ///< the producer warp has asked for the last weights of Q, K and V
    loads_keys,      ///< for the last keys
    loads_output,    ///< for the last weights of the output
    count
};

/// Arguments of all kernels.
struct Launch {
    int batch = 0;
    Activations x;
    const char* norm = nullptr;  ///< [hidden], the weights of the norm
    bool norm_fp32 = false;
    float norm_eps = 0;
    Matrix qkv;
    Matrix output;
    Activations residual;
    Activations result;

    decode::Launch attention{};  ///< cache.lengths: the keys BEFORE the new one. o and ml are unused
    append_rows::Launch
        append{};  ///< one new row of K and V a sequence: cache rows, positions, norms, rotary embedding

    // The workspace of the one launch, zero before its first use.
    Header* header = nullptr;
    Word* qkv_words = nullptr;   ///< [batch, qkv.rows / 2]: two numbers a word
    Word* o_partial = nullptr;   ///< [batch, heads_q, max_splits, head_dim]: a number a word
    Word* ml_partial = nullptr;  ///< [batch, heads_q, max_splits, 2]: the largest score and the sum of P
    Word* o_words = nullptr;     ///< [batch, output.columns / 2]: two numbers a word
    int max_splits = 0;

    // The chain.
    Activations qkv_rows{};                    ///< out: [batch, qkv.rows]
    Activations o_rows{};                      ///< in: [batch, output.columns]
    const std::int32_t* kv_lengths = nullptr;  ///< keys before the new one
    std::int64_t kv_lengths_step = 0;
    std::int32_t* lengths = nullptr;  ///< out: keys with the new one

    SharedLayout layout{};
    std::uint64_t* marks = nullptr;  ///< [CTAs, Mark::count], or null: the times of this launch
};

/// The first bytes of the shared memory of a CTA, and those of each group of its warps.
struct FixedBytes {
    int fixed;
    int of_group;
};
template <class Shape>
FixedBytes fixed_bytes();

/// One cooperative launch of `blocks` CTAs, which are all on the device at once. `programmatic` (programmatic dependent
/// launch): weights are read while the previous kernel of the stream still runs.
template <class Shape>
cudaError_t start_block(const Launch& launch, int blocks, bool programmatic, cudaStream_t stream);

/// The kernels of the chain. Norm and GEMM: qkv_rows and lengths from x.
template <class Shape>
cudaError_t start_qkv(const Launch& launch, int blocks, cudaStream_t stream);
/// The result from o_rows.
template <class Shape>
cudaError_t start_output(const Launch& launch, int blocks, cudaStream_t stream);

}  // namespace tessera::cuda::block
