// SPDX-License-Identifier: Apache-2.0
//
// "Why not a faster one" of a trace's calls.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Sentences for the paragraph: what kept the best of the faster backends out, and what it would gain.
std::string advice_sentences(const diagnose::Advice& advice);

/// A line for each faster backend and each rule that refused it, and the gains.
std::string advice_text(const diagnose::Advice& advice, int width);

Json json_of(const diagnose::Advice& advice);

}  // namespace tessera::cli
