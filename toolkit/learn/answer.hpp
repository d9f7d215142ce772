// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "learn/lesson.hpp"

namespace tessera::learn {

struct Judgement {
    bool right = false;
    std::string text;  ///< why a right answer is right; for a wrong one its likely cause, without the right answer
};

/// Judges an answer. A number may be an expression (number_of) with its unit. Amounts of bytes may have any unit of
/// bytes; KB, MB and GB count as decimal or binary. Throws Error(invalid_argument) naming "answer" for an empty text, a
/// word instead of a number, or another unit.
Judgement judge(const Exercise& exercise, const std::string& answer);

}  // namespace tessera::learn
