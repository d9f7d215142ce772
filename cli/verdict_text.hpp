// SPDX-License-Identifier: Apache-2.0
//
// Shows as text and JSON why no faster backend runs: the verdict of every backend, and the gain of the faster ones.
#pragma once

#include <string>
#include <vector>

#include "diagnose/gain.hpp"
#include "diagnose/rules.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Returns one sentence: the backend that PyTorch takes, and the first remedy for the fastest one that it excludes.
std::string verdict_sentence(const diagnose::Explanation& explanation, const diagnose::Call& call);

/// Returns the sentence, then a table of the backends with verdict, PyTorch's text, its meaning and remedy, then the
/// assumptions.
std::string verdict_text(const diagnose::Explanation& explanation, const diagnose::Call& call, int width);

/// Returns one line for each gain; empty without any.
std::string gain_text(const std::vector<diagnose::Gain>& gains, int width);

Json json_of(const diagnose::Explanation& explanation);
Json json_of(const diagnose::Gain& gain);

/// Returns the gains of the backends that are faster than the taken one, in their order.
std::vector<diagnose::Gain> gains_of(const diagnose::Explanation& explanation, const diagnose::Call& call, Pass pass,
                                     const diagnose::Measured& measured);

}  // namespace tessera::cli
