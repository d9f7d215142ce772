// SPDX-License-Identifier: Apache-2.0
//
// The lessons of docs/learn as data: their titles and exercises. Schedules, the model, the example by hand and
// the name readers compute every answer; none is typed here. The pages and `tessera learn` share this data.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::learn {

/// A common wrong answer, and the misunderstanding behind it.
struct Mistake {
    double value = 0;
    std::string text;
    std::string word{};  ///< set if the answer is a word
};

struct Exercise {
    std::string task;    ///< with every number that the answer needs
    std::string unit{};  ///< the answer's unit: "MiB"; empty: a plain number, or words
    double value = 0;
    double tolerance = 1e-3;           ///< relative: the largest accepted distance from `value`
    std::vector<std::string> words{};  ///< accepted words; if there are any, the answer is a word
    std::string answer;                ///< the answer in its printed form: "23/16"
    std::string why;                   ///< the derivation
    std::vector<Mistake> mistakes{};
};

struct Lesson {
    int number = 0;
    int part = 0;
    const char* slug;  ///< the page is docs/learn/SLUG.md, the picture docs/learn/SLUG.svg
    const char* title;
    Exercise (*exercise)();
};

/// All lessons in order.
std::span<const Lesson> lessons();

/// The title of a part, such as "Why attention waits".
const char* part_title(int part);

/// The lesson of this number. Throws Error(invalid_argument) naming "lesson".
const Lesson& lesson(int number);

// The exercises, in the order of the lessons; each is defined in the file of its part.
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
Exercise merge_exercise();
Exercise pages_exercise();
Exercise fp8_exercise();
Exercise lazy_rescale_exercise();
Exercise sink_exercise();

}  // namespace tessera::learn
