// SPDX-License-Identifier: Apache-2.0
//
// Texts of `tessera learn`: the list with the learner's saved answers, what comes next, and exercises.
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

/// The text wrapped at the terminal's width; a line that begins with a space stays as it is.
std::string wrapped_lines(const std::string& text);

/// An exercise with its name and kind, as text or JSON; without its answer.
std::string exercise_text(const learn::ExerciseId& id, const learn::Exercise& exercise);
Json exercise_json(const learn::ExerciseId& id, const learn::Exercise& exercise);

}  // namespace tessera::cli
