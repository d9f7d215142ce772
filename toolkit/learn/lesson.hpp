// SPDX-License-Identifier: Apache-2.0
//
// The fourteen lessons of docs/learn as data: their titles and exercises. Answers come from the schedules, the model,
// the example by hand and the readers of names; none is typed here. The pages and `tessera learn` both take them from
// here.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::learn {

/// A wrong answer that people arrive at, and what it means.
struct Slip {
    double value = 0;
    std::string text;
    std::string word{};  ///< where a word is asked for
};

struct Exercise {
    std::string task;    ///< with every number that it needs
    std::string unit{};  ///< of the answer: "MiB"; empty: a number without one, or words
    double value = 0;
    double tolerance = 1e-3;           ///< relative: how far an answer may be from `value`
    std::vector<std::string> words{};  ///< accepted words; when there are any, no number is asked for
    std::string answer;                ///< as it is told: "23/16"
    std::string why;                   ///< the way to it
    std::vector<Slip> slips{};
};

struct Lesson {
    int number = 0;
    int part = 0;
    const char* slug;  ///< its page is docs/learn/SLUG.md, its picture docs/learn/SLUG.svg
    const char* title;
    Exercise (*exercise)();
};

/// In order.
std::span<const Lesson> lessons();

/// "Why attention waits"
const char* part_title(int part);

/// The lesson of this number. Throws Error(invalid_argument) naming "lesson".
const Lesson& lesson(int number);

// The exercises, in the order of the lessons; each stands beside those of its part.
Exercise traffic_exercise();
Exercise scratchpad_exercise();
Exercise matrix_exercise();
Exercise reorder_exercise();
Exercise tile_size_exercise();
Exercise running_maximum_exercise();
Exercise one_tile_exercise();
Exercise backward_exercise();
Exercise causal_exercise();
Exercise loops_exercise();
Exercise overlap_exercise();
Exercise kernel_name_exercise();
Exercise family_exercise();
Exercise prediction_exercise();

}  // namespace tessera::learn
