// SPDX-License-Identifier: Apache-2.0
//
// The last part of the exam: the learner states a model and estimates what FlashAttention gains in it. The estimates
// are compared with the model's prediction, and with the nearest measured call.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "learn/lesson.hpp"

namespace tessera::learn {

/// The model of which the gain is estimated: one forward pass over one text, in bf16. The default is the model of
/// lesson 18 (CacheSizes).
struct ModelShape {
    std::string device = "h200";
    std::int64_t layers = 32;
    std::int64_t heads_q = 32;
    std::int64_t heads_kv = 8;
    std::int64_t head_dim = 128;
    std::int64_t len = 8192;
    bool causal = false;
    double share = 0.3;  ///< of the model's time that attention takes while it is standard attention

    bool operator==(const ModelShape&) const = default;
};

/// Throws Error(invalid_argument) naming the member that no model can have, or a device that is not a GPU the model
/// knows.
void validate(const ModelShape& model);

/// "Your model has 32 layers and 32/8 heads of 128. It reads 8192 tokens in bf16, without a mask, on NVIDIA H200 ...".
std::string text_of(const ModelShape& model);

/// How many estimates are asked: bytes, both times, the win, and the gain of the whole model.
inline constexpr int kEstimates = 5;

/// The estimate of this index. Throws as validate(). Throws Error(unsupported) if the prediction refuses the model, or
/// if standard attention does not fit the GPU's memory.
Exercise estimate_exercise(int index, const ModelShape& model);

/// The exercise, which is for `model` if it is an estimate.
Exercise exercise_for(const ExerciseId& id, const ModelShape& model);

/// A forward call in bf16 with equal lengths that was measured, in ms. `standard` is tessera's kernel, fa2 and fa3 are
/// flash-attention's. 0: not measured.
struct MeasuredCall {
    std::int64_t head_dim;
    bool causal;
    std::int64_t len;
    std::int64_t batch;
    std::int64_t heads_q;
    std::int64_t heads_kv;
    struct Times {
        double standard;
        double fa2;
        double fa3;
    } h200, h100;

    std::string text() const;  ///< "1 x 8192 tokens, 64/8 heads of 128, no mask"
};

/// The measured calls, from bench/results/h200/forward.jsonl and peers.jsonl, and h100/forward_beside_fa3.jsonl.
std::span<const MeasuredCall> measured_calls();

/// The measured call that is nearest to the model: with its mask, then by head_dim, length and number of heads.
const MeasuredCall& nearest_call(const ModelShape& model);

}  // namespace tessera::learn
