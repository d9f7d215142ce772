// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <span>

namespace llama {

/// How the next token is chosen. The filters apply in this order, as in transformers.
struct SamplingOptions {
    double temperature = 0;  ///< 0: the token with the largest logit (greedy)
    std::int64_t top_k = 0;  ///< keep the k largest logits; 0: all
    double top_p = 1;        ///< keep the fewest tokens, from the most probable on, whose probabilities sum to top_p
    std::uint64_t seed = 0;

    /// Throws tessera::Error that names the option, what was expected and what came.
    void validate() const;
};

/// Chooses the tokens of one sequence. Its random numbers are its own: a text depends on its seed and its number, not
/// on its neighbours.
class Sampler {
 public:
    Sampler(const SamplingOptions& options, std::uint64_t number);

    /// The next token. Throws tessera::Error if a logit is not finite.
    std::int32_t choose(std::span<const float> logits);

 private:
    SamplingOptions options_;
    std::mt19937_64 random_;
};

}  // namespace llama
