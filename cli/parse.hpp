// SPDX-License-Identifier: Apache-2.0
//
// Parses the text of an option. Every function throws UsageError naming the option, what was expected and what came.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "session.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cli {

[[noreturn]] inline void unexpected(const std::string& option, const std::string& expected, std::string_view got) {
    throw UsageError(option, fmt::format("expected {}, got \"{}\"", expected, got));
}

/// Parses a whole number >= 0: 8192, 8_192, 8k (8 * 1024), 1M (2^20), 1e4.
std::int64_t parse_size(const std::string& option, std::string_view text);
std::uint64_t parse_seed(const std::string& option, std::string_view text);
double parse_number(const std::string& option, std::string_view text);

/// Splits "a,b,c" into its parts; an empty part is an error.
std::vector<std::string> parse_list(const std::string& option, std::string_view text);

/// Throws for a list of sizes that may be one number with thousands separators: "8,192".
void expect_no_thousands(const std::string& option, std::string_view text);

/// Throws for a list of heads that may be query heads and the key heads that groups of them share: "32,8" for 32/8.
void expect_no_grouped_heads(const std::string& option, std::string_view text);

/// The name that people also write for a value: "bfloat16" is bf16, "fwd" is forward, "H100" is h100.
std::string usual_name(std::string_view text);

/// The name that is nearest to a mistyped text, by at most two letters; empty: none.
std::string nearest_of(std::string_view text, const std::vector<std::string>& names);

/// Throws for a value that is none of these names, and names the nearest.
[[noreturn]] void expected_one_of(const std::string& option, const std::vector<std::string>& names,
                                  std::string_view got);

/// Throws if a value of the list `text` came before, because its answer would appear twice.
template <class T>
void expect_each_once(const std::string& option, std::string_view text, const std::vector<T>& values) {
    for (std::size_t i = 1; i < values.size(); ++i) {
        const auto here = values.begin() + static_cast<std::ptrdiff_t>(i);
        if (std::find(values.begin(), here, *here) != here) unexpected(option, "each value once", text);
    }
}

/// Throws for a text with control characters, such as a newline.
void expect_one_line(const std::string& option, std::string_view text);

/// Parses "A/B" or "A" as a pair; the second value defaults to the first.
std::pair<std::int64_t, std::int64_t> parse_pair(const std::string& option, std::string_view text, char separator);

/// Parses one of a few names.
template <class T>
T parse_choice(const std::string& option, std::string_view text,
               const std::vector<std::pair<const char*, T>>& choices) {
    std::vector<std::string> names;
    for (const auto& [name, value] : choices) {
        if (text == name || usual_name(text) == name) return value;
        names.emplace_back(name);
    }
    expected_one_of(option, names, text);
}

/// Parses the name of a schedule; `choices` are further values, such as "auto".
template <class T>
T parse_schedule(const std::string& option, std::string_view text,
                 std::vector<std::pair<const char*, T>> choices = {}) {
    for (const Schedule schedule : kSchedules) choices.emplace_back(name_of(schedule), schedule);
    return parse_choice<T>(option, text, choices);
}

/// Returns "standard, fa1": every schedule, or those with kernels on a backend.
std::string schedule_names(std::optional<Backend> backend = {});

}  // namespace tessera::cli
