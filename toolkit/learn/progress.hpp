// SPDX-License-Identifier: Apache-2.0
//
// A learner's progress: every answer ever given, in one file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "learn/lesson.hpp"

namespace tessera::learn {

/// A saved answer.
struct SavedAnswer {
    std::string exercise;  ///< ExerciseId::saved(): "one-tile b"
    std::string answer;    ///< as typed; kShown if the solution was shown instead
    bool right = false;
    std::string at{};  ///< UTC: "2026-11-22T21:40:00Z"
};

/// The answer that stands for "show me": it is not right.
inline constexpr const char* kShown = "(shown)";

/// Wrong answers after which the solution may be shown.
inline constexpr int kMissesBeforeSolution = 2;

/// $XDG_STATE_HOME/tessera/learn.json, or ~/.local/state/tessera/learn.json; nothing if neither is an absolute path.
std::optional<std::string> progress_path();

/// Reads all answers, oldest first; none if there is no file. An entry with a "lesson" and no "exercise" is of the
/// first edition of the lessons, which had other numbers: it counts if its exercise is still asked, and is passed over
/// otherwise. Throws Error(cannot_open). Throws Error(bad_data) naming the file if add_answer() did not write it; the
/// file is left unchanged.
std::vector<SavedAnswer> read_progress(const std::string& path);

/// Adds one answer and keeps all others, including those that another process adds meanwhile. The file is replaced
/// atomically. Throws as read_progress() does, and Error(cannot_write).
void add_answer(const std::string& path, SavedAnswer given);

/// The exercise that lesson `lesson` of the first edition (1 to 14, one exercise each) asked, as ExerciseId::saved();
/// empty if nothing asks it any more.
std::string exercise_of_first_edition(int lesson);

/// What the answers say about one exercise.
struct Standing {
    int tries = 0;       ///< answers up to the first right one, or all if none is right
    int misses = 0;      ///< wrong answers before the first right one, or all of them
    bool done = false;   ///< ever answered right
    bool again = false;  ///< missed, and answered right less than twice since the last miss
};
Standing standing_of(const std::vector<SavedAnswer>& given, const ExerciseId& exercise);

/// True if every exercise of the lesson was ever answered right.
bool done(const std::vector<SavedAnswer>& given, const Lesson& lesson);

/// The missed exercises of all lessons that are to be asked again, in the order of the lessons.
std::vector<ExerciseId> missed_exercises(const std::vector<SavedAnswer>& given);

}  // namespace tessera::learn
