// SPDX-License-Identifier: Apache-2.0
//
// Restricts the evidence of a reading to parts of the kernel's name, in the name's own spelling.
#include <algorithm>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::string_view kGap = "...";
constexpr std::string_view kOr = " / ";
constexpr std::size_t kLongestQuote = 80;

/// Splits at each `separator`.
std::vector<std::string_view> pieces_of(std::string_view text, std::string_view separator) {
    std::vector<std::string_view> pieces;
    while (true) {
        const std::size_t at = text.find(separator);
        pieces.push_back(text.substr(0, at));
        if (at == std::string_view::npos) return pieces;
        text.remove_prefix(at + separator.size());
    }
}

/// "fmhaSm...Kernel_Q" in the spelling of `name`; empty unless all its pieces stand in `name`, in this order.
std::string as_spelled(std::string_view name, const std::string& lower, std::string_view pattern) {
    std::string quote;
    std::size_t from = 0;
    for (const std::string_view piece : pieces_of(pattern, kGap)) {
        const std::size_t at = lower.find(lower_case(piece), from);
        if (at == std::string::npos) return "";
        quote += (quote.empty() ? "" : std::string(kGap)) + std::string(name.substr(at, piece.size()));
        from = at + piece.size();
    }
    return quote;
}

/// The first of the alternatives "a / b" that stands in `name`; empty: none does.
std::string first_spelled(std::string_view name, std::string_view alternatives) {
    const std::string lower = lower_case(name);
    for (const std::string_view pattern : pieces_of(alternatives, kOr)) {
        if (std::string quote = as_spelled(name, lower, pattern); !quote.empty()) return quote;
    }
    return "";
}

}  // namespace

void quote_only_the_name(NameReading& reading, std::string_view name, std::string_view normalised_name) {
    for (std::string& evidence : reading.evidence) {
        if (evidence.empty() || evidence.front() != '"') continue;
        const std::size_t end = evidence.find('"', 1);
        if (end == std::string::npos) continue;
        const std::string alternatives = evidence.substr(1, end - 1);
        std::string rest = evidence.substr(end + 1);
        std::string quote = first_spelled(name, alternatives);
        if (quote.empty()) {
            quote = first_spelled(normalised_name, alternatives);
            if (quote.empty()) quote = std::string(function_of(normalised_name).substr(0, kLongestQuote));
            const std::size_t in_name = rest.find("in the name");
            if (!contains(name, quote) && in_name != std::string::npos) rest.insert(in_name + 7, "demangled ");
        }
        evidence = "\"" + quote + "\"" + rest;
    }
}

}  // namespace tessera::diagnose
