// SPDX-License-Identifier: Apache-2.0
//
// Input generators: one seed gives the same bits on every platform and compiler, for any strides.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/tensor.hpp"

namespace tessera::check {

enum class Fill : std::uint8_t {
    normal,        ///< N(0, 1)
    outliers,      ///< N(0, 1) + N(0, 100) with probability 0.001 (FlashAttention-3 paper, section 4.3)
    large_logits,  ///< N(0, 30^2): as q, logits with a deviation of 30
    index_coded,   ///< row j (second dimension at rank 4, else first) holds a code of j, which reveals permuted keys
    zeros,
    ones,
};

/// "normal", "outliers", "large_logits", "index_coded", "zeros", "ones".
const char* name_of(Fill fill);
std::optional<Fill> fill_of(std::string_view name);

/// Counter-based random numbers (Philox4x32-10). Number `index` of stream `stream` of a seed can be drawn in any order.
class Random {
 public:
    explicit Random(std::uint64_t seed, std::uint64_t stream = 0) : seed_(seed), stream_(stream) {}

    /// Returns 64 random bits of one index.
    std::uint64_t bits(std::uint64_t index) const;
    /// Returns a uniform number in the open interval (0, 1).
    double uniform(std::uint64_t index) const;
    /// Returns a sample of N(0, 1): a sum of 12 uniform numbers less 6 (Irwin-Hall). It is exact in fp64 and hence
    /// equal on every platform; it has no tail beyond 6.
    double normal(std::uint64_t index) const;

 private:
    std::uint64_t seed_;
    std::uint64_t stream_;
};

/// Writes every element of a tensor of any floating dtype and strides. Element i in C order gets number i of `seed`,
/// rounded to the dtype, so that the values do not depend on layout.
void fill(const TensorView& tensor, Fill fill, std::uint64_t seed);

/// Returns the value of index_coded for a row and a column: an integer in [-128, 127], exact in every dtype.
double index_code(std::int64_t row, std::int64_t column);

}  // namespace tessera::check
