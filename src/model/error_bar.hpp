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

/// The measurements of a GPU that no constant was fitted on.
enum class Rows { many, some, published, none };
Rows rows_of(const Machine& machine);

/// Prediction::error of a GPU's or a CPU's prediction.
double error_bar(const Problem& problem, const Prediction& prediction, const Machine& machine);

}  // namespace tessera::model
