// SPDX-License-Identifier: Apache-2.0
//
// The learner's saved answers, and what they say: the list of `tessera learn`, and what comes next.
#pragma once

#include <string>
#include <vector>

#include "learn/standing.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The answers of the learner's file; none if there is no file.
std::vector<learn::SavedAnswer> kept_answers();

/// "Next: docs/learn/07-one-tile.md, then tessera learn 7", of the first open lesson after `after`; and what was
/// missed.
std::string next_text(const std::vector<learn::SavedAnswer>& given, int after = -1);

/// Prints all lessons and questions with their state.
void print_list(const Session& session);

}  // namespace tessera::cli
