// SPDX-License-Identifier: Apache-2.0
//
// Explains, for people and for programs, why no faster backend runs: each backend's verdict and the gain of a better
// one.
#pragma once

#include <string>
#include <vector>

#include "diagnose/gain.hpp"
#include "diagnose/rules.hpp"
#include "session.hpp"

namespace tessera::cli {

/// One sentence: the backend that PyTorch takes, and the first change that would enable the fastest refused one.
std::string verdict_sentence(const diagnose::Explanation& explanation, const diagnose::Call& call);

/// The sentence, then a table of the backends: verdict, PyTorch's words, plain words, the change; then the assumptions.
std::string verdict_text(const diagnose::Explanation& explanation, const diagnose::Call& call, int width);

/// One line for each gain; empty without gains.
std::string gain_text(const std::vector<diagnose::Gain>& gains, int width);

Json json_of(const diagnose::Explanation& explanation);
Json json_of(const diagnose::Gain& gain);

/// The gains of the backends that are faster than the taken one, in their order.
std::vector<diagnose::Gain> gains_of(const diagnose::Explanation& explanation, const diagnose::Call& call, Pass pass,
                                     const diagnose::Measured& measured);

}  // namespace tessera::cli
