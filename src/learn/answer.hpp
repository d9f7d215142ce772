// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "learn/lesson.hpp"

namespace tessera::learn {

/// A number as people write it: "12", "1,024", "23/16", "2^20", "0.5". Nothing when it is none.
std::optional<double> number_of(const std::string& text);

struct Judgement {
    bool right = false;
    std::string text;  ///< what was right and why; of a wrong answer what it may come from, and not the right one
};

/// Throws Error(invalid_argument) naming "answer" for what is no answer of this kind: an empty text, a word where a
/// number is asked for, another unit.
Judgement judge(const Exercise& exercise, const std::string& answer);

}  // namespace tessera::learn
