// SPDX-License-Identifier: Apache-2.0
//
// How far a prediction may be off: by the errors of rows that no constant was fitted on.
#pragma once

#include <string>

#include "model/predict.hpp"

namespace tessera::model {

/// The kind of a problem, the first of these that fits: "ragged", "decode" (up to 16 queries), "window", "cross
/// lengths", "grouped heads", "few heads" (tiles of 128 queries for less than half of 132 multiprocessors), "head_dim"
/// (neither 64, 128 nor 256), "prefill".
std::string kind_of(const Problem& problem);

/// True for up to 2e10 FLOP. Fixed costs of a call matter there, so such calls have their own error bars.
bool is_short(const Prediction& prediction);

/// The calls that share an error bar, beside their library, schedule and pass (error_bars.hpp).
struct BarCell {
    /// kind_of(), but "few queries" for 2 to 16 queries on a cache, and "short documents" and "long documents" for
    /// ragged batches whose sequences have under 512, or 2,048 and more, keys in the mean; short calls of ragged
    /// batches are "short documents" too.
    std::string kind;
    bool is_short;  ///< is_short(), of the kinds whose short calls have bars of their own
};
BarCell bar_cell_of(const Problem& problem, const Prediction& prediction);

/// The measurements of a GPU that no constant was fitted on.
enum class Rows { many, some, published, none };
Rows rows_of(const Machine& machine);

/// Do published tables of other cards have kernels that ran calls of this kind? Those with as many queries as keys do.
bool in_tables(const std::string& kind);

/// The bar of PyTorch's kernels where no rows of them exist.
inline constexpr double kErrorWithoutRows = 0.5;

/// Is the call like the rows of PyTorch's memory-efficient kernels and math path (h200/pytorch_held_out.jsonl)? They
/// are prefills in bf16, without dropout or another change of the scores.
bool like_rows_of_pytorch(const Problem& problem);

/// Is it a call on a cache by cuda.fa3.forward? There are no held-out rows of these.
bool on_cache_by_fa3(const Problem& problem, const Prediction& prediction);

/// Prediction::error of a GPU's or a CPU's prediction.
double error_bar(const Problem& problem, const Prediction& prediction, const Machine& machine);

}  // namespace tessera::model
