// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "learn/lesson.hpp"

namespace tessera::learn {

/// The grade of an answer.
struct Grade {
    bool right = false;
    std::string text;  ///< for a right answer the derivation, for a wrong one its likely cause
};

/// Grades an answer. A number may be an expression (number_of) with its unit. Amounts of bytes may have any unit of
/// bytes; KB, MB and GB count as decimal or binary. For an exercise that asks to explain, the answer is the learner's
/// own verdict after a look at the model answer: yes or no. Throws Error(invalid_argument) naming "answer" for an empty
/// text, a word instead of a number, another unit, or neither yes nor no.
Grade grade_answer(const Exercise& exercise, const std::string& answer);

/// The solution: the answer with its derivation, or the model answer.
std::string solution_of(const Exercise& exercise);

}  // namespace tessera::learn
