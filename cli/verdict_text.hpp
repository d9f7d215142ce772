// SPDX-License-Identifier: Apache-2.0
//
// "Why not a faster one" for a person and for programs: the verdict of every backend, and what a better one would gain.
#pragma once

#include <string>
#include <vector>

#include "diagnose/gain.hpp"
#include "diagnose/rules.hpp"
#include "session.hpp"

namespace tessera::cli {

/// One sentence: which backend PyTorch takes, and the first cure of the fastest one that it keeps out.
std::string verdict_sentence(const diagnose::Explanation& explanation, const diagnose::Call& call);

/// The sentence, then a table of the backends: verdict, PyTorch's words, plain ones, the cure; then what was assumed.
std::string verdict_text(const diagnose::Explanation& explanation, const diagnose::Call& call, int width);

/// One line for each gain; empty without any.
std::string gain_text(const std::vector<diagnose::Gain>& gains, int width);

Json json_of(const diagnose::Explanation& explanation);
Json json_of(const diagnose::Gain& gain);

/// The gains of the backends that are faster than the taken one, in their order.
std::vector<diagnose::Gain> gains_of(const diagnose::Explanation& explanation, const diagnose::Call& call, Pass pass,
                                     const diagnose::Measured& measured);

}  // namespace tessera::cli
