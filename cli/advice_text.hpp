// SPDX-License-Identifier: Apache-2.0
//
// Texts that explain why a trace's calls did not run a faster kernel.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Sentences for the paragraph: why the best of the faster backends was refused, and its predicted gain.
std::string advice_sentences(const diagnose::Advice& advice);

/// One line for each faster backend and each rule that refused it, and the gains.
std::string advice_text(const diagnose::Advice& advice, int width);

Json json_of(const diagnose::Advice& advice);

}  // namespace tessera::cli
