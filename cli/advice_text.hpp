// SPDX-License-Identifier: Apache-2.0
//
// Explains why the calls of a trace do not use a faster backend.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Returns sentences for the paragraph: the rule that kept out the best of the faster backends, and its predicted gain.
std::string advice_sentences(const diagnose::Advice& advice);

/// Returns a line for each faster backend and each rule that refused it, and the gains.
std::string advice_text(const diagnose::Advice& advice, int width);

Json json_of(const diagnose::Advice& advice);

}  // namespace tessera::cli
