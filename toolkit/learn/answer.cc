// SPDX-License-Identifier: Apache-2.0
#include "learn/answer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

#include "learn/expression.hpp"
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

/// Keeps only letters and digits, in lower case: "Flash-Attention 2" becomes "flashattention2".
std::string bare(const std::string& text) {
    std::string result;
    for (const char c : lower(text)) {
        if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) result += c;
    }
    return result;
}

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::invalid_argument, "answer", fmt::format("expected {}, got \"{}\"", expected, got));
}

/// The bytes of a unit. `also` is the unit's other meaning (KB for KiB), or equal if it has one meaning.
struct ByteUnit {
    const char* name;
    double bytes;
    double also;
};
constexpr ByteUnit kByteUnits[] = {{"b", 1, 1},
                                   {"byte", 1, 1},
                                   {"bytes", 1, 1},
                                   {"kb", 1e3, 0x1p10},
                                   {"kib", 0x1p10, 0x1p10},
                                   {"mb", 1e6, 0x1p20},
                                   {"mib", 0x1p20, 0x1p20},
                                   {"gb", 1e9, 0x1p30},
                                   {"gib", 0x1p30, 0x1p30},
                                   {"tb", 1e12, 0x1p40},
                                   {"tib", 0x1p40, 0x1p40}};

const ByteUnit* byte_unit(const std::string& name) {
    const auto* found = std::find_if(std::begin(kByteUnits), std::end(kByteUnits),
                                     [&](const ByteUnit& unit) { return unit.name == name; });
    return found == std::end(kByteUnits) ? nullptr : found;
}

bool same_unit(const std::string& asked, const std::string& given) {
    if (given.empty() || given == asked || given + "s" == asked) return true;
    return asked == "times" && (given == "x" || given == "fold");
}

/// One possible value of an answer in the requested unit, with the assumption that leads to it.
struct Reading {
    double value;
    std::string assumption{};
};

std::vector<Reading> readings_of(const Exercise& exercise, const std::string& text) {
    const std::string expected = (exercise.unit.empty() ? "a number" : fmt::format("a number of {}", exercise.unit)) +
                                 ", such as 3, 0.75, 3/4 or 12*16";
    const Quantity quantity = quantity_of(text);
    const std::optional<double> value = number_of(quantity.number);
    if (!value) {
        const bool comma = text.find(',') != std::string::npos;
        refuse(expected + (comma ? " (a point before decimals, a comma between thousands)" : ""), text);
    }
    const std::string asked = lower(exercise.unit), given = lower(quantity.unit);
    if (same_unit(asked, given)) return {{*value}};
    const ByteUnit *from = byte_unit(given), *to = byte_unit(asked);
    if (from == nullptr || to == nullptr) refuse(expected, text);
    std::vector<Reading> readings{{*value * from->bytes / to->bytes}};
    if (from->also != from->bytes) {
        readings.push_back({*value * from->also / to->bytes,
                            fmt::format(" (Taking {} for {}iB, which is 2^{:.0f} bytes.)", quantity.unit,
                                        static_cast<char>(given[0] - 'a' + 'A'), std::log2(from->also))});
    }
    return readings;
}

bool close(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance * std::abs(b) + 1e-12; }

/// The reply for a right amount in another unit or with too few digits; otherwise empty.
std::string near_miss(const Exercise& exercise, double value) {
    for (const auto& [unit, bytes, decimal, name] : {std::tuple("MiB", 0x1p20, 1e6, "MB, millions of bytes"),
                                                     std::tuple("GiB", 0x1p30, 1e9, "GB, billions of bytes")}) {
        if (exercise.unit != unit) continue;
        if (close(value, exercise.value * bytes, 1e-3))
            return fmt::format("That is in bytes: a {} is 2^{:.0f} of them.", unit, std::log2(bytes));
        if (close(value, exercise.value * bytes / decimal, 1e-3))
            return fmt::format("That is in {}: a {} is 2^{:.0f} bytes.", name, unit, std::log2(bytes));
    }
    if (exercise.unit.empty() && close(value, exercise.value, 0.01))
        return "It is close: give a fraction, or more digits.";
    return "";
}

std::string mistake_of(const Exercise& exercise, double value) {
    for (const Mistake& one : exercise.mistakes) {
        if (close(value, one.value, 5e-3)) return one.text;
    }
    return near_miss(exercise, value);
}

std::string mistake_of(const Exercise& exercise, const std::string& word) {
    for (const Mistake& one : exercise.mistakes) {
        if (bare(one.word) == bare(word)) return one.text;
    }
    return "";
}

/// The learner's own verdict on an explanation.
Grade verdict_of(const std::string& text) {
    const std::string word = bare(text);
    if (word == "yes" || word == "y") return {true, "Right: your own words count."};
    if (word == "no" || word == "n") return {false, "It will be asked again."};
    refuse("yes or no: did your explanation say what the model answer says?", text);
}

}  // namespace

std::string solution_of(const Exercise& exercise) {
    if (exercise.kind == Kind::explain) return exercise.answer;
    return fmt::format("{}. {}", exercise.answer, exercise.why);
}

Grade grade_answer(const Exercise& exercise, const std::string& answer) {
    const std::string text = trimmed(answer);
    if (exercise.kind == Kind::explain) return verdict_of(text);
    if (text.empty()) refuse(exercise.words.empty() ? "a number" : "a word", text);
    bool right = false;
    std::string mistake, assumption;
    if (!exercise.words.empty()) {
        right = std::any_of(exercise.words.begin(), exercise.words.end(),
                            [&](const std::string& word) { return bare(word) == bare(text); });
        mistake = mistake_of(exercise, text);
    } else {
        const std::vector<Reading> readings = readings_of(exercise, text);
        const auto fits = std::find_if(readings.begin(), readings.end(), [&](const Reading& one) {
            return close(one.value, exercise.value, exercise.tolerance);
        });
        right = fits != readings.end();
        if (right) assumption = fits->assumption;
        else mistake = mistake_of(exercise, readings.front().value);
    }
    if (right) {
        const std::string run = exercise.command.empty() ? "" : "\nNow run it: " + exercise.command;
        return {true, fmt::format("Right: {}.{} {}{}", exercise.answer, assumption, exercise.why, run)};
    }
    return {false, fmt::format("Not {}.{}{}", text, mistake.empty() ? "" : " ", mistake)};
}

}  // namespace tessera::learn
