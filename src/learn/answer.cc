// SPDX-License-Identifier: Apache-2.0
#include "learn/answer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "tessera/error.hpp"

namespace tessera::learn {
namespace {

std::string trimmed(const std::string& text) {
    const auto begin = text.find_first_not_of(" \t\r\n");
    if (begin == std::string::npos) return "";
    return text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
}

std::string lower(std::string text) {
    for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    return text;
}

/// Letters and digits alone, in lower case: "Flash-Attention 2" is "flashattention2".
std::string bare(const std::string& text) {
    std::string result;
    for (const char c : lower(text)) {
        if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) result += c;
    }
    return result;
}

std::optional<double> plain_number(std::string text) {
    text = trimmed(text);
    if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.erase(0, 1);
    // Commas stand between groups of three digits only: "1,5" is no fifteen.
    for (std::size_t comma = text.find(','); comma != std::string::npos; comma = text.find(',', comma)) {
        const std::size_t digits = std::min(text.find_first_not_of("0123456789", comma + 1), text.size()) - comma - 1;
        if (comma == 0 || digits != 3) return {};
        text.erase(comma, 1);
    }
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || !std::isfinite(value)) return {};
    return value;
}

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::invalid_argument, "answer", fmt::format("expected {}, got \"{}\"", expected, got));
}

double asked_number(const Exercise& exercise, std::string text) {
    const std::string expected = exercise.unit.empty()
                                     ? "a number, such as 3, 0.75 or 3/4"
                                     : fmt::format("a number of {}, such as 3, 0.75 or 3/4", exercise.unit);
    const std::string unit = lower(exercise.unit), given = lower(text);
    if (!unit.empty() && given.size() > unit.size() && given.ends_with(unit))
        text = text.substr(0, text.size() - unit.size());
    else if (exercise.unit == "times" && given.ends_with("x")) text.pop_back();
    const std::optional<double> value = number_of(text);
    if (!value) refuse(expected, text);
    return *value;
}

bool close(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * std::abs(b) + 1e-12; }

/// The right amount in another unit, or with too few digits; else nothing.
std::string nearly(const Exercise& exercise, double value) {
    for (const auto& [unit, bytes, decimal, name] : {std::tuple("MiB", 0x1p20, 1e6, "MB, millions of bytes"),
                                                     std::tuple("GiB", 0x1p30, 1e9, "GB, billions of bytes")}) {
        if (exercise.unit != unit) continue;
        if (close(value, exercise.value * bytes, 1e-3))
            return fmt::format("That is in bytes: a {} is 2^{:.0f} of them.", unit, std::log2(bytes));
        if (close(value, exercise.value * bytes / decimal, 1e-3))
            return fmt::format("That is in {}: a {} is 2^{:.0f} bytes.", name, unit, std::log2(bytes));
    }
    if (exercise.unit.empty() && close(value, exercise.value, 0.01))
        return "But near: give a fraction, or more digits.";
    return "";
}

std::string slip_of(const Exercise& exercise, double value) {
    for (const Slip& one : exercise.slips) {
        if (close(value, one.value, 5e-3)) return one.text;
    }
    return nearly(exercise, value);
}

std::string slip_of(const Exercise& exercise, const std::string& word) {
    for (const Slip& one : exercise.slips) {
        if (bare(one.word) == bare(word)) return one.text;
    }
    return "";
}

}  // namespace

std::optional<double> number_of(const std::string& text) {
    for (const char sign : {'/', '^'}) {
        const std::size_t at = text.find(sign);
        if (at == std::string::npos) continue;
        const auto left = plain_number(text.substr(0, at)), right = plain_number(text.substr(at + 1));
        if (!left || !right) return {};
        const double value = sign == '/' ? *left / *right : std::pow(*left, *right);
        return std::isfinite(value) ? std::optional(value) : std::nullopt;
    }
    return plain_number(text);
}

Judgement judge(const Exercise& exercise, const std::string& answer) {
    const std::string text = trimmed(answer);
    if (text.empty()) refuse(exercise.words.empty() ? "a number" : "a word", text);
    bool right = false;
    std::string slip;
    if (!exercise.words.empty()) {
        right = std::any_of(exercise.words.begin(), exercise.words.end(),
                            [&](const std::string& word) { return bare(word) == bare(text); });
        slip = slip_of(exercise, text);
    } else {
        const double value = asked_number(exercise, text);
        right = close(value, exercise.value, exercise.tolerance);
        slip = slip_of(exercise, value);
    }
    if (right) return {true, fmt::format("Right: {}. {}", exercise.answer, exercise.why)};
    return {false, fmt::format("Not {}.{}{}", text, slip.empty() ? "" : " ", slip)};
}

}  // namespace tessera::learn
