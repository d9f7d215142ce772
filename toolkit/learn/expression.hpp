// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace tessera::learn {

/// Evaluates a number as people write it, or an expression of a few: "12", "1,024", "12 582 912", "23/16", "2^20",
/// "1.5e3", "12*16", "(4 + 8) × 2". Operators are + - * / ^ and brackets, also ×, ·, ÷ and an x between spaces. A
/// comma, an apostrophe, _ or a space may separate thousands. Returns nothing if the text is something else or not
/// finite.
std::optional<double> number_of(const std::string& text);

/// A number and the text after it: "12 KB" is "12" and "KB". The unit is empty if there is none.
struct Quantity {
    std::string number;
    std::string unit;
};
Quantity quantity_of(const std::string& text);

}  // namespace tessera::learn
