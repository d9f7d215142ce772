// SPDX-License-Identifier: Apache-2.0
#include "length_distribution.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "parse.hpp"

namespace tessera::cli {
namespace {

struct Distribution {
    const char* name;
    /// The length at a probability, in means.
    double (*quantile)(double probability);
};

constexpr Distribution kDistributions[] = {{"exp", [](double p) { return -std::log1p(-p); }},
                                           {"uniform", [](double p) { return 2 * p; }}};

const Distribution* distribution_named(const std::string& name) {
    for (const Distribution& one : kDistributions)
        if (name == one.name) return &one;
    return nullptr;
}

}  // namespace

bool is_distribution(const std::string& text) {
    const std::size_t colon = text.find(':');
    return colon != std::string::npos && distribution_named(text.substr(0, colon)) != nullptr;
}

std::vector<std::int64_t> lengths_of_distribution(const std::string& option, const std::string& text) {
    const std::size_t first = text.find(':'), second = text.find(':', first + 1);
    if (second == std::string::npos) unexpected(option, "exp:MEAN:TOTAL or uniform:MEAN:TOTAL", text);
    const Distribution& distribution = *distribution_named(text.substr(0, first));
    const std::int64_t mean = parse_size(option, std::string_view(text).substr(first + 1, second - first - 1));
    const std::int64_t total = parse_size(option, std::string_view(text).substr(second + 1));
    constexpr std::int64_t kMostRows = std::int64_t{1} << 32, kMostSequences = 65536;
    if (mean < 1 || total < mean || total > kMostRows) unexpected(option, "1 <= MEAN <= TOTAL <= 2^32", text);
    const std::int64_t count = (total + mean / 2) / mean;
    if (count > kMostSequences) unexpected(option, fmt::format("at most {} sequences", kMostSequences), text);
    std::vector<double> quantiles;
    double sum = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        quantiles.push_back(distribution.quantile((static_cast<double>(i) + 0.5) / static_cast<double>(count)));
        sum += quantiles.back();
    }
    // Each sequence ends where the sum of the quantiles so far ends, so that the rounded lengths add up.
    std::vector<std::int64_t> lengths;
    double before = 0;
    std::int64_t end = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        before += quantiles[static_cast<std::size_t>(i)];
        const std::int64_t left = count - 1 - i;  // each of these has a row at least
        const auto wanted = std::llround(before / sum * static_cast<double>(total));
        const std::int64_t next = left == 0 ? total : std::clamp<std::int64_t>(wanted, end + 1, total - left);
        lengths.push_back(next - end);
        end = next;
    }
    return lengths;
}

}  // namespace tessera::cli
