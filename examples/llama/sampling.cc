// SPDX-License-Identifier: Apache-2.0
#include "llama/sampling.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/error.hpp"

namespace llama {
namespace {

std::mt19937_64 generator(std::uint64_t seed, std::uint64_t number) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    std::seed_seq words{low(seed), low(seed >> 32), low(number), low(number >> 32)};
    return std::mt19937_64(words);
}

struct Candidate {
    std::int32_t token;
    double weight;  // of the softmax, not divided by the sum
};

}  // namespace

void SamplingOptions::validate() const {
    const auto bad = [](const char* name, const char* expected, double came) {
        throw tessera::Error(tessera::ErrorCode::invalid_argument, name,
                             fmt::format("expected {}, got {}", expected, came));
    };
    if (!(temperature >= 0 && std::isfinite(temperature))) bad("temperature", "a number >= 0", temperature);
    if (top_k < 0) bad("top_k", "a number >= 0", static_cast<double>(top_k));
    if (!(top_p > 0 && top_p <= 1)) bad("top_p", "a number over 0 and at most 1", top_p);
}

Sampler::Sampler(const SamplingOptions& options, std::uint64_t number)
    : options_(options), random_(generator(options.seed, number)) {
    options.validate();
}

std::int32_t Sampler::choose(std::span<const float> logits) {
    for (const float logit : logits) {
        if (!std::isfinite(logit)) {
            throw tessera::Error(tessera::ErrorCode::bad_data, "logits",
                                 fmt::format("expected finite numbers, got {}", logit));
        }
    }
    const auto largest = std::max_element(logits.begin(), logits.end());
    if (options_.temperature == 0) return static_cast<std::int32_t>(largest - logits.begin());

    std::vector<Candidate> candidates;
    for (std::size_t token = 0; token < logits.size(); ++token) {
        const double scaled = (static_cast<double>(logits[token]) - *largest) / options_.temperature;
        candidates.push_back({static_cast<std::int32_t>(token), std::exp(scaled)});
    }
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
    });
    if (options_.top_k > 0 && options_.top_k < static_cast<std::int64_t>(candidates.size())) {
        candidates.resize(static_cast<std::size_t>(options_.top_k));
    }
    const auto sum = [&] {
        double total = 0;
        for (const Candidate& candidate : candidates) total += candidate.weight;
        return total;
    };
    const double enough = options_.top_p * sum();
    double kept = 0;
    for (std::size_t n = 0; n < candidates.size(); ++n) {
        kept += candidates[n].weight;
        if (kept >= enough) candidates.resize(n + 1);
    }

    // 53 random bits: a number in [0, 1) that is the same with every standard library.
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * sum();
    for (const Candidate& candidate : candidates) {
        left -= candidate.weight;
        if (left < 0) return candidate.token;
    }
    return candidates.back().token;
}

}  // namespace llama
