// SPDX-License-Identifier: Apache-2.0
//
// A learner's standing, from all answers: which exercises are done, and which come again.
#pragma once

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

/// The exercise that lesson `lesson` of the first edition (1 to 14, one exercise each) asked, as ExerciseId::saved();
/// empty if nothing asks it any more.
std::string exercise_of_first_edition(int lesson);

/// The standing of one exercise.
struct Standing {
    int tries = 0;       ///< answers up to the first right one, or all if none is right
    int misses = 0;      ///< wrong answers before the first right one, or all of them
    bool done = false;   ///< ever answered right
    bool again = false;  ///< missed, and answered right less than twice since the last miss
};
Standing standing_of(const std::vector<SavedAnswer>& given, const ExerciseId& exercise);

/// True if every exercise of the lesson was ever answered right.
bool done(const std::vector<SavedAnswer>& given, const Lesson& lesson);

/// The missed exercises that are to be asked again: of the lessons in their order, of the recaps, of the exam.
std::vector<ExerciseId> missed_exercises(const std::vector<SavedAnswer>& given);

}  // namespace tessera::learn
