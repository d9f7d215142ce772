// SPDX-License-Identifier: Apache-2.0
//
// The recaps after the parts, the exam, and its estimates for a model of the learner's. The pages docs/learn/recap.md
// and exam.md have the same questions and answers with links, which tools/learn_pages.py checks.
#pragma once

#include <span>

#include "learn/lesson.hpp"

namespace tessera::learn {

/// A question with a model answer that the learner compares with, or with a number.
struct Question {
    const char* task;
    const char* answer;
    int lesson = 0;               ///< the lesson that has the answer; 0: none
    double value = 0;             ///< the number, if `shown` is set
    const char* shown = nullptr;  ///< the number in its printed form; null: words
};

struct Quiz {
    const char* name;  ///< "recap 1", "exam" or "estimate"
    const char* title;
    std::span<const Question> questions;  ///< none: the estimates of estimate.hpp

    bool estimates() const { return questions.empty(); }
    int count() const;
};

/// The recaps in order, then the exam and its estimates.
std::span<const Quiz> quizzes();

/// The question as an exercise: of kind explain, or compute if the answer is a number.
Exercise exercise_of(const Question& question);

}  // namespace tessera::learn
