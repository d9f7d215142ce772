// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace tessera::learn {

/// A number as people write it, or a sum over a few: "12", "1,024", "12 582 912", "23/16", "2^20", "1.5e3", "12*16",
/// "(4 + 8) × 2". Operators are + - * / ^ and brackets, with ×, ·, ÷ and an x between spaces too. Thousands are parted
/// by one of , ' _ and a space. Nothing when it is no such text, or not finite.
std::optional<double> number_of(const std::string& text);

/// What follows the number: "12 KB" is "12" and "KB"; the unit is empty where there is none.
struct Quantity {
    std::string number;
    std::string unit;
};
Quantity quantity_of(const std::string& text);

}  // namespace tessera::learn
