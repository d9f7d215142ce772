// SPDX-License-Identifier: Apache-2.0
//
// Cases by what they ask of a kernel, so that every compiled shape of every kernel runs with every feature that it
// takes. Random cases do not see to that: most of them are refused by the kernels that are compiled for few shapes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "tessera/kernel.hpp"

namespace tessera::check {

/// A feature of a case besides, or instead of, plain attention. A kernel may have code of its own for each.
enum class Feature : std::uint8_t {
    plain,
    large_logits,
    causal_bottom_right,
    causal_top_left,
    window,
    cross_lengths,  ///< causal, with fewer queries than keys
    empty_rows,     ///< causal, with fewer keys than queries: the first queries see none
    grouped_heads,
    stacked_heads,  ///< groups of powers of two, whose heads fa3 makes rows of one tile; with masks, some ragged
    ragged,         ///< sequences of all lengths, 0 among them
    softcap,
    alibi,
    dropout,
    scale_zero,
    scale_negative,
    all_but_bias,  ///< ragged, grouped, causal, window, softcap, ALiBi, dropout
    bias,
    bias_gradient,  ///< backward: dbias is wanted
    dlse,           ///< backward: LSE has a gradient
    no_lse,         ///< forward: nobody wants LSE
    strided,        ///< [batch, heads, len, head_dim] in memory
};
inline constexpr std::array kFeatures{
    Feature::plain,
    Feature::large_logits,
    Feature::causal_bottom_right,
    Feature::causal_top_left,
    Feature::window,
    Feature::cross_lengths,
    Feature::empty_rows,
    Feature::grouped_heads,
    Feature::stacked_heads,
    Feature::ragged,
    Feature::softcap,
    Feature::alibi,
    Feature::dropout,
    Feature::scale_zero,
    Feature::scale_negative,
    Feature::all_but_bias,
    Feature::bias,
    Feature::bias_gradient,
    Feature::dlse,
    Feature::no_lse,
    Feature::strided,
};

/// "causal_top_left", "dlse", ...
const char* name_of(Feature feature);

/// Does this feature mean anything to a pass? dlse and bias_gradient are inputs of the backward, no_lse of the forward.
bool concerns(Feature feature, Pass pass);

struct FeatureCase {
    Feature feature = Feature::plain;
    bool padded = false;  ///< head_dim or head_dim_v is one that no kernel is compiled for, or they differ oddly
    Case which;           ///< its id: "dlse/bf16/192x128/wide"
};

/// Every feature x dtype x head_dim (with one of V that differs) x size: several tiles of queries, several blocks of
/// keys, and a row longer than any that counts as short. The numbers of queries and keys depend on the seed.
std::vector<FeatureCase> feature_cases(std::uint64_t seed);

/// The answer of a kernel to a Problem on this machine.
struct Answer {
    bool takes = false;
    bool unavailable = false;  ///< its device is not there, which says nothing about the Problem
    std::string reason;        ///< why it does not take it, or can't
    std::string shape;         ///< the compiled shape that runs it
};
Answer ask(const KernelInfo& kernel, const Problem& problem);

/// A case, and the kernels that it is for.
struct Chosen {
    FeatureCase of;
    std::vector<const KernelInfo*> kernels;
};

/// Enough of feature_cases() that each of these kernels gets two cases for every compiled shape x feature x dtype that
/// it takes, and one of a padded head_dim; kernels of one shape get one. Kernels whose device is not there get none.
/// `only`: one feature.
std::vector<Chosen> choose_feature_cases(std::uint64_t seed, const std::vector<const KernelInfo*>& kernels,
                                         std::optional<Feature> only = {});

}  // namespace tessera::check
