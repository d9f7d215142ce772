// SPDX-License-Identifier: Apache-2.0
//
// Shows as text and JSON which backend PyTorch takes, and the verdict on every other one.
#pragma once

#include <string>

#include "diagnose/rules.hpp"
#include "diagnose/ways.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The ways from the backend that is taken to the others.
diagnose::Ways ways_for(const diagnose::Explanation& explanation, const diagnose::Call& call, Pass pass);

/// Returns what PyTorch does, with its error if it raises, and the cheapest way to a faster backend.
std::string verdict_sentence(const diagnose::Explanation& explanation, const diagnose::Ways& ways);

/// Returns the sentence, then a table of the backends with verdict, PyTorch's text and its meaning, then the
/// assumptions.
std::string verdict_text(const diagnose::Explanation& explanation, const diagnose::Ways& ways, int width);

Json json_of(const diagnose::Explanation& explanation);

}  // namespace tessera::cli
