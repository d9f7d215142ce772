// SPDX-License-Identifier: Apache-2.0
//
// The cost of attention in a whole model: its time in all layers, and its part of the model's work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "measure/model_config.hpp"
#include "measure/sweep.hpp"

namespace tessera::measure {

struct ModelQuestion {
    const ModelConfig& config;
    const model::Machine& machine;
    std::int64_t batch = 1;
    std::int64_t len = 0;  ///< tokens of a prefill or a training step; keys of a decode step
    DType dtype = DType::bf16;
    std::vector<Schedule> schedules;
    model::PredictOptions options{};
};

/// The attention of one layer of a group over `len` tokens of each sequence, or of one query after `len` keys.
Problem layer_problem(const ModelConfig& config, const LayerGroup& group, std::int64_t batch, std::int64_t len,
                      DType dtype, bool decode);

/// Why no decode step is answered: the model keeps a cache that no kernel here reads. Empty: it is.
std::string decode_refusal(const ModelConfig& config);

/// The attention of the layers of one group, each of which costs the same.
struct GroupCost {
    LayerGroup group;
    SweepRow row;

    const SweepCell* best() const { return row.best(); }
    /// The reasons why nothing is predicted, each with its schedules: "standard, fa1: takes no sinks".
    std::string refusal() const;
    /// Features of the fastest kernel whose time its prediction leaves out, such as "softcap".
    std::string not_modelled() const;
};

/// One kind of call of the model.
struct CallCost {
    std::string call;  ///< "prefill", "training step", "decode"
    std::vector<GroupCost> groups;
    std::string refusal;  ///< why the call is not answered
    /// FLOP of the call, forward and backward together in a training step: of attention, of all other matrix products.
    double attention_flop = 0, other_flop = 0;
    /// Bytes that a decode step reads: K and V of all sequences, and the weights; 0 in other calls.
    double cache_bytes = 0, weight_bytes = 0;

    /// True if every group is predicted.
    bool known() const;
    /// Milliseconds of attention in all layers.
    double ms() const;
};

struct ModelCost {
    std::vector<CallCost> calls;
    double parameters = 0;         ///< of the matrices, and of the embedding
    double weight_bytes = 0;       ///< of all of them, in the dtype of the question
    bool weights_known = true;     ///< false if the file's weights have another size than that dtype
    double cache_token_bytes = 0;  ///< of K and V of one token in all layers, without windows
    double cache_bytes = 0;        ///< of K and V of the whole batch; 0 if the model is not causal and keeps none
    std::vector<std::string> assumed;
};

/// Predicts a prefill of `len` tokens, a training step, and one decode step after `len` keys.
ModelCost cost_of(const ModelQuestion& question);

}  // namespace tessera::measure
