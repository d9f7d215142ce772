// SPDX-License-Identifier: Apache-2.0
#include "learn/expression.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

namespace tessera::learn {
namespace {

constexpr std::size_t kLongest = 200;  // characters; brackets are read by recursion

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/// Replaces typographic signs by those of a keyboard.
std::string in_ascii(std::string text) {
    static constexpr std::pair<std::string_view, std::string_view> kSigns[] = {
        {"\u00d7", "*"}, {"\u00b7", "*"}, {"\u22c5", "*"}, {"\u00f7", "/"}, {"\u2212", "-"},
        {"\u00a0", " "}, {"\u2009", " "}, {"\u202f", " "}, {"\t", " "},     {" x ", "*"}};
    for (const auto& [sign, plain] : kSigns) {
        for (std::size_t at = text.find(sign); at != std::string::npos; at = text.find(sign, at + plain.size())) {
            text.replace(at, sign.size(), plain);
        }
    }
    return text;
}

/// sum: [+-] product {(+|-) product}; product: power {(*|/) power}; power: atom [^ [-] atom]; atom: number | ( sum ).
class Reader {
 public:
    explicit Reader(std::string_view text) : rest_(text) {}

    std::optional<double> all() {
        const std::optional<double> value = sum();
        skip_spaces();
        if (!value || !rest_.empty() || !std::isfinite(*value)) return {};
        return value;
    }

 private:
    void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size())); }

    bool takes(char c) {
        skip_spaces();
        if (!rest_.starts_with(c)) return false;
        rest_.remove_prefix(1);
        return true;
    }

    std::optional<double> sum() {
        const bool negative = takes('-');
        if (!negative) takes('+');
        std::optional<double> value = product();
        if (value && negative) value = -*value;
        while (value) {
            const bool minus = takes('-');
            if (!minus && !takes('+')) break;
            const std::optional<double> next = product();
            value = next ? std::optional(minus ? *value - *next : *value + *next) : std::nullopt;
        }
        return value;
    }

    std::optional<double> product() {
        std::optional<double> value = power();
        while (value) {
            const bool over = takes('/');
            if (!over && !takes('*')) break;
            const std::optional<double> next = power();
            value = next ? std::optional(over ? *value / *next : *value * *next) : std::nullopt;
        }
        return value;
    }

    std::optional<double> power() {
        const std::optional<double> base = atom();
        if (!base || !takes('^')) return base;
        const bool negative = takes('-');
        const std::optional<double> exponent = atom();
        if (!exponent) return {};
        return std::pow(*base, negative ? -*exponent : *exponent);
    }

    std::optional<double> atom() {
        if (!takes('(')) return number();
        const std::optional<double> value = sum();
        return value && takes(')') ? value : std::nullopt;
    }

    std::size_t digits(std::size_t from) const {
        std::size_t count = 0;
        while (from + count < rest_.size() && is_digit(rest_[from + count])) ++count;
        return count;
    }

    std::optional<double> number() {
        skip_spaces();
        std::size_t length = digits(0);
        std::string plain(rest_.substr(0, length));
        const bool may_group =
            length >= 1 && length <= 3 && length < rest_.size() && rest_[0] != '0';  // "0,176" is not 176
        const char separator = may_group ? rest_[length] : '\0';
        if (separator == ',' || separator == '\'' || separator == '_' || separator == ' ') {
            // Groups have three digits, so "1,5" is not fifteen.
            while (length < rest_.size() && rest_[length] == separator && digits(length + 1) == 3) {
                plain += rest_.substr(length + 1, 3);
                length += 4;
            }
        }
        if (const std::size_t behind = digits(length + 1); rest_.substr(length).starts_with('.') && behind > 0) {
            plain += rest_.substr(length, 1 + behind);
            length += 1 + behind;
        }
        length += exponent(length, plain);
        rest_.remove_prefix(length);
        double value = 0;
        const auto [stop, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value);
        if (error != std::errc() || stop != plain.data() + plain.size()) return {};
        return value;
    }

    /// The length of an exponent such as "e-3" at `at`, which is added to `plain`; 0 if there is none.
    std::size_t exponent(std::size_t at, std::string& plain) const {
        if (plain.empty() || at >= rest_.size() || (rest_[at] != 'e' && rest_[at] != 'E')) return 0;
        const bool sign = at + 1 < rest_.size() && (rest_[at + 1] == '-' || rest_[at + 1] == '+');
        const std::size_t count = digits(at + 1 + (sign ? 1 : 0));
        if (count == 0) return 0;
        plain += 'e';
        if (rest_[at + 1] == '-') plain += '-';
        plain += rest_.substr(at + 1 + (sign ? 1 : 0), count);
        return 1 + (sign ? 1 : 0) + count;
    }

    std::string_view rest_;
};

}  // namespace

std::optional<double> number_of(const std::string& text) {
    if (text.size() > kLongest) return {};
    return Reader(in_ascii(text)).all();
}

Quantity quantity_of(const std::string& text) {
    std::size_t end = text.size();
    while (end > 0 && (is_letter(text[end - 1]) || text[end - 1] == '%')) --end;
    return {text.substr(0, end), text.substr(end)};
}

}  // namespace tessera::learn
