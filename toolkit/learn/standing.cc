// SPDX-License-Identifier: Apache-2.0
#include "learn/standing.hpp"

#include <algorithm>
#include <iterator>

#include "learn/quiz.hpp"

namespace tessera::learn {

std::string exercise_of_first_edition(int lesson) {
    constexpr const char* kExercises[] = {"", "", "matrix a", "same-maths a", "tiles a", "running-maximum a", "",
                                          "", "", "",         "fa3 a",        "which a", "family b",          ""};
    return lesson < 1 || lesson > static_cast<int>(std::size(kExercises)) ? "" : kExercises[lesson - 1];
}

Standing standing_of(const std::vector<SavedAnswer>& given, const ExerciseId& exercise) {
    Standing result;
    bool missed = false;
    int right_since = 0;
    for (const SavedAnswer& one : given) {
        if (one.exercise != exercise.saved()) continue;
        if (!result.done) {
            ++result.tries;
            result.misses += one.right ? 0 : 1;
        }
        result.done = result.done || one.right;
        missed = missed || !one.right;
        right_since = one.right ? right_since + 1 : 0;
    }
    result.again = missed && right_since < 2;
    return result;
}

bool done(const std::vector<SavedAnswer>& given, const Lesson& lesson) {
    const std::vector<ExerciseId> all = exercises_of(lesson);
    return std::all_of(all.begin(), all.end(), [&](const ExerciseId& id) { return standing_of(given, id).done; });
}

std::vector<ExerciseId> missed_exercises(const std::vector<SavedAnswer>& given) {
    std::vector<ExerciseId> result;
    const auto add = [&](const std::vector<ExerciseId>& exercises) {
        std::copy_if(exercises.begin(), exercises.end(), std::back_inserter(result),
                     [&](const ExerciseId& id) { return standing_of(given, id).again; });
    };
    add(all_exercises());
    for (const Quiz& quiz : quizzes()) add(exercises_of(quiz));
    return result;
}

}  // namespace tessera::learn
