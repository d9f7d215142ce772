// SPDX-License-Identifier: Apache-2.0
//
// Attention without FlashAttention: what a speed-up is counted from. PyTorch's ways are predicted as it runs them, with
// every kernel reading and writing memory; docs/model.md has the formulas.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "model/predict.hpp"

namespace tessera::model {

enum class Baseline {
    standard,   ///< tessera's own standard attention, as a schedule: S in fp32, masked tiles skipped
    eager,      ///< PyTorch's operators in the dtype: product, mask, softmax, product
    math,       ///< SDPA's math path: the operators in fp32, on copies of Q, K and V
    efficient,  ///< SDPA's memory-efficient kernels
};

/// "standard", "eager", "math", "efficient".
const char* name_of(Baseline baseline);

/// The name for people: "PyTorch's eager operators in bf16".
std::string title_of(Baseline baseline, const Problem& problem);

/// Returns what PyTorch runs on a GPU without FlashAttention and cuDNN: memory-efficient where it takes the call, else
/// math, whether the model predicts it or not. On a CPU, where the model has none of PyTorch's kernels, it is standard.
Baseline without_flash(const Problem& problem, const Machine& machine);

/// The reason why there is no prediction, or nothing.
std::optional<std::string> refusal(const Problem& problem, Baseline baseline, Pass pass, const Machine& machine,
                                   const PredictOptions& options = {});

/// Predicts one call. Throws as predict().
Prediction predict(const Problem& problem, Baseline baseline, Pass pass, const Machine& machine,
                   const PredictOptions& options = {});

/// How a kernel reads a mask tensor of all pairs: for each head of queries, from the L2 if half of it holds the tensor.
struct MaskReads {
    double bytes = 0;          ///< of all heads
    double bytes_of_dram = 0;  ///< the part that comes from memory
    double rate = 0;           ///< bytes a millisecond
    double ms() const { return bytes / rate; }
};

/// The reads of a mask of `elements` elements of the Problem's dtype; fewer than pairs of all heads, if it broadcasts.
MaskReads reads_of_mask(const Problem& problem, double elements, const Machine& machine);

/// The baseline that Records of this library are of: "eager", "math"; nothing for others.
std::optional<Baseline> baseline_of_records(std::string_view by);

}  // namespace tessera::model
