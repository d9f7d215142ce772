// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "learn/lesson.hpp"

namespace tessera::learn {

struct Judgement {
    bool right = false;
    std::string text;  ///< what was right and why; of a wrong answer what it may come from, and not the right one
};

/// A number may be an expression (number_of) with its unit; amounts of bytes may come in any unit of them, and KB, MB
/// and GB count as either of what people mean by them. Throws Error(invalid_argument) naming "answer" for what is no
/// answer of this kind: an empty text, a word where a number is asked for, another unit.
Judgement judge(const Exercise& exercise, const std::string& answer);

}  // namespace tessera::learn
