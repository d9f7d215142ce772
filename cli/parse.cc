// SPDX-License-Identifier: Apache-2.0
#include "parse.hpp"

#include <charconv>

namespace tessera::cli {
namespace {

template <class T>
T parse_whole(const std::string& option, std::string_view text, const char* expected) {
    T value{};
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc() || end != text.data() + text.size() || text.front() == '-')
        unexpected(option, expected, text);
    return value;
}

}  // namespace

std::int64_t parse_size(const std::string& option, std::string_view text) {
    return parse_whole<std::int64_t>(option, text, "a whole number from 0 to 2^63 - 1");
}

std::uint64_t parse_seed(const std::string& option, std::string_view text) {
    return parse_whole<std::uint64_t>(option, text, "a whole number from 0 to 2^64 - 1");
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
