// SPDX-License-Identifier: Apache-2.0
#include "parse.hpp"

#include <fmt/ranges.h>

#include <charconv>
#include <limits>
#include <numeric>

namespace tessera::cli {
namespace {

template <class T>
T parse_whole(const std::string& option, std::string_view text, const char* expected, std::string_view got) {
    T value{};
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc() || end != text.data() + text.size() || text.front() == '-')
        unexpected(option, expected, got);
    return value;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The least number of insertions, deletions and changes.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
        std::size_t before = row[0]++;
        for (std::size_t j = 0; j < b.size(); ++j) {
            const std::size_t change = before + (a[i] == b[j] ? 0 : 1);
            before = row[j + 1];
            row[j + 1] = std::min({change, row[j] + 1, before + 1});
        }
    }
    return row.back();
}

}  // namespace

std::string usual_name(std::string_view text) {
    std::string lower(text);
    for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
        {"bfloat16", "bf16"}, {"float16", "fp16"},           {"half", "fp16"},   {"float32", "fp32"},
        {"float", "fp32"},    {"float64", "fp64"},           {"double", "fp64"}, {"fwd", "forward"},
        {"bwd", "backward"},  {"mem-efficient", "efficient"}};
    if (lower.starts_with("torch.")) lower.erase(0, 6);  // as PyTorch prints a dtype
    for (const auto& [alias, name] : kAliases) {
        if (lower == alias) return std::string(name);
    }
    return lower;
}

std::string nearest_of(std::string_view text, const std::vector<std::string>& names) {
    constexpr std::size_t kMostLetters = 2, kShortest = 3;  // "roof" suffices for "roofline"
    const std::string typed = usual_name(text);
    std::string nearest;
    std::size_t least = std::min(kMostLetters, typed.size() / 2) + 1;
    for (const std::string& name : names) {
        const bool begun = typed.size() >= kShortest && name.starts_with(typed);
        const std::size_t letters = begun ? 0 : edit_distance(typed, name);
        if (letters < least) least = letters, nearest = name;
    }
    return nearest;
}

void expected_one_of(const std::string& option, const std::vector<std::string>& names, std::string_view got) {
    const std::string nearest = nearest_of(got, names);
    throw UsageError(option, fmt::format("expected one of {}, got \"{}\"{}", fmt::join(names, ", "), got,
                                         nearest.empty() ? "" : ", perhaps " + nearest));
}

void expect_no_thousands(const std::string& option, std::string_view text) {
    std::string joined;
    bool first = true, thousands = text.find(',') != std::string_view::npos, zero = false;
    for (const std::string& part : parse_list(option, text)) {
        const bool digits = std::all_of(part.begin(), part.end(), is_digit);
        thousands = thousands && digits && (first ? part.size() <= 3 && part[0] != '0' : part.size() == 3);
        zero = zero || (!first && part[0] == '0');
        joined += part;
        first = false;
    }
    constexpr std::size_t kMostDigits = 9;
    if (!thousands || joined.size() > kMostDigits) return;
    std::int64_t odd = std::stoll(joined), twos = 0;
    for (; odd % 2 == 0; odd /= 2) ++twos;
    constexpr std::int64_t kSmallOdd = 15, kManyTwos = 10;  // 8,192 and 12,288, not 128,256
    if (!zero && !(twos >= kManyTwos && odd <= kSmallOdd)) return;
    throw UsageError(option, fmt::format("expected one number without separators ({}) or values in another order, got "
                                         "\"{}\", which may be both",
                                         joined, text));
}

void expect_no_grouped_heads(const std::string& option, std::string_view text) {
    const std::vector<std::string> parts = parse_list(option, text);
    if (parts.size() != 2 || text.find('/') != std::string_view::npos) return;
    const std::int64_t first = parse_size(option, parts[0]), second = parse_size(option, parts[1]);
    if (second < 1 || first <= second || first % second != 0) return;
    throw UsageError(option,
                     fmt::format("expected {0}/{1} for {0} query heads that share {1} key heads, or {1},{0} for "
                                 "two problems, got \"{2}\"",
                                 first, second, text));
}

std::int64_t parse_size(const std::string& option, std::string_view text) {
    constexpr const char* kExpected = "a whole number from 0 to 2^63 - 1";
    std::string digits;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const bool separates =
            text[i] == '_' && i > 0 && i + 1 < text.size() && is_digit(text[i - 1]) && is_digit(text[i + 1]);
        if (!separates) digits += text[i];
    }
    std::int64_t unit = 1;
    const char last = digits.empty() ? '\0' : digits.back();
    const std::size_t e = digits.find_first_of("eE");
    if (digits.size() > 1 && (last == 'k' || last == 'K' || last == 'M' || last == 'G')) {
        unit = std::int64_t{1} << (last == 'M' ? 20 : last == 'G' ? 30 : 10);
        digits.pop_back();
    } else if (e != std::string::npos && e > 0 && e + 1 < digits.size()) {
        constexpr std::int64_t kMostZeros = 18;
        const auto zeros = parse_whole<std::int64_t>(option, std::string_view(digits).substr(e + 1), kExpected, text);
        if (zeros > kMostZeros) unexpected(option, kExpected, text);
        for (std::int64_t i = 0; i < zeros; ++i) unit *= 10;
        digits.resize(e);
    }
    const auto value = parse_whole<std::int64_t>(option, digits, kExpected, text);
    if (value > std::numeric_limits<std::int64_t>::max() / unit) unexpected(option, kExpected, text);
    return value * unit;
}

std::uint64_t parse_seed(const std::string& option, std::string_view text) {
    return parse_whole<std::uint64_t>(option, text, "a whole number from 0 to 2^64 - 1", text);
}

double parse_number(const std::string& option, std::string_view text) {
    double value = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc() || end != text.data() + text.size()) unexpected(option, "a number", text);
    return value;
}

std::vector<std::string> parse_list(const std::string& option, std::string_view text) {
    std::vector<std::string> parts;
    for (std::string_view rest = text;;) {
        const std::size_t comma = rest.find(',');
        if (rest.substr(0, comma).empty()) unexpected(option, "values with commas between them", text);
        parts.emplace_back(rest.substr(0, comma));
        if (comma == std::string_view::npos) return parts;
        rest.remove_prefix(comma + 1);
    }
}

void expect_one_line(const std::string& option, std::string_view text) {
    const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' '; };
    if (std::any_of(text.begin(), text.end(), is_control)) throw UsageError(option, "expected text on one line");
}

std::pair<std::int64_t, std::int64_t> parse_pair(const std::string& option, std::string_view text, char separator) {
    const std::size_t at = text.find(separator);
    if (at == 0 || at + 1 == text.size()) unexpected(option, fmt::format("N or N{}N", separator), text);
    const std::int64_t first = parse_size(option, text.substr(0, at));
    return {first, at == std::string_view::npos ? first : parse_size(option, text.substr(at + 1))};
}

std::string schedule_names(std::optional<Backend> backend) {
    std::string names;
    for (const Schedule schedule : kSchedules) {
        const auto all = kernels();
        const bool there = std::any_of(all.begin(), all.end(), [&](const KernelInfo& kernel) {
            return kernel.schedule == schedule && kernel.backend == backend;
        });
        if (!backend || there) names += (names.empty() ? "" : ", ") + std::string(name_of(schedule));
    }
    return names;
}

}  // namespace tessera::cli
