// SPDX-License-Identifier: Apache-2.0
//
// Cases by kernel feature: every compiled shape of every kernel runs with every feature that it supports. Random cases
// do not cover this, because kernels compiled for few shapes refuse most of them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "check/case.hpp"
#include "tessera/kernel.hpp"

namespace tessera::check {

/// A feature that a case adds to plain attention or has in its place. A kernel may have separate code for each.
enum class Feature : std::uint8_t {
    plain,
    large_logits,
    causal_bottom_right,
    causal_top_left,
    window,
    cross_lengths,  ///< causal, with fewer queries than keys
    empty_rows,     ///< causal, with fewer keys than queries: the first queries see none
    grouped_heads,
    stacked_heads,  ///< groups of 2^n heads, which fa3 stacks as rows of one tile (PackGQA); with masks, some ragged
    ragged,         ///< sequences of all lengths, 0 among them
    softcap,
    alibi,
    sinks,
    dropout,
    scale_zero,
    scale_negative,
    all_but_bias,  ///< ragged, grouped, causal, window, softcap, ALiBi, dropout
    bias,
    bias_gradient,  ///< backward: dbias is requested
    dlse,           ///< backward: LSE has a gradient
    no_lse,         ///< forward: LSE is not requested
    strided,        ///< [batch, heads, len, head_dim] in memory
    slots,          ///< forward: keys in slots of a cache, with left padding
    pages,          ///< forward: keys in pages of a cache
};
inline constexpr std::array kFeatures{
    Feature::plain,           Feature::large_logits,  Feature::causal_bottom_right,
    Feature::causal_top_left, Feature::window,        Feature::cross_lengths,
    Feature::empty_rows,      Feature::grouped_heads, Feature::stacked_heads,
    Feature::ragged,          Feature::softcap,       Feature::alibi,
    Feature::sinks,           Feature::dropout,       Feature::scale_zero,
    Feature::scale_negative,  Feature::all_but_bias,  Feature::bias,
    Feature::bias_gradient,   Feature::dlse,          Feature::no_lse,
    Feature::strided,         Feature::slots,         Feature::pages,
};

/// "causal_top_left", "dlse", ...
const char* name_of(Feature feature);

/// True if this feature puts the keys into a cache.
constexpr bool in_cache(Feature feature) { return feature == Feature::slots || feature == Feature::pages; }

/// True if this feature affects a pass. dlse and bias_gradient are inputs of the backward, no_lse and the caches of the
/// forward.
bool applies_to(Feature feature, Pass pass);

struct FeatureCase {
    Feature feature = Feature::plain;
    bool padded = false;  ///< no kernel is compiled for head_dim or head_dim_v, or the two differ in an unusual way
    Case which;           ///< the case, with an id such as "dlse/bf16/192x128/wide"
};

/// Returns every combination of feature, dtype, head_dim (with one head_dim_v that differs) and size. The sizes are
/// several tiles of queries, several blocks of keys, a row longer than any that counts as short, and one tile. The
/// numbers of queries and keys depend on the seed.
std::vector<FeatureCase> feature_cases(std::uint64_t seed);

/// The support of a Problem by a kernel on this machine.
struct Support {
    bool supported = false;
    bool unavailable = false;  ///< its device is missing, which says nothing about the Problem
    std::string reason;        ///< the reason for refusing the Problem or failing to run it
    std::string shape;         ///< the compiled shape that runs it
};
Support support_of(const KernelInfo& kernel, const Problem& problem);

/// A selected case and the kernels that run it.
struct SelectedCase {
    FeatureCase item;
    std::vector<const KernelInfo*> kernels;
};

/// Selects enough of feature_cases() that each kernel gets two cases for every compiled shape, feature and dtype that
/// it supports, and one with a padded head_dim. Kernels of one shape get one. Kernels without their device get none.
/// `only` selects one feature.
std::vector<SelectedCase> select_feature_cases(std::uint64_t seed, const std::vector<const KernelInfo*>& kernels,
                                               std::optional<Feature> only = {});

}  // namespace tessera::check
